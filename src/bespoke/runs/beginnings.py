"""What a run writes once, so that it can be opened without any client's data: ``start.safetensors``.

It holds the initial parameters, frozen parameters and buffers, the constants that all clients' transforms share, and
the same description as a personal model's file: model, method, objective, contract of the inputs.
"""

import os
from typing import NamedTuple

from bespoke.clients import states
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import FederatedData
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.errors import UserError
from bespoke.records import RESUME, RESUME_OPTION, START, RunFolder
from bespoke.runs import model_files
from bespoke.runs.experiment import Experiment
from bespoke.runs.newcomers import common_constants
from bespoke.runs.personal import PersonalModel

_ENTRY = "bespoke_start"  # of the file's metadata
_PART = "model"  # the name of the parameters among the file's tensors
CURE = f"restore it, or continue the run with {RESUME_OPTION} after moving it away"


class Beginning(NamedTuple):
    """What a run began with."""

    card: model_files.Card
    params: Tree
    constants: Tree  # of the model
    extra: Tree  # constants of the inputs' transform
    own: list[str]  # names of such constants that each client has for itself
    owner: str | None  # the hash that the run's files bear


def write_once(
    folder: RunFolder, experiment: Experiment, task: Task, params: Tree, pool: FederatedData, owner: str
) -> None:
    """Write the file, unless something has its name; ``owner`` is the hash that the run's files bear."""
    path = folder.path / START
    if os.path.lexists(path):
        return
    extra, own = common_constants(pool)
    card = model_files.card_of(experiment, task, pool) | {"about": {"own_constants": own}}
    if not own:
        model = PersonalModel(Algorithm(), task, params, pool.inputs, card, pool.transform, extra)
        card |= {"probe": model.probe()}
    model_files.write(path, card, {_PART: params}, task.constants(), extra, owner, entry=_ENTRY, then=RESUME)


def read(folder: RunFolder) -> Beginning:
    """Return what a run began with; refuse a file that is damaged or none of a run."""
    path = folder.path / START
    if not os.path.lexists(path):
        raise UserError(
            f"{folder.path} has no {START}, which earlier versions did not write: continue the run with "
            f"{RESUME_OPTION}, which adds it"
        )
    card, params, constants, extra = model_files.read(path, _ENTRY)
    own = card["about"].get("own_constants")
    if params.keys() != {_PART} or params[_PART].keys() != card["parameters"].keys() or not model_files.is_texts(own):
        raise UserError(f"{path} is damaged: {CURE}")
    return Beginning(card, params[_PART], constants, extra, own, states.owner(path))
