"""The search for beta against L-BFGS-B, fine grids and finite differences, on an objective written in NumPy."""

import functools

import numpy as np
import pytest
import torch
from golden import pfedfda
from golden.gaussians import class_means, covariance, log_prior
from scipy.optimize import minimize
from torch.func import vmap

from bespoke.maths import interpolation
from bespoke.maths.gaussian import Gaussians
from bespoke.maths.interpolation import Fold, cross_validated_beta

AMOUNT = 1e-4


def tensor(value):
    return torch.from_numpy(np.asarray(value, dtype=float))


def draw_problem(seed, d=None, n=None):
    """Folds (means, covariance, held-out rows), shared statistics, features, labels, log prior.

    A client's rows differ more or less from what is shared, in place and in spread.
    """
    draw = np.random.default_rng(seed)
    d, classes, n = d or draw.integers(2, 9), 3, n or draw.integers(6, 40)
    centres = draw.normal(size=(classes, d)) * draw.choice([0.3, 1.0, 2.0])
    a, b = draw.normal(size=(2, d, d))
    shared_cov, cov = a @ a.T / d + 0.3 * np.eye(d), b @ b.T / d * draw.choice([0.1, 1.0, 10.0]) + 0.05 * np.eye(d)
    own = centres + draw.choice([0.0, 0.3, 1.0, 3.0]) * draw.normal(size=(classes, d))
    y = draw.permutation(np.arange(n) % classes)
    z = own[y] + draw.multivariate_normal(np.zeros(d), cov, size=n)
    ridge, part = draw.choice([1.0, 1e-2, 1e-4]), draw.permutation(np.arange(n) % 2)
    folds = []
    for k in range(2):
        rest = part != k
        mu = class_means(z[rest], y[rest], centres)
        folds.append((mu, covariance(z[rest], y[rest], mu, ridge), part == k))
    return folds, (centres, shared_cov), z, y, log_prior(y, classes, 1e-4)


def in_torch(problem):
    folds, shared, z, y, prior = problem
    made = [Fold(Gaussians(tensor(m), tensor(c)), tensor(out)) for m, c, out in folds]
    return made, Gaussians(tensor(shared[0]), tensor(shared[1])), tensor(z), torch.from_numpy(y), tensor(prior)


def found(problem, two=False):
    return cross_validated_beta(*in_torch(problem), two=two, amount=AMOUNT).numpy()


def loss_of(problem):
    return pfedfda.validation_loss(*problem, AMOUNT)


# --- one beta -------------------------------------------------------------------------------------------------


@functools.cache
def best_single(seed):
    loss = loss_of(draw_problem(seed))
    ends = [
        minimize(
            lambda b: loss(b[0], b[0]),
            [start],
            jac=lambda b: np.array([pfedfda.complex_slope(loss, (b[0], b[0]), (1.0, 1.0))]),
            method="L-BFGS-B",
            bounds=[(0.0, 1.0)],
            options={"ftol": 1e-15, "gtol": 1e-10},
        )
        for start in (0.0, 0.1, 0.5, 0.9, 1.0)
    ]
    best = min(ends, key=lambda e: e.fun)
    return float(best.x[0]), float(best.fun)


SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_beta_is_what_l_bfgs_b_finds(seed):
    problem = draw_problem(seed)
    beta, loss = found(problem), loss_of(problem)
    assert beta[0] == beta[1] and 0.0 <= beta[0] <= 1.0
    want, least = best_single(seed)
    assert loss(*beta) - least < 1e-6
    if least > 1e-6:  # else everything fits, and many betas are as good
        assert abs(beta[0] - want) < 1e-3


def test_the_problems_have_optima_inside_and_at_both_ends():
    betas = [best_single(seed)[0] for seed in SEEDS]
    assert sum(b == 0.0 for b in betas) >= 3
    assert sum(b == 1.0 for b in betas) >= 3
    assert sum(0.01 < b < 0.99 for b in betas) >= 15
    at_the_ends = [seed for seed in SEEDS if best_single(seed)[0] in (0.0, 1.0) and best_single(seed)[1] > 1e-6]
    assert {float(found(draw_problem(seed))[0]) for seed in at_the_ends} == {0.0, 1.0}  # exactly


def test_the_search_equals_its_transcription():
    for seed in range(20):
        problem = draw_problem(seed)
        assert np.abs(found(problem) - pfedfda.search(loss_of(problem), two=False)).max() < 1e-12, seed


# --- objective and derivative ---------------------------------------------------------------------------------


