"""A federation of awkward clients beside healthy ones, and the two checks on it."""

import functools

import golden_runs
import numpy as np
import torch
import toy
from torch import nn

from bespoke.core import rng, tree
from bespoke.core.settings import Training
from bespoke.core.task import Task

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
PRECISIONS = [("loop", torch.float64), ("batched", torch.float64), ("batched", torch.float32)]
ROUNDS = 3
TRAINING = Training(rounds=ROUNDS, epochs=2, batch=5, lr=0.02, momentum=0.5, weight_decay=1e-3)


def build():
    """Features that can die: a normalisation layer, then ReLU."""
    return toy.Net(hidden=WIDE, classes=LABELS, norm=nn.LayerNorm, activation=torch.relu)


@functools.cache
def awkward(dtype=torch.float64):
    """Data, task and first parameters: healthy clients 0 to 2, then the odd ones, then a new one of each sort."""
    draw = np.random.default_rng(5)
    centres = 2.0 * draw.normal(size=(LABELS, toy.INPUTS))
    x, y, train, test = [], [], [], []

    def client(labels, change=lambda rows: rows):
        rows = change(centres[labels] + draw.normal(size=(len(labels), toy.INPUTS)))
        begin = sum(map(len, x))
        held_out = np.array([0, 1, 2, 3])  # also the class that nobody trained on
        x.extend([rows, centres[held_out] + draw.normal(size=(4, toy.INPUTS))])
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
    data = toy.data_of(
        torch.from_numpy(np.concatenate(x)),
        torch.from_numpy(np.concatenate(y)),
        train,
        test,
        classes=LABELS,
        population=len(HEALTHY) + len(ODD),
    )
    task = Task(build, "head", LABELS, dtype=dtype)
    params = task.init(rng.key(2))
    dead = torch.arange(WIDE) < 2  # two features are 0 for every row of everyone, and stay so
    params["norm.weight"] = torch.where(dead, 0.0, params["norm.weight"]).to(dtype)
    params["norm.bias"] = torch.where(dead, -1.0, params["norm.bias"]).to(dtype)
    return data, task, params


def world(dtype=torch.float64):
    """What a run on this federation is given; everyone takes part in every round."""
    data, task, params = awkward(dtype)
    return {"data": data, "task": task, "start": params, "cohorts": [list(range(data.num_clients))] * ROUNDS}


@functools.cache
def run(method, backend, dtype=torch.float64):
    """Rounds of all sorts of clients, padded to the largest where they are batched."""
    return golden_runs.run(method, TRAINING, backend, one_block=True, **world(dtype))


def everything_finite(method, backend, dtype=torch.float64):
    """Nothing is refused, and every number is finite."""
    ran = run(method, backend, dtype)
    for r in range(ROUNDS):
        for value in (ran.server[r], *ran.uploads[r].values(), *ran.states[r].values(), *ran.views[r]):
            for name, leaf in tree.flatten(value).items():
                assert torch.isfinite(leaf).all(), (r, name)
        assert all(np.isfinite(v) for row in ran.logged[r].values() for v in row.values())
    assert all(np.isfinite(score.loss_sum) for score in ran.scores())
    return ran


def healthy_gap(method, backend, dtype=torch.float64):
    """The largest change in what healthy clients send, keep and predict when odd clients run beside them."""
    mixed, healthy = run(method, backend, dtype), list(range(len(HEALTHY)))
    fed = golden_runs.federation(method, TRAINING, backend, **world(dtype))
    fed.clients.similar = 0.0
    worst = 0.0
    for r, (shared, _) in enumerate(mixed.sent):
        trained = toy.train(fed.clients, r + 1, healthy, shared, {})
        uploads, states = tree.unstack(trained.uploads.tree, len(healthy)), fed.clients.states()
        for c in healthy:
            alone = {"up": uploads[c], "state": states[c]["state"]}
            beside = {"up": mixed.uploads[r][c], "state": mixed.states[r][c]}
            worst = np.maximum(worst, relative_gap(beside, alone))
        rows = fed.clients.evaluate(r + 1, healthy, *fed.down(mixed.server[r], healthy))
        scores = [score for score in mixed.scores(round=r + 1) if score.client in healthy]
        for row, score in zip(rows, scores, strict=True):
            assert (row.client, row.view, row.total, row.metrics["accuracy"][0]) == (
                score.client,
                score.view,
                score.total,
                score.correct,
            )
            worst = np.maximum(worst, abs(row.metrics["loss"][0] - score.loss_sum) / max(1.0, abs(score.loss_sum)))
    return worst


def relative_gap(a, b):
    """The largest difference between two trees, in units of the leaf's largest value where that is above 1."""
    a, b = tree.flatten(a), tree.flatten(b)
    assert a.keys() == b.keys()
    gaps = [(a[n] - v).abs().max() / v.abs().max().clamp(min=1.0) for n, v in b.items() if v.numel()]
    return float(torch.stack(gaps).max()) if gaps else 0.0
