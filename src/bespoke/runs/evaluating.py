"""A run's folder opened again, without changing it; and a trained run evaluated on other rows or other clients."""

import copy
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bespoke import __version__
from bespoke.clients import Simulated, processes
from bespoke.core import tree
from bespoke.core.data import FederatedData
from bespoke.core.tree import Tree
from bespoke.data.images.degrade import DEGRADATIONS
from bespoke.errors import UserError, shown
from bespoke.files import write_atomic
from bespoke.records import EVALUATION, FEDERATION, RESUME_OPTION, RunFolder
from bespoke.runs import identity
from bespoke.runs.api import Built, assemble, built, data_of, objective_of
from bespoke.runs.checkpoint import Checkpoint, layout
from bespoke.runs.execution import conclude, environment_of, label_of, newest, said
from bespoke.runs.experiment import Experiment, changed, load
from bespoke.runs.federation import Federation
from bespoke.runs.folder import CHECKPOINTS, ELSEWHERE, taken
from bespoke.runs.lock import check_idle
from bespoke.runs.recording import client_lines, named_first
from bespoke.runs.results import Run

# Settings of [data] that change how rows look or how many are kept, but not which rows a client has.
_SAME_ROWS = {
    *("corrupt", "corrupt_clients", "pairs", "degrade", *DEGRADATIONS["fedpce"], "augment"),
    *("keep", "keep_rows", "keep_clients"),
}
_ADAPTATION = ("batch", "epochs", "lr", "steps")  # settings of [training] that fine-tuning and adaptation use


def reopened(
    folder: str | Path,
    *,
    device: str = "auto",
    backend: str = "auto",
    precision: str = "auto",
    states: str = "device",
) -> Run:
    """Open the folder of a run and return what ``bespoke.run`` returned, as of its newest intact checkpoint.

    Nothing in the folder is written. Settings, records, checkpoint, states and data are verified as for resuming. The
    other arguments are as for ``run``. A module that the experiment names is imported, which runs its code; a note on
    stderr says so.
    """
    run = trained_folder(folder)
    experiment, notes = _stored(run)
    parts = built(experiment, device, precision)
    told = identity.described(parts.pool, parts.params if experiment.model.start else None)
    notes += identity.compare(run, told, "run the experiment again")
    federation = assemble(experiment, parts, backend, states)
    clients = federation.clients
    assert isinstance(clients, Simulated)  # in one process
    found, skipped = last_checkpoint(run, experiment, federation)
    clients.store.open(run.path / CHECKPOINTS, found.states, read_only=True)
    federation.bound.recent = dict(found.recent)
    notes += skipped
    return Run(experiment, run, federation, found.server, parts.pool, notes + clients.notes, found.round)


def trained_folder(path: str | Path) -> RunFolder:
    """Return the folder of a run that is not going on, for one process; refuse anything else."""
    processes.join()
    if processes.world() > 1:
        raise UserError("one process opens a run's folder: start without torchrun")
    run = RunFolder(path)
    if not run.holds_run():
        raise UserError(f"{run.path} holds no run (there is no config.toml): give the folder of a run")
    if (run.path / EVALUATION).exists():
        raise UserError(f"{run.path} holds an evaluation, which has no models of its own: give the folder of its run")
    check_idle(run.path)
    return run


def last_checkpoint(
    run: RunFolder, experiment: Experiment, federation: Federation, state: Tree | None = None
) -> tuple[Checkpoint, list[str]]:
    """Return the newest intact checkpoint of a run, and notes about it; refuse a run without one.

    ``state`` is as for :func:`newest`.
    """
    found, notes = newest(run, federation, federation.start(), label_of(run) or experiment.hash(), state, timed=False)
    if found is None:
        why = f" ({notes[0]})" if notes else ""
        raise UserError(
            f"{run.path} holds no intact checkpoint{why}, so no model: continue the run with {RESUME_OPTION}"
        )
    recorded = run.rounds()[-1]["round"]
    if recorded > found.round:
        notes.append(f"the records go on to round {recorded}, and the models are those of round {found.round}")
    return found, notes


def _stored(run: RunFolder) -> tuple[Experiment, list[str]]:
    """Return the experiment of a run's folder, and notes about what could not be verified of it."""
    experiment = replace(load(run.path / "config.toml")[0], folder=said(run, "paths_from"))
    if experiment.data.name == "arrays" or experiment.model.name.startswith("own:"):
        raise UserError(
            f"{run.path} was given its data and model in Python, and does not hold them: use the object that "
            "bespoke.federate returned, or bespoke.open_run"
        )
    return experiment, unverified(run, experiment)


