"""The pages of all papers, and the reasons that they keep; the committed pages are those that would be written."""

import json
import re
from pathlib import Path

import paper_tables
import pytest

from bespoke.errors import UserError
from bespoke.tables import plan, reasons, results, sections, site, spec
from bespoke.tables.beside import Reader
from bespoke.tables.page import Page

ROOT = Path(__file__).parents[2]


@pytest.fixture
def table(tmp_path):
    table = paper_tables.make(tmp_path)
    root = tmp_path / "results"
    paper_tables.put(root, table, "easy/ours", 0, 90.0)
    paper_tables.put(root, table, "easy/ditto", 0, 74.0)
    paper_tables.put(root, table, "easy/fedavg", 0, 10.0, seconds=30.0)
    return table


@pytest.fixture
def root(tmp_path, table):
    return tmp_path / "results"


def keep(root, id, reason="It is so.", evidence="results/proof.json"):
    told = evidence if evidence.startswith("[") else f'"{evidence}"'
    (root / "reasons.toml").write_text(f'["{id}"]\nreason = "{reason}"\nevidence = {told}\n')
    (root / "proof.json").write_text("{}")


def pages(root, table):
    out = root.parent / "docs" / "results"
    site.gather(root, [table]).write(out)
    return {path.name: path.read_text() for path in out.iterdir()}


# --- the committed pages --------------------------------------------------------------------------------------------


def test_the_committed_pages_are_those_that_would_be_written():
    """They are never edited by hand: `bespoke table --write docs/results` writes them."""
    folder = ROOT / "docs" / "results"
    written = site.gather(ROOT / "results").files(folder)
    assert {path.name for path in folder.glob("*.md")} == {*written}
    for name, text in written.items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"{name}: run bespoke table --write docs/results"


def test_the_committed_reasons_hold():
    found = site.gather(ROOT / "results")
    found.check()


def test_the_example_of_a_table_in_the_documents_can_be_run(tmp_path):
    blocks = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "docs" / "tables.md").read_text(), re.MULTILINE | re.DOTALL)
    (text,) = (block for block in blocks if "[[row]]" in block)
    folder = tmp_path / "experiments" / "digits"
    (folder / "tables").mkdir(parents=True)
    (folder / "tables" / "t1.toml").write_text(text)
    (folder / "digits.toml").write_text((ROOT / "experiments" / "demo.toml").read_text())
    table = spec.read(folder / "tables" / "t1.toml")
    assert len(plan.jobs(plan.chosen([table]), [0, 1])) == 4
    assert "Dir(0.3)" in Page(Reader(tmp_path).beside(table)).text()


# --- what is on them ------------------------------------------------------------------------------------------------


def test_a_page_for_each_paper_and_a_front_page(root, table):
    found = pages(root, table)
    assert {*found} == {"README.md", "maker.md"}
    far = "| [Maker](maker.md) | 12 | 3 | 0 of 3 | 3 of 6 | 0 | 3 trainings, about 230 s on one NVIDIA H200 |"
    well = "| [Maker](maker.md) | 1 of 3 | 1 of 3 | - | 0 | 0 | 0 | 2 | 1 of 1 | 1 | 0 | 0 | 0 | 0 |"
    assert f"{far}\n" in found["README.md"] and f"{well}\n" in found["README.md"]
    text = found["maker.md"]
    assert "## Table 1: Accuracy by data set\n\nTwo data sets.\n" in text
    agreed = "1 of 3 numbers are within 1 point, 1 within 2; the best method is kept in 1 of 1 columns"
    assert f"{agreed} (1 of them told apart from all others)." in text
    assert "Every number's command: `bespoke report --table maker/t1 -o table.html`." in text
    assert "- Easy: FedAvg -52.5, Ours +13.7. No reason is known yet." in text
    assert "[easy](../../experiments/maker/easy.toml)" in text and "[results](../../results/maker/t1)" in text
    assert "- Hard: `data.alpha=0.1`, `data.replay` = 42 + seed\n- Ours: `algorithm.folds=3`" in text


