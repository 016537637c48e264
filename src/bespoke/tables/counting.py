"""Numbers of a table that are counted from a model and a method: no data are read, and nothing is trained."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bespoke import __version__, analysis
from bespoke.core import rng, tree
from bespoke.core.task import Task
from bespoke.data.settings import DataSettings
from bespoke.data.sources.catalogue import CATALOGUE
from bespoke.errors import UserError
from bespoke.models import build_task
from bespoke.runs.execution import code_commit
from bespoke.runs.experiment import Experiment, load
from bespoke.tables import results
from bespoke.tables.plan import same_settings
from bespoke.tables.reading import about
from bespoke.tables.results import Result
from bespoke.tables.spec import Entry, Table


def count(tables: Iterable[Table], root: Path, cells: Sequence[str] = ()) -> int:
    """Write a result for each number of the tables that can be counted, of some cells or of all; return how many."""
    wanted = [
        entry for table in tables for entry in table.entries if is_counted(entry) if not cells or entry.cell.id in cells
    ]
    for entry in wanted:
        content, there = counted(entry), results.at(root, entry, 0)
        if there is None or not _stands(there, entry, content["value"]):  # else no file changes
            results.write(root, entry, content)
    return len(wanted)


def _stands(there: Result, entry: Entry, value: float) -> bool:
    """Return whether a result names its commit, and has the number and the settings that it would have now."""
    named = bool(there.content["source"].get("commit"))
    same = there.content.get("value") == results.rounded(value)  # as a file holds it
    return named and same and same_settings(there.content["settings"], experiment_of(entry)[0])


def is_counted(entry: Entry) -> bool:
    """Return whether a number is counted from a model and a method."""
    return entry.cell.kind == "benchmark" and not entry.cell.missing and entry.cell.how in COUNTS


def experiment_of(entry: Entry) -> tuple[Experiment, str]:
    """Return the experiment whose model and method a number is counted from, and where its settings come from."""
    if entry.base is None:
        raise UserError(f"{entry.table}: cell {entry.id} names no run file to take the model from: add base = ...")
    method = None if entry.cell.how == "parameters" else entry.algorithm  # whose rows are parts of the model
    return load(entry.base, method, entry.overrides(0) if method else list(entry.cell.set), seed=0)


def counted(entry: Entry) -> dict[str, Any]:
    """Return the content of the result of a number that is counted."""
    experiment, source = experiment_of(entry)
    return {
        **about(entry, experiment, source),
        "status": "done",
        "view": "",
        "value": COUNTS[entry.cell.how](experiment, entry.row.id),
        "source": {"bespoke": __version__, "commit": code_commit(), "modules": [], "method": None},
        "environment": {},
        "seconds": 0.0,
    }


def _task(experiment: Experiment) -> Task:
    """Build the model for the shape and the classes of the data set, or for as many classes as the settings name."""
    data = experiment.data
    if data.name not in CATALOGUE:
        raise UserError(f"[data] name = {data.name!r} is no data set of the catalogue, whose shape is known")
    known = CATALOGUE[data.name]
    classes = known.classes if data.num_classes == DataSettings.num_classes else data.num_classes
    return build_task(experiment.model, known.shapes[0], classes)


def _parameters(experiment: Experiment, part: str) -> float:
    """Return a part of what a client sends: body, linear, gaussian or overhead_percent."""
    counts = analysis.parameter_counts(_task(experiment))
    if part not in counts:
        raise UserError(f"there is no row {part!r} among the parameters; use {', '.join(counts)}")
    return counts[part]


def _trees(experiment: Experiment) -> tuple[Any, Any]:
    """Return what a client receives and what it keeps to train; FedPCE also keeps the norms that it started from."""
    task, method = _task(experiment), experiment.method
    params = {name: torch.zeros(shape) for name, shape in task.shapes.items()}
    server = method.server_init(task, params, max(1, experiment.data.clients), rng.key(0))
    state = method.client_init(task, params, torch.tensor(0))
    return method.broadcast(server), {"embedding": state["embedding"]} if "embedding" in state else state


def _trained(experiment: Experiment, row: str) -> float:
    """Return how many numbers a client trains: those it receives and those it keeps."""
    return sum(map(_size, _trees(experiment)))


def _trained_new(experiment: Experiment, row: str) -> float:
    """Return how many numbers a new client trains: those it keeps."""
    return _size(_trees(experiment)[1])


def _size(parts: Any) -> int:
    return sum(leaf.numel() for leaf in tree.flatten(parts).values())


COUNTS: dict[str, Callable[[Experiment, str], float]] = {
    "parameters": _parameters,
    "trained": _trained,
    "trained_new": _trained_new,
}
