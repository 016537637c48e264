"""A linear layer with a layer norm, and two uses of it: a gate and a valve for features."""

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.core import rng
from bespoke.core.tree import Tree


def init(key: Tensor, inputs: int, outputs: int, dtype: torch.dtype) -> Tree:
    """Draw linear weights by torch's own rule, uniform within 1 / sqrt(inputs); the norm has scale 1 and shift 0."""
    weight, bias = (
        (2.0 * rng.uniform(rng.fold_in(key, i), shape, dtype) - 1.0) * inputs**-0.5
        for i, shape in enumerate([(outputs, inputs), (outputs,)])
    )
    return {"weight": weight, "bias": bias, "scale": torch.ones_like(bias), "shift": torch.zeros_like(bias)}


def linear(block: Tree, x: Tensor) -> Tensor:
    """Apply the linear layer: x (..., inputs) -> (..., outputs)."""
    return F.linear(x, block["weight"], block["bias"])


def norm(block: Tree, x: Tensor) -> Tensor:
    """Normalise x (..., outputs) over its last axis, with the block's scale and shift."""
    return F.layer_norm(x, x.shape[-1:], block["scale"], block["shift"])


def gate(block: Tree, z: Tensor, context: Tensor, key: Tensor | None = None) -> Tensor:
    """Return a share r in [0, 1] for each feature of z (B, d), from a block of 2 d outputs and a context (d,).

    r (B, d) is the softmax over the two halves of ReLU(norm(linear(z * context))), with Gumbel noise in both if there
    is a key. The difference of two Gumbel variables is one logistic variable.
    """
    a, b = torch.relu(norm(block, linear(block, z * context))).chunk(2, dim=-1)
    return torch.sigmoid(a - b if key is None else a - b + rng.logistic(key, z.shape, z.dtype))


def valve_init(key: Tensor, d: int, dtype: torch.dtype) -> Tree:
    """Draw the two blocks of :func:`valve` for d features."""
    return {name: init(rng.fold_in(key, i), d, d, dtype) for i, name in enumerate(("gamma", "beta"))}


def valve(blocks: Tree, z: Tensor, context: Tensor) -> Tensor:
    """Scale and shift features z (B, d) as the context (d,) says: ReLU(z (gamma + 1) + beta), (B, d)."""
    gamma, beta = (norm(blocks[name], torch.relu(linear(blocks[name], context))) for name in ("gamma", "beta"))
    return torch.relu(z * (gamma + 1.0) + beta)
