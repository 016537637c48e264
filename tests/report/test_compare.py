import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from rich.console import Console
from scipy import stats

from bespoke.errors import UserError
from bespoke.files import write_atomic
from bespoke.records import CLIENTS, FEDERATION, ROUNDS, TIMING, RunFolder
from bespoke.report import charts, client_chart, compare, curves, find_runs, page, summarise
from bespoke.report.page.figures import HUES
from bespoke.report.summary import Evaluations, headline, pick, population, sentence
from bespoke.report.table import Difference, human_bytes

HIGHER = {"accuracy": True, "loss": False}


def fake_run(path, counts, name="fedavg", seed=0, settings="", data="", refused=None, note=None, headline=None):
    """A run folder; `counts` is {round: rows} with rows (client, correct, total) and optional columns.

    `headline` changes what the record says of the headline; `metrics` among the columns replaces the counts.
    """
    folder = RunFolder.create(path)
    text = f'seed = {seed}\n[data]\nname = "digits"\n{data}\n[algorithm]\nname = "{name}"\n{settings}\n'
    write_atomic(folder.path / "config.toml", text)
    common = {"group": "train", "split": "test", "view": "personal", "logged": {}}
    for number, rows in counts.items():
        lines = []
        for client, correct, total, *more in rows:
            metrics = {"accuracy": [correct, total], "loss": [1.0, total]}
            own = {"round": number, "client": client, **common, "total": total, "metrics": metrics}
            lines.append(own | (more[0] if more else {}))
        row = {
            "round": number,
            "cohort": [0, 1],
            "refused": refused or {},
            "train_loss": 1.0,
            "bytes_down": 3000,
        }
        row |= {"bytes_up": 2000, "padding_waste": 0.0, "host_breaks": 0, "logged": {}}
        row |= {"note": note} if note else {}
        evaluated = {"view": lines[0]["view"], "metric": "accuracy", "higher": HIGHER} | (headline or {})
        folder.append(ROUNDS, [row | {"evaluated": evaluated}])
        folder.append(CLIENTS, lines)
        folder.append(TIMING, [{"round": number, "train": number, "aggregate": 0.5, "evaluate": 0.25, "checkpoint": 0}])
    return folder


def scored(*metrics, rows=10, **columns):
    """Rows of clients 0, 1, ... with these metrics, {name: [sum, weight]} each."""
    return [(i, 0, rows, {"metrics": own, **columns}) for i, own in enumerate(metrics)]


VAL, NEW, UNSEEN = {"split": "val"}, {"group": "new"}, {"group": "unseen"}
GLOBAL = {"view": "global"}


# --- summaries ---------------------------------------------------------------------------------------------


def test_summary_keeps_groups_apart(tmp_path):
    rows = [(0, 1, 1), (1, 5, 10), (2, 80, 100, UNSEEN), (3, 0, 50, NEW), (4, 0, 0)]
    summary = summarise(fake_run(tmp_path, {3: rows}))
    last = summary["views"]["personal"]["last"]
    assert set(last) == {"round", "all", "train", "unseen", "new", "metrics"}
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
    assert (summary["headline"], summary["metric"], summary["higher"]) == ("personal", "accuracy", HIGHER)
    assert {name: view["last"]["all"]["pooled"] for name, view in summary["views"].items()} == {
        "personal": 0.5,
        "global": 1.0,
    }
    for key in ("headline", "metric", "higher", "views"):
        del summary[key]
    assert summary == {
        "rounds": 2,
        "participations": 4,
        "bytes_down": 6000,
        "bytes_up": 4000,
        "seconds": 4.5,
        "round_seconds": 2.0,
        "refused": 2,
        "rounds_refused": 0,
        "notes": ["runs in the loop"],
    }


def test_a_loss_that_is_not_known_is_none(tmp_path):
    unknown = {"metrics": {"accuracy": [1, 2], "loss": [math.nan, 2]}}
    last = summarise(fake_run(tmp_path, {1: [(0, 1, 2, unknown), (1, 1, 2)]}))["views"]["personal"]["last"]
    assert (last["all"]["pooled"], last["all"]["loss"]) == (0.5, None)
    loss = last["metrics"]["loss"]["all"]
    assert loss["clients"] == 2
    assert {loss[key] for key in ("pooled", "mean", "std", "std0", "worst10", "cv")} == {None}


def test_a_run_without_evaluation_has_an_empty_summary(tmp_path):
    summary = summarise(fake_run(tmp_path, {}))
    assert (summary["headline"], summary["views"], summary["round_seconds"]) == (None, {}, None)


def test_a_client_recorded_twice_is_refused(tmp_path):
    folder = fake_run(tmp_path, {1: [(0, 1, 2), (7, 1, 2)]})
    folder.append(CLIENTS, list(folder.clients())[-1:])
    with pytest.raises(UserError, match="client 7 twice in round 1"):
        summarise(folder)


