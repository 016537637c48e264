"""Models by name, and the task that an experiment's ``[model]`` table makes of one."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bespoke.core.objective import CLASSIFICATION, Objective
from bespoke.core.settings import check
from bespoke.core.task import Task
from bespoke.errors import UserError
from bespoke.models import audio, basic, cnn, layers, mobilenet, resnet, text, wide_resnet
from bespoke.models.checks import check_norm
from bespoke.models.conversion import converted
from bespoke.models.settings import ModelSettings

__all__ = ["MODELS", "ModelSettings", "ModelSpec", "build_module", "build_task", "converted"]


class ModelSpec(NamedTuple):
    """A row of the table of models."""

    build: Callable[[ModelSettings, Sequence[int], int], nn.Module]  # (settings, input_shape, num_outputs)
    doc: str  # a line on it
    norms: tuple[str, ...] = ("none",)  # kinds of normalisation; the first is its own choice
    takes: Mapping[str, Any] = {}  # the other settings it has, with its own choice of each
    head: str = "head"  # name of its last layer


_PLAIN = ("none", "group", "instance", "layer")
_DEEP = ("group", "instance", "layer", "per_group")
_STEM = {"stem": "cifar", "stem_pool": False, "final_norm": "none"}

MODELS: dict[str, ModelSpec] = {
    "linear": ModelSpec(basic.linear, "one linear layer, nothing but a head: logistic regression"),
    "mlp": ModelSpec(basic.mlp, "one hidden layer", ("none", "group", "layer"), {"hidden": 64}),
    "cnn": ModelSpec(
        cnn.cnn, "two convolutions and a hidden layer, from 4x4 up", _PLAIN, {"width": 16, "hidden": 64, "dropout": 0.0}
    ),
    "cifar_cnn": ModelSpec(cnn.cifar_cnn, "three convolutions, of FedPAC and pFedFDA for 32x32 images", _PLAIN),
    "emnist_cnn": ModelSpec(cnn.emnist_cnn, "two convolutions, of FedPAC and pFedFDA for 28x28 images", _PLAIN),
    "pfedvmp_cnn": ModelSpec(
        cnn.pfedvmp_cnn, "two convolutions and a hidden layer, of pFedVMP", _PLAIN, {"hidden": 512}
    ),
    "lenet": ModelSpec(cnn.lenet, "two convolutions and two hidden layers, of Self-FL for CIFAR-10", _PLAIN),
    "resnet18": ModelSpec(resnet.resnet18, "ResNet-18, of pFedFDA and FedLDA", _DEEP, {"width": 64, **_STEM}),
    "fedpce_resnet18": ModelSpec(
        resnet.fedpce_resnet18, "ResNet-18 with instance norm, of FedPCE", ("instance",), {"width": 64}
    ),
    "wrn16_2": ModelSpec(wide_resnet.wrn16_2, "wide ResNet of 16 layers, of FedLDA", _DEEP),
    "mobilenet_v3_small": ModelSpec(
        mobilenet.mobilenet_v3_small, "MobileNetV3-Small, from 32x32 up", ("group", "layer", "per_group")
    ),
    "sent140_lstm": ModelSpec(
        text.sent140_lstm, "two LSTM layers on word vectors, of Self-FL", takes={"vectors": "", "vocabulary": 0}
    ),
    "audio_cnn": ModelSpec(audio.audio_cnn, "eleven convolutions and pools for spectrograms, after Self-FL", _PLAIN),
}


def build_module(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """The module of a ``[model]`` table for examples of ``input_shape`` (without the batch axis)."""
    filled = _filled(settings)
    return MODELS[filled.name].build(filled, tuple(input_shape), num_outputs)


def build_task(
    settings: ModelSettings,
    input_shape: Sequence[int],
    num_outputs: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    precision: str = "fp32",
    objective: Objective = CLASSIFICATION,
    key: Tensor | None = None,
) -> Task:
    """The task of a ``[model]`` table for examples of ``input_shape`` (without the batch axis); ``key`` as in Task."""
    spec, shape = MODELS[_filled(settings).name], tuple(input_shape)

    def build() -> nn.Module:
        return layers.set_precision(build_module(settings, shape, num_outputs), precision)

    return Task(build, spec.head, num_outputs, device, dtype, precision, objective, key)


def _filled(settings: ModelSettings) -> ModelSettings:
    """The settings with the model's own choices; those that mean nothing to it are refused."""
    check(settings, "[model]")
    if settings.name not in MODELS:
        near = difflib.get_close_matches(settings.name, MODELS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise UserError(f"[model] name = {settings.name!r} is none of {', '.join(MODELS)}: {hint}")
    spec = MODELS[settings.name]
    own = {"norm": spec.norms[0], **spec.takes}
    if settings.norm:
        check_norm(settings.norm, settings.name, spec.norms)
    for field in dataclasses.fields(settings):
        given = getattr(settings, field.name)
        if field.name == "name" or given == field.default:
            continue
        if field.name != "norm" and field.name not in spec.takes:
            takes = ", ".join(name for name in own if name != "norm" or len(spec.norms) > 1)
            raise UserError(
                f"[model] {field.name} = {given!r} means nothing to {settings.name}, which takes "
                f"{takes or 'no settings'}: leave it out"
            )
        own[field.name] = given
    return dataclasses.replace(settings, **own)