def test_a_paper_of_which_nothing_was_run_as_told_is_named(tmp_path):
    table = paper_tables.make(tmp_path)
    paper_tables.put(tmp_path / "results", table, "other/ditto", 0, 74.0)  # a stand-in
    left_out = "Left out is [Maker](maker.md): no printed number of it was run as told; its page tells more."
    assert left_out in pages(tmp_path / "results", table)["README.md"]
    paper_tables.put(tmp_path / "results", table, "easy/ditto", 0, 74.0)
    assert "Left out" not in pages(tmp_path / "results", table)["README.md"]


def test_a_best_method_is_told_only_where_one_can_be_judged(tmp_path):
    """The paper's best row was not run."""
    table = paper_tables.make(tmp_path)
    paper_tables.put(tmp_path / "results", table, "easy/ditto", 0, 74.0)
    paper_tables.put(tmp_path / "results", table, "easy/fedavg", 0, 10.0)
    text = pages(tmp_path / "results", table)["maker.md"]
    assert "1 of 2 numbers are within 1 point, 1 within 2.\n" in text and "best method" not in text


def test_a_figure_is_shown_once_it_is_drawn(tmp_path):
    text = paper_tables.TABLE.replace('title = "', 'kind = "figure"\nfigure = "curves"\ntitle = "')
    table = paper_tables.make(tmp_path, text, "maker/f1")
    found = site.gather(tmp_path / "results", [table])
    assert "Draw it with `bespoke figure maker/f1`; 0 of 9 runs are there." in found.files(tmp_path)["maker.md"]
    assert "![" not in found.files(tmp_path)["maker.md"]
    (tmp_path / "maker_f1.png").touch()
    assert "![Table 1](maker_f1.png)" in found.files(tmp_path)["maker.md"]


def test_a_training_is_counted_once(root, table):
    paper_tables.put(root, table, "other/ditto", 0, 60.0)  # of the same settings as easy/ditto
    assert site.gather(root, [table]).as_dict()["seconds"] == {"NVIDIA H200": 230.0}


def test_a_training_side_by_side_with_others_counts_for_its_share(root, table):
    shared = {"device": "NVIDIA H200", "precision": "bf16", "side_by_side": 4}
    paper_tables.put(root, table, "easy/ditto", 0, 74.0, environment=shared)  # 100 s
    text = pages(root, table)["maker.md"]
    assert "\nTraining: 3 trainings, about 155 s on one NVIDIA H200.\n" in text
    entry = table.entry("easy/ditto")
    told = paper_tables.content(entry, 0, [70.0], settings=paper_tables.other_settings(table, entry.id))
    results.write(root, entry, told)  # 100 s; what was there is kept beside it
    results.write(root, entry, paper_tables.content(entry, 0, [74.0], environment=shared))
    text = pages(root, table)["maker.md"]
    now, then = "3 trainings, about 155 s on one NVIDIA H200", "1 training, about 100 s on one NVIDIA H200"
    assert f"\nTraining: {now}; earlier ones with other settings: {then}.\n" in text
    assert "Training of all tables: 4 trainings, about 255 s" in text


def test_how_long_devices_were_held_is_told(root, table):
    assert "what was lost" not in pages(root, table)["README.md"]
    (root / "held.toml").write_text('["A GPU"]\n2026-01-02T03 = 1200\n2026-01-03T04 = 34\n')
    assert "and what was lost, it took one A GPU for at most 1,234 s.\n" in pages(root, table)["README.md"]
    (root / "held.toml").write_text("")
    assert "what was lost" not in pages(root, table)["README.md"]
    (root / "held.toml").write_text('["A GPU"]\n2026-01-02T03 = "long"\n')
    with pytest.raises(UserError, match=r"held.toml: \['A GPU'\] must hold whole numbers of seconds"):
        pages(root, table)


