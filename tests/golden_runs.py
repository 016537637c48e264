"""Runs of the library on the small federation, and how they compare with the methods' equations in ``golden``.

A case is named by its method in the library, and what is special: ``fedavg_ft/head``. Each run is computed once; tests
that share runs share an xdist group, which is named by the method's file.
"""

import dataclasses
import functools
import importlib
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, final

import golden
import numpy as np
import pytest
import torch
import toy
from golden.common import Problem, loss_sum
from torch import nn

from bespoke.algorithms import ALGORITHMS
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.runs import recording
from bespoke.runs.federation import Evaluation, Federation

SEED, ROUNDS, EPOCHS = 31, 3, 3

# --- the cases ------------------------------------------------------------------------------------------------

FOLDER = Path(golden.__file__).parent
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
MODULES = {path.stem: importlib.import_module(f"golden.{path.stem}") for path in FILES}
CASES = {name: case for module in MODULES.values() for name, case in getattr(module, "CASES", {}).items()}
MISTAKES = [mistake for module in MODULES.values() for mistake in getattr(module, "MISTAKES", ())]
FILE = {name: stem for stem, module in MODULES.items() for name in getattr(module, "CASES", ())}


def equations_of(case):
    """The transcription of a case's method."""
    return getattr(MODULES[FILE[case]], FILE[case])


def on_minibatches(case):
    """Whether the transcription goes by minibatches."""
    return "batches" in inspect.signature(equations_of(case)).parameters


def grouped(case, *values):
    """Arguments of a test that shares its runs with others of the same method."""
    return pytest.param(case, *values, marks=pytest.mark.xdist_group(FILE[case]))


def method_of(case):
    return ALGORITHMS[case.partition("/")[0]](**CASES[case].fields)


# --- one problem, in both worlds ------------------------------------------------------------------------------

