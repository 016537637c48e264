"""The Triton kernel for the images of all clients: the colour jitter."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bespoke.gpu.launching import launch


@triton.jit
def _clipped(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _channel(value, chroma, sector, n: tl.constexpr):
    k = n + sector
    k = k - 6.0 * tl.floor(k / 6.0)
    return value - chroma * _clipped(tl.minimum(k, 4.0 - k))


@triton.jit
def _turn(r, g, b, shift):
    """Turn the hue by ``shift`` of the full circle."""
    value = tl.maximum(tl.maximum(r, g), b)
    chroma = value - tl.minimum(tl.minimum(r, g), b)
    safe = tl.where(chroma > 0, chroma, 1.0)
    sector = tl.where(value == g, 2.0 + (b - r) / safe, 4.0 + (r - g) / safe)
    sector = tl.where(value == r, (g - b) / safe, sector) + 6.0 * shift
    return (
        _channel(value, chroma, sector, 5.0),
        _channel(value, chroma, sector, 3.0),
        _channel(value, chroma, sector, 1.0),
    )


@triton.jit(do_not_specialize=["batch", "pixels"])
def _jitter(x, y, amounts, order, batch, pixels, red, green, blue, BLOCK: tl.constexpr):
    """Change one image (3, pixels): brightness, contrast, saturation and hue in the client's order."""
    image = tl.program_id(0).to(tl.int64)
    client = image // batch
    p = tl.arange(0, BLOCK)
    live = p < pixels
    place = image * 3 * pixels + p
    r = tl.load(x + place, mask=live, other=0.0)
    g = tl.load(x + place + pixels, mask=live, other=0.0)
    b = tl.load(x + place + 2 * pixels, mask=live, other=0.0)
    for step in range(4):
        which = tl.load(order + client * 4 + step)
        amount = tl.load(amounts + client * 4 + which)
        if which == 3:
            r, g, b = _turn(r, g, b, amount)
        else:
            luma = red * r + green * g + blue * b
            grey = tl.where(which == 1, tl.sum(tl.where(live, luma, 0.0)) / pixels, luma)
            rest = tl.where(which == 0, 0.0, (1.0 - amount) * grey)
            r, g, b = _clipped(amount * r + rest), _clipped(amount * g + rest), _clipped(amount * b + rest)
    tl.store(y + place, r, mask=live)
    tl.store(y + place + pixels, g, mask=live)
    tl.store(y + place + 2 * pixels, b, mask=live)


def jitter(x: Tensor, amounts: Tensor, order: Tensor, grey: tuple[float, float, float]) -> Tensor:
    """Change the colours of x (K, B, 3, H, W) float32 by amounts (K, 4), in the order (K, 4): the same shape."""
    x, amounts, order = x.contiguous(), amounts.contiguous(), order.contiguous()
    y, pixels = torch.empty_like(x), x.shape[3] * x.shape[4]
    launch(
        _jitter, (x.shape[0] * x.shape[1],), [y],
        x, y, amounts, order, x.shape[1], pixels, *grey, BLOCK=triton.next_power_of_2(pixels),
    )  # fmt: skip
    return y
