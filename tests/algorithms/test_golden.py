"""Every method against its equations in NumPy (golden/reference.py), on both backends, in float64."""

import ast
import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import pytest
import torch
from golden import reference
from scipy.optimize import approx_fprime
from torch import nn

from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.ditto import Ditto
from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedprox import FedProx
from bespoke.clients import BatchedClients, SequentialClients
from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import FederatedData, Rows
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.runs.federation import Evaluation, Federation

BACKENDS = {"loop": SequentialClients, "batched": BatchedClients}
INPUTS, HIDDEN, CLASSES = 4, 5, 3
TRAIN_ROWS, TEST_ROWS, POPULATION = (5, 11, 3, 8, 6), (4, 7, 2, 3, 5), 4  # the last client is new
SEED, ROUNDS, EPOCHS = 31, 3, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class MemoryRecords:
    def __init__(self):
        self.rows = {}

    def append(self, name, rows):
        self.rows.setdefault(name, []).extend(rows)

    def clients(self):
        return self.rows["clients.jsonl"]


# --- one problem, in both worlds ------------------------------------------------------------------------------


@functools.cache
def arrays():
    """Train and test rows of each client (each with its own shift and its own labels) and the initial weights."""
    draw = np.random.default_rng(3)
    truth = draw.normal(size=(CLASSES, INPUTS))
    x, y = [], []
    for rows in map(sum, zip(TRAIN_ROWS, TEST_ROWS, strict=True)):
        x.append(draw.normal(size=(rows, INPUTS)) + draw.normal(size=INPUTS))
        y.append((x[-1] @ truth.T + draw.normal(size=CLASSES) + draw.normal(size=(rows, CLASSES))).argmax(axis=1))
    shapes = {"body.weight": (HIDDEN, INPUTS), "body.bias": (HIDDEN,)}
    shapes |= {"head.weight": (CLASSES, HIDDEN), "head.bias": (CLASSES,)}
    return x, y, {name: 0.7 * draw.normal(size=shape) for name, shape in shapes.items()}


@functools.cache
def pool():
    x, y, _ = arrays()
    ends = np.cumsum([0, *map(len, y)])
    parts = [np.split(np.arange(a, b), [n]) for a, b, n in zip(ends[:-1], ends[1:], TRAIN_ROWS, strict=True)]
    return FederatedData(
        x=torch.from_numpy(np.concatenate(x)),
        y=torch.from_numpy(np.concatenate(y)),
        train=Rows.of([train for train, _ in parts]),
        test=Rows.of([test for _, test in parts]),
        val=Rows.of([[]] * len(y)),
        num_classes=CLASSES,
        num_clients=POPULATION,
        names=tuple(f"client {i}" for i in range(len(y))),
    )


def start():
    return {name: torch.from_numpy(value) for name, value in arrays()[2].items()}


@functools.cache
def task():
    return Task(Net, "head", CLASSES, dtype=torch.float64)


VARIANTS = {
    "plain": {"lr": 0.4, "weighting": "samples"},
    "momentum": {"lr": 0.2, "momentum": 0.8, "weight_decay": 0.05, "weighting": "uniform"},
}


def training(variant, **changes):
    draw = {"sampling": "bernoulli", "rate": 0.5, "rounds": ROUNDS, "epochs": EPOCHS, "batch": 64}
    return Training(**draw | VARIANTS[variant] | changes)


def federation(method, training, backend, seed=SEED):
    clients = BACKENDS[backend](method, task(), start(), pool(), training, seed)
    return Federation(
        method, task(), start(), clients, POPULATION, len(TRAIN_ROWS), training, Evaluation(every=1), seed
    )


@dataclass
class Ran:
    server: list
    states: list
    personal: list  # after the last round
    records: MemoryRecords


def run(method, training, backend, seed=SEED):
    """A run through the real loop, with everything looked at after every round."""
    fed, records = federation(method, training, backend, seed), MemoryRecords()
    server, states = [], []

    def look(round, now):
        server.append(now)
        states.append({c: s["state"] for c, s in fed.clients.states().items()})

    last = fed.run(records, checkpoint=look, checkpoint_every=1)
    everyone = range(len(TRAIN_ROWS))
    personal = fed.clients.personal(training.rounds, everyone, *fed.down(last, everyone))
    return Ran(server, states, personal, records)


# --- the comparison -------------------------------------------------------------------------------------------

