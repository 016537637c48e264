"""Gaussian posteriors of weights: from samples along a client's path, and over clients of known and unknown size."""

import torch
from torch import Tensor

from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.maths import gaussian


def total_rows(rows: Tensor) -> Tensor:
    """Return the train rows of all clients, 0-d, from those known (M,), at least 1.

    A count of 0, or below, which only a faulty client sends, is unknown and counts as the average.
    """
    return (rows.clamp(min=0.0).sum() * len(rows) / (rows > 0).sum().clamp(min=1)).clamp(min=1.0)


def window_sums(params: Tree, windows: int) -> Tree:
    """Return zero sums (windows, ...) of weights like ``params``, and zero counts (windows,)."""
    first = next(tree.leaves(params))
    return {"sum": tree.map(lambda p: p.new_zeros(windows, *p.shape), params), "count": first.new_zeros(windows)}


def add_to_window(sums: Tree, params: Tree, place: Tensor) -> Tree:
    """Return the sums with ``params`` added to window ``place`` (0-d int), or to none if there is no such window."""
    count = sums["count"]
    now = (torch.arange(len(count), device=count.device) == place).to(count.dtype)
    total = tree.map(lambda s, p: s + now.reshape(-1, *[1] * p.dim()) * p, sums["sum"], params)
    return {"sum": total, "count": count + now}


def window_means(sums: Tree) -> Tree:
    """Return the mean of each window, stacked: leaves (windows, ...); 0 for an empty one."""
    over = sums["count"].clamp(min=1.0)
    return tree.map(lambda s: s / over.reshape(-1, *[1] * (s.dim() - 1)), sums["sum"])


def shrunk_delta(start: Tree, samples: Tree, count: Tensor, rho: float) -> Tree:
    """Return Sigma^-1 (start - mean) for the first ``count`` (0-d) of the stacked samples (L, ...).

    Sigma = r I + (1 - r) S with S the unbiased covariance of the samples and r = 1 / (1 + (count - 1) rho). By
    Woodbury's identity it takes one L x L solve: with A the centred samples, b = start - mean and
    s = (1 - r) / (count - 1), the result is (b - s A' (r I + s A A')^-1 A b) / r.
    """
    size = next(tree.leaves(samples)).shape[0]
    real = (torch.arange(size, device=count.device) < count).double()
    number = count.double().clamp(min=1.0)
    r = 1.0 / (1.0 + (number - 1.0) * rho)
    s = (1.0 - r) / (number - 1.0).clamp(min=1.0)

    def combined(weights: Tensor, stacked: Tensor) -> Tensor:
        return torch.tensordot(weights.to(stacked.dtype), stacked, dims=1)

    mean = tree.map(lambda x: combined(real / number, x), samples)
    spread = tree.map(lambda x, m: (x - m) * real.to(x.dtype).reshape(-1, *[1] * m.dim()), samples, mean)
    away = tree.map(lambda m, x: x - m, mean, start)  # leaves in the samples' order
    rows = [a.reshape(size, -1) for a in tree.leaves(spread)]
    gram = torch.stack([a @ a.T for a in rows]).sum(dim=0).double()
    along = torch.stack([a @ b.reshape(-1) for a, b in zip(rows, tree.leaves(away), strict=True)]).sum(dim=0).double()
    identity = torch.eye(size, dtype=gram.dtype, device=gram.device)
    weights = s * gaussian.solve(r * identity + s * gram, along[:, None])[:, 0]
    return tree.map(lambda b, a: (b - combined(weights, a)) / r.to(b.dtype), away, spread)
