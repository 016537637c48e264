"""The parts of a step besides the model, each as one kernel for all clients where CUDA and Triton are available."""

import importlib.util
import os
import shutil
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
    """Return whether Triton works, which comes with torch for CUDA on Linux and needs a C compiler for its launches."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        import triton  # noqa: F401
    except Exception:  # a broken installation may raise anything
        return False
    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    return os.environ.get("TRITON_INTERPRET") == "1" or any(name and shutil.which(name) for name in compilers)


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
