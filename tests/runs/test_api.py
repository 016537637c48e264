"""The Python interface: an experiment, or one's own data and model, to records and models that predict."""

import gc
import inspect
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from small_runs import CLASSES, DIM, Net, arrays, assert_same_result, experiment, federated, same_tensors, seeded, write
from torch import nn
from torch.utils.data import TensorDataset

import bespoke
from bespoke import algorithms
from bespoke.core import rng, tree
from bespoke.core.task import Task
from bespoke.errors import UserError
from bespoke.records import RunFolder
from bespoke.runs import api
from bespoke.runs.execution import Options

# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bespoke.__all__)
def test_every_public_name_resolves(name):
    assert getattr(bespoke, name) is not None
    assert name in dir(bespoke)


def test_a_name_that_is_none():
    with pytest.raises(AttributeError, match="module 'bespoke' has no attribute 'FedMagic'"):
        _ = bespoke.FedMagic


# --- an experiment ------------------------------------------------------------------------------------------------


def test_a_run_without_a_folder_keeps_its_records_as_long_as_someone_holds_them():
    run = bespoke.run(experiment())
    folder = run.folder
    assert folder.path.is_dir() and run.summary["rounds"] == 3
    del run
    gc.collect()
    assert len(folder.rounds()) == 3
    path = folder.path
    del folder
    gc.collect()
    assert not path.exists()


def test_records_of_a_run_that_nobody_holds():
    assert len(bespoke.run(experiment(rounds=1)).folder.rounds()) == 1


def test_a_run_without_a_folder_leaves_nothing_behind_when_it_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(event):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        bespoke.run(experiment(), callbacks=[fail])
    gc.collect()
    assert not os.listdir(tmp_path)


def test_a_run_is_repeatable_to_the_bit(tmp_path):
    for name in ("one", "two"):
        bespoke.run(experiment("fedrep"), tmp_path / name)
    assert_same_result(tmp_path / "one", tmp_path / "two")


def test_a_run_folder_holds_what_is_documented(tmp_path):
    run = bespoke.run(experiment("ditto"), tmp_path / "deep" / "run")
    names = {p.name for p in run.folder.path.iterdir()}
    assert names == {
        *(".bespoke.lock", "config.toml", "environment.json", "federation.json", "summary.json", "checkpoints"),
        "start.safetensors",
        *("rounds.jsonl", "clients.jsonl", "timing.jsonl", "rounds.parquet", "clients.parquet"),
    }
    told = run.folder.read_json("environment.json")
    assert told["experiment"] == run.experiment.hash()
    assert told["backend"] == "loop" and told["device"] == "cpu" and told["torch"] == torch.__version__
    assert run.folder.read_json("summary.json") == run.summary


def test_an_experiment_is_run_from_its_file(tmp_path):
    path = write(tmp_path / "x.toml")
    assert bespoke.run(path).summary["rounds"] == 3
    assert bespoke.run(Path(path)).experiment == experiment()
    with pytest.raises(UserError, match="no shipped experiment of that name"):
        bespoke.run("no-such-thing")
    with pytest.raises(UserError, match="takes an Experiment, a file or the name"):
        bespoke.run({"data": "digits"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "vmap"}, "no backend 'vmap': use one of batched, loop"),
        ({"device": "tpu"}, "no device 'tpu': use cpu, cuda or auto"),
        ({"device": "meta"}, "no device 'meta': use cpu, cuda or auto"),
        ({"device": "cuda:99"}, "device cuda:99 was asked for, but torch sees"),
        ({"checkpoint_every": 0}, r"run\(checkpoint_every=\.\.\.\) takes a number of rounds from 1, not 0"),
    ],
)
def test_settings_of_a_run_that_are_none(settings, words, tmp_path):
    with pytest.raises(UserError, match=words):
        bespoke.run(experiment(), tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "config.toml").exists()


# --- models -------------------------------------------------------------------------------------------------------


def count_right(run, model, client):
    rows = run.pool.test.client(client)
    return int((model.predict(run.pool.x[rows]) == run.pool.y[rows]).sum())


