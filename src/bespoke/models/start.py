"""Weights that every method starts from: a file of ``[model] start``."""

from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.errors import UserError, reason
from bespoke.files import write_atomic

CONSTANTS = "constants/"  # how a saved model names frozen parameters and buffers
INPUTS = "inputs/"  # how it names the constants of its inputs' transform


def read_start(path: str, task: Task) -> Tree:
    """Return the weights in a .safetensors file, as the model's parameters; refuse those of another model.

    The file may also hold the model's constants, under ``constants/``, which must then be those of the model.
    """
    where = f"[model] start = {path!r}"
    try:
        found = safetensors.torch.load(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise UserError(f"{where}: is not a .safetensors file: {reason(error)}") from None
    weights = {name: leaf for name, leaf in found.items() if not name.startswith((CONSTANTS, INPUTS))}
    constants = {name.removeprefix(CONSTANTS): leaf for name, leaf in found.items() if name.startswith(CONSTANTS)}
    wrong = _difference(weights, task)
    if wrong:
        raise UserError(f"{where}: these are not the weights of this model: {wrong}")
    own = task.constants()
    for name, leaf in constants.items():
        if name not in own or leaf.shape != own[name].shape or not torch.equal(leaf.to(own[name]), own[name]):
            raise UserError(
                f"{where}: its constant {name!r} is not that of this model: start from a model like this one"
            )
    return {name: weights[name].clone().to(task.device, task.dtype) for name in task.shapes}


def _difference(weights: dict[str, Tensor], task: Task) -> str:
    """Return the first way in which weights are not a model's parameters, or nothing."""
    for name, shape in task.shapes.items():
        if name not in weights:
            return f"{name!r} is missing"
        if weights[name].shape != shape:
            return f"{name!r} has the shape {list(weights[name].shape)} there and {list(shape)} here"
        if not weights[name].is_floating_point() or not torch.isfinite(weights[name]).all():
            return f"{name!r} holds something else than finite numbers"
    return next((f"it has no {name!r}" for name in weights if name not in task.shapes), "")


def write_start(path: str | Path, weights: Tree, task: Task) -> None:
    """Write a model's parameters and constants as a file that ``[model] start`` takes."""
    held = weights | {CONSTANTS + name: leaf for name, leaf in task.constants().items()}
    write_atomic(
        path, safetensors.torch.save({name: leaf.detach().cpu().contiguous().clone() for name, leaf in held.items()})
    )
