"""pFedVMP against its equations in NumPy, against FedPer, and with awkward clients."""

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
from test_golden import pool, same_bits, start, task, training
from torch.nn import functional as F

from bespoke.algorithms.fedper import FedPer
from bespoke.algorithms.pfedvmp import PFedVMP
from bespoke.contract import CHECKS, Subject
from bespoke.core import tree
from bespoke.maths import gaussian

CASES = {
    "plain": {"xi": 2.0},
    "mean": {"xi": 2.0, "aggregation": "mean", "new_head_epochs": 2},
    "sharp": {"xi": 0.5, "alpha": 0.2, "cut": 0.05},
}


@functools.cache
def library(case, variant, backend):
    _, settings = golden_problem(variant, COHORTS)
    return play(PFedVMP(**CASES[case]), task(), start(), pool(), settings, COHORTS, backend)


@functools.cache
def equations(case, variant, twist=""):
    given, _ = golden_problem(variant, COHORTS)
    return five.pfedvmp(given, numpy(library(case, variant, "loop").first), **CASES[case], twist=twist)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["plain", "momentum"])
@pytest.mark.parametrize("case", CASES)
def test_the_library_follows_the_equations(case, variant, backend):
    given, _ = golden_problem(variant, COHORTS)
    found = differences(library(case, variant, backend), equations(case, variant), given.y_test)
    assert max(found.values()) < 1e-8, found


TWISTS = [
    ("plain", "no pull"),
    ("plain", "sum over features"),
    ("plain", "half the square"),
    ("plain", "pull from the first round"),
    ("plain", "no cut"),
    ("plain", "covariance over n - 1"),
    ("plain", "other alpha"),
    ("plain", "absent class counts"),
    ("plain", "statistics of the received body"),
    ("plain", "plain mean"),
    ("plain", "centroids are forgotten"),
    ("plain", "unseen unfitted"),
    ("plain", "other weighting"),
    ("mean", "statistics of the received body"),
    ("mean", "no pull"),
]


@pytest.mark.parametrize(("case", "twist"), TWISTS)
def test_a_mistake_in_one_term_is_seen(case, twist):
    given, _ = golden_problem("plain", COHORTS)
    found = differences(library(case, "plain", "batched"), equations(case, "plain", twist), given.y_test)
    assert max(found["server"], found["states"], found["views"]) > 1e-5, found
    if twist.startswith("unseen"):
        assert max(found["server"], found["states"]) < 1e-8


def test_the_gradient_of_the_pull():
    draw = np.random.default_rng(0)
    z, y, mu, known = draw.normal(size=(7, 5)), np.arange(7) % 3, draw.normal(size=(3, 5)), np.array([1.0, 0.0, 1.0])
    value, slope = five.pull(z, y, mu, known)
    rows = known[y] > 0
    want = F.mse_loss(torch.from_numpy(z[rows]), torch.from_numpy(mu[y][rows])).item() * rows.mean()
    assert value == pytest.approx(want, rel=1e-12)
    by_difference = approx_fprime(z.ravel(), lambda v: five.pull(v.reshape(7, 5), y, mu, known)[0], 1e-7)
    assert np.abs(slope.ravel() - by_difference).max() < 1e-6 and np.abs(slope).max() > 0.01


# --- FedPer is pFedVMP without the pull -----------------------------------------------------------------------


