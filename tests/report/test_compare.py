import io
import json
import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from bespoke.errors import UserError
from bespoke.files import write_atomic
from bespoke.records import CLIENTS, ROUNDS, TIMING, RunFolder
from bespoke.report import accuracy_chart, compare, curves, find_runs, summarise
from bespoke.report.table import human_bytes


def fake_run(path, counts, name="fedavg", seed=0, settings="", data="", refused=None, note=None):
    """A run folder; `counts` is {round: rows} with rows (client, correct, total) and optional columns."""
    folder = RunFolder.create(path)
    text = f'seed = {seed}\n[data]\nname = "digits"\n{data}\n[algorithm]\nname = "{name}"\n{settings}\n'
    write_atomic(folder.path / "config.toml", text)
    common = {"group": "train", "split": "test", "view": "personal", "loss_sum": 1.0, "logged": {}}
    for number, rows in counts.items():
        row = {
            "round": number,
            "cohort": [0, 1],
            "refused": refused or {},
            "train_loss": 1.0,
            "bytes_down": 3000,
        }
        row |= {"bytes_up": 2000, "padding_waste": 0.0, "host_breaks": 0, "logged": {}}
        folder.append(ROUNDS, [row | ({"note": note} if note else {})])
        lines = []
        for client, correct, total, *more in rows:
            extra = more[0] if more else {}
            own = {"round": number, "client": client, **common, "correct": correct, "total": total, **extra}
            lines.append(own)
        folder.append(CLIENTS, lines)
        folder.append(TIMING, [{"round": number, "train": number, "aggregate": 0.5, "evaluate": 0.25, "checkpoint": 0}])
    return folder


VAL, NEW, UNSEEN = {"split": "val"}, {"group": "new"}, {"group": "unseen"}
GLOBAL = {"view": "global"}


# --- summaries ---------------------------------------------------------------------------------------------


def test_summary_keeps_groups_apart(tmp_path):
    rows = [(0, 1, 1), (1, 5, 10), (2, 80, 100, UNSEEN), (3, 0, 50, NEW), (4, 0, 0)]
    summary = summarise(fake_run(tmp_path, {3: rows}))
    last = summary["views"]["personal"]["last"]
    assert set(last) == {"round", "all", "train", "unseen", "new"}
    assert last["round"] == 3
    assert (last["all"]["clients"], last["all"]["excluded"], last["all"]["pooled"]) == (3, 1, 86 / 111)
    assert last["all"]["mean"] == pytest.approx(2.3 / 3)
    assert last["all"]["loss"] == pytest.approx(3 / 111)
    assert (last["train"]["clients"], last["train"]["pooled"]) == (2, 6 / 11)
    assert (last["unseen"]["pooled"], last["unseen"]["std"]) == (0.8, None)
    assert last["new"]["pooled"] == 0.0


def test_best_rounds_are_pooled_over_the_training_population_and_first_on_ties(tmp_path):
    counts = {
        # mean over clients would choose round 1, the pooled accuracy rounds 2 and 3, new clients round 4
        1: [(0, 1, 1), (1, 10, 100), (0, 0, 1, VAL), (1, 9, 10, VAL)],
        2: [(0, 0, 1), (1, 60, 100), (0, 0, 1, VAL), (1, 8, 10, VAL)],
        3: [(0, 0, 1), (1, 60, 100), (0, 1, 1, VAL), (1, 8, 10, VAL)],
        4: [
            (0, 0, 1),
            (1, 50, 100),
            (0, 0, 1, VAL),
            (1, 0, 10, VAL),
            (9, 99, 99, NEW),
            (9, 99, 99, VAL | NEW),
        ],
    }
    view = summarise(fake_run(tmp_path, counts))["views"]["personal"]
    assert (view["last"]["round"], view["best_val"]["round"], view["best_test"]["round"]) == (4, 1, 2)
    assert view["best_val"]["all"]["pooled"] == 11 / 101  # of the test rows
    assert "new" not in view["best_test"]


def test_without_validation_rows_there_is_no_best_val(tmp_path):
    view = summarise(fake_run(tmp_path / "a", {1: [(0, 1, 2)]}))["views"]["personal"]
    assert view["best_val"] is None
    empty = summarise(fake_run(tmp_path / "b", {1: [(0, 1, 2), (0, 0, 0, VAL)]}))["views"]["personal"]
    assert empty["best_val"] is None


