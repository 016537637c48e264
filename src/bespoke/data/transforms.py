"""What is done to examples at every access: functions ``fn(key, x, train) -> x`` that draw from their key alone.

``key`` (2,) is that of a minibatch and is drawn from with ``bespoke.rng``, ``x`` (B, ...) are its examples as they are
stored, and ``train`` is False in evaluation. The functions run for one client, or for many under ``torch.func.vmap``.
"""

import contextlib
import functools
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from bespoke.core import rng
from bespoke.core.data import Transform
from bespoke.core.tree import Tree
from bespoke.errors import UserError, reason, shown
from bespoke.files import parse_toml
from bespoke.registry import Registry

Step = Callable[[Tensor, Tensor, bool], Tensor]

_TRIED = 8  # rows that a transform is tried on


@dataclass(frozen=True)
class Normalise:
    """Subtract a mean and divide by a deviation: of each channel (B, C, H, W), or of each feature (B, F).

    8-bit images are divided by 255 first.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "deviation"):
            object.__setattr__(self, name, _numbers(getattr(self, name), name))
        if len(self.mean) != len(self.deviation) or not all(value > 0 for value in self.deviation):
            raise UserError(f"{shown(self)} cannot normalise: give as many deviations as means, all above 0")

    def __call__(self, key: Tensor, x: Tensor, train: bool) -> Tensor:
        """Return x as floating numbers, normalised."""
        if len(self.mean) not in (1, x.shape[1]):
            raise UserError(f"{shown(self)} has {len(self.mean)} means for {x.shape[1]} channels or features")
        x = x.to(torch.float32) / 255.0 if x.dtype == torch.uint8 else x
        mean, deviation = (_constant(values, x.ndim - 2, x.device, x.dtype) for values in (self.mean, self.deviation))
        return (x - mean) / deviation


def _numbers(given: Any, name: str) -> tuple[float, ...]:
    """Return finite numbers of a list, an array or a tensor (C,)."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        found = tuple(math.nan if isinstance(each, str) else float(each) for each in given)
        if all(map(math.isfinite, found)):
            return found
    raise UserError(f"Normalise({name}={shown(given)}) cannot normalise: give a list of numbers")


@functools.cache
def _constant(values: tuple[float, ...], axes: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return values by channel (C, 1, 1, ...), copied to a device once."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(-1, *(1,) * axes)


@dataclass(frozen=True)
class Flip:
    """Mirror each image (B, C, H, W) left to right with a probability, in training."""

    p: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.p, int | float) or not 0 <= self.p <= 1:
            raise UserError(f"Flip(p={shown(self.p)}) cannot mirror: give a probability from 0 to 1")

    def __call__(self, key: Tensor, x: Tensor, train: bool) -> Tensor:
        """Return x with some images mirrored."""
        _check_images(x, "Flip")
        if not train:
            return x
        mirrored = rng.uniform(key, (x.shape[0],)) < self.p
        return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


@dataclass(frozen=True)
class Crop:
    """Move each image (B, C, H, W) by up to ``pad`` pixels either way, in training; what is uncovered becomes 0."""

    pad: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.pad, int) or not 0 <= self.pad <= 4096:
            raise UserError(f"Crop(pad={shown(self.pad)}) cannot move images: give whole pixels from 0 to 4096")

    def __call__(self, key: Tensor, x: Tensor, train: bool) -> Tensor:
        """Return x with its images moved."""
        _check_images(x, "Crop")
        if not train:
            return x
        count, channels, height, width = x.shape
        padded = torch.nn.functional.pad(x, (self.pad,) * 4)
        start = (rng.uniform(key, (count, 2)) * (2 * self.pad + 1)).floor().to(torch.int64)
        row = start[:, :1] + torch.arange(height, device=x.device)
        column = start[:, 1:] + torch.arange(width, device=x.device)
        place = (row[:, :, None] * (width + 2 * self.pad) + column[:, None, :]).flatten(1)
        return padded.flatten(2).gather(2, place[:, None, :].expand(-1, channels, -1)).reshape(x.shape)


def _check_images(x: Tensor, step: str) -> None:
    if x.ndim != 4:
        raise UserError(f"{step}() takes images (B, C, H, W), and the examples have the shape {tuple(x.shape[1:])}")


def _of_user(thing: Any, where: str) -> Any:
    if not callable(thing):
        raise UserError(f"{where}: {shown(thing)} is no function fn(key, x, train) and no class that makes one")
    return thing


# What makes a step, by the name in ``[data] transform``; those of users are functions that are steps, or make them.
TRANSFORMS: Registry[Any] = Registry(
    "transform", {"normalise": Normalise, "flip": Flip, "crop": Crop}, _of_user, "bespoke.transforms"
)

_CALL = re.compile(r"\s*([^()]*?)\s*(?:\((.*)\)\s*)?", re.DOTALL)


