"""pFedBreD: with the global model for prior it is pFedMe; on a quadratic it finds the proximal point of its prior."""

import numpy as np
import pytest
import toy
from golden.minibatch import gradient, step
from golden.pfedbred import FIELDS, pfedme
from golden_runs import SMALL, library, one_round, problem, recorded, run, training
from toy import BACKENDS, CLASSES, POPULATION, gap, same_bits

from bespoke.algorithms.pfedbred import PFedBreD

pytestmark = pytest.mark.xdist_group("pfedbred")


@pytest.mark.parametrize("backend", BACKENDS)
def test_pfedbred_with_the_global_model_for_prior_is_pfedme(backend):
    ran = run(PFedBreD(**FIELDS | {"prior": "meg", "eta": 0.0}), training("plain", epochs=3), backend)
    cohorts = [row["cohort"] for row in ran.rounds()]
    server, own = pfedme(problem("plain", cohorts), FIELDS["lam"], FIELDS["prox_steps"], FIELDS["prox_lr"])
    assert max(gap(a["model"], b) for a, b in zip(ran.server, server, strict=True)) < 1e-12
    assert max(gap(ran.states[-1][k]["personal"], own[k]) for k in own) < 1e-12
    moved = library("pfedbred/meg", "plain", backend).server[-1]["model"]
    assert gap(moved, server[-1]) > 1e-3


@pytest.mark.parametrize("prior", ["meg", "lg"])
def test_the_personal_model_is_the_proximal_point_of_its_prior(prior):
    """On a quadratic: (H + lambda)^-1 (H z + lambda s), with s = w in a first round, or w - eta H (w - z)."""
    method = PFedBreD(prior=prior, eta=0.2, lam=3.0, prox_steps=200, prox_lr=0.1)
    _, states, _ = one_round(method, training("plain", epochs=1), "batched", task=toy.task(toy.OwnQuadratic))
    w = toy.start()["head.bias"].numpy()
    for k, x in enumerate(problem("plain").x[:POPULATION]):
        z, h = x[:, :CLASSES].mean(axis=0), 0.3 + (x[:, :CLASSES] ** 2).mean(axis=0)
        s = w - 0.2 * h * (w - z) if prior == "lg" else w
        found = states[k]["personal"]["head.bias"].numpy()
        assert np.abs(found - (h * z + 3.0 * s) / (h + 3.0)).max() < 1e-10
        assert np.abs(found - w).max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_meta_step_looks_ahead_on_one_batch_and_learns_on_the_next(backend):
    """Without a tie w moves by the meta step alone, and theta descends on the second batch."""
    method = PFedBreD(prior="mh", eta=0.0, lam=0.0, prox_steps=1, prox_lr=0.2, meta_lr=0.3)
    trained, states, _ = one_round(method, training("plain", **SMALL), backend)
    for k, (x, y) in enumerate(zip(problem("plain").x[:POPULATION], problem("plain").y, strict=False)):
        w, rows = toy.arrays()[2], recorded(2)[1, k]
        for first, second in zip(rows[::2], rows[1::2], strict=True):
            ahead = step(w, gradient(w, x[first], y[first]), 0.3)
            w = step(w, gradient(ahead, x[second], y[second]), 0.3)
            theta = step(w, gradient(w, x[second], y[second]), 0.2)
        assert gap({n: leaf[k] for n, leaf in trained.uploads.tree["model"].items()}, w) < 1e-12
        assert gap(states[k]["personal"], theta) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_before_anything_is_remembered_the_priors_mean_is_the_global_model(backend):
    def sent(eta, epochs):
        method = PFedBreD(**FIELDS | {"prior": "meg", "eta": eta})
        return one_round(method, training("plain", epochs=epochs), backend)[0].uploads.tree

    assert same_bits(sent(0.0, epochs=1), sent(0.9, epochs=1))
    assert not same_bits(sent(0.0, epochs=2), sent(0.9, epochs=2))  # the second repetition remembers the first