def test_summary_of_views_and_totals(tmp_path):
    rows = [(0, 1, 2), (0, 2, 2, GLOBAL)]
    folder = fake_run(tmp_path, {1: rows, 2: rows}, refused={"1": "NaN"}, note="runs in the loop")
    summary = summarise(folder)
    assert summary["headline"] == "personal"
    assert {name: view["last"]["all"]["pooled"] for name, view in summary["views"].items()} == {
        "personal": 0.5,
        "global": 1.0,
    }
    del summary["headline"], summary["views"]
    assert summary == {
        "rounds": 2,
        "participations": 4,
        "bytes_down": 6000,
        "bytes_up": 4000,
        "seconds": 4.5,
        "round_seconds": 2.0,
        "refused": 2,
        "notes": ["runs in the loop"],
    }


def test_a_loss_that_is_not_known_is_none(tmp_path):
    folder = fake_run(tmp_path, {1: [(0, 1, 2, {"loss_sum": math.nan}), (1, 1, 2)]})
    assert summarise(folder)["views"]["personal"]["last"]["all"]["loss"] is None


def test_a_run_without_evaluation_has_an_empty_summary(tmp_path):
    summary = summarise(fake_run(tmp_path, {}))
    assert (summary["headline"], summary["views"], summary["round_seconds"]) == (None, {}, None)


def test_a_client_recorded_twice_is_refused(tmp_path):
    folder = fake_run(tmp_path, {1: [(0, 1, 2), (7, 1, 2)]})
    folder.append(CLIENTS, list(folder.clients())[-1:])
    with pytest.raises(UserError, match="client 7 twice in round 1"):
        summarise(folder)


# --- comparisons -------------------------------------------------------------------------------------------


def strip(comparison, column):
    header, rows = comparison.cells()
    return [row[header.index(column)] for row in rows]


def test_comparison_of_two_methods_by_hand(tmp_path):
    fake_run(tmp_path / "one" / "fedrep", {5: [(0, 3, 4), (1, 9, 10), (2, 1, 2)]}, "fedrep")
    fake_run(tmp_path / "fedavg", {5: [(2, 1, 2), (1, 5, 10), (0, 2, 4)]}, "fedavg")
    comparison = compare([tmp_path])
    header, rows = comparison.cells()
    assert header == [
        "method",
        "mean (std)",
        "pooled",
        "worst 10 %",
        "bytes/round",
        "seconds",
        "minus fedavg [95 %]",
    ]
    assert rows[0] == ["fedavg", "50.0 (0.0)", "50.0", "50.0", "5.0 kB", "5.8", "baseline"]
    interval = stats.ttest_1samp([0.25, 0.4, 0.0], 0).confidence_interval()
    difference = f"+21.7 [{100 * interval.low:.1f},{100 * interval.high:.1f}]"
    assert rows[1] == ["fedrep", "71.7 (20.2)", "81.2", "50.0", "5.0 kB", "5.8", difference]
    assert comparison.caption == (
        "test accuracy in %, all clients of the training population, personal model, last round (5), seed 0; "
        "(std) over clients"
    )
    assert comparison.warnings == ()


def test_seeds_of_one_method_share_a_row(tmp_path):
    for seed, right in enumerate((2, 4, 6)):
        fake_run(tmp_path / "a" / str(seed), {1: [(0, right, 10), (1, right + 2, 10)]}, "fedavg", seed)
        fake_run(tmp_path / "b" / str(seed), {1: [(0, right + 1, 10), (1, right + 4, 10)]}, "ditto", seed)
    comparison = compare([tmp_path / "b", tmp_path / "a"])
    assert strip(comparison, "method") == ["ditto", "fedavg"]
    assert strip(comparison, "mean (std)") == ["65.0±20.0 (21.2)", "50.0±20.0 (14.1)"]
    assert "seeds 0 1 2; ± std over seeds" in comparison.caption
    ditto = comparison.rows[0]
    assert ditto.mean.se == pytest.approx(0.2 / math.sqrt(3))
    assert (ditto.difference[0], ditto.pairs) == (pytest.approx(0.15), 2)  # over clients, not (client, seed)
    assert ditto.difference[1] == pytest.approx(0.15 - 12.7062047 * 0.05)
    assert len(ditto.accuracies) == 6