def objective(problem):
    folds, shared, z, y, prior = in_torch(problem)
    return interpolation._Objective(folds, shared, z, y, prior, AMOUNT)


@pytest.mark.parametrize("seed", range(5))
def test_objective_and_derivative(seed):
    problem = draw_problem(seed)
    made, loss = objective(problem), loss_of(problem)
    means, covs = tensor([0.0, 0.3, 0.7, 1.0]), tensor([0.2, 0.3, 0.0, 0.9])
    points = torch.stack([means, covs], dim=1)
    values = made(points)
    pairs = list(zip(means.tolist(), covs.tolist(), strict=True))
    assert np.abs(values.numpy() - [loss(a, b) for a, b in pairs]).max() < 1e-10
    for along in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        slopes = made.slope(points, tensor(along).expand(4, 2)).numpy()
        exact = np.array([pfedfda.complex_slope(loss, p, along) for p in pairs])
        assert np.abs(slopes - exact).max() < 1e-9 * max(1.0, np.abs(exact).max())
        h = 1e-6
        ahead, behind = (np.array([loss(a + s * along[0], b + s * along[1]) for a, b in pairs]) for s in (h, -h))
        assert np.abs(slopes - (ahead - behind) / (2 * h)).max() < 1e-5 * max(1.0, np.abs(exact).max())
    assert np.abs(exact).max() > 1e-3


# --- two betas ------------------------------------------------------------------------------------------------


def mild_problem(seed):
    """A client like others: enough rows, and features that the shared statistics describe fairly well."""
    draw = np.random.default_rng(1000 + seed)
    d, classes, n = 5, 3, 36
    centres = draw.normal(size=(classes, d))
    a = draw.normal(size=(d, d))
    shared_cov = a @ a.T / d + np.eye(d)
    y = draw.permutation(np.arange(n) % classes)
    noise = draw.multivariate_normal(np.zeros(d), shared_cov * draw.choice([0.5, 2.0]), size=n)
    z = (centres + 0.7 * draw.normal(size=(classes, d)))[y] + noise
    part, folds = draw.permutation(np.arange(n) % 2), []
    for k in range(2):
        rest = part != k
        mu = class_means(z[rest], y[rest], centres)
        folds.append((mu, covariance(z[rest], y[rest], mu, 1.0), part == k))
    return folds, (centres, shared_cov), z, y, log_prior(y, classes, 1e-4)


@functools.cache
def mild_pair(seed):
    return found(mild_problem(seed), two=True)