@pytest.mark.parametrize("name", list(algorithms.ALGORITHMS))
def test_the_models_are_those_that_were_evaluated(name, tmp_path):
    """New and unseen clients among them, for which models are adapted first."""
    model = {"name": "mlp", "hidden": 5, "norm": "layer"}  # what every method can use
    spec = experiment(name, model=model, data={"new_clients": 1}, rate=0.4, rounds=2)
    run = bespoke.run(spec, tmp_path)
    assert {row["group"] for row in run.folder.clients()} == {"train", "unseen", "new"}
    assert list(run.models) == list(run.pool.names)
    recorded = [row["metrics"]["accuracy"][0] for row in run.folder.clients() if row["view"] == run.summary["headline"]]
    assert [count_right(run, model, c) for c, model in enumerate(run.models.values())] == recorded
    first = next(iter(run.models.values()))
    logits = first.logits(run.pool.x[:4])
    assert logits.shape == (4, 3) and torch.equal(logits.argmax(-1), first.predict(run.pool.x[:4]))


def test_the_models_of_a_run_that_was_stopped_are_those_of_its_last_round():
    """Fine-tuning draws its batches by the round, so another round would give other models."""
    spec = experiment("fedavg_ft", rounds=20, rate=1.0, evaluation={"every": 2}, schedule="cosine")
    calls = []
    run = bespoke.run(spec, stop=lambda: calls.append(0) or len(calls) == 2)
    assert run.summary["rounds"] == 2
    clients, shared = run.federation.clients, run.federation.down(run.server, range(6))
    expected = clients.personal(2, range(6), *shared)
    for model, wanted in zip(run.models.values(), expected, strict=True):
        assert same_tensors(tree.flatten(model.personal), tree.flatten(wanted))
    lines = [row for row in run.folder.clients() if row["round"] == 2 and row["view"] == run.summary["headline"]]
    recorded = [row["metrics"]["accuracy"][0] for row in lines]
    assert [count_right(run, model, c) for c, model in enumerate(run.models.values())] == recorded


def test_saved_models_predict_what_the_models_predict(tmp_path):
    run = federated(algorithm="fedrep", out=tmp_path)
    folder = run.save_models()
    assert sorted(p.name for p in folder.iterdir()) == [f"{i}.safetensors" for i in range(4)]
    x = torch.from_numpy(arrays()[0][0])
    for name, model in run.models.items():
        net = Net()
        net.load_state_dict(safetensors.torch.load_file(folder / f"{name}.safetensors"))
        assert torch.allclose(net(x), model.logits(x), atol=1e-6)
        assert torch.equal(net(x).argmax(-1), model.predict(x))


def test_models_of_clients_with_awkward_names_are_saved_one_file_each(tmp_path):
    names = ["a/b", "../up", "a b", "ä", "a%2Fb", "."]
    run = federated(dict(zip(names, arrays(6), strict=True)), out=tmp_path / "run", rounds=1)
    folder = run.save_models()
    assert len(list(folder.iterdir())) == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
    assert (folder / "a%2Fb.safetensors").is_file() and (folder / "a b.safetensors").is_file()


# --- one's own data and model -------------------------------------------------------------------------------------


def dict_of_arrays():
    return {f"hospital {i}": pair for i, pair in enumerate(arrays())}


def tensors():
    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in arrays()]


FORMS = {
    "a list of arrays": arrays,
    "a dict of arrays": dict_of_arrays,
    "tensors": tensors,
    "plain lists": lambda: [(x.tolist(), y.tolist()) for x, y in arrays()],
    "torch Datasets": lambda: [TensorDataset(x, y) for x, y in tensors()],
    "pairs of torch Datasets": lambda: [
        (TensorDataset(x[:20], y[:20]), TensorDataset(x[20:], y[20:])) for x, y in tensors()
    ],
    "test rows of their own": lambda: [(x[:20], y[:20], x[20:], y[20:]) for x, y in arrays()],
}


@pytest.mark.parametrize("form", FORMS)
def test_clients_in_any_form_get_models_that_predict(form):
    clients = FORMS[form]()
    run = federated(clients, algorithm=bespoke.FedRep(), rounds=3, momentum=0.5)
    names = [f"hospital {i}" for i in range(4)] if form == "a dict of arrays" else ["0", "1", "2", "3"]
    assert list(run.models) == names
    right = [float((run.models[n].predict(x).numpy() == y).mean()) for n, (x, y) in zip(names, arrays(), strict=True)]
    assert min(right) > 0.9, right
    assert run.accuracy > 0.8
    if "test" in form or "pairs" in form:
        assert run.pool.test.sizes == (10,) * 4 and run.pool.train.sizes == (20,) * 4


