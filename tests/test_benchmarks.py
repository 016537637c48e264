"""The scripts of benchmarks/ that make tables of all methods: they know every method, and count what they say."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from bespoke.algorithms import ALGORITHMS
from bespoke.experiment import load

FOLDER = Path(__file__).parents[1] / "benchmarks"


def script(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


methods, comparison = script("methods"), script("fmnist_all")


def test_the_cost_of_a_method_is_measured_without_a_gpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "methods.json"
    words = ["--device", "cpu", "--rounds", "1", "--clients", "2", "--rows", "4", "8", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["methods.py", "--methods", "fedper,nobody,local", *words])
    assert methods.main() == 1  # nobody's method fails, and the others are measured all the same
    fedper, nobody, local = json.loads(out.read_text())["methods"]
    assert fedper["name"] == "fedper" and fedper["seconds"] > 0 and fedper["ratio"] > 0
    convolutions = (3 * 25 + 1) * 32 + 2 * 32 + (32 * 25 + 1) * 64 + 2 * 64  # with the norm layers' scales and shifts
    body = convolutions + (64 * 5 * 5 + 1) * 512
    assert fedper["bytes_up"] == fedper["bytes_down"] == 4 * body and local["bytes_up"] == local["bytes_down"] == 0
    assert "nobody" in nobody["error"]
    assert "failed" in capsys.readouterr().out


def test_lines_of_code_are_neither_comments_nor_docstrings_nor_blank(tmp_path, monkeypatch):
    path = tmp_path / "method.py"
    path.write_text(
        '"""A file.\n\nIn two parts.\n"""\n\nimport os\n\n# why\nclass M:\n    """M."""\n    x = "text"  # kept\n'
    )
    monkeypatch.setattr(methods.inspect, "getfile", lambda kind: str(path))
    assert methods.code_lines("fedavg") == 3


def test_every_method_is_compared_and_every_case_loads():
    assert {case.algorithm for case in comparison.CASES.values()} == set(ALGORITHMS)
    for case in comparison.CASES.values():
        loaded, _ = load("checks/fmnist", case.algorithm, ["training.rounds=30", *case.overrides])
        assert loaded.training.rounds == comparison.ROUNDS
        beside = comparison.CASES[case.beside]
        assert beside.algorithm == "fedavg"
        assert load("checks/fmnist", "fedavg", list(beside.overrides))[0].model == loaded.model


def test_a_method_that_does_not_beat_fedavg_is_marked(tmp_path):
    means = {("fedavg", 0): 0.7, ("fedavg", 1): 0.6, ("ditto", 0): 0.9, ("ditto", 1): 0.8, ("fedprox", 0): 0.5}
    means |= {("apfl", 0): 0.75, ("apfl", 1): 0.5, ("fedavg_group", 0): 0.99}
    records = tmp_path / "records.jsonl"
    rows = [{"case": c, "seed": s, "rounds": 30, "set": [], "mean": m} for (c, s), m in means.items()]
    other = [rows[0] | {"rounds": 5, "mean": 0.1}, rows[0] | {"set": ["data.alpha=1"], "mean": 0.1}]
    records.write_text("".join(json.dumps(row) + "\n" for row in rows + other))
    done = comparison.finished(records, 30, [])
    assert {key: row["mean"] for key, row in done.items()} == means
    text = comparison.table(["fedavg", "ditto", "fedprox", "apfl", "local"], [0, 1], done).splitlines()[2:]
    assert text == [
        "| FedAvg, one model for all | 70.00 | 60.00 | 65.00 |  |",
        "| Ditto | 90.00 | 80.00 | 85.00 | +20.00 (2 of 2) |",
        "| FedProx, one model for all | 50.00 |  | 50.00 | -20.00 (0 of 1) |",  # is not expected to be above
        "| **APFL** | 75.00 | 50.00 | 62.50 | **-2.50 (1 of 2)** |",
        "| Local |  |  |  |  |",
    ]


def test_what_is_finished_is_not_run_again(tmp_path, monkeypatch, capsys):
    row = {"rounds": 30, "set": [], "mean": 0.5, "machine": "a CPU", "notes": ["slow"]}
    records, table = tmp_path / "records.jsonl", tmp_path / "table.md"
    done = [row | {"case": name, "seed": 0} for name in ("local", "fedavg")]
    records.write_text("".join(json.dumps(r) + "\n" for r in done))
    ran = []

    class Ended:
        returncode, stderr = 1, "it broke"

    monkeypatch.setattr(comparison.subprocess, "run", lambda command, **_: ran.append(command) or Ended())
    where = ["--records", str(records), "--table", str(table)]
    for methods, seeds, status in (("local,fedavg", "0", 0), ("local,ditto", "0,1", 1)):
        monkeypatch.setattr(sys, "argv", ["fmnist_all.py", "--methods", methods, "--seeds", seeds, *where])
        assert comparison.main() == status
    asked = [(c[c.index("--methods") + 1], c[c.index("--seeds") + 1]) for c in ran]
    assert asked == [("local", "1"), ("ditto", "0,1")]
    assert "it broke" in capsys.readouterr().out
    assert "| **Local** | 50.00 |" in table.read_text() and "- Local: slow" in table.read_text()


def test_an_unknown_case_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fmnist_all.py", "--methods", "nobody"])
    with pytest.raises(SystemExit):
        comparison.main()
    assert "there is no case 'nobody'" in capsys.readouterr().err
