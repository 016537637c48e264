"""FedPA's delta against the dense solve, the paper's recursion and the mode of a product of posteriors."""

import numpy as np
import pytest
import torch
from golden.fedpa import recursion, shrunk_covariance

from bespoke.maths import posterior


def vectors(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def as_trees(theta, samples):
    """Vectors of 7 as a tree of a (2, 2) and a (3,) leaf."""
    split = lambda v: {"a": torch.tensor(v[..., :4]).reshape(*v.shape[:-1], 2, 2), "b": torch.tensor(v[..., 4:])}  # noqa: E731
    return split(theta), split(samples)


def as_vector(found):
    return np.concatenate([found["a"].numpy().ravel(), found["b"].numpy()])


@pytest.mark.parametrize("rho", [0.0, 0.01, 1.0, 10.0])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_the_delta_is_the_dense_solve_and_the_papers_recursion(count, rho):
    theta, samples = vectors(count, 7), vectors(count + 10, 6, 7)
    first, stacked = as_trees(theta, samples)
    found = as_vector(posterior.shrunk_delta(first, stacked, torch.tensor(count), rho))
    used = samples[:count]
    sigma = shrunk_covariance(used, rho) if count > 1 else np.eye(7)
    dense = np.linalg.solve(sigma, theta - used.mean(axis=0))
    assert np.abs(found - dense).max() < 1e-10
    assert np.abs(found - recursion(theta, used, rho)).max() < 1e-10
    if rho == 0.0:
        assert np.abs(found - (theta - used.mean(axis=0))).max() < 1e-12
    if rho > 0 and count > 1:  # neither the mean's nor the covariance's part is idle
        assert np.abs(found - (theta - used.mean(axis=0))).max() > 1e-4


def test_the_delta_does_not_depend_on_the_origin():
    theta, samples = vectors(1, 7), vectors(2, 5, 7)
    shift = vectors(3, 7)
    one = posterior.shrunk_delta(*as_trees(theta, samples), torch.tensor(5), 0.7)
    two = posterior.shrunk_delta(*as_trees(theta + shift, samples + shift), torch.tensor(5), 0.7)
    assert np.abs(as_vector(one) - as_vector(two)).max() < 1e-12


def test_posterior_averaging_finds_the_mode_of_the_product_and_fedavg_does_not():
    """Two quadratic clients with other Hessians; samples with exactly their posteriors' means and covariances."""
    h = [np.diag([4.0, 0.5]), np.array([[1.0, 0.4], [0.4, 3.0]])]
    m = [np.array([1.0, -1.0]), np.array([-1.0, 2.0])]
    basis, _ = np.linalg.qr(np.column_stack([np.ones(12), vectors(0, 12, 2)]))
    white = basis[:, 1:] * np.sqrt(11.0)  # mean 0, covariance I
    samples = [a + white @ np.linalg.cholesky(np.linalg.inv(b)).T for a, b in zip(m, h, strict=True)]
    theta = np.zeros(2)
    for _ in range(60):
        deltas = [
            posterior.shrunk_delta({"w": torch.tensor(theta)}, {"w": torch.tensor(s)}, torch.tensor(12), 1e6)["w"]
            for s in samples
        ]
        theta = theta - 0.3 * (deltas[0] + deltas[1]).numpy() / 2.0
    mode = np.linalg.solve(h[0] + h[1], h[0] @ m[0] + h[1] @ m[1])
    assert np.abs(theta - mode).max() < 1e-4
    assert np.abs(np.mean(m, axis=0) - mode).max() > 0.5
