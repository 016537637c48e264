"""What the tests of the five papers' methods share: runs that keep everything, comparisons, awkward federations."""

import ast
import functools
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from test_golden import BACKENDS, INPUTS, SEED, gap, problem, training
from torch import nn

from bespoke.core import rng, tree
from bespoke.core.data import FederatedData, Rows
from bespoke.core.settings import Training
from bespoke.core.task import Task

COHORTS = [[0, 1, 2], [1], [2, 0]]  # client 3 never takes part, and client 4 is new


@dataclass
class Played:
    """By round: the server, and by client uploads, states, logged numbers, logits of test rows by view, test losses."""

    first: dict
    server: list = field(default_factory=list)
    uploads: list = field(default_factory=list)
    states: list = field(default_factory=list)
    logged: list = field(default_factory=list)
    views: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    clients: object = None


def play(method, task, params, pool, training, cohorts, backend, *, inspect=True, **settings):
    """Rounds with these cohorts, everything looked at after each; all clients of a call share one block."""
    clients = BACKENDS[backend](method, task, params, pool, training, SEED, **settings)
    clients.similar = 0.0
    root, everyone = rng.key(SEED), list(range(pool.total_clients))
    server = method.server_init(task, params, pool.num_clients, rng.stream(root, rng.SERVER))
    played = Played(server, clients=clients)
    for round, cohort in enumerate(cohorts, 1):
        trained = clients.train(round, cohort, method.broadcast(server), {})
        assert not trained.refused, trained.refused
        assert trained.uploads.clients.tolist() == cohort
        server = method.aggregate(task, server, trained.uploads, rng.stream(root, rng.SERVER, round))
        played.server.append(server)
        played.uploads.append(dict(zip(cohort, tree.unstack(trained.uploads.tree, len(cohort)), strict=True)))
        played.logged.append({c: {n: v[i] for n, v in trained.logged.items()} for i, c in enumerate(cohort)})
        played.states.append({c: s["state"] for c, s in clients.states().items()})
        if inspect:
            played.views.append(predictions(clients, round, everyone, method.broadcast(server)))
            rows = clients.evaluate(round, everyone, method.broadcast(server), {})
            played.losses.append({(row.client, row.view): row.loss_sum for row in rows})
    assert not clients.notes, clients.notes
    return played


def predictions(clients, round, who, down):
    """Logits of each client's test rows, by view."""
    found = {}
    for c, personal in zip(who, clients.personal(round, who, down, {}), strict=True):
        with torch.no_grad():
            logits = clients.algorithm.predict(clients.task, personal, clients.pool.x[clients.pool.test.client(c)])
        found[c] = logits if isinstance(logits, dict) else {"personal": logits}
    return found


def imports(path):
    """The packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found


def numpy(value):
    """A tree of tensors as one of arrays."""
    return {k: numpy(v) if isinstance(v, dict) else v.numpy().copy() for k, v in value.items()}


def differences(played, want, y_test):
    """What the library did against what the equations say: the largest difference, by kind."""
    kinds = ("server", "uploads", "states", "logged", "views", "losses")
    worst = dict.fromkeys(kinds, 0.0)

    def note(kind, value):
        worst[kind] = max(worst[kind], float(value)) if np.isfinite(value) else np.inf

    assert len(played.server) == len(want.server)
    for r in range(len(want.server)):
        note("server", gap(played.server[r], want.server[r]))
        for kind, found in (("uploads", played.uploads[r]), ("states", played.states[r])):
            expected = getattr(want, kind)[r]
            assert found.keys() == expected.keys()
            for c, value in found.items():
                note(kind, gap(value, expected[c]))
        for c, values in want.logged[r].items():
            for name, value in values.items():
                note("logged", abs(played.logged[r][c][name] - value))
        for c, views in enumerate(want.views[r]):
            note("views", gap(played.views[r][c], views))
            for view, logits in views.items():
                top = logits.max(axis=1)
                lse = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
                loss = (lse - logits[np.arange(len(top)), y_test[c]]).sum()
                scale = max(1.0, abs(loss)) if abs(loss) > 1e6 else 1.0  # a class without a centroid costs 1e30
                note("losses", abs(played.losses[r][c, view] - loss) / scale)
    return worst


def golden_problem(variant, cohorts, lr=None, **changes):
    """The golden problem with these cohorts, in NumPy, and the library's training settings for it."""
    given = problem(variant, cohorts)
    given = replace(given, lr=lr or given.lr)
    return given, training(variant, rounds=len(cohorts), lr=given.lr, **changes)


# --- awkward clients beside healthy ones ----------------------------------------------------------------------

WIDE, LABELS = 8, 4  # features, and classes; the last class is in nobody's train rows
ODD = {
    "one row": 1,
    "one class": 31,  # more than any healthy client, so that those are padded
    "all single": 3,
    "few rows": 2,
    "equal rows": 6,
    "dead features": 9,
    "near-equal rows": 6,
}
HEALTHY = (24, 15, 18)