def test_the_record_names_the_headline_and_not_the_order_of_its_lines(tmp_path):
    rows = [(0, 2, 2, GLOBAL), (0, 1, 2)]
    folder = fake_run(tmp_path, {1: rows, 2: rows}, headline={"view": "personal"})
    summary = summarise(folder)
    assert summary["headline"] == "personal" and list(summary["views"]) == ["personal", "global"]
    assert compare([tmp_path]).rows[0].pooled.mean == 0.5


def test_summary_of_an_error_chooses_and_ranks_by_the_smallest(tmp_path):
    counts = {
        1: scored({"mse": [40.0, 10], "mae": [5.0, 10]}, {"mse": [20.0, 10], "mae": [5.0, 10]}),
        2: scored({"mse": [10.0, 10], "mae": [9.0, 10]}, {"mse": [30.0, 10], "mae": [9.0, 10]}),
        3: scored({"mse": [20.0, 10], "mae": [1.0, 10]}, {"mse": [30.0, 10], "mae": [3.0, 10]}),
    }
    counts[1] += scored({"mse": [1.0, 10]}, **VAL)
    counts[2] += scored({"mse": [2.0, 10]}, **VAL)
    counts[3] += scored({"mse": [3.0, 10]}, **VAL)
    error = {"metric": "mse", "higher": {"mse": False, "mae": False}}
    summary = summarise(fake_run(tmp_path, counts, headline=error))
    view = summary["views"]["personal"]
    assert (summary["metric"], summary["higher"]) == ("mse", error["higher"])
    assert (view["last"]["round"], view["best_val"]["round"], view["best_test"]["round"]) == (3, 1, 2)
    assert (view["best_test"]["all"]["pooled"], view["best_test"]["all"]["worst10"]) == (2.0, 3.0)
    assert view["last"]["all"]["loss"] is None  # not recorded
    assert list(view["last"]["metrics"]) == ["mae"]
    assert (view["last"]["metrics"]["mae"]["all"]["pooled"], view["last"]["metrics"]["mae"]["all"]["worst10"]) == (
        0.2,
        0.3,
    )
    assert pick(summary, "mae", select="best_val")["pooled"] == 0.5
    assert sentence(summary, "best_test") == (
        "best on test (oracle) (2), personal model, all 2 clients with test rows: mse 2.000 pooled, "
        "2.000 mean over clients"
    )


def test_a_metric_that_not_every_round_or_client_has(tmp_path):
    counts = {
        1: [(0, 1, 2), (1, 1, 2)],
        2: scored({"accuracy": [1, 2], "auroc": [0.0, 0.0]}, {"accuracy": [2, 2], "auroc": [3.0, 4.0]}, rows=2),
    }
    higher = {"higher": HIGHER | {"auroc": True}}
    folder = fake_run(tmp_path, counts, headline=higher)
    view = summarise(folder)["views"]["personal"]
    auroc = view["last"]["metrics"]["auroc"]["all"]
    assert (auroc["clients"], auroc["excluded"], auroc["pooled"]) == (1, 1, 0.75)
    assert view["last"]["metrics"]["loss"] == {}  # the last round has none
    comparison = compare([tmp_path], metric="auroc")
    assert "training population (1 without a defined auroc left out)" in comparison.caption
    assert strip(comparison, "pooled") == ["75.0"]


def test_vectors_of_different_lengths_are_named(tmp_path):
    counts = {3: scored({"f1": [[1, 1], [2, 2]]}, {"f1": [[1], [2]]})}
    folder = fake_run(tmp_path, counts, headline={"metric": "f1", "higher": {"f1": True}})
    with pytest.raises(UserError, match=r"holds f1 of different lengths in round 3 \(test, personal\)"):
        summarise(folder)


def test_numbers_that_a_summary_does_not_have(tmp_path):
    summary = summarise(fake_run(tmp_path, {1: [(0, 1, 2)]}))
    for wrong, words in (
        ({"metric": "mse"}, "there is no metric 'mse'; use one of accuracy, loss"),
        ({"view": "global"}, "there is no view 'global'; use one of personal"),
        ({"select": "first"}, "there is no selection 'first'; use one of last, best_val, best_test"),
        ({"group": "old"}, "there is no group 'old'; use one of all, train, unseen, new"),
    ):
        with pytest.raises(UserError, match=words):
            pick(summary, **wrong)
    assert pick(summary, group="new") == pick(summary, select="best_val") == {}
    unknown = {"metrics": {"accuracy": [1, 2], "loss": [math.nan, 2]}}
    lost = summarise(fake_run(tmp_path / "b", {1: [(0, 1, 2, unknown)]}, headline={"metric": "loss"}))
    assert sentence(lost) == "last round (1), personal model, all 1 clients with test rows: loss is not finite"


