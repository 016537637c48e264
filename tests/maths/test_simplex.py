"""Quadratic programmes on the simplex, against all faces, optimality conditions and closed forms."""

import numpy as np
import pytest
import torch
from golden.fedpac import simplex_minimum

from bespoke.core import rng
from bespoke.maths import simplex


def clients_of_few_classes(count, alpha, mismatch):
    """Variances and vectors like those of FedPAC: shares of ten classes times means that nearly agree."""
    draw = np.random.default_rng(0)
    means = np.abs(draw.normal(size=(10, 16)))
    shares, rows = draw.dirichlet(np.full(10, alpha), size=count), draw.uniform(50, 1200, size=count)
    h = shares[:, :, None] * (means + mismatch * draw.normal(size=(count, 10, 16)))
    variance = (2.0 * np.square(means).sum(axis=1).mean() - np.square(h).sum(axis=(1, 2))) / rows
    return variance, h.reshape(count, -1)


@pytest.mark.parametrize("m", [1, 2, 5, 9])
def test_the_shortest_vector_is_the_best_of_all_faces(m):
    for seed in range(20):
        factor = rng.normal(rng.key(seed), (m, m), torch.float64).numpy()
        q = factor @ factor.T + (0.3 if seed % 2 else 1e-4) * np.eye(m)
        for first in (0, m - 1):
            a = simplex.shortest(q, first)
            assert a.min() >= 0.0 and abs(a.sum() - 1.0) < 1e-14
            assert np.abs(a - simplex_minimum(q)).max() < 1e-9


@pytest.mark.parametrize(("alpha", "mismatch"), [(0.1, 0.0), (0.1, 0.05), (0.5, 0.0)])
def test_mixtures_are_optimal_where_many_clients_are_mixtures_of_others(alpha, mismatch):
    """Of 100 clients with few classes and equal class means, most can be written by others in many ways."""
    variance, h = clients_of_few_classes(100, alpha, mismatch)
    found = simplex.mixtures(torch.from_numpy(variance), torch.from_numpy(h), 0.0).numpy()
    for i in range(0, 100, 7):
        apart = h[i] - h
        slope = apart @ (apart.T @ found[i]) + variance * found[i]  # half of the gradient
        least = found[i] @ slope  # the programme's value
        assert slope.min() > least * (1.0 - 1e-4)  # no direction leads down; the ridge is 1e-8 of the spread
        assert np.abs(slope[found[i] > 1e-6] / least - 1.0).max() < 1e-3
    assert (np.diag(found) < 0.9).any() and (found > 0).sum(axis=1).max() < 40


def test_mixtures_sum_to_one_and_follow_the_closed_form_of_two():
    h, v = rng.normal(rng.key(3), (2, 6), torch.float64), torch.tensor([0.7, 0.2], dtype=torch.float64)
    a, far = simplex.mixtures(v, h, 0.0), (h[0] - h[1]).square().sum()
    assert (a[0, 0] - (v[1] + far) / (v.sum() + far)).abs() < 1e-7  # up to the ridge of 1e-8
    assert (a[1, 1] - (v[0] + far) / (v.sum() + far)).abs() < 1e-7
    h, v = rng.normal(rng.key(4), (9, 6), torch.float64), rng.uniform(rng.key(5), (9,), torch.float64)
    for smallest in (0.0, 1e-3, 0.2, 1.0):
        a = simplex.mixtures(v, h, smallest)
        assert a.min() >= 0.0 and (a.sum(dim=1) - 1.0).abs().max() < 1e-14
        assert ((a == 0) | (a > smallest) | (a == a.amax(dim=1, keepdim=True))).all()
    assert torch.equal(simplex.mixtures(v[:1], h[:1], 1e-3), torch.ones(1, 1, dtype=torch.float64))
    nothing = simplex.mixtures(torch.zeros(3), torch.zeros(3, 4), 1e-3)
    assert torch.allclose(nothing, torch.full((3, 3), 1 / 3, dtype=torch.float64))
