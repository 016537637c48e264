"""Langevin dynamics with small messages: noise for a tree of weights, stochastic quantisation of a tree of gradients.

Draws depend on a leaf's name, not its position: a tree read from a file may be in another order.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bespoke.core import rng, tree
from bespoke.core.tree import Tree


def _with_keys(fn: Callable[[Tensor, Tensor], Tensor], values: Tree, key: Tensor) -> Tree:
    flat = tree.flatten(values)
    return tree.unflatten({name: fn(flat[name], rng.fold_in(key, i)) for i, name in enumerate(sorted(flat))})


def noise(like: Tree, key: Tensor) -> Tree:
    """Draw standard normal numbers in the shapes of a tree."""
    return _with_keys(lambda x, key: rng.normal(key, x.shape, x.dtype), like, key)


def quantise(values: Tree, levels: int, key: Tensor) -> Tree:
    """Round each tensor v at random to |v| sign(v_j) l_j / levels with whole numbers l_j; the mean is v.

    |v| is the tensor's Euclidean norm. ``levels = 0`` leaves the values alone.
    """

    def leaf(v: Tensor, key: Tensor) -> Tensor:
        norm = v.square().sum().sqrt()
        share = levels * v.abs() / torch.where(norm > 0, norm, torch.ones_like(norm))
        up = rng.uniform(key, v.shape, v.dtype) < share - share.floor()
        return norm * v.sign() * (share.floor() + up) / levels

    return _with_keys(leaf, values, key) if levels else values


def excess(size: int, levels: int) -> float:
    """Return omega: quantising ``size`` numbers adds a variance of at most omega times their squared norm."""
    return min(size / levels**2, math.sqrt(size) / levels) if levels else 0.0


def quantised_bytes(values: Tree, levels: int) -> int:
    """Count the bytes of a quantised message: a norm per tensor, a sign and a level of equal length per number."""
    width = 1 + math.ceil(math.log2(levels + 1)) if levels else 32
    bits = [width * v.numel() + (32 if levels else 0) for v in tree.leaves(values)]
    return -(-sum(bits) // 8)