# name -> the method as the library makes it and its hyper-parameters for the reference
CASES = {
    "local": ({}, functools.partial(reference.local)),
    "fedavg": ({}, functools.partial(reference.fedavg)),
    "fedavg_ft": ({}, functools.partial(reference.fedavg, finetune_epochs=5)),
    "fedavg_ft/head": (
        {"finetune_epochs": 2, "finetune_part": "head"},
        functools.partial(reference.fedavg, finetune_epochs=2, finetune_part="head"),
    ),
    "fedavg_ft/rate": (
        {"finetune_epochs": 2, "finetune_lr": 0.03},
        functools.partial(reference.fedavg, finetune_epochs=2, finetune_lr=0.03),
    ),
    "fedprox": ({"mu": 0.7}, functools.partial(reference.fedavg, mu=0.7)),
    "fedprox/ft": (
        {"mu": 0.7, "finetune_epochs": 2},
        functools.partial(reference.fedavg, mu=0.7, finetune_epochs=2),
    ),
    "fedper": ({"new_head_epochs": 4}, functools.partial(reference.fedper, new_head_epochs=4)),
    "fedper/new": ({"new_head_epochs": 0}, functools.partial(reference.fedper, new_head_epochs=0)),
    "fedrep": (
        {"head_epochs": 4, "body_epochs": 2},
        functools.partial(reference.fedrep, head_epochs=4, body_epochs=2),
    ),
    "lg_fedavg": ({}, functools.partial(reference.lg_fedavg)),
    "ditto": ({"lam": 0.8}, functools.partial(reference.ditto, lam=0.8)),
    "ditto/epochs": (
        {"lam": 1.3, "personal_epochs": 2},
        functools.partial(reference.ditto, lam=1.3, personal_epochs=2),
    ),
}


def method(case):
    return ALGORITHMS[case.partition("/")[0]](**CASES[case][0])


@functools.cache
def library(case, variant, backend):
    return run(method(case), training(variant), backend)


def problem(variant, cohorts):
    x, y, initial = arrays()
    settings = VARIANTS[variant]
    return reference.Problem(
        x=[rows[:n] for rows, n in zip(x, TRAIN_ROWS, strict=True)],
        y=[rows[:n] for rows, n in zip(y, TRAIN_ROWS, strict=True)],
        x_test=[rows[n:] for rows, n in zip(x, TRAIN_ROWS, strict=True)],
        y_test=[rows[n:] for rows, n in zip(y, TRAIN_ROWS, strict=True)],
        start=initial,
        population=POPULATION,
        cohorts=cohorts,
        epochs=EPOCHS,
        lr=settings["lr"],
        momentum=settings.get("momentum", 0.0),
        decay=settings.get("weight_decay", 0.0),
        weighting=settings["weighting"],
    )


def gap(a, b):
    """The largest difference between trees of tensors and of arrays with the same names."""
    assert a.keys() == b.keys()
    worst = 0.0
    for name, value in a.items():
        if isinstance(value, dict):
            worst = max(worst, gap(value, b[name]))
        else:
            assert value.dtype == torch.float64
            assert value.shape == b[name].shape
            worst = max(worst, float(np.abs(value.numpy() - b[name]).max()))
    return worst


def differences(case, variant, backend, twist=""):
    """What the library did against what the equations say: the largest difference, by kind."""
    ran = library(case, variant, backend)
    given = problem(variant, [row["cohort"] for row in ran.records.rows["rounds.jsonl"]])
    want = CASES[case][1](given, twist=twist)
    evaluated = iter(ran.records.rows["clients.jsonl"])
    worst = dict.fromkeys(("server", "states", "counts", "logits"), 0.0)
    for r in range(ROUNDS):
        worst["server"] = max(worst["server"], gap(ran.server[r], want.server[r]))
        assert ran.states[r].keys() == want.states[r].keys()
        for client, state in ran.states[r].items():
            worst["states"] = max(worst["states"], gap(state, want.states[r][client]))
        for client, p in enumerate(want.personal[r]):
            row = next(evaluated)
            x, y = given.x_test[client], given.y_test[client]
            assert (row["round"], row["client"], row["total"], row["view"]) == (r + 1, client, len(y), "personal")
            group = "new" if client >= POPULATION else ("train" if client in want.states[r] else "unseen")
            assert row["group"] == group
            worst["counts"] = max(worst["counts"], abs(row["loss_sum"] - reference.loss_sum(p, x, y)))
            if not twist:
                assert row["correct"] == (reference.logits(p, x).argmax(axis=1) == y).sum()
    assert next(evaluated, None) is None
    for client, personal in enumerate(ran.personal):
        x = given.x_test[client]
        with torch.no_grad():
            logits = task().logits(personal, torch.from_numpy(x)).numpy()
        worst["logits"] = max(
            worst["logits"], float(np.abs(logits - reference.logits(want.personal[-1][client], x)).max())
        )
    return worst


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_the_library_follows_the_equations(case, variant, backend):
    found = differences(case, variant, backend)
    assert max(found.values()) < 1e-10, found


