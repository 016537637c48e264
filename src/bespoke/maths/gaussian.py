"""Class-conditional Gaussians with one tied covariance: statistics, the head they imply, and their interpolation.

Everything is for ONE client with padded rows: features z (n, d), labels y (n,), mask (n,) with 1.0 for a real row.
Linear algebra runs in float64 through ``cholesky_ex``, which maps over clients and can be captured in a CUDA graph.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bespoke.core.local import Local
from bespoke.core.task import Task
from bespoke.core.tree import Tree


class Gaussians(NamedTuple):
    """Class means (C, d) and the tied covariance (d, d)."""

    mean: Tensor
    cov: Tensor


class Head(NamedTuple):
    """A linear classifier: weight (C, d) and bias (C,)."""

    weight: Tensor
    bias: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        """Map features (n, d) to logits (n, C)."""
        return z @ self.weight.T + self.bias


def one_hot(y: Tensor, mask: Tensor, classes: int) -> Tensor:
    """Return memberships (n, C): the mask's value in the row's class, 0 elsewhere."""
    return (y[:, None] == torch.arange(classes, device=y.device)).to(mask.dtype) * mask[:, None]


def prior(y: Tensor, mask: Tensor, classes: int, smooth: float) -> Tensor:
    """Return class shares (C,), each raised by ``smooth`` and normalised again, so that no logarithm is infinite."""
    counts = one_hot(y, mask, classes).sum(dim=0)
    share = counts / counts.sum().clamp(min=1.0) + smooth
    return share / share.sum()


def own_prior(local: Local, smooth: float) -> Tensor:
    """Return a client's own class shares (C,), smoothed."""
    return prior(*local.labels(), local.task.num_classes, smooth)


def log_prior(local: Local, smooth: float) -> Tensor:
    """Return the logarithm of a client's own class shares (C,), smoothed."""
    return own_prior(local, smooth).log()


def identity(task: Task) -> Tensor:
    """Return the packed identity covariance of a task's features."""
    return pack(torch.eye(task.feature_dim, dtype=task.dtype, device=task.device))


def received(task: Task, down: Tree) -> Gaussians:
    """Unpack the shared statistics from a message with ``mean`` (C, d) and a packed ``cov``."""
    return Gaussians(down["mean"], unpack(down["cov"], task.feature_dim))


def estimate(z: Tensor, member: Tensor, fallback: Tensor, ridge: float) -> Gaussians:
    """Estimate class means, and the tied covariance plus ridge * I; an absent class takes its ``fallback``."""
    mean = class_means(z, member, fallback)
    return Gaussians(mean, tied_covariance(z, member, mean, ridge))


def class_means(z: Tensor, member: Tensor, fallback: Tensor) -> Tensor:
    """Return each class's mean (C, d) for memberships (n, C); a class without rows takes its ``fallback`` (C, d)."""
    counts = member.sum(dim=0)[:, None]
    return torch.where(counts > 0, member.T @ z / counts.clamp(min=1.0), fallback)


def tied_covariance(z: Tensor, member: Tensor, centre: Tensor, ridge: float) -> Tensor:
    """Return the scatter (d, d) around the classes' ``centre`` (C, d), over n - 1 (at least 1), plus ridge * I."""
    weight = member.sum(dim=1)
    rest = (z - member @ centre) * weight[:, None]  # a padded row has weight 0
    scatter = rest.T @ rest / (weight.sum() - 1.0).clamp(min=1.0)
    return scatter + ridge * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)


def interpolate(local: Gaussians, shared: Gaussians, beta_mean: Tensor, beta_cov: Tensor) -> Gaussians:
    """Return beta * local + (1 - beta) * shared, with one beta for the means and one for the covariance."""
    return Gaussians(
        beta_mean * local.mean + (1.0 - beta_mean) * shared.mean, beta_cov * local.cov + (1.0 - beta_cov) * shared.cov
    )


def shrink(cov: Tensor, amount: float) -> Tensor:
    """Return (1 - amount) * cov + amount * (trace / d) * I, which is linear in cov: (..., d, d)."""
    d = cov.shape[-1]
    level = torch.diagonal(cov, dim1=-2, dim2=-1).sum(dim=-1)[..., None, None] / d
    return (1.0 - amount) * cov + amount * level * torch.eye(d, dtype=cov.dtype, device=cov.device)


def factorise(cov: Tensor) -> Tensor:
    """Return the lower Cholesky factor of positive definite cov (..., d, d)."""
    return torch.linalg.cholesky_ex(cov)[0]


