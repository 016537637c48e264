"""Lanes: what a finished client's place does, how many are computed, and what happens when memory runs out."""

import functools
from dataclasses import dataclass
from typing import final

import pytest
import torch
import toy
from torch import nn
from toy import train

from bespoke.algorithms.ditto import Ditto
from bespoke.algorithms.fedavg import FedAvg
from bespoke.clients import BatchedClients, SequentialClients
from bespoke.core import rng
from bespoke.core.algorithm import Algorithm
from bespoke.core.local import Length
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.engine.graphs import _slots
from bespoke.engine.lanes import Eager, Job, exactly, schedule
from bespoke.engine.scan import Scan
from bespoke.errors import is_out_of_device_memory

SIZES = (13, 4, 7, 4, 1, 22)
EVERYONE = list(range(len(SIZES)))


@functools.cache
def task():
    return Task(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), "2", 3, dtype=torch.float64)


@functools.cache
def pool():
    total = sum(SIZES)
    x, y = rng.normal(rng.key(1), (total, 3), torch.float64), (rng.uniform(rng.key(2), (total,)) * 3).long()
    return toy.data_of(x, y, torch.arange(total).split(SIZES), classes=3)


def trained(backend, method, training, slots=None):
    params = task().init(rng.key(3))
    clients = backend(method, task(), params, pool(), training, seed=5)
    if slots:
        clients.similar, clients.runner = 0.0, Eager(slots)
    out = train(clients, 1, EVERYONE, {"model": params}, {})
    assert not clients.notes and not out.refused
    return out


def gap(a, b):
    return toy.gap(a.uploads.tree, b.uploads.tree)