def test_settings_that_differ_become_part_of_the_label(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2)]}, "fedprox", 0, "mu = 0.1\n[training]\nlr = 1.0")
    fake_run(tmp_path / "b", {1: [(0, 1, 2)]}, "fedprox", 1, "mu = 0.1\n[training]\nlr = 1.0")
    fake_run(tmp_path / "c", {1: [(0, 1, 2)]}, "fedprox", 0, "mu = 1.0\n[training]\nlr = 1.0")
    fake_run(tmp_path / "d", {1: [(0, 1, 2)]}, "local", 0, "[training]\nlr = 5.0")
    comparison = compare([tmp_path])
    assert [(row.label, row.seeds) for row in comparison.rows] == [
        ("fedprox (mu=0.1)", (0, 1)),
        ("fedprox (mu=1.0)", (0,)),
        ("local", (0,)),
    ]
    assert comparison.baseline == "fedprox (mu=0.1)"
    assert strip(comparison, "seeds") == ["2", "1", "1"]
    [warning] = comparison.warnings
    assert warning.startswith("not the same seeds, hence not the same data (fedprox (mu=0.1): 0 1; ")
    fake_run(tmp_path / "e", {1: [(0, 1, 2)]}, "local", 0, "[training]\nlr = 5.0\nclip = true")
    assert [row.label for row in compare([tmp_path / "d", tmp_path / "e"]).rows] == [
        "local (training.clip=unset)",
        "local (training.clip=True)",
    ]


def test_other_data_are_named_and_not_paired(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2), (1, 1, 2)]}, "fedavg", data="alpha = 0.1")
    fake_run(tmp_path / "b", {1: [(0, 2, 2), (1, 1, 2)]}, "ditto", data="alpha = 0.3")
    comparison = compare([tmp_path])
    assert comparison.warnings == ("not the same data: data.alpha is 0.1 or 0.3",)
    assert comparison.rows[1].difference is None
    assert strip(comparison, "minus fedavg [95 %]") == ["baseline", "-"]
    assert "warning: not the same data" in comparison.text()


def test_other_test_rows_are_named_and_not_paired(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2), (1, 1, 2)]}, "fedavg")
    fake_run(tmp_path / "b", {1: [(0, 2, 3), (1, 1, 2)]}, "ditto")
    comparison = compare([tmp_path])
    assert comparison.warnings == ("ditto was not tested on the rows of fedavg, so the two are not paired",)
    assert comparison.rows[1].difference is None


def test_clients_without_test_rows_and_refused_uploads_are_told(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2), (1, 0, 0)]}, "fedavg", refused={"1": "NaN"})
    fake_run(tmp_path / "b", {1: [(0, 2, 2), (1, 0, 0)]}, "ditto")
    comparison = compare([tmp_path])
    assert "training population (1 without test rows left out)" in comparison.caption
    assert comparison.warnings == ("fedavg: 1 uploads were refused and left out of the aggregate",)
    assert comparison.rows[1].difference == (0.5, None, None)
    assert strip(comparison, "mean (std)") == ["50.0 (-)", "100.0 (-)"]
    assert strip(comparison, "minus fedavg [95 %]") == ["baseline", "+50.0"]


def test_unequal_last_rounds_unfinished_and_repeated_runs_are_told(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2)], 2: [(0, 1, 2)]}, "fedavg")
    fake_run(tmp_path / "b", {1: [(0, 2, 2)]}, "ditto")
    fake_run(tmp_path / "c", {1: [(0, 0, 2)]}, "ditto")
    fake_run(tmp_path / "d", {}, "local")
    comparison = compare([tmp_path])
    assert [warning.replace(str(tmp_path), "") for warning in comparison.warnings] == [
        "/d is left out: it holds no evaluation yet (finish it with --resume)",
        "/c is left out: it repeats /b (same settings and seed)",
        "not the same last round (fedavg: 2; ditto: 1)",
    ]
    assert [row.pooled.mean for row in comparison.rows] == [0.5, 1.0]
    with pytest.raises(UserError, match="holds no evaluation yet"):
        compare([tmp_path / "d"])


