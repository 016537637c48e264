"""The pieces that models share."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from bespoke.errors import UserError

NORMS = ("none", "group", "instance", "layer")
_GROUPS = 4


class Classifier(nn.Module):
    """``head(body(x))``: x (B, ...) -> features (B, d) -> logits (B, C)."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """x (B, ...) -> logits (B, C)."""
        return self.head(self.body(x))


def check_norm(norm: str, model: str, allowed: Sequence[str] = NORMS) -> None:
    """Refuse a kind of normalisation that this model, or no model here, has."""
    if norm == "batch":
        raise UserError(
            '[model] norm = "batch" is not offered, since its running statistics mix rows and clients: '
            'use norm = "group"'
        )
    if norm not in allowed:
        choices = ", ".join(repr(n) for n in allowed)
        raise UserError(f"[model] norm of {model} must be one of {choices}, not {norm!r}")


def norm2d(kind: str, channels: int) -> nn.Module:
    """A normalisation layer for maps (B, channels, H, W), with a scale and a shift for each channel.

    ``group`` has 4 groups, or as many of them as divide the channels; ``layer`` is one group.
    """
    if kind == "group":
        return nn.GroupNorm(math.gcd(_GROUPS, channels), channels)
    if kind == "instance":
        return nn.InstanceNorm2d(channels, affine=True)
    return nn.GroupNorm(1, channels) if kind == "layer" else nn.Identity()


def norm1d(kind: str, units: int) -> nn.Module:
    """A normalisation layer for vectors (B, units), with a scale and a shift for each unit."""
    if kind == "group":
        return nn.GroupNorm(math.gcd(_GROUPS, units), units)
    return nn.LayerNorm(units) if kind == "layer" else nn.Identity()


def image_shape(shape: Sequence[int], model: str, smallest: int) -> tuple[int, int, int]:
    """(channels, height, width) of the examples; refused unless images of at least ``smallest``."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise UserError(
            f"the model {model} needs images (channels, height, width) of at least {smallest}x{smallest}, "
            f"but the examples have shape {tuple(shape)}: use mlp or linear"
        )
    return shape[0], shape[1], shape[2]
