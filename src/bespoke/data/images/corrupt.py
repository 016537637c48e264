"""The ten corruptions of CIFAR-S at five severities, with the constants of CIFAR-10-C, batched in NumPy.

An image's randomness depends only on the corruption, the severity and the image's row in its data set: it is the
same in every federation, as if the corrupted sets had been generated once.
"""

import io
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from bespoke.data.images import weather
from bespoke.errors import UserError
from bespoke.registry import closest

SEVERITIES = 5
CIFAR_S = "cifar_s"  # all corruptions, one pair of a corruption and a severity per client
_AT_ONCE = 1000  # images

Draws = Sequence[np.random.Generator]  # one generator per image


def gaussian_noise(x: np.ndarray, sigma: float, draws: Draws) -> np.ndarray:
    """Add normal noise to every value of x (n, H, W, C) in [0, 1]."""
    return x + sigma * np.stack([draw.standard_normal(x.shape[1:]) for draw in draws])


def shot_noise(x: np.ndarray, rate: float, draws: Draws) -> np.ndarray:
    """Draw Poisson counts with mean ``rate`` x, divided by ``rate``."""
    return np.stack([draw.poisson(image) for draw, image in zip(draws, rate * x, strict=True)]) / rate


def impulse_noise(x: np.ndarray, amount: float, draws: Draws) -> np.ndarray:
    """Set a share ``amount`` of all values to 0 or 1, each half of the time; channels are independent."""
    u = np.stack([draw.random(x.shape[1:]) for draw in draws])
    return np.where(u < amount, (u < amount / 2).astype(x.dtype), x)


def defocus_blur(x: np.ndarray, disk: tuple[float, float], draws: Draws) -> np.ndarray:
    """Blur with a small disk, itself blurred by a 3x3 Gaussian; borders are mirrored about the last pixel."""
    kernel = disk_kernel(*disk)
    reach = len(kernel) // 2
    padded = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect")
    height, width = x.shape[1:3]
    out = np.zeros_like(x)
    for i, j in np.argwhere(kernel > 0):
        out += kernel[i, j] * padded[:, i : i + height, j : j + width]
    return out


def disk_kernel(radius: float, blur: float) -> np.ndarray:
    """Return the kernel (5, 5) of a disk with radius below 2."""
    line = np.arange(-2, 3)
    disk = (line[:, None] ** 2 + line**2 <= radius**2).astype(np.float64)
    side = np.exp(-0.5 / blur**2)
    gauss = np.array([side, 1.0, side]) / (1.0 + 2.0 * side)
    padded = np.pad(disk / disk.sum(), 1)
    rows = sum(gauss[i] * padded[i : i + 5] for i in range(3))
    return np.asarray(sum(gauss[j] * rows[:, j : j + 5] for j in range(3)))


def motion_blur(x: np.ndarray, kernel: tuple[int, float], draws: Draws) -> np.ndarray:
    """Blur along a one-sided Gaussian trail of 2 radius + 1 taps at -45 to 45 degrees; edges are repeated.

    The result is rounded to 8 bits.
    """
    radius, sigma = kernel
    angle = np.deg2rad([draw.uniform(-45.0, 45.0) for draw in draws])
    tap = np.arange(2 * radius + 1)
    weight = np.exp(-(tap**2) / (2.0 * sigma**2))
    weight /= weight.sum()
    height, width = x.shape[1:3]
    image = np.arange(len(x))[:, None, None]
    out = np.zeros_like(x)
    for i in tap:
        down, right = (np.ceil(i * f(angle) - 0.5).astype(np.int64)[:, None] for f in (np.sin, np.cos))
        row = np.clip(np.arange(height) + down, 0, height - 1)[:, :, None]
        column = np.clip(np.arange(width) + right, 0, width - 1)[:, None, :]
        out += weight[i] * x[image, row, column]
    return np.round(255.0 * out) / 255.0


def brightness(x: np.ndarray, added: float, draws: Draws) -> np.ndarray:
    """Raise the value of the HSV colour; hue and saturation stay."""
    value = x.max(axis=3, keepdims=True)
    raised = np.minimum(value + added, 1.0)
    black = value == 0
    return np.where(black, raised, x * (raised / np.where(black, 1.0, value)))


