"""pFedFDA: the betas it finds, awkward clients, and new ones that take no gradient step."""

import functools

import awkward_runs
import numpy as np
import pytest
import torch
from awkward_runs import PRECISIONS, everything_finite, healthy_gap
from golden_runs import SWITCHED, federation, library, one_round, run, training
from torch import nn
from toy import BACKENDS, CLASSES, INPUTS, Net, data_of, gap, same_bits, start, task, train

from bespoke.algorithms.pfedfda import PFedFDA
from bespoke.contract import CHECKS, Subject
from bespoke.core import rng, tree
from bespoke.core.local import Local
from bespoke.core.task import Task
from bespoke.errors import UserError
from bespoke.maths import gaussian

pytestmark = pytest.mark.xdist_group("pfedfda")


def test_betas_are_recorded_for_every_client():
    logged = library("pfedfda", "plain", "batched").logged
    betas = [row["beta_mean"] for round in logged for row in round.values()]
    assert all(row["beta_mean"] == row["beta_cov"] for round in logged for row in round.values())
    assert any(0.05 < b < 0.95 for b in betas) and 0.0 in betas
    two = [row for round in library("pfedfda/two", "plain", "batched").logged for row in round.values()]
    assert any(row["beta_mean"] != row["beta_cov"] for row in two)
    none = library("pfedfda/none", "momentum", "loop").logged
    assert all(row["beta_mean"] == 1.0 for round in none for row in round.values())


# --- edge cases -----------------------------------------------------------------------------------------------

AWKWARD = {
    "plain": PFedFDA(),
    "text": PFedFDA(ridge=1e-4),
    "own": PFedFDA(betas="none", ridge=1e-4, few_rows=0),
    "repair": PFedFDA(betas="none", ridge=1e-18, repair=True),
    "epochs": PFedFDA(train_statistics="epochs"),
}


@pytest.mark.parametrize(("backend", "dtype"), PRECISIONS)
@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_clients_give_finite_numbers(case, backend, dtype):
    everything_finite(AWKWARD[case], backend, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["plain", "epochs"])
def test_healthy_clients_do_not_notice_odd_ones(case, backend):
    assert healthy_gap(AWKWARD[case], backend) < 1e-9


