"""A table as it is shown: the grid, what is said below it, Markdown, JSON, the terminal."""

import io
import json
import re

import paper_tables
import pytest

from bespoke.tables.beside import Reader
from bespoke.tables.page import Page
from bespoke.tables.reasons import Reason

REASON = {"maker/t1/hard/ours": Reason("The paper's is a misprint.", ("results/proof.json",))}
EARLIER = {"bespoke": "0", "commit": None, "modules": ["bespoke.algorithms.ditto"], "method": "another"}


@pytest.fixture
def table(tmp_path):
    return paper_tables.make(tmp_path)


@pytest.fixture
def page(tmp_path, table):
    """A table of which one column has three seeds, one has one, and a stand-in failed in part."""
    root = tmp_path / "results"
    for seed in (0, 1, 2):
        for row, value in {"fedavg": 62.0, "ditto": 74.0, "ours": 77.0}.items():
            paper_tables.put(root, table, f"easy/{row}", seed, value + seed)
    paper_tables.put(root, table, "hard/fedavg", 0, 47.5)
    paper_tables.put(root, table, "hard/ditto", 0, 59.0, source=EARLIER)
    paper_tables.put(root, table, "hard/ours", 0, 1.0, settings=paper_tables.other_settings(table, "hard/ours"))
    paper_tables.put(root, table, "hard/ours", 0, 65.0)
    paper_tables.put(root, table, "other/ours", 0, 70.0)
    paper_tables.fail(root, table, "other/ditto", 0, "the memory is too small")
    return Page(Reader(root).beside(table), REASON)


def test_the_grid(page):
    lines = page.text().splitlines()
    assert lines[:14] == [
        "maker/t1: Maker, Table 1: Accuracy by data set",
        "",
        "method                                 Easy              Hard  Other (stand-in)  Lost (not run)",
        "FedAvg                  62.5 → 63.0±1.0 (3)   50.0 → 47.5 (1)              10.0             1.0",
        "                                  +0.5, 3→3        -2.5*, 3→3",
        "Ditto               73.6±2.0 → 75.0±1.0 (3)  60.0 → 59.0† (1)     20.0 → failed             2.0",
        "                                  +1.4, 2→2         -1.0, 1→2",
        "Ours                    76.3 → 78.0±1.0 (3)   55.0 → 65.0 (1)   30.0 → 70.0 (1)             3.0",
        "                                  +1.7, 1→1       +10.0*, 2→1",
        "Kendall's tau                          1.00              0.33",
        "best method                      kept: Ours      Ditto → Ours",
        "ahead by                                                  6.0",
        "within 1, 2 points                1, 3 of 3         1, 1 of 3",
        "",
    ]


def test_what_is_said_below_it(page):
    said = page.text().splitlines()[13:]
    usual = (
        "test accuracy in %, pooled over all test rows; all clients of the training population; the method's headline"
    )
    for sentence in (
        f"If not said otherwise, a number is {usual} view; last round.",
        "FedAvg: view global.",
        "Published: one run, ± standard deviation over repetitions.",
        "Ours: seeds 0, 1, 2, not all of them everywhere; NVIDIA H200, bf16.",
        "Not run: Lost: its data are private.",
        "Stand-in, never held against the paper's: Other: digits instead of letters.",
        "† the method's source has changed since.",
        "failed: other/ditto, seed 0: the memory is too small",
        "hard/ours: one earlier result with other settings is kept beside it.",
        "Hard: FedAvg -2.5. No reason is known yet.",
        "Hard: Ours +10.0. The paper's is a misprint. (results/proof.json)",
    ):
        assert said.count(sentence) == 1, sentence
    assert sum(line.startswith("* further") for line in said) == 1


def test_what_differs_is_said_by_column(tmp_path):
    text = paper_tables.TABLE.replace('id = "hard"\n', 'id = "hard"\ngroup = "new"\nselection = "best_test"\n')
    text = text.replace('label = "Ours"', 'label = "Ours"\nbest_of = ["fedavg", "ditto"]')
    caption = Page(Reader(tmp_path / "results").beside(paper_tables.make(tmp_path, text))).caption
    assert "Hard: new clients, held out from training." in caption
    assert "Hard: best on test (oracle)." in caption
    assert "Ours: the best of FedAvg and Ditto, chosen on the test rows, seed by seed." in caption


