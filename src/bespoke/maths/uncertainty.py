"""The two-level Gaussian model: estimates of a parameter vector from its history and from other clients.

A client's results scatter with variance s around its own parameters, and clients' parameters with variance s0 around a
common value; w = 1 / (s0 + s) is the weight of a client's result for the common value, W the sum of all w.
"""

import torch
from torch import Tensor

from bespoke.core import tree
from bespoke.core.tree import Tree


def no_history(params: Tree) -> Tree:
    """Start Welford's recurrence, before the first value: mean (float64), summed squares, count."""
    zero = torch.zeros((), dtype=torch.float64, device=next(tree.leaves(params)).device)
    return {"mean": tree.map(lambda p: torch.zeros_like(p, dtype=torch.float64), params), "m2": zero, "count": zero}


def note(history: Tree, params: Tree) -> Tree:
    """Add one value to the history; ``m2`` is the trace of the scatter around the mean."""
    count = history["count"] + 1.0
    delta = tree.map(lambda new, mean: new.double() - mean, params, history["mean"])
    mean = tree.map(lambda mean, d: mean + d / count, history["mean"], delta)
    rest = tree.map(lambda new, mean: new.double() - mean, params, mean)
    inner = tree.map(lambda a, b: (a * b).sum(), delta, rest)
    return {"mean": mean, "m2": history["m2"] + torch.stack(list(tree.leaves(inner))).sum(), "count": count}


def floor(params: Tree) -> Tensor:
    """Return the least variance allowed, 0-d float64: two equal results are no certainty."""
    size = sum(p.numel() for p in tree.leaves(params))
    return 1e-12 * (1.0 + tree.sq_norm(params).double() / size)


def others_mean(shared: Tree, own: Tree, weight: Tensor, others: Tensor) -> Tree:
    """Return the mean without the client's own part: shared - (w / W_others) * (own - shared), the factor at most 1."""
    factor = torch.where(others > 0, weight / others.clamp(min=1e-300), 0.0).clamp(max=1.0)
    return tree.map(lambda g, mine: (g - factor * (mine - g)).to(g.dtype), shared, own)


def balanced_steps(variance: Tensor, others: Tensor, lr: Tensor, curvature: Tensor) -> Tensor:
    """Return the number of gradient steps from the others' mean to its best balance with the own optimum, 0-d float64.

    They solve (1 - lr * curvature)^steps = W_others / (1 / variance + W_others); 0 where one step already overshoots.
    """
    shrink = (lr * curvature).clamp(max=1.0)
    return torch.log1p(1.0 / (variance * others).clamp(min=1e-300)) / -torch.log1p(-shrink)
