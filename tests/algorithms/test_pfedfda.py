"""pFedFDA against its equations in NumPy, and with awkward clients."""

import functools
from pathlib import Path

import pytest
import torch
from golden import five
from method_runs import (
    AWKWARD_TRAINING,
    BACKENDS,
    COHORTS,
    PRECISIONS,
    awkward,
    differences,
    everything_finite,
    golden_problem,
    healthy_gap,
    imports,
    numpy,
    play,
)
from test_golden import pool, start, task

from bespoke.algorithms.pfedfda import PFedFDA
from bespoke.contract import CHECKS, Subject
from bespoke.core import rng, tree
from bespoke.core.local import Local
from bespoke.errors import UserError
from bespoke.maths import gaussian

CASES = {
    "one": ({}, COHORTS),
    "none": ({"betas": "none"}, COHORTS),
    "two": ({"betas": "two"}, COHORTS[:1]),
    "text": ({"ridge": 1e-4, "few_rows": 0}, COHORTS[:2]),
    "three folds": ({"folds": 3, "smooth": 0.01, "shrink": 0.05}, COHORTS[:1]),
}


@functools.cache
def library(case, variant, backend):
    fields, cohorts = CASES[case]
    _, training = golden_problem(variant, cohorts)
    return play(PFedFDA(**fields), task(), start(), pool(), training, cohorts, backend)


def folds_of(played, count):
    """The library's folds, which are random draws: (purpose, round, client) -> held-out rows (k, n)."""
    clients = played.clients

    def folds(purpose, round, client):
        rows = clients.pool.train.client(client)
        data = clients.data(rows, torch.tensor(len(rows)), {})
        key = rng.stream(clients.root, {"train": rng.TRAIN, "eval": rng.EVAL}[purpose], round, torch.tensor(client))
        return clients.desk(clients.clock(round), data, key, {}, len(rows), len(rows)).folds(count).numpy()

    return folds


@functools.cache
def equations(case, variant, twist=""):
    fields, cohorts = CASES[case]
    given, _ = golden_problem(variant, cohorts)
    played = library(case, variant, "loop")
    renamed = {{"shrink": "amount"}.get(n, n): v for n, v in fields.items() if n != "folds"}
    return five.pfedfda(given, numpy(played.first), folds_of(played, fields.get("folds", 2)), **renamed, twist=twist)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("case", "variant"), [("one", "momentum"), ("none", "momentum"), *((c, "plain") for c in CASES)]
)
def test_the_library_follows_the_equations(case, variant, backend):
    given, _ = golden_problem(variant, CASES[case][1])
    found = differences(library(case, variant, backend), equations(case, variant), given.y_test)
    assert max(found.values()) < 1e-8, found


TWISTS = {
    "none": [
        "no prior",
        "prior not smoothed",
        "head not shrunk",
        "other ridge",
        "covariance over n",
        "statistics of the received body",
        "few rows in training",
        "every class its own mean at prediction",
        "predicts with shared statistics",
        "other weighting",
    ],
    "one": ["interpolates the other way", "single rows are folded too"],
}


@pytest.mark.parametrize(("case", "twist"), [(case, twist) for case, twists in TWISTS.items() for twist in twists])
def test_a_mistake_in_one_term_is_seen(case, twist):
    given, _ = golden_problem("momentum", CASES[case][1])
    found = differences(library(case, "momentum", "batched"), equations(case, "momentum", twist), given.y_test)
    assert max(found.values()) > 1e-5, found
    if "predict" in twist:
        assert max(found["server"], found["uploads"]) < 1e-8 and found["views"] > 1e-5


def test_the_equations_stand_alone():
    assert imports(Path(five.__file__)) == {"dataclasses", "numpy", "scipy", "golden"}


def test_betas_are_recorded_for_every_client():
    logged = library("one", "plain", "batched").logged
    betas = [row["beta_mean"] for round in logged for row in round.values()]
    assert all(row["beta_mean"] == row["beta_cov"] for round in logged for row in round.values())
    assert any(0.05 < b < 0.95 for b in betas) and 0.0 in betas
    two = [row for round in library("two", "plain", "batched").logged for row in round.values()]
    assert any(row["beta_mean"] != row["beta_cov"] for row in two)
    assert all(
        row["beta_mean"] == 1.0 for round in library("none", "momentum", "loop").logged for row in round.values()
    )


# --- edge cases -----------------------------------------------------------------------------------------------

AWKWARD = {
    "plain": PFedFDA(),
    "text": PFedFDA(ridge=1e-4),
    "own": PFedFDA(betas="none", ridge=1e-4, few_rows=0),
    "repair": PFedFDA(betas="none", ridge=1e-18, repair=True),
}


@pytest.mark.parametrize(("backend", "dtype"), PRECISIONS)
@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_clients_give_finite_numbers(case, backend, dtype):
    everything_finite(AWKWARD[case], backend, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_healthy_clients_do_not_notice_odd_ones(backend):
    assert healthy_gap(PFedFDA(), backend) < 1e-9


def test_repair_is_idle_with_a_ridge():
    pool, task, params = awkward()
    cohorts = [list(range(pool.num_clients))]
    runs = [
        play(PFedFDA(repair=repair, betas="none"), task, params, pool, AWKWARD_TRAINING, cohorts, "batched")
        for repair in (False, True)
    ]
    plain, repaired = (tree.flatten(run.server[0]) for run in runs)
    assert all(torch.equal(plain[name], repaired[name]) for name in plain)


def test_a_covariance_without_a_ridge_is_refused():
    with pytest.raises(UserError, match="ridge must be greater than 0"):
        PFedFDA(ridge=0.0)


# --- new clients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_clients_take_no_gradient_step(backend, monkeypatch):
    played = library("one", "plain", backend)
    clients, method = played.clients, PFedFDA()
    down = method.broadcast(played.server[-1])

    def refuse(*_, **__):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(Local, "_fold", refuse)
    rows = clients.evaluate(len(COHORTS), [3, 4], down, {})  # one never drawn, one new
    assert [row.loss_sum for row in rows] == [played.losses[-1][c, "personal"] for c in (3, 4)]
    with pytest.raises(AssertionError, match="a step was taken"):
        clients.train(9, [3], down, {})


# --- sizes ----------------------------------------------------------------------------------------------------


def test_the_bytes_of_an_upload():
    played = library("one", "plain", "loop")
    d, classes = task().feature_dim, task().num_classes
    body = sum(v.numel() for v in task().body(start()).values())
    for up in played.uploads[0].values():
        assert tree.nbytes(up) == 4 * (body + classes * d + d * (d + 1) // 2)
        assert tree.nbytes(up) == tree.nbytes(PFedFDA().broadcast(played.server[0]))
        assert up["cov"].shape == (d * (d + 1) // 2,)


# --- the first state, and switches ----------------------------------------------------------------------------


def test_the_first_state():
    first = library("one", "plain", "loop").first
    assert torch.equal(gaussian.unpack(first["cov"], 5), torch.eye(5, dtype=torch.float64))
    assert first["mean"].min() >= 0.0 and first["mean"].max() < 1.0 and first["mean"].std() > 0.2


SWITCHES = [{"betas": "none"}, {"ridge": 1e-4, "folds": 3}, {"repair": True, "few_rows": 0}]


@pytest.mark.parametrize("fields", SWITCHES, ids=str)
def test_loop_equals_batched_with_every_switch(fields):
    CHECKS["loop_equals_batched"](Subject(PFedFDA(**fields), tolerance=1e-8))
