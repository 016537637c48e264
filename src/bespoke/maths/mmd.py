"""Kernels: how much two samples differ."""

import torch
from torch import Tensor


def mmd(x: Tensor, y: Tensor, mask: Tensor, widths: tuple[float, ...] = (10.0, 15.0, 20.0, 50.0)) -> Tensor:
    """Return the squared maximum mean discrepancy between the real rows of x and y (B, d), 0-d; both use ``mask`` (B,).

    The kernel is the sum of exp(-distance^2 / (2 width)) over the widths; a row's pair with itself counts.
    """
    origin = y.mean(dim=0).detach()  # distances do not need it, but round least near the origin
    x, y = x - origin, y - origin

    def kernel(p: Tensor, q: Tensor) -> Tensor:
        squares = p.square().sum(dim=1)[:, None] + q.square().sum(dim=1) - 2.0 * p @ q.T
        squares = squares.clamp(min=0.0)  # rounding
        return torch.stack([torch.exp(-squares / (2.0 * width)) for width in widths]).sum(dim=0)

    pairs = mask[:, None] * mask
    return ((kernel(x, x) + kernel(y, y) - 2.0 * kernel(x, y)) * pairs).sum() / pairs.sum().clamp(min=1.0)