def test_the_headline_of_a_round(tmp_path):
    rows = [(0, 2, 2, GLOBAL), (0, 1, 2), (0, 3, 4, VAL), (1, 1, 4, VAL | UNSEEN), (2, 4, 4, VAL | NEW)]
    folder = fake_run(tmp_path, {1: rows}, headline={"view": "personal", "metric": "loss"})
    row, lines = folder.rounds()[0], list(folder.clients())
    found = headline(row, lines)
    assert found[:2] == ("personal", "loss")
    assert found.better(0.1, 0.2) and not found.better(0.2, 0.2)
    assert found.scores(lines).pooled() == 0.5
    assert found.scores(lines, "val").pooled() == 2 / 8  # of the training population
    assert [line["client"] for line in population(lines, "personal", "val")] == [0, 1]
    assert headline({}, lines) == ("global", "accuracy", HIGHER)  # as in older records
    assert headline({}, lines).better(0.2, 0.1)
    assert headline(row, []) is None


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
        "(std) over clients, [95 %] over clients (paired t interval, for this partition and seed only)"
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
    assert ditto.top10_samples.mean == pytest.approx(0.5)  # the first of two clients with as many rows
    assert compare(tmp_path).as_dict()["rows"][1]["top10_samples"]["se"] == ditto.top10_samples.se
    found = ditto.difference
    assert (found.mean, found.over, found.pairs) == (pytest.approx(0.15), "seeds", 3)
    assert (found.low, found.high) == pytest.approx((0.15, 0.15))  # every seed gives the same difference
    assert len(ditto.values) == 6


def test_the_interval_over_seeds_is_that_of_the_seeds_own_differences(tmp_path):
    # client 0 of one seed has nothing to do with client 0 of another
    right = {0: (0, 0), 1: (0, 0), 2: (0, 0)}
    gains = {0: (1000, 404), 1: (374, 1000), 2: (404, 404)}  # of 1000 rows: 70.2, 68.7 and 40.4 % on average
    for seed in right:
        fake_run(tmp_path / "a" / str(seed), {1: [(i, n, 1000) for i, n in enumerate(right[seed])]}, "fedavg", seed)
        fake_run(tmp_path / "b" / str(seed), {1: [(i, n, 1000) for i, n in enumerate(gains[seed])]}, "ditto", seed)
    comparison = compare(tmp_path)
    found = comparison.rows[1].difference
    assert (found.over, found.pairs) == ("seeds", 3)
    assert (100 * found.mean, 100 * found.low, 100 * found.high) == pytest.approx((59.8, 18.1, 101.5), abs=0.05)
    assert strip(comparison, "minus fedavg [95 %]") == ["baseline", "+59.8 [18.1,101.5]"]
    assert comparison.caption.endswith(
        "seeds 0 1 2; ± std over seeds, (std) over clients, "
        "[95 %] over seeds (t interval of the seeds' own paired differences)"
    )
    one = compare([tmp_path / "a" / "0", tmp_path / "b" / "0"])
    assert (one.rows[1].difference.over, one.rows[1].difference.pairs) == ("clients", 2)
    assert one.caption.endswith("[95 %] over clients (paired t interval, for this partition and seed only)")


def test_intervals_over_seeds_and_over_clients_do_not_share_a_column(tmp_path):
    for seed in (0, 1):
        fake_run(tmp_path / "a" / str(seed), {1: [(0, 1, 10), (1, 3, 10)]}, "fedavg", seed)
        fake_run(tmp_path / "b" / str(seed), {1: [(0, 4 + seed, 10), (1, 3, 10)]}, "ditto", seed)
    fake_run(tmp_path / "c", {1: [(0, 4, 10), (1, 3, 10)]}, "fedrep", 1)
    comparison = compare(tmp_path)
    assert [row.difference and row.difference.over for row in comparison.rows] == [None, "seeds", "clients"]
    assert strip(comparison, "minus fedavg [95 %]")[2] == "+15.0"
    assert "[95 %] over seeds" in comparison.caption


def test_an_error_is_compared_with_its_own_sign_and_unit(tmp_path):
    error = {"metric": "mse", "higher": {"mse": False, "r2": True}}
    values = {"fedavg": (31.0, 52.0), "fedrep": (11.0, 44.0), "ditto": (30.0, 40.0)}
    for name, (a, b) in values.items():
        counts = {4: scored({"mse": [a, 10], "r2": [1.0, 4.0]}, {"mse": [b, 10], "r2": [3.0, 4.0]})}
        fake_run(tmp_path / name, counts, name, headline=error)
    comparison = compare(tmp_path)
    assert (comparison.metric, comparison.higher) == ("mse", False)
    assert comparison.title == "Test mse, lower is better, last round"
    assert comparison.caption.startswith("test mse, lower is better, all clients of the training population, ")
    assert strip(comparison, "method") == ["ditto", "fedavg", "fedrep"]
    assert strip(comparison, "pooled") == ["3.500", "4.150", "2.750"]
    assert strip(comparison, "worst 10 %") == ["4.000", "5.200", "4.400"]  # the largest error
    assert [cell.split()[0] for cell in strip(comparison, "minus fedavg [95 %]")] == ["-0.650", "baseline", "-1.400"]
    bold = [line for line in comparison.markdown().splitlines() if "**" in line]
    assert "**2.750**" in bold[1] and "**4.000**" in bold[0] and len(bold) == 2
    by_name = compare(tmp_path, metric="r2")
    assert by_name.title == "Test r2, last round" and strip(by_name, "pooled") == ["0.5000"] * 3
    assert compare(tmp_path, metric="r2", select="best_test").caption.count("best on test (oracle) by mse") == 1


