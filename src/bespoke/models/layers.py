"""The building blocks of every model: layers are made only here."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bespoke.core import rng
from bespoke.core.task import PRECISIONS, Random
from bespoke.errors import UserError
from bespoke.gpu import fast_layers

_GROUPS = 4  # of GroupNorm in the plain CNNs
GROUP_SIZE = 16  # channels per group of GroupNorm in the deep nets
_SHARED_SIZE = 32  # channels per group of the norm with one scale and shift per group


class Classifier(nn.Module):
    """``head(body(x))``: x (B, ...) -> features (B, d) -> logits (B, C)."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, ...) to logits (B, C)."""
        return self.head(self.body(x))


class Stages(nn.Sequential):
    """Layers in sequence; where possible, convolution, ReLU and a max-pool that halves are one step.

    This needs precision tf32 or bf16, and :func:`bespoke.gpu.fast_layers.usable` inputs.
    """

    precision: str = "fp32"

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, C, H, W) to the last layer's output."""
        if not fast_layers.usable(x, self.precision):
            return super().forward(x)
        left = list(self)
        while left:
            stage = _stage(left[:4])
            if stage is None:
                x = left.pop(0)(x)
                continue
            left = left[4:]
            (conv, bias, slope), last = stage, not any(isinstance(layer, nn.Conv2d) for layer in left)
            x = fast_layers.conv_stage(x, conv.weight, bias, int(conv.padding[0]), slope, self.precision, last)
        return x


def _stage(layers: list[nn.Module]) -> tuple[nn.Conv2d, Tensor, float] | None:
    """Return convolution, bias and ReLU slope, if the layers make a stage: no norm, and a max-pool that halves."""
    if len(layers) < 4:
        return None
    conv, norm, relu, pool = layers
    if not isinstance(conv, nn.Conv2d) or not isinstance(norm, nn.Identity) or not isinstance(pool, nn.MaxPool2d):
        return None
    halves = (pool.kernel_size, pool.stride, pool.padding) == (2, 2, 0)
    plain = conv.stride == (1, 1) and conv.groups == 1 and conv.padding[0] == conv.padding[1]
    if conv.bias is None or not plain or not halves or not isinstance(relu, nn.ReLU | nn.LeakyReLU):
        return None
    return conv, conv.bias, relu.negative_slope if isinstance(relu, nn.LeakyReLU) else 0.0


class Conv2d(nn.Conv2d):
    """nn.Conv2d; with precision tf32 or bf16 and without groups, one kernel for all clients."""

    precision: str = "fp32"

    def forward(self, input: Tensor) -> Tensor:
        """Map input (B, C, H, W) to (B, outputs, H', W')."""
        same = self.stride[0] == self.stride[1] and self.padding[0] == self.padding[1] and self.groups == 1
        if not (same and fast_layers.usable(input, self.precision)):
            return super().forward(input.to(self.weight.dtype))
        out = fast_layers.conv2d(input, self.weight, self.stride[0], int(self.padding[0]), self.precision)
        return out if self.bias is None else out + self.bias[:, None, None].to(out.dtype)


class MaxPool2d(nn.MaxPool2d):
    """nn.MaxPool2d; with precision tf32 or bf16 and square windows, one kernel for all clients."""

    precision: str = "fp32"

    def forward(self, input: Tensor) -> Tensor:
        """Map input (B, C, H, W) to (B, C, H', W')."""
        kernel, stride, padding = self.kernel_size, self.stride, self.padding
        if not (isinstance(kernel, int) and isinstance(stride, int) and isinstance(padding, int)):
            return super().forward(input)
        if kernel > fast_layers.LARGEST_WINDOW or not fast_layers.usable(input, self.precision):
            return super().forward(input)
        return fast_layers.max_pool(input, kernel, stride, padding, self.precision)


