"""Fog and a frost-like texture: the two corruptions that overlay the image with a picture.

CIFAR-10-C's frost uses third-party photographs. Here the texture is drawn: ridged plasma noise and ice
needles in pale blue, so results on it are "frost-like" and not frost.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

Draws = Sequence[np.random.Generator]

# Height and width of the five frost pictures: those of the photographs after CIFAR-10-C's resizing to a fifth.
FROST_SIZES = ((120, 180), (63, 112), (63, 112), (70, 105), (99, 132))
_NEEDLES = 60  # per 128 x 128 pixels
_ICE = np.array([0.86, 0.94, 1.0])  # pale blue


def plasma(draws: Draws, size: int, decay: float) -> np.ndarray:
    """Draw diamond-square clouds on a torus, one per generator: (n, size, size) in [0, 1]; size is a power of two.

    At each step the centres of all squares are set to the mean of their corners, then the midpoints of all
    edges to the mean of their four neighbours, plus wibble U(-wibble, wibble); wibble starts at 100 and is
    divided by ``decay`` as the step is halved.
    """
    field = np.zeros((len(draws), size, size))
    step, wibble = size, 100.0

    def wibbled(total: np.ndarray) -> np.ndarray:
        return total / 4 + wibble * np.stack([draw.uniform(-wibble, wibble, total.shape[1:]) for draw in draws])

    while step >= 2:
        half = step // 2
        corner = field[:, ::step, ::step]
        across = corner + np.roll(corner, -1, axis=1)
        field[:, half::step, half::step] = wibbled(across + np.roll(across, -1, axis=2))
        centre = field[:, half::step, half::step]
        field[:, ::step, half::step] = wibbled(
            centre + np.roll(centre, 1, axis=1) + corner + np.roll(corner, -1, axis=2)
        )
        field[:, half::step, ::step] = wibbled(
            centre + np.roll(centre, 1, axis=2) + corner + np.roll(corner, -1, axis=1)
        )
        step, wibble = half, wibble / decay
    field -= field.min(axis=(1, 2), keepdims=True)
    return field / field.max(axis=(1, 2), keepdims=True)


def fog(x: np.ndarray, constants: tuple[float, float], draws: Draws) -> np.ndarray:
    """Add clouds of amount a to x (n, H, W, C): (x + a clouds) m / (m + a), with m the image's largest value."""
    amount, decay = constants
    height, width = x.shape[1:3]
    size = max(2, 1 << (max(height, width) - 1).bit_length())
    largest = x.max(axis=(1, 2, 3), keepdims=True)
    clouds = plasma(draws, size, decay)[:, :height, :width, None]
    return (x + amount * clouds) * largest / (largest + amount)


def frost(x: np.ndarray, constants: tuple[float, float], draws: Draws) -> np.ndarray:
    """Return a x + b texture (n, H, W, C), the texture a random piece of one of five frost-like pictures."""
    kept, added = constants
    height, width, channels = x.shape[1:]
    pieces = np.empty_like(x)
    for piece, draw in zip(pieces, draws, strict=True):
        picture = frost_picture(int(draw.integers(len(FROST_SIZES))), max(height, width))
        top, left = (
            int(draw.integers(have - need)) for have, need in zip(picture.shape, (height, width), strict=False)
        )
        found = picture[top : top + height, left : left + width]
        piece[:] = found if channels == 3 else found.mean(axis=2, keepdims=True)
    return kept * x + added * pieces


@lru_cache
def frost_picture(number: int, image: int = 32) -> np.ndarray:
    """Draw one of the five pictures, (H, W, 3) in [0, 1], scaled up for images beyond 32 pixels."""
    scale = max(1, -(-image // 32))
    height, width = (scale * side for side in FROST_SIZES[number])
    draw = np.random.Generator(np.random.Philox(key=np.array([0xF057, number], dtype=np.uint64)))
    size = 1 << (max(height, width) - 1).bit_length()
    coarse, fine, veil = (plasma([draw], size, decay)[0] for decay in (2.2, 1.7, 3.0))
    ridges = (1.0 - np.abs(2.0 * coarse - 1.0)) ** 3 * (0.4 + 0.6 * fine)
    ice = 0.55 * ridges / ridges.max() + 0.2 * veil + 0.9 * _needles(draw, size)
    shine = np.clip(ice[:height, :width], 0.0, 1.0)[:, :, None]
    return shine * _ICE + (1.0 - shine) * 0.15 * _ICE**3


def _needles(draw: np.random.Generator, size: int) -> np.ndarray:
    """Draw ice needles with side branches at 60 degrees, slightly blurred, on a torus: (size, size) in [0, 1]."""
    field = np.zeros((size, size))
    for _ in range(_NEEDLES * size**2 // 128**2):
        start, heading = draw.uniform(0, size, 2), draw.uniform(0, 2 * np.pi)
        length = draw.uniform(0.1, 0.4) * 128
        _line(field, start, heading, length)
        for along in np.arange(0.15, 0.95, 0.12):
            root = start + along * length * np.array([np.sin(heading), np.cos(heading)])
            for side in (-np.pi / 3, np.pi / 3):
                _line(field, root, heading + side, 0.3 * (1.0 - along) * length)
    for axis in (0, 1):
        field = 0.5 * field + 0.25 * (np.roll(field, 1, axis) + np.roll(field, -1, axis))
    return field


def _line(field: np.ndarray, start: np.ndarray, heading: float, length: float) -> None:
    along = np.arange(0.0, length, 0.5)
    row, column = (start[i] + along * f(heading) for i, f in enumerate((np.sin, np.cos)))
    place = row.astype(np.int64) % len(field), column.astype(np.int64) % len(field)
    np.maximum.at(field, place, 1.0 - 0.6 * along / max(length, 1.0))