def test_one_model_for_all_cannot_do_what_the_personal_ones_do():
    assert federated(algorithm="fedavg", rounds=5).accuracy < 0.7 < federated(algorithm="fedrep", rounds=5).accuracy


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep", bespoke.Ditto(lam=0.1), "local", "lg_fedavg"])
def test_the_users_module_is_left_as_it_was(algorithm):
    model = seeded(Net).double()
    model.first.bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = federated(model=model, algorithm=algorithm)
    _ = run.models
    assert same_tensors(dict(model.named_parameters()), before)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert not model.first.bias.requires_grad and model.fc.bias.requires_grad
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_the_models_weights_are_the_common_start():
    model = seeded(Net)
    run = federated(model=model)
    assert same_tensors(run.federation.params, {n: p.detach() for n, p in model.named_parameters()})
    with torch.no_grad():
        model.fc.weight.zero_()  # changed afterwards: the run has its own copy
    assert not torch.equal(run.federation.params["fc.weight"], model.fc.weight)


def test_a_head_that_lies_deeper_is_named_with_dots():
    model = seeded(lambda: nn.Sequential(nn.Linear(DIM, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, CLASSES))))
    run = federated(model=model, head="1.1", algorithm="fedper")
    assert run.federation.task.head_names == ("1.1.weight", "1.1.bias")


def test_new_clients_and_validation_rows():
    run = federated(arrays(5), validation=0.25, new_clients=2, evaluate_every=1, algorithm="fedrep")
    assert {row["group"] for row in run.folder.clients()} == {"train", "new"}
    assert run.summary["views"]["personal"]["best_val"] is not None
    assert len(run.models) == 5


def test_a_class_that_no_client_holds():
    clients = [(x, y % 2) for x, y in arrays()]
    run = federated(clients, num_classes=CLASSES)
    assert run.pool.num_classes == CLASSES and run.models["0"].logits(clients[0][0]).shape == (30, CLASSES)


def test_uint8_images():
    draw = np.random.default_rng(0)
    clients = [(draw.integers(0, 256, (12, 1, 6, 6), dtype=np.uint8), np.arange(12) % 3) for _ in range(3)]
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)))
    run = federated(clients, model, head="1")
    assert run.models["0"].predict(clients[0][0]).shape == (12,)


def test_a_federation_goes_on_where_it_stopped(tmp_path):
    federated(out=tmp_path / "run", algorithm="ditto")
    federated(out=tmp_path / "run", algorithm="ditto", rounds=4, resume=True)
    federated(out=tmp_path / "long", algorithm="ditto", rounds=4, evaluate_every=2)
    assert_same_result(tmp_path / "run", tmp_path / "long")


def test_another_model_or_other_data_are_another_experiment(tmp_path):
    federated(out=tmp_path)

    def refused(word, **settings):
        with pytest.raises(UserError, match=rf"another experiment .*{word}"):
            federated(out=tmp_path, resume=True, **settings)

    refused("model.name", model=seeded(Net, 9))
    torch.manual_seed(1)
    refused("model.name", model=Net())
    refused("data.new_clients", new_clients=1)
    refused("data.test", test=0.3)
    for clients, told in (
        (arrays(seed=1), "client '0' has other rows"),
        ({f"c{i}": pair for i, pair in enumerate(arrays())}, "client 'c0' is new"),
    ):
        with pytest.raises(UserError, match=told):
            federated(out=tmp_path, resume=True, clients=clients)
    assert federated(out=tmp_path, resume=True).summary["rounds"] == 2


def test_where_clients_begin_is_a_part_of_the_data(tmp_path):
    x, y = arrays(1, 40)[0]
    even = [(x[:20], y[:20], x[:0], y[:0]), (x[20:], y[20:], x[:0], y[:0])]
    uneven = [(x[:10], y[:10], x[:0], y[:0]), (x[10:], y[10:], x[:0], y[:0])]
    federated(even, out=tmp_path)
    with pytest.raises(UserError, match="client '0' has other rows"):
        federated(uneven, out=tmp_path, resume=True)


