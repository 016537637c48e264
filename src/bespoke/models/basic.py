"""The models without convolutions: one linear layer, and one with a hidden layer before it."""

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from bespoke.models import layers
from bespoke.models.settings import ModelSettings


def linear(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build one linear layer on the flattened example: the body is empty, the features are the example."""
    return layers.Classifier(nn.Flatten(), layers.linear(math.prod(input_shape), num_outputs))


def mlp(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build a net with one hidden layer: flatten, linear, [norm,] ReLU (features, d = hidden), linear."""
    body = OrderedDict(
        flatten=nn.Flatten(),
        fc=layers.linear(math.prod(input_shape), settings.hidden),
        norm=layers.norm1d(settings.norm, settings.hidden),
        relu=nn.ReLU(),
    )
    return layers.Classifier(nn.Sequential(body), layers.linear(settings.hidden, num_outputs))