def test_selections(tmp_path):
    counts = {
        1: [(0, 9, 10), (0, 1, 10, VAL)],
        2: [(0, 7, 10), (0, 9, 10, VAL)],
        3: [(0, 5, 10), (0, 1, 10, VAL)],
    }
    fake_run(tmp_path / "a", counts)
    for select, value, words in (
        ("last", 0.5, "last round (3)"),
        ("best_val", 0.7, "best validation round"),
        ("best_test", 0.9, "best on test (oracle)"),
    ):
        comparison = compare([tmp_path], select=select)
        assert comparison.rows[0].pooled.mean == value
        assert f", {words}, " in comparison.caption
        assert comparison.text().splitlines()[0] == f"Test accuracy, {words.removesuffix(' (3)')}"
    fake_run(tmp_path / "b", {1: [(0, 1, 2)]}, "ditto")
    with pytest.raises(UserError, match=r"/b has no best validation round: run with \[data\] validation"):
        compare([tmp_path], select="best_val")


def test_views_and_groups(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2), (0, 2, 2, GLOBAL), (5, 0, 2, NEW)]}, "fedrod")
    fake_run(tmp_path / "b", {1: [(0, 1, 4, GLOBAL)]}, "fedavg")
    comparison = compare([tmp_path])
    assert "headline model of each method (fedrod: personal, fedavg: global)" in comparison.caption
    comparison = compare([tmp_path], view="global")
    assert [row.mean.mean for row in comparison.rows] == [1.0, 0.25]
    assert ", global model, " in comparison.caption
    with pytest.raises(UserError, match="/b has no view 'personal'; it has global"):
        compare([tmp_path], view="personal")
    new = compare([tmp_path / "a"], group="new")
    assert new.rows[0].pooled.mean == 0.0
    assert "new clients, held out from training" in new.caption
    with pytest.raises(UserError, match="/b has no test rows of new clients"):
        compare([tmp_path / "b"], group="new")


def test_wrong_requests_are_refused_in_a_sentence(tmp_path):
    fake_run(tmp_path / "runs" / "a", {1: [(0, 1, 2)]})
    (tmp_path / "empty").mkdir()
    for call, words in (
        (lambda: compare([tmp_path / "absent"]), "there is no folder"),
        (lambda: compare([tmp_path / "runs", tmp_path / "empty"]), "no run in .*empty"),
        (
            lambda: compare([tmp_path / "runs"], baseline="ditto"),
            "no runs of the baseline 'ditto'; there are fedavg",
        ),
        (lambda: compare([tmp_path / "runs"], select="best"), "unknown select 'best'; use one of last, "),
        (lambda: compare([tmp_path / "runs"], group="old"), "unknown group 'old'; use one of all, "),
    ):
        with pytest.raises(UserError, match=words):
            call()
    write_atomic(tmp_path / "runs" / "a" / "config.toml", "seed = 0")
    with pytest.raises(UserError, match=r"config\.toml names no \[algorithm\]"):
        compare([tmp_path])


def test_runs_are_found_once_and_not_inside_runs(tmp_path):
    for path in ("x/1", "x/2", "y", "y/checkpoints", "z/deep/er/3"):
        fake_run(tmp_path / path, {})
    found = find_runs([tmp_path / "x" / "2", tmp_path])
    assert [folder.path.relative_to(tmp_path).as_posix() for folder in found] == ["x/2", "x/1", "y"]
    assert [folder.path for folder in find_runs(str(tmp_path / "y"))] == [tmp_path / "y"]


def demo(tmp_path):
    rng = np.random.default_rng(0)
    total = rng.integers(5, 30, 20)
    for name, level in (("local", 0.8), ("fedavg", 0.6), ("fedrep", 0.9)):
        for seed in (0, 1):
            counts = {
                n: [(i, int(rng.binomial(total[i], level - 0.1 / n)), int(total[i])) for i in range(20)]
                for n in (1, 2, 3)
            }
            fake_run(tmp_path / name / str(seed), counts, name, seed)
    return tmp_path


