"""The transform of images at every access: degrade, augment, normalise."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bespoke.core import rng
from bespoke.core.data import Transform
from bespoke.core.tree import Tree
from bespoke.data.examples import Examples
from bespoke.data.images import augment as augmentation
from bespoke.data.images import degrade
from bespoke.data.partition.basic import Partition
from bespoke.data.partition.groups import KINDS, alphas
from bespoke.data.pool import DEGRADE, generator
from bespoke.data.settings import DataSettings
from bespoke.errors import UserError

# The key of an access is split once, by purpose.
NOISE, ORDER, AUGMENT = range(3)

OFFSET = 0.001  # added to the deviation of a pixel, on the scale 0..255, as FedProx's script does
PIECE = 2**24  # pixels squared at once

# Mean and standard deviation of each channel on the [0, 1] scale.
MOMENTS = {
    "symmetric": ((0.5,), (0.5,)),
    "cifar": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


class Views(NamedTuple):
    """How clients see their images: the transform, each client's constants, and a description of its condition."""

    transform: Transform | None
    extra: Tree  # leaves (clients, ...)
    conditions: tuple[str, ...]


def views(examples: Examples, found: Partition, settings: DataSettings, seed: int) -> Views:
    """Return the transform of a ``[data]`` table, for the clients of a partition."""
    if (settings.degrade, settings.augment, settings.normalise) == ("none", "none", "auto"):
        return Views(examples.transform, {}, ())
    _check_images(examples, settings)
    extra = constants(settings, len(found.lists), examples.x)
    conditions: tuple[str, ...] = ()
    if settings.degrade == "fedpce":
        if not set(found.kinds) <= set(KINDS) or not found.kinds:
            raise UserError('[data] degrade = "fedpce" needs kinds of clients: set partition = "degradations"')
        extra |= degrade.parameters(found.kinds, found.ranks, generator(seed, DEGRADE))
        alpha = alphas(found.kinds.count("imbalance"))
        places = enumerate(zip(found.kinds, found.ranks, strict=True))
        conditions = tuple(_condition(kind, i, extra, alpha[rank]) for i, (kind, rank) in places)
    return Views(compose(settings), extra, conditions)


def constants(settings: DataSettings, clients: int, x: np.ndarray) -> Tree:
    """Return the constants of normalisation, equal for all clients: ``mean``, ``deviation`` (clients, 1 or 3, 1, 1).

    For ``normalise = "pixel"`` they are those of each pixel of the images ``x`` (N, C, H, W): (clients, C, H, W). They
    are stored with the clients' own constants, so that no access copies anything to the device, and share one memory.
    """
    if settings.normalise == "pixel":
        moments = pixel_moments(x)
    else:
        known = MOMENTS["symmetric" if settings.normalise == "auto" else settings.normalise]
        moments = tuple(torch.tensor(values)[:, None, None] for values in known)
    return {name: own.expand(clients, *own.shape) for name, own in zip(("mean", "deviation"), moments, strict=True)}


def pixel_moments(x: np.ndarray) -> tuple[Tensor, ...]:
    """Return the mean and the standard deviation, plus 0.001 / 255, of each pixel on the [0, 1] scale: (C, H, W) each.

    ``x`` are all images of a set, uint8 (N, C, H, W). The sums are exact.
    """
    count, sums, squares = len(x), np.zeros(x.shape[1:], np.int64), np.zeros(x.shape[1:], np.int64)
    step = max(1, PIECE // sums.size)
    for piece in (x[i : i + step] for i in range(0, count, step)):
        sums += piece.sum(axis=0, dtype=np.int64)
        squares += np.square(piece, dtype=np.uint16).sum(axis=0, dtype=np.int64)
    deviation = np.sqrt(count * squares - sums**2) / count
    return tuple(torch.tensor(values / 255.0, dtype=torch.float32) for values in (sums / count, deviation + OFFSET))


def compose(settings: DataSettings) -> Transform:
    """Return the transform of uint8 images (B, C, H, W) for the model: jitter, augment, noise, normalise.

    Pixels that augmentation uncovers get the mean colour, which is 0 after normalisation. With
    ``noise_at = "before"`` the noise comes before the augmentation; with ``noise_scale = "image"`` one unit of it is
    the range of the image's normalised values.
    """
    degraded, augmented = settings.degrade == "fedpce", settings.augment == "fedpce"
    noise_first, per_call = settings.noise_at == "before", settings.jitter_order == "call"

    def noisy(key: Tensor, x: Tensor, extra: Tree) -> Tensor:
        scale = _range(x, extra) if settings.noise_scale == "image" else 1.0
        return degrade.noise(rng.fold_in(key, NOISE), x, extra["variance"], scale)

    def transform(key: Tensor, x: Tensor, extra: Tree, train: bool) -> Tensor:
        x = x.to(torch.float32) / 255.0
        steps: list[Callable[[Tensor], Tensor]] = []
        if degraded:
            order = degrade.drawn_order(rng.fold_in(key, ORDER)) if per_call else extra["order"]
            x = torch.where(extra["jitter"], degrade.jitter(x, extra["amounts"], order), x)
            steps.append(lambda z: noisy(key, z, extra))
        if augmented and train:
            place = len(steps) if noise_first else 0
            steps.insert(place, lambda z: augmentation.augment(rng.fold_in(key, AUGMENT), z, extra["mean"]))
        for step in steps:
            x = step(x)
        return (x - extra["mean"]) / extra["deviation"]

    return transform


def _range(x: Tensor, extra: Tree) -> Tensor:
    """Return, in units of ``x`` (B, C, H, W), how far apart an image's values are once normalised: (B, C, 1, 1)."""
    z = (x - extra["mean"]) / extra["deviation"]
    every = (-3, -2, -1)
    return (z.amax(every, keepdim=True) - z.amin(every, keepdim=True)) * extra["deviation"]


def _check_images(examples: Examples, settings: DataSettings) -> None:
    asked = [key for key in ("degrade", "augment") if getattr(settings, key) != "none"]
    asked += ["normalise"] if settings.normalise != "auto" else []
    if examples.transform is not None or examples.x.dtype != "uint8" or examples.x.ndim != 4:
        raise UserError(f"[data] {asked[0]} needs 8-bit images, which {settings.name!r} does not hold: leave it out")
    if settings.normalise == "pixel" and (asked[0] != "normalise" or settings.corrupt):
        changed = asked[0] if asked[0] != "normalise" else "corrupt"
        raise UserError(
            f'[data] normalise = "pixel" divides by the deviation of each pixel over the set, which images that '
            f"{changed} changes do not have: leave one of them out"
        )
    coloured = settings.degrade != "none" or settings.normalise in ("cifar", "imagenet")
    if coloured and examples.x.shape[1] != 3:
        key = "degrade" if settings.degrade != "none" else "normalise"
        raise UserError(f"[data] {key} needs three colour channels, but {settings.name!r} has {examples.x.shape[1]}")


def _condition(kind: str, client: int, extra: Tree, alpha: float) -> str:
    if kind == "noise":
        return f"noise of variance {extra['variance'][client].item():.4g}"
    if kind == "jitter":
        numbers = ", ".join(f"{value:.3g}" for value in extra["amounts"][client].tolist())
        return f"jitter by {numbers}"
    return f"imbalance by {alpha:.3g}"
