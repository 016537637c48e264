"""Rounds of adaptation, one call each, beside the same rounds as one piece of a client's work: equal to the bit."""

import functools
from dataclasses import replace

import pytest
import torch
import toy
from torch import nn

from bespoke.algorithms import ALGORITHMS
from bespoke.clients.simulated import Call
from bespoke.core import rng
from bespoke.core.local import collected, renewed
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.runs.federation import Federation

ROUND, SEED, SIZES = 3, 7, (5, 11, 3, 8, 6, 12, 9)
TRAINING = Training(rounds=4, epochs=2, batch=4, lr=0.1, momentum=0.5, schedule="cosine", lr_final=0.01)
ADAM = replace(TRAINING, optimizer="adam", lr=0.01, lr_final=0.001, keep_optimizer=True)
TRAINED, NEW = [1, 3, 0], [2, 4, 5, 6]  # 5 and 6 belong to nobody's population


class Images(nn.Module):
    """A convolution under a norm layer, and a head."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, toy.CLASSES)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((-1, -2)))


@functools.cache
def images():
    """Single precision, where another order of operations shows."""
    return Task(Images, "head", toy.CLASSES, dtype=torch.float32)


@functools.cache
def pool():
    total = 2 * sum(SIZES)
    x = rng.normal(rng.key(1), (total, 1, 6, 6))
    y = (rng.uniform(rng.key(2), (total,)) * toy.CLASSES).long()
    rows = list(torch.arange(total).split([n for n in SIZES for _ in range(2)]))
    return toy.data_of(x, y, rows[::2], rows[1::2], population=5)


def federation(backend, name, training=TRAINING, **options):
    """A federation in which some clients took part in one round."""
    params = images().init(rng.key(3))
    clients = toy.BACKENDS[backend](ALGORITHMS[name](), images(), params, pool(), training, SEED, **options)
    made = Federation.simulated(clients, SEED)
    server = next(made.rounds(cohort=lambda number: TRAINED)).server
    return made, server


def in_one_piece(then, adapt_rounds, adapt_epochs=0):
    """A client's work: all rounds of adaptation one after another at one desk, then ``then``."""

    def work(work, local, held_out, state, down):
        training = replace(local.training, epochs=adapt_epochs, steps=0) if adapt_epochs else local.training
        moments = {}
        for r in range(adapt_rounds):
            own = renewed(
                local,
                key=rng.fold_in(rng.fold_in(local.key, rng.ADAPT), r),
                training=training,
                round=torch.full_like(local.round, r + 1),
                rounds=torch.full_like(local.rounds, adapt_rounds),
                lr=torch.full_like(local.lr, training.lr * training.lr_factor(r + 1, adapt_rounds)),
                _moments=moments,
            )
            state, moments = work.algorithm.adapt(own, state, down), collected(own).moments
        return getattr(work, then)(local, held_out, state, down)

    return work


METHODS = list(ALGORITHMS)


@pytest.mark.parametrize("backend", toy.BACKENDS)
@pytest.mark.parametrize(
    ("training", "options"),
    [
        (TRAINING, {"adapt_rounds": 1}),
        (TRAINING, {"adapt_rounds": 3, "adapt_epochs": 1}),
        (ADAM, {"adapt_rounds": 3}),
        (TRAINING, {"adapt_rounds": 0}),
    ],
    ids=["once", "epochs", "kept moments", "none"],
)
@pytest.mark.parametrize("name", METHODS)
def test_rounds_of_adaptation_are_what_they_were_in_one_piece(name, training, options, backend):
    made, server = federation(backend, name, training, **options)
    clients, down = made.clients, made.down(server, NEW)
    call = Call(in_one_piece("evaluate", **options), NEW, rng.EVAL, ROUND, *down, held_out=True)
    wanted = clients._evaluated(NEW, clients._run(call).tree)
    assert clients.evaluate(ROUND, NEW, *down) == [row for client in NEW for row in wanted[client]]
    assert clients.notes == [] and not any(map(clients.took_part, NEW))
