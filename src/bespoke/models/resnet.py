"""ResNet-18 with two stems and four normalisations, and FedPCE's version of it."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from bespoke.models import layers
from bespoke.models.checks import check_final_norm, check_maps, image_shape
from bespoke.models.settings import ModelSettings

_BLOCKS = 2  # in each of the four groups


class BasicBlock(nn.Module):
    """conv-norm-ReLU-conv-norm, plus the shortcut, ReLU: (B, inputs, H, W) -> (B, outputs, H / stride, W / stride).

    The shortcut is the input itself, or a 1x1 convolution with a norm where the shape changes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = layers.conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = layers.norm2d(norm, outputs, layers.GROUP_SIZE, relu=True)
        self.conv2 = layers.conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = layers.norm2d(norm, outputs, layers.GROUP_SIZE, relu=True)  # of the sum with the shortcut
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                layers.conv2d(inputs, outputs, 1, stride, bias=False),
                layers.norm2d(norm, outputs, layers.GROUP_SIZE),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        out = self.norm1(self.conv1(x))
        return self.norm2(self.conv2(out), self.shortcut(x))


def resnet18(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build ResNet-18: a stem, then four groups of two blocks with 1, 2, 4 and 8 times ``width`` channels, averaged.

    Features d = 8 width. He's initialisation. No convolution biases, since norms follow.
    """
    model, norm, width = settings.name, settings.norm, settings.width
    channels, *_ = image_shape(input_shape, model, 8)
    imagenet = settings.stem == "imagenet"
    pooled = imagenet or settings.stem_pool
    check_maps(norm, model, input_shape, 3 + imagenet + pooled)
    check_final_norm(norm, settings.final_norm)
    body: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=layers.conv2d(channels, width, 7, 2, 3, bias=False)
        if imagenet
        else layers.conv2d(channels, width, 3, 1, 1, bias=False),
        norm1=layers.norm2d(norm, width, layers.GROUP_SIZE, relu=True),
    )
    if pooled:
        body["pool1"] = layers.max_pool(3, 2, 1)
    inputs = width
    for i in range(4):
        outputs = width * 2**i
        first = BasicBlock(inputs, outputs, 1 if i == 0 else 2, norm)
        rest = [BasicBlock(outputs, outputs, 1, norm) for _ in range(_BLOCKS - 1)]
        body[f"group{i + 1}"] = nn.Sequential(first, *rest)
        inputs = outputs
    if settings.final_norm == "map":
        body["final_norm"] = layers.norm2d(norm, inputs, layers.GROUP_SIZE)
    body["mean"] = layers.MeanPool()
    if settings.final_norm == "vector":
        body["final_norm"] = layers.norm1d("layer", inputs)
    return layers.he_init(layers.Classifier(nn.Sequential(body), layers.linear(inputs, num_outputs)))


def fedpce_resnet18(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build FedPCE's ResNet-18: instance norm, the CIFAR stem with its max-pool, and the features normalised.

    11,174,986 parameters for colour images and 10 classes, 10,624 of them scales and shifts; FedPCE(62) is
    ``width`` 62. The features d = 8 width are taken after the last norm.
    """
    fixed = replace(settings, stem="cifar", stem_pool=True, norm="instance", final_norm="vector")
    return resnet18(fixed, input_shape, num_outputs)
