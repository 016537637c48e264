"""The papers' small nets: convolutions, each with a max-pool that halves the maps, and linear layers."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from bespoke.models import layers
from bespoke.models.checks import image_shape
from bespoke.models.settings import ModelSettings


class Stage(NamedTuple):
    """A convolution, the norm if requested, the activation, and a max-pool that halves the maps."""

    channels: int
    kernel: int
    padding: int

    def side(self, side: int) -> int:
        """Return the height or width after the stage."""
        return (side + 2 * self.padding - self.kernel + 1) // 2

    def smallest(self, side: int) -> int:
        """Return the smallest height or width from which the stage leaves ``side``."""
        return 2 * side + self.kernel - 1 - 2 * self.padding


def _net(
    settings: ModelSettings,
    input_shape: Sequence[int],
    num_outputs: int,
    stages: Sequence[Stage],
    hidden: Sequence[int],
    slope: float = 0.0,
) -> nn.Module:
    """Build the stages, then linear layers of ``hidden`` units, all with a leaky ReLU of that slope, then the head."""
    smallest = 1
    for stage in reversed(stages):
        smallest = stage.smallest(smallest)
    channels, height, width = image_shape(input_shape, settings.name, smallest)
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for i, stage in enumerate(stages, 1):
        body[f"conv{i}"] = layers.conv2d(channels, stage.channels, stage.kernel, padding=stage.padding)
        body[f"norm{i}"] = layers.norm2d(settings.norm, stage.channels)
        body[f"relu{i}"] = _relu(slope)
        body[f"pool{i}"] = layers.max_pool(2)
        channels, height, width = stage.channels, stage.side(height), stage.side(width)
    body["flatten"] = layers.Flatten()
    units = channels * height * width
    for i, outputs in enumerate(hidden, 1):
        body[f"fc{i}"] = layers.linear(units, outputs)
        body[f"fc{i}_relu"] = _relu(slope)
        units = outputs
    if settings.dropout:
        body["dropout"] = layers.Dropout(settings.dropout)
    return layers.Classifier(layers.Stages(body), layers.linear(units, num_outputs))


def _relu(slope: float) -> nn.Module:
    return nn.LeakyReLU(slope) if slope else nn.ReLU()


def cnn(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build two 3x3 convolutions (width and twice width channels) and a hidden layer, for images from 4x4 up.

    Features d = hidden, after the ReLU.
    """
    stages = (Stage(settings.width, 3, 1), Stage(2 * settings.width, 3, 1))
    return _net(settings, input_shape, num_outputs, stages, [settings.hidden])


def cifar_cnn(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build FedPAC's and pFedFDA's CNN for CIFAR: 106,400 parameters in the body for 32x32 colour images, d = 128.

    Maps 16x28x28, 32x12x12 and 64x6x6, each pooled; leaky ReLU of slope 0.01, also before the features.
    """
    stages = (Stage(16, 5, 0), Stage(32, 5, 1), Stage(64, 3, 1))
    return _net(settings, input_shape, num_outputs, stages, [128], slope=0.01)


def emnist_cnn(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build FedPAC's and pFedFDA's CNN for EMNIST: 115,776 parameters in the body for 28x28 grey images, d = 128.

    Maps 16x24x24 and 32x10x10, each pooled; leaky ReLU of slope 0.01, also before the features.
    """
    return _net(settings, input_shape, num_outputs, (Stage(16, 5, 0), Stage(32, 5, 1)), [128], slope=0.01)


def pfedvmp_cnn(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build pFedVMP's CNN: 873,408 parameters in the body for 32x32 colour images, d = hidden = 512.

    Two 5x5 convolutions (32 and 64 channels), each pooled; leaky ReLU of slope 0.1, also before the features.
    """
    return _net(settings, input_shape, num_outputs, (Stage(32, 5, 0), Stage(64, 5, 0)), [settings.hidden], slope=0.1)


def lenet(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build Self-FL's CNN for CIFAR-10: 5x5 convolutions of 6 and 16 channels, then 120 and 84 units, d = 84.

    62,006 parameters for 32x32 colour images and 10 classes; ReLU, also before the features.
    """
    return _net(settings, input_shape, num_outputs, (Stage(6, 5, 0), Stage(16, 5, 0)), [120, 84])
