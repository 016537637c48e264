"""FedLDA against its equations in NumPy, with awkward clients."""

import functools

import numpy as np
import pytest
import torch
from golden import five
from method_runs import (
    BACKENDS,
    COHORTS,
    PRECISIONS,
    differences,
    everything_finite,
    golden_problem,
    healthy_gap,
    numpy,
    play,
)
from scipy.optimize import approx_fprime
from test_golden import pool, start, task

from bespoke.algorithms.fedlda import FedLDA, _correlation
from bespoke.contract import CHECKS, Subject
from bespoke.core import tree
from bespoke.maths import gaussian

CASES = {
    "plain": {"momentum": 0.3, "lam": 0.5},
    "class": {"momentum": 0.3, "lam": 0.5, "centre": "class", "ridge": 0.0},
    "global": {"momentum": 0.7, "lam": 0.5, "centre": "global", "local_centre": "local"},
    "loose": {"momentum": 0.3, "lam": 0.0, "smooth": 0.02, "shrink": 0.03},
}


@functools.cache
def library(case, variant, backend):
    _, training = golden_problem(variant, COHORTS)
    return play(FedLDA(**CASES[case]), task(), start(), pool(), training, COHORTS, backend)


@functools.cache
def equations(case, variant, twist=""):
    given, _ = golden_problem(variant, COHORTS)
    fields = {{"shrink": "amount"}.get(n, n): v for n, v in CASES[case].items()}
    return five.fedlda(given, numpy(library(case, variant, "loop").first), **fields, twist=twist)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["plain", "momentum"])
@pytest.mark.parametrize("case", CASES)
def test_the_library_follows_the_equations(case, variant, backend):
    given, _ = golden_problem(variant, COHORTS)
    found = differences(library(case, variant, backend), equations(case, variant), given.y_test)
    assert max(found.values()) < 1e-8, found


TWISTS = [
    ("plain", "no prior"),
    ("plain", "no penalty"),
    ("plain", "one triangle"),
    ("plain", "over d squared"),
    ("plain", "diagonal penalised"),
    ("plain", "batch covariance over n"),
    ("plain", "other centre"),
    ("class", "other centre"),
    ("global", "other centre"),
    ("plain", "other local centre"),
    ("global", "other local centre"),
    ("plain", "momentum is the own share"),
    ("plain", "statistics of the received body"),
    ("plain", "absent class at zero"),
    ("plain", "no ridge"),
    ("plain", "own statistics at prediction"),
    ("plain", "other weighting"),
]


@pytest.mark.parametrize(("case", "twist"), TWISTS)
def test_a_mistake_in_one_term_is_seen(case, twist):
    given, _ = golden_problem("plain", COHORTS)
    found = differences(library(case, "plain", "batched"), equations(case, "plain", twist), given.y_test)
    assert max(found.values()) > 1e-5, found
    if "predict" in twist:
        assert max(found["server"], found["uploads"]) < 1e-8


# --- the penalty ----------------------------------------------------------------------------------------------


def rows(n=9):
    draw = np.random.default_rng(0)
    return draw.normal(size=(n, 5)), np.arange(n) % 3, draw.normal(size=(3, 5))


@pytest.mark.parametrize("centre", ["batch", "class", "global"])
def test_the_penalty_and_its_gradient(centre):
    z, y, mu = rows()
    value, slope = five.penalty(z, y, mu, centre)
    by_difference = approx_fprime(z.ravel(), lambda v: five.penalty(v.reshape(z.shape), y, mu, centre)[0], 1e-7)
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
    played = library("plain", "plain", "loop")
    body = sum(v.numel() for v in task().body(start()).values())
    for up in played.uploads[0].values():
        assert tree.nbytes(up) == 4 * (body + 3 * 5 + 15) == tree.nbytes(played.server[0])


def test_the_first_state():
    first = library("plain", "plain", "loop").first
    assert torch.equal(gaussian.unpack(first["cov"], 5), torch.eye(5, dtype=torch.float64))
    assert first["mean"].abs().max() <= 0.1 and first["mean"].min() < -0.02 and first["mean"].max() > 0.02


def test_a_client_owns_nothing_but_its_prior():
    """Weights are the same for all; biases differ by the logarithms of the clients' own class shares."""
    played = library("plain", "plain", "loop")
    clients, down = played.clients, FedLDA().broadcast(played.server[-1])
    models = clients.personal(3, range(5), down, {})
    assert all(torch.equal(m["weight"], models[0]["weight"]) for m in models)
    for k in range(5):
        y = pool().y[pool().train.client(k)].numpy()
        want = five.log_prior(y, 3, 1e-4) - five.log_prior(pool().y[pool().train.client(0)].numpy(), 3, 1e-4)
        assert np.abs((models[k]["bias"] - models[0]["bias"]).numpy() - want).max() < 1e-12
    assert all(played.states[-1][k] == {} for k in played.states[-1])


SWITCHES = [{"centre": "class", "ridge": 0.0}, {"centre": "global", "local_centre": "local"}, {"lam": 0.0}]


@pytest.mark.parametrize("fields", SWITCHES, ids=str)
def test_loop_equals_batched_with_every_switch(fields):
    CHECKS["loop_equals_batched"](Subject(FedLDA(**fields), tolerance=1e-8))
