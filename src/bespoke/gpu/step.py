"""The parts of a step besides the model, each as one kernel for all clients where CUDA and Triton are available."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bespoke.errors import UserError


@cache
def has_triton() -> bool:
    """Return whether Triton, which comes with torch for CUDA on Linux, is installed."""
    return importlib.util.find_spec("triton") is not None


def kernels() -> ModuleType:
    """Import the module of kernels when first needed."""
    from bespoke.gpu import step_kernels

    return step_kernels


def usable(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether the kernels, which need this type, can take x."""
    return x.is_cuda and x.dtype == dtype and has_triton()


def map_lanes(function: type[Function], info: Any, in_dims: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
    """Apply a function of stacked tensors as a vmap rule: merge the mapped axis with the clients' axis.

    A tensor that all clients share is not copied.
    """
    size = info.batch_size
    stacked = [
        t
        if not isinstance(t, Tensor)
        else (t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)
        for t, dim in zip(inputs, in_dims, strict=True)
    ]
    outputs = tuple(out.unflatten(0, (size, -1)) for out in function.apply(*stacked))
    return outputs, (0,) * len(outputs)


def without_derivative(compute: Callable[..., tuple[Tensor, ...]], why: str) -> type[Function]:
    """Return ``compute``, on stacked tensors, as a function with a vmap rule; ``why`` it cannot be differentiated."""

    class Computed(Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            return compute(*inputs)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
            return map_lanes(Computed, info, in_dims, inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Keep nothing: there is no derivative."""

        @staticmethod
        def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
            raise UserError(why)

    return Computed


# --- randomness ---------------------------------------------------------------------------------------------


def threefry(first: Tensor, second: Tensor, counter: Tensor) -> Tensor:
    """Return words (..., 2) for the two words of a key and a counter, int64 on a CUDA device, which broadcast."""
    out: Tensor = _Threefry.apply(first, second, counter.to(first.device))
    return out


class _Threefry(Function):
    @staticmethod
    def forward(first: Tensor, second: Tensor, counter: Tensor) -> Tensor:
        out: Tensor = kernels().threefry(first, second, counter)
        return out

    @staticmethod
    def vmap(info: Any, in_dims: Any, *words: Tensor) -> tuple[Tensor, int]:
        most = max(t.ndim - (dim is not None) for t, dim in zip(words, in_dims, strict=True))
        full = []
        for t, dim in zip(words, in_dims, strict=True):
            if dim is not None:  # the clients come first, then what broadcasts
                t = t.movedim(dim, 0)
                t = t[(slice(None), *[None] * (most + 1 - t.ndim))]
            full.append(t)
        return _Threefry.apply(*full), 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None, None]:
        return None, None, None


# --- rows of a pool -----------------------------------------------------------------------------------------


def take_scaled(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows (B,) of a pool x (N, ...) of 8-bit images, scaled to [-1, 1]: (B, ...) of type ``dtype``."""
    if dtype == torch.float32 and usable(x, torch.uint8):
        out: Tensor = _TakeScaled.apply(x, rows)
        return out
    return x[rows].to(dtype) / 127.5 - 1.0


class _TakeScaled(Function):
    @staticmethod
    def forward(x: Tensor, rows: Tensor) -> Tensor:
        out: Tensor = kernels().take_scaled(x, rows)
        return out

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, rows: Tensor) -> tuple[Tensor, int]:
        assert in_dims[0] is None, "all clients share the pool"
        return _TakeScaled.apply(x, rows.movedim(in_dims[1], 0)), 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        return None, None


# --- the mean cross entropy ---------------------------------------------------------------------------------


def cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the real rows, 0-d: logits (B, C), labels and mask (B,). All derivatives exist."""
    loss: Tensor = _CrossEntropy.apply(logits[None], labels[None], mask[None])[0]
    return loss.squeeze(0)


class _CrossEntropy(Function):
    """(logits (K, B, C), labels, mask (K, B)) -> (losses (K,), their gradients (K, B, C))."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        loss, slope = kernels().cross_entropy(*inputs)
        return loss, slope

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return map_lanes(_CrossEntropy, info, in_dims, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # else it would get a tensor of zeros
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Any) -> tuple[Any, ...]:
        return *_CrossEntropyGradient.apply(dloss, *ctx.saved_tensors), None, None


class _CrossEntropyGradient(Function):
    """(dloss (K,), logits, labels, mask, slope) -> (dlogits,); differentiated by the softmax's Jacobian."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor]:
        dloss, *_, slope = inputs
        return (dloss[:, None, None] * slope,)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
        return map_lanes(_CrossEntropyGradient, info, in_dims, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        dloss, logits, _, mask, slope = ctx.saved_tensors
        weight = mask / mask.sum(1, keepdim=True).clamp(min=1.0)
        p, h = logits.softmax(-1), g * (dloss[:, None] * weight)[:, :, None]
        return (g * slope).sum((1, 2)), p * (h - (p * h).sum(-1, keepdim=True)), None, None, None