def solve_factored(factor: Tensor, right: Tensor) -> Tensor:
    """Return cov^-1 right for the Cholesky factor (..., d, d) of cov and right (..., d, k)."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def solve(cov: Tensor, right: Tensor) -> Tensor:
    """Return cov^-1 right for positive definite cov (..., d, d) and right (..., d, k), by Cholesky."""
    return solve_factored(factorise(cov), right)


def lda_head(stats: Gaussians, log_prior: Tensor, amount: float = 1e-4) -> Head:
    """Return the Gaussians' linear head, w_c = cov^-1 mu_c, b_c = -mu_c' w_c / 2 + log prior_c; float64 inside."""
    mean, cov = stats.mean.double(), shrink(stats.cov.double(), amount)
    weight = solve(cov, mean.T).T
    bias = -0.5 * (mean * weight).sum(dim=1) + log_prior.double()
    return Head(weight.to(stats.mean.dtype), bias.to(stats.mean.dtype))


def repair(cov: Tensor, floor: float = 1e-15) -> Tensor:
    """Return the nearest positive definite matrices with the same variances, clipping the correlations' eigenvalues.

    cov (..., d, d). One pass, as in statistics packages; it uses an eigendecomposition, so call it through
    ``local.host``. A feature without variance keeps none and stays uncorrelated.
    """
    std = torch.diagonal(cov, dim1=-2, dim2=-1).clamp(min=0.0).sqrt()
    safe = torch.where(std > 0, std, torch.ones_like(std))
    corr = cov / (safe[..., :, None] * safe[..., None, :])
    values, vectors = torch.linalg.eigh(corr)
    fixed = (vectors * values.clamp(min=floor)[..., None, :]) @ vectors.mT
    scale = torch.diagonal(fixed, dim1=-2, dim2=-1).sqrt()
    fixed = fixed / (scale[..., :, None] * scale[..., None, :])
    sound = (values > floor).all(dim=-1)[..., None, None]
    return torch.where(sound, cov, fixed * (std[..., :, None] * std[..., None, :]))


def pack(cov: Tensor) -> Tensor:
    """Return the lower triangle of a symmetric (d, d) matrix as d(d+1)/2 numbers, the form that is sent."""
    rows, columns = torch.tril_indices(cov.shape[-1], cov.shape[-1], device=cov.device)
    return cov[..., rows, columns]


def unpack(packed: Tensor, d: int) -> Tensor:
    """Invert :func:`pack`: (..., d(d+1)/2) -> (..., d, d)."""
    index = torch.arange(d, device=packed.device)
    high, low = torch.maximum(index[:, None], index), torch.minimum(index[:, None], index)
    return packed[..., high * (high + 1) // 2 + low]


def class_precisions(z: Tensor, member: Tensor, alpha: float, cut: float) -> Tensor:
    """Return pinv(covariance) + alpha * I of each class: (C, d, d); 0 for a class without rows.

    z (n, d), member (n, C). The pseudo-inverse of a class's (biased) covariance is Y'Y over its rows, with Y = (G + eps
    I)^-1 D / sqrt(Z): D are the rows minus their class's mean, G = D D' / Z within classes, Z the class's rows. eps =
    cut * (mean within-class variance of a feature) gives a variance w the weight w / (w + eps)^2, which is 1 / w above
    it and falls to 0 below, so that no direction without variance gets an infinite precision. It is at least the
    rounding of the features, so that equal rows are equal, and the means are taken in float64 for the same reason.
    """
    dtype, rounding = z.dtype, max(1e-12, torch.finfo(z.dtype).eps)
    z, member = z.double(), member.double()
    mean = class_means(z, member, z.new_zeros(member.shape[1], z.shape[1]))
    counts, weight = member.sum(dim=0), member.sum(dim=1)
    size = (member @ counts).clamp(min=1.0)  # Z of each row's class
    rest = (z - member @ mean) * weight[:, None]
    gram = (rest @ rest.T) * (member @ member.T) / size[:, None]
    squares = cut * rest.square().sum() + rounding * (z.square() * weight[:, None]).sum()
    eps = squares / (weight.sum().clamp(min=1.0) * z.shape[1]) + 1e-30
    identity = torch.eye(len(z), dtype=z.dtype, device=z.device)
    y = solve(gram + eps * identity, rest) / size.sqrt()[:, None]
    inverse = (member.T[:, :, None] * y).mT @ y  # (C, d, d)
    ridge = alpha * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    return torch.where(counts[:, None, None] > 0, inverse + ridge, torch.zeros_like(inverse)).to(dtype)


def precision_mean(mean: Tensor, precision: Tensor, count: Tensor, fallback: Tensor) -> Tensor:
    """Average clients' class means (K, C, d), weighted by their precisions (K, C, d, d): (C, d), float64.

    A class for which ``count`` (K, C) is 0 everywhere takes its ``fallback`` (C, d).
    """
    total, right = precision.sum(dim=0), (precision @ mean[..., None]).sum(dim=0)
    present = (count.sum(dim=0) > 0)[:, None, None]
    eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    return torch.where(present, solve(torch.where(present, total, eye), right), fallback[..., None].to(mean))[..., 0]


def message_floats(counts: Tensor, d: int) -> Tensor:
    """Count the numbers that carry means and precisions of the classes present in ``counts`` (C,), 0-d.

    A precision minus its ridge has rank at most rows - 1: as a factor it takes (rows - 1)(d + 1) numbers, as a triangle
    d(d + 1) / 2, and the smaller form is sent.
    """
    factor = (counts - 1.0).clamp(min=0.0) * (d + 1)
    return torch.where(counts > 0, d + factor.clamp(max=d * (d + 1) / 2), torch.zeros_like(counts)).sum()
