"""Models by name, and the task that an experiment's ``[model]`` table makes of one."""

import difflib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from bespoke.core.settings import check
from bespoke.core.task import Task
from bespoke.errors import UserError
from bespoke.models import basic
from bespoke.models.settings import ModelSettings

__all__ = ["MODELS", "ModelSettings", "ModelSpec", "build_task"]


class ModelSpec(NamedTuple):
    """A row of the table: ``build(settings, input_shape, num_classes)``, its head's name, a line on it."""

    build: Callable[[ModelSettings, Sequence[int], int], nn.Module]
    head: str
    doc: str


MODELS: dict[str, ModelSpec] = {
    "linear": ModelSpec(basic.linear, "head", "one linear layer; nothing but a head"),
    "mlp": ModelSpec(basic.mlp, "head", "one hidden layer (hidden, norm)"),
    "cnn": ModelSpec(basic.cnn, "head", "two convolutions and a hidden layer, from 4x4 up (width, hidden, norm)"),
    "cifar_cnn": ModelSpec(basic.cifar_cnn, "head", "three convolutions for 32x32 images, 107,690 parameters"),
}


def build_task(
    settings: ModelSettings,
    input_shape: Sequence[int],
    num_classes: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Task:
    """The task of a ``[model]`` table for examples of ``input_shape`` (without the batch axis)."""
    check(settings, "[model]")
    if settings.name not in MODELS:
        near = difflib.get_close_matches(settings.name, MODELS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise UserError(f"[model] name = {settings.name!r} is none of {', '.join(MODELS)}: {hint}")
    spec = MODELS[settings.name]
    shape = tuple(input_shape)
    return Task(lambda: spec.build(settings, shape, num_classes), spec.head, num_classes, device, dtype)