@final
@dataclass(frozen=True)
class Counted(Algorithm):
    """A loop of its own that takes two batches a step, stops early, and returns its names in another order."""

    def client_update(self, local, state, down):
        def step(carry, batches, scale):
            seen = sum((b.x.sum(dim=1) * b.mask).sum() for b in batches)
            return {"steps": carry["steps"] + 1.0, "sum": carry["sum"] * scale + seen}

        zero = torch.zeros((), dtype=torch.float64)
        last = local.scan(step, {"sum": zero, "steps": zero}, down["scale"], epochs=3, limit=local.n // 2, per_step=2)
        return state, last

    def personalize(self, local, state, down):
        return {}


SLOTS = {"exact": None, "all": lambda active, lanes: lanes, "recorded": _slots}


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize(
    "training",
    [
        Training(batch=4, epochs=3, lr=0.1, momentum=0.9, weight_decay=0.01),
        Training(batch=4, epochs=2, lr=0.1, optimizer="adam", clip=0.5),
        Training(batch=3, steps=7, lr=0.1, last_batch="drop"),
    ],
    ids=["sgd", "adam", "steps"],
)
@pytest.mark.parametrize("method", [FedAvg(), Ditto()], ids=["fedavg", "ditto"])
def test_idle_lanes_change_nothing(method, training, slots):
    assert (
        gap(trained(SequentialClients, method, training), trained(BatchedClients, method, training, SLOTS[slots]))
        < 1e-12
    )


@pytest.mark.parametrize("slots", SLOTS)
def test_a_loop_of_ones_own_in_lanes(slots):
    outs = []
    for backend, chosen in ((SequentialClients, None), (BatchedClients, SLOTS[slots])):
        clients = backend(Counted(), task(), task().init(rng.key(3)), pool(), Training(batch=4), seed=5)
        if chosen:
            clients.similar, clients.runner = 0.0, Eager(chosen)
        outs.append(train(clients, 1, EVERYONE, {"scale": torch.tensor(0.5, dtype=torch.float64)}, {}))
        assert not clients.notes
    steps = [min(-(-3 * -(-n // min(4, n)) // 2), n // 2) for n in SIZES]
    assert outs[0].uploads.tree["steps"].tolist() == outs[1].uploads.tree["steps"].tolist() == steps
    assert gap(*outs) < 1e-12


def test_a_lane_is_dropped_when_its_client_has_finished():
    job = Job(None, [torch.zeros(4)], [], [], lambda n: n, lambda n: 4 * n - 1, rows=4, timed=0, most=9)
    planned = schedule(job, [3, 2, 1, 1], exactly)
    assert planned.steps == [(0, 4, 4), (1, 2, 2), (2, 1, 1)]
    assert (planned.computed, planned.seen) == (4 * 7, 4 * 7 - 4)
    assert [lanes for _, _, lanes in schedule(job, [3, 2, 1, 1], lambda active, lanes: lanes).steps] == [4, 4, 4]
    assert [_slots(active, 30) for active in (30, 29, 28, 5, 3, 2, 1)] == [30, 30, 28, 8, 4, 2, 1]


def test_cohorts_of_all_sizes_share_few_numbers_of_lanes():
    """A block is padded with idle lanes; of these a step runs as many as make its number one that is recorded."""
    ran = {}
    for clients in range(3, 33):
        job = Job(None, [torch.zeros(32)], [], [], lambda n: n, lambda n: n, rows=1, timed=0, most=9)
        ran[clients] = [lanes for _, _, lanes in schedule(job, [2] + [1] * (clients - 1), _slots).steps]
    assert ran[30] == [32, 1] and ran[21] == [24, 1] and ran[3] == [4, 1]
    assert {lanes for plan in ran.values() for lanes in plan} == {1, *range(4, 33, 4)}


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("per_step", [1, 2])
@pytest.mark.parametrize("steps", [None, 5])
def test_rows_seen_are_those_of_the_batches(drop, per_step, steps):
    scan = Scan(None, None, (), Length(3, steps, None, per_step), tag=0, batch=4, drop=drop)
    for n in (1, 3, 4, 7, 13, 16):
        size = min(4, n)
        in_pass = n // size if drop else -(-n // size)
        sizes = [min(size, n - i * size) for i in range(in_pass)]
        calls = steps if steps else -(-3 * in_pass // per_step)
        assert scan.num_steps(n) == calls
        assert scan.rows_seen(n) == sum(sizes[i % in_pass] for i in range(calls * per_step))
        assert scan.passes(n) * in_pass >= calls * per_step


def test_fewer_clients_at_once_when_memory_runs_out():
    class Small(BatchedClients):
        def _block(self, call):
            if len(call.clients) > 2:
                raise torch.OutOfMemoryError("not enough")
            return super()._block(call)

    training = Training(batch=4, lr=0.1)
    params = task().init(rng.key(3))
    clients = Small(FedAvg(), task(), params, pool(), training, seed=5)
    clients.similar = 0.0
    out = train(clients, 1, EVERYONE, {"model": params}, {})
    assert clients.chunk == 1 or clients.chunk == 2
    assert clients.notes == [f"memory ran out: at most {n} clients run at once" for n in (3, 1)]
    assert gap(out, trained(SequentialClients, FedAvg(), training)) < 1e-12


def test_nothing_is_halved_where_that_is_not_wanted():
    class Small(BatchedClients):
        def _block(self, call):
            raise torch.OutOfMemoryError("not enough")

    params = task().init(rng.key(3))
    clients = Small(FedAvg(), task(), params, pool(), Training(batch=4, lr=0.1), seed=5, halve=False)
    with pytest.raises(torch.OutOfMemoryError):
        train(clients, 1, EVERYONE, {"model": params}, {})
    assert clients.notes == []


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("not enough"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnSgeqrf(...)`"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_a_full_device_are_known(error, found):
    assert is_out_of_device_memory(error) == found


def test_memory_that_is_too_small_for_one_client_is_an_error():
    class Tiny(BatchedClients):
        def _block(self, call):
            raise torch.OutOfMemoryError("not enough")

    params = task().init(rng.key(3))
    clients = Tiny(FedAvg(), task(), params, pool(), Training(batch=4), seed=5)
    with pytest.raises(torch.OutOfMemoryError):
        train(clients, 1, EVERYONE, {"model": params}, {})
