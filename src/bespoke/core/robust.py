"""Means of clients' uploads that a few bad ones cannot move far."""

from collections.abc import Callable

import torch
from torch import Tensor

from bespoke.core import tree
from bespoke.core.tree import Tree


def mean(rule: str, stacked: Tree, weights: Tensor, centre: Tree, trim: float) -> Tree:
    """Return the mean over the leading axis of ``stacked`` (leaves (K, ...)) by a rule; ``weights`` (K,).

    ``mean`` is the weighted mean. Under the other rules clients of weight 0 do not count. ``median`` is the median of
    each coordinate, without weights. ``trimmed`` leaves out, in each coordinate, the share ``trim`` of the clients at
    either end, and takes the weighted mean of the rest. ``clipped`` takes the weighted mean of the distances from
    ``centre`` (leaves (...)), after those longer than the median distance have been shortened to it.
    """
    if rule == "mean" or not (weights > 0.0).any():
        return tree.mean(stacked, weights)
    heard = (weights > 0.0).nonzero().flatten()
    stacked, weights = tree.take(stacked, heard), weights[heard].double()
    if rule == "clipped":
        away = tree.map(lambda x, c: x.double() - c.double(), stacked, centre)
        far = tree.norms(away)
        share = (_middle(far) / far.clamp(min=torch.finfo(far.dtype).tiny)).clamp(max=1.0)
        moved = tree.mean(tree.map(lambda x: x * tree.per_row(share, x), away), weights)
        return tree.map(lambda c, m: (c.double() + m).to(c.dtype), centre, moved)
    if rule == "median":
        return tree.map(_by_coordinate(_middle), stacked)
    return tree.map(_by_coordinate(lambda x: _trimmed(x, weights, trim)), stacked)


def _middle(x: Tensor) -> Tensor:
    """Return the median over the leading axis, the mean of the two in the middle if their number is even."""
    ordered = x.sort(dim=0).values
    return (ordered[(len(x) - 1) // 2] + ordered[len(x) // 2]) / 2.0


def _trimmed(x: Tensor, weights: Tensor, trim: float) -> Tensor:
    """Return the weighted mean over the leading axis of x (K, ...) without the ends, in each coordinate."""
    ordered, order = x.sort(dim=0)
    ends = min(int(trim * len(x) + 0.5), (len(x) - 1) // 2)
    inner = slice(ends, len(x) - ends)
    share = weights[order[inner]]
    return (ordered[inner] * share).sum(dim=0) / share.sum(dim=0)


def _by_coordinate(rule: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def leaf(x: Tensor) -> Tensor:
        tree.refuse_integers(x)
        return rule(x.double()).to(x.dtype)

    return leaf
