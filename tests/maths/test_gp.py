"""The Gaussian process on a tree of classes against dense formulas, quadrature and the exact posterior."""

import math

import numpy as np
import pytest
import torch
from golden import pfedgp
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm

from bespoke.core import rng
from bespoke.maths import gp


def toy_node(seed=0, n=9, m=5):
    """Kernel matrices of n train and m new rows, two nodes on some of the rows, and omega."""
    draw = np.random.default_rng(seed)
    z, new = pfedgp.unit(draw.normal(size=(n, 3))), pfedgp.unit(draw.normal(size=(m, 3)))
    side = np.stack([np.sign(draw.normal(size=n)), np.sign(draw.normal(size=n)) * (np.arange(n) % 3 > 0)])
    k = pfedgp.rbf(z, z, 8.0) + pfedgp.JITTER * np.eye(n)
    return k, pfedgp.rbf(new, z, 8.0), side, draw.uniform(0.05, 0.25, size=(2, n)) * np.abs(side)


def test_the_predictive_is_a_dense_gaussian_process_on_the_rows_of_each_node():
    k, cross, side, omega = toy_node()
    mean, variance = gp.predictive(
        *(torch.tensor(a) for a in (k, cross)), 8.0, *(torch.tensor(a) for a in (side, omega))
    )
    for t in range(2):
        rows = side[t] != 0
        assert rows.all() == (t == 0)  # the second node leaves rows out
        inner = np.linalg.inv(k[np.ix_(rows, rows)] + np.diag(1.0 / omega[t, rows]))
        away = cross[:, rows]
        assert np.abs(mean[t].numpy() - away @ inner @ (side[t, rows] / 2.0 / omega[t, rows])).max() < 1e-10
        assert np.abs(variance[t].numpy() - (8.0 - np.diag(away @ inner @ away.T))).max() < 1e-10


def exact_left(k, cross, own, side):
    """P(left) of one new row under the exact posterior of a logistic GP on two rows, on a grid."""
    grid = np.linspace(-14.0, 14.0, 281)
    f = np.stack(np.meshgrid(grid, grid, indexing="ij"), axis=-1).reshape(-1, 2)
    prior = np.exp(-0.5 * ((f @ np.linalg.inv(k)) * f).sum(axis=1))
    weight = prior * expit(side[0] * f[:, 0]) * expit(side[1] * f[:, 1])
    gain = np.linalg.solve(k, cross)
    variance = own - cross @ gain
    x, w = np.polynomial.hermite.hermgauss(40)
    inner = expit((f @ gain)[:, None] + np.sqrt(2.0 * variance) * x) @ w / np.sqrt(np.pi)
    return (weight * inner).sum() / weight.sum()


def test_gibbs_chains_sample_the_exact_posterior():
    k = np.array([[4.0, 1.5], [1.5, 4.0]])
    cross, side = np.array([[2.5, 0.3]]), np.array([[1.0, -1.0]])
    matrix, towards, sides = (torch.tensor(a) for a in (k, cross, side))

    def one(key):
        omega = gp.gibbs(matrix, sides, key, steps=12)
        return gp.left_probability(*gp.predictive(matrix, towards, 4.0, sides, omega), "expected_sigmoid")[0, 0]

    found = torch.func.vmap(one)(rng.fold_in(rng.key(9), torch.arange(3000)))
    want = exact_left(k, cross[0], 4.0, side[0])
    assert abs(found.mean().item() - want) < 5.0 * found.std().item() / math.sqrt(len(found))
    assert abs(want - 0.5) > 0.1
    omega = gp.mean_field(matrix, sides)
    near = gp.left_probability(*gp.predictive(matrix, towards, 4.0, sides, omega), "expected_sigmoid")[0, 0]
    assert abs(near.item() - want) < 0.05


@pytest.mark.parametrize("mean", [-3.0, 0.0, 1.7])
@pytest.mark.parametrize("variance", [0.01, 1.0, 8.0])
def test_the_links_by_quadrature(mean, variance):
    average = lambda fn: quad(lambda f: fn(f) * norm.pdf(f, mean, math.sqrt(variance)), -25, 25, points=[mean])[0]  # noqa: E731
    m, v = torch.tensor([mean], dtype=torch.float64), torch.tensor([variance], dtype=torch.float64)
    assert gp.left_probability(m, v, "expected_sigmoid").item() == pytest.approx(average(expit), abs=2e-4)
    want = math.exp(average(lambda f: -np.logaddexp(0.0, -f)))
    assert gp.left_probability(m, v, "exp_log").item() == pytest.approx(want, abs=1e-3)
    if mean == 0.0:  # far from all rows: an even guess, or not
        assert gp.left_probability(m, v, "expected_sigmoid").item() == pytest.approx(0.5, abs=1e-12)
        if variance == 8.0:
            assert gp.left_probability(m, v, "exp_log").item() == pytest.approx(0.263, abs=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_the_tree_is_that_of_the_equations(seed):
    draw = np.random.default_rng(seed)
    present = np.sort(draw.choice(8, size=draw.integers(1, 9), replace=False))
    z = draw.normal(size=(8, 3)) * [3.0, 1.0, 1.0]
    if seed % 3 == 0:
        z[:] = z[0]  # nothing tells the classes apart
    found = gp.class_tree(torch.tensor(z), torch.isin(torch.arange(8), torch.tensor(present))).numpy()
    nodes = pfedgp.class_tree(z[present], present)
    assert found.shape == (7, 8) and len(nodes) == len(present) - 1
    want = np.zeros((7, 8))
    for row, (left, right) in zip(want, nodes, strict=False):
        row[left], row[right] = 1.0, -1.0
    assert np.array_equal(found, want)


def test_a_subset_has_as_many_rows_of_each_class_as_their_share():
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 10 + [0] * 20)  # the last 20 are padding
    rows, mask = gp.subset(y, torch.tensor(100), 50, rng.key(3))
    assert mask.all() and len(rows) == 50 == len(set(rows.tolist())) and rows.max() < 100
    assert torch.bincount(y[rows]).tolist() == [30, 15, 5]
    few, real = gp.subset(y, torch.tensor(40), 50, rng.key(3))
    assert few[:40].tolist() == list(range(40)) and real.sum() == 40
