"""Layers that see all clients at once: under ``torch.func.vmap`` each is one kernel call, with its own gradient.

A layer is called for one client, x (B, C, H, W). It is a function of stacked tensors, (K, B, C, H, W) with K = 1, and
its vmap rule makes K larger; :mod:`bespoke.gpu.layer_kernels` does the work. Maps leave with channels last in
memory, as the next layer expects them.

A gradient is a second function with the same rule, since under ``vmap(grad(...))`` the backward pass is mapped too.
It has no derivative itself.
"""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from bespoke.gpu.step import has_triton, map_lanes, without_derivative

NO_SECOND = "this method takes second derivatives, which the fast layers do not have: use precision fp32"
_LARGEST_GROUP = 1 << 14  # numbers
LARGEST_WINDOW = 16  # of a max-pool, in each direction: the place in it is kept in a byte
_OPERANDS = {"tf32": torch.float32, "bf16": torch.bfloat16}


class Conv(NamedTuple):
    """A convolution without its tensors; ``pooled``: with bias, leaky ReLU and 2x2 max-pool (a stage)."""

    stride: int
    padding: int
    pooled: bool
    slope: float
    operands: torch.dtype
    result: torch.dtype


class Norm(NamedTuple):
    """A normalisation without its tensors; ``adds`` says whether a residual is added."""

    groups: int
    eps: float
    relu: bool
    adds: bool
    operands: torch.dtype


class Pool(NamedTuple):
    """A max-pool with square windows."""

    kernel: int
    stride: int
    padding: int


def kernels() -> Any:
    """Import the module of kernels when first needed, since Triton exists only where CUDA does."""
    from bespoke.gpu import layer_kernels as module

    return module


def usable(x: Tensor, precision: str) -> bool:
    """Return whether the kernels can take x: on a CUDA device, or anywhere with Triton's interpreter."""
    here = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return precision != "fp32" and here and x.dtype in (torch.float32, torch.bfloat16) and has_triton()


def conv_stage(
    x: Tensor, weight: Tensor, bias: Tensor, padding: int, slope: float, precision: str, last: bool = False
) -> Tensor:
    """Apply convolution, leaky ReLU of ``slope`` >= 0 and 2x2 max-pool: x (B, C, H, W) -> (B, outputs, H', W').

    The result has the precision's type, or float32 if it is the ``last`` before a linear layer.
    """
    dtype = _OPERANDS[precision]
    conv = Conv(1, padding, True, slope, dtype, torch.float32 if last else dtype)
    return _Convolution.apply(x[None], weight[None], bias[None], conv)[0].squeeze(0)


def conv2d(x: Tensor, weight: Tensor, stride: int, padding: int, precision: str) -> Tensor:
    """Convolve without bias: x (B, C, H, W) -> (B, outputs, H', W') in the precision's type."""
    dtype = _OPERANDS[precision]
    conv = Conv(stride, padding, False, 0.0, dtype, dtype)
    return _Convolution.apply(x[None], weight[None], None, conv)[0].squeeze(0)


def norm(
    x: Tensor,
    residual: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    groups: int,
    eps: float,
    relu: bool,
    precision: str,
) -> Tensor:
    """Apply GroupNorm with scale and shift (C,) [plus ``residual``] [then ReLU]: x (B, C, H, W) -> the same shape."""
    adds = residual is not None
    norm = Norm(groups, eps, relu, adds, _OPERANDS[precision])
    added = residual[None] if residual is not None else None
    return _Norm.apply(x[None], added, scale[None], shift[None], norm)[0].squeeze(0)


def norm_fits(x: Tensor, groups: int) -> bool:
    """Return whether a group of one image of x (B, C, H, W) fits into the kernels, which hold it at once."""
    return x[0].numel() // groups <= _LARGEST_GROUP


def max_pool(x: Tensor, kernel: int, stride: int, padding: int, precision: str) -> Tensor:
    """Take the largest of each window: x (B, C, H, W) -> (B, C, H', W') in the precision's type."""
    return _MaxPool.apply(x[None], Pool(kernel, stride, padding), _OPERANDS[precision])[0].squeeze(0)


# --- between one client and many ----------------------------------------------------------------------------


def _absent(like: Tensor) -> Tensor:
    """Return a stand-in for a missing output: a vmap rule has to return a tensor with a client axis."""
    return like.new_empty((len(like), 0))


def _channels_second(maps: Tensor) -> Tensor:
    """Return (K, B, H, W, C) as the view (K, B, C, H, W)."""
    return maps.permute(0, 1, 4, 2, 3)