def test_results_with_other_settings_are_told_and_their_time_counts(root, table):
    paper_tables.put(root, table, "hard/ours", 0, 60.0, settings=paper_tables.other_settings(table, "hard/ours"))
    lines = site.gather(root, [table]).text().splitlines()
    assert lines[-2].startswith(
        "1 result was made with other settings than the table has now, or read otherwise, and is left out"
    )
    assert lines[-1] == "4 trainings, about 330 s on one NVIDIA H200"


def test_the_state_of_all_tables(root, table):
    lines = site.gather(root, [table]).text().splitlines()
    assert lines[1].split()[:3] == ["maker/t1", "12", "3"] and lines[2].split()[:3] == ["all", "12", "3"]
    assert lines[5].split()[:4] == ["maker/t1", "1", "of", "3"] and lines[6].split()[:4] == ["all", "1", "of", "3"]
    assert lines[-1] == "3 trainings, about 230 s on one NVIDIA H200"


def test_the_papers_own_method_is_counted_apart(tmp_path):
    """A row with settings of its own is a variant; stand-ins and failures are counted elsewhere."""
    text = paper_tables.TABLE.replace('set = ["algorithm.folds=3"]\n', "")
    table, root = paper_tables.make(tmp_path, text, "pfedfda/t1"), tmp_path / "results"
    paper_tables.put(root, table, "easy/ours", 0, 77.0)
    paper_tables.put(root, table, "hard/ours", 0, 70.0)
    paper_tables.put(root, table, "easy/ditto", 0, 10.0)
    paper_tables.put(root, table, "other/ours", 0, 10.0)
    counts = site.gather(root, [table]).pages[0].counts
    assert (counts.own, counts.own_near, counts.own_spread, counts.marked) == (2, 1, 0, 2)
    for seed, value in enumerate((77.0, 80.0, 83.0)):  # 3.7 points above the published number
        paper_tables.put(root, table, "easy/ours", seed, value)
    counts = site.gather(root, [table]).pages[0].counts
    assert (counts.own, counts.own_near, counts.own_spread, counts.marked) == (2, 1, 1, 2)
    told = "numbers of its own method that are not marked | 2 of 2 | 1, 1 of them only since they vary |"
    assert told in pages(root, table)["README.md"]


def test_another_reading_of_printed_numbers_is_shown_and_not_counted(tmp_path):
    text = paper_tables.TABLE.replace('id = "hard"\n', 'id = "hard"\nreading_of = "easy"\n')
    table, root = paper_tables.make(tmp_path, text), tmp_path / "results"
    for cell in ("easy", "hard"):
        for row, value in {"fedavg": 49.0, "ditto": 59.0, "ours": 61.0}.items():
            paper_tables.put(root, table, f"{cell}/{row}", 0, value)
    counts = site.gather(root, [table]).pages[0].counts
    assert (counts.cells, counts.run, counts.points, counts.columns) == (9, 3, 3, 1)
    assert "60.0 → 59.0" in pages(root, table)["maker.md"]
    with pytest.raises(UserError, match=r"reading_of: 'eazy' is none of easy, .* \(did you mean 'easy'\?\)"):
        paper_tables.make(tmp_path, text.replace('reading_of = "easy"', 'reading_of = "eazy"'))


def test_a_reason_may_leave_the_cause_open(root, table):
    keep(root, "maker/t1/easy/ours")
    with (root / "reasons.toml").open("a", encoding="utf-8") as file:
        file.write('open = "tried"\n')
    counts = site.gather(root, [table]).pages[0].counts
    assert (counts.marked, counts.explained, counts.tried, counts.argued) == (2, 0, 1, 0)
    (root / "reasons.toml").write_text((root / "reasons.toml").read_text().replace('"tried"', '"argued"'))
    counts = site.gather(root, [table]).pages[0].counts
    assert (counts.marked, counts.explained, counts.tried, counts.argued) == (2, 0, 0, 1)
    (root / "reasons.toml").write_text((root / "reasons.toml").read_text().replace('"argued"', "true"))
    with pytest.raises(UserError, match="open must be 'tried' or 'argued', not True"):
        site.gather(root, [table])