def unverified(run: RunFolder, experiment: Experiment) -> list[str]:
    """Refuse settings of a run that are not those it began with; return a note where that cannot be known."""
    label, version = label_of(run), said(run, "bespoke")
    if label in ("", experiment.hash()):
        return []
    if version == __version__:
        raise UserError(
            f"{run.path / 'config.toml'} is not as the run wrote it (its settings have the hash {experiment.hash()}, "
            f"the run began with {label}): restore it"
        )
    return [f"{run.path} is of version {version}: whether its settings were changed is not known"]


# --- evaluating again ----------------------------------------------------------------------------------------------


def evaluate(run: Run | str | Path, overrides: Sequence[str] = (), out: str | Path | None = None, **where: str) -> Run:
    """Evaluate a trained run, or the run in a folder, with some settings changed, and return that as a run.

    ``overrides`` are ``table.key=value``: any ``[evaluation]`` and ``[algorithm]`` settings, ``objective.metrics``,
    the settings of ``[training]`` that adaptation uses, and ``[data]`` settings that leave the clients that trained
    with their own test and validation rows. Clients adapt, personalise and predict; nothing is trained on the server.
    ``out`` is the folder for the record, which ``compare`` reads like a run's; without one, the record lives as long
    as the returned object. ``where`` are the other arguments of :func:`reopened`, for a folder.
    """
    if isinstance(run, Run) and where:
        raise UserError(f"evaluate({next(iter(where))}=...) is for a folder: a run is evaluated where it is")
    run = run if isinstance(run, Run) else reopened(run, **where)
    if not len(run.pool.x):
        raise UserError("this run was opened without its data: give evaluate(...) its folder")
    experiment = _changed(run.experiment, overrides)
    if out is not None and RunFolder(out).holds_run():
        raise UserError(f"{out} already holds a run or an evaluation: {ELSEWHERE}")
    federation, parts, notes = _federation(run, experiment)
    number, local = run.last_round, experiment.evaluation.when == "local"
    if local and not (parts.pool.total_clients > parts.pool.num_clients and experiment.evaluation.clients != "train"):
        raise UserError(
            '[evaluation] when = "local" is about what participants have just trained, which a run does not keep: add '
            "the setting evaluation.when=aggregated"
        )
    if number < run.experiment.training.rounds:
        notes.append(f"the run has done {number} of {run.experiment.training.rounds} rounds")
    if local:
        notes.append('only new clients: what participants had just trained, for when = "local", is not kept')
    with taken(out, resume=False) as (folder, told):
        begin = time.perf_counter()
        evaluated = federation.evaluate_with(number, run.server, population=not local)
        seconds = time.perf_counter() - begin
        notes = [*run.notes, *told, *notes, *federation.clients.notes]
        done = Run(experiment, folder, federation, run.server, parts.pool, list(dict.fromkeys(notes)), number)
        row = _UNTRAINED | {"round": number, "evaluated": named_first(federation, evaluated)}
        folder.append("rounds.jsonl", [row])
        folder.append("clients.jsonl", client_lines(federation, number, evaluated))
        phases = {"train": 0.0, "aggregate": 0.0, "evaluate": seconds, "checkpoint": 0.0}
        folder.append("timing.jsonl", [{"round": number, **phases}])
        started = parts.params if experiment.model.start else None
        folder.write_json(FEDERATION, identity.described(parts.pool, started) | parts.described)
        folder.write_json(EVALUATION, _origin(run) | {"overrides": list(overrides)})
        conclude(done, environment_of(experiment, federation, experiment.hash()), exports=out is not None)
        write_atomic(folder.path / "config.toml", experiment.toml())  # last: from here on the folder holds a record
    return done


_UNTRAINED: dict[str, Any] = {  # the line of a round in which nobody trained
    "cohort": [],
    "refused": {},
    "train_loss": None,
    "bytes_down": 0,
    "bytes_up": 0,
    "padding_waste": 0.0,
    "host_breaks": 0,
    "logged": {},
}


def folder_for(run: Run, overrides: Sequence[str]) -> Path:
    """Return where an evaluation of a run is recorded by default: in its folder, by a hash of settings and round."""
    settings = json.dumps([_changed(run.experiment, overrides).tables(), run.last_round], sort_keys=True)
    return run.folder.path / "evaluations" / hashlib.sha256(settings.encode()).hexdigest()[:12]


def _origin(run: Run) -> dict[str, Any]:
    """Return what the record of an evaluation says about the run that it is of."""
    label = label_of(run.folder) or run.experiment.hash()
    return {"run": str(run.folder.path.resolve()), "experiment": label, "round": run.last_round}


