"""The wide ResNet with 16 layers and twice the width, of FedLDA."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from bespoke.models import layers
from bespoke.models.checks import image_shape
from bespoke.models.settings import ModelSettings

_WIDTHS = (32, 64, 128)
_STEM = 16
_BLOCKS = 2  # in each of the three groups


class PreActivationBlock(nn.Module):
    """norm-ReLU-conv-norm-ReLU-conv, plus the shortcut: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride).

    The shortcut is the raw input, or where the width changes a 1x1 convolution of the activated input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.norm1 = layers.norm2d(norm, inputs, layers.GROUP_SIZE, relu=True)
        self.conv1 = layers.conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = layers.norm2d(norm, outputs, layers.GROUP_SIZE, relu=True)
        self.conv2 = layers.conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = layers.conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        active = self.norm1(x)
        out = self.conv2(self.norm2(self.conv1(active)))
        return out + (x if self.shortcut is None else self.shortcut(active))


def wrn16_2(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build WRN-16-2: a 3x3 stem of 16 channels, three groups of two blocks with 32, 64 and 128, norm, ReLU, averaged.

    690,384 parameters in the body for colour images, d = 128. He's initialisation, no dropout.
    """
    channels, *_ = image_shape(input_shape, settings.name, 8)
    body: OrderedDict[str, nn.Module] = OrderedDict(conv1=layers.conv2d(channels, _STEM, 3, 1, 1, bias=False))
    inputs = _STEM
    for i, outputs in enumerate(_WIDTHS):
        first = PreActivationBlock(inputs, outputs, 1 if i == 0 else 2, settings.norm)
        rest = [PreActivationBlock(outputs, outputs, 1, settings.norm) for _ in range(_BLOCKS - 1)]
        body[f"group{i + 1}"] = nn.Sequential(first, *rest)
        inputs = outputs
    body["norm"] = layers.norm2d(settings.norm, inputs, layers.GROUP_SIZE, relu=True)
    body["mean"] = layers.MeanPool()
    return layers.he_init(layers.Classifier(nn.Sequential(body), layers.linear(inputs, num_outputs)))
