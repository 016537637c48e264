"""Rounds of adaptation, one call each, beside the same rounds as one piece of a client's work: equal to the bit."""

import functools
from dataclasses import dataclass, replace
from typing import final

import pytest
import torch
import toy
from torch import nn

from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.pfedfda import PFedFDA
from bespoke.clients.simulated import Call
from bespoke.clients.work import Work
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.local import collected, renewed
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.runs.federation import Federation

ROUND, SEED, SIZES = 3, 7, (5, 11, 3, 8, 6, 12, 9)
TRAINING = Training(rounds=4, epochs=2, batch=4, lr=0.1, momentum=0.5, schedule="cosine", lr_final=0.01)
ADAM = replace(TRAINING, optimizer="adam", lr=0.01, lr_final=0.001, keep_optimizer=True)
EVERYONE = list(range(len(SIZES)))
TRAINED, NEW = [1, 3, 0], [2, 4, 5, 6]  # the last two are not of the training population


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


MADE = {name: made() for name, made in ALGORITHMS.items()} | {"pfedfda": PFedFDA(test_statistics="trained")}


def federation(backend, name, training=TRAINING, **options):
    """A federation in which some clients took part in one round."""
    params = images().init(rng.key(3))
    clients = toy.BACKENDS[backend](MADE[name], images(), params, pool(), training, SEED, **options)
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
        return {"state": state} if then == "state_of" else getattr(work, then)(local, held_out, state, down)

    return work


METHODS = ["fedpce", "pfedfda", "fedavg_ft", "pfedme", "fedrep", "fedbabu", "ditto", "fedpac"]
ONCE, THRICE = {"adapt_rounds": 1}, {"adapt_rounds": 3}


@pytest.mark.parametrize("backend", toy.BACKENDS)
@pytest.mark.parametrize(
    ("name", "training", "options"),
    [
        *((name, TRAINING, {"adapt_rounds": 3, "adapt_epochs": 1}) for name in METHODS),
        *((name, ADAM, THRICE) for name in ("fedpce", "fedrep", "ditto")),
        *((name, TRAINING, ONCE) for name in ("pfedfda", "apfl")),
        *((name, TRAINING, {"adapt_rounds": 0}) for name in ("fedpce", "ditto")),
    ],
)
def test_rounds_of_adaptation_are_what_they_were_in_one_piece(name, training, options, backend):
    made, server = federation(backend, name, training, **options)
    clients, down = made.clients, made.down(server, NEW)
    call = Call(in_one_piece("evaluate", **options), NEW, rng.EVAL, ROUND, *down, held_out=True)
    wanted = clients._evaluated(NEW, clients._run(call).tree)
    assert clients.evaluate(ROUND, NEW, *down) == [row for client in NEW for row in wanted[client]]
    assert clients.notes == []


@pytest.mark.parametrize("backend", toy.BACKENDS)
@pytest.mark.parametrize("name", ["fedpce", "pfedfda", "fedrep", "fedpac"])
def test_personal_models_are_made_of_the_states_that_are_evaluated(name, backend):
    made, server = federation(backend, name, ADAM, **THRICE)
    clients, down = made.clients, made.down(server, EVERYONE)
    adapted = Call(in_one_piece("state_of", **THRICE), NEW, rng.EVAL, ROUND, *made.down(server, NEW))
    states = clients._run(adapted).tree | {"moments": {}}
    found = clients.personal(ROUND, EVERYONE, *down)
    for i, client in enumerate(NEW):
        kept = tree.take(states, torch.tensor([i]))
        call = Call(Work.personalize, [client], rng.EVAL, ROUND, *made.down(server, [client]), kept=kept)
        assert toy.same_bits(found[client], tree.unstack(clients._run(call).tree, 1)[0])
    for client in TRAINED:
        (alone,) = clients.personal(ROUND, [client], *made.down(server, [client]))
        assert toy.same_bits(found[client], alone)


@pytest.mark.parametrize("backend", toy.BACKENDS)
def test_adapted_states_are_not_kept(backend):
    """Nor does an evaluation change what a later one finds."""
    made, server = federation(backend, "ditto", ADAM, **THRICE)
    before, down = made.clients.states(), made.down(server, EVERYONE)
    rows = made.clients.evaluate(ROUND, EVERYONE, *down)
    made.clients.personal(ROUND, EVERYONE, *down)
    assert [made.clients.took_part(client) for client in EVERYONE] == [c in TRAINED for c in EVERYONE]
    assert before.keys() == made.clients.states().keys() == set(TRAINED)
    assert all(toy.same_bits(state, before[client]) for client, state in made.clients.states().items())
    assert [row.client for row in rows] == EVERYONE and made.clients.evaluate(ROUND, EVERYONE, *down) == rows


def test_each_round_is_one_call_of_a_block_and_few_states_are_alive():
    """Blocks of at most two clients: one is adapted and evaluated before the next one begins."""
    made, server = federation("batched", "ditto", **THRICE)
    clients, calls = made.clients, []
    clients.chunk, plain = 2, clients.runner.call
    clients.runner.call = lambda name, sizes, *given: calls.append((name, *sizes)) or plain(name, sizes, *given)
    clients.evaluate(ROUND, NEW, *made.down(server, NEW))
    blocks = [(12, 9), (6, 3)]
    assert calls == [(name, *sizes) for sizes in blocks for name in ("adapt", "adapt", "adapt", "evaluate")]


def test_a_method_without_adaptation_is_not_called_for_it():
    made, server = federation("batched", "fedavg_ft", adapt_rounds=200)
    made.clients.evaluate(ROUND, NEW, *made.down(server, NEW))
    assert made.clients._forms.keys() == {"update", "evaluate"}


@final
@dataclass(frozen=True)
class Growing(Algorithm):
    """Its adapted state has a name that a first state lacks."""

    def client_update(self, local, state, down):
        return state, {}

    def adapt(self, local, state, down):
        return {"passes": state.get("passes", 0.0) + local.n.double() * 0 + 1.0}

    def personalize(self, local, state, down):
        local.log(passes=state["passes"] if state else 0.0)
        return {"w": torch.zeros((), dtype=torch.float32)}

    def predict(self, task, personal, x):
        return personal["w"] * x.flatten(1)[:, : toy.CLASSES]


def test_work_on_states_of_another_form_has_another_name():
    """A recorded step is found by the name of the work, and a method may do something else with another state."""
    clients = toy.BACKENDS["batched"](Growing(), images(), images().init(rng.key(3)), pool(), TRAINING, SEED, **THRICE)
    toy.train(clients, 1, TRAINED, {}, {})
    names, plain = [], clients.runner.call
    clients.runner.call = lambda name, *given: names.append(name) or plain(name, *given)
    clients.similar = 0.0
    rows = clients.evaluate(ROUND, EVERYONE, {}, {})
    assert [row.logged["passes"] for row in rows] == [0.0 if c in TRAINED else 3.0 for c in EVERYONE]
    assert names == ["evaluate", "adapt", "adapt 2", "adapt 2", "evaluate 2"]