def _changed(old: Experiment, overrides: Sequence[str]) -> Experiment:
    """Return the experiment with settings changed; refuse those that a trained model cannot change."""
    for text in overrides:
        if text.partition("=")[0].strip() == "algorithm.name":
            raise UserError(f"the setting {shown(text)}: an evaluation keeps the method that was trained")
    new = changed(old, overrides)
    free = {"data", "evaluation", "algorithm"}
    for name in _differing(old, new):
        table, _, key = name.partition(".")
        if not (table in free or name == "objective.metrics" or (table == "training" and key in _ADAPTATION)):
            raise UserError(
                f"{name} cannot change in an evaluation of a trained run: change settings of [data], [evaluation] or "
                f"[algorithm], objective.metrics, or training.{', training.'.join(_ADAPTATION)}"
            )
    return new


def _differing(old: Experiment, new: Experiment) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two experiments of one method differ, with their values: ``table.key``."""
    there, here = old.tables(), new.tables()
    found = {} if old.seed == new.seed else {"seed": (old.seed, new.seed)}
    names = [(table, key) for table, settings in there.items() if table != "seed" for key in settings]
    changes = {f"{table}.{key}": (there[table][key], here[table][key]) for table, key in names}
    return found | {name: (before, after) for name, (before, after) in changes.items() if before != after}


def _federation(run: Run, experiment: Experiment) -> tuple[Federation, Built, list[str]]:
    """Return the federation of the changed experiment with the run's states, what it is made of, and notes."""
    differing = _differing(run.experiment, experiment)
    in_data = {name: new for name, (_, new) in differing.items() if name.startswith("data.")}
    pool, described = data_of(experiment) if in_data else (run.pool, run.folder.federation() or {})
    if in_data:
        _check_clients(run.pool, pool, in_data)
    task = run.federation.task
    if "objective.metrics" in differing:
        task = copy.copy(task)
        task.objective = objective_of(experiment)
    parts = Built(pool, task, run.federation.params, described)
    trained = run.federation.clients
    if not isinstance(trained, Simulated):
        raise UserError("one process evaluates a run: start without torchrun")
    federation = assemble(experiment, parts, trained.name, trained.store.kind, halve=trained.halve)
    clients = federation.clients
    assert isinstance(clients, Simulated)  # in one process
    first = clients.work.first(clients.params, torch.tensor(0, device=task.device))
    before, after = (layout(tree.flatten(server)) for server in (run.server, federation.start()))
    if before != after or not trained.store.fits(first):
        keys = ", ".join([name for name in differing if name.startswith("algorithm.")] or differing)
        raise UserError(f"{keys} changes what the server or a client keeps: train another run with it")
    clients.store = trained.store
    kept = {name: values for name, values in differing.items() if name.startswith(("algorithm.", "training."))}
    notes = [f"the run was trained with {name} = {old!r}, not {new!r}" for name, (old, new) in kept.items()]
    return federation, parts, notes


def _check_clients(old: FederatedData, new: FederatedData, changes: dict[str, Any]) -> None:
    """Refuse data in which a client that trained is not there with its own test and validation rows.

    Rows are compared by their numbers where the changes can only make them look different, else by their content.
    """
    what = f"with {', '.join(f'{name} = {value!r}' for name, value in changes.items())}"
    if _form(old) != _form(new):
        raise UserError(f"{what} the examples have another form or other classes than those that the run was given")
    by_number = {name.removeprefix("data.") for name in changes} <= _SAME_ROWS
    trained = zip(range(old.num_clients), old.names, strict=False)
    wrong = next((told for client, name in trained if (told := _lost(old, new, client, name, by_number))), "")
    if not wrong and new.num_clients > old.num_clients:
        wrong = f"the client {new.names[old.num_clients]!r}, who did not train, is no new client"
    if wrong:
        raise UserError(f"{what} {wrong}: an evaluation keeps the clients that trained, and their held-out rows")


def _lost(old: FederatedData, new: FederatedData, client: int, name: str, by_number: bool) -> str:
    """Return what a client that trained would lose in the new data, or nothing."""
    if client >= new.num_clients or new.names[client] != name:
        return f"the client {name!r}, who trained, would lose its place"
    for split, rows in (("test", "test rows"), ("val", "validation rows")):
        before, after = (getattr(pool, split).client(client) for pool in (old, new))
        same = len(before) == len(after)
        if same and by_number:
            same = torch.equal(before, after)
        elif same:
            same = torch.equal(old.x[before], new.x[after]) and torch.equal(old.y[before], new.y[after])
        if not same:
            return f"the client {name!r}, who trained, would have other {rows}"
    return ""


def _form(pool: FederatedData) -> tuple[Any, ...]:
    return pool.x.shape[1:], pool.x.dtype, pool.y.shape[1:], pool.y.dtype, pool.num_classes