def test_what_is_aimed_at_is_told_with_how_far_it_is(tmp_path):
    text = paper_tables.TABLE.replace('set = ["algorithm.folds=3"]\n', "")
    table, root = paper_tables.make(tmp_path, text, "pfedfda/t1"), tmp_path / "results"
    for cell, row, value in (("easy", "ours", 77.0), ("easy", "ditto", 10.0), ("hard", "ours", 70.0)):
        paper_tables.put(root, table, f"{cell}/{row}", 0, value)
    lines = pages(root, table)["README.md"].splitlines()
    assert "| Maker: numbers of its own method that are not marked | 2 of 2 | 1 |" in lines
    assert "| columns with the paper's best method | 1 of 1 | 1, and 0 with a reason for another one |" in lines
    assert "| marked numbers with a reason | all 2 | 0, and 0 tried with the cause open |" in lines


def test_numbers_of_a_commit_in_doubt_are_told_below_their_table(root, table):
    source = {"modules": [], "method": None, "commit": "0123456789abcdef"}
    paper_tables.put(root, table, "easy/ditto", 0, 74.0, source=source)
    text = paper_tables.TABLE.replace('id = "lost"', 'id = "twice"\nkind = "derived"\nhow = "mean"\nof = ["easy"]', 1)
    table = paper_tables.make(root.parent, text.replace('missing = "its data are private"\n', ""))
    assert "Commit" not in pages(root, table)["maker.md"]
    (root / "doubts.toml").write_text('0123456 = "Its machine\\nwas broken."\n')
    told = "- Commit 0123456: Its machine was broken. Numbers that such a result is, or is a part of: "
    assert f"{told}Easy: 1 of 3; Lost: 1 of 3.\n" in pages(root, table)["maker.md"]
    for told in ('0123456 = ""\n', "0123456 = 3\n", '012 = "too short"\n'):
        (root / "doubts.toml").write_text(told)
        with pytest.raises(UserError, match=r"doubts.toml: .* must be a commit, of seven digits or more, with a"):
            pages(root, table)


def test_numbers_of_a_training_whose_memory_ran_out_are_told_below_their_table(root, table):
    told = (
        "smaller blocks, which moves a long run by some tenths of a point. Numbers that such a result is, or is a part"
    )
    for notes in (["momentum is ignored"], ["momentum is ignored", "memory ran out: at most 32 clients run at once"]):
        paper_tables.put(root, table, "easy/ditto", 0, 74.0, notes=notes)
        assert (f"{told} of: Easy: 1 of 3.\n" in pages(root, table)["maker.md"]) == (len(notes) == 2)


def test_numbers_of_a_figure_stand_below_it(tmp_path):
    text = paper_tables.TABLE.replace('title = "', 'kind = "figure"\nfigure = "curves"\ntitle = "')
    text = "".join(line for line in text.splitlines(True) if line[:7] not in ("fedavg ", "ditto =", "ours = "))
    table = paper_tables.make(tmp_path, text, "maker/f1")
    root = tmp_path / "results"
    assert "| method |" not in pages(root, table)["maker.md"]
    paper_tables.put(root, table, "easy/ditto", 0, 74.0)
    assert "| Ditto | 74.0 |\n" in pages(root, table)["maker.md"]