def contrast(x: np.ndarray, factor: float, draws: Draws) -> np.ndarray:
    """Pull every channel towards its mean over the image."""
    mean = x.mean(axis=(1, 2), keepdims=True)
    return (x - mean) * factor + mean


def jpeg_compression(x: np.ndarray, quality: int, draws: Draws) -> np.ndarray:
    """Compress to JPEG and decompress, with Pillow's defaults."""
    levels = np.round(255.0 * x).astype(np.uint8)
    return np.stack([_through_jpeg(image, quality) for image in levels]) / 255.0


def _through_jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0]).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file)).reshape(image.shape)


class Corruption(NamedTuple):
    """A rule on float images (n, H, W, C) in [0, 1], and its constant at each severity."""

    rule: Callable[[np.ndarray, Any, Draws], np.ndarray]
    constants: tuple[Any, ...]
    label: str  # as shown to readers


# In the order in which pFedFDA assigns them.
CORRUPTIONS: dict[str, Corruption] = {
    "motion_blur": Corruption(motion_blur, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)), "motion blur"),
    "defocus_blur": Corruption(
        defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)), "defocus blur"
    ),
    "gaussian_noise": Corruption(gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10), "Gaussian noise"),
    "shot_noise": Corruption(shot_noise, (500, 250, 100, 75, 50), "shot noise"),
    "impulse_noise": Corruption(impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07), "impulse noise"),
    "frost": Corruption(weather.frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)), "frost-like"),
    "fog": Corruption(weather.fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)), "fog"),
    "jpeg_compression": Corruption(jpeg_compression, (80, 65, 58, 50, 40), "JPEG"),
    "brightness": Corruption(brightness, (0.05, 0.1, 0.15, 0.2, 0.3), "brightness"),
    "contrast": Corruption(contrast, (0.75, 0.5, 0.4, 0.3, 0.15), "contrast"),
}


class Pair(NamedTuple):
    """A corruption and a severity from 1 to 5."""

    name: str
    severity: int

    def __str__(self) -> str:
        return f"{CORRUPTIONS[self.name].label}:{self.severity}"


def takes(text: str) -> tuple[str, ...]:
    """Check a value of ``[data] corrupt``, and return the settings that it takes."""
    if text in ("", CIFAR_S):
        return ("corrupt_clients", "pairs") if text else ()
    parse(text)
    return ("corrupt_clients",)


def parse(text: str) -> Pair:
    """Parse ``NAME:SEVERITY`` as a pair."""
    name, _, severity = text.partition(":")
    if name not in CORRUPTIONS:
        names = [CIFAR_S, *CORRUPTIONS]
        raise UserError(
            f"[data] corrupt = {text!r}: there is no corruption {name!r}{closest(name, names)}; "
            f"there are {', '.join(names)}"
        )
    if severity not in map(str, range(1, SEVERITIES + 1)):
        raise UserError(f"[data] corrupt = {text!r}: give a severity from 1 to {SEVERITIES}, as in '{name}:3'")
    return Pair(name, int(severity))


def corrupt(x: np.ndarray, pair: Pair, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Corrupt images ``x``, uint8 (n, C, H, W); ``rows`` (n,) are their places in the data set.

    The result is clipped to 0..255 and truncated to whole levels, as in CIFAR-10-C.
    """
    rule, constants, _ = CORRUPTIONS[pair.name]
    out = np.empty_like(x)
    for start in range(0, len(x), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        images = np.ascontiguousarray(x[part].transpose(0, 2, 3, 1)) / 255.0
        draws = [generator(pair, int(row)) for row in rows[part]]
        found = np.clip(rule(images, constants[pair.severity - 1], draws), 0.0, 1.0)
        # The small term keeps a level that is a whole number up to the last bit of a float.
        out[part] = np.floor(255.0 * found + 1e-6).astype(np.uint8).transpose(0, 3, 1, 2)
    return out


def generator(pair: Pair, row: int) -> np.random.Generator:
    """Return the generator for one image, which depends only on corruption, severity and row."""
    key = np.array([zlib.crc32(pair.name.encode()), pair.severity], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, row, 0], dtype=np.uint64)))
