"""Linear, multi-layer and convolutional classifiers. Each has its last layer named ``head``."""

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from bespoke.models.layers import Classifier, check_norm, image_shape, norm1d, norm2d
from bespoke.models.settings import ModelSettings


def linear(settings: ModelSettings, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """One linear layer on the flattened example: the body is empty, the features are the example."""
    check_norm(settings.norm, "linear", ("none",))
    return Classifier(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def mlp(settings: ModelSettings, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """One hidden layer: flatten, linear, [norm,] ReLU (features, d = hidden), linear."""
    check_norm(settings.norm, "mlp", ("none", "group", "layer"))
    body = OrderedDict(
        flatten=nn.Flatten(),
        fc=nn.Linear(math.prod(input_shape), settings.hidden),
        norm=norm1d(settings.norm, settings.hidden),
        relu=nn.ReLU(),
    )
    return Classifier(nn.Sequential(body), nn.Linear(settings.hidden, num_classes))


def cnn(settings: ModelSettings, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Two 3x3 convolutions (width and twice width channels), each halved by a max-pool, and a hidden layer.

    Works from 4x4 up; features d = hidden, after the ReLU.
    """
    check_norm(settings.norm, "cnn")
    channels, height, width = image_shape(input_shape, "cnn", 4)
    first, second = settings.width, 2 * settings.width
    body = OrderedDict(
        conv1=nn.Conv2d(channels, first, 3, padding=1),
        norm1=norm2d(settings.norm, first),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(first, second, 3, padding=1),
        norm2=norm2d(settings.norm, second),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc=nn.Linear(second * (height // 4) * (width // 4), settings.hidden),
        relu3=nn.ReLU(),
    )
    return Classifier(nn.Sequential(body), nn.Linear(settings.hidden, num_classes))


def cifar_cnn(settings: ModelSettings, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The CNN of FedPAC and pFedFDA for 32x32 colour images: 106,400 parameters in the body, d = 128.

    Three convolutions (16, 32, 64 channels), each with leaky ReLU and max-pool, and a linear layer with
    leaky ReLU, whose output is the features. Its sizes are fixed.
    """
    check_norm(settings.norm, "cifar_cnn", ("none",))
    channels, *size = image_shape(input_shape, "cifar_cnn", 16)
    height, width = (((s - 4) // 2 - 2) // 2 // 2 for s in size)
    body = OrderedDict(
        conv1=nn.Conv2d(channels, 16, 5),
        relu1=nn.LeakyReLU(0.01),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(16, 32, 5, padding=1),
        relu2=nn.LeakyReLU(0.01),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(32, 64, 3, padding=1),
        relu3=nn.LeakyReLU(0.01),
        pool3=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc=nn.Linear(64 * height * width, 128),
        relu4=nn.LeakyReLU(0.01),
    )
    return Classifier(nn.Sequential(body), nn.Linear(128, num_classes))
