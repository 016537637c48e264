"""The client's side of a real federation: its own rows, checked against the contract, and its model at the end."""

import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bespoke import __version__
from bespoke.core import tree
from bespoke.core.inputs import InputContract
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.data import read_rows, read_test_rows
from bespoke.data.pool import cut
from bespoke.errors import UserError, shown, visible
from bespoke.files import make_folder, write_atomic
from bespoke.network.messages import Request
from bespoke.network.node import Node
from bespoke.network.terms import rows_of
from bespoke.report.units import written
from bespoke.runs import model_files
from bespoke.runs.agreement import Agreement, agreement
from bespoke.runs.costs import check_passes
from bespoke.runs.experiment import Experiment
from bespoke.runs.personal import PersonalModel, checked_rows

MODEL, REPORT, STATES = "model.safetensors", "report.json", "states"  # in a client's folder
OWNER = "experiment.id"  # there too: what messages call the experiment that the others are of

_BEFORE = (
    "the model that this client would have had before the first round: the common initial weights, personalised (and, "
    "where the method adapts new clients, adapted) with its own train rows"
)
_AFTER = "its personal model after the last round, in {}"

Split = tuple[Tensor, Tensor]  # x (n, ...) and y (n,) or (n, T), as they are stored


def member(
    experiment: Experiment,
    data: str | os.PathLike[str],
    home: str | os.PathLike[str],
    *,
    test: str | os.PathLike[str] | None = None,
    delimiter: str = ",",
    device: str = "cpu",
    told: Callable[[str], None] = print,
) -> Node:
    """Return the client's side of a federation, with states and, at the end, model and report in the folder ``home``.

    ``data`` are its own rows with their labels: a .npz, .csv or .parquet file, or a folder of pictures. They must keep
    the experiment's contract. ``test`` are its test rows; without them those of the archive (``x_test``, ``y_test``)
    are, or a share ``[data] test`` of its rows; a share ``[data] validation`` of the others is set aside. ``told`` is
    called with a line on its result.
    """
    agreed = agreement(experiment, device)
    folder, task = Path(os.path.expanduser(home)), agreed.terms.task
    splits = _splits(experiment, agreed, Path(data), None if test is None else Path(test), delimiter)
    check_passes(experiment, len(splits["train"][0]))
    extra = tree.map(lambda leaf: leaf[0], agreed.pool.extra)
    rows = {split: rows_of(task, *own, extra, agreed.pool.transform) for split, own in splits.items() if len(own[0])}
    _claim(folder, agreed.terms.experiment)

    def finish(request: Request, personal: Tree, before: Tree) -> None:
        models = [_model(experiment, agreed, request, splits, kept) for kept in (personal, before)]
        _write(folder, experiment, request, splits, models, told)

    return Node(agreed.terms, rows, folder / STATES, finish)


def _claim(folder: Path, experiment: str) -> None:
    """Make a client's folder the experiment's own; refuse that of another, whose states and model it would replace."""
    make_folder(folder)
    try:
        owner = (folder / OWNER).read_text(errors="replace").strip()
    except FileNotFoundError:
        owner = ""
    except OSError as error:
        raise UserError(f"{folder / OWNER} cannot be read: {error.strerror}; give another home") from None
    if owner == experiment:
        return
    if owner and any((folder / name).exists() for name in (STATES, MODEL)):  # else nothing of its work is there yet
        raise UserError(
            f"{folder} is the home of another experiment, {shown(owner)}, and this one is {experiment!r}: give each "
            "experiment a home of its own"
        )
    write_atomic(folder / OWNER, f"{experiment}\n")


# --- rows ---------------------------------------------------------------------------------------------------------