def test_text_markdown_json_and_terminal_show_the_same(tmp_path):
    comparison = compare([demo(tmp_path)])
    header, rows = comparison.cells()
    lines = comparison.text().splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["fedavg", "fedrep", "local"]
    assert len({len(line) for line in lines[1:5]}) == 1
    markdown = comparison.markdown().splitlines()
    assert markdown[0] == "| " + " | ".join(header) + " |"
    assert markdown[3].replace("**", "") == "| " + " | ".join(rows[1]) + " |"
    assert f"**{rows[1][1]}**" in markdown[3]
    assert "**" not in markdown[2]
    data = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert data["caption"] == comparison.caption
    row = data["rows"][1]
    assert f"{100 * row['mean']['mean']:.1f}" == rows[1][1].split("±")[0]
    assert row["difference"]["clients"] == 20
    assert data["rows"][0]["difference"] is None


@pytest.mark.parametrize("width", [70, 80, 140])
def test_no_number_is_cut_on_a_terminal(tmp_path, width):
    comparison = compare([demo(tmp_path)])
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(comparison.table())
    shown = console.export_text()
    assert "…" not in shown
    words = {word for row in comparison.cells()[1] for cell in row for word in cell.split()}
    assert words <= set(shown.split())
    assert " ".join(shown.split()).endswith(comparison.caption)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_951, "100 kB"),
        (999_600, "1.0 MB"),
        (2.5e9, "2.5 GB"),
        (7.3e12, "7.3 TB"),
    ],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


# --- charts ------------------------------------------------------------------------------------------------


def test_charts_are_written_as_png_and_svg(tmp_path):
    comparison = compare([demo(tmp_path / "runs")])
    for suffix in ("png", "svg"):
        drawn = accuracy_chart(comparison, tmp_path / f"chart.{suffix}")
        curve = curves([tmp_path / "runs"], tmp_path / f"curve.{suffix}")
        for path in (drawn, curve):
            first = path.read_bytes()
            assert first.startswith(b"\x89PNG") if suffix == "png" else ElementTree.fromstring(first) is not None
    again = accuracy_chart(comparison, tmp_path / "again.svg")
    assert again.read_bytes() == (tmp_path / "chart.svg").read_bytes()
    shown = (tmp_path / "chart.svg").read_text()
    assert all(f"<!-- {row.label} -->" in shown for row in comparison.rows)
    assert all(f"<!-- {100 * row.mean.mean:.1f} -->" in shown for row in comparison.rows)
    svg = {"svg": "http://www.w3.org/2000/svg"}
    swarms = ElementTree.fromstring(shown).findall(".//svg:g[@id]", svg)
    dots = [len(g.findall(".//svg:use", svg)) for g in swarms if g.get("id", "").startswith("PathCollection")]
    assert dots == [40, 40, 40]  # 20 clients in 2 seeds


def test_charts_of_one_client_and_of_odd_names(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 0, 2)], 2: [(0, 0, 2)]}, "my $_^$ (a_b)")
    accuracy_chart(compare([tmp_path / "a"]), tmp_path / "a.png")
    curves([tmp_path / "a"], tmp_path / "b.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_charts_that_cannot_be_drawn_are_refused(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2)]})
    with pytest.raises(UserError, match=r"must end in \.png or \.svg"):
        accuracy_chart(compare([tmp_path]), tmp_path / "chart.gif")
    with pytest.raises(UserError, match="no run evaluated several rounds"):
        curves([tmp_path], tmp_path / "curve.png")
    assert not list(tmp_path.glob("*.*"))


def test_the_runs_own_select_is_the_default(tmp_path):
    counts = {1: [(0, 9, 10), (0, 1, 1, VAL)], 2: [(0, 5, 10), (0, 0, 1, VAL)]}
    wish = '[evaluation]\nselect = "best_val"'
    fake_run(tmp_path / "a", counts, "fedavg", settings=wish)
    fake_run(tmp_path / "b", counts, "ditto", settings=wish)
    assert compare(tmp_path).select == "best_val"
    assert compare(tmp_path).rows[0].pooled.mean == 0.9
    assert compare(tmp_path, select="last").rows[0].pooled.mean == 0.5
    fake_run(tmp_path / "c", counts, "local")
    assert compare(tmp_path).select == "last"  # the runs disagree
