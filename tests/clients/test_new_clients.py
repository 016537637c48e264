"""A client that no method ever saw: it gets a sound model of its own that has learned, and leaves no trace."""

import functools
import re
from dataclasses import dataclass, replace
from typing import final

import pytest
import torch
import toy
from torch import nn
from toy import BACKENDS

from bespoke.algorithms import ALGORITHMS, method_class
from bespoke.algorithms.fedper import FedPer
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.runs.federation import Federation

CLIENTS, ROWS, TESTS, CLASSES, DIM, ROUNDS = 3, 24, 60, 3, 5, 4
NEW = CLIENTS  # the last one, which never trains
GOOD = 0.75  # a guess is right in a third of the cases
TRAINING = Training(rounds=ROUNDS, epochs=2, batch=12, lr=0.2, momentum=0.8)
SETTINGS = {"qlsd": {"step": 0.5}}  # one gradient a round and no fine-tuning: the others' many steps in few


@pytest.fixture(scope="module")
def given():
    """Classes that a straight line separates, the same on all clients: whoever has learned is nearly always right."""
    key, each = rng.key(5), ROWS + TESTS
    y = torch.arange((CLIENTS + 1) * each) % CLASSES
    centres = 4.0 * torch.eye(CLASSES, DIM, dtype=torch.float64)
    x = centres[y] + 0.6 * rng.normal(key, (len(y), DIM), torch.float64)
    parts = [part.split([ROWS, TESTS]) for part in torch.arange(len(y)).split(each)]
    train, test = zip(*parts, strict=True)
    pool = toy.data_of(x, y, train, test, classes=CLASSES, population=CLIENTS)
    net = functools.partial(toy.Net, DIM, 8, CLASSES, norm=nn.LayerNorm)
    task = Task(net, "head", CLASSES, "cpu", torch.float64)
    return pool, task, task.init(rng.key(2))


def copied(value):
    return {name: leaf.clone() for name, leaf in tree.flatten(value).items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def newcomer(method, given, backend="batched", rounds=ROUNDS):
    """The new client's model after some rounds of the others, its test accuracy, and whether anything else moved."""
    pool, task, params = given
    clients = BACKENDS[backend](method, task, params, pool, replace(TRAINING, rounds=rounds), seed=3)
    federation = Federation.simulated(clients, 3)
    server = federation.start()
    for done in federation.rounds(server):
        assert not done.refused
        server = done.server
    before = copied(server), {c: copied(s) for c, s in clients.states().items()}
    down = method.broadcast(server), method.tailor(server, torch.tensor([-1]))
    (personal,) = clients.personal(rounds, [NEW], *down)
    headline, *_ = clients.evaluate(rounds, [NEW], *down)
    after = copied(server), {c: copied(s) for c, s in clients.states().items()}
    untouched = same(before[0], after[0]) and before[1].keys() == after[1].keys()
    untouched = (
        untouched and all(same(state, after[1][c]) for c, state in before[1].items()) and not clients.took_part(NEW)
    )
    assert not clients.notes
    return personal, headline.metrics["accuracy"][0] / headline.total, untouched


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_client_that_no_one_met_gets_a_model_that_has_learned(name, given):
    personal, accuracy, untouched = newcomer(ALGORITHMS[name](**SETTINGS.get(name, {})), given)
    assert all(torch.isfinite(leaf).all() for leaf in tree.leaves(personal))
    assert accuracy > GOOD
    assert untouched


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_a_new_client_does_is_written_down(name):
    text = " ".join((method_class(name).__doc__ or "").split())
    assert re.search(r"never took part|never drawn|unseen|new client", text), name


# --- the check has teeth ------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class ForgetsToFit(Algorithm):
    """FedPer without its adapt: a new client predicts with a head that nobody fitted."""

    server_init, broadcast = FedPer.server_init, FedPer.broadcast
    client_init, client_update, personalize = FedPer.client_init, FedPer.client_update, FedPer.personalize


@final
@dataclass(frozen=True)
class WritesToTheServer(Algorithm):
    """Adapts in place what all clients share."""

    def client_update(self, local, state, down):
        return state, {"model": local.sgd(local.task.loss, down["model"])}

    def adapt(self, local, state, down):
        down["model"]["head.bias"].add_(1.0)
        return state

    def personalize(self, local, state, down):
        return down["model"]


def test_a_head_that_nobody_fitted_is_found(given):
    assert newcomer(ForgetsToFit(), given)[1] < GOOD


def test_a_guess_is_found(given):
    assert newcomer(ALGORITHMS["fedavg"](), given, rounds=0)[1] < GOOD


def test_an_adaptation_that_leaves_a_trace_is_found(given):
    assert not newcomer(WritesToTheServer(), given, "loop")[2]