@functools.cache
def minibatches(method, backend):
    settings = training("momentum", rounds=3, batch=4, epochs=2, clip=1.0)
    return play(method, task(), start(), pool(), settings, COHORTS, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_the_pull_it_is_fedper_to_the_bit(backend):
    plain, still = minibatches(FedPer(), backend), minibatches(PFedVMP(xi=0.0), backend)
    for r in range(3):
        assert same_bits(plain.server[r]["body"], still.server[r]["body"])
        assert plain.states[r].keys() == still.states[r].keys()
        assert all(same_bits(plain.states[r][c], still.states[r][c]) for c in plain.states[r])
        assert all(same_bits(plain.uploads[r][c]["body"], still.uploads[r][c]["body"]) for c in plain.uploads[r])
        for c in range(pool().total_clients):
            assert plain.losses[r][c, "personal"] == still.losses[r][c, "personal"]
    drawn = minibatches(PFedVMP(xi=1.0), backend)
    # No centroid exists in the first round, and the pull waits: the same bits; from then on others.
    assert same_bits(plain.server[0]["body"], drawn.server[0]["body"])
    assert not same_bits(plain.server[1]["body"], drawn.server[1]["body"])


def test_a_centroid_exists_once_a_class_was_met():
    played = library("plain", "plain", "loop")
    met = np.zeros(3)
    for r, cohort in enumerate(COHORTS):
        for k in cohort:
            met = np.maximum(met, np.bincount(pool().y[pool().train.client(k)], minlength=3) > 0)
        assert np.array_equal(played.server[r]["known"].numpy(), met)
    assert not played.first["known"].any() and not played.first["centroid"].any()


# --- the message ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bytes_of_a_message(backend):
    """What is recorded is what body, means and the smaller form of each precision take."""
    played = library("plain", "plain", backend)
    body = tree.nbytes(task().body(start()))
    for r, cohort in enumerate(COHORTS):
        for k in cohort:
            up, recorded = played.uploads[r][k], played.logged[r][k]["bytes_up"]
            assert recorded == body + 4 * float(gaussian.message_floats(up["count"], 5))
            assert np.array_equal(up["count"], np.bincount(pool().y[pool().train.client(k)], minlength=3))
            dense = tree.nbytes({n: v for n, v in up.items() if n != "count"})
            assert recorded <= dense
    assert "precision" not in library("mean", "plain", backend).uploads[0][0]
    assert not any("head" in up for round in played.uploads for up in round.values())


def test_the_nearest_centroid_is_a_second_view():
    played = library("plain", "plain", "loop")
    assert list(played.views[0][0]) == ["personal", "centroid"]
    server, x = played.server[-1], pool().x[pool().test.client(1)]
    z = torch.tanh(x @ server["body"]["body.weight"].T + server["body"]["body.bias"])
    nearest = torch.cdist(z, server["centroid"]).argmin(dim=1)
    assert torch.equal(played.views[-1][1]["centroid"].argmax(dim=1), nearest)


# --- edge cases and switches ----------------------------------------------------------------------------------

AWKWARD = {"plain": PFedVMP(), "mild": PFedVMP(xi=1.0), "mean": PFedVMP(xi=1.0, aggregation="mean")}


@pytest.mark.parametrize(("backend", "dtype"), PRECISIONS)
@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_clients_give_finite_numbers(case, backend, dtype):
    played = everything_finite(AWKWARD[case], backend, dtype)
    assert played.server[-1]["known"].tolist() == [1.0, 1.0, 1.0, 0.0]  # nobody trains on the last class
    if case == "mild" and dtype == torch.float64:
        sent = [gaussian.unpack(up["precision"], 8) for up in played.uploads[-1].values()]
        assert torch.equal(sent[3][1], torch.eye(8, dtype=dtype))  # of one row: alpha I
        assert all(torch.equal(part[3], torch.zeros(8, 8, dtype=dtype)) for part in sent)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", AWKWARD)
def test_healthy_clients_do_not_notice_odd_ones(case, backend):
    assert healthy_gap(AWKWARD[case], backend) < 1e-8


@pytest.mark.parametrize("fields", [{"aggregation": "mean"}, {"xi": 0.0}, {"alpha": 0.1, "cut": 0.01}], ids=str)
def test_loop_equals_batched_with_every_switch(fields):
    CHECKS["loop_equals_batched"](Subject(PFedVMP(**fields), tolerance=1e-8))