def test_metrics_that_cannot_be_compared_are_named(tmp_path):
    higher = {"mse": False, "score": True}
    rows = {1: scored({"mse": [1.0, 10], "score": [1.0, 10], "accuracy": [1, 10]})}
    fake_run(tmp_path / "a", rows, "fedavg", headline={"metric": "mse", "higher": higher})
    fake_run(tmp_path / "b", rows, "ditto", headline={"metric": "score", "higher": higher | {"mse": True}})
    with pytest.raises(UserError, match=r"different headline metrics \(.*/a: mse; .*/b: score\); name the metric"):
        compare(tmp_path)
    with pytest.raises(UserError, match="/a has no metric 'auroc'; it has mse, score"):
        compare(tmp_path, metric="auroc")
    with pytest.raises(UserError, match="disagree on whether a larger mse is better"):
        compare(tmp_path, metric="mse")
    assert compare(tmp_path, metric="score").metric == "score"


def test_a_value_that_is_not_finite_is_a_dash_and_a_warning(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2), (1, 1, 2)]}, "fedavg")
    fake_run(tmp_path / "b", {1: scored({"loss": [math.inf, 2]}, {"loss": [1.0, 2]}, rows=2)}, "ditto")
    comparison = compare(tmp_path, metric="loss")
    assert comparison.warnings == ("ditto: loss is not finite for some client",)
    assert comparison.cells()[1][1][:4] == ["ditto", "- (-)", "-", "-"]
    assert comparison.rows[1].difference is None
    assert "**" in comparison.markdown() and "| **- (-)**" not in comparison.markdown()
    json.dumps(comparison.as_dict(), allow_nan=False)
    client_chart(comparison, tmp_path / "chart.png")
    fake_run(tmp_path / "c" / "d", {1: scored({"loss": [math.inf, 2]}, rows=2)}, "ditto")
    with pytest.raises(UserError, match="no client has a finite loss"):
        client_chart(compare(tmp_path / "c", metric="loss"), tmp_path / "none.png")


def test_a_baseline_is_known_by_a_part_of_its_label(tmp_path):
    for mu in ("0.1", "1.0"):
        fake_run(tmp_path / mu, {1: [(0, 1, 2)]}, "fedprox", 0, f"mu = {mu}")
    fake_run(tmp_path / "c", {1: [(0, 1, 2)]}, "fedproto")
    for wanted, label in (
        ("fedproto", "fedproto"),
        ("fedprot", "fedproto"),
        ("fedprox (mu=1", "fedprox (mu=1.0)"),
        ("mu=0.1", "fedprox (mu=0.1)"),
    ):
        assert compare(tmp_path, wanted).baseline == label
    with pytest.raises(
        UserError, match=r"the baseline 'fedprox' may mean fedprox \(mu=0.1\) or fedprox \(mu=1.0\); give"
    ):
        compare(tmp_path, "fedprox")
    with pytest.raises(UserError, match=r"no runs of the baseline 'mu=2'; use one of fedprox \(mu=0.1\), "):
        compare(tmp_path, "mu=2")


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
    assert comparison.warnings == ("ditto and fedavg were tested on different rows, so they are not paired",)
    assert comparison.rows[1].difference is None


def test_clients_without_test_rows_and_refused_uploads_are_told(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2), (1, 0, 0)]}, "fedavg", refused={"1": "NaN"})
    fake_run(tmp_path / "b", {1: [(0, 2, 2), (1, 0, 0)]}, "ditto")
    comparison = compare([tmp_path])
    assert "training population (1 without test rows left out)" in comparison.caption
    assert comparison.warnings == ("fedavg: 1 upload was refused and left out of the aggregate",)
    assert comparison.rows[1].difference == Difference(0.5, None, None, "clients", 1)
    assert strip(comparison, "mean (std)") == ["50.0 (-)", "100.0 (-)"]
    assert strip(comparison, "minus fedavg [95 %]") == ["baseline", "+50.0"]