VARIANTS = {
    "plain": {"lr": 0.4, "weighting": "samples"},
    "momentum": {"lr": 0.2, "momentum": 0.8, "weight_decay": 0.05, "weighting": "uniform"},
    "cosine": {"lr": 0.4, "schedule": "cosine", "lr_final": 0.03},
    "adam": {"lr": 0.05, "optimizer": "adam", "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.05},
}
SMALL = {"batch": 2, "last_batch": "drop"}  # minibatches of two rows, all of that size
NETS = {
    "plain": toy.Net,
    "group": functools.partial(toy.Net, hidden=6, norm=functools.partial(nn.GroupNorm, 2)),
    "layer": functools.partial(toy.Net, norm=nn.LayerNorm),
}


def training(variant, **changes):
    """The library's settings: full batches, and about half of the clients in each round."""
    draw = {"sampling": "bernoulli", "rate": 0.5, "rounds": ROUNDS, "epochs": EPOCHS, "batch": 64}
    return Training(**draw | VARIANTS[variant] | changes)


@functools.cache
def task(net="plain"):
    return Task(NETS[net], "head", toy.CLASSES, dtype=torch.float64)


@functools.cache
def start(net="plain"):
    """The initial weights, as arrays; a norm layer's scales and shifts are not 1 and 0."""
    plain = toy.arrays()[2]
    if net == "plain":
        return plain
    if net == "group":
        draw = np.random.default_rng(8)
        return {name: 0.7 * draw.normal(size=leaf.shape) for name, leaf in task(net).init(rng.key(0)).items()}
    draw = torch.Generator().manual_seed(0)
    scale, shift = (torch.randn(toy.HIDDEN, generator=draw, dtype=torch.float64).numpy() for _ in range(2))
    both = plain | {"norm.weight": 1.0 + 0.3 * scale, "norm.bias": 0.3 * shift}
    return {name: both[name] for name in task(net).body_names + task(net).head_names}


def problem(variant, cohorts=(), **changes):
    """The same for the equations."""
    x, y, initial = toy.arrays()
    settings = VARIANTS[variant]
    given = {
        "x": [rows[:n] for rows, n in zip(x, toy.TRAIN_ROWS, strict=True)],
        "y": [rows[:n] for rows, n in zip(y, toy.TRAIN_ROWS, strict=True)],
        "x_test": [rows[n:] for rows, n in zip(x, toy.TRAIN_ROWS, strict=True)],
        "y_test": [rows[n:] for rows, n in zip(y, toy.TRAIN_ROWS, strict=True)],
        "start": initial,
        "population": toy.POPULATION,
        "cohorts": list(cohorts),
        "epochs": EPOCHS,
        "lr": settings["lr"],
        "momentum": settings.get("momentum", 0.0),
        "decay": settings.get("weight_decay", 0.0),
        "weighting": settings.get("weighting", "samples"),
        "adam": (settings["beta1"], settings["beta2"]) if "optimizer" in settings else None,
        "lr_final": settings.get("lr_final"),
    }
    return Problem(**given | changes)


# --- the library ----------------------------------------------------------------------------------------------


@dataclass
class Scripted(Federation):
    """A federation whose cohorts may be given."""

    cohorts: list | None = None

    def cohort(self, round):
        return self.cohorts[round - 1] if self.cohorts else super().cohort(round)


def federation(
    method,
    training,
    backend,
    *,
    seed=SEED,
    task=None,
    start=None,
    data=None,
    cohorts=None,
    adapt_rounds=1,
    **evaluation,
):
    """The method on the small federation, or with a task, weights or data of one's own."""
    task, start, data = task or toy.task(), start or toy.start(), data or toy.data()
    clients = toy.BACKENDS[backend](method, task, start, data, training, seed, adapt_rounds=adapt_rounds)
    return Scripted(
        method,
        task,
        start,
        clients,
        data.num_clients,
        data.total_clients,
        training,
        Evaluation(**evaluation),
        seed,
        inside=clients,
        cohorts=cohorts,
    )


class Score(NamedTuple):
    """What was counted on a client's test rows."""

    round: int
    client: int
    group: str
    view: str
    total: int
    correct: int
    loss_sum: float


@dataclass
class Ran:
    """By round: the server, and by client uploads, states, logged numbers, and logits of its test rows by view."""

    federation: Federation
    first: dict  # the server's state before the first round
    records: toy.MemoryRecords = field(default_factory=toy.MemoryRecords)
    sent: list = field(default_factory=list)  # what went to the cohort: for all, and to each
    server: list = field(default_factory=list)
    uploads: list = field(default_factory=list)
    states: list = field(default_factory=list)
    logged: list = field(default_factory=list)
    personal: list = field(default_factory=list)
    views: list = field(default_factory=list)

    def rounds(self):
        """The lines of rounds.jsonl."""
        return self.records.rounds()

    def scores(self, **fields):
        """What was counted on test rows, as recorded: all of it, or where these fields are so."""
        rows = (
            Score(
                *(row[name] for name in Score._fields[:5]),
                correct=row["metrics"]["accuracy"][0],
                loss_sum=row["metrics"]["loss"][0],
            )
            for row in self.records.clients()
        )
        return [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())]


def run(method, training, backend, *, one_block=False, inspect=True, **given):
    """A run through the real loop, everything looked at after each round; see :func:`federation`.

    With ``one_block`` all clients of a call share one block, however different. Personal models and their predictions
    are made where ``inspect`` says so; otherwise clients are evaluated after the last round alone.
    """
    fed = federation(method, training, backend, every=int(inspect), **given)
    clients = fed.clients
    if one_block:
        clients.similar = 0.0
    ran, train, everyone = Ran(fed, fed.start()), clients.train, range(fed.total_clients)

    def watched(round, cohort, shared, own):
        trained = train(round, cohort, shared, own)
        assert not trained.refused, trained.refused
        assert trained.uploads.clients.tolist() == list(cohort)
        ran.sent.append((shared, own))
        ran.uploads.append(dict(zip(cohort, tree.unstack(trained.uploads.tree, len(cohort)), strict=True)))
        ran.logged.append({c: {n: v[i] for n, v in trained.logged.items()} for i, c in enumerate(cohort)})
        return trained

    def look(round, server):
        ran.server.append(server)
        ran.states.append({c: s["state"] for c, s in clients.states().items()})
        if inspect:
            ran.personal.append(clients.personal(round, everyone, *fed.down(server, everyone)))
            ran.views.append([views(fed, c, personal) for c, personal in enumerate(ran.personal[-1])])

    clients.train = watched
    try:
        recording.recorded(fed, ran.records, checkpoint=look, due=lambda round: True)
    finally:
        clients.train = train
    assert not clients.notes, clients.notes
    return ran


