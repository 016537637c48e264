"""Your own methods, models, data sets and partitions: registered by name, offered by packages, named by module path."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import assert_same_result, command, experiment, tables, write
from torch import nn

import bespoke
from bespoke import registry
from bespoke.algorithms import ALGORITHMS
from bespoke.core.objective import OBJECTIVES
from bespoke.data import DATASETS, PARTITIONS, DataSettings, Examples, Partition, partitioned
from bespoke.data.transforms import TRANSFORMS
from bespoke.errors import UserError
from bespoke.models import MODELS, ModelSettings, build_module, build_task
from bespoke.records import RunFolder
from bespoke.registry import Registry, closest
from bespoke.runs.experiment import load, to_toml

TABLES = (ALGORITHMS, MODELS, DATASETS, PARTITIONS, TRANSFORMS)


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    """Leave the tables, and what was imported, as they were."""
    before = [dict(table) for table in TABLES]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_ANNOUNCED", set())
    modules = set(sys.modules)
    yield
    for table, shipped in zip(TABLES, before, strict=True):
        table.clear()
        table.update(shipped)
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("mine", "offered", "broken"):
            del sys.modules[name]


@dataclass(frozen=True)
class Mine(bespoke.Algorithm):
    """FedAvg by hand."""

    strength: float = bespoke.knob(1.0, "how much", low=0)

    def client_update(self, local, state, down):
        return state, {"model": local.sgd(local.task.loss, down["model"], lr=self.strength * 0.1)}

    def personalize(self, local, state, down):
        return down["model"]


def build(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes))


def blobs(rng, rows=90):
    """Three blobs."""
    y = np.arange(rows) % 3
    return (y[:, None] + 0.1 * rng.standard_normal((rows, 4))).astype(np.float32), y


def halves(labels, rng, clients):
    """Equal parts."""
    return np.array_split(rng.permutation(len(labels)), clients)


THINGS = {
    "register": Mine,
    "register_model": build,
    "register_dataset": blobs,
    "register_partition": halves,
    "register_objective": object(),
}


def sentence(call, *arguments, **options):
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- names --------------------------------------------------------------------------------------------------------


def test_the_nearest_name_is_found_whatever_its_case():
    assert closest("FedRep", ["fedep", "fedrep"]) == " (did you mean 'fedrep'?)"
    assert closest("fedavk", ["FedAvg"]) == " (did you mean 'FedAvg'?)"
    assert closest("zzz", ["fedavg"]) == ""
    assert closest(["fedavg"], ["fedavg"]) == " (did you mean 'fedavg'?)"


@pytest.mark.parametrize("call", THINGS)
@pytest.mark.parametrize("name", ["", "x y", "x/y", "mine:x", "../x", ".x", "ä b", 3, None])
def test_a_name_that_cannot_be_one_is_refused(call, name):
    found = sentence(getattr(bespoke, call), name, THINGS[call])
    assert found == f"{call}({name!r}, ...): a name may have only letters, digits, '_', '-' and '.': choose another"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("register", "fedavg"),
        ("register_model", "cnn"),
        ("register_dataset", "digits"),
        ("register_partition", "iid"),
        ("register_partition", "auto"),
    ],
)
def test_what_is_shipped_cannot_be_replaced(call, name):
    assert f"{name} is one of bespoke's own " in sentence(getattr(bespoke, call), name, THINGS[call])


def test_an_objective_is_registered():
    one, two = OBJECTIVES["regression"], OBJECTIVES["multilabel"]
    bespoke.register_objective("mine", one)
    assert OBJECTIVES["mine"].predictions is one.predictions and OBJECTIVES["mine"].name == "mine"
    bespoke.register_objective("mine", two)
    found = OBJECTIVES.pop("mine")
    assert found.predictions is two.predictions and found.name == "mine"
    assert "an objective is made with Objective(...)" in sentence(bespoke.register_objective, "mine", object())
    table = Registry("thing", {"shipped": 1}, lambda thing, where: thing, "bespoke.things")
    assert "shipped is one of bespoke's own things" in sentence(table.register, "shipped", 2, "register_thing")


# --- methods ------------------------------------------------------------------------------------------------------


def test_a_method_is_replaced_by_registering_it_again():
    bespoke.register("mine", Mine)

    @dataclass(frozen=True)
    class Mine2(Mine):
        strength: float = bespoke.knob(0.5, "how much", low=0)

    bespoke.register("mine", Mine2)
    assert bespoke.Experiment(algorithm="mine").method == Mine2(strength=0.5)
    bespoke.register("mine", lambda: Mine(strength=0.25))
    assert bespoke.Experiment(algorithm="mine").method == Mine(strength=0.25)
    assert load("demo", "mine", ["algorithm.strength=2"])[0].method == Mine(strength=2.0)


@dataclass(frozen=True)
class Incomplete(Mine):
    needed: float = bespoke.knob(-1.0, "more than it is", low=0)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (3, "3 is not a method: give a subclass of bespoke.Algorithm"),
        (Mine(), "give the class Mine itself, without ()"),
        (dict, "dict gives a dict, not a bespoke.Algorithm"),
        (
            Incomplete,
            "Incomplete() fails (Incomplete: needed must be at least 0, not -1.0): give every field a default",
        ),
        (lambda strength: Mine(strength), "missing 1 required positional argument: 'strength'): give every field"),
    ],
)
def test_what_is_no_method(thing, words):
    assert words in sentence(bespoke.register, "mine", thing)


# --- models -------------------------------------------------------------------------------------------------------


def test_a_model_of_ones_own_runs_by_name():
    bespoke.register_model("mine", build, head="1")
    task = build_task(ModelSettings("mine"), (1, 2, 3), 5)
    head = task.head(task.init(bespoke.rng.key(0)))
    assert {name: tuple(leaf.shape) for name, leaf in head.items()} == {"1.weight": (5, 6), "1.bias": (5,)}
    run = bespoke.run(experiment(model={"name": "mine"}))
    assert run.folder.config()["model"]["name"] == "mine"
    assert run.accuracy > 0.5


class Net(nn.Module):
    """A body and a head."""

    head = "last"

    def __init__(self, input_shape, num_classes, hidden=7, dropout=0.0, *, depth=1):
        super().__init__()
        self.first, self.last, self.rate = nn.Linear(input_shape[0], hidden), nn.Linear(hidden, num_classes), dropout

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def test_a_model_takes_the_keys_that_it_asks_for_and_no_others():
    bespoke.register_model("mine", Net)
    assert MODELS["mine"].head == "last" and MODELS["mine"].doc == "A body and a head."
    assert build_module(ModelSettings("mine"), (4,), 3).first.out_features == 7
    made = build_module(ModelSettings("mine", hidden=9, dropout=0.5), (4,), 3)
    assert (made.first.out_features, made.rate) == (9, 0.5)
    found = sentence(build_module, ModelSettings("mine", width=3), (4,), 3)
    assert "[model] width = 3 means nothing to mine, which takes hidden, dropout: leave it out" in found
    assert "norm of mine must be one of 'none'" in sentence(build_module, ModelSettings("mine", norm="group"), (4,), 3)


def test_a_model_may_ask_for_all_settings_or_for_the_norm():
    seen = []
    bespoke.register_model("all", lambda input_shape, num_classes, settings: seen.append(settings) or nn.Linear(1, 1))
    build_module(ModelSettings("all", width=3, norm="any"), (1,), 1)
    assert (seen[0].width, seen[0].norm) == (3, "any")
    bespoke.register_model("norm", lambda input_shape, num_classes, norm="own": seen.append(norm) or nn.Linear(1, 1))
    build_module(ModelSettings("norm"), (1,), 1)
    build_module(ModelSettings("norm", norm="other"), (1,), 1)
    assert seen[1:] == ["own", "other"]


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (nn.Linear(1, 1), "give the class Linear or a function that builds it, not a module"),
        ("cnn", "'cnn' is not a function"),
        (
            lambda shape, num_classes: None,
            "but only input_shape, num_classes, settings and keys of [model] are available",
        ),
        (lambda input_shapes: None, "'input_shapes' (did you mean 'input_shape'?)"),
        (lambda input_shape, /: None, "asks for 'input_shape'"),
    ],
)
def test_what_is_no_model(thing, words):
    assert words in sentence(bespoke.register_model, "mine", thing)


def test_a_function_that_builds_no_module():
    bespoke.register_model("mine", lambda: 3)
    assert (
        sentence(build_module, ModelSettings("mine"), (1,), 1)
        == "the model mine returns an object of type int: return a torch module"
    )


# --- data sets ----------------------------------------------------------------------------------------------------


def federation(seed=0, **keys):
    return partitioned(bespoke.DataSettings(**({"name": "mine", "partition": "iid", "clients": 3} | keys)), seed)[0]


def test_a_data_set_of_rows():
    bespoke.register_dataset("mine", blobs)
    pool = federation()
    assert pool.x.shape == (2000, 4) and pool.num_classes == 3  # the table's defaults hold
    assert federation(rows=60).x.shape == (60, 4)
    assert torch.equal(federation(rows=60).x, federation(rows=60).x)
    assert not torch.equal(federation(rows=60).x, federation(1, rows=60).x)
    assert federation(rows=60, num_classes=5).num_classes == 5
    found = sentence(federation, dim=3)
    assert "[data] dim = 3 means nothing to data set mine, which takes num_classes, rows: leave it out" in found


def test_a_data_set_with_test_rows_of_its_own():
    x, y = blobs(np.random.default_rng(0), 60)
    bespoke.register_dataset("mine", lambda: (x[:40], y[:40], x[40:], y[40:]))
    pool = federation(pool="split")
    assert set(pool.test.index.tolist()) == set(range(40, 60))
    bespoke.register_dataset("mine", lambda: Examples(x, y, 4, official_test=np.arange(60) >= 50))
    pool = federation(pool="split")
    assert pool.num_classes == 4 and set(pool.test.index.tolist()) == set(range(50, 60))


def test_a_data_set_of_clients():
    x, y = blobs(np.random.default_rng(0), 60)
    parts = [(x[i::3], y[i::3]) for i in range(3)]
    bespoke.register_dataset("mine", lambda: dict(zip("abc", parts, strict=True)))
    pool = federation(partition="auto", clients=0)
    assert pool.names == ("a", "b", "c") and pool.train.sizes == (16, 16, 16)
    bespoke.register_dataset("mine", lambda: parts)
    assert federation(partition="auto", clients=0).names == ("0", "1", "2")
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    bespoke.register_dataset("mine", lambda: dataset)
    assert federation().x.shape == (60, 4)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (3, "the data set mine is a int: give (x, y)"),
        ({"a": 3}, "client 'a' of the data set mine is a int: give (x, y)"),
    ],
)
def test_what_is_no_data(found, words):
    bespoke.register_dataset("mine", lambda: found)
    assert words in sentence(federation)


def test_a_data_set_with_numbers_as_targets_serves_a_regression_alone():
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    bespoke.register_dataset("mine", lambda: (x, x.sum(axis=1)))
    given = {"data": {"name": "mine", "partition": "iid", "clients": 3}, "model": {"name": "linear"}}
    settings = {table: kind(**given[table]) for table, kind in (("data", DataSettings), ("model", ModelSettings))}
    training = bespoke.Training(rounds=2, lr=0.1)
    regression = bespoke.ObjectiveSettings("regression")
    run = bespoke.run(bespoke.Experiment(**settings, training=training, objective=regression), device="cpu")
    assert run.summary["metric"] == "r2"
    assert "needs class numbers" in sentence(
        bespoke.run, bespoke.Experiment(**settings, training=training), device="cpu"
    )


@pytest.mark.parametrize("call", ["register_dataset", "register_partition"])
def test_what_is_no_function_of_data(call):
    assert "3 is not a function" in sentence(getattr(bespoke, call), "mine", 3)
    found = sentence(getattr(bespoke, call), "mine", lambda root: root)
    assert "asks for 'root', but only" in found and "and keys of [data] are available: rename the argument" in found


# --- partitions ---------------------------------------------------------------------------------------------------


def test_a_partition_of_ones_own():
    bespoke.register_partition("mine", halves)
    pool = federation(name="gaussian", rows=90, partition="mine")
    assert [len(pool.train.client(i)) + len(pool.test.client(i)) for i in range(3)] == [30, 30, 30]
    found = sentence(federation, name="gaussian", rows=90, partition="mine", alpha=0.1)
    assert "alpha = 0.1 means nothing to partition mine, which takes no settings of its own: leave it out" in found


def test_a_partition_may_ask_for_what_is_known_of_the_rows_and_for_all_settings():
    seen = {}

    def split(labels, owners, domains, domain_names, official, rng, settings, alpha):
        seen.update(locals())
        return Partition([np.arange(4), np.arange(4, len(labels))])

    bespoke.register_partition("mine", split)
    federation(name="gaussian", rows=10, partition="mine", clients=2, alpha=0.7, volume=3)
    assert (seen["alpha"], seen["settings"].volume, seen["settings"].clients) == (0.7, 3, 2)
    assert len(seen["labels"]) == 10 and seen["owners"] is None


def test_a_partition_may_choose_the_number_of_clients():
    bespoke.register_partition("mine", lambda labels: [np.flatnonzero(labels == k) for k in np.unique(labels)])
    keys = {"name": "gaussian", "rows": 40, "num_classes": 4, "partition": "mine"}
    assert federation(**keys, clients=0).total_clients == 4
    assert federation(**keys, clients=0, new_clients=1).num_clients == 3
    assert federation(**keys, clients=4).total_clients == 4
    assert "makes 4 clients, but [data] clients is 3" in sentence(federation, **keys)


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (3, "the partition mine returns an object of type int: return a list"),
        ([[0, 1], [1], [2]], "gives row 1 out twice"),
        ([[0], [1], [20]], "gives rows 0 to 20, but the data set has 0 to 19"),
        ([[0.5], [1], [2]], "gives client 0 float64 of shape (1,): return row numbers, (n,)"),
        ([[[0]], [1], [2]], "of shape (1, 1)"),
        ([[0], [], [2]], "client '1' has no training rows"),
    ],
)
def test_what_is_no_partition(lists, words):
    bespoke.register_partition("mine", lambda: lists)
    assert words in sentence(federation, name="gaussian", rows=20, partition="mine")


def test_a_mistyped_name_shows_the_nearest():
    for keys, words in [
        (
            {"partition": "IID"},
            "[data] partition: there is no partition 'IID' (did you mean 'iid'?); there are auto, iid",
        ),
        ({"name": "Digits"}, "[data] name: there is no data set 'Digits' (did you mean 'digits'?)"),
    ]:
        assert words in sentence(federation, **({"name": "gaussian"} | keys))


# --- module paths -------------------------------------------------------------------------------------------------

MODULE = '''
"""Things of one's own."""
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

