"""Every wrong input ends in one sentence that says what, where and what to do; never in a traceback."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import CLASSES, DIM, Net, arrays, command, federated, seeded, write
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import bespoke
from bespoke.errors import UserError

TOML = {"training": {"rounds": 1}}
# The small experiment's own data set has keys that mean nothing to files.
FILES = {"name": "files", "partition": "auto", "clients": 0}
FILES |= {key: bespoke.DataSettings.__dataclass_fields__[key].default for key in ("rows", "dim")}


def sentence(*arguments, tmp_path):
    """The sentence with which a command refuses; it leaves no run behind."""
    found = command(*arguments, "--out", tmp_path / "run").sentence
    assert not (tmp_path / "run" / "config.toml").exists()
    return found


def save_clients(folder, **clients):
    folder.mkdir(exist_ok=True)
    for name, parts in clients.items():
        np.savez(folder / f"{name}.npz", **dict(zip(("x", "y", "x_test", "y_test"), parts, strict=False)))
    return {"data": FILES | {"path": str(folder / "*.npz")}, **TOML}


def told(clients, model=None, head="fc", **settings):
    with pytest.raises(UserError) as caught:
        federated(clients, model, head, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_client(x, y, *test):
    """Two ordinary clients and the one in question, by name."""
    one, two = arrays(2)
    return {"anna": one, "odd": (x, y, *test), "bert": two}


# --- clients that are small, but sound ----------------------------------------------------------------------------

X, Y = arrays(1)[0]
SOUND = {
    "one row": (X[:1], Y[:1]),
    "one class": (X[:9], np.zeros(9, dtype=np.int64)),
    "no test rows": (X[:9], Y[:9], X[:0], Y[:0]),
    "test rows and one train row": (X[:1], Y[:1], X[1:5], Y[1:5]),
    "two rows": (X[:2], Y[:2]),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_a_small_client_is_a_client(name, backend):
    run = federated(with_client(*SOUND[name]), algorithm="fedrep", backend=backend)
    assert list(run.models) == ["anna", "odd", "bert"]
    assert run.models["odd"].predict(X[:5]).shape == (5,)
    odd = [row for row in run.folder.clients() if row["client"] == 1]
    if name in ("one row", "no test rows"):
        assert [row["total"] for row in odd] == [0]
        assert run.summary["views"]["personal"]["last"]["all"]["excluded"] == 1
    else:
        assert all(row["total"] > 0 for row in odd)


@pytest.mark.parametrize("name", ["one row", "one class", "no test rows"])
def test_a_small_client_of_files_is_a_client(name, tmp_path):
    one, two = arrays(2)
    path = write(tmp_path / "x.toml", **save_clients(tmp_path / "c", anna=one, bert=two, odd=SOUND[name]))
    done = command("run", path, "--out", tmp_path / "run", "--save-models")
    assert done.code == 0, done.err
    assert (tmp_path / "run" / "models" / "odd.safetensors").is_file()


def test_nobody_has_test_rows():
    run = federated([(x, y, x[:0], y[:0]) for x, y in arrays()])
    assert run.models["0"].predict(X).shape == (30,)
    with pytest.raises(UserError, match="there is no accuracy"):
        _ = run.accuracy


def test_nobody_has_test_rows_on_the_command_line(tmp_path):
    path = write(tmp_path / "x.toml", data={"test": 0.0}, **TOML)
    done = command("run", path, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "no client was evaluated on test rows" in done.out


# --- clients without rows -----------------------------------------------------------------------------------------


def test_a_client_without_rows_is_refused_by_name():
    assert "client 'odd' has no training rows" in told(with_client(X[:0], Y[:0]))
    assert "skip_empty" in told(with_client(X[:0], Y[:0]))
    assert "client 'odd'" in told(with_client(X[:0], Y[:0], X[:4], Y[:4]))


def test_a_client_without_rows_is_left_out_on_request():
    run = federated(with_client(X[:0], Y[:0]), skip_empty=True)
    assert list(run.models) == ["anna", "bert"]


def test_a_client_without_rows_on_the_command_line(tmp_path):
    one, two = arrays(2)
    tables = save_clients(tmp_path / "c", anna=one, empty=(X[:0], Y[:0]), bert=two)
    path = write(tmp_path / "x.toml", **tables)
    assert "client 'empty' has no training rows" in sentence("run", path, tmp_path=tmp_path)
    done = command("run", path, "--set", "training.skip_empty=true", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert bespoke.summarise(tmp_path / "run")["participations"] == 1


def test_nobody_has_rows():
    assert "none of the 2 clients has any rows" in told([(X[:0], Y[:0])] * 2, skip_empty=True)
    assert "there are no clients" in told([])
    assert "there are no clients" in told({})


# --- wrong values -------------------------------------------------------------------------------------------------


def changed(array, value):
    array = array.copy()
    array[3] = value
    return array


WRONG = {
    "negative label": (X, changed(Y, -1), ["client 'odd' has the label -1", "outside 0..2"]),
    "labels that are fractions": (X, Y.astype(float), ["y of client 'odd'", "float64", "integer"]),
    "labels that are words": (X, Y.astype(str), ["y of client 'odd'", "integer"]),
    "labels in two columns": (X, np.stack([Y, Y], 1), ["y of client 'odd'", "(30, 2)"]),
    "NaN in x": (changed(X, np.nan), Y, ["client 'odd' has NaN"]),
    "infinity in x": (changed(X, np.inf), Y, ["client 'odd' has NaN, infinity"]),
    "a number beyond float32": (changed(X.astype(np.float64), 1e300), Y, ["client 'odd'"]),
    "words in x": (X.astype(str), Y, ["x of client 'odd'", "numbers"]),
    "fewer labels than rows": (X, Y[:-1], ["client 'odd'", "30 rows in x and 29 in y"]),
    "another shape": (X[:, :-1], Y, ["client 'odd'", "(4,)", "(5,)"]),
    "no features": (X[:, 0], Y, ["x of client 'odd'", "(30,)"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_name_the_client(name):
    x, y, words = WRONG[name]
    found = told(with_client(x, y))
    for word in words:
        assert word in found


@pytest.mark.parametrize("name", ["negative label", "labels that are fractions", "NaN in x", "fewer labels than rows"])
def test_wrong_values_in_a_file_name_the_file_or_client(name, tmp_path):
    one, _ = arrays(2)
    x, y, _ = WRONG[name]
    path = write(tmp_path / "x.toml", **save_clients(tmp_path / "c", anna=one, odd=(x, y)))
    assert "odd" in sentence("run", path, tmp_path=tmp_path)


def test_a_label_beyond_the_number_of_classes(tmp_path):
    tables = save_clients(tmp_path / "c", anna=arrays(1)[0])
    tables["data"]["num_classes"] = 2
    found = sentence("run", write(tmp_path / "x.toml", **tables), tmp_path=tmp_path)
    assert "client 'anna' has the label 2, outside 0..1" in found


def test_more_classes_than_the_model_has_outputs():
    clients = [(x, y + 2) for x, y in arrays()]
    assert f"outputs of shape (4, {CLASSES}) for 4 examples, but the data has 5 classes" in told(clients)


class Endless(IterableDataset):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (X, ["client '0' is a ndarray"]),
        (None, ["client '0' is a NoneType"]),
        ((X, Y, X), ["client '0' is a tuple"]),
        ("file.npz", ["client '0' is a str"]),
        (TensorDataset(torch.from_numpy(X)), ["Dataset of client '0'", "(x, y) pairs"]),
        (Endless(), ["Dataset of client '0'", "no length"]),
    ],
)
def test_a_client_of_another_kind(client, words):
    found = told([client])
    for word in words:
        assert word in found


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1.0}, ["[training] lr", "greater than 0"]),
        ({"rounds": 0}, ["[training] rounds", "at least 1"]),
        ({"rounds": "ten"}, ["[training] rounds", "a whole number", "'ten'"]),
        ({"learning_rate": 0.1}, ["no argument 'learning_rate'", "rounds"]),
        ({"test": 1.5}, ["test", "at most 0.99"]),
        ({"validation": -0.1}, ["validation", "at least 0"]),
        ({"new_clients": 4}, ["4 of 4 clients cannot be new"]),
        ({"evaluate_every": -1}, ["[evaluation] every", "at least 0"]),
        ({"seed": -1}, ["seed", "at least 0"]),
        ({"seed": "x"}, ["seed", "'x'"]),
        ({"algorithm": "fedrap"}, ["did you mean 'fedrep'"]),
        ({"algorithm": bespoke.FedRep}, ["takes a method or its name, not the class FedRep: add (), as in FedRep()"]),
        ({"device": "gpu"}, ["no device 'gpu'"]),
        ({"backend": "fast"}, ["no backend 'fast'"]),
        ({"states": "ram"}, ["states cannot be kept on 'ram'", "device, host, disk"]),
    ],
)
def test_wrong_arguments_of_federate(settings, words):
    found = told(arrays(), **settings)
    for word in words:
        assert word in found


# --- wrong models -------------------------------------------------------------------------------------------------


class Doubled(Net):
    """Its head is not the last thing that happens."""

    def forward(self, x):
        return 2 * super().forward(x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(DIM, DIM)
        self.b = self.a
        self.fc = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.fc(self.b(self.a(x)))


MODELS = {
    "no such head": (Net, "classifier", ["no module named 'classifier'", "'first', 'fc'"]),
    "empty head": (Net, "", ["no module named ''"]),
    "a head without parameters": (
        lambda: nn.Sequential(nn.Linear(DIM, CLASSES), nn.ReLU()),
        "1",
        ["'1' has no parameters"],
    ),
    "a head that is not last": (Doubled, "fc", ["not its head 'fc' applied to features"]),
    "a layer in the middle as head": (
        lambda: nn.Sequential(nn.Linear(DIM, CLASSES), nn.Linear(CLASSES, CLASSES)),
        "0",
        ["'0'"],
    ),
    "BatchNorm": (
        lambda: nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)),
        "2",
        ["layer '1'", "BatchNorm", "GroupNorm"],
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(DIM, 4), nn.Dropout(0.5), nn.Linear(4, CLASSES)),
        "2",
        ["layer '1'", "dropout"],
    ),
    "tied weights": (Tied, "fc", ["ties parameters"]),
    "other inputs": (
        lambda: nn.Sequential(nn.Linear(DIM + 1, CLASSES)),
        "0",
        [f"cannot take examples of shape ({DIM},)"],
    ),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, CLASSES)),
        "2",
        [f"cannot take examples of shape ({DIM},)"],
    ),
    "fewer outputs than classes": (
        lambda: nn.Sequential(nn.Linear(DIM, 2)),
        "0",
        ["outputs of shape (4, 2)", f"{CLASSES} classes"],
    ),
}


@pytest.mark.parametrize("model", [None, "mlp", torch.relu])
def test_a_model_that_is_no_module(model):
    with pytest.raises(UserError, match=r"takes a torch module as its model, such as Net\(\), not"):
        bespoke.federate(arrays(), model, "fc")


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_model_is_refused(name):
    build, head, words = MODELS[name]
    found = told(arrays(), seeded(build), head)
    for word in words:
        assert word in found


def test_batchnorm_in_an_experiment_is_refused(tmp_path):
    path = write(tmp_path / "x.toml", model={"name": "mlp", "norm": "batch"})
    assert '[model] norm = "batch" is not available' in sentence("run", path, tmp_path=tmp_path)


def test_a_model_that_the_data_does_not_fit(tmp_path):
    path = write(tmp_path / "x.toml", model={"name": "cnn"})
    assert "the model cnn needs images" in sentence("run", path, tmp_path=tmp_path)


# --- wrong methods ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClosesOver(bespoke.Algorithm):
    """Its loss reads the received model without being handed it."""

    def client_update(self, local, state, down):
        anchor, loss = down["model"], local.task.loss

        def near(w, batch):
            return loss(w, batch) + bespoke.tree.sq_dist(w, anchor)

        return state, {"model": local.sgd(near, down["model"])}

    def personalize(self, local, state, down):
        return down["model"]


@dataclass(frozen=True)
class Leaks(bespoke.Algorithm):
    private = ("model",)

    def client_update(self, local, state, down):
        return state, {"model": down["model"]}

    def personalize(self, local, state, down):
        return down["model"]


@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_a_step_that_closes_over_a_tensor_is_refused(backend):
    with pytest.raises(TypeError, match=r"loss closes over the tensor 'anchor'.*local.sgd\(loss, params, anchor\)"):
        federated(algorithm=ClosesOver(), backend=backend)


@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_an_upload_of_what_is_private_is_refused(backend):
    with pytest.raises(ValueError, match=r"Leaks uploads \['model'\], which it declares private"):
        federated(algorithm=Leaks(), backend=backend)


def test_a_method_without_its_hooks_is_told():
    @dataclass(frozen=True)
    class Nothing(bespoke.Algorithm):
        pass

    with pytest.raises(NotImplementedError, match=r"Nothing needs client_update\(local, state, down\)"):
        federated(algorithm=Nothing())


# --- wrong experiments on the command line ------------------------------------------------------------------------

SET = {
    "data.clients=500": ["500 clients are more than the 160 rows"],
    "data.alpha=0": ["the setting 'data.alpha=0'", "greater than 0"],
    "data.alpha=-1": ["greater than 0", "-1"],
    "data.name=digit": ["[data] name: there is no data set 'digit'", "did you mean 'digits'"],
    "data.volume=9": ["[data] volume = 9 means nothing to partition dirichlet, which takes alpha, min_rows, balance"],
    "data.path=x": ["[data] path = 'x' means nothing to data set gaussian, which takes num_classes, rows, dim, spread"],
    "data.partition=dirichle": ["'dirichlet'", "'dirichle'"],
    "data.partition=natural": ["no clients of its own"],
    "data.min_rows=100": ["need more than the 160 rows"],
    "data.new_clients=6": ["6 of 6 clients cannot be new"],
    "data.validation=1": ["at most 0.99"],
    "data.test=2": ["at most 0.99"],
    "data.pool=split": ["no official test rows"],
    "model.name=resnet": ["[model] name: there is no model 'resnet'", "linear"],
    "model.name=mpl": ["did you mean 'mlp'"],
    "model.norm=group": ["norm of linear", "'none'"],
    "training.lr=0": ["greater than 0"],
    "training.lr=nan": ["greater than 0", "nan"],
    "training.rate=0": ["greater than 0 and at most 1"],
    "training.round=3": ["did you mean 'rounds'"],
    "training.epochs=0": ["at least 1"],
    "training.sampling=random": ["'fixed', 'bernoulli'"],
    "evaluation.when=before": ["'aggregated', 'local'"],
    "evaluation.patience=2": ["patience", "[data] validation"],
    "algorithm.lam=1": ["[algorithm] has no key 'lam'"],
    "seed=-1": ["at least 0"],
    "lr=1": ["did you mean training.lr"],
}


@pytest.mark.parametrize("text", SET)
def test_a_wrong_setting_on_the_command_line(text, tmp_path):
    found = sentence("run", write(tmp_path / "x.toml"), "--set", text, tmp_path=tmp_path)
    for word in SET[text]:
        assert word in found


def test_a_pathological_split_of_more_classes_than_there_are(tmp_path):
    path = write(tmp_path / "x.toml", data={"partition": "pathological", "classes_per_client": 9})
    assert "classes_per_client is 9, but the data has 3 classes" in sentence("run", path, tmp_path=tmp_path)


def test_a_typo_in_a_file(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("[training]\nruonds = 3\n")
    found = sentence("run", path, tmp_path=tmp_path)
    for word in (str(path), "[training]", "'ruonds'", "did you mean 'rounds'", "allowed are rounds, epochs"):
        assert word in found


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, ["no file matches", "*.npz"]),
        (lambda folder: (folder / "a.npz").write_bytes(b"PK\x03\x04 not"), ["a.npz is truncated or damaged"]),
        (lambda folder: (folder / "a.npz").write_text("hello"), ["a.npz is truncated or damaged"]),
        (lambda folder: (folder / "a.npz").mkdir(), ["a.npz: Is a directory", "cannot read"]),
        (lambda folder: np.savez(folder / "a.npz", x=X), ["a.npz", "no array 'y'"]),
        (lambda folder: np.savez(folder / "a.npz", x=X, y=Y, x_test=X), ["a.npz", "only one of x_test and y_test"]),
        (lambda folder: np.savez(folder / "a.npz", x=np.array([{}]), y=Y[:1]), ["a.npz", "nothing is ever unpickled"]),
    ],
)
def test_wrong_files_of_clients(make, words, tmp_path):
    folder = tmp_path / "clients"
    folder.mkdir()
    make(folder)
    path = write(tmp_path / "x.toml", data=FILES | {"path": str(folder / "*.npz")})
    found = sentence("run", path, tmp_path=tmp_path)
    for word in words:
        assert word in found


def test_an_output_below_a_plain_file(tmp_path):
    path = write(tmp_path / "x.toml")
    (tmp_path / "plain").write_text("a file")
    for out in ("plain", "plain/run", "plain/a/b"):
        found = command("run", path, "--out", tmp_path / out).sentence
        assert str(tmp_path / out) in found and "choose another output" in found
    assert (tmp_path / "plain").read_text() == "a file"


def test_an_output_where_nothing_can_be_made():
    found = command("run", "demo", "--out", "/proc/none/run", "--set", "training.rounds=1").sentence
    assert "/proc/none/run" in found


def test_a_folder_that_holds_something_else_is_not_touched(tmp_path):
    path = write(tmp_path / "x.toml")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.toml").write_text("[tool]\n")
    assert "already holds a run" in command("run", path, "--out", tmp_path / "full").sentence
    found = command("run", path, "--out", tmp_path / "full", "--resume").sentence
    assert str(tmp_path / "full" / "config.toml") in found and "'tool'" in found
    assert {p.name for p in Path(tmp_path / "full").iterdir()} <= {"config.toml", ".bespoke.lock"}


def test_a_run_of_another_experiment_is_refused_with_both_hashes(tmp_path):
    one, two = write(tmp_path / "x.toml"), write(tmp_path / "y.toml", training={"lr": 0.5})
    assert command("run", one, "--out", tmp_path / "run").code == 0
    found = command("run", two, "--out", tmp_path / "run", "--resume").sentence
    for path in (one, two):
        assert bespoke.runs.experiment.load(path)[0].hash() in found
    assert "training.lr is 0.1 there and 0.5 here" in found