class Linear(nn.Linear):
    """nn.Linear; on CUDA for many clients at once: see :func:`product`.

    The bias is added separately there, since under vmap torch would multiply it by one first.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map input (B, inputs) to (B, outputs)."""
        if not input.is_cuda:
            return super().forward(input)
        return product(input, self.weight) + self.bias


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (..., B, inputs) by weight (outputs, inputs) as F.linear does: (..., B, outputs).

    With the weight on the left, its gradient under vmap has the weight's memory layout. F.linear's gradient is
    transposed, and copying it in the optimiser took a quarter of a step of 50 clients with 10 rows each.
    """
    return (weight @ x.mT).mT


class GroupNorm(nn.GroupNorm):
    """nn.GroupNorm, plus an optional residual and ReLU; with precision tf32 or bf16 all in one kernel."""

    precision: str = "fp32"

    def __init__(self, groups: int, channels: int, relu: bool = False, affine: bool = True) -> None:
        super().__init__(groups, channels, affine=affine)
        self.relu = relu

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map input and residual (B, C, H, W) to the same shape."""
        if fast_layers.usable(input, self.precision) and fast_layers.norm_fits(input, self.num_groups):
            scale, shift = self._by_channel()
            return fast_layers.norm(input, residual, scale, shift, self.num_groups, self.eps, self.relu, self.precision)
        out = self._plain(input.to(self.weight.dtype))
        out = out if residual is None else out + residual
        return F.relu(out) if self.relu else out

    def _plain(self, input: Tensor) -> Tensor:
        return super().forward(input)

    def _by_channel(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias


class Dropout(Random):
    """Dropout: in training each value is zero with probability p, and the others are scaled up to keep the mean.

    It draws from the batch's key wherever a training loss passes it on. With ``by_channel`` all values of a channel
    share one draw.
    """

    def __init__(self, p: float, by_channel: bool = False) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise UserError(f"dropout p must be at least 0 and less than 1, not {p}")
        self.p = p
        self.by_channel = by_channel

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, ...), or (B, C, ...) if by channel, to the same shape."""
        key = self.draw()
        if key is None:
            return x
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.by_channel else x.shape
        return x * (rng.uniform(key, shape, x.dtype) >= self.p) / (1.0 - self.p)


class SharedGroupNorm(GroupNorm):
    """GroupNorm with one scale and one shift per group: ``weight`` and ``bias`` are (groups,).

    Statistics per sample and group, biased variance.
    """

    def __init__(self, groups: int, channels: int, relu: bool = False) -> None:
        super().__init__(groups, channels, relu, affine=False)
        self.weight = nn.Parameter(torch.ones(groups))
        self.bias = nn.Parameter(torch.zeros(groups))

    def _plain(self, input: Tensor) -> Tensor:
        standard = F.group_norm(input, self.num_groups, eps=self.eps)
        parts = standard.reshape(input.shape[0], self.num_groups, -1)
        return (parts * self.weight[:, None] + self.bias[:, None]).reshape(input.shape)

    def _by_channel(self) -> tuple[Tensor, Tensor]:
        size = self.num_channels // self.num_groups
        return self.weight.repeat_interleave(size), self.bias.repeat_interleave(size)


def set_precision(module: nn.Module, precision: str) -> nn.Module:
    """Set the precision of a module's fast layers: fp32 (torch's own layers), tf32 or bf16; return the module."""
    if precision not in PRECISIONS:
        raise UserError(f"the precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    for layer in module.modules():
        if isinstance(layer, Stages | Conv2d | GroupNorm | MaxPool2d):
            layer.precision = precision
    return module


def conv2d(
    inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, groups: int = 1, bias: bool = True
) -> nn.Module:
    """Return a convolution: (B, inputs, H, W) -> (B, outputs, H', W')."""
    return Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=bias)


def linear(inputs: int, outputs: int) -> nn.Module:
    """Return a linear layer with bias: (B, inputs) -> (B, outputs)."""
    return Linear(inputs, outputs)


def max_pool(kernel: int, stride: int | None = None, padding: int = 0) -> nn.Module:
    """Return a max-pool: (B, C, H, W) -> (B, C, H', W'); without a stride, windows do not overlap."""
    return MaxPool2d(kernel, stride, padding)


class MeanPool(nn.Module):
    """The mean of each map: (B, C, H, W) -> (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, C, H, W) to (B, C)."""
        return _full(x).mean((2, 3))


class Flatten(nn.Flatten):
    """(B, C, H, W) -> (B, C * H * W), as linear layers need it."""

    def forward(self, input: Tensor) -> Tensor:
        """Map input (B, ...) to (B, d)."""
        return _full(super().forward(input))


def _full(x: Tensor) -> Tensor:
    """Convert bfloat16 maps to float32; return others unchanged."""
    return x.float() if x.dtype == torch.bfloat16 else x


def norm2d(kind: str, channels: int, group_size: int = 0, relu: bool = False) -> nn.Module:
    """Return a normalisation layer for maps (B, channels, H, W), with an optional ReLU; biased variance, eps 1e-5.

    ``group`` puts ``group_size`` channels into a group, or makes 4 groups if that is 0; ``instance`` makes every
    channel its own group, ``layer`` makes one group. These have one scale and shift per channel; ``per_group``
    puts 32 channels into a group and has one scale and shift per group. A number that does not divide the
    channels is replaced by its largest divisor that does. Statistics are per sample.
    """
    if kind == "group":
        groups = channels // math.gcd(group_size, channels) if group_size else math.gcd(_GROUPS, channels)
        return GroupNorm(groups, channels, relu)
    if kind == "instance":
        return GroupNorm(channels, channels, relu)  # like nn.InstanceNorm2d, but faster, also under vmap
    if kind == "per_group":
        return SharedGroupNorm(channels // math.gcd(_SHARED_SIZE, channels), channels, relu)
    if kind == "layer":
        return GroupNorm(1, channels, relu)
    return nn.ReLU() if relu else nn.Identity()


def norm1d(kind: str, units: int) -> nn.Module:
    """Return a normalisation layer for vectors (B, units), with one scale and shift per unit; ``group``: 4 groups."""
    if kind == "group":
        groups = math.gcd(_GROUPS, units)
        if groups == units:
            raise UserError(
                f'[model] norm = "group" makes {units} units zero, in {groups} groups of one: use more of them, or '
                'norm = "layer"'
            )
        return nn.GroupNorm(groups, units)
    return nn.LayerNorm(units) if kind == "layer" else nn.Identity()


def he_init(module: nn.Module) -> nn.Module:
    """Draw a module's convolutions from He's normal distribution (fan out), with biases 0; return the module."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module