@pytest.mark.parametrize("start", [lambda **options: bespoke.run(experiment(rounds=5), **options), federated])
def test_run_and_federate_share_their_options(start, tmp_path):
    rounds = []
    run = start(
        out=tmp_path / "run",
        backend="batched",
        device="cpu",
        precision="fp32",
        states="disk",
        callbacks=[lambda event: rounds.append(event.round)],
        checkpoint_every=1,
        stop=lambda: True,
        about={"who": "me"},
    )
    assert rounds == [1] and run.summary["rounds"] == 1
    environment = run.folder.read_json("environment.json")
    assert [environment[key] for key in ("backend", "states", "who")] == ["batched", "disk", "me"]
    assert start(out=tmp_path / "run", resume=True).summary["rounds"] > 1
    with pytest.raises(UserError, match=r"has no argument 'bakend' \(did you mean 'backend'\?\); it takes"):
        start(bakend="loop")


def test_federate_takes_all_that_run_takes():
    """Every argument of run and every part of an experiment; data are federate's own, and it is a simulation."""
    takes = inspect.signature(bespoke.federate).parameters
    parts = {field.name for field in fields(bespoke.Experiment)} - {"algorithm_name", "folder", "data", "federation"}
    assert parts | {"out"} <= takes.keys()
    assert set(inspect.signature(bespoke.run).parameters) == {"experiment", "out", "options"}
    with pytest.raises(UserError) as caught:
        federated(no_such=1)
    told = str(caught.value).partition("it takes ")[2].split(", ")
    assert told == [*(field.name for field in fields(bespoke.Training)), *api.DEFAULTS]
    assert api.DEFAULTS.keys() == Options.__annotations__.keys()


def test_federate_takes_whole_tables_and_keywords_change_them():
    training, evaluation = bespoke.Training(rounds=7, momentum=0.5), bespoke.Evaluation(every=2, select="best_test")
    run = federated(training=training, evaluation=evaluation, rounds=3, lr=0.2, new_clients=1)
    assert run.experiment.training == replace(training, rounds=3, lr=0.2) and run.experiment.evaluation == evaluation
    assert run.curves()["round"] == [2, 3]
    assert federated(evaluation=evaluation, evaluate_every=1).experiment.evaluation == replace(evaluation, every=1)
    assert federated(evaluation=evaluation, evaluate_every=0).experiment.evaluation == replace(evaluation, every=0)
    for name, wrong in (("training", {"rounds": 3}), ("evaluation", 3)):
        with pytest.raises(UserError, match=rf"federate\({name}=...\) takes a bespoke.{name.title()}, not"):
            federated(**{name: wrong})


def test_the_head_is_the_last_linear_layer_where_that_is_clear():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    named, found = federated(model=Net), federated(model=Net, head=None)
    assert torch.equal(torch.get_rng_state(), state)  # nothing of the user's was drawn
    assert found.notes == ["the head is 'fc', the model's last linear layer; head= names another"]
    assert found.summary["views"] == named.summary["views"] and found.experiment.hash() == named.experiment.hash()


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ((nn.Linear(5, 3), nn.Linear(3, 3)), "('0' with 3, '1' with 3)"),
        ((nn.Linear(5, 3), nn.Linear(3, 7)), "('0' with 3, '1' with 7)"),
        ((nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 5), nn.Flatten()), "(there are none)"),
    ],
)
def test_a_head_that_is_not_clear_is_asked_for(layers, told):
    with pytest.raises(UserError, match="the last one alone should have 3 outputs; name the layer") as caught:
        federated(model=nn.Sequential(*layers), head=None)
    assert told in str(caught.value)


def test_one_seed_covers_a_factory_too():
    first, again, other = (federated(model=Net, seed=seed, rounds=1).models["0"] for seed in (1, 1, 2))
    assert all(torch.equal(first.personal[name], again.personal[name]) for name in first.personal)
    assert not torch.equal(first.personal["first.weight"], other.personal["first.weight"])


def test_federate_checkpoints_as_often_as_it_is_told(tmp_path):
    federated(out=tmp_path, rounds=4, checkpoint_every=2)
    assert {path.stem for path in (tmp_path / "checkpoints").glob("00*.json")} >= {"000002", "000004"}


