"""pFedMe: the proximal point of a quadratic, and ties from none to strong."""

import math
from dataclasses import replace

import numpy as np
import pytest
import toy
from golden_runs import SWITCHED, federation, one_round
from toy import BACKENDS, POPULATION, same_bits

from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedprox import FedProx
from bespoke.algorithms.pfedme import PFedMe
from bespoke.contract import CHECKS, Subject
from bespoke.core import tree
from bespoke.core.settings import Training

pytestmark = pytest.mark.xdist_group("pfedme")


@pytest.mark.parametrize("backend", BACKENDS)
def test_pfedme_finds_the_proximal_point_of_a_quadratic(backend):
    lam, rate, received = 0.7, 0.3, {n: v + 0.5 for n, v in toy.start().items()}
    made, settings = PFedMe(lam=lam, inner_steps=120, inner_lr=0.5), Training(epochs=1, batch=64, lr=rate)
    trained, states, _ = one_round(made, settings, backend, {"model": received}, task=toy.task(toy.Quadratic))
    w, up = received["head.bias"].numpy(), trained.uploads.tree["model"]["head.bias"].numpy()
    for k in range(POPULATION):
        prox = toy.proximal_point(k, w, lam)
        assert np.abs(states[k]["personal"]["head.bias"].numpy() - prox).max() < 1e-10
        # The outer step is the envelope's gradient.
        assert np.abs(up[k] - (w - rate * lam * (w - prox))).max() < 1e-10
        assert np.abs(prox - w).max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_pfedme_with_a_strong_tie_stays_at_w(backend):
    """And with none, w does not move however far theta goes."""
    far = {}
    for lam in (1.0, 100.0, 10_000.0):
        made = PFedMe(lam=lam, inner_steps=10, inner_lr=0.5 / lam)
        _, states, _ = one_round(made, Training(epochs=1, batch=64, lr=1e-9), backend)
        for k in range(POPULATION):
            gap = math.sqrt(tree.sq_dist(states[k]["personal"], toy.start()))
            far.setdefault(lam, []).append(gap)
    for weak, middle, strong in zip(*far.values(), strict=True):
        assert weak > 20 * middle > 400 * strong > 0
    trained, states, _ = one_round(PFedMe(lam=0.0), Training(epochs=3, batch=4, lr=0.1), backend)
    for k in range(POPULATION):
        sent = tree.map(lambda leaf, k=k: leaf[k], trained.uploads.tree["model"])
        assert same_bits(sent, toy.start())
        assert tree.sq_dist(states[k]["personal"], toy.start()) > 1e-3


@pytest.mark.parametrize("check", SWITCHED)
def test_the_contract_holds_for_the_variants_too(check):
    CHECKS[check](Subject(PFedMe(inner_start="w", beta=1.5, inner_steps=2)))
    CHECKS[check](Subject(PFedMe(inner_momentum=0.5, inner_steps=2, personal="w")))
    CHECKS[check](Subject(PFedMe(inner_over="round")))


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_one_inner_step_and_eta_of_one_over_lambda_pfedme_is_fedavg(backend):
    """w_i is then theta after every minibatch, so the tie pulls nowhere, whatever lambda is."""
    usual = Training(epochs=2, batch=4, lr=0.1, momentum=0.6, weight_decay=0.01)
    want = one_round(FedAvg(), usual, backend)[0].uploads.tree["model"]
    for lam in (0.5, 5.0):
        made = PFedMe(lam=lam, inner_steps=1, inner_lr=usual.lr, inner_momentum=usual.momentum)
        trained, states, _ = one_round(made, replace(usual, lr=1.0 / lam), backend)
        assert toy.gap(trained.uploads.tree["model"], want) < 1e-12
        for k in range(POPULATION):
            assert toy.gap(states[k]["personal"], tree.map(lambda leaf, k=k: leaf[k], want)) < 1e-12


def test_over_a_whole_round_with_eta_of_one_over_lambda_it_is_fedprox():
    usual = Training(epochs=2, batch=4, lr=0.1, momentum=0.6, weight_decay=0.01)
    made = PFedMe(lam=5.0, inner_lr=usual.lr, inner_over="round")
    sent = one_round(made, replace(usual, lr=0.2), "loop")[0].uploads.tree["model"]
    assert toy.gap(sent, one_round(FedProx(mu=5.0), usual, "loop")[0].uploads.tree["model"]) < 1e-12


def test_the_global_view_before_aggregation_is_the_model_that_may_be_kept():
    """So that one training shows both readings of the personal model."""
    training = Training(rounds=2, epochs=2, batch=4, lr=0.1)
    shown = {}
    for personal in ("theta", "w"):
        fed = federation(PFedMe(lam=2.0, personal=personal), training, "loop", cohorts=[[0, 1, 2, 3]] * 2, every=2)
        last = list(fed.rounds())[-1]
        before = replace(fed, evaluation=replace(fed.evaluation, when="local"))
        for when, found in (("aggregated", fed.evaluate(last)), ("local", before.evaluate(last))):
            for e in found:
                shown[personal, when, e.view, e.client] = e.metrics
    for k in range(4):
        kept = shown["w", "aggregated", "personal", k]
        assert kept == shown["theta", "local", "global", k] != shown["theta", "aggregated", "personal", k]
        assert kept != shown["theta", "aggregated", "global", k]


def test_over_a_whole_round_the_optimiser_of_training_counts():
    assert PFedMe().ignores and not PFedMe(inner_over="round").ignores
    usual = Training(epochs=2, batch=4, lr=0.1)
    plain, heavy = (
        one_round(PFedMe(lam=2.0, inner_over="round"), replace(usual, momentum=m), "loop")[0] for m in (0.0, 0.5)
    )
    assert toy.gap(plain.uploads.tree["model"], heavy.uploads.tree["model"]) > 1e-4
