"""A tree of binary Gaussian-process classifiers on one client's features, at fixed shapes.

T = C - 1 nodes, n rows, padded ones included. A tree is a matrix (T, C): +1 for the classes on a node's left, -1 on its
right, 0 for classes that are not below it; an unused node is all 0. ``side`` (T, n) says the same of rows. A row
outside a node has no weight there, so that all nodes share one kernel matrix. Everything runs in float64.
"""

import math

import numpy as np
import torch
from torch import Tensor

from bespoke.core import rng
from bespoke.core.local import Features
from bespoke.maths import polya_gamma
from bespoke.maths.gaussian import class_means, one_hot

JITTER = 1e-3  # on the kernel's diagonal, of train and test rows
TINY = 1e-12
LOG_FLOOR = -30.0  # of a class's log-probability
_HERMITE = [(float(x), float(w)) for x, w in zip(*np.polynomial.hermite.hermgauss(20), strict=True)]


# --- the tree -------------------------------------------------------------------------------------------------------


def class_tree(mean: Tensor, present: Tensor, iterations: int = 10) -> Tensor:
    """Split the present classes in two by 2-means on their means (C, d), and each part again: a tree (T, C), float64.

    ``present`` (C,) is bool. The left part is the one with the smallest label. Deterministic: 2-means starts at the
    farthest pair, and within a share of 1e-12 the lower index wins.
    """
    mean, classes = mean.double(), len(mean)
    ids = torch.arange(classes, device=mean.device)
    square = mean.square().sum(dim=1)
    distance = square[:, None] + square - 2.0 * mean @ mean.T
    distance = torch.where(distance > TINY * square.max(), distance, 0.0)
    group, rows = torch.where(present, 0, -1), []
    for node in range(classes - 1):
        large = (group == ids[:, None]).sum(dim=1) > 1
        chosen = torch.where(large, ids, classes).min()  # the first group with two classes or more
        member = group == chosen
        left = _two_means(mean, distance, member, iterations)
        right = member & ~left
        rows.append(left.to(mean.dtype) - right.to(mean.dtype))
        group = torch.where(right, node + 1, group)
    return torch.stack(rows) if rows else mean.new_zeros(0, classes)  # one class: no node


def _two_means(mean: Tensor, distance: Tensor, member: Tensor, iterations: int) -> Tensor:
    """Return the members (C,) that go left, bool."""
    classes = len(mean)
    ids = torch.arange(classes, device=mean.device)
    pair = member[:, None] & member & (ids[:, None] < ids)
    apart = torch.where(pair, distance, -1.0).flatten()
    far = torch.where(
        apart >= apart.max() * (1.0 - TINY), torch.arange(classes**2, device=mean.device), classes**2
    ).min()
    left, right = ids == far // classes, ids == far % classes
    for _ in range(iterations):
        to_left, to_right = ((mean - _centre(mean, part)).square().sum(dim=1) for part in (left, right))
        near = to_left <= to_right * (1.0 + TINY)
        left, right = member & near, member & ~near
    rank, size = member.cumsum(dim=0), member.sum()
    halves = member & (2 * rank <= size + 1)  # where the means do not tell the classes apart
    left = torch.where(right.any() & (distance * pair).any(), left, halves)
    first = member & (rank == 1)
    return torch.where((left & first).any(), left, member & ~left)


def _centre(mean: Tensor, part: Tensor) -> Tensor:
    weight = part.to(mean.dtype)
    return weight @ mean / weight.sum().clamp(min=1.0)


def tree_of(rows: Features, classes: int) -> tuple[Tensor, Tensor]:
    """Return the tree (T, C) of a client's features, and its present classes (C,) as 0 and 1."""
    member = one_hot(rows.y, rows.mask.double(), classes)
    z = rows.z.double()
    mean = class_means(z, member, z.new_zeros(classes, z.shape[1]))
    present = member.sum(dim=0) > 0
    return class_tree(mean, present), present.to(mean.dtype)


