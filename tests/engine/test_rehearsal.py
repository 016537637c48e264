"""A rehearsal of a block's work: what of it is done, and that nothing is changed by it. Here without CUDA."""

from dataclasses import dataclass
from typing import final

import pytest
import torch
import toy
from torch import nn
from toy import train

from bespoke.algorithms.ditto import Ditto
from bespoke.algorithms.fedavg import FedAvg
from bespoke.clients import BatchedClients
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.engine import graphs
from bespoke.engine.graphs import Recorded
from bespoke.engine.lanes import Eager, Job

SIZES = (13, 4, 7)
EVERYONE = list(range(len(SIZES)))


class OnTheCpu(Recorded):
    """Rehearses as on CUDA, then runs eagerly."""

    def __init__(self):
        self._eager, self._steps, self._recording, self._rehearsing, self._warm = Eager(), None, None, False, set()
        self.slots, self.jobs = self._eager.slots, []

    def width(self, rows):
        return rows

    def lanes(self, clients):
        return clients

    def call(self, name, sizes, one, inputs):
        self.jobs = []
        self._rehearse(one, inputs)
        self.rehearsed, self.jobs = self.jobs, []
        return self._eager.call(name, sizes, one, inputs)

    def run(self, job):
        self.jobs.append(job.most)
        return super().run(job) if self._rehearsing else self._eager.run(job)


@pytest.fixture
def attempts(monkeypatch):
    """The results of rehearsals: what mapping the work gave, or the error that ended it."""
    found = []

    def attempt(work):
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    monkeypatch.setattr(graphs, "rehearse", attempt)
    return found


def trained(method, training, runner=None):
    task = Task(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), "2", 3, dtype=torch.float64)
    total, params = sum(SIZES), task.init(rng.key(3))
    x, y = rng.normal(rng.key(1), (total, 3), torch.float64), torch.arange(total) % 3
    pool = toy.data_of(x, y, torch.arange(total).split(SIZES), classes=3)
    clients = BatchedClients(method, task, params, pool, training, seed=5)
    clients.similar = 0.0
    clients.runner = runner or Eager()
    rounds = [train(clients, number, EVERYONE, {"model": params}, {}) for number in (1, 2)]
    assert not clients.notes
    return rounds


@pytest.mark.parametrize("method", [FedAvg(), Ditto()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_rehearsal_changes_nothing(method, optimizer, attempts):
    training = Training(rounds=2, epochs=2, batch=4, lr=0.05, optimizer=optimizer, keep_optimizer=optimizer == "adam")
    rehearsed = trained(method, training, OnTheCpu())
    plain = trained(method, training)
    assert len(attempts) == 2 and not any(isinstance(found, Exception) for found in attempts)
    for ours, theirs in zip(rehearsed, plain, strict=True):
        a, b = tree.leaves(ours.uploads.tree), tree.leaves(theirs.uploads.tree)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert ours.padding_waste == theirs.padding_waste


def test_a_rehearsal_goes_through_every_loop(attempts):
    runner = OnTheCpu()
    trained(Ditto(), Training(rounds=2, epochs=2, batch=4, lr=0.05), runner)
    assert len(runner.rehearsed) == 2 and runner.rehearsed == runner.jobs  # the shared model's loop and the own one's


def test_a_rehearsed_loop_takes_one_step_and_forgets_it():
    """On CUDA the optimiser overwrites the parameters and its moments."""
    seen, runner = [], OnTheCpu()

    def advance(carry, inputs, t, idle):
        seen.append((int(t), carry[0].shape, inputs[0].tolist(), idle))
        carry[0].add_(1.0)
        return carry

    start, rows = torch.arange(6.0).reshape(2, 3), torch.arange(8).reshape(2, 4)
    job = Job(advance, [start.clone()], [rows], [False], lambda n: n, lambda n: n, rows=1, timed=1, most=4)
    runner._rehearsing = True
    (after,) = runner.run(job)
    assert torch.equal(after, start) and torch.equal(job.carry[0], start)
    assert seen == [(0, start.shape, rows.tolist(), True)]


@final
@dataclass(frozen=True)
class OnItsHost(Algorithm):
    """Asks its host in the middle."""

    def client_update(self, local, state, down):
        model = local.sgd(local.task.loss, down["model"])
        bias = local.host(self.asked, model["2.bias"])[0]
        return state, {"model": local.sgd(local.task.loss, model | {"2.bias": bias}, tag=1)}

    def asked(self, bias):
        ASKED.append(len(bias))
        return (bias * 2.0,)

    def personalize(self, local, state, down):
        return down["model"]


ASKED: list[int] = []


def test_a_rehearsal_ends_at_a_host_function(attempts):
    ASKED.clear()
    runner = OnTheCpu()
    trained(OnItsHost(), Training(rounds=2, batch=4, lr=0.05), runner)
    assert ASKED == [3, 3]  # all clients, once a round
    assert [type(found) for found in attempts] == [RuntimeError] * 2 and "host" in str(attempts[0])
    assert len(runner.rehearsed) == 1 and len(runner.jobs) == 2