def views(fed, client, personal):
    """A personal model's logits of the client's test rows, by view."""
    return predictions(fed.algorithm, fed.task, personal, fed.clients.pool.x[fed.clients.pool.test.client(client)])


def predictions(method, task, personal, x):
    """Logits by view."""
    with torch.no_grad():
        found = method.predict(task, personal, torch.as_tensor(x).to(task.dtype))
    return found if isinstance(found, dict) else {"personal": found}


def one_round(method, training, backend, down=None, who=range(toy.POPULATION), **given):
    """The first round, from the server's first message or ``down``: the answers, clients' states, the federation."""
    fed = federation(method, training, backend, **given)
    shared, own = fed.down(fed.start(), who)
    trained = toy.train(fed.clients, 1, list(who), shared if down is None else down, own)
    assert not trained.refused
    return trained, {c: s["state"] for c, s in fed.clients.states().items()}, fed


@functools.cache
def minibatches(method, backend, seed=SEED):
    """A run with everything that may matter to bits: minibatches, momentum, clipped gradients."""
    return run(method, training("momentum", batch=4, epochs=2, clip=1.0), backend, seed=seed)


@functools.cache
def undecayed(method, backend):
    """Minibatches without weight decay and clipping: a model without a slope stays where it is."""
    return run(method, training("momentum", batch=4, epochs=2, weight_decay=0.0, weighting="samples"), backend)


# The checks of the contract that a method's settings are likeliest to break.
SWITCHED = ("loop_equals_batched", "shapes_stay", "awkward_clients_work", "private_stays_private")

# --- the comparison -------------------------------------------------------------------------------------------


def training_of(case, variant, batches="full"):
    """The library's settings for a case."""
    given = CASES[case]
    changes = {"epochs": given.epochs} | ({"lr": given.lr} if given.lr else {}) | given.training
    changes |= {"rounds": len(given.cohorts)} if given.cohorts else {}
    return training(variant, **changes | (SMALL if batches == "small" else {}))


def federation_of(case, variant, backend, batches="full"):
    return federation(method_of(case), training_of(case, variant, batches), backend, **world(case))


def world(case):
    """What a case's federation has of its own."""
    given = CASES[case]
    return {
        "seed": given.seed,
        "task": task(given.net),
        "start": tree.map(torch.from_numpy, start(given.net)),
        "cohorts": given.cohorts,
        "adapt_rounds": given.adapt_rounds,
    }


@functools.cache
def library(case, variant, backend, batches="full"):
    """What the library does."""
    settings = training_of(case, variant, batches)
    return run(method_of(case), settings, backend, one_block=CASES[case].cohorts is not None, **world(case))


def problem_of(case, variant):
    given, settings = CASES[case], training_of(case, variant)
    root = rng.key(given.seed)
    drawn = [
        rng.cohort(root, r, toy.POPULATION, settings.rate, settings.sampling) for r in range(1, settings.rounds + 1)
    ]
    changes = {"start": start(given.net), "epochs": settings.epochs, "lr": settings.lr}
    return problem(variant, given.cohorts or drawn, **changes)


@functools.cache
def equations(case, variant, batches="full", twist=""):
    """What the equations say."""
    fn = equations_of(case)
    asked = inspect.signature(fn).parameters.keys() & GIVEN.keys()
    given = {name: GIVEN[name](case, variant, batches) for name in asked}
    return fn(problem_of(case, variant), **given, **CASES[case].fields, twist=twist)