def test_how_many_repeated_cells_stand_is_told(root, table):
    """Also how many did when they were drawn: a number that was replaced since has not repeated."""
    told = {"seed": 0, "same_number": False, "again": {"value": 74.0}}
    cells = [{"cell": f"maker/t1/easy/{row}", **told} for row in ("ditto", "ours")]
    again = {"cell": "maker/t1/easy/ditto", "seed": 0, "same_number": True, "again": {"value": 74.0}}
    draws = [{"drawn": ["ditto", "ours"], "cells": cells}, {"drawn": ["ditto", "another"], "cells": [again]}]
    told = {"device": "cpu", "drawn_of": 1234, "longest_seconds": 400.0}
    draws = [told | draws[0], told | {"data": ["mnist", "usps"]} | draws[1]]
    (root / "repeated.json").write_text(json.dumps({"draws": draws}))
    lines = pages(root, table)["README.md"].splitlines()
    most = "whose trainings took at most 400 s"
    told = "0 of 2 gave the number that the cell had, 1 of 2 the one that it has today."
    assert f"- Draw 1, on one cpu, of 1,234 results {most}: {told}" in lines
    told = "1 of 2 gave the number that the cell had, 1 came to no end."
    assert f"- Draw 2, on one cpu, of 1,234 results of mnist and usps {most}: {told}" in lines


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"draws": [{"cells": []}]}', '{"draws": [3]}', '{"draws": "no"}'])
def test_damaged_draws_are_told(root, table, text):
    (root / "repeated.json").write_text(text)
    with pytest.raises(UserError, match=r"repeated\.json: holds no draws of cells that were run again: restore it"):
        pages(root, table)


def test_a_draw_may_have_cells_that_no_table_has_any_more(root, table):
    cell = {"cell": "maker/t1/gone/ditto", "seed": 0, "same_number": True, "again": {"value": 74.0}}
    draw = {"drawn": ["gone"], "cells": [cell], "device": "cpu", "drawn_of": 9, "longest_seconds": 400.0}
    (root / "repeated.json").write_text(json.dumps({"draws": [draw]}))
    told = "1 of 1 gave the number that the cell had, 0 of 1 the one that it has today."
    assert told in pages(root, table)["README.md"]


def test_a_column_with_another_best_method_has_a_reason_or_none(root, table):
    for row, value in {"fedavg": 49.0, "ditto": 59.0, "ours": 61.0}.items():
        paper_tables.put(root, table, f"hard/{row}", 0, value)
    text = pages(root, table)["maker.md"]
    assert "### Other best methods\n\n- Hard: Ditto → Ours, ahead by 2.0. No reason is known yet.\n" in text
    keep(root, "maker/t1/hard")
    found = pages(root, table)
    assert "- Hard: Ditto → Ours, ahead by 2.0. It is so. (results/proof.json)\n" in found["maker.md"]
    assert "| 1 of 2 | 1 | 0 | 1 | 0 | 0 |\n" in found["README.md"] and "Reasons kept" not in found["maker.md"]
    with (root / "reasons.toml").open("a", encoding="utf-8") as file:
        file.write('open = "tried"\n')
    assert "| 1 of 2 | 1 | 0 | 0 | 1 | 0 |\n" in pages(root, table)["README.md"]
    for seed in (1, 2):
        paper_tables.put(root, table, "hard/ditto", seed, 59.0 + 3 * seed)
        paper_tables.put(root, table, "hard/ours", seed, 58.0 + 4 * seed)  # ahead by 2, 0 and 1 points
    found = pages(root, table)
    assert "1.0±1.0, on 2 of 3 seeds" in found["maker.md"]
    assert "Ditto → Ours (not told apart)" in found["maker.md"] and "### Other best" not in found["maker.md"]
    assert "- maker/t1/hard: It is so. (results/proof.json)" in found["maker.md"]
    assert (
        "1 of 2 columns (1 of them told apart from all others), and not told apart from ours in 1." in found["maker.md"]
    )
    assert "| 1 of 2 | 1 | 1 | 0 | 0 | 0 |\n" in found["README.md"]


# --- reasons --------------------------------------------------------------------------------------------------------


def test_a_reason_stands_beside_its_number(root, table):
    keep(root, "maker/t1/easy/ours")
    text = pages(root, table)["maker.md"]
    told = ["- Easy: Ours +13.7. It is so. (results/proof.json)", "- Easy: FedAvg -52.5. No reason is known yet."]
    assert "\n".join(told) in text and "Reasons kept" not in text