@pytest.mark.parametrize("seed", range(8))
def test_two_betas_against_a_fine_grid(seed):
    problem = mild_problem(seed)
    beta, loss = mild_pair(seed), loss_of(problem)
    axis = torch.linspace(0.0, 1.0, 101, dtype=torch.float64)
    grid = objective(problem)(torch.cartesian_prod(axis, axis))
    assert loss(*beta) <= float(grid.min()) + 1e-6
    nearest = int(grid.argmin())
    assert np.abs(beta - [axis[nearest // 101], axis[nearest % 101]]).max() < 0.02
    assert loss(*beta) <= loss(*found(problem)) + 1e-9  # never worse than one beta for both


def test_two_betas_are_two():
    pairs = [mild_pair(seed) for seed in range(8)]
    assert any(0.01 < a < 0.99 for a, _ in pairs) and any(0.01 < b < 0.99 for _, b in pairs)
    assert any(abs(a - b) > 0.1 for a, b in pairs)


@pytest.mark.parametrize("seed", range(12))
def test_two_betas_are_what_l_bfgs_b_finds(seed):
    problem = draw_problem(seed)
    beta, loss = found(problem, two=True), loss_of(problem)
    ends = [
        minimize(
            lambda b: loss(*b),
            start,
            jac=lambda b: np.array([pfedfda.complex_slope(loss, b, way) for way in np.eye(2)]),
            method="L-BFGS-B",
            bounds=[(0.0, 1.0)] * 2,
            options={"ftol": 1e-15, "gtol": 1e-10},
        )
        for start in ((0.5, 0.5), (0.1, 0.9), (0.9, 0.1))
    ]
    best = min(ends, key=lambda e: e.fun)
    assert loss(*beta) - best.fun < 1e-6
    if best.fun > 1e-6:
        assert np.abs(beta - best.x).max() < 1e-3


def test_the_search_for_two_equals_its_transcription():
    for seed in (0, 1):
        problem = draw_problem(seed)
        assert np.abs(found(problem, True) - pfedfda.search(loss_of(problem), two=True)).max() < 1e-12


# --- corners --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("two", [False, True])
def test_without_held_out_rows_the_shared_statistics_are_used(two):
    for empty in ((0,), (1,), (0, 1)):
        folds, *rest = draw_problem(3)
        folds = [(m, c, np.zeros_like(out) if k in empty else out) for k, (m, c, out) in enumerate(folds)]
        assert np.array_equal(found((folds, *rest), two), [0.0, 0.0])
    assert found(draw_problem(3), two).max() > 0.0


def test_where_the_data_do_not_tell_the_shared_statistics_are_used():
    """Own statistics equal to the shared ones, or classes so far apart that every beta fits."""
    folds, shared, z, y, prior = draw_problem(3)
    same = [(*shared, out) for *_, out in folds]
    assert np.array_equal(found((same, shared, z, y, prior)), [0.0, 0.0])
    far = 300.0 * np.eye(3, z.shape[1])
    folds = [(far, np.eye(z.shape[1]), out) for *_, out in folds]
    assert np.array_equal(found((folds, (far, 2.0 * np.eye(z.shape[1])), z + far[y], y, prior)), [0.0, 0.0])


def test_rounding_decides_nothing():
    """Nearly separable clients, for whom many betas are all but equal: a change in the 15th digit changes no beta."""
    for seed in range(60):
        draw = np.random.default_rng(seed)
        centres = 4.0 * draw.normal(size=(3, 6))
        y, part = draw.integers(0, 3, 24), np.arange(24) % 2
        z = (centres + draw.normal(size=(3, 6)))[y] + draw.normal(size=(24, 6))
        folds = []
        for k in range(2):
            mu = class_means(z[part != k], y[part != k], centres)
            folds.append((mu, covariance(z[part != k], y[part != k], mu, 1.0), part == k))
        problem = folds, (centres, np.eye(6)), z, y, log_prior(y, 3, 1e-4)
        nudged = [(m * (1 + 1e-15 * draw.normal(size=m.shape)), c, out) for m, c, out in folds]
        other = nudged, problem[1], z * (1 + 1e-15 * draw.normal(size=z.shape)), y, problem[4]
        assert np.abs(found(problem) - found(other)).max() < 1e-6, seed


def test_a_statistic_that_is_not_finite_falls_back_to_the_shared_ones():
    folds, *rest = draw_problem(3)
    folds = [(m, np.full_like(c, np.nan), out) for m, c, out in folds]
    assert np.array_equal(found((folds, *rest)), [0.0, 0.0])


def test_a_common_shift_changes_nothing():
    folds, shared, z, y, prior = problem = draw_problem(5)
    shift = 1e3 * np.random.default_rng(0).normal(size=z.shape[1])
    moved = [(m + shift, c, out) for m, c, out in folds], (shared[0] + shift, shared[1]), z + shift, y, prior
    assert np.abs(found(problem) - found(moved)).max() < 1e-5
    assert 0.01 < found(problem)[0] < 0.99


@pytest.mark.parametrize("two", [False, True])
def test_mapped_over_clients_and_one_by_one(two):
    problems = [draw_problem(seed, d=4, n=18) for seed in range(4 if two else 20)]
    made = [in_torch(p) for p in problems]
    flat = [[*(t for f in folds for t in (*f.stats, f.held_out)), *shared, *rest] for folds, shared, *rest in made]

    def search(m0, c0, out0, m1, c1, out1, mean, cov, z, y, prior):
        folds = [Fold(Gaussians(m0, c0), out0), Fold(Gaussians(m1, c1), out1)]
        return cross_validated_beta(folds, Gaussians(mean, cov), z, y, prior, two=two, amount=AMOUNT)

    together = vmap(search)(*(torch.stack(parts) for parts in zip(*flat, strict=True)))
    alone = torch.stack([search(*parts) for parts in flat])
    assert (together - alone).abs().max() < 1e-12
    assert len({round(b, 6) for b in alone[:, 0].tolist()}) > 2


def test_the_answer_has_the_type_of_the_features():
    folds, shared, z, y, prior = in_torch(draw_problem(5))
    single = [Fold(Gaussians(f.stats.mean.float(), f.stats.cov.float()), f.held_out.float()) for f in folds]
    beta = cross_validated_beta(
        single, Gaussians(*(t.float() for t in shared)), z.float(), y, prior.float(), two=False, amount=AMOUNT
    )
    assert beta.dtype == torch.float32
    assert abs(float(beta[0]) - found(draw_problem(5))[0]) < 1e-3
