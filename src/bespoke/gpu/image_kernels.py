"""Triton kernels for the images of all clients: the colour jitter, and the geometry of augmentation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bespoke.gpu.launching import launch

_HALVES_TO_EVEN = tl.constexpr(6755399441055744.0)  # 1.5 * 2**52: adding and subtracting it rounds a float64


# --- colour jitter ------------------------------------------------------------------------------------------


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


# --- geometry -----------------------------------------------------------------------------------------------


@triton.jit
def _rounded(x):
    return (x + _HALVES_TO_EVEN) - _HALVES_TO_EVEN


@triton.jit(do_not_specialize=["batch"])
def _move(x, y, moves, fill, batch, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Move one image (C, H, W) and erase a rectangle of it; see ``bespoke.data.images.augment`` for the numbers."""
    image = tl.program_id(0).to(tl.int64)
    client = image // batch
    p = tl.arange(0, BLOCK)
    live = p < H * W
    moves += image * 9
    down, right, flip = tl.load(moves), tl.load(moves + 1), tl.load(moves + 2)
    cos, sin = tl.load(moves + 3), tl.load(moves + 4)
    top, bottom, left, edge = tl.load(moves + 5), tl.load(moves + 6), tl.load(moves + 7), tl.load(moves + 8)
    row, column = (p // W).to(tl.float64), (p % W).to(tl.float64)
    gone = (row >= top) & (row < bottom) & (column >= left) & (column < edge)
    row, column = row - (H - 1) / 2, column - (W - 1) / 2
    from_row = _rounded(cos * row + sin * column + (H - 1) / 2)
    from_column = _rounded(cos * column - sin * row + (W - 1) / 2)
    inside = live & (from_row >= 0) & (from_row < H) & (from_column >= 0) & (from_column < W) & (gone == 0)
    from_column = tl.where(flip != 0, W - 1 - from_column, from_column) + right
    from_row = from_row + down
    inside = inside & (from_row >= 0) & (from_row < H) & (from_column >= 0) & (from_column < W)
    place = (from_row * W + from_column).to(tl.int32)
    for c in tl.static_range(C):
        start = (image * C + c) * (H * W)
        value = tl.load(x + start + place, mask=inside, other=0.0)
        tl.store(y + start + p, tl.where(inside, value, tl.load(fill + client * C + c)), mask=live)


def move(x: Tensor, moves: Tensor, fill: Tensor) -> Tensor:
    """Move images x (K, B, C, H, W) float32 by ``moves`` (K, B, 9) float64; uncovered pixels become fill (K, C)."""
    x, moves, fill = x.contiguous(), moves.contiguous(), fill.contiguous()
    clients, batch, channels, height, width = x.shape
    y = torch.empty_like(x)
    launch(
        _move, (clients * batch,), [y],
        x, y, moves, fill, batch, C=channels, H=height, W=width, BLOCK=triton.next_power_of_2(height * width),
    )  # fmt: skip
    return y
