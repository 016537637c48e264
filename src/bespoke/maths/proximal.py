"""Tools for methods that take their own gradient steps inside ``Local.scan``, or train near another model."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bespoke.core import tree
from bespoke.core.tree import Tree

Loss = Callable[..., Tensor]

# What plain steps ignore of [training], for a method whose knob ``optimizer`` chooses between them and the optimiser.
_OPTIMISER = ("optimizer", "momentum", "clip", "keep_optimizer")
PLAIN_STEPS = dict.fromkeys(_OPTIMISER, 'its published steps are plain, [algorithm] optimizer = "training" uses it')


def descend(params: Tree, grads: Tree, rate: float | Tensor, decay: float = 0.0) -> Tree:
    """Take one plain gradient step: params - rate (grads + decay params)."""
    return tree.map(lambda p, g: p - rate * (g + decay * p), params, grads)


def near(loss: Loss, strength: float) -> Loss:
    """Return ``loss(params, batch)`` plus strength/2 |params - anchor|^2, with the anchor as a third argument."""

    def tied(params: Tree, batch: Any, anchor: Tree) -> Tensor:
        return loss(params, batch) + 0.5 * strength * tree.sq_dist(params, anchor)

    return tied