def test_unequal_last_rounds_unfinished_and_repeated_runs_are_told(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2)], 2: [(0, 1, 2)]}, "fedavg")
    fake_run(tmp_path / "b", {1: [(0, 2, 2)]}, "ditto")
    fake_run(tmp_path / "c", {1: [(0, 0, 2)]}, "ditto")
    fake_run(tmp_path / "d", {}, "local")
    comparison = compare([tmp_path])
    assert [warning.replace(str(tmp_path), "") for warning in comparison.warnings] == [
        "/d is left out: it holds no evaluation; finish it with --resume (resume=True in Python)",
        "/c is left out: it repeats /b (same settings and seed)",
        "not the same last round (fedavg: 2; ditto: 1)",
    ]
    assert [row.pooled.mean for row in comparison.rows] == [0.5, 1.0]
    with pytest.raises(UserError, match="holds no evaluation; finish"):
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
        (lambda: compare([]), "no folder was given"),
        (lambda: compare([tmp_path / "absent"]), "there is no folder"),
        (lambda: compare([tmp_path / "runs", tmp_path / "empty"]), "no run in .*empty"),
        (
            lambda: compare([tmp_path / "runs"], baseline="ditto"),
            "no runs of the baseline 'ditto'; use one of fedavg",
        ),
        (lambda: compare([tmp_path / "runs"], select="best"), "unknown select 'best'; use one of last, "),
        (lambda: compare([tmp_path / "runs"], group="old"), "there is no group 'old'; use one of all, "),
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


def test_numbers_in_names_count_as_numbers(tmp_path):
    names = ["lr0.01", "lr0.1", "lr0.25", "lr0.3", "run1", "run02", "run2", "run10", "run" + "9" * 70, "run²"]
    for name in reversed(names):
        fake_run(tmp_path / name, {1: [(0, 1, 2)]}, name)
    assert [folder.path.name for folder in find_runs(tmp_path)] == names
    assert list(page.page_of(tmp_path).methods) == names
    for name in ("a", "a-b"):
        fake_run(tmp_path / "more" / name / "0", {1: [(0, 1, 2)]}, name)
    assert [folder.path.parent.name for folder in find_runs(tmp_path / "more")] == ["a", "a-b"]


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


def test_labels_and_warnings_are_text_in_markdown_and_on_a_terminal(tmp_path):
    hostile = "fed_rep (name=a|b *c* `d` <img> [e](f) _g_ \\ \n \x1b[31m)"
    plain = compare(fake_run(tmp_path, {1: [(0, 1, 2), (1, 2, 2)]}).path)
    comparison = replace(plain, rows=(replace(plain.rows[0], label=hostile),), warnings=(hostile,))
    safe = r"fed_rep (name=a\|b \*c\* \`d\` \<img> \[e](f) \_g\_ \\ \\n \\x1b\[31m)"
    markdown = comparison.markdown()
    assert markdown.splitlines()[2].startswith(f"| {safe} |") and markdown.rstrip().endswith(f"warning: {safe}")
    assert "\x1b" not in comparison.text() and "\\x1b[31m" in comparison.text()


def test_text_markdown_json_and_terminal_show_the_same(tmp_path):
    comparison = compare([demo(tmp_path)])
    header, rows = comparison.cells()
    lines = comparison.text().splitlines()
    assert str(comparison).splitlines() == repr(comparison).splitlines() == lines
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
    assert (row["difference"]["over"], row["difference"]["pairs"]) == ("seeds", 2)
    assert (data["metric"], data["higher_is_better"]) == ("accuracy", True)
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


# --- conditions --------------------------------------------------------------------------------------------

CONDITIONS = [
    "noise of variance 0.1",
    "noise of variance 1",
    "jitter by 1, 2",
    "imbalance",
    "jitter by 2, 1",
    "imbalance",
]
LEVELS = [(0, 2, 10), (1, 4, 20), (2, 9, 10), (3, 5, 10, UNSEEN), (4, 1, 10, NEW), (5, 8, 10, NEW)]


def conditioned(path, rows=LEVELS, conditions=CONDITIONS, **more):
    """A run folder whose federation names each client's condition."""
    folder = fake_run(path, {2: rows}, **more)
    folder.write_json(FEDERATION, described(conditions))
    return folder


def described(conditions):
    """What a federation's file says of clients that have these conditions."""
    rows = {split: [1] * len(conditions) for split in ("train", "val", "test")}
    names = [f"c{i}" for i in range(len(conditions))]
    return {"clients": len(conditions), "names": names, **rows, "conditions": conditions}


def test_a_summary_tells_conditions_apart(tmp_path):
    counts = {1: [(*row[:1], 10, *row[2:]) for row in LEVELS], 2: LEVELS}
    folder = fake_run(tmp_path, counts)
    plain = summarise(folder)
    folder.write_json(FEDERATION, described(CONDITIONS))
    summary = summarise(folder)
    last = summary["views"]["personal"]["last"]
    conditions = last.pop("conditions")
    assert {name: list(groups) for name, groups in conditions.items()} == {
        "noise": ["all", "train"],
        "jitter": ["all", "train", "new"],
        "imbalance": ["all", "unseen", "new"],
    }
    noise = conditions["noise"]["train"]
    assert (noise["clients"], noise["mean"], noise["pooled"]) == (2, 0.2, 6 / 30)
    assert {name: groups["new"]["pooled"] for name, groups in conditions.items() if "new" in groups} == {
        "jitter": 0.1,
        "imbalance": 0.8,
    }
    assert summary["views"]["personal"]["best_test"].pop("conditions")["noise"]["all"]["pooled"] == 20 / 30
    assert summary == plain  # else it is what it was