def sides(tree: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return where rows with labels y (n,) go at each node: (T, n) in {-1, 0, +1}; 0 for padding."""
    return tree[:, y] * mask.to(tree.dtype)


def halve(side: Tensor, key: Tensor) -> Tensor:
    """Draw at each node half of each side's rows, rounded down: bool (T, n)."""
    nodes = torch.arange(len(side), device=side.device)
    value = rng.bits(rng.fold_in(key, nodes)[:, None, :], torch.arange(side.shape[1], device=side.device))
    chosen = torch.zeros_like(side, dtype=torch.bool)
    for which in (-1.0, 1.0):
        here = side == which
        rank = torch.where(here, value, 2**32).argsort(dim=1, stable=True).argsort(dim=1, stable=True)
        chosen = chosen | (here & (2 * (rank + 1) <= here.sum(dim=1, keepdim=True)))
    return chosen


def subset(y: Tensor, n: Tensor, most: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Draw at most ``most`` of the n real rows, classes in proportion: places and mask (R,)."""
    width = len(y)
    place = torch.arange(min(width, most), device=y.device)
    if width <= most:
        return place, place < n
    order = rng.shuffle(key, width, n)
    label = torch.where(torch.arange(width, device=y.device) < n, y, 2**31)
    by_class = order[label[order].argsort(stable=True)]
    return torch.where(n > most, by_class[place * n // most], place), place < n


# --- the Gaussian processes -----------------------------------------------------------------------------------------


def normalised(z: Tensor) -> Tensor:
    """Scale features (n, d) to length one, float64; a row of zeros stays zero."""
    z = z.double()
    return z * torch.rsqrt(z.square().sum(dim=1, keepdim=True) + TINY)


def kernel(a: Tensor, b: Tensor, variance: float) -> Tensor:
    """Return variance * exp(-|a_i - b_j|^2 / 2): (n, m)."""
    return variance * torch.exp(a @ b.T - 0.5 * a.square().sum(dim=1)[:, None] - 0.5 * b.square().sum(dim=1))


def train_kernel(z: Tensor, variance: float) -> Tensor:
    """Return the kernel matrix of train rows (n, n), with the jitter."""
    return kernel(z, z, variance) + JITTER * torch.eye(len(z), dtype=z.dtype, device=z.device)


def mean_field(k: Tensor, side: Tensor, steps: int = 10) -> Tensor:
    """Return the mean-field posterior's means of Polya-Gamma omega (T, n); 0 for rows outside a node."""
    inside, spread = side.abs(), torch.diagonal(k)
    omega = polya_gamma.mean(spread.sqrt()) * inside
    for _ in range(steps - 1):
        weight, factor = _factor(k, omega)
        v = torch.linalg.solve_triangular(factor, weight[:, :, None] * k, upper=False)
        mean = 0.5 * (side @ k - (v.mT @ (v @ side[:, :, None]))[:, :, 0])
        omega = polya_gamma.mean((mean.square() + spread - v.square().sum(dim=1)).sqrt()) * inside
    return omega


def gibbs(k: Tensor, side: Tensor, key: Tensor, steps: int = 5) -> Tensor:
    """Draw Polya-Gamma omega (T, n) by one Gibbs chain of ``steps`` steps; 0 for rows outside a node."""
    inside, nodes = side.abs(), torch.arange(len(side), device=side.device)
    root, _ = torch.linalg.cholesky_ex(k)

    def normal(number: int) -> Tensor:
        keys = rng.fold_in(rng.fold_in(key, number), nodes)
        return rng.normal(keys[:, None, :], (side.shape[1],), k.dtype)

    def drawn(f: Tensor, number: int) -> Tensor:
        return polya_gamma.draw(f, rng.fold_in(key, number)).clamp(min=1e-6) * inside

    omega = drawn(normal(0) @ root.T, 1)
    for step in range(1, steps + 1):
        # Matheron's rule: a draw from the prior, moved by the observation minus its own noisy observation.
        prior, noise = normal(3 * step) @ root.T, normal(3 * step + 1)
        weight, factor = _factor(k, omega)
        rest = 0.5 * side / weight.clamp(min=TINY) - weight * prior - noise
        omega = drawn(prior + (weight * _solved(factor, rest)) @ k, 3 * step + 2)
    return omega


def _factor(k: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Return W = sqrt(omega) (T, n) and the Cholesky factors (T, n, n) of I + W K W (eigenvalues at least 1)."""
    weight = omega.sqrt()
    identity = torch.eye(len(k), dtype=k.dtype, device=k.device)
    factor, _ = torch.linalg.cholesky_ex(identity + weight[:, :, None] * k * weight[:, None, :])
    return weight, factor


def _solved(factor: Tensor, right: Tensor) -> Tensor:
    half = torch.linalg.solve_triangular(factor, right[:, :, None], upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)[:, :, 0]


def predictive(k: Tensor, cross: Tensor, own: float, side: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance (T, m) of each node's function at m rows, given its train rows and their omega (T, n).

    k (n, n) with jitter, cross (m, n), own = the kernel of a row with itself. With kappa = side / 2:
    cross (K + 1/omega)^-1 (kappa / omega) and own - cross (K + 1/omega)^-1 cross'.
    """
    weight, factor = _factor(k, omega)
    mean = (weight * _solved(factor, 0.5 * side / weight.clamp(min=TINY))) @ cross.T
    v = torch.linalg.solve_triangular(factor, weight[:, :, None] * cross.T, upper=False)
    return mean, own - v.square().sum(dim=1)


def left_probability(mean: Tensor, variance: Tensor, link: str) -> Tensor:
    """Return P(left) of a latent N(mean, variance) by 20-node Gauss-Hermite quadrature.

    ``link``: "expected_sigmoid" is E[sigmoid(f)], "exp_log" exp(E[log sigmoid(f)]).
    """
    spread = (2.0 * variance).sqrt()
    inner = torch.sigmoid if link == "expected_sigmoid" else torch.nn.functional.logsigmoid
    total = torch.stack([w / math.sqrt(math.pi) * inner(mean + x * spread) for x, w in _HERMITE]).sum(dim=0)
    return total if link == "expected_sigmoid" else total.exp()


def side_error(left: Tensor, side: Tensor, target: Tensor) -> Tensor:
    """Sum over nodes the mean of -log P(own side) over a node's target rows (T, n), 0-d; a node without any adds 0."""
    own = torch.where(side > 0, left, 1.0 - left)
    return (-(own + TINY).log() * target).sum(dim=1).div(target.sum(dim=1).clamp(min=1)).sum()


def class_logits(left: Tensor, tree: Tensor, present: Tensor) -> Tensor:
    """Return classes' log-probabilities (m, C) from P(left) (T, m) along their paths; absent classes get a floor."""
    to_left, to_right = (left + TINY).log(), (1.0 - left + TINY).log()
    path = to_left.T @ (tree > 0).to(left.dtype) + to_right.T @ (tree < 0).to(left.dtype)
    return torch.where(present > 0, path, LOG_FLOOR).clamp(min=LOG_FLOOR)