import bespoke

with Path("imported").open("a") as file:  # to be seen by the tests
    file.write("once ")


@dataclass(frozen=True)
class FedALA(bespoke.Algorithm):
    strength: float = bespoke.knob(1.0, "how much", low=0)

    def client_update(self, local, state, down):
        return state, {"model": local.sgd(local.task.loss, down["model"])}

    def personalize(self, local, state, down):
        return down["model"]


def build(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes))


build.head = "1"


def load(rng, rows):
    y = np.arange(rows) % 3
    return (y[:, None] + rng.standard_normal((rows, 4))).astype(np.float32), y


def split(labels, rng, clients):
    return np.array_split(rng.permutation(len(labels)), clients)


def doubled(key, x, train):
    return 2 * x


number = 3
'''

PATHS = {
    "data": {"name": "mine:load", "partition": "mine:split", "dim": 20, "num_classes": 0},
    "model": {"name": "mine:build"},
    "algorithm": {"name": "mine:FedALA", "strength": 2.0},
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module ``mine``."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODULE)
    return tmp_path


def times_imported():
    return len(Path("imported").read_text().split()) if Path("imported").exists() else 0


NOTE = "note: importing the module 'mine' from {}/mine.py, which runs its code"


def test_everything_is_named_by_module_path_in_a_file(here):
    path = write(here / "x.toml", **PATHS)
    done = command("run", path, "--out", "run", "--quiet")
    assert done.code == 0, done.err
    assert done.err.splitlines() == [NOTE.format(here)]
    config = RunFolder("run").config()
    assert (config["data"]["name"], config["data"]["partition"]) == ("mine:load", "mine:split")
    assert (config["model"]["name"], config["algorithm"]) == ("mine:build", {"name": "mine:FedALA", "strength": 2.0})
    run = bespoke.run("run/config.toml", "again")
    assert run.experiment.hash() == load(path)[0].hash()
    assert_same_result("run", "again")
    assert times_imported() == 1


def test_a_run_by_module_paths_goes_on(here):
    path = write(here / "x.toml", **PATHS)
    assert command("run", path, "--out", "run").code == 0
    del sys.modules["mine"]
    for table in TABLES:
        for name in [name for name in table if name.startswith("mine:")]:
            del table[name]
    done = command("run", path, "--out", "run", "--resume", "--set", "training.rounds=5")
    assert done.code == 0, done.err
    assert NOTE.format(here) in done.err
    assert command("run", path, "--out", "whole", "--set", "training.rounds=5", "--set", "evaluation.every=3").code == 0
    assert_same_result("run", "whole")


def test_a_method_on_the_command_line(here):
    done = command("run", write(here / "x.toml"), "--algorithm", "mine:FedALA", "--set", "algorithm.strength=3")
    assert done.code == 0, done.err
    assert done.err.startswith(NOTE.format(here))
    assert done.out.startswith("mine:FedALA, seed 0")
    assert RunFolder("runs/x-mine.FedALA-seed0").config()["algorithm"] == {"name": "mine:FedALA", "strength": 3.0}


def test_settings_on_the_command_line(here):
    sets = ["data.name=mine:load", "data.partition=mine:split", "data.dim=20", "data.num_classes=0"]
    words = [word for text in [*sets, "model.name=mine:build"] for word in ("--set", text)]
    done = command("run", write(here / "x.toml"), *words, "--out", "run")
    assert done.code == 0, done.err
    assert RunFolder("run").config()["model"]["name"] == "mine:build"


def test_a_module_that_is_not_used_is_not_imported(here):
    path = write(here / "x.toml", **PATHS)
    sets = ["data.name=gaussian", "data.partition=iid", "model.name=linear"]
    words = [word for text in sets for word in ("--set", text)]
    assert command("run", path, "--algorithm", "fedavg", *words, "--out", "run").code == 0
    assert times_imported() == 0


def test_nothing_but_a_run_imports_a_module(here):
    path = write(here / "x.toml", **PATHS)
    assert command("run", path, "--out", "run").code == 0
    Path("imported").unlink()
    script = """
import contextlib, io, sys
import bespoke
from bespoke.cli.main import main
from bespoke.records import RunFolder
from bespoke.report import compare, summarise

RunFolder("run").config()
list(RunFolder("run").clients())
summarise("run")
compare(["run"])
for words in ("compare run", "compare run --json", "list algorithms", "list models", "list datasets",
              "list partitions", "list experiments", "data list", "data show x.toml", "--help"):
    sys.argv = ["bespoke", *words.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
print("mine" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
    assert times_imported() == 0


def test_the_data_of_a_method_of_ones_own_are_shown_without_it(here):
    path = write(here / "x.toml", algorithm=PATHS["algorithm"])
    done = command("data", "show", path, "--set", "algorithm.strength=3")
    assert done.code == 0 and times_imported() == 0
    found = command("data", "show", path, "--set", "data.name=mine:load").sentence
    assert "[data] name: 'mine:load' is an object of a module, and only a run imports modules" in found
    with pytest.raises(UserError, match=r"Experiment\(algorithm=...\): 'mine:FedALA' is an object of a module"):
        bespoke.Experiment(algorithm="mine:FedALA")


def test_a_module_inside_a_package_and_an_object_inside_a_class(here):
    (here / "mine.py").rename(here / "inner.py")
    (here / "mine").mkdir()
    (here / "inner.py").rename(here / "mine" / "inner.py")
    (here / "mine" / "__init__.py").write_text("class Box:\n    from mine.inner import FedALA\n")
    for name in ("mine.inner:FedALA", "mine:Box.FedALA"):
        done = command("run", write(here / "x.toml"), "--algorithm", name, "--out", name)
        assert done.code == 0, done.err
        assert f"from {here}/mine/__init__.py" in done.err


FAULTS = {
    "mine:FedAla": ["the module 'mine' (", "mine.py) has no 'FedAla' (did you mean 'FedALA'?)"],
    "mine:FedALA.inner": ["has no 'FedALA.inner'"],
    "mine:number": ["= 'mine:number': 3 is n"],
    "nowhere:X": ["there is no module 'nowhere' in ", "or start in the folder that holds nowhere.py"],
    "mine.deeper:X": ["has no module 'mine.deeper': correct the name"],
    "mine.py:FedALA": ["'mine.py:FedALA' is not a module path: write MODULE:NAME"],
    "mine:": ["'mine:' is not a module path"],
    "a b:c": ["'a b:c' is not a module path"],
    "broken:X": ["the module 'broken' cannot be imported (ZeroDivisionError: division by zero): ", "broken.py, line 3"],
    "leaves:X": ["cannot be imported (SystemExit: 3): correct ", "leaves.py, line 1"],
    "unclear:X": ["cannot be imported (SyntaxError: ", "unclear.py, line 2"],
    "lacking:X": ["cannot be imported (ModuleNotFoundError: No module named 'not_there'): ", "lacking.py, line 1"],
}
MODULES = {
    "broken": "x = 1\n\ny = x / 0\n",
    "leaves": "raise SystemExit(3)\n",
    "unclear": "x = 1\ny = = 2\n",
    "lacking": "import not_there\n",
}


@pytest.mark.parametrize("setting", ["--algorithm", "data.name", "data.partition", "model.name"])
@pytest.mark.parametrize("name", FAULTS)
def test_what_a_module_path_does_not_lead_to(here, setting, name):
    for file, text in MODULES.items():
        Path(f"{file}.py").write_text(text)
    path = write(here / "x.toml", data={"dim": 20, "rows": 2000, "num_classes": 0})
    words = [setting, name] if setting.startswith("--") else ["--set", f"{setting}={name}"]
    found = command("run", path, *words, "--out", "run").sentence
    table, _, key = setting.partition(".")
    assert found.startswith(f"[{table}] {key}" if key else "--algorithm"), found
    for word in FAULTS[name]:
        assert word in found
    assert not Path("run").exists()


def test_a_module_that_is_there_already_is_announced_too(here):
    done = command("run", write(here / "x.toml"), "--set", "data.name=json:loads")
    assert done.code == 2 and done.err.startswith(f"note: importing the module 'json' from {json.__file__}, which")


def test_a_mistake_in_a_file_names_the_file(here):
    path = write(here / "x.toml", algorithm={"name": "mine:FedAla"})
    assert command("run", path).sentence.startswith(f"{path}: [algorithm] name: the module 'mine' (")
    path = write(here / "x.toml", algorithm={"name": "mine:FedALA", "strenth": 1.0})
    assert "x.toml: [algorithm] has no key 'strenth' (did you mean 'strength'?)" in command("run", path).sentence
    path = write(here / "x.toml", algorithm={"name": "mine:number"})
    assert "3 is not a method: give a subclass of bespoke.Algorithm" in command("run", path).sentence


def test_what_was_registered_stays_what_it_is_beside_module_paths(here):
    bespoke.register_dataset("rows", blobs)
    spec = bespoke.Experiment(
        data=bespoke.DataSettings(name="rows", rows=60, partition="mine:split", clients=3),
        model=bespoke.ModelSettings("linear"),
        training=bespoke.Training(rounds=1),
    )
    assert bespoke.run(spec).summary["rounds"] == 1
    assert times_imported() == 1


# --- packages -----------------------------------------------------------------------------------------------------


OFFERED = ("algorithms", "models", "datasets", "partitions", "transforms")


@pytest.fixture
def offered(here, monkeypatch):
    """An installed package that offers a method, a model, a data set, a partition and a transform."""
    site = here / "site"
    site.mkdir()
    (here / "mine.py").rename(site / "offered.py")
    info = site / "offered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    points = dict(zip(OFFERED, ("FedALA", "build", "load", "split", "doubled"), strict=True))
    lines = [f"[bespoke.{group}]\ntheirs = offered:{name}\n" for group, name in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(site)


def test_a_package_offers_things_by_name(offered):
    names = {"data": {"name": "theirs", "partition": "theirs", "transform": ["theirs"]}, "model": {"name": "theirs"}}
    values = tables(data=PATHS["data"] | names["data"], model=names["model"], algorithm={"name": "theirs"})
    Path("x.toml").write_text(to_toml(values))
    run = bespoke.run("x.toml")
    assert type(run.experiment.method).__name__ == "FedALA"
    assert run.pool.transform.steps == (sys.modules["offered"].doubled,)
    assert sys.modules["offered"].__file__.endswith("site/offered.py")
    assert times_imported() == 1


@pytest.mark.parametrize("what", OFFERED)
def test_a_list_shows_what_packages_offer_without_importing_it(offered, what):
    done = command("list", what)
    assert done.code == 0 and "offered" not in sys.modules and times_imported() == 0
    [line] = [line for line in done.out.splitlines() if line.startswith("theirs ")]
    assert "offered:" in line and line.endswith("from an installed package")


def test_a_mistyped_name_of_a_package_shows_the_nearest(offered):
    found = command("run", "demo", "--algorithm", "their").sentence
    assert "did you mean 'theirs'?" in found and "offered" not in sys.modules
