"""The command `compare` on two recorded runs."""

import json
import shutil
from pathlib import Path

import pytest
from small_runs import command

RUNS = Path(__file__).parents[1] / "report" / "old_run"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ok(*arguments):
    done = command("compare", RUNS, *arguments)
    assert done.code == 0, done.err
    return done


def test_the_table_says_what_its_interval_covers():
    done = ok()
    assert done.out.splitlines()[0] == "Test accuracy, last round"
    assert done.out.endswith("[95 %] over clients (paired t interval, for this partition and seed only)\n")
    assert done.err == ""


def test_any_recorded_metric_can_be_compared():
    found = json.loads(ok("--metric", "loss", "--json").out)
    assert (found["metric"], found["higher_is_better"]) == ("loss", False)
    assert ok("--metric", "loss").out.startswith("Test loss, lower is better, last round\n")
    refused = command("compare", RUNS, "--metric", "mse").sentence
    assert refused.endswith("fedavg has no metric 'mse'; it has accuracy, loss")


def test_a_baseline_may_be_shortened():
    assert "minus fedrod [95 %]" in ok("--baseline", "fedr").out
    assert command("compare", RUNS, "--baseline", "fed").sentence == (
        "the baseline 'fed' may mean fedavg or fedrod; give more of the label"
    )


def test_charts_of_clients_and_of_rounds():
    done = ok("--chart", "clients.svg", "--curves", "rounds.svg", "--metric", "loss", "--view", "personal")
    assert done.err == "chart: clients.svg\ncurves: rounds.svg\n"
    assert "test loss" in Path("clients.svg").read_text()
    assert "Loss by round" in Path("rounds.svg").read_text()
    assert command("compare", RUNS, "--curves", "nowhere/x.png").sentence == (
        "cannot write nowhere/x.png: there is no folder nowhere; create it first"
    )


def test_curves():
    done = command("curves", RUNS, "-o", "rounds.pdf", "--metric", "loss")
    assert (done.out, done.err, done.code) == ("curves: rounds.pdf\n", "", 0)
    assert Path("rounds.pdf").read_bytes().startswith(b"%PDF")
    assert command("curves", RUNS / "fedavg").out == "curves: curves.png\n"
    refused = command("curves", RUNS, "-o", "rounds.jpeg").sentence
    assert refused == "cannot write rounds.jpeg: its name must end in .png, .svg or .pdf"
    refused = command("curves", "missing").sentence
    assert refused == "there is no folder missing; give run folders or folders that contain them"
    assert command("curves", RUNS, "--group", "nobody").sentence.startswith(
        "there is no group 'nobody'; use one of all"
    )
    shutil.copytree(RUNS / "fedavg", "begun")
    for name in ("clients.jsonl", "rounds.jsonl", "timing.jsonl"):
        Path("begun", name).write_text("")
    refused = command("curves", "begun").sentence
    assert refused.startswith("begun is left out: it holds no evaluation; finish it with --resume")


def test_conditions(tmp_path):
    for method in ("fedavg", "fedrod"):
        shutil.copytree(RUNS / method, tmp_path / "runs" / method)
        path = tmp_path / "runs" / method / "federation.json"
        told = json.loads(path.read_text())
        conditions = [f"{('fog', 'snow')[i % 2]}:{i}" for i in range(len(told["names"]))]
        path.write_text(json.dumps(told | {"conditions": conditions}))
    done = command("compare", "runs", "--by", "condition")
    assert done.out.splitlines()[1].split() == ["method", "mean", "(std)", "pooled", "fog", "snow"]
    found = json.loads(command("compare", "runs", "--by", "condition", "--json").out)
    [fog] = {row["conditions"]["fog"]["pooled"]["mean"] for row in found["rows"] if row["label"] == "fedavg"}
    one = json.loads(command("compare", "runs", "--group", "all:fog", "--json").out)
    assert [row["pooled"]["mean"] for row in one["rows"] if row["label"] == "fedavg"] == [fog]
    assert command("compare", "runs", "--group", "all:rain").sentence == (
        "there is no condition 'rain' in runs/fedavg; use one of fog, snow"
    )
    assert command("compare", RUNS, "--by", "condition").sentence.endswith("compare it without --by (by= in Python)")
    assert command("compare", RUNS, "--by", "domain").sentence == "unknown by 'domain'; use one of condition"