def differences(case, variant, backend, batches="full", twist=""):
    """What the library did against what the equations say: the largest difference, by kind."""
    ran, want = library(case, variant, backend, batches), equations(case, variant, batches, twist)
    given = problem_of(case, variant)
    assert [row["cohort"] for row in ran.rounds()] == given.cohorts
    evaluated = iter(ran.scores())
    worst = dict.fromkeys(("server", "states", "uploads", "logged", "counts", "views"), 0.0)

    def note(kind, value):
        worst[kind] = float(np.maximum(worst[kind], value))  # unlike max, keeps a NaN

    for r, server in enumerate(want.server):
        note("server", toy.gap(ran.server[r], server))
        for kind, found in (("states", ran.states[r]), ("uploads", ran.uploads[r])):
            expected = getattr(want, kind)[r]
            if expected is not None:
                assert found.keys() == expected.keys()
                for client, value in found.items():
                    note(kind, toy.gap(value, expected[client]))
        for client, values in (want.logged[r] or {}).items():
            for name, value in values.items():
                note("logged", abs(ran.logged[r][client][name] - value))
        if batches == "small":  # minibatches before prediction are not given
            continue
        for client, shown in enumerate(want.views[r]):
            note("views", toy.gap(ran.views[r][client], shown))
            assert list(ran.views[r][client]) == list(shown)  # the first is the headline
            for view, logits in shown.items():
                row, y = next(evaluated), given.y_test[client]
                group = "new" if client >= given.population else ("train" if client in want.states[r] else "unseen")
                assert row[:5] == (r + 1, client, group, view, len(y))
                assert twist or row.correct == (logits.argmax(axis=1) == y).sum()
                loss = loss_sum(logits, y)
                scale = abs(loss) if abs(loss) > 1e6 else 1.0  # a class without a prototype costs 1e30
                note("counts", abs(row.loss_sum - loss) / scale)
    assert batches == "small" or next(evaluated, None) is None
    return worst


def arrays(nest):
    """A tree of tensors as one of arrays."""
    return {name: arrays(v) if isinstance(v, dict) else np.asarray(v) for name, v in nest.items()}


# --- what the equations cannot know ---------------------------------------------------------------------------


def first(case, variant, batches):
    """The server's state before the first round."""
    return arrays(federation_of(case, variant, "loop").start())