def test_every_method_has_its_equations():
    here = Path(__file__).parent
    others = [importlib.import_module(path.stem).CASES for path in here.glob("test_baselines*.py")]
    found = {case.partition("/")[0] for cases in (CASES, *others) for case in cases}
    assert found < set(ALGORITHMS)
    for name in set(ALGORITHMS) - found:  # a method of the five papers, in a file of its own
        assert f"five.{name}(" in (here / f"test_{name}.py").read_text()


def test_the_runs_have_partial_participation_and_someone_who_never_took_part():
    cohorts = [row["cohort"] for row in library("fedavg", "plain", "loop").records.rows["rounds.jsonl"]]
    absent = set(range(POPULATION)) - set().union(*cohorts)
    assert len(absent) == 1
    assert len({len(c) for c in cohorts}) > 1  # not always as many
    came_back = [k for k in range(POPULATION) if [k in c for c in cohorts] == [True, False, True]]
    assert came_back


# --- the comparison has teeth ---------------------------------------------------------------------------------

# Mistakes in one term of the method, each of which the comparison must see.
TWISTS = {
    "local": ["one step less", "starts afresh each round", "unseen untrained"],
    "fedavg": ["one step less", "other weighting", "absent clients averaged too"],
    "fedavg_ft": [
        "other weighting",
        "no fine-tuning",
        "one step less",
        "fine-tunes the other part",
        "fine-tuned model is sent",
    ],
    "fedavg_ft/head": ["no fine-tuning", "fine-tunes the other part"],
    "fedavg_ft/rate": ["no fine-tuning", "fine-tunes at the training rate"],
    "fedprox": [
        "other weighting",
        "no proximal term",
        "mu instead of mu/2",
        "anchored to itself",
        "anchored to the first model",
    ],
    "fedprox/ft": ["no fine-tuning", "fine-tunes the other part"],
    "fedper": [
        "other weighting",
        "own part not kept",
        "own part averaged",
        "head frozen",
        "predicts before averaging",
        "unseen unfitted",
        "unseen keeps all it trained",
    ],
    "fedper/new": ["unseen unfitted", "unseen fits for five epochs"],
    "fedrep": [
        "other weighting",
        "own part not kept",
        "own part averaged",
        "joint",
        "body first",
        "body under the old head",
        "head phase trains the body",
        "body phase trains the head",
        "predicts before averaging",
        "unseen unfitted",
    ],
    "lg_fedavg": [
        "other weighting",
        "own part not kept",
        "own part averaged",
        "body frozen",
        "predicts before averaging",
        "unseen unfitted",
        "unseen keeps all it trained",
    ],
    "ditto": [
        "other weighting",
        "no tie",
        "tied to its own old model",
        "tied to what it just trained",
        "tied to the first model",
        "personal model starts at the received one",
        "sends the personal model",
        "unseen unfitted",
        "unseen starts at the first model",
    ],
    "ditto/epochs": ["no tie"],
}
MOMENTUM_TWISTS = {case: ["no momentum", "no weight decay"] for case in TWISTS}
MOMENTUM_TWISTS["fedrep"] = ["momentum leaks", "no momentum", "no weight decay"]


@pytest.mark.parametrize(
    ("case", "variant", "twist"),
    [(case, variant, twist) for variant in VARIANTS for case, twists in TWISTS.items() for twist in twists]
    + [(case, "momentum", twist) for case, twists in MOMENTUM_TWISTS.items() for twist in twists],
)
def test_a_mistake_in_one_term_is_seen(case, variant, twist):
    found = differences(case, variant, "batched", twist)
    assert max(found.values()) > 1e-4, found
    only_prediction = ("unseen", "predicts", "no fine-tuning", "fine-tunes")
    if twist.startswith(only_prediction):  # the mistake stays where it was made
        assert max(found["server"], found["states"]) < 1e-10
        assert min(found["counts"], found["logits"]) > 1e-4


def test_the_reference_stands_alone():
    source = Path(reference.__file__).read_text()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported == {"dataclasses", "numpy", "scipy"}