def test_numbers_of_a_condition_are_picked_by_its_kind_or_its_text(tmp_path):
    folder = conditioned(tmp_path)
    summary, evaluations = summarise(folder), Evaluations(folder)
    assert pick(summary, group="all:jitter")["pooled"] == evaluations.pick(group="all:jitter")["pooled"] == 0.9
    assert pick(summary, group="new:jitter")["mean"] == 0.1
    assert pick(summary, group="new:noise") == evaluations.pick(group="new:noise") == {}
    assert pick(summary, group="new:noise", select="best_val") == evaluations.pick(group="new:noise", select="best_val")
    assert evaluations.pick(group="all:noise of variance 1")["pooled"] == 0.2
    assert evaluations.pick("loss", group="train:noise")["pooled"] == pytest.approx(2 / 30)
    assert evaluations.scores("personal", "accuracy", 2, "new:imbalance").clients == [5]
    with pytest.raises(UserError, match="there is no condition 'fog' in the summary; use one of noise, jitter, imb"):
        pick(summary, group="all:fog")
    with pytest.raises(UserError, match=f"no condition 'fog' in {tmp_path}; use one of noise, jitter, imbalance$"):
        evaluations.pick(group="all:fog")
    with pytest.raises(UserError, match=r"a summary has accuracy alone by condition: read loss with Evaluations\.pick"):
        pick(summary, "loss", group="all:noise")
    for wrong in ({"view": "global"}, {"metric": "f1"}, {"select": "first"}, {"group": "noise"}):
        with pytest.raises(UserError, match="there is no"):
            evaluations.pick(**wrong)


def test_conditions_that_do_not_fit_the_clients_are_refused_and_only_when_asked_for(tmp_path):
    plain = fake_run(tmp_path / "plain", {2: LEVELS})
    for group in ("all:noise", "new:clean"):
        with pytest.raises(UserError, match="plain names no conditions of clients"):
            compare(plain.path, group=group)
        with pytest.raises(UserError, match="the summary names no conditions of clients"):
            pick(summarise(plain), group=group)
    with pytest.raises(UserError, match="plain names no conditions of its clients; compare it without --by"):
        compare(plain.path, by="condition")
    few = conditioned(tmp_path / "few", conditions=CONDITIONS[:4])
    with pytest.raises(UserError, match="few names no condition of client 4; run the experiment again"):
        compare(few.path, group="new:noise")
    sound = described(["fog:1"])
    for told in (
        sound | {"conditions": ["fog:1", "fog:2"]},
        sound | {"conditions": [3]},
        sound | {"conditions": None},
        sound | {"names": 1},
        ["fog:1"],
    ):
        few.write_json(FEDERATION, told)
        with pytest.raises(UserError, match=r"federation.json is damaged; restore it or run the experiment again"):
            compare(few.path, group="all:fog")
        assert len(compare(few.path).rows) == 1


def test_a_comparison_of_one_condition(tmp_path):
    conditioned(tmp_path / "a")
    conditioned(tmp_path / "b", [(i, c + 1, n, *more) for i, c, n, *more in LEVELS], name="ditto")
    found = compare(tmp_path, group="train:noise")
    assert [row.pooled.mean for row in found.rows] == [6 / 30, 8 / 30]
    assert found.rows[1].difference.pairs == 2
    assert "test accuracy in %, clients that took part in training, condition noise, personal model" in found.caption
    assert compare(tmp_path, group="new:jitter by 2, 1").rows[0].mean.mean == 0.1
    with pytest.raises(
        UserError, match="a has no test rows of new clients, held out from training, condition noise; ch"
    ):
        compare(tmp_path / "a", group="new:noise")