def minibatch_rows(case, variant, batches):
    """(round, client, group) -> the rows of each minibatch of the main pass; full ones before prediction."""
    given = problem_of(case, variant)

    def rows(round, k, group):
        if batches == "small" and round is not None:
            return recorded(group)[round, k]
        return [np.arange(len(given.y[k]))] * (-(-given.epochs // group) * group)

    return rows


@final
@dataclass(frozen=True)
class Recorder(Algorithm):
    """Sends the rows of the main pass's minibatches of two, in order."""

    group: int = 1

    def server_init(self, task, params, num_clients, key):
        return {}

    def broadcast(self, server):
        return {}

    def client_update(self, local, state, down):
        group, most = self.group, 64

        def step(carry, batches):
            rows = carry["rows"]
            for j, batch in enumerate(batches if group > 1 else (batches,)):
                here = torch.arange(most)[:, None] == batch.step * group + j
                rows = torch.where(here, batch.positions.double(), rows)
            return {"rows": rows}

        return {}, local.scan(step, {"rows": torch.full((most, 2), -1.0, dtype=torch.float64)}, per_step=group)

    def aggregate(self, task, server, uploads, key):
        return server

    def personalize(self, local, state, down):
        return down

    def predict(self, task, personal, x):
        return x[:, : toy.CLASSES]


@functools.cache
def recorded(group):
    """(round, client) -> the rows of each minibatch of two."""
    everyone = list(range(toy.POPULATION))
    ran = run(Recorder(group), training("plain", **SMALL), "loop", cohorts=[everyone] * ROUNDS, inspect=False)
    found = {}
    for round, uploads in enumerate(ran.uploads, 1):
        for k, up in uploads.items():
            found[round, k] = [pair for pair in up["rows"].numpy().astype(int) if pair[0] >= 0]
    return found


def stream(case, purpose, round, client):
    """The key of a client's work in a round; one that never took part adapts (once) where others are evaluated."""
    found = rng.stream(rng.key(CASES[case].seed), rng.TRAIN if purpose == "train" else rng.EVAL, round, client)
    return rng.fold_in(rng.fold_in(found, rng.ADAPT), 0) if purpose == "adapt" else found


def main_pass(case, round, client):
    """The key of the main pass: even numbers shuffle, odd ones are steps."""
    return rng.fold_in(stream(case, "train", round, client), 0)


def held_out(case, variant, batches):
    """(purpose, round, client, folds) -> the rows held out in each fold, (folds, n): dealt out class by class.

    With a fifth argument, those of the rows that so many epochs of full batches see, (folds, epochs n), in the client's
    order in each epoch; they are dealt out in the order in which they are seen.
    """

    def folds_of(purpose, round, client, folds, epochs=0):
        y = problem_of(case, variant).y[client]
        n, key = len(y), rng.fold_in(rng.fold_in(stream(case, purpose, round, client), 0), -1)
        shuffles = rng.fold_in(main_pass(case, round, client), 2 * torch.arange(epochs))
        passes = rng.shuffle(shuffles, n, n).numpy() if epochs else np.arange(n)[None]
        seen = (passes + n * np.arange(len(passes))[:, None]).ravel()
        order, labels = rng.shuffle(key, len(seen), len(seen)).numpy(), y[seen % n]
        fold = np.empty(len(seen), dtype=int)
        fold[seen[order[np.argsort(labels[order], kind="stable")]]] = np.arange(len(seen)) % folds
        return fold == np.arange(folds)[:, None]

    return folds_of


def gate_noise(case, variant, batches):
    """(purpose, round, client, step) -> logistic noise (n, d), in the order of the client's rows."""

    @functools.cache
    def noise(purpose, round, client, step):
        n = toy.TRAIN_ROWS[client]
        key = (
            rng.fold_in(stream(case, "adapt", round, client), 0)
            if purpose == "adapt"
            else main_pass(case, round, client)
        )
        draws = rng.logistic(rng.fold_in(key, 2 * step + 1), (n, toy.HIDDEN), torch.float64).numpy()
        by_row = np.empty_like(draws)
        by_row[rng.shuffle(rng.fold_in(key, 2 * step), n, n).numpy()] = draws
        return by_row

    return noise


def by_leaf(draw, key):
    """One draw for each leaf of the model, in the order of their names."""
    leaves = sorted(start().items())
    return {n: draw(rng.fold_in(key, i), v.shape, torch.float64).numpy() for i, (n, v) in enumerate(leaves)}


def quantiser_draws(case, variant, batches):
    """By round and client, a uniform number for each weight."""
    cohorts = enumerate(problem_of(case, variant).cohorts, 1)
    return [{k: by_leaf(rng.uniform, rng.fold_in(main_pass(case, r, k), 1)) for k in who} for r, who in cohorts]


def server_noise(case, variant, batches):
    """By round, a normal number for each weight."""
    root, rounds = rng.key(CASES[case].seed), len(problem_of(case, variant).cohorts)
    return [by_leaf(rng.normal, rng.stream(root, rng.SERVER, r)) for r in range(1, rounds + 1)]


def node_orders(case, variant, batches):
    """By round, client and step a number for each node and row; a batch shuffles its rows, and so these."""
    given, nodes = problem_of(case, variant), torch.arange(toy.CLASSES - 1)

    def one(round, client, step):
        n, key = toy.TRAIN_ROWS[client], main_pass(case, round, client)
        order = rng.shuffle(rng.fold_in(key, 2 * step), n, n).numpy()
        split = rng.fold_in(rng.fold_in(rng.fold_in(key, 2 * step + 1), 0), nodes)
        placed = rng.bits(split[:, None, :], torch.arange(n)).numpy()
        values = np.empty_like(placed)
        values[:, order] = placed
        return values

    return [{k: [one(r, k, s) for s in range(given.epochs)] for k in who} for r, who in enumerate(given.cohorts, 1)]


# What an equation asks for by the name of an argument: (case, variant, batches) -> value.
GIVEN = {
    "first": first,
    "batches": minibatch_rows,
    "training": lambda case, variant, batches: dataclasses.asdict(training_of(case, variant, batches)),
    "adapt_rounds": lambda case, variant, batches: CASES[case].adapt_rounds,
    "held_out": held_out,
    "noise": gate_noise,
    "uniforms": quantiser_draws,
    "normals": server_noise,
    "orders": node_orders,
}
