"""A net for the wake-word task of Self-FL, whose paper gives only the number of layers and the size."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from bespoke.models import layers
from bespoke.models.checks import image_shape
from bespoke.models.settings import ModelSettings

_POOL = 0
_LAYERS = (64, _POOL, 128, _POOL, 256, 256, _POOL, 256, 256, 384, _POOL)  # channels of a 3x3 convolution, or a pool


def audio_cnn(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build eleven convolutions and max-pools on spectrograms (B, 1, time, frequency), averaged: d = 384.

    3,025,024 parameters in the body. He's initialisation, since without norms the signal would fade with
    torch's own; ReLU after each convolution.
    """
    channels, *_ = image_shape(input_shape, settings.name, 16)
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for i, outputs in enumerate(_LAYERS, 1):
        if outputs == _POOL:
            body[f"pool{i}"] = layers.max_pool(2)
            continue
        body[f"conv{i}"] = layers.conv2d(channels, outputs, 3, padding=1)
        body[f"norm{i}"] = layers.norm2d(settings.norm, outputs)
        body[f"relu{i}"] = nn.ReLU()
        channels = outputs
    body["mean"] = layers.MeanPool()
    return layers.he_init(layers.Classifier(layers.Stages(body), layers.linear(channels, num_outputs)))