def test_a_column_for_each_condition(tmp_path):
    for seed in (0, 1):
        rows = [(i, c + seed, n, *more) for i, c, n, *more in LEVELS]
        conditioned(tmp_path / f"a{seed}", rows, seed=seed)
        conditioned(tmp_path / f"b{seed}", [(i, 5, n, *more) for i, _, n, *more in LEVELS], seed=seed, name="ditto")
    found = compare(tmp_path, by="condition")
    header, rows = found.cells()
    assert header == ["method", "mean (std)", "pooled", "noise", "jitter", "imbalance"]
    assert rows[0] == ["fedavg", "49.4±6.2 (33.8)", "44.0±5.7", "23.8±5.3", "95.0±7.1", "55.0±7.1"]
    assert rows[1] == ["ditto", "43.8±0.0 (12.5)", "40.0±0.0", "37.5±0.0", "50.0±0.0", "50.0±0.0"]
    assert found.text().splitlines()[1].split() == ["method", "mean", "(std)", *header[2:]]
    assert found.caption.endswith("± std over seeds, (std) over clients; by condition: mean over its clients")
    assert found.markdown().splitlines()[2:4] == [
        "| fedavg | **49.4±6.2 (33.8)** | **44.0±5.7** | 23.8±5.3 | **95.0±7.1** | **55.0±7.1** |",
        "| ditto | 43.8±0.0 (12.5) | 40.0±0.0 | **37.5±0.0** | 50.0±0.0 | 50.0±0.0 |",
    ]
    told = json.loads(json.dumps(found.as_dict(), allow_nan=False))["rows"][0]
    assert told["conditions"]["noise"]["clients"] == 2
    assert told["conditions"]["noise"]["mean"] == {
        "mean": pytest.approx(0.2375),
        "std": pytest.approx(0.0375 * math.sqrt(2)),
        "se": pytest.approx(0.0375),
    }
    assert told["conditions"]["noise"]["pooled"]["mean"] == pytest.approx((6 / 30 + 8 / 30) / 2)
    assert "conditions" not in compare(tmp_path).as_dict()["rows"][0]
    new = compare(tmp_path, group="new", by="condition")
    assert new.cells()[0][3:] == ["jitter", "imbalance"]
    with pytest.raises(UserError, match="unknown by 'group'; use one of condition"):
        compare(tmp_path, by="group")


def test_a_condition_that_one_method_lacks_has_no_value_there(tmp_path):
    conditioned(tmp_path / "a")
    conditioned(tmp_path / "b", LEVELS[:3], name="ditto")
    conditioned(tmp_path / "c", LEVELS[1:], name="ditto", seed=1)
    found = compare(tmp_path, by="condition")
    assert [row.split()[-2] for row in found.text().splitlines()[2:4]] == ["50.0", "-"]
    assert [list(row.conditions) for row in found.rows] == [["noise", "jitter", "imbalance"], ["noise", "jitter"]]


@pytest.mark.parametrize("width", [70, 100])
def test_no_number_is_cut_on_a_terminal_however_many_conditions_there_are(tmp_path, width):
    kinds = ["motion blur", "fog", "JPEG compression", "a", "b", "c", "d", "e", "f", "g"]
    conditions = [f"{name}:{i % 5}" for i, name in enumerate(kinds)]
    for seed in (0, 1):
        rows = [(i, i + seed, 20) for i in range(10)]
        conditioned(tmp_path / str(seed), rows, conditions, seed=seed, settings="a_long_setting = 12345")
    found = compare(tmp_path, by="condition")
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(found.table())
    shown = console.export_text()
    assert "…" not in shown and shown.count("fedavg") == 3
    header, rows = found.cells()
    assert {word for cell in (*header, *rows[0]) for word in cell.split()} <= set(shown.split())


# --- charts ------------------------------------------------------------------------------------------------


def test_charts_are_written_as_png_svg_and_pdf(tmp_path):
    comparison = compare([demo(tmp_path / "runs")])
    for suffix, begins in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        assert client_chart(comparison, tmp_path / f"chart.{suffix}").read_bytes().startswith(begins)
        assert curves([tmp_path / "runs"], tmp_path / f"curve.{suffix}").read_bytes().startswith(begins)
    again = client_chart(comparison, tmp_path / "again.svg")
    assert again.read_bytes() == (tmp_path / "chart.svg").read_bytes()
    shown = (tmp_path / "chart.svg").read_text()
    assert all(f"<!-- {row.label} -->" in shown for row in comparison.rows)
    assert all(f"<!-- {100 * row.mean.mean:.1f} -->" in shown for row in comparison.rows)
    svg = {"svg": "http://www.w3.org/2000/svg"}
    swarms = ElementTree.fromstring(shown).findall(".//svg:g[@id]", svg)
    dots = [len(g.findall(".//svg:use", svg)) for g in swarms if g.get("id", "").startswith("PathCollection")]
    assert dots == [40, 40, 40]  # 20 clients in 2 seeds