HIDDEN = """
[[cell]]
id = "hidden"
label = "Hidden"
kind = "derived"
how = "overhead"
rows = ["ditto"]
stand_in = "digits instead of letters"
[cell.from]
ditto = ["other/ditto", "other/fedavg"]
[[cell]]
id = "time"
label = "Time"
kind = "derived"
how = "mean"
of = ["hidden", "hidden"]
rows = ["ditto"]
published = { ditto = 20 }
"""


def test_nothing_is_said_of_columns_that_are_not_shown(tmp_path):
    text = paper_tables.TABLE.replace("[cell.published]\nfedavg = 10.0\nditto = 20.0\nours = 30.0", 'view = "local"')
    shown = Page(Reader(tmp_path / "results").beside(paper_tables.make(tmp_path, text + HIDDEN))).text()
    assert "Time: the mean of 2 numbers: percent by which a round takes longer." in shown
    assert "Stand-in, never held against the paper's: Time: digits instead of letters." in shown
    for words in ("Other", "Hidden", "view local"):
        assert words not in shown, words


def test_nothing_is_said_of_numbers_where_none_is_shown(tmp_path):
    text = re.sub(r"\[cell.published\]\n(\w+ = [\d.]+\n)+(\[cell.deviation\]\nditto = 2.0\n)?", "", paper_tables.TABLE)
    page = Page(Reader(tmp_path / "results").beside(paper_tables.make(tmp_path, text)))
    assert page.text().split("\n\n", 1)[1].strip() == "None of it has been run yet: no numbers of it are published."


def test_results_with_other_settings_are_counted_and_left_out(tmp_path, table):
    root = tmp_path / "results"
    for id, seed in (("easy/ours", 0), ("easy/ours", 2), ("hard/ours", 0)):
        paper_tables.put(root, table, id, seed, 76.0, settings=paper_tables.other_settings(table, id, seed))
    page = Page(Reader(root).beside(table))
    assert "76.0" not in page.text() and page.counts.run == 0
    assert page.caption[0] == "None of it has been run with these settings yet: the numbers are the paper's."
    made = "made with other settings than the table has now, or read otherwise, and"
    assert f"3 results were {made} are left out: bespoke sweep maker/t1 --seeds 0 2 makes them again." in page.notes
    paper_tables.put(root, table, "easy/ours", 0, 75.0)
    paper_tables.put(root, table, "easy/ours", 2, 75.0)
    page = Page(Reader(root).beside(table))
    assert "76.3 → 75.0" in page.text()
    assert f"1 result was {made} is left out: bespoke sweep maker/t1 --seeds 0 makes it again." in page.notes


def test_nothing_is_said_that_does_not_hold(tmp_path, table):
    root = tmp_path / "results"
    paper_tables.put(root, table, "easy/ours", 0, 76.0)
    text = Page(Reader(root).beside(table)).text()
    for words in ("*", "†", "failed", "over seeds", "left out", "(1)", "best method", "Durations", "earlier"):
        assert words not in text, words
    assert "76.3 → 76.0" in text and "Ours: seed 0; NVIDIA H200, bf16." in text


def test_a_table_before_anything_is_run(tmp_path, table):
    text = Page(Reader(tmp_path / "results").beside(table)).text()
    assert "76.3" in text and "None of it has been run yet" in text and "76.3 →" not in text


def test_counts(page):
    counts = page.counts
    assert (counts.cells, counts.missing, counts.stand_ins, counts.stand_ins_run) == (12, 3, 3, 1)
    assert (counts.run, counts.points, counts.within_1, counts.within_2) == (6, 6, 2, 4)
    assert (counts.marked, counts.explained, counts.failed) == (2, 1, 1)
    assert (counts.columns, counts.winners_kept) == (2, 1)
    assert (counts + counts).cells == 24


def test_as_markdown(page):
    text = page.markdown()
    assert "| method | Easy | Hard | Other (stand-in) | Lost (not run) |\n| --- | ---: |" in text
    assert "| Ours | 76.3 → 78.0±1.0 (3)<br>+1.7, 1→1 | 55.0 → 65.0 (1)<br>**+10.0\\*, 2→1** |" in text
    assert "\n- failed: other/ditto, seed 0: the memory is too small\n" in text


