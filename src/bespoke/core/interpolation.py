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
PLANE, SWEEPS, AHEAD = 11, 4, 32.0  # two betas: an 11 x 11 grid, then coordinate steps, each sweep drawn out so far
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

    def __call__(self, beta: Tensor) -> Tensor:
        """The loss at betas (g, 2) for means and covariance: (g,)."""
        return self._evaluate(beta, None)

    def slope(self, beta: Tensor, along: Tensor) -> Tensor:
        """The derivative at betas (g, 2) along directions (g, 2): (g,)."""
        return self._evaluate(beta, along)

    def _evaluate(self, beta: Tensor, along: Tensor | None) -> Tensor:
        total = torch.zeros_like(beta[:, 0])
        by_mean, by_cov = beta[:, :, None, None].unbind(dim=1)  # (g, 1, 1)
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
            along_mean, along_cov = along[:, :, None, None].unbind(dim=1)
            d_mean, d_cov = along_mean * mean_gap, along_cov * cov_gap
            d_w = solve(cov, d_mean.mT - d_cov @ w)
            d_bias = -0.5 * ((d_mean * w.mT).sum(dim=-1) + (mean * d_w.mT).sum(dim=-1))
            d_logits = self.z @ d_w + d_bias[:, None, :]
            d_own = d_logits.gather(-1, self.y[None, :, None].expand(len(logits), -1, 1))[..., 0]
            change = (torch.softmax(logits, dim=-1) * d_logits).sum(dim=-1) - d_own
            total = total + (change * share).sum(dim=-1)
        return total


def _bisect(objective: _Objective, beta: Tensor, along: Tensor, back: float, ahead: float) -> Tensor:
    """Move each of ``beta`` (g, 2) to where the derivative along its direction (g, 2) changes sign.

    At most so far back and ahead; never uphill, and never out of [0, 1].
    """
    ends, fixed = torch.stack([-beta, 1.0 - beta]) / along, along == 0
    low = torch.where(fixed, -back, ends.amin(dim=0)).amax(dim=1).clamp(min=-back)[:, None]
    high = torch.where(fixed, ahead, ends.amax(dim=0)).amin(dim=1).clamp(max=ahead)[:, None]
    for _ in range(HALVINGS + 1):
        middle = (low + high) / 2
        falling = objective.slope(beta + middle * along, along)[:, None] < 0
        low, high = torch.where(falling, middle, low), torch.where(falling, high, middle)
    found = beta + (low + high) / 2 * along
    # An end of the interval is a candidate too: there the derivative need not vanish.
    found = torch.where(found < 1e-6, torch.zeros_like(found), found)
    found = torch.where(found > 1.0 - 1e-6, torch.ones_like(found), found)
    better = objective(found) < objective(beta) - TIE
    return torch.where(better[:, None], found, beta)


def _best(beta: Tensor, losses: Tensor) -> Tensor:
    """Of betas (..., g, 2) with losses (..., g) the first that is as good as any, (..., 2); the first if all is NaN."""
    place = (losses <= losses.amin(dim=-1, keepdim=True) + TIE).to(torch.int8).argmax(dim=-1)
    return torch.take_along_dim(beta, place[..., None, None], dim=-2)[..., 0, :]


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
    if two:
        axis, step = torch.linspace(0.0, 1.0, PLANE, dtype=torch.float64, device=z.device), 1.0 / (PLANE - 1)
        plane = torch.cartesian_prod(axis, axis)
        by_mean, by_cov = (unit[None] for unit in torch.eye(2, dtype=torch.float64, device=z.device))
        # For each beta of the means the best of the covariance: valleys may be narrower than the grid.
        line = _best(plane.reshape(PLANE, PLANE, 2), objective(plane).reshape(PLANE, PLANE))
        line = _bisect(objective, line, by_cov.expand(PLANE, 2), step, step)
        beta = _best(line, objective(line))[None]
        for _ in range(SWEEPS):
            before = beta
            for along in (by_mean, by_cov):
                beta = _bisect(objective, beta, along, step, step)
            # Sweeps creep along a valley, so go on in the direction of this one.
            beta = _bisect(objective, beta, beta - before, 0.0, AHEAD)
    else:
        line, step = torch.linspace(0.0, 1.0, GRID, dtype=torch.float64, device=z.device)[:, None], 1.0 / (GRID - 1)
        line = line.expand(GRID, 2)
        beta = _best(line, objective(line))[None]
        beta = _bisect(objective, beta, torch.ones_like(beta), step, step)
    possible = torch.stack([f.held_out.sum() > 0 for f in folds]).all()
    return torch.where(possible, beta[0], torch.zeros_like(beta[0])).to(z.dtype)