@pytest.mark.parametrize(("methods", "metric"), [(1, "accuracy"), (2, "accuracy"), (6, "loss"), (16, "accuracy")])
def test_charts_of_a_sweep_show_every_word(tmp_path, monkeypatch, methods, metric):
    for i in range(methods):
        settings = f"mu = {i}.25\nregularisation_of_the_head = {i}\n[training]\nlr = 0.{i}\nbatch = {i}"
        counts = {n: [(c, (c + i) % 9, 10) for c in range(5)] for n in (1, 2)}
        fake_run(tmp_path / str(i), counts, "fedprox", 0, settings)
    drawn = []
    monkeypatch.setattr(charts, "save", lambda figure, path: drawn.append(figure))
    client_chart(compare(tmp_path, metric=metric), tmp_path / "a.png")
    curves(tmp_path, tmp_path / "b.png", metric=metric)
    labels = [row.label for row in compare(tmp_path).rows]
    for figure in drawn:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # a layout that fails is a warning, hence an error
        renderer = canvas.get_renderer()
        [axes] = figure.axes
        outside = [  # labels of ticks beyond the ends of their axis, which are not drawn
            tick.label1
            for axis in (axes.xaxis, axes.yaxis)
            for tick in axis.get_major_ticks()
            if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        ]
        texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
        texts = [text for text in texts if text not in outside]
        boxes = [text.get_window_extent(renderer) for text in texts]
        assert all(box.x0 >= 0 and box.y0 >= 0 for box in boxes)
        assert all(box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
        words = [" ".join(text.get_text().split()) for text in texts]
        assert set(labels) <= set(words)
        named = [box for text, box in zip(words, boxes, strict=True) if text in labels]
        assert len(named) == methods and not any(a.overlaps(b) for a, b in combinations(named, 2))
        inside = axes.get_window_extent(renderer)
        assert not any(inside.overlaps(box) for box in named)
        assert inside.width > 0.4 * figure.bbox.width and inside.height > 60


def test_curves_are_the_means_of_each_round(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2), (1, 1, 4)], 3: [(0, 2, 2), (1, 0, 4)]}, seed=0)
    fake_run(tmp_path / "b", {1: [(0, 0, 2), (1, 0, 4)], 2: [(0, 2, 2)], 3: [(0, 2, 2), (1, 4, 4)]}, seed=1)
    metric, higher, found = charts.curve_values(tmp_path)
    rounds, values = found["fedavg"]
    assert (metric, higher, rounds, values.tolist()) == ("accuracy", True, [1, 3], [[0.375, 0.5], [0.0, 1.0]])
    metric, higher, found = charts.curve_values(tmp_path / "a", metric="loss")
    assert (metric, higher, found["fedavg"][1].tolist()) == ("loss", False, [[0.375, 0.375]])


@pytest.mark.parametrize("name", ["my $_^$ (a_b)", "\u4e2d\u6587", "\u202eright to left", "n" * 10_000], ids=range(4))
def test_charts_of_one_client_and_of_odd_names(tmp_path, name):
    fake_run(tmp_path / "a", {1: [(0, 0, 2)], 2: [(0, 0, 2)]}, name)
    client_chart(compare([tmp_path / "a"]), tmp_path / "a.png")
    curves([tmp_path / "a"], tmp_path / "b.png")
    assert 1000 < (tmp_path / "a.png").stat().st_size < 100_000
    assert 1000 < (tmp_path / "b.png").stat().st_size < 100_000


@pytest.mark.parametrize(("metric", "first"), [("accuracy", "good"), ("loss", "bad")])
def test_the_best_method_comes_first(tmp_path, monkeypatch, metric, first):
    for name, value in (("bad", 1), ("good", 8), ("fair", 4)):  # as an accuracy; as a loss the other way round
        fake_run(tmp_path / name, {n: scored({metric: [value, 10]}) for n in (1, 2)}, name, headline={"metric": metric})
    drawn = []
    monkeypatch.setattr(charts, "save", lambda figure, path: drawn.append(figure))
    client_chart(compare(tmp_path, metric=metric), tmp_path / "a.png")
    curves(tmp_path, tmp_path / "b.png", metric=metric)
    rows = [tick.get_text() for tick in drawn[0].axes[0].get_yticklabels()]
    named = [text.get_text() for text in drawn[1].axes[0].get_legend().get_texts()]
    assert rows == named and rows[0] == first and rows[1] == "fair"


def test_many_lines_differ_in_more_than_their_colour(tmp_path, monkeypatch):
    for i in range(30):  # more than seven colours in four dashes
        fake_run(tmp_path / str(i), {n: [(0, (i + n) % 9, 10)] for n in (1, 2)}, f"method_{i}")
    drawn = []
    monkeypatch.setattr(charts, "save", lambda figure, path: drawn.append(figure))
    curves(tmp_path, tmp_path / "b.png")
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in drawn[0].axes[0].lines]
    assert len(set(looks)) == 30


def test_charts_and_pages_have_the_same_colours():
    style = (Path(page.__file__).parent / "page.css").read_text()
    assert tuple(re.findall(r"--c\d: (#\w+)", style)[: len(charts.COLOURS)]) == charts.COLOURS
    assert len(charts.COLOURS) == HUES


def test_charts_that_cannot_be_drawn_are_refused(tmp_path):
    fake_run(tmp_path / "a", {1: [(0, 1, 2)]})
    with pytest.raises(UserError, match=r"must end in \.png, \.svg or \.pdf"):
        client_chart(compare([tmp_path]), tmp_path / "chart.gif")
    with pytest.raises(UserError, match="no run evaluated several rounds"):
        curves([tmp_path], tmp_path / "curve.png")
    for draw in (lambda path: client_chart(compare([tmp_path]), path), lambda path: curves([tmp_path], path)):
        with pytest.raises(
            UserError, match=r"cannot write .*chart\.png: there is no folder .*nowhere; create it first"
        ):
            draw(tmp_path / "nowhere" / "chart.png")
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