def _splits(
    experiment: Experiment, agreed: Agreement, data: Path, test: Path | None, delimiter: str
) -> dict[str, Split]:
    """Return a client's train, validation and test rows, which keep the contract."""
    task, contract = agreed.terms.task, agreed.pool.inputs
    found = _checked(data, lambda: read_rows(data, contract, delimiter=delimiter), task, contract)
    assert found is not None  # read_rows refuses what it cannot read
    if test is None:
        held = _checked(data, lambda: read_test_rows(data, contract), task, contract)
    else:
        held = _checked(test, lambda: read_rows(test, contract, delimiter=delimiter), task, contract)
    x, y = found
    everything, apart = np.arange(len(x)), None if held is None else [np.empty(0, np.int64)]
    (train,), (drawn,), (val,) = cut([everything], replace(experiment.data, new_clients=0), experiment.seed, apart)
    if not len(train):
        raise UserError(f"{data} has no rows to train on: give at least one")
    own = {"train": train, "val": val} | ({} if held else {"test": drawn})
    return {split: (x[rows], y[rows]) for split, rows in own.items()} | ({"test": held} if held else {})


def _checked(path: Path, read: Callable[[], Any], task: Task, contract: InputContract) -> Split | None:
    """Return rows that ``read()`` returns, if any; whatever breaks the contract is refused, with the file's name."""
    try:
        found = read()
        if found is None:
            return None
        if found[1] is None:
            raise UserError("it has no labels")
        x, y = checked_rows(task, contract, *found)
        sound = y.reshape(len(y), -1).isfinite().all(dim=1)
        if not sound.all():
            raise UserError(f"row {int(sound.int().argmin())} of y holds NaN or infinity: fix or remove it")
        return x, y.cpu()
    except UserError as error:
        raise UserError(f"{path} breaks the contract of the federation: {error}") from None


# --- the end ------------------------------------------------------------------------------------------------------


def _model(
    experiment: Experiment, agreed: Agreement, request: Request, splits: dict[str, Split], personal: Tree
) -> PersonalModel:
    """Return a personal model, with its headline metric on the client's test rows, if it has any."""
    terms, pool = agreed.terms, agreed.pool
    about = {
        "experiment": experiment.hash(),
        "round": request.round,
        "seed": terms.seed,
        "precision": terms.task.precision,
        "versions": {"bespoke": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "client": "new" if request.new else str(request.client),
        "rows": len(splits["train"][0]),
        "score": None,
    }
    card = model_files.card_of(experiment, terms.task, pool) | {"about": about}
    extra = tree.map(lambda leaf: leaf[0].clone(), pool.extra)
    model = PersonalModel(experiment.method, terms.task, personal, pool.inputs, card, pool.transform, extra)
    x, y = splits["test"]
    return model.scored(x, y.numpy(), of="the client's own test rows") if len(x) else model


def _write(
    folder: Path,
    experiment: Experiment,
    request: Request,
    splits: dict[str, Split],
    models: list[PersonalModel],
    told: Callable[[str], None],
) -> None:
    """Write the model's file and the report on it, each whole; the report comes last."""
    after, before = ((model.about["score"] or {}).get("value") for model in models)
    metric = next(iter(models[0].task.objective.metrics))
    report = {
        "client": models[0].about["client"],
        "method": experiment.algorithm_name,
        "experiment": experiment.hash(),
        "federation": request.federation,
        "round": request.round,
        "rows": {split: len(x) for split, (x, _) in splits.items()},
        "metric": metric,
        "of": "the client's own test rows" if len(splits["test"][0]) else "nothing: the client has no test rows",
        "before": before,
        "after": after,
        "meaning": {"before": _BEFORE, "after": _AFTER.format(MODEL)},
        "model": MODEL,
        "versions": models[0].about["versions"],
    }
    if models[0].card["holds"]:
        told(visible(f"note: {folder / MODEL} holds {models[0].card['holds']}"))
    models[0].write(folder / MODEL)
    write_atomic(folder / REPORT, json.dumps(report, indent=2, allow_nan=False) + "\n")
    values = [
        written(metric, value) if value is not None and math.isfinite(value) else f"no {metric}"
        for value in (before, after)
    ]
    told(visible(f"finished after round {request.round}: {values[0]} before, {values[1]} after; {folder / MODEL}"))
