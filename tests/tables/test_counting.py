"""Numbers that are counted from models and methods, and how they become results of a table."""

import json
import shutil
from pathlib import Path

import paper_tables
import pytest
from small_runs import command

from bespoke.errors import UserError
from bespoke.tables import counting, results, spec
from bespoke.tables.beside import Reader

ROOT = Path(__file__).parents[2]


def value(table, id):
    return counting.counted(spec.find(table).entry(id))["value"]


def test_the_parts_of_a_model():
    assert value("pfedfda/t8", "cifar_cnn/body") == 106_400
    assert value("pfedfda/t8", "cifar_cnn/linear") == 128 * 100 + 100
    assert value("pfedfda/t8", "cifar_cnn/gaussian") == 128 * 100 + 128 * 129 // 2


SMALL = """
[[row]]
id = "linear"
[[row]]
id = "fedavg"
[[row]]
id = "fedper"
[[row]]
id = "fedbn"
[[row]]
id = "fedpce"
set = ["algorithm.size=4"]
[[cell]]
id = "model"
kind = "benchmark"
how = "parameters"
base = "easy"
set = ["data.num_classes=7"]
rows = ["linear"]
[[cell]]
id = "col"
kind = "benchmark"
how = "trained"
base = "easy"
[[cell]]
id = "cl"
kind = "benchmark"
how = "trained_new"
base = "easy"
"""


@pytest.fixture
def small(tmp_path):
    head = 'paper = "Maker"\nsource = "Table 1"\ntitle = "Sizes"\n'
    table = paper_tables.make(tmp_path, head + SMALL)
    model = '[data]\nname = "mnist"\n[model]\nname = "mlp"\nhidden = 8\nnorm = "layer"\n'
    (tmp_path / "experiments/maker/easy.toml").write_text(model)
    return lambda id: counting.counted(table.entry(id))["value"]


def test_classes_of_the_settings_come_first(small):
    assert small("model/linear") == 8 * 7 + 7


def test_what_a_client_trains(small):
    whole = small("col/fedavg")
    assert small("col/fedper") == small("col/fedbn") == whole
    assert small("cl/fedper") == 8 * 10 + 10 and small("cl/fedbn") == 2 * 8
    assert small("cl/fedpce") == 4
    assert small("col/fedpce") > whole + 4  # the nets that turn an embedding into norms


def test_they_become_results(tmp_path):
    done = command("sweep", "pfedvmp/t4", "--results", tmp_path / "results")
    assert done.code == 0 and done.out == "8 numbers counted; nothing of this is trained\n"
    numbers = {n.entry.id: n.mean for n in Reader(tmp_path / "results").beside(spec.find("pfedvmp/t4")).numbers}
    assert numbers["cifar10/linear"] == 512 * 10 + 10 and len(numbers) == 8


def test_what_is_not_trained_says_where_its_numbers_come_from():
    for name, how in (
        ("fedpce/t2", "bespoke sweep fedpce/t1 makes its runs"),
        ("pfedfda/f3", "bespoke table or bespoke figure"),
    ):
        done = command("sweep", name, "--dry")
        assert done.code == 2 and f"{name}: nothing of this is trained; {how}" in done.err


def test_counting_again_changes_no_file_that_names_its_commit(tmp_path, monkeypatch):
    table = spec.find("pfedvmp/t4")
    monkeypatch.setattr(counting, "code_commit", lambda: None)
    counting.count([table], tmp_path, ["cifar10"])
    monkeypatch.setattr(counting, "code_commit", lambda: "abc")
    counting.count([table], tmp_path, ["cifar10"])
    assert {json.loads(path.read_text())["source"]["commit"] for path in tmp_path.rglob("*.json")} == {"abc"}
    monkeypatch.setattr(counting, "code_commit", lambda: "def")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    counting.count([table], tmp_path, ["cifar10"])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == before and len(before) == 2


def test_the_committed_numbers_are_those_that_would_be_counted(tmp_path):
    table = spec.find("pfedfda/t8")
    shutil.copytree(ROOT / "results" / table.name, tmp_path / table.name)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert counting.count([table], tmp_path) == len(before) == 16
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_they_are_no_trainings(tmp_path):
    counting.count([spec.find("pfedvmp/t4")], tmp_path)
    assert not list(results.everything(tmp_path))


def test_what_cannot_be_counted_is_refused(tmp_path):
    cell = '[[cell]]\nid = "size"\nkind = "benchmark"\nhow = "parameters"\nbase = "easy"\n'
    table = paper_tables.make(tmp_path, paper_tables.TABLE + cell)
    with pytest.raises(UserError, match="'digits' is no data set of the catalogue"):
        counting.count([table], tmp_path / "results")
    (tmp_path / "experiments/maker/easy.toml").write_text('[data]\nname = "mnist"\n[model]\nname = "mlp"\n')
    with pytest.raises(UserError, match="there is no row 'fedavg' among the parameters; use body, linear, gaussian"):
        counting.count([table], tmp_path / "results")


def test_a_number_that_was_counted_for_another_model_is_left_out(tmp_path, small):
    folder, root = tmp_path / "experiments" / "maker", tmp_path / "results"
    entry, run = spec.read(folder / "tables" / "t1.toml").entry("col/fedavg"), folder / "easy.toml"
    results.write(root, entry, counting.counted(entry))
    assert [*results.current(root, entry)[0]] == [0]
    run.write_text(run.read_text().replace("hidden = 8", "hidden = 9"))
    there, outdated = results.current(root, entry)
    assert not there and [result.seed for result in outdated] == [0]


def test_a_number_is_counted_again_where_only_its_settings_are_others(tmp_path, monkeypatch):
    table = spec.find("pfedvmp/t4")
    monkeypatch.setattr(counting, "code_commit", lambda: "0123abc")
    counting.count([table], tmp_path, ["cifar10"])
    (path, _) = sorted(tmp_path.rglob("*.json"))
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"settings": told["settings"] | {"seed": 0, "training": {"lr": 0.5}}}))
    counting.count([table], tmp_path, ["cifar10"])
    assert json.loads(path.read_text())["settings"] == told["settings"]