def test_repair_is_idle_with_a_ridge():
    runs = [awkward_runs.run(PFedFDA(repair=repair, betas="none"), "batched") for repair in (False, True)]
    plain, repaired = (tree.flatten(run.server[0]) for run in runs)
    assert all(torch.equal(plain[name], repaired[name]) for name in plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_clients_own_covariance_that_is_repaired(backend, monkeypatch):
    monkeypatch.setattr(gaussian, "repair", lambda cov: 3.0 * cov)
    sent = {}
    for repair in (False, True):
        trained, *_ = one_round(PFedFDA(repair=repair, betas="none"), training("plain"), backend)
        sent[repair] = trained.uploads.tree["cov"]
    assert (sent[True] - 3.0 * sent[False]).abs().max() < 1e-12
    assert sent[False].abs().max() > 0.1


def test_a_covariance_without_a_ridge_is_refused():
    with pytest.raises(UserError, match="ridge must be greater than 0"):
        PFedFDA(ridge=0.0)


# --- new clients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_clients_take_no_gradient_step(backend, monkeypatch):
    ran = library("pfedfda", "plain", backend)
    fed, last = ran.federation, len(ran.server)

    def refuse(*_, **__):
        raise AssertionError("a step was taken")

    for way in ("sgd", "trace", "scan", "finetune", "gradient"):
        monkeypatch.setattr(Local, way, refuse)
    who = [3, 4]  # one never drawn, one new
    personal = fed.clients.personal(last, who, *fed.down(ran.server[-1], who))
    assert all(same_bits(found, ran.personal[-1][c]) for c, found in zip(who, personal, strict=True))
    with pytest.raises(AssertionError, match="a step was taken"):
        train(fed.clients, 9, [3], *fed.down(ran.server[-1], [3]))


# --- sizes ----------------------------------------------------------------------------------------------------


def test_the_bytes_of_an_upload():
    played = library("pfedfda", "plain", "loop")
    d, classes = task().feature_dim, task().num_classes
    body = sum(v.numel() for v in task().body(start()).values())
    for up in played.uploads[0].values():
        assert tree.nbytes(up) == 4 * (body + classes * d + d * (d + 1) // 2)
        assert tree.nbytes(up) == tree.nbytes(PFedFDA().broadcast(played.server[0]))
        assert up["cov"].shape == (d * (d + 1) // 2,)


# --- the first state, and switches ----------------------------------------------------------------------------


def test_the_first_state():
    first = library("pfedfda", "plain", "loop").first
    assert torch.equal(gaussian.unpack(first["cov"], 5), torch.eye(5, dtype=torch.float64))
    assert first["mean"].min() >= 0.0 and first["mean"].max() < 1.0 and first["mean"].std() > 0.2


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_as_trained_are_those_that_were_sent(backend):
    """A client predicts with its last round's body and statistics, whatever the server holds; others search."""
    method = PFedFDA(test_statistics="trained")
    ran = run(method, training("plain", rounds=2), backend, cohorts=[[0, 1], [1, 2]])
    sent = ran.uploads[0] | ran.uploads[1]
    for client, up in sent.items():
        personal = ran.personal[-1][client]
        pool = ran.federation.clients.pool
        counts = torch.bincount(pool.y[pool.train.client(client)], minlength=CLASSES)
        prior = counts.double() / counts.sum() + method.smooth
        head = gaussian.lda_head(gaussian.received(task(), up), (prior / prior.sum()).log(), method.shrink)
        assert gap({"w": personal["weight"], "b": personal["bias"]}, {"w": head.weight, "b": head.bias}) < 1e-10
        assert same_bits(personal["body"], up["body"])
    unseen = ran.personal[-1][3]
    assert same_bits(unseen["body"], ran.server[-1]["body"])
    searched = run(PFedFDA(), training("plain", rounds=2), backend, cohorts=[[0, 1], [1, 2]])
    assert same_bits(searched.server[-1], ran.server[-1])
    assert gap({"w": searched.personal[-1][1]["weight"]}, {"w": ran.personal[-1][1]["weight"]}) > 1e-2


# --- features of every epoch ----------------------------------------------------------------------------------

READINGS = ("pass", "epochs")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_image_in_both_folds_draws_beta_to_the_clients_own(backend):
    """Two rows of each of ten classes, without a pattern: they say nothing of each other, and all of their copies."""
    net = Task(functools.partial(Net, hidden=16, classes=10), "head", 10, dtype=torch.float64)
    x, y = rng.normal(rng.key(1), (60, INPUTS), torch.float64), torch.arange(60) % 10
    rows = [list(range(20 * k, 20 * k + 20)) for k in range(3)]
    world = {"task": net, "start": net.init(rng.key(0)), "data": data_of(x, y, rows, classes=10), "who": range(3)}
    settings = training("plain", epochs=4, batch=5, lr=0.01)
    found = [one_round(PFedFDA(train_statistics=how), settings, backend, **world)[0].logged for how in READINGS]
    once, often = (np.array(logged["beta_mean"]) for logged in found)
    assert (often > once + 0.3).all(), found


@pytest.mark.parametrize("backend", BACKENDS)
def test_prediction_makes_one_pass_whatever_training_gathers(backend):
    server, who = library("pfedfda", "plain", backend).server[-1], [0, 3, 4]
    found = []
    for reading in READINGS:
        fed = federation(PFedFDA(train_statistics=reading), training("plain"), backend)
        found.append(fed.clients.personal(1, who, *fed.down(server, who)))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_a_body_without_parameters_makes_one_pass():
    net = Task(lambda: nn.Sequential(nn.Identity(), nn.Linear(INPUTS, CLASSES)), "1", CLASSES, dtype=torch.float64)
    world = {"task": net, "start": net.init(rng.key(0))}
    one, other = (one_round(PFedFDA(train_statistics=how), training("plain"), "loop", **world)[0] for how in READINGS)
    assert same_bits(one.uploads.tree, other.uploads.tree)


# --- switches -------------------------------------------------------------------------------------------------

SWITCHES = [
    {"train_statistics": "epochs", "betas": "two"},
    {"test_statistics": "trained"},
    {"betas": "none"},
    {"ridge": 1e-4, "folds": 3},
    {"repair": True, "few_rows": 0},
]


@pytest.mark.parametrize("fields", SWITCHES, ids=str)
def test_loop_equals_batched_with_every_switch(fields):
    CHECKS["loop_equals_batched"](Subject(PFedFDA(**fields), tolerance=1e-8))


@pytest.mark.parametrize("check", SWITCHED)
def test_the_contract_holds_with_features_of_every_epoch(check):
    CHECKS[check](Subject(PFedFDA(train_statistics="epochs"), tolerance=1e-8))
    CHECKS[check](Subject(PFedFDA(train_statistics="epochs", test_statistics="trained"), tolerance=1e-8))