def test_federate_stops_early():
    settings = {"rounds": 40, "lr": 1e-6, "validation": 0.3, "evaluate_every": 1}
    run = federated(**settings, patience=2)
    assert run.summary["rounds"] == 3  # the first evaluation is the best, and two more are no better
    assert run.experiment.evaluation.patience == 2
    with pytest.raises(UserError, match="patience stops early on validation accuracy"):
        federated(patience=2, evaluate_every=1)


# --- one's own method ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mine(bespoke.Algorithm):
    """A method of one's own."""

    strength: float = bespoke.knob(1.0, "how much", low=0)

    def client_update(self, local, state, down):
        return state, {"model": local.sgd(local.task.loss, down["model"], lr=self.strength * 0.1)}

    def personalize(self, local, state, down):
        return down["model"]


@pytest.fixture
def listed(monkeypatch):
    """The table of methods, put back afterwards."""
    monkeypatch.setattr(algorithms, "ALGORITHMS", algorithms.ALGORITHMS)
    before = dict(algorithms.ALGORITHMS)
    yield
    algorithms.ALGORITHMS.clear()
    algorithms.ALGORITHMS.update(before)


def test_a_registered_method_runs_by_name(listed, tmp_path):
    bespoke.register("mine", Mine)
    run = bespoke.run(experiment("mine"), tmp_path / "run")
    assert run.experiment.algorithm_name == "mine"
    assert RunFolder(tmp_path / "run").config()["algorithm"] == {"name": "mine", "strength": 1.0}
    path = write(tmp_path / "x.toml", algorithm={"name": "mine", "strength": 2})
    assert bespoke.run(path).experiment.method == Mine(strength=2.0)
    assert federated(algorithm="mine").accuracy > 0.3
    bespoke.register("mine", Mine)  # once more is no mistake


def test_what_cannot_be_registered(listed):
    with pytest.raises(UserError, match="fedavg is one of bespoke's own methods: choose another name"):
        bespoke.register("fedavg", Mine)
    with pytest.raises(UserError, match=r"dict gives a dict, not a bespoke\.Algorithm"):
        bespoke.register("mine", dict)


def test_a_method_that_is_not_registered_runs_and_goes_on(tmp_path):
    spec = experiment(Mine(strength=0.5), rounds=2)
    assert spec.algorithm_name == "mine"
    bespoke.run(spec, tmp_path / "run")
    bespoke.run(experiment(Mine(strength=0.5), rounds=4), tmp_path / "run", resume=True)
    bespoke.run(experiment(Mine(strength=0.5), rounds=4, evaluation={"every": 2}), tmp_path / "long")
    assert_same_result(tmp_path / "run", tmp_path / "long")
    with pytest.raises(UserError, match=r"another experiment .*algorithm.strength is 0.5 there and 0.25 here"):
        bespoke.run(experiment(Mine(strength=0.25), rounds=4), tmp_path / "run", resume=True)


def test_a_method_that_cannot_be_mapped_runs_one_client_after_another_and_says_so(tmp_path):
    @dataclass(frozen=True)
    class Branches(bespoke.Algorithm):
        def client_update(self, local, state, down):
            if down["model"]["head.bias"].sum() > 1e9:
                return state, down
            return state, {"model": local.sgd(local.task.loss, down["model"])}

        def personalize(self, local, state, down):
            return down["model"] if state.get("never") is None and local.n.item() > 0 else {}

    run = bespoke.run(experiment(Branches(), rounds=1), tmp_path, backend="batched")
    assert len(run.notes) == 1 and "one after another" in run.notes[0]
    assert run.folder.read_json("environment.json")["notes"] == run.notes
    loop = bespoke.run(experiment(Branches(), rounds=1), backend="loop")
    assert not loop.notes
    assert [r["metrics"]["accuracy"][0] for r in run.folder.clients()] == [
        r["metrics"]["accuracy"][0] for r in loop.folder.clients()
    ]


