"""What both sides of a real federation make of its experiment, whose ``[data]`` is a contract, without any row."""

import hashlib
from dataclasses import replace
from typing import NamedTuple

import torch

from bespoke.core import tree
from bespoke.core.data import FederatedData, Rows
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.data.agreed import CONTRACT, agreed
from bespoke.engine.rows import ClientRows
from bespoke.errors import UserError
from bespoke.network.terms import Terms, made_up
from bespoke.runs import identity
from bespoke.runs.api import check_together, model_of, objective_of, pick_device
from bespoke.runs.experiment import Experiment


class Agreement(NamedTuple):
    """An experiment without data: equal on both sides, and equal to that of its simulation."""

    terms: Terms
    pool: FederatedData  # the clients and the form of their rows; no row
    rows: ClientRows  # a few made-up ones


def agreement(experiment: Experiment, device: str = "cpu") -> Agreement:
    """Build the model and the initial weights of an experiment with a contract, and check that all fit together."""
    if experiment.data.name != CONTRACT:
        raise UserError(
            f'[data] name = "{experiment.data.name}" is for simulations: a real federation, whose data stay with its '
            f'clients, needs name = "{CONTRACT}" with shape, dtype, class_names and clients'
        )
    experiment.import_modules()
    pool, objective, quorum = agreed(experiment.data), objective_of(experiment), experiment.federation.quorum
    if quorum > pool.num_clients:
        raise UserError(
            f"[federation] quorum = {quorum} is more than the {pool.num_clients} clients of [data] clients: lower it"
        )
    if objective.classes and not pool.num_classes:
        raise UserError(f"the objective {objective.name!r} needs classes: set [data] class_names, or num_classes")
    if pool.num_classes and not objective.classes:
        raise UserError(
            f"the objective {objective.name!r} has no classes: leave [data] class_names and num_classes out"
        )
    task, params = model_of(experiment, pool, pick_device(device), "auto")
    method, training, seed = experiment.method, experiment.training, experiment.seed
    terms = Terms(_name(experiment, task, params), method, task, params, training, seed, pool.num_clients)
    rows = made_up(task, pool.inputs, tree.map(lambda leaf: leaf[0], pool.extra), pool.transform)
    one = replace(pool, x=rows.x.cpu(), y=rows.y.cpu(), train=Rows(torch.arange(len(rows.x)), (len(rows.x),)))
    check_together(experiment, one, task)
    return Agreement(terms, pool, rows)


def _name(experiment: Experiment, task: Task, params: Tree) -> str:
    """Return what messages call the experiment: its hash, in which weights that are read from files count too."""
    given = (params if experiment.model.start else {}) | (task.constants() if experiment.model.vectors else {})
    if not given:
        return experiment.hash()
    return hashlib.sha256(f"{experiment.hash()} {identity.weights_hash(given)}".encode()).hexdigest()[:16]
