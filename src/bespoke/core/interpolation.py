"""How much of a client's own Gaussians to use: beta in [0, 1] by cross-validation, found by a deterministic search.

The objective is exact: the sum over folds of the mean cross entropy, on a fold's held-out rows, of the classifier made
from beta * own + (1 - beta) * shared statistics. A grid finds the basin, bisection of the exact derivative the bottom.
Fixed shapes and no decompositions but Cholesky: it maps over clients and can be captured.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bespoke.core.gaussian import Gaussians, shrink, solve

GRID, HALVINGS = 21, 17  # 0.1 / 2**17 < 1e-6
PLANE, SWEEPS = 6, 8  # two betas: a 6 x 6 grid, then coordinate steps
TIE = 1e-12  # losses so close are equal: where the data do not tell, rounding must not


class Fold(NamedTuple):
    """Statistics of the rows outside a fold, and weights (n,) of the rows in it."""

    stats: Gaussians
    held_out: Tensor


class _Objective(NamedTuple):
    folds: Sequence[Fold]
    shared: Gaussians
    z: Tensor  # (n, d)
    y: Tensor  # (n,)
    log_prior: Tensor  # (C,)
    amount: float

    def __call__(self, mean_beta: Tensor, cov_beta: Tensor) -> Tensor:
        """The loss at betas (g,): (g,)."""
        return self._evaluate(mean_beta, cov_beta, None)

    def slope(self, mean_beta: Tensor, cov_beta: Tensor, along: tuple[float, float]) -> Tensor:
        """The derivative at betas (g,) along a direction (means, covariance): (g,)."""
        return self._evaluate(mean_beta, cov_beta, along)

    def _evaluate(self, mean_beta: Tensor, cov_beta: Tensor, along: tuple[float, float] | None) -> Tensor:
        total = torch.zeros_like(mean_beta)
        by_mean, by_cov = mean_beta[:, None, None], cov_beta[:, None, None]
        global_cov = shrink(self.shared.cov, self.amount)
        for stats, weight in self.folds:
            mean_gap, cov_gap = stats.mean - self.shared.mean, shrink(stats.cov, self.amount) - global_cov
            mean = self.shared.mean + by_mean * mean_gap  # (g, C, d)
            cov = global_cov + by_cov * cov_gap  # (g, d, d)
            w = solve(cov, mean.mT)  # (g, d, C)
            bias = -0.5 * (mean * w.mT).sum(dim=-1) + self.log_prior
            logits = self.z @ w + bias[:, None, :]  # (g, n, C)
            share = weight / weight.sum().clamp(min=1.0)
            if along is None:
                own = logits.gather(-1, self.y[None, :, None].expand(len(logits), -1, 1))[..., 0]
                total = total + ((torch.logsumexp(logits, dim=-1) - own) * share).sum(dim=-1)
                continue
            d_mean, d_cov = along[0] * mean_gap, along[1] * cov_gap
            d_w = solve(cov, d_mean.mT - d_cov @ w)
            d_bias = -0.5 * ((d_mean * w.mT).sum(dim=-1) + (mean * d_w.mT).sum(dim=-1))
            d_logits = self.z @ d_w + d_bias[:, None, :]
            d_own = d_logits.gather(-1, self.y[None, :, None].expand(len(logits), -1, 1))[..., 0]
            change = (torch.softmax(logits, dim=-1) * d_logits).sum(dim=-1) - d_own
            total = total + (change * share).sum(dim=-1)
        return total


def _bisect(objective: _Objective, beta: Tensor, step: float, along: tuple[float, float]) -> Tensor:
    """Move ``beta`` (2,) along a direction to where the derivative changes sign within one grid step; never uphill."""
    direction = beta.new_tensor(along)
    moving = direction > 0
    low = torch.where(moving, (beta - step).clamp(min=0.0), beta)
    high = torch.where(moving, (beta + step).clamp(max=1.0), beta)
    start = beta
    for _ in range(HALVINGS + 1):
        middle = (low + high) / 2
        falling = objective.slope(middle[:1], middle[1:], along)[0] < 0
        low, high = torch.where(falling, middle, low), torch.where(falling, high, middle)
    # An end of the interval is a candidate too: there the derivative need not vanish.
    found = (low + high) / 2
    found = torch.where(moving & (found < 1e-6), torch.zeros_like(found), found)
    found = torch.where(moving & (found > 1.0 - 1e-6), torch.ones_like(found), found)
    losses = objective(torch.stack([start[0], found[0]]), torch.stack([start[1], found[1]]))
    return torch.where(losses[1] < losses[0] - TIE, found, start)


def cross_validated_beta(
    folds: Sequence[Fold], shared: Gaussians, z: Tensor, y: Tensor, log_prior: Tensor, *, two: bool, amount: float
) -> Tensor:
    """The betas (2,) for means and covariance that minimise the cross-validated loss; equal unless ``two``.

    z (n, d), y (n,), log_prior (C,). Without a held-out row in every fold the answer is 0: the shared statistics.
    """
    centre = shared.mean.mean(dim=0).double()  # a common shift changes no posterior, and saves digits

    def prepared(stats: Gaussians) -> Gaussians:
        return Gaussians(stats.mean.double() - centre, stats.cov.double())

    ready = [Fold(prepared(f.stats), f.held_out.double()) for f in folds]
    objective = _Objective(ready, prepared(shared), z.double() - centre, y, log_prior.double(), amount)
    directions: tuple[tuple[float, float], ...]
    if two:
        axis = torch.linspace(0.0, 1.0, PLANE, dtype=torch.float64, device=z.device)
        means, covs = axis.repeat_interleave(PLANE), axis.repeat(PLANE)
        directions, step, sweeps = ((1.0, 0.0), (0.0, 1.0)), 1.0 / (PLANE - 1), SWEEPS
    else:
        means = covs = torch.linspace(0.0, 1.0, GRID, dtype=torch.float64, device=z.device)
        directions, step, sweeps = ((1.0, 1.0),), 1.0 / (GRID - 1), 1
    losses = objective(means, covs)
    best = (losses <= losses.min() + TIE).to(torch.int8).argmax()  # the first; the shared statistics if all is NaN
    beta = torch.stack([means, covs]).index_select(1, best[None])[:, 0]
    for _ in range(sweeps):
        for along in directions:
            beta = _bisect(objective, beta, step, along)
    possible = torch.stack([f.held_out.sum() > 0 for f in folds]).all()
    return torch.where(possible, beta, torch.zeros_like(beta)).to(z.dtype)
