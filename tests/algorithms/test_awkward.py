"""The federation of awkward clients is as awkward as it says, and its two checks can fail; and features of zero."""

from dataclasses import dataclass
from typing import final

import pytest
import torch
import toy
from awkward_runs import HEALTHY, LABELS, ODD, WIDE, awkward, everything_finite, healthy_gap
from golden_runs import run, training

from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.fedavg import FedAvg
from bespoke.core import tree
from bespoke.core.algorithm import Algorithm


def rows(name):
    pool, _, _ = awkward()
    mine = pool.train.client(len(HEALTHY) + list(ODD).index(name))
    return pool.x[mine], pool.y[mine]


def test_the_clients_are_what_they_are_called():
    pool, task, params = awkward()
    for name, count in ODD.items():
        assert len(rows(name)[1]) == count
    assert rows("one class")[1].unique().numel() == 1
    assert rows("all single")[1].unique().numel() == ODD["all single"]
    assert 1 < ODD["few rows"] < WIDE / 2
    assert rows("equal rows")[0].unique(dim=0).shape[0] == 2
    x, y = rows("near-equal rows")
    assert 0.0 < (x[y == 0] - x[0]).abs().max() < 1e-5 and x.unique(dim=0).shape[0] == 6
    z = task.features(params, rows("dead features")[0])
    assert (z == z[0]).all() and (z == 0).any()  # no feature of this client varies
    everyone = torch.cat([pool.train.client(k) for k in range(pool.total_clients)])
    assert (task.features(params, pool.x[everyone]) == 0).all(dim=0).sum() >= 2  # and two are dead for all
    assert set(pool.y[everyone].tolist()) == set(range(LABELS - 1))  # a class with prior zero
    assert pool.total_clients == len(HEALTHY) + len(ODD) + 2 and pool.num_clients == len(HEALTHY) + len(ODD)


class Toy(Algorithm):
    """Sends the model back with a shift."""

    def client_update(self, local, state, down):
        shift = self.shift(local).to(local.task.dtype)
        return state, {"model": tree.map(lambda p: p + shift, down["model"])}

    def personalize(self, local, state, down):
        return down["model"]


@final
@dataclass(frozen=True)
class DividesByTheRest(Toy):
    """Has no number for a client of one row."""

    def shift(self, local):
        return 0.0 / (local.n - 1)


@final
@dataclass(frozen=True)
class TakesPaddingForRows(Toy):
    """A mean without the mask."""

    def shift(self, local):
        return local.labels()[0].double().mean()


@pytest.mark.parametrize("backend", toy.BACKENDS)
def test_a_number_that_is_not_finite_is_seen(backend):
    with pytest.raises(AssertionError, match="NaN or inf"):
        everything_finite(DividesByTheRest(), backend)


def test_what_leaks_from_odd_clients_is_seen():
    assert healthy_gap(TakesPaddingForRows(), "batched") > 1e-3
    assert healthy_gap(TakesPaddingForRows(), "loop") == 0.0  # there is no padding
    assert healthy_gap(FedAvg(), "batched") < 1e-12


@pytest.mark.parametrize("backend", toy.BACKENDS)
@pytest.mark.parametrize("name", ["fedpac", "fedproto", "moon", "fedcp", "gpfl"])
def test_features_of_zero_give_finite_steps(name, backend):
    """Cosines, norms and square roots meet their worst point."""
    zero = toy.start() | tree.zeros_like(toy.task().body(toy.start()))
    ran = run(ALGORITHMS[name](), training("plain", rounds=2), backend, start=zero, cohorts=[[0, 1, 2]] * 2)
    assert all(torch.isfinite(leaf).all() for leaf in tree.leaves(ran.server[-1]))