class AwkwardNet(nn.Module):
    """Features that can die: a normalisation layer, then ReLU."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(INPUTS, WIDE), nn.LayerNorm(WIDE), nn.Linear(WIDE, LABELS)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(x))))


@functools.cache
def awkward(dtype=torch.float64):
    """Data, task and first parameters: healthy clients 0 to 2, then the odd ones, then a new one of each sort."""
    draw = np.random.default_rng(5)
    centres = 2.0 * draw.normal(size=(LABELS, INPUTS))
    x, y, train, test = [], [], [], []

    def client(labels, change=lambda rows: rows):
        rows = change(centres[labels] + draw.normal(size=(len(labels), INPUTS)))
        begin = sum(map(len, x))
        held_out = np.array([0, 1, 2, 3])  # also the class that nobody trained on
        x.extend([rows, centres[held_out] + draw.normal(size=(4, INPUTS))])
        y.extend([labels, held_out])
        train.append(np.arange(begin, begin + len(labels)))
        test.append(np.arange(begin + len(labels), begin + len(labels) + 4))

    for n in HEALTHY:
        client(np.arange(n) % 3)
    client(np.array([1]))
    client(np.full(ODD["one class"], 2))
    client(np.array([0, 1, 2]))
    client(np.array([0, 0]))
    client(np.array([0, 0, 0, 1, 1, 1]), lambda rows: rows[[0, 0, 0, 3, 3, 3]])
    client(np.arange(9) % 3, lambda rows: np.zeros_like(rows))
    client(np.array([0, 0, 0, 1, 1, 1]), lambda rows: rows[[0, 0, 0, 3, 3, 3]] + 1e-7 * draw.normal(size=rows.shape))
    client(np.arange(12) % 3)
    client(np.array([2]))
    count, population = len(train), len(HEALTHY) + len(ODD)
    pool = FederatedData(
        x=torch.from_numpy(np.concatenate(x)),
        y=torch.from_numpy(np.concatenate(y)),
        train=Rows.of(train),
        test=Rows.of(test),
        val=Rows.of([[]] * count),
        num_classes=LABELS,
        num_clients=population,
        names=tuple(f"client {i}" for i in range(count)),
    )
    task = Task(AwkwardNet, "head", LABELS, dtype=dtype)
    params = task.init(rng.key(2))
    dead = torch.arange(WIDE) < 2  # two features are 0 for every row of everyone, and stay so
    params["norm.weight"] = torch.where(dead, 0.0, params["norm.weight"]).to(dtype)
    params["norm.bias"] = torch.where(dead, -1.0, params["norm.bias"]).to(dtype)
    return pool, task, params


PRECISIONS = [("loop", torch.float64), ("batched", torch.float64), ("batched", torch.float32)]
AWKWARD_TRAINING = Training(rounds=3, epochs=2, batch=5, lr=0.02, momentum=0.5, weight_decay=1e-3)


def everything_finite(method, backend, dtype=torch.float64):
    """Three rounds with all sorts of clients: nothing is refused, and every number is finite."""
    pool, task, params = awkward(dtype)
    cohorts = [list(range(pool.num_clients))] * 3
    played = play(method, task, params, pool, AWKWARD_TRAINING, cohorts, backend)
    for r in range(3):
        trees = [played.server[r], *played.uploads[r].values(), *played.states[r].values(), *played.views[r].values()]
        for value in trees:
            for name, leaf in tree.flatten(value).items():
                assert torch.isfinite(leaf).all(), (r, name)
        assert all(np.isfinite(v) for row in played.logged[r].values() for v in row.values())
        assert all(np.isfinite(v) for v in played.losses[r].values())
    return played


def healthy_gap(method, backend, dtype=torch.float64):
    """The largest change in what healthy clients send, keep and predict when odd clients run beside them."""
    pool, task, params = awkward(dtype)
    healthy, everyone = list(range(len(HEALTHY))), list(range(pool.num_clients))
    mixed, alone = (BACKENDS[backend](method, task, params, pool, AWKWARD_TRAINING, SEED) for _ in range(2))
    mixed.similar = alone.similar = 0.0
    root = rng.key(SEED)
    server = method.server_init(task, params, pool.num_clients, rng.stream(root, rng.SERVER))
    worst = 0.0
    for round in range(1, 4):
        down = method.broadcast(server)
        trained, healthy_trained = mixed.train(round, everyone, down, {}), alone.train(round, healthy, down, {})
        server = method.aggregate(task, server, trained.uploads, rng.stream(root, rng.SERVER, round))
        down = method.broadcast(server)
        rows = [clients.evaluate(round, who, down, {}) for clients, who in ((mixed, everyone), (alone, healthy))]
        own = [row for row in rows[0] if row.client in healthy]
        for a, b in zip(own, rows[1], strict=True):
            assert a[:5] == b[:5]
            worst = max(worst, abs(a.loss_sum - b.loss_sum) / max(1.0, abs(b.loss_sum)))
        for c in healthy:
            ups = (tree.map(lambda v, c=c: v[c], t.uploads.tree) for t in (trained, healthy_trained))
            kept = (clients.states()[c]["state"] for clients in (mixed, alone))
            mine, other = (tree.flatten({"up": up, "state": s}) for up, s in zip(ups, kept, strict=True))
            assert mine.keys() == other.keys()
            for name, value in mine.items():
                if value.numel():
                    scale = other[name].abs().max().clamp(min=1.0)
                    worst = max(worst, float((value - other[name]).abs().max() / scale))
    return worst
