"""The one small federation of the tests: a net, its task and first weights, clients' rows, and how to compare trees."""

import functools

import numpy as np
import torch
from torch import nn

from bespoke.clients import BatchedClients, SequentialClients
from bespoke.core.data import FederatedData, Rows
from bespoke.core.task import Task

BACKENDS = {"loop": SequentialClients, "batched": BatchedClients}
INPUTS, HIDDEN, CLASSES = 4, 5, 3
TRAIN_ROWS, TEST_ROWS, POPULATION = (5, 11, 3, 8, 6), (4, 7, 2, 3, 5), 4  # the last client is new
EVERYONE = range(len(TRAIN_ROWS))


class Net(nn.Module):
    """A body, a norm layer or none, an activation, and a head."""

    def __init__(self, inputs=INPUTS, hidden=HIDDEN, classes=CLASSES, norm=None, activation=torch.tanh):
        super().__init__()
        self.body = nn.Linear(inputs, hidden)
        self.norm = norm(hidden) if norm else nn.Identity()
        self.head = nn.Linear(hidden, classes)
        self.activation = activation

    def forward(self, x):
        return self.head(self.activation(self.norm(self.body(x))))


def data_of(x, y, train, test=None, *, classes=CLASSES, population=None):
    """Data of clients with these lists of train and test rows (default: no test rows); nobody has validation rows.

    Clients from ``population`` on (default: nobody) are new.
    """
    none = Rows.of([[]] * len(train))
    held_out = none if test is None else Rows.of(test)
    names = tuple(f"client {i}" for i in range(len(train)))
    return FederatedData(x, y, Rows.of(train), held_out, none, classes, population or len(train), names)


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
def data():
    """The clients' rows: a client's train rows come before its test rows."""
    x, y, _ = arrays()
    ends = np.cumsum([0, *map(len, y)])
    parts = [np.split(np.arange(a, b), [n]) for a, b, n in zip(ends[:-1], ends[1:], TRAIN_ROWS, strict=True)]
    return data_of(
        torch.from_numpy(np.concatenate(x)),
        torch.from_numpy(np.concatenate(y)),
        [train for train, _ in parts],
        [test for _, test in parts],
        population=POPULATION,
    )


def start():
    """The initial weights."""
    return {name: torch.from_numpy(value) for name, value in arrays()[2].items()}


@functools.cache
def task(kind=Task):
    """The task of the net, in float64; ``kind`` may be a task with another loss."""
    return kind(Net, "head", CLASSES, dtype=torch.float64)


class Quadratic(Task):
    """A client's loss is 1/2 (w - c)' H (w - c), with w the head's bias and c the mean of its rows."""

    curvature = torch.tensor([[1.09, 0.24, 0.2], [0.24, 0.8, -0.24], [0.2, -0.24, 0.4]], dtype=torch.float64)

    def loss(self, params, batch):
        centre = (batch.x * batch.mask[:, None]).sum(0) / batch.mask.sum()
        off = params["head.bias"] - centre[:CLASSES]
        return 0.5 * off @ self.curvature @ off


def centre(client):
    """The mean of a client's train rows, of as many inputs as the head's bias has entries."""
    return arrays()[0][client][: TRAIN_ROWS[client], :CLASSES].mean(axis=0)


def proximal_point(client, w, strength):
    """argmin of a client's quadratic loss + strength/2 |. - w|^2."""
    h = Quadratic.curvature.numpy()
    return np.linalg.solve(h + strength * np.eye(CLASSES), h @ centre(client) + strength * w)


class OwnQuadratic(Task):
    """A client's loss is 1/2 (w - c)' H (w - c) for the head's bias w; H and c come from the client's own rows."""

    def loss(self, params, batch):
        weight = batch.mask[:, None] / batch.mask.sum()
        centre = (batch.x * weight).sum(0)[:CLASSES]
        curvature = 0.3 + (batch.x.square() * weight).sum(0)[:CLASSES]
        return 0.5 * (curvature * (params["head.bias"] - centre).square()).sum()


# --- comparisons ----------------------------------------------------------------------------------------------


def gap(a, b):
    """The largest difference between two trees of tensors or arrays with the same names, shapes and types."""
    assert a.keys() == b.keys()
    worst = 0.0
    for name, value in a.items():
        if isinstance(value, dict):
            worst = np.maximum(worst, gap(value, b[name]))
        else:
            one, two = np.asarray(value), np.asarray(b[name])
            assert (one.dtype, one.shape) == (two.dtype, two.shape), name
            worst = np.maximum(worst, np.abs(one - two).max(initial=0.0))  # unlike max, keeps a NaN
    return float(worst)


def same_bits(a, b):
    """Whether two trees are equal to the bit."""
    assert a.keys() == b.keys()
    return all(same_bits(v, b[k]) if isinstance(v, dict) else torch.equal(v, b[k]) for k, v in a.items())


class MemoryRecords:
    """The records of a run, in memory."""

    def __init__(self):
        self.rows = {}

    def append(self, name, rows):
        self.rows.setdefault(name, []).extend(rows)

    def rounds(self):
        return self.rows["rounds.jsonl"]

    def clients(self):
        return self.rows["clients.jsonl"]


def train(clients, *args):
    """A round in which everyone who answered is accepted."""
    trained = clients.train(*args)
    clients.accept(trained.uploads.clients.tolist())
    return trained