def parsed(text: str, where: str) -> tuple[str, dict[str, Any] | None]:
    """Return the name and the arguments, if any, of a step as the settings write it, such as ``crop(pad=4)``."""
    told = _CALL.fullmatch(text)
    with contextlib.suppress(ValueError):
        found = parse_toml(f"given = {{{told[2] or ''}}}") if told else {}
        if told and list(found) == ["given"]:
            return told[1], None if told[2] is None else found["given"]
    raise UserError(f"{where}: {shown(text)} cannot be read: write it as in crop(pad=4)")


def step_of(text: str, where: str) -> Step:
    """Return the step of a text such as ``crop(pad=4)``, ``flip``, ``mine:noise`` or ``mine:Noise(level=0.1)``."""
    name, given = parsed(text, where)
    thing = TRANSFORMS.find(name, where)
    if given is None and not isinstance(thing, type):
        return cast(Step, thing)
    try:
        step: Step = thing(**(given or {}))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except TypeError as error:
        raise UserError(f"{where}: {name} cannot be made with {shown(given or {})}: {reason(error)}") from None
    return step


def text_of(step: Step) -> str:
    """Return the text of one of bespoke's own steps, from which :func:`step_of` makes it again, or nothing."""
    for name in TRANSFORMS.shipped:
        if type(step) is TRANSFORMS[name]:
            return f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in vars(step).items())})"
    return ""


@dataclass(frozen=True, repr=False)
class Steps:
    """Steps one after another, each with a key of its own, as a pool's transform.

    Examples whose type no step has changed go through the ``last`` transform, their data set's own; without one, 8-bit
    examples are scaled to [-1, 1].
    """

    steps: tuple[Step, ...]
    last: Transform | None = None

    def __call__(self, key: Tensor, x: Tensor, extra: Tree, train: bool) -> Tensor:
        """Return x (B, ...) after all steps; a client's constants are for the last transform."""
        stored = x.dtype
        for i, step in enumerate(self.steps):
            x = step(rng.fold_in(key, i), x, train)
            if not isinstance(x, Tensor):
                raise UserError(f"the transform returns {shown(x)}: return the tensor x")
        if self.last is not None and x.dtype == stored:
            return self.last(rng.fold_in(key, len(self.steps)), x, extra, train)
        return x.to(torch.float32) / 127.5 - 1.0 if x.dtype == torch.uint8 else x

    def __repr__(self) -> str:
        return f"[{', '.join(map(_named, self.steps))}]"


def _named(step: Step) -> str:
    """Return a text that tells one step from another: its settings, or its name and a hash of its code."""
    if is_dataclass(step):
        return repr(step)
    code = getattr(step, "__code__", None)
    content = hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()[:8] if code else ""
    return f"{step.__module__}.{getattr(step, '__qualname__', type(step).__qualname__)} {content}"


def fingerprint(steps: Sequence[Step]) -> str:
    """Return a hash of steps: of their settings, or of their code and its numbers, wherever it is defined.

    It begins with the kind of Python, whose versions compile code differently.
    """
    digest = hashlib.sha256()
    for step in steps:
        code = None if is_dataclass(step) else getattr(step, "__code__", None)
        told = repr(step) if is_dataclass(step) else type(step).__qualname__
        if code is not None:
            values = [value for value in code.co_consts if isinstance(value, int | float | complex)]
            told = f"{code.co_code.hex()} {code.co_names} {values}"
        digest.update(f"{told}\n".encode())
    return f"{sys.implementation.cache_tag}:{digest.hexdigest()[:16]}"


def as_transform(given: Step | Sequence[Step] | None, x: np.ndarray, last: Transform | None = None) -> Transform | None:
    """Return the transform of a function, or of several in order, after a trial on some examples ``x`` (N, ...).

    ``last`` is what the data set does itself.
    """
    if given is None:
        return last
    steps = Steps(tuple(given) if isinstance(given, Sequence) else (given,), last)
    for step in steps.steps:
        if not callable(step) or isinstance(step, type):
            raise UserError(f"transform takes functions fn(key, x, train), such as Flip(), not {shown(step)}")
    _try(steps, torch.tensor(x[:_TRIED]))
    return steps


def _try(steps: Steps, x: Tensor) -> None:
    """Refuse a transform that is no pure function of key and examples, or loses rows."""
    before, found = torch.get_rng_state(), list[Tensor]()
    for train in (True, True, False, False):
        try:
            found.append(steps(rng.key(0), x.clone(), {}, train))
        except UserError:
            raise
        except Exception as error:  # of a user's function
            raise UserError(
                f"the transform fails on examples of shape {tuple(x.shape)} ({type(error).__name__}: {reason(error)}): "
                "it takes (key, x, train) and returns x"
            ) from error
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise UserError(
            "the transform draws from torch's generator, so a run could not be repeated: draw from its key, as in "
            "bespoke.rng.uniform(key, (len(x),))"
        )
    for first, second in (found[:2], found[2:]):
        if first.shape[:1] != x.shape[:1]:
            raise UserError(
                f"the transform turns {len(x)} examples into shape {tuple(first.shape)}: return as many rows"
            )
        if not torch.equal(first, second):
            raise UserError("the transform gives two results for one key: draw from the key alone, with bespoke.rng")
