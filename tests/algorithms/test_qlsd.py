"""QLSD: without noise it is gradient descent, and with it the chain samples the posterior."""

import dataclasses

import numpy as np
import pytest
import torch
from golden.common import gradient
from golden_runs import problem, run, training
from toy import BACKENDS, POPULATION, TRAIN_ROWS, gap, task

from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.qlsd import QLSD
from bespoke.core import rng
from bespoke.core.algorithm import Uploads

pytestmark = pytest.mark.xdist_group("qlsd")


@pytest.mark.parametrize("backend", BACKENDS)
def test_qlsd_without_noise_and_quantisation_is_gradient_descent_on_the_sum_of_losses(backend):
    method = QLSD(step=0.3, levels=0, temperature=0.0, prior=2.0)
    ran = run(method, training("plain", rate=1.0, sampling="fixed"), backend)
    given, rows = problem("plain"), sum(TRAIN_ROWS[:POPULATION])
    w = given.start
    for server in ran.server:
        slopes = [gradient(w, given.x[k], given.y[k]) for k in range(POPULATION)]
        total = {n: sum(TRAIN_ROWS[k] * slopes[k][n] for k in range(POPULATION)) + 2.0 * w[n] for n in w}
        w = {n: w[n] - 0.3 / rows * total[n] for n in w}
        assert gap(server["model"], w) < 1e-13
    noisy = run(dataclasses.replace(method, temperature=1.0), training("plain", rate=1.0, sampling="fixed"), backend)
    assert gap(noisy.server[-1]["model"], w) > 1e-2


def test_the_chain_samples_the_posterior():
    """On quadratic losses with exact gradients the chain is Gaussian: mean and variance have closed forms."""
    method, rounds, skip = QLSD(step=0.6, levels=0, prior=2.0, use_memory=False), 2000, 50
    rows = torch.tensor(TRAIN_ROWS[:POPULATION], dtype=torch.float64)
    draws = [np.random.default_rng(seed).normal(size=(POPULATION, 3)) for seed in (1, 2)]
    centre, curvature = torch.tensor(draws[0]), 0.5 + torch.tensor(draws[1]) ** 2
    server = method.server_init(task(), {"w": torch.zeros(3, dtype=torch.float64)}, POPULATION, rng.key(0))
    seen = []
    for r in range(rounds):
        slope = rows[:, None] * curvature * (server["model"]["w"] - centre)
        uploads = Uploads({"sent": {"w": slope}, "rows": rows}, rows, torch.arange(POPULATION))
        server = method.aggregate(task(), server, uploads, rng.stream(rng.key(3), rng.SERVER, r))
        seen.append(server["model"]["w"].numpy())
    seen = np.stack(seen[skip:])
    precision = (rows[:, None] * curvature).sum(dim=0).numpy() + 2.0
    mode = (rows[:, None] * curvature * centre).sum(dim=0).numpy() / precision
    gamma = 0.6 / float(rows.sum())
    variance = 1.0 / (precision * (1.0 - gamma * precision / 2.0))
    effective = len(seen) * gamma * precision / 2.0  # of the chain's correlated samples
    assert (np.abs(seen.mean(axis=0) - mode) < 5.0 * np.sqrt(variance / effective)).all()
    assert np.abs(seen.var(axis=0) / variance - 1.0).max() < 0.2


def test_the_fine_tuned_name_is_the_plain_one_with_five_epochs():
    assert ALGORITHMS["qlsd"]() == QLSD() == QLSD(finetune_epochs=0)
    assert ALGORITHMS["qlsd_ft"]() == QLSD(finetune_epochs=5)