def test_compare_and_summarise_read_what_run_wrote(tmp_path):
    for name in ("fedavg", "fedrep"):
        bespoke.run(experiment(name), tmp_path / name)
    found = bespoke.compare([tmp_path])
    assert [row.label for row in found.rows] == ["fedavg", "fedrep"]
    assert bespoke.summarise(tmp_path / "fedavg")["rounds"] == 3
    assert tree.nbytes({"x": torch.zeros(2)}) == 8


def test_the_backend_follows_the_device_unless_one_is_named():
    assert bespoke.runs.api.pick_backend("auto", torch.device("cpu")) == "loop"
    assert bespoke.runs.api.pick_backend("auto", torch.device("cuda")) == "batched"
    assert bespoke.runs.api.pick_backend("batched", torch.device("cpu")) == "batched"
    with pytest.raises(bespoke.UserError, match="there is no backend 'both': use one of batched, loop or auto"):
        bespoke.runs.api.pick_backend("both", torch.device("cpu"))


# --- precision ------------------------------------------------------------------------------------------------


def test_precision_is_float32_on_the_cpu_and_recorded(tmp_path, monkeypatch):
    run = bespoke.run(experiment("fedavg", rounds=1), tmp_path)
    assert run.folder.read_json("environment.json")["precision"] == "fp32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert [api.pick_precision("auto", torch.device(d), torch.float32) for d in ("cpu", "cuda")] == ["fp32", "bf16"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))  # rounds, but has no such products
    assert api.pick_precision("auto", torch.device("cuda"), torch.float32) == "fp32"
    assert api.pick_precision("auto", torch.device("cuda"), torch.float64) == "fp32"
    assert api.pick_precision("bf16", torch.device("cuda"), torch.float32) == "bf16"


@pytest.mark.parametrize(
    ("precision", "sentence"),
    [
        ("bf16", "precision bf16 needs a CUDA device: use fp32 on the CPU"),
        ("half", "there is no precision 'half': use one of fp32, tf32, bf16"),
    ],
)
def test_a_precision_that_cannot_be_is_refused(precision, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        bespoke.run(experiment("fedavg", rounds=1), tmp_path, device="cpu", precision=precision)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("test", "x"),
        ("test", None),
        ("validation", "x"),
        ("num_classes", "10"),
        ("new_clients", 1.5),
        ("checkpoint_every", "x"),
        ("checkpoint_every", 0),
        ("callbacks", 3),
        ("stop", 3),
        ("about", 3),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(name, value):
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    with pytest.raises(UserError, match=rf"^federate\({name}=\.\.\.\) takes [^\n]*, not [^\n]*$"):
        bespoke.federate([(x, y)] * 3, torch.nn.Sequential(torch.nn.Linear(4, 3)), "0", **{name: value})


@pytest.mark.parametrize("place", [0, 2])
def test_a_client_at_the_end_of_the_numbers_does_not_stop_the_others(place):
    x, y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    huge = x / x.abs().max() * torch.finfo(torch.float32).max
    clients = {f"clinic {i}": (huge if i == place else x, y) for i in range(5)}
    run = bespoke.federate(clients, torch.nn.Sequential(torch.nn.Linear(4, 3)), "0", rounds=3)
    assert all(list(row["refused"]) == [str(place)] for row in run.folder.rounds())
    assert any(f"3 of 3 uploads of clinic {place} were refused" in note for note in run.notes)


def test_an_archive_that_unpacks_to_far_more_than_data_would_is_refused(tmp_path):
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=np.random.default_rng(0).normal(size=(8, 4)), y=np.arange(8) % 2)
    np.savez_compressed(
        tmp_path / "c.npz", x=np.zeros((30_000_000, 4), dtype=np.float32), y=np.zeros(30_000_000, np.int8)
    )
    with pytest.raises(UserError, match=r"c\.npz.* unpacks to more than .* bytes that are allowed"):
        bespoke.run(bespoke.Experiment(data=bespoke.DataSettings("files", f"{tmp_path}/*.npz")))


def test_a_rehearsed_check_leaves_the_modules_buffers_alone(monkeypatch):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.head(x)

    task = Task(Counting, "head", 2)
    monkeypatch.setattr(api, "rehearse", lambda work: work())
    api._rehearsed(lambda: task.logits(task.init(rng.key(0)), torch.zeros(3, 2)), task)
    assert task.constants()["calls"].item() == 0.0
