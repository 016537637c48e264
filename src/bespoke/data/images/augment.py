"""FedPCE's augmentation of training images: crop, flip, rotation and erasing, drawn separately for every image.

One batched gather does all of the geometry. Shapes are fixed and every draw comes from the key and the image's place in
the batch, so the result is the same for one client and under ``torch.func.vmap``.
"""

import math

import torch
from torch import Tensor

from bespoke.core import rng

PAD = 4
FLIP, ROTATE, ERASE = 0.25, 0.25, 0.5  # probabilities
DEGREES = 15.0
SMALLEST, LARGEST = 1 / 64, 1 / 4  # area of an erased rectangle: 16 to 256 pixels of 32 x 32
RATIO = 4.0  # its height over its width is from 1/4 to 4
DRAWS = 10  # uniform numbers per image


def augment(key: Tensor, x: Tensor, fill: Tensor) -> Tensor:
    """Crop, flip, rotate and erase images ``x`` (B, C, H, W); uncovered pixels become ``fill`` (C, 1, 1)."""
    u = rng.uniform(key, (x.shape[-4], DRAWS), torch.float64)
    return erase(move(x, u[:, :5], fill), u[:, 5:], fill)


def turns(u: Tensor) -> tuple[Tensor, ...]:
    """Draw a crop from images padded by 4, a flip with p = .25, and a rotation by up to 15 degrees with p = .25.

    ``u`` (B, 5) are uniform numbers: row and column of the crop, flip, whether to rotate, and the angle. Return, each
    (B,), by how much to move down and right, whether to flip, and cosine and sine of the angle.
    """
    down, right = ((u[:, i] * (2 * PAD + 1)).floor() - PAD for i in (0, 1))
    angle = torch.where(u[:, 3] < ROTATE, (2.0 * u[:, 4] - 1.0) * math.radians(DEGREES), torch.zeros_like(u[:, 4]))
    return down, right, (u[:, 2] < FLIP).to(u.dtype), angle.cos(), angle.sin()


def rectangles(u: Tensor, height: int, width: int) -> tuple[Tensor, ...]:
    """Draw a rectangle with p = .5; its area, log ratio and place are uniform.

    ``u`` (B, 5) are uniform numbers: whether to erase, area, ratio, top and left. Return, each (B,), the first row and
    the row after the last, the same for columns; without a rectangle they are equal.
    """
    low, high = math.ceil(SMALLEST * height * width), math.floor(LARGEST * height * width)
    area = low + (high - low) * u[:, 1]
    ratio = torch.exp((2.0 * u[:, 2] - 1.0) * math.log(RATIO))
    tall = (area * ratio).sqrt().round().clamp(1, height)
    wide = (area / tall).round()
    # Whole pixels must not leave the range of areas.
    wide = torch.minimum(torch.maximum(wide, (low / tall).ceil()), (high / tall).floor()).clamp(1, width)
    top, left = (u[:, 3] * (height - tall + 1)).floor(), (u[:, 4] * (width - wide + 1)).floor()
    return top, top + torch.where(u[:, 0] < ERASE, tall, 0.0), left, left + wide


def move(x: Tensor, u: Tensor, fill: Tensor) -> Tensor:
    """Crop, flip and rotate (nearest pixel) images ``x`` (B, C, H, W), by the uniform numbers of :func:`turns`."""
    height, width = x.shape[-2:]
    down, right, flip, cos, sin = (t[:, None, None] for t in turns(u))
    # Backwards from the place of a pixel in the result: undo the rotation, then the flip, then the crop.
    row = torch.arange(height, device=x.device, dtype=u.dtype)[:, None] - (height - 1) / 2
    column = torch.arange(width, device=x.device, dtype=u.dtype)[None, :] - (width - 1) / 2
    source_row = (cos * row + sin * column + (height - 1) / 2).round()
    source_column = (cos * column - sin * row + (width - 1) / 2).round()
    inside = (source_row >= 0) & (source_row < height) & (source_column >= 0) & (source_column < width)
    source_column = torch.where(flip != 0, width - 1 - source_column, source_column) + right
    source_row = source_row + down
    inside = inside & (source_row >= 0) & (source_row < height) & (source_column >= 0) & (source_column < width)
    place = source_row.clamp(0, height - 1) * width + source_column.clamp(0, width - 1)
    index = place.to(torch.int64).flatten(-2)[:, None, :].expand(-1, x.shape[-3], -1)
    moved = x.flatten(-2).gather(-1, index).reshape(x.shape)
    return torch.where(inside[:, None], moved, fill.to(x.dtype))


def erase(x: Tensor, u: Tensor, fill: Tensor) -> Tensor:
    """Set a rectangle of images ``x`` (B, C, H, W) to ``fill``, by the uniform numbers of :func:`rectangles`."""
    height, width = x.shape[-2:]
    top, bottom, left, edge = (t[:, None, None] for t in rectangles(u, height, width))
    row = torch.arange(height, device=x.device)[:, None]
    column = torch.arange(width, device=x.device)[None, :]
    gone = (row >= top) & (row < bottom) & (column >= left) & (column < edge)
    return torch.where(gone[:, None], fill.to(x.dtype), x)