def test_a_reason_that_several_numbers_share_is_told_once(root, table):
    paper_tables.put(root, table, "hard/ours", 0, 90.0)
    keep(root, "maker/t1/easy/ours")
    with (root / "reasons.toml").open("a", encoding="utf-8") as file:
        file.write('also = ["maker/t1/easy/fedavg", "maker/t1/hard/ours"]\n')
    text = pages(root, table)["maker.md"]
    assert text.count("It is so.") == 1
    assert re.search(r"^- Easy: FedAvg -52.5, Ours \+13.7; Hard: Ours \+[\d.]+. It is so. \(", text, re.MULTILINE)


def test_a_reason_outlives_its_mark(root, table):
    keep(root, "maker/t1/easy/ditto")
    text = pages(root, table)["maker.md"]
    assert "## Reasons kept\n" in text and "- maker/t1/easy/ditto: It is so. (results/proof.json)" in text


@pytest.mark.parametrize(
    ("id", "evidence", "sentence"),
    [
        (
            "maker/t1/easy/our",
            "results/proof.json",
            r"no table has this number or column \(did you mean 'maker/t1/easy/ours'\?\)",
        ),
        ("maker/t1/easy/ours", "results/prof.json", "its evidence 'results/prof.json' is no file here"),
        ("maker/t1/easy/ours", "../proof.json", "its evidence '../proof.json' is no file here"),
        ("maker/t1/easy/ours", "tests/test_a.py::test_b", "its evidence 'tests/test_a.py::test_b' is no test"),
        (
            "maker/t1/easy/ours",
            "results/proof.json::b",
            "its evidence 'results/proof.json::b' is no test, and no name,",
        ),
    ],
)
def test_a_reason_that_would_be_lost_stops_the_writing(root, table, id, evidence, sentence):
    (root.parent / "tests").mkdir()
    (root.parent / "tests" / "test_a.py").write_text("def test_a():\n    pass\n")
    (root.parent.parent / "proof.json").write_text("{}")
    keep(root, id, evidence=evidence)
    with pytest.raises(UserError, match=sentence):
        sections.beside(table, root)
    with pytest.raises(UserError, match=sentence):
        pages(root, table)
    assert not (root.parent / "docs").exists()


def test_evidence_may_be_several_files_and_tests(root, table):
    (root.parent / "tests").mkdir()
    (root.parent / "tests" / "test_a.py").write_text("def test_a():\n    pass\n")
    keep(root, "maker/t1/easy/ours", evidence='["results/proof.json", "tests/test_a.py::test_a"]')
    assert "(results/proof.json, tests/test_a.py::test_a)" in pages(root, table)["maker.md"].replace("\\_", "_")


def test_one_reason_may_serve_several_numbers(tmp_path):
    (tmp_path / "reasons.toml").write_text('["a/t1/b/c"]\nreason = "So."\nevidence = "x"\nalso = ["a/t1/b/d"]\n')
    found = reasons.read(tmp_path)
    assert list(found) == ["a/t1/b/c", "a/t1/b/d"] and found["a/t1/b/c"] == found["a/t1/b/d"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('["a/t1/b/c"]\nreason = "So."\n', "must have a reason and its evidence"),
        ('["a/t1/b/c"]\nreason = ""\nevidence = "x"\n', "'' is no text"),
        ('["a/t1/b/c"]\nreason = "So."\nevidence = []\n', "names no evidence"),
        ("a/t1 = 3\n", "is not valid TOML"),
        ('["a/t1/b/c"]\nreason = "So."\nevidence = 3\n', "3 is no text"),
        ('["a/t1/b/c"]\nreason = "So."\nevidence = "x"\nalso = 3\n', "3 is no name of a number"),
        ('["a/t1/b/c"]\nreason = "So."\nevidence = "x"\nalso = ["a/t1/b/c"]\n', "has a reason already"),
    ],
)
def test_a_file_of_reasons_that_cannot_be_one_is_refused(tmp_path, text, sentence):
    (tmp_path / "reasons.toml").write_text(text)
    with pytest.raises(UserError, match=sentence):
        reasons.read(tmp_path)