def test_as_json(page):
    told = json.loads(json.dumps(page.as_dict()))
    easy, hard, other, lost = told["columns"]
    assert told["table"] == "maker/t1" and told["counts"]["run"] == 6
    assert easy["winner_kept"] is True and easy["tau"] == pytest.approx(1.0)
    assert hard["winners"] == [["Ditto"], ["Ours"]] and hard["winner_kept"] is False
    assert hard["behind"]["mean"] == pytest.approx(6.0) and easy["behind"] is None
    assert other["stand_in"] == "digits instead of letters" and lost["missing"] == "its data are private"
    row = hard["rows"][2]
    assert row["published"] == 55.0 and row["ours"] == pytest.approx(65.0) and row["marked"] is True
    assert row["rank"] == {"published": 2, "ours": 1} and row["earlier_results"] == 1
    assert row["reason"]["evidence"] == ["results/proof.json"]
    assert easy["rows"][0]["seeds"] == {"0": 62.0, "1": 63.0, "2": 64.0} and easy["rows"][0]["std"] == 1.0
    assert hard["rows"][1]["source_changed"] is True
    assert other["rows"][1]["failed"] == ["other/ditto, seed 0: the memory is too small"]


def test_a_narrow_terminal_gets_several_blocks(page):
    from rich.console import Console

    shown = io.StringIO()
    Console(width=64, file=shown).print(page.table(64))
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= 64
    heads = [line.split() for line in text.splitlines() if line.split()[:1] == ["method"]]
    assert [head[1] for head in heads] == ["Easy", "Other"]
    assert "78.0±1.0" in text and "2→1" in text


def test_names_cannot_change_the_terminal_or_the_page(tmp_path):
    text = paper_tables.TABLE.replace('label = "Ditto"', 'label = "Di\\u001btto|*"')
    page = Page(Reader(tmp_path / "results").beside(paper_tables.make(tmp_path, text)))
    assert "\x1b" not in page.text() and "Di\\x1btto|*" in page.text()
    assert "Di\\\\x1btto\\|\\*" in page.markdown()


def test_numbers_have_the_decimals_of_the_paper(tmp_path):
    text = paper_tables.TABLE.replace("62.5", "62.25").replace("fedavg = 50.0", "fedavg = 50")
    text = text.replace("[cell.deviation]\n", "[cell.deviation]\nours = 0.25\n")
    table = paper_tables.make(tmp_path, text)
    root = tmp_path / "results"
    for id in ("easy/ours", "hard/ours"):
        paper_tables.put(root, table, id, 0, 77.123)
    text = Page(Reader(root).beside(table)).text()
    assert "76.30±0.25 → 77.12" in text and "+0.82" in text and "73.60±2.00" in text
    assert "55.00 → 77.12" in text and " 50.00 " in text  # one metric of a paper is printed alike


def test_numbers_without_percent(tmp_path):
    size = (
        '[[cell]]\nid = "size"\nlabel = "Size"\nkind = "benchmark"\nhow = "parameters"\npublished = {ditto = 106400}\n'
    )
    size += '[[cell]]\nid = "more"\nlabel = "More"\nkind = "benchmark"\nhow = "parameters"\n'
    cost = '[[cell]]\nid = "cost"\nlabel = "Cost"\nkind = "derived"\nhow = "round_seconds"\nof = "easy"\n'
    table = paper_tables.make(tmp_path, paper_tables.TABLE + size + cost + "published = {ditto = 18.42}\n")
    root = tmp_path / "results"
    paper_tables.put(root, table, "size/ditto", 0, value=106400)
    paper_tables.put(root, table, "more/ditto", 0, value=576896)
    paper_tables.put(root, table, "more/ours", 0, value=1.25)
    paper_tables.put(root, table, "easy/ditto", 0, 74.0, totals={"round_seconds": 0.0041})
    page = Page(Reader(root).beside(table))
    text = page.text()
    assert "106,400 → 106,400" in text and "+0\n" in text and "Size; More: numbers of the model, counted." in text
    assert "→ 576,896 " in text and "→ 1.250\n" in text
    assert "18.42 → 0.0041\n" in text and "Cost: seconds of a round." in text
    assert "Durations depend on the machine" in text
    assert page.counts.run == 3 and page.counts.points == 1