def _channels_last(maps: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (K, B, C, H, W) as contiguous (K, B, H, W, C) of type ``dtype``; a view where it already is."""
    last = maps.permute(0, 1, 3, 4, 2)
    # One copy where the type changes; where it does not, torch ignores the format.
    return last.to(dtype, memory_format=torch.contiguous_format).contiguous()


# --- convolution --------------------------------------------------------------------------------------------


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, conv: Conv) -> tuple[Tensor, ...]:
    """Return y (K, B, outputs, H', W'), and for the gradient: code, packed x (absent if as given), packed weights."""
    maps = kernels().pack_maps(x, conv.operands)
    packed = kernels().pack_weight(weight, conv.operands)
    y, code = kernels().forward(_given(maps, x), packed, bias, tuple(weight.shape[1:]), conv)
    return _channels_second(y), _absent(y) if code is None else code, _absent(x) if maps is None else maps, packed


def _given(maps: Tensor | None, x: Tensor) -> Tensor:
    """Return the packed maps, or x itself, which then has the layout a kernel expects."""
    return x.permute(0, 1, 3, 4, 2) if maps is None else maps


def _convolve_back(
    dy: Tensor, code: Tensor, x: Tensor, maps: Tensor, packed: Tensor, conv: Conv, weight: Any, wants_input: bool
) -> tuple[Tensor, ...]:
    """Return dx (absent if not needed), dw, db (absent if not a stage); ``weight`` is the shape for one client."""
    dy = _channels_last(dy, conv.operands)
    maps = _given(maps if maps.dim() == 5 else None, x)
    dw, db = kernels().weight_gradient(maps, dy, code if conv.pooled else None, weight, conv)
    dx = _absent(dy)
    if wants_input:
        sides = tuple(x.shape[3:])
        dx = _channels_second(
            kernels().input_gradient(dy, code if conv.pooled else None, packed, weight, conv, sides, x.dtype)
        )
    return dx, dw, _absent(dy) if db is None else db


class _Convolution(Function):
    """(x, weight, bias or None, Conv) -> (y, code, maps, packed)."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _convolve(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return map_lanes(_Convolution, info, in_dims, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.conv = inputs
        _, code, maps, packed = output
        ctx.weight = tuple(weight.shape[1:])
        ctx.mark_non_differentiable(code, maps, packed)
        ctx.set_materialize_grads(False)  # else each of the three would get a tensor of zeros
        ctx.save_for_backward(code, x, maps, packed)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        wants_input, _, wants_bias, _ = ctx.needs_input_grad
        dx, dw, db = _ConvolutionGradient.apply(dy, *ctx.saved_tensors, ctx.conv, ctx.weight, wants_input)
        return dx if wants_input else None, dw, db if wants_bias else None, None


_ConvolutionGradient = without_derivative(_convolve_back, NO_SECOND)


# --- normalisation ------------------------------------------------------------------------------------------


def _normalise(x: Tensor, residual: Tensor | None, scale: Tensor, shift: Tensor, norm: Norm) -> tuple[Tensor, ...]:
    """Return y (K, B, C, H, W), and for the gradient mean and 1 / standard deviation (K, B, C) of each group."""
    maps = _channels_last(x, norm.operands)
    added = None if residual is None else _channels_last(residual, norm.operands)
    y, mean, rate = kernels().norm(maps, added, scale, shift, norm.groups, norm.eps, norm.relu)
    return _channels_second(y), mean, rate


def _normalise_back(
    dy: Tensor, x: Tensor, y: Tensor | None, scale: Tensor, shift: Tensor, mean: Tensor, rate: Tensor, norm: Norm
) -> tuple[Tensor, ...]:
    """Return dx, dresidual (absent without a residual), dscale, dshift."""
    dy, maps = _channels_last(dy, norm.operands), _channels_last(x, norm.operands)
    out = None if y is None else _channels_last(y, norm.operands)
    dx, dresidual, dscale, dshift = kernels().norm_gradient(
        dy, maps, out, scale, shift, mean, rate, norm.groups, norm.relu
    )
    added = _absent(dx) if dresidual is None else _channels_second(dresidual)
    return _channels_second(dx).to(x.dtype), added, dscale, dshift


class _Norm(Function):
    """(x, residual or None, scale, shift, Norm) -> (y, mean, rate)."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _normalise(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return map_lanes(_Norm, info, in_dims, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, scale, shift, ctx.norm = inputs
        y, mean, rate = output
        ctx.mark_non_differentiable(mean, rate)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y if ctx.norm.adds else None, scale, shift, mean, rate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        dx, added, dscale, dshift = _NormGradient.apply(dy, *ctx.saved_tensors, ctx.norm)
        return dx, added if ctx.norm.adds else None, dscale, dshift, None


_NormGradient = without_derivative(_normalise_back, NO_SECOND)


# --- max-pool -----------------------------------------------------------------------------------------------


def _pool(x: Tensor, pool: Pool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return y (K, B, C, H', W'), and for the gradient the place of each largest value in its window, uint8."""
    y, code = kernels().max_pool(_channels_last(x, dtype), pool)
    return _channels_second(y), code


def _pool_back(dy: Tensor, code: Tensor, pool: Pool, sides: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor]:
    """Return dx (K, B, C, H, W) for maps of H x W = ``sides``."""
    return (_channels_second(kernels().max_pool_gradient(_channels_last(dy, dy.dtype), code, pool, sides)).to(dtype),)


class _MaxPool(Function):
    """(x, Pool, dtype) -> (y, code)."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return _pool(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return map_lanes(_MaxPool, info, in_dims, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.pool, _ = inputs
        ctx.sides, ctx.dtype = tuple(x.shape[3:]), x.dtype
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
        return *_PoolGradient.apply(dy, *ctx.saved_tensors, ctx.pool, ctx.sides, ctx.dtype), None, None


_PoolGradient = without_derivative(_pool_back, NO_SECOND)
