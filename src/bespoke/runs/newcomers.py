"""A client that never took part: it adapts and personalises with its own rows and what the server holds.

It is treated as the first new client of the federation would be, to the bit: the same functions, keys and messages.
"""

import math
import sys
from dataclasses import replace
from typing import Any

import torch

from bespoke.clients import SequentialClients
from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import FederatedData, Rows
from bespoke.core.tree import Tree
from bespoke.errors import UserError
from bespoke.runs.costs import check_passes
from bespoke.runs.experiment import Experiment, read_fields
from bespoke.runs.federation import QUICK, Evaluation, Federation
from bespoke.runs.personal import checked_rows


def common_constants(pool: FederatedData) -> tuple[Tree, list[str]]:
    """Return the constants of a transform that all clients share, and the names of those that each has for itself."""
    flat = tree.flatten(pool.extra)
    own = [name for name, leaf in flat.items() if leaf.stride(0) and not (leaf == leaf[:1]).all()]
    return tree.unflatten({name: leaf[0].clone() for name, leaf in flat.items() if name not in own}), own


def refuse_constants(own: list[str]) -> None:
    """Refuse a run whose clients each have constants of their own, by their names."""
    if own:
        raise UserError(
            f"each client of this run has constants of its own for its examples ({', '.join(own)}), and a client from "
            "outside has none: train a run without them, for images one without [data] degrade"
        )


def personal_of(
    experiment: Experiment,
    federation: Federation,
    server: Tree,
    round: int,
    pool: FederatedData,
    x: Any,
    y: Any,
    adapt_rounds: int | None = None,
) -> tuple[Tree, Tree, int]:
    """Return the personal model of a client with rows x (n, ...) and y (n,) or (n, T), its constants, and n.

    ``server`` is its state after a ``round``; of the ``pool`` only the form of its rows and what is done to them count.
    ``adapt_rounds`` replaces that of the experiment.
    """
    task = federation.task
    rows = _alone(federation, pool, x, y)
    check_passes(experiment, len(rows.x))
    given = {} if adapt_rounds is None else {"adapt_rounds": adapt_rounds}
    evaluation = replace(experiment.evaluation, **read_fields(given, Evaluation, "personalize(...)"))
    _tell_costs(experiment, evaluation.adapt_rounds, len(rows.x))
    clients = SequentialClients(
        experiment.method,
        task,
        federation.params,
        rows,
        experiment.training,
        experiment.seed,
        adapt_rounds=evaluation.adapt_rounds,
        adapt_epochs=evaluation.adapt_epochs,
    )
    newcomer = [rows.num_clients]
    (personal,) = clients.personal(round, newcomer, *federation.down(server, newcomer))
    if not tree.finite(personal):
        raise UserError(
            "the new client's model holds NaN or infinity: look at the scale of its rows, which should be that of the "
            "others, or train the run with a smaller training.lr"
        )
    return personal, tree.map(lambda leaf: leaf[0], rows.extra), len(rows.x)


def _alone(federation: Federation, pool: FederatedData, x: Any, y: Any) -> FederatedData:
    """Return the federation in which only the client after all others has rows."""
    extra, own = common_constants(pool)
    refuse_constants(own)
    examples, targets = checked_rows(federation.task, pool.inputs, x, y)
    if not len(examples):
        raise UserError("there are no rows to learn from: give at least one")
    before = (0,) * federation.num_clients
    none = Rows(torch.empty(0, dtype=torch.int64), (*before, 0))
    return replace(
        pool,
        x=examples,
        y=targets,
        train=Rows(torch.arange(len(examples)), (*before, len(examples))),
        test=none,
        val=none,
        num_clients=federation.num_clients,
        names=(*[""] * federation.num_clients, "new"),
        extra=tree.map(lambda leaf: leaf.expand(federation.num_clients + 1, *leaf.shape), extra),
    )


def _tell_costs(experiment: Experiment, rounds: int, n: int) -> None:
    """Say on stderr what a long adaptation will take."""
    training, epochs = experiment.training, experiment.evaluation.adapt_epochs
    if rounds <= QUICK or type(experiment.method).adapt is Algorithm.adapt:
        return
    steps = (
        training.steps if training.steps and not epochs else (epochs or training.epochs) * math.ceil(n / training.batch)
    )
    print(
        f"note: {experiment.algorithm_name} adapts to a new client for {rounds} rounds, about {steps} steps of "
        f"{min(n, training.batch)} rows each, {rounds * steps:,} in all: [evaluation] adapt_rounds sets this",
        file=sys.stderr,
        flush=True,
    )