def test_the_gradient_derived_by_hand():
    given = problem("plain", [])
    names = reference.BODY + reference.HEAD
    shapes = [given.start[n].shape for n in names]

    def unpack(flat):
        parts = np.split(flat, np.cumsum([np.prod(s) for s in shapes])[:-1])
        return {n: part.reshape(s) for n, part, s in zip(names, parts, shapes, strict=True)}

    flat = np.concatenate([given.start[n].ravel() for n in names])
    x, y = given.x[1], given.y[1]
    slope = approx_fprime(flat, lambda f: reference.loss_sum(unpack(f), x, y) / len(y), 1e-7)
    mine = reference.gradient(given.start, x, y)
    assert np.allclose(np.concatenate([mine[n].ravel() for n in names]), slope, atol=1e-6)
    assert np.abs(slope).max() > 0.1


# --- properties -----------------------------------------------------------------------------------------------


def same_bits(a, b):
    assert a.keys() == b.keys()
    return all(same_bits(v, b[k]) if isinstance(v, dict) else torch.equal(v, b[k]) for k, v in a.items())


@functools.cache
def minibatches(name, backend, **fields):
    settings = training("momentum", batch=4, epochs=2, clip=1.0)
    return run(ALGORITHMS[name](**fields), settings, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedprox_without_its_term_is_fedavg_to_the_bit(backend):
    plain, prox = minibatches("fedavg", backend), minibatches("fedprox", backend, mu=0.0)
    assert all(same_bits(a, b) for a, b in zip(plain.server, prox.server, strict=True))
    assert plain.records.rows["clients.jsonl"] == prox.records.rows["clients.jsonl"]
    assert not same_bits(plain.server[-1], minibatches("fedprox", backend, mu=0.1).server[-1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_dittos_global_model_moves_as_in_fedavg_to_the_bit(backend, lam):
    plain, ditto = minibatches("fedavg", backend), minibatches("ditto", backend, lam=lam)
    assert all(same_bits(a, b) for a, b in zip(plain.server, ditto.server, strict=True))


@final
@dataclass(frozen=True)
class LocalWithTag(Algorithm):
    """Local training on the batches of another pass."""

    tag: int = 1

    def server_init(self, task, params, num_clients, key):
        return {}

    def broadcast(self, server):
        return {}

    def client_init(self, task, params, client):
        return {"personal": params}

    def client_update(self, local, state, down):
        return {"personal": local.sgd(local.task.loss, state["personal"], tag=self.tag)}, {}

    def personalize(self, local, state, down):
        return state["personal"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_untied_ditto_is_local_training_on_the_same_batches(backend):
    settings = training("momentum", batch=4, epochs=2)
    untied = run(Ditto(lam=0.0), settings, backend).states[-1]
    alone = run(LocalWithTag(tag=1), settings, backend).states[-1]
    other = run(LocalWithTag(tag=0), settings, backend).states[-1]
    assert untied.keys() == alone.keys()
    assert all(same_bits(untied[c], alone[c]) for c in untied)
    assert not any(same_bits(untied[c], other[c]) for c in untied if TRAIN_ROWS[c] > 4)


def one_round(method, training, backend, down=None, round=1, clients=range(POPULATION)):
    """What the clients send after one round from the initial weights, and their states."""
    fed = federation(method, training, backend)
    shared, own = fed.down(fed.start(), clients)
    trained = fed.clients.train(round, list(clients), shared if down is None else down, own)
    return trained.uploads, {c: s["state"] for c, s in fed.clients.states().items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_fedprox_at_the_rate_that_cancels_the_past(backend, epochs):
    """With lr mu = 1 every step lands on w_t - lr g, g the gradient where the step began."""
    settings = {"lr": 0.5, "weight_decay": 0.0, "momentum": 0.0}
    end, _ = one_round(FedProx(mu=2.0), training("plain", epochs=epochs, **settings), backend)
    given = problem("plain", [])
    before = [given.start] * POPULATION
    if epochs > 1:
        ups, _ = one_round(FedProx(mu=2.0), training("plain", epochs=epochs - 1, **settings), backend)
        before = [{n: v[k].numpy() for n, v in ups.tree["model"].items()} for k in range(POPULATION)]
    for k in range(POPULATION):
        g = reference.gradient(before[k], given.x[k], given.y[k])
        for name, value in end.tree["model"].items():
            want = given.start[name] - 0.5 * g[name]
            assert np.abs(value[k].numpy() - want).max() < 1e-14
            assert np.abs(want - given.start[name]).max() > 1e-3


class Quadratic(Task):
    """A client's loss is 1/2 (w - c)' H (w - c), with w the head's bias and c the mean of its rows."""

    def loss(self, params, batch):
        centre = (batch.x * batch.mask[:, None]).sum(0) / batch.mask.sum()
        off = params["head.bias"] - centre[:CLASSES]
        return 0.5 * off @ self.curvature @ off


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["fedprox", "ditto"])
def test_the_fixed_point_on_a_quadratic(backend, kind):
    quadratic = Quadratic(Net, "head", CLASSES, dtype=torch.float64)
    root = torch.tensor([[1.0, 0.3, 0.0], [0.0, 0.8, -0.4], [0.2, 0.0, 0.6]], dtype=torch.float64)
    quadratic.curvature = root @ root.T
    strength, given = 0.7, problem("plain", [])
    method = FedProx(mu=strength) if kind == "fedprox" else Ditto(lam=strength)
    settings = training("plain", epochs=150, lr=0.4)
    clients = BACKENDS[backend](method, quadratic, start(), pool(), settings, SEED)
    received = {n: v + 0.5 for n, v in start().items()}
    trained = clients.train(1, list(range(POPULATION)), {"model": received}, {})
    h, eye = quadratic.curvature.numpy(), np.eye(CLASSES)
    for k in range(POPULATION):
        centre = given.x[k].mean(axis=0)[:CLASSES]
        anchor = received["head.bias"].numpy()
        want = np.linalg.solve(h + strength * eye, h @ centre + strength * anchor)
        if kind == "fedprox":
            found = tree.map(lambda leaf, k=k: leaf[k], trained.uploads.tree["model"])
        else:
            found = clients.states()[k]["state"]["personal"]
        assert np.abs(found["head.bias"].numpy() - want).max() < 1e-6
        assert np.abs(want - anchor).max() > 1e-2
        # What the loss does not depend on is drawn to the received model alone.
        assert (found["body.weight"] - received["body.weight"]).abs().max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_pass_keeps_moments_of_its_own(backend):
    """With a kept optimiser, momentum of one pass never enters another."""
    settings = training("momentum", keep_optimizer=True)
    model, body, head = set(start()), set(reference.BODY), set(reference.HEAD)
    passes = {"fedavg": [model], "fedper": [model], "fedrep": [head, body], "ditto": [model, model]}
    for name, parts in passes.items():
        fed = federation(method(name), settings, backend)
        fed.run(MemoryRecords())
        for stored in fed.clients.states().values():
            kept = {tag: set(moments["m"]) for tag, moments in stored["moments"].items()}
            assert kept == {str(tag): part for tag, part in enumerate(parts)}


# --- what crosses the wire ------------------------------------------------------------------------------------

BODY_NUMBERS, HEAD_NUMBERS = HIDDEN * (INPUTS + 1), CLASSES * (HIDDEN + 1)
SENT = {
    "local": (0, set()),
    "fedavg": (BODY_NUMBERS + HEAD_NUMBERS, {"model"}),
    "fedavg_ft": (BODY_NUMBERS + HEAD_NUMBERS, {"model"}),
    "fedprox": (BODY_NUMBERS + HEAD_NUMBERS, {"model"}),
    "fedper": (BODY_NUMBERS, {"body"}),
    "fedrep": (BODY_NUMBERS, {"body"}),
    "lg_fedavg": (HEAD_NUMBERS, {"head"}),
    "ditto": (BODY_NUMBERS + HEAD_NUMBERS, {"model"}),
}


@pytest.mark.parametrize("name", SENT)
def test_bytes_are_those_of_the_docstring(name):
    numbers, _ = SENT[name]
    for row in library(name, "plain", "batched").records.rows["rounds.jsonl"]:
        want = 4 * numbers * len(row["cohort"])  # four bytes a number, whatever the precision of the run
        assert (row["bytes_up"], row["bytes_down"]) == (want, want)
    doc = type(method(name)).__doc__
    thing = {0: "none", BODY_NUMBERS: "the body up, the body down", HEAD_NUMBERS: "the head up, the head down"}
    assert f"Bytes per client and round: {thing.get(numbers, 'the model up, the model down')}." in doc


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SENT)
def test_uploads_hold_what_is_shared_and_no_more(name, backend):
    made = method(name)
    uploads, states = one_round(made, training("plain", epochs=1), backend)
    assert uploads.tree.keys() == SENT[name][1]
    leaves = set(tree.flatten(uploads.tree))
    private = {path for state in states.values() for path in tree.flatten(state)}
    assert not leaves & private
    if name in ("fedper", "fedrep"):
        assert leaves == {"body/body.weight", "body/body.bias"}
        assert private == {"head/head.weight", "head/head.bias"}
    assert set(made.private) == {path.partition("/")[0] for path in private}


def test_the_fine_tuned_name_is_fedavg_with_five_epochs():
    assert ALGORITHMS["fedavg_ft"]() == FedAvg(finetune_epochs=5)
    assert ALGORITHMS["fedavg"]() == FedAvg(finetune_epochs=0)
