"""Projection on the simplex and quadratic programmes on it, against SciPy and closed forms."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from bespoke.core import rng
from bespoke.maths import simplex


def test_projection_is_the_nearest_point_of_the_simplex():
    v = 2.0 * rng.normal(rng.key(0), (200, 7), torch.float64)
    a = simplex.project(v)
    assert a.min() >= 0.0 and (a.sum(dim=1) - 1.0).abs().max() < 1e-14
    # nearest: v - a has no component towards any corner
    assert ((v - a)[:, None, :] * (torch.eye(7, dtype=torch.float64) - a[:, None, :])).sum(dim=-1).max() < 1e-13
    assert torch.equal(simplex.project(torch.eye(3)), torch.eye(3))
    assert torch.allclose(simplex.project(torch.zeros(5)), torch.full((5,), 0.2))
    assert (a > 0).double().mean() < 0.9


@pytest.mark.parametrize("m", [2, 5, 12])
def test_programmes_against_scipy(m):
    factor, b = rng.normal(rng.key(1), (m, m), torch.float64), rng.normal(rng.key(2), (4, m), torch.float64)
    q = factor @ factor.T + 0.01 * torch.eye(m, dtype=torch.float64)
    found = simplex.minimise(q, b).numpy()
    for a, row in zip(found, b.numpy(), strict=True):
        want = minimize(
            lambda x, row=row: 0.5 * x @ q.numpy() @ x - row @ x,
            np.full(m, 1.0 / m),
            jac=lambda x, row=row: q.numpy() @ x - row,
            method="SLSQP",
            bounds=[(0.0, 1.0)] * m,
            constraints={"type": "eq", "fun": lambda x: x.sum() - 1.0, "jac": np.ones_like},
            options={"ftol": 1e-15, "maxiter": 1000},
        )
        assert np.abs(a - want.x).max() < 1e-6
        slope = q.numpy() @ a - row  # optimal to rounding: equal where a > 0, no smaller elsewhere
        assert slope[a > 1e-9].max() - slope.min() < 1e-10
    assert (found == 0).any() or m == 2


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
