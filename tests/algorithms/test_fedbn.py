"""FedBN: norm layers stay with their clients; without any it is FedAvg, and says so."""

import math

import numpy as np
import pytest
import toy
from golden.common import ALL, NORM, loss_sum
from golden.fedbn import normed, normed_gradient
from golden_runs import SEED, library, problem, start, task, training
from scipy.optimize import approx_fprime
from toy import BACKENDS, POPULATION, same_bits

from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedbn import FedBN
from bespoke.core import rng
from bespoke.core.task import Task
from bespoke.errors import UserError

pytestmark = pytest.mark.xdist_group("fedbn")


def test_the_gradients_derived_by_hand():
    given, first = problem("plain"), start("group")
    x, y = given.x[1], given.y[1]
    shapes = {name: leaf.shape for name, leaf in first.items()}

    def unpack(flat):
        parts = np.split(flat, np.cumsum([math.prod(s) for s in shapes.values()])[:-1])
        return {name: part.reshape(s) for part, (name, s) in zip(parts, shapes.items(), strict=True)}

    flat = np.concatenate([leaf.ravel() for leaf in first.values()])
    slope = approx_fprime(flat, lambda f: loss_sum(normed(unpack(f), x)[0], y) / len(y), 1e-7)
    mine = normed_gradient(first, x, y)
    mine = np.concatenate([mine[name].ravel() for name in shapes])
    assert np.abs(mine - slope).max() < 1e-5 and np.abs(mine).max() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedbns_norms_never_leave(backend):
    ran = library("fedbn", "plain", backend)
    assert task("group").norm_names == NORM
    assert all(server["model"].keys() == set(ALL) for server in ran.server)
    norms = [state["norm"] for state in ran.states[-1].values()]
    assert all(norm.keys() == set(NORM) for norm in norms)
    assert not any(same_bits(a, b) for i, a in enumerate(norms) for b in norms[:i])
    for personal in ran.personal[-1]:
        assert same_bits({n: personal[n] for n in ALL}, ran.server[-1]["model"])
    numbers = sum(start("group")[name].size for name in ALL)
    for row in ran.rounds():
        assert row["bytes_up"] == row["bytes_down"] == 4 * numbers * len(row["cohort"])


class NoNorms(Task):
    """A task whose model has no norm layer to keep."""

    def norm(self, params):
        return {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedbn_with_no_norm_to_keep_is_fedavg_to_the_bit(backend):
    settings, task, sent = training("momentum", batch=4, epochs=2, weight_decay=0.0), toy.task(NoNorms), []
    for made in (FedBN(), FedAvg()):
        clients = BACKENDS[backend](made, task, toy.start(), toy.data(), settings, SEED)
        trained = toy.train(clients, 1, list(range(POPULATION)), {"model": toy.start()}, {})
        sent.append(trained.uploads.tree)
    assert same_bits(*sent)


def test_fedbn_refuses_a_model_without_norms():
    with pytest.raises(UserError, match="the model has none"):
        FedBN().server_init(toy.task(), toy.start(), POPULATION, rng.key(0))
