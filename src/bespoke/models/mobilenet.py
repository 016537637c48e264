"""MobileNetV3-Small, with a norm that keeps no running statistics."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from bespoke.models import layers
from bespoke.models.checks import image_shape
from bespoke.models.settings import ModelSettings


class Bneck(NamedTuple):
    """A row of the paper's table of blocks."""

    kernel: int
    expanded: int
    outputs: int
    squeeze: bool
    activation: Callable[[], nn.Module]
    stride: int


_TABLE = (
    Bneck(3, 16, 16, True, nn.ReLU, 2),
    Bneck(3, 72, 24, False, nn.ReLU, 2),
    Bneck(3, 88, 24, False, nn.ReLU, 1),
    Bneck(5, 96, 40, True, nn.Hardswish, 2),
    Bneck(5, 240, 40, True, nn.Hardswish, 1),
    Bneck(5, 240, 40, True, nn.Hardswish, 1),
    Bneck(5, 120, 48, True, nn.Hardswish, 1),
    Bneck(5, 144, 48, True, nn.Hardswish, 1),
    Bneck(5, 288, 96, True, nn.Hardswish, 2),
    Bneck(5, 576, 96, True, nn.Hardswish, 1),
    Bneck(5, 576, 96, True, nn.Hardswish, 1),
)
_STEM, _LAST, _HIDDEN = 16, 576, 1024


class SqueezeExcite(nn.Module):
    """A weight between 0 and 1 for each map, computed from the means of all maps: (B, C, H, W) -> same shape.

    Its hidden layer has a quarter of the channels, rounded to a multiple of 8.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(8, (channels // 4 + 4) // 8 * 8)
        self.squeeze = layers.conv2d(channels, hidden, 1)
        self.relu = nn.ReLU()
        self.excite = layers.conv2d(hidden, channels, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, C, H, W) to the same shape."""
        mean = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.excite(self.relu(self.squeeze(mean))))


class InvertedResidual(nn.Module):
    """Widen, filter each map, [weight,] narrow; plus the input where the shape stays.

    (B, inputs, H, W) -> (B, outputs, H / stride, W / stride).
    """

    def __init__(self, inputs: int, row: Bneck, norm: str) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        if row.expanded != inputs:
            parts += _conv(inputs, row.expanded, 1, norm, row.activation)
        parts += _conv(row.expanded, row.expanded, row.kernel, norm, row.activation, row.stride, row.expanded)
        if row.squeeze:
            parts.append(SqueezeExcite(row.expanded))
        parts += _conv(row.expanded, row.outputs, 1, norm)
        self.layers = nn.Sequential(*parts)
        self.residual = row.stride == 1 and inputs == row.outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        out = self.layers(x)
        return x + out if self.residual else out


def _conv(
    inputs: int,
    outputs: int,
    kernel: int,
    norm: str,
    activation: Callable[[], nn.Module] = nn.Identity,
    stride: int = 1,
    groups: int = 1,
) -> list[nn.Module]:
    return [
        layers.conv2d(inputs, outputs, kernel, stride, kernel // 2, groups, bias=False),
        layers.norm2d(norm, outputs, layers.GROUP_SIZE),
        activation(),
    ]


def mobilenet_v3_small(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build MobileNetV3-Small: 927,008 parameters up to the 576 averaged maps, 590,848 to the features, d = 1024.

    He's initialisation, no dropout; the norm has as many scales and shifts as BatchNorm.
    """
    channels, *_ = image_shape(input_shape, settings.name, 32)
    maps = _conv(channels, _STEM, 3, settings.norm, nn.Hardswish, 2)
    inputs = _STEM
    for row in _TABLE:
        maps.append(InvertedResidual(inputs, row, settings.norm))
        inputs = row.outputs
    maps += _conv(inputs, _LAST, 1, settings.norm, nn.Hardswish)
    body = OrderedDict(
        maps=nn.Sequential(*maps), mean=layers.MeanPool(), fc=layers.linear(_LAST, _HIDDEN), hardswish=nn.Hardswish()
    )
    return layers.he_init(layers.Classifier(nn.Sequential(body), layers.linear(_HIDDEN, num_outputs)))
