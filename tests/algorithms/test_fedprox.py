"""FedProx: without its term, at a rate that cancels the past, and on a quadratic."""

import numpy as np
import pytest
import toy
from golden.common import gradient
from golden_runs import minibatches, one_round, problem, training
from toy import BACKENDS, POPULATION, same_bits

from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedprox import FedProx
from bespoke.core import tree

pytestmark = pytest.mark.xdist_group("fedprox")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedprox_without_its_term_is_fedavg_to_the_bit(backend):
    plain, prox = minibatches(FedAvg(), backend), minibatches(FedProx(mu=0.0), backend)
    assert all(same_bits(a, b) for a, b in zip(plain.server, prox.server, strict=True))
    assert plain.records.clients() == prox.records.clients()
    assert not same_bits(plain.server[-1], minibatches(FedProx(mu=0.1), backend).server[-1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_fedprox_at_the_rate_that_cancels_the_past(backend, epochs):
    """With lr mu = 1 every step lands on w_t - lr g, g the gradient where the step began."""
    settings = {"lr": 0.5, "weight_decay": 0.0, "momentum": 0.0}
    end, _, _ = one_round(FedProx(mu=2.0), training("plain", epochs=epochs, **settings), backend)
    given = problem("plain")
    before = [given.start] * POPULATION
    if epochs > 1:
        last, _, _ = one_round(FedProx(mu=2.0), training("plain", epochs=epochs - 1, **settings), backend)
        before = [{n: v[k].numpy() for n, v in last.uploads.tree["model"].items()} for k in range(POPULATION)]
    for k in range(POPULATION):
        g = gradient(before[k], given.x[k], given.y[k])
        for name, value in end.uploads.tree["model"].items():
            want = given.start[name] - 0.5 * g[name]
            assert np.abs(value[k].numpy() - want).max() < 1e-14
            assert np.abs(want - given.start[name]).max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_fixed_point_on_a_quadratic(backend):
    mu, received = 0.7, {n: v + 0.5 for n, v in toy.start().items()}
    settings, task = training("plain", epochs=150, lr=0.4), toy.task(toy.Quadratic)
    trained, _, _ = one_round(FedProx(mu=mu), settings, backend, {"model": received}, task=task)
    for k in range(POPULATION):
        found = tree.map(lambda leaf, k=k: leaf[k], trained.uploads.tree["model"])
        anchor = received["head.bias"].numpy()
        want = toy.proximal_point(k, anchor, mu)
        assert np.abs(found["head.bias"].numpy() - want).max() < 1e-6
        assert np.abs(want - anchor).max() > 1e-2
        # What the loss does not depend on is drawn to the received model alone.
        assert (found["body.weight"] - received["body.weight"]).abs().max() < 1e-6
