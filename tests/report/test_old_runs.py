"""Runs recorded before metrics had names, with `correct` and `loss_sum` for each client, are still read.

`old_run` holds two of them, written by the last version of that form (240 rows of Gaussian blobs, linear models, 5
clients and a new one, 3 rounds), and what that version printed: summaries, comparisons as JSON, lines of progress.
"""

import json
import shutil
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from bespoke import loggers
from bespoke.records import CLIENTS, ROUNDS, RunFolder
from bespoke.report import charts, client_chart, compare, curves, summarise
from bespoke.report.summary import sentence
from bespoke.runs.progress import headline_text

OLD = Path(__file__).parent / "old_run"


def printed(name):
    return json.loads((OLD / "printed" / f"{name}.json").read_text())


def contains(new, old, path=""):
    """Assert that `new` has every value of `old`, to the bit, and perhaps more."""
    if isinstance(old, dict):
        for key, value in old.items():
            contains(new[key], value, f"{path}/{key}")
    else:
        assert new == old, path


def events(method):
    """The rounds of an old run as callbacks would see them."""
    folder = RunFolder(OLD / method)
    lines = {number: list(own) for number, own in groupby(folder.clients(), key=lambda line: line["round"])}
    rows = folder.rounds()
    return [
        SimpleNamespace(round=row["round"], rounds=len(rows), row=row, evaluated=lines[row["round"]], seconds={})
        for row in rows
    ]


@pytest.mark.parametrize("method", ["fedavg", "fedrod"])
def test_the_summary_has_the_same_numbers_and_those_of_the_loss(method):
    old, new = json.loads((OLD / method / "summary.json").read_text()), summarise(OLD / method)
    contains(new, old)
    assert (new["headline"], new["metric"], new["higher"]) == (
        "personal",
        "accuracy",
        {"accuracy": True, "loss": False},
    )
    for view in new["views"].values():
        assert len({view[select]["round"] for select in ("last", "best_val", "best_test")}) > 1
        assert view["last"]["metrics"]["loss"]["all"]["pooled"] == view["last"]["all"]["loss"]


@pytest.mark.parametrize(
    ("name", "options"), [("compare", {}), ("best_val", {"select": "best_val"}), ("new", {"group": "new"})]
)
def test_comparisons_have_the_same_numbers(name, options):
    old, new = printed(name), compare(OLD, **options).as_dict()
    for row in old["rows"]:
        if row["difference"]:
            row["difference"] = {"pairs": row["difference"].pop("clients")} | row["difference"]
    old["caption"], spread = old["caption"].split("; ")
    assert new["caption"].startswith(f"{old.pop('caption')}; {spread}")
    for mine, row in zip(new["rows"], old.pop("rows"), strict=True):
        contains(mine, row)
    contains(new, old)


def test_the_loss_can_be_compared_too(tmp_path):
    comparison = compare(OLD, metric="loss", baseline="fedro")
    assert (comparison.higher, comparison.baseline) == (False, "fedrod")
    assert comparison.rows[0].pooled.mean == summarise(OLD / "fedavg")["views"]["personal"]["last"]["all"]["loss"]
    assert client_chart(comparison, tmp_path / "chart.png").stat().st_size > 1000


def test_curves_have_the_accuracies_of_the_lines(tmp_path):
    found = charts.curve_values(OLD)[2]
    for method in ("fedavg", "fedrod"):
        shares = {1: [], 2: [], 3: []}
        for text in (OLD / method / CLIENTS).read_text().splitlines():
            line = json.loads(text)
            if (line["view"], line["split"]) == ("personal", "test") and line["group"] != "new":
                shares[line["round"]].append(line["correct"] / line["total"])
        rounds, values = found[method]
        assert rounds == [1, 2, 3]
        assert values[0] == pytest.approx([sum(own) / len(own) for own in shares.values()])
    assert curves(OLD, tmp_path / "curves.png").stat().st_size > 1000


def test_progress_and_tools_show_the_same_numbers():
    lines = []
    for method in ("fedavg", "fedrod"):
        for event in events(method):
            loss = event.row["train_loss"]
            text = headline_text(event, "pooled")
            lines.append(f"{method}: round {event.round}/{event.rounds}, train loss {loss:.4f}, {text}")
    assert lines == (OLD / "printed" / "progress.txt").read_text().splitlines()
    values = loggers.scalars(events("fedrod")[-1])
    last = summarise(OLD / "fedrod")["views"]["personal"]["last"]["all"]
    assert values["accuracy/personal/test/pooled"] == last["pooled"]
    assert values["accuracy/personal/test/mean"] == last["mean"]
    assert values["loss/personal/test/pooled"] == last["loss"]
    assert "accuracy/global/val/mean" in values
    assert sentence(summarise(OLD / "fedrod")) == (
        "last round (3), personal model, all 5 clients with test rows: accuracy 57.78 % pooled, "
        "58.25 % mean over clients"
    )


def test_an_old_run_that_was_continued_is_one_run(tmp_path):
    folder = RunFolder(shutil.copytree(OLD / "fedrod", tmp_path / "run"))
    before = summarise(folder)
    number = {"round": 4}
    rows = [line | number for line in folder.clients() if line["round"] == 3]
    evaluated = {"view": "global", "metric": "loss", "higher": {"accuracy": True, "loss": False}}
    folder.append(ROUNDS, [folder.rounds()[-1] | number | {"evaluated": evaluated}])
    folder.append(CLIENTS, rows)
    after = summarise(folder)
    assert (after["headline"], after["metric"]) == ("global", "loss")
    contains(
        after["views"]["personal"]["last"]["metrics"]["accuracy"]["all"],
        {key: value for key, value in before["views"]["personal"]["last"]["all"].items() if key != "loss"},
    )
    assert after["views"]["global"]["last"]["round"] == 4


def test_old_lines_are_exported_with_metrics(tmp_path):
    folder = RunFolder(shutil.copytree(OLD / "fedrod", tmp_path / "run"))
    table = pq.read_table(folder.export_parquet()[1]).to_pylist()
    lines = [json.loads(text) for text in (OLD / "fedrod" / CLIENTS).read_text().splitlines()]
    assert [(row["metric.accuracy.sum"], row["metric.loss.sum"]) for row in table] == [
        (line["correct"], line["loss_sum"]) for line in lines
    ]
    assert all(row["metric.accuracy.weight"] == row["metric.loss.weight"] == row["total"] for row in table)
