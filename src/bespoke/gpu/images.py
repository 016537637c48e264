"""The colour jitter as one kernel for all clients where CUDA and Triton are available. Not differentiable."""

from types import ModuleType

from torch import Tensor

from bespoke.gpu import step

_LARGEST = 1 << 13  # pixels of an image, which a program holds at once


def kernels() -> ModuleType:
    """Import the module of kernels when first needed."""
    from bespoke.gpu import image_kernels

    return image_kernels


def usable(x: Tensor) -> bool:
    """Return whether the kernels can take images x (..., H, W)."""
    return step.usable(x) and x.shape[-2] * x.shape[-1] <= _LARGEST


def jitter(x: Tensor, amounts: Tensor, order: Tensor, grey: tuple[float, float, float]) -> Tensor:
    """Change the colours of x (B, 3, H, W) float32 by amounts (4,), in the order (4,): the same shape."""
    out: Tensor = _Jitter.apply(x[None], amounts[None], order[None], grey)[0]
    return out.squeeze(0)


_WHY = "images that are changed at every access have no derivative"
_Jitter = step.without_derivative(lambda *inputs: (kernels().jitter(*inputs),), _WHY)
