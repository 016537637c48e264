"""Models by name, and the task that an experiment's ``[model]`` table makes of one."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bespoke.core import memory
from bespoke.core.objective import CLASSIFICATION, Objective
from bespoke.core.settings import check, refuse_given
from bespoke.core.task import Task
from bespoke.errors import UserError
from bespoke.models import audio, basic, cnn, layers, mobilenet, resnet, text, wide_resnet
from bespoke.models.checks import check_norm
from bespoke.models.conversion import converted
from bespoke.models.settings import ModelSettings
from bespoke.registry import Registry, function

__all__ = ["MODELS", "ModelSettings", "ModelSpec", "build_module", "build_task", "converted", "register_model"]


class ModelSpec(NamedTuple):
    """A row of the table of models."""

    build: Callable[[ModelSettings, Sequence[int], int], nn.Module]  # (settings, input_shape, num_outputs)
    doc: str  # one line
    norms: tuple[str, ...] = ("none",)  # kinds of normalisation, the default first; empty: see takes
    takes: Mapping[str, Any] = {}  # its other settings, with its default for each
    head: str = "head"  # name of its last layer


_PLAIN = ("none", "group", "instance", "layer")
_DEEP = ("group", "instance", "layer", "per_group")
_STEM = {"stem": "cifar", "stem_pool": False, "final_norm": "none"}

_SHIPPED: dict[str, ModelSpec] = {
    "linear": ModelSpec(basic.linear, "one linear layer, only a head: logistic regression"),
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


_OF_ANY = {"name", "start"}  # settings that every model has
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ModelSettings) if field.name not in _OF_ANY}


def _own(thing: Any, where: str) -> ModelSpec:
    """Make a row of the table from a user's ``build(input_shape, num_classes, ...)``, a function or a class.

    Its further parameters may be keys of ``[model]``, with its own defaults. Its attribute ``head`` names the last
    layer, if that is not called ``head``.
    """
    if isinstance(thing, nn.Module):
        raise UserError(f"{where}: give the class {type(thing).__name__} or a function that builds it, not a module")
    made = function(thing, ("input_shape", "num_classes", "settings"), "model", _DEFAULTS, where)
    takes = {key: made.default(key, default) for key, default in _DEFAULTS.items() if key in made.takes(_DEFAULTS)}
    head = getattr(thing, "head", "head")

    def build(settings: ModelSettings, input_shape: Sequence[int], num_classes: int) -> nn.Module:
        offered = {"input_shape": input_shape, "num_classes": num_classes, "settings": settings}
        module = made(offered | {key: getattr(settings, key) for key in _DEFAULTS})
        if not isinstance(module, nn.Module):
            raise UserError(
                f"the model {settings.name} returns an object of type {type(module).__name__}: return a torch module"
            )
        return module

    norms = () if "norm" in takes else ("none",)
    return ModelSpec(build, made.doc, norms, takes, head if isinstance(head, str) else "head")


MODELS: Registry[ModelSpec] = Registry("model", _SHIPPED, _own, "bespoke.models")


def register_model(name: str, build: Callable[..., nn.Module], head: str | None = None) -> None:
    """Add your own model, a function or class ``build``, under a name for ``[model]``.

    ``build(input_shape, num_classes)`` returns a module whose last layer is its sub-module ``head``, by default the
    one of that name. Further parameters of ``build`` that are keys of ``[model]``, such as ``hidden=64``, take their
    values from there. Registering your own name again replaces it.
    """
    MODELS.register(name, build, "register_model")
    if head is not None:
        MODELS[name] = MODELS[name]._replace(head=head)


def build_module(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Return the module of a ``[model]`` table for examples of ``input_shape`` (without the batch axis)."""
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
    """Return the task of a ``[model]`` table for examples of ``input_shape`` (no batch axis); ``key`` as in Task."""
    spec, shape = MODELS[_filled(settings).name], tuple(input_shape)
    if settings.name in MODELS.shipped:
        _check_size(settings, shape, num_outputs)

    def build() -> nn.Module:
        return layers.set_precision(build_module(settings, shape, num_outputs), precision)

    return Task(build, spec.head, num_outputs, device, dtype, precision, objective, key)


def _check_size(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> None:
    """Refuse a model that does not fit into memory, by the shapes of its weights alone."""
    with torch.device("meta"):
        module = build_module(settings, input_shape, num_outputs)
    weights = [weight for weight in module.parameters() if weight.is_meta]
    count, most = sum(weight.numel() for weight in weights), max(weights, key=Tensor.numel).shape
    what = f"the model {settings.name} with {count:,} weights, of which one tensor is {' x '.join(map(str, most))},"
    memory.require(8 * count, what, "choose a smaller [model] or smaller examples")  # initial weights, and their copy


def _filled(settings: ModelSettings) -> ModelSettings:
    """Fill the settings with the model's defaults; refuse those that mean nothing to it."""
    check(settings, "[model]")
    spec = MODELS.find(settings.name, "[model] name")
    if settings.norm and spec.norms:
        check_norm(settings.norm, settings.name, spec.norms)
    takes = [*(["norm"] if len(spec.norms) > 1 else []), *spec.takes]
    refuse_given(settings, "[model]", _DEFAULTS.keys() - {"norm", *spec.takes}, settings.name, takes)
    own = {"norm": spec.norms[0]} if spec.norms else {}
    given = {key: value for key, default in _DEFAULTS.items() if (value := getattr(settings, key)) != default}
    return dataclasses.replace(settings, **(own | dict(spec.takes) | given))
