"""FedLDA: its penalty, awkward clients, and what a client owns."""

import numpy as np
import pytest
import torch
from awkward_runs import PRECISIONS, everything_finite, healthy_gap
from golden.fedlda import penalty
from golden.gaussians import log_prior
from golden_runs import library
from scipy.optimize import approx_fprime
from toy import BACKENDS, EVERYONE, data, start, task

from bespoke.algorithms.fedlda import FedLDA, _correlation
from bespoke.contract import CHECKS, Subject
from bespoke.core import tree
from bespoke.maths import gaussian

pytestmark = pytest.mark.xdist_group("fedlda")


# --- the penalty ----------------------------------------------------------------------------------------------


def rows(n=9):
    draw = np.random.default_rng(0)
    return draw.normal(size=(n, 5)), np.arange(n) % 3, draw.normal(size=(3, 5))


@pytest.mark.parametrize("centre", ["batch", "class", "global"])
def test_the_penalty_and_its_gradient(centre):
    z, y, mu = rows()
    value, slope = penalty(z, y, mu, centre)
    by_difference = approx_fprime(z.ravel(), lambda v: penalty(v.reshape(z.shape), y, mu, centre)[0], 1e-7)
    assert np.abs(slope.ravel() - by_difference).max() < 1e-5
    x = torch.from_numpy(np.concatenate([z, 1e3 * np.ones((2, 5))])).requires_grad_()  # two rows of padding
    mask = torch.tensor([1.0] * 9 + [0.0] * 2, dtype=torch.float64)
    member = gaussian.one_hot(torch.from_numpy(np.append(y, [0, 1])), mask, 3)
    found = _correlation(x, member, torch.from_numpy(mu), centre)
    (gradient,) = torch.autograd.grad(found, x)
    assert abs(found.item() - value) < 1e-12
    assert np.abs(gradient.numpy()[:9] - slope).max() < 1e-12
    assert (gradient[9:] == 0).all() and value > 0.1


def test_a_batch_of_one_row_has_no_penalty():
    z, _, mu = rows(2)
    member = gaussian.one_hot(torch.tensor([0, 1]), torch.tensor([1.0, 0.0], dtype=torch.float64), 3)
    x = torch.from_numpy(z).requires_grad_()
    for centre in ("batch", "class", "global"):
        found = _correlation(x, member, torch.from_numpy(mu), centre)
        (gradient,) = torch.autograd.grad(found, x)
        assert found.item() == 0.0 and (gradient == 0).all()
    both = gaussian.one_hot(torch.tensor([0, 1]), torch.ones(2, dtype=torch.float64), 3)
    assert _correlation(x, both, torch.from_numpy(mu), "batch").item() > 0.0


# --- edge cases, bytes, switches ------------------------------------------------------------------------------

AWKWARD = {
    "plain": FedLDA(),
    "no ridge": FedLDA(ridge=0.0),
    "own statistics alone": FedLDA(ridge=0.0, momentum=0.0, lam=1.0),
    "global": FedLDA(centre="global", local_centre="local"),
}


@pytest.mark.parametrize(("backend", "dtype"), PRECISIONS)
@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_clients_give_finite_numbers(case, backend, dtype):
    everything_finite(AWKWARD[case], backend, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["plain", "global"])
def test_healthy_clients_do_not_notice_odd_ones(case, backend):
    assert healthy_gap(AWKWARD[case], backend) < 1e-9


def test_the_bytes_of_an_upload():
    ran = library("fedlda", "plain", "loop")
    body = sum(v.numel() for v in task().body(start()).values())
    for up in ran.uploads[0].values():
        assert tree.nbytes(up) == 4 * (body + 3 * 5 + 15) == tree.nbytes(ran.server[0])


def test_the_first_state():
    first = library("fedlda", "plain", "loop").first
    assert torch.equal(gaussian.unpack(first["cov"], 5), torch.eye(5, dtype=torch.float64))
    assert first["mean"].abs().max() <= 0.1 and first["mean"].min() < -0.02 and first["mean"].max() > 0.02


def test_a_client_owns_nothing_but_its_prior():
    """Weights are the same for all; biases differ by the logarithms of the clients' own class shares."""
    ran = library("fedlda", "plain", "loop")
    models = ran.personal[-1]
    assert all(torch.equal(m["weight"], models[0]["weight"]) for m in models)
    labels = [data().y[data().train.client(k)].numpy() for k in EVERYONE]
    for k in EVERYONE:
        want = log_prior(labels[k], 3, 1e-4) - log_prior(labels[0], 3, 1e-4)
        assert np.abs((models[k]["bias"] - models[0]["bias"]).numpy() - want).max() < 1e-12
    assert all(ran.states[-1][k] == {} for k in ran.states[-1])


SWITCHES = [{"centre": "class", "ridge": 0.0}, {"centre": "global", "local_centre": "local"}, {"lam": 0.0}]


@pytest.mark.parametrize("fields", SWITCHES, ids=str)
def test_loop_equals_batched_with_every_switch(fields):
    CHECKS["loop_equals_batched"](Subject(FedLDA(**fields), tolerance=1e-8))
