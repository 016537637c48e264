"""How much of a client's own Gaussians to use: beta in [0, 1] by cross-validation, found by a deterministic search.

The objective is exact: the sum over folds of the mean cross entropy, on a fold's held-out rows, of the classifier made
from beta * own + (1 - beta) * shared statistics. A grid finds the basin; bisection of the exact derivative closes in on
the bottom, and the answer is where the line through the last two derivatives crosses zero. Shapes are fixed and the
only decomposition is Cholesky: it maps over clients and can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bespoke.maths.gaussian import Gaussians, factorise, shrink, solve_factored

GRID, QUARTERINGS = 21, 4  # 0.1 / 4**4 < 4e-4, and a line over it is off by about the square of that
PLANE, SWEEPS, AHEAD = 11, 4, 32.0  # two betas: an 11 x 11 grid, then coordinate steps, each sweep drawn out so far
TIE = 1e-12  # losses so close are equal: where the data do not tell, rounding must not


class Fold(NamedTuple):
    """Statistics of the rows outside a fold, and weights (n,) of the rows in it."""

    stats: Gaussians
    held_out: Tensor


class _Objective:
    """The cross-validated loss of betas, and its derivative."""

    def __init__(
        self, folds: Sequence[Fold], shared: Gaussians, z: Tensor, y: Tensor, log_prior: Tensor, amount: float
    ) -> None:
        """Compute once what does not depend on beta, from z (n, d), y (n,) and log_prior (C,)."""
        self.z, self.y, self.log_prior = z, y, log_prior
        own_mean, own_cov = (torch.stack(parts)[:, None] for parts in zip(*(f.stats for f in folds), strict=True))
        self.mean, self.cov = shared.mean, shrink(shared.cov, amount)
        self.mean_gap = own_mean - self.mean  # (folds, 1, C, d)
        self.cov_gap = shrink(own_cov, amount) - self.cov  # (folds, 1, d, d)
        self.weight = torch.stack([f.held_out / f.held_out.sum().clamp(min=1.0) for f in folds], dim=1)  # (n, folds)

    def __call__(self, beta: Tensor) -> Tensor:
        """Return the loss at betas (g, 2) for means and covariance: (g,)."""
        return self._evaluate(beta, None)

    def slope(self, beta: Tensor, along: Tensor) -> Tensor:
        """Return the derivative at betas (g, 2) along directions (g, 2): (g,)."""
        return self._evaluate(beta, along)

    def _evaluate(self, beta: Tensor, along: Tensor | None) -> Tensor:
        by_mean, by_cov = beta[:, :, None, None].unbind(dim=1)  # (g, 1, 1)
        mean = torch.addcmul(self.mean, by_mean, self.mean_gap)  # (folds, g, C, d)
        factor = factorise(torch.addcmul(self.cov, by_cov, self.cov_gap))  # (folds, g, d, d)
        w = solve_factored(factor, mean.mT)  # (folds, g, d, C)
        logits = self._scores(w, -0.5 * (mean * w.mT).sum(dim=-1) + self.log_prior)
        place = self.y[:, None, None, None].expand(*logits.shape[:-1], 1)
        if along is None:
            loss = torch.logsumexp(logits, dim=-1) - logits.gather(-1, place)[..., 0]
        else:
            along_mean, along_cov = along[:, :, None, None].unbind(dim=1)
            d_mean = along_mean * self.mean_gap
            # One product a fold for all betas: w side by side.
            moved = (self.cov_gap[:, 0] @ w.transpose(1, 2).flatten(2)).unflatten(2, w.shape[1::2]).transpose(1, 2)
            d_w = solve_factored(factor, d_mean.mT - along_cov * moved)
            d_logits = self._scores(d_w, -0.5 * ((d_mean * w.mT).sum(dim=-1) + (mean * d_w.mT).sum(dim=-1)))
            loss = (torch.softmax(logits, dim=-1) * d_logits).sum(dim=-1) - d_logits.gather(-1, place)[..., 0]
        return (loss * self.weight[:, :, None]).sum(dim=(0, 1))

    def _scores(self, w: Tensor, bias: Tensor) -> Tensor:
        """Return z w + bias for w (folds, g, d, C) and bias (folds, g, C): (n, folds, g, C), by one product."""
        beside = w.permute(2, 0, 1, 3)
        return (self.z @ beside.flatten(1)).unflatten(1, beside.shape[1:]) + bias


def _bisect(objective: _Objective, beta: Tensor, along: Tensor, back: float, ahead: float) -> Tensor:
    """Move each of ``beta`` (g, 2) to where the derivative along its direction (g, 2) changes sign.

    Moves at most ``back`` and ``ahead``, never uphill, and never out of [0, 1]. Two halvings at a time: the derivative
    is taken at the quarters, all at once, and the first halving says which of the outer two counts. If the loss falls
    outwards at an end, that end is the answer.
    """

    def slopes(places: Tensor) -> Tensor:  # (g, m) -> (g, m)
        tried = (beta[:, None] + places[..., None] * along[:, None]).flatten(0, 1)
        return objective.slope(tried, along.repeat_interleave(places.shape[1], dim=0)).reshape(places.shape)

    ends, fixed = torch.stack([-beta, 1.0 - beta]) / along, along == 0
    low = torch.where(fixed, -back, ends.amin(dim=0)).amax(dim=1).clamp(min=-back)[:, None]
    high = torch.where(fixed, ahead, ends.amax(dim=0)).amin(dim=1).clamp(max=ahead)[:, None]
    quarters = 0.25 * torch.arange(1, 4, dtype=beta.dtype, device=beta.device)
    at_low, at_high = slopes(torch.cat([low, high], dim=1)).split(1, dim=1)
    for _ in range(QUARTERINGS):
        inside = slopes(low + (high - low) * quarters)
        first, second, third = (inside < 0).unbind(dim=1)
        quarter = torch.where(second, 2 + third.long(), first.long())[:, None]
        edges = torch.cat([at_low, inside, at_high], dim=1)
        at_low, at_high = edges.gather(1, quarter), edges.gather(1, quarter + 1)
        low, high = low + (high - low) * (0.25 * quarter), low + (high - low) * (0.25 * (quarter + 1))
    share = torch.where(at_high < 0, torch.ones_like(low), at_low / (at_low - at_high))
    share = torch.where(at_low >= 0, torch.zeros_like(low), share)
    found = beta + (low + share * (high - low)) * along
    found = torch.where(found < 1e-6, torch.zeros_like(found), found)
    found = torch.where(found > 1.0 - 1e-6, torch.ones_like(found), found)
    before, after = objective(torch.cat([beta, found])).chunk(2)
    return torch.where((after < before - TIE)[:, None], found, beta)


def _best(beta: Tensor, losses: Tensor) -> Tensor:
    """Return the first of betas (..., g, 2) with the least of losses (..., g): (..., 2); the first if all are NaN."""
    place = (losses <= losses.amin(dim=-1, keepdim=True) + TIE).to(torch.int8).argmax(dim=-1)
    return torch.take_along_dim(beta, place[..., None, None], dim=-2)[..., 0, :]


def cross_validated_beta(
    folds: Sequence[Fold], shared: Gaussians, z: Tensor, y: Tensor, log_prior: Tensor, *, two: bool, amount: float
) -> Tensor:
    """Return the betas (2,) for means and covariance that minimise the cross-validated loss; equal unless ``two``.

    z (n, d), y (n,), log_prior (C,). Without a held-out row in every fold the answer is 0: the shared statistics.
    """
    centre = shared.mean.mean(dim=0).double()  # a common shift changes no posterior, and saves digits

    def prepared(stats: Gaussians) -> Gaussians:
        return Gaussians(stats.mean.double() - centre, stats.cov.double())

    ready = [Fold(prepared(f.stats), f.held_out.double()) for f in folds]
    objective = _Objective(ready, prepared(shared), z.double() - centre, y, log_prior.double(), amount)
    if two:
        axis, step = torch.linspace(0.0, 1.0, PLANE, dtype=torch.float64, device=z.device), 1.0 / (PLANE - 1)
        plane = torch.cartesian_prod(axis, axis).reshape(PLANE, PLANE, 2)
        by_mean, by_cov = (unit[None] for unit in torch.eye(2, dtype=torch.float64, device=z.device))
        # For each beta of the means the best of the covariance: valleys may be narrower than the grid.
        line = _best(plane, torch.stack([objective(row) for row in plane]))
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
