"""One run in its folder: start or resume it, record each round, and summarise it at the end."""

import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from bespoke import __version__
from bespoke.clients import Clients, processes
from bespoke.clients.batched import SCARCE
from bespoke.core.data import FederatedData
from bespoke.core.tree import Tree
from bespoke.errors import UserError
from bespoke.files import write_atomic
from bespoke.records import (
    CLIENTS,
    FEDERATION,
    RESUME,
    RESUME_OPTION,
    ROUNDS,
    SUMMARY,
    TIMING,
    RunFolder,
    is_list_of,
    is_text,
)
from bespoke.report.summary import often_refused, trouble
from bespoke.runs import beginnings, identity
from bespoke.runs.checkpoint import Checkpoint, load_newest, save
from bespoke.runs.experiment import Experiment, from_tables
from bespoke.runs.federation import Federation
from bespoke.runs.folder import CHECKPOINTS, ELSEWHERE, TemporaryFolder, remove_temporaries, taken
from bespoke.runs.recording import Event, recorded
from bespoke.runs.results import Run


class Options(TypedDict, total=False):
    """How a run is carried out, which is not part of the experiment; shared by ``run`` and ``federate``."""

    backend: str  # batched: a cohort at once; loop: one client after another; auto: batched on CUDA, else see choose
    device: str  # cpu, cuda or auto
    precision: str  # of matmuls on CUDA: fp32, tf32, or bf16, which the shipped models support and auto chooses
    processes: int | str  # that share the work on a machine's cores; auto: as many as cores, where that pays
    states: str  # where idle clients' states are kept: on the device, the host, or disk, if memory is too small
    halve: bool  # blocks of clients when memory runs out, which changes rounding; False: that is an error
    resume: bool  # continue from the newest intact checkpoint in the folder
    callbacks: Sequence[Callable[[Event], None]]  # called after every round
    checkpoint_every: int | None  # rounds; None: 10, or more where that would take more than a tenth of the time
    progress: bool | None  # a bar in a terminal or notebook; True: elsewhere lines on stderr; False: nothing
    stop: Callable[[], bool]  # called after every round; True stops the run there
    about: dict[str, Any]  # added to environment.json


def execute(
    experiment: Experiment,
    federation: Federation,
    pool: FederatedData,
    described: dict[str, Any],
    out: str | Path | None,
    chosen: Options,
) -> Run:
    """Run or resume an experiment in the folder ``out``, or a temporary one; every process of a run calls this.

    ``described`` is added to the description of the data in ``federation.json``.
    """
    told = _agreed(experiment, federation, pool)
    with taken(out, chosen["resume"]) as (folder, notes):
        start = _opened(experiment, federation, told, folder)
        store, notes, pace = federation.clients.store, [*notes, *start.notes], _Pace(chosen["checkpoint_every"])
        environment = environment_of(experiment, federation, start.label) | chosen["about"]
        noted = environment | {"notes": notes + federation.clients.notes}
        _describe(folder, experiment, federation, pool, told | described, noted, start.label)

        def checkpoint(round: int, server: Tree) -> None:
            files = store.flush()
            if processes.first():
                _keep_notes(folder, noted, notes + federation.clients.notes)
                lengths = folder.offsets()
                kept = Checkpoint(round, server, files, lengths, folder.sums(lengths), federation.bound.recent)
                save(folder.path / CHECKPOINTS, kept, start.label)
            processes.wait()  # files that no checkpoint names are removed before any process writes new ones

        server = recorded(
            federation,
            folder if processes.first() else _Reader(folder),
            start.server,
            start.round,
            checkpoint=pace.timed(checkpoint),
            due=pace.due,
            stop=lambda: processes.any_of(chosen["stop"]() or processes.orphaned()),
            callbacks=chosen["callbacks"] if processes.first() else (),
        )
        notes = list(dict.fromkeys(notes + federation.clients.notes + pace.notes()))
        done = Run(experiment, folder, federation, server, pool, notes)
        done.notes += [*often_refused(folder.rounds(), pool.names), *filter(None, [trouble(done.summary)])]
        conclude(done, environment, exports=out is not None)
    return done


def _keep_notes(folder: RunFolder, environment: dict[str, Any], notes: list[str]) -> None:
    """Write notes that are new into environment.json: a resume must not lose them."""
    if notes != environment["notes"]:
        environment["notes"] = notes
        folder.write_json("environment.json", environment)


def _noted(folder: RunFolder) -> list[str]:
    """Return the notes of a run so far; none where they cannot be read."""
    try:
        notes = folder.read_json("environment.json").get("notes", [])
    except (UserError, AttributeError):
        return []
    return notes if is_list_of(is_text)(notes) else []


def _agreed(experiment: Experiment, federation: Federation, pool: FederatedData) -> dict[str, Any]:
    """Return the description of the data, after all processes have found the same, and run the same with it."""
    told = identity.described(pool, federation.params if experiment.model.start else None)
    data = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    device, precision = federation.task.device.type, federation.task.precision
    processes.same(f"experiment {experiment.hash()} on data {data} on {device} in {precision}")
    return told


def _describe(
    folder: RunFolder,
    experiment: Experiment,
    federation: Federation,
    pool: FederatedData,
    told: dict[str, Any],
    environment: dict[str, Any],
    label: str,
) -> None:
    """Write whose data a run has and, unless its folder is temporary, what it began with, both once; and where it is.

    The first process writes, the others wait.
    """
    if processes.first():
        if not (folder.path / FEDERATION).exists():
            folder.write_json(FEDERATION, told)
        if not isinstance(folder, TemporaryFolder):
            beginnings.write_once(folder, experiment, federation.task, federation.params, pool, label)
        folder.write_json("environment.json", environment)
    processes.wait()


def conclude(done: Run, environment: dict[str, Any], exports: bool) -> None:
    """Write what a run's folder holds at its end; say so if it stopped because its launcher has ended."""
    if processes.first():
        counted = _device_seconds(done.federation.clients)
        done.folder.write_json("environment.json", environment | counted | {"notes": done.notes})
        done.folder.write_json(SUMMARY, done.summary)
        if exports:
            done.folder.export_parquet()
    processes.wait()  # the others have read the records, while the first process keeps the folder
    rounds = done.summary["rounds"]
    if processes.any_of(processes.orphaned()) and rounds < done.experiment.training.rounds:
        raise UserError(
            "the program that started the processes of this run has ended, so they stopped after round "
            f"{rounds}, with all saved: continue with {RESUME_OPTION}"
        )


class _Pace:
    """When to write a checkpoint: every so many rounds, or where nobody said so, every ten rounds or every minute.

    Then it is not for more than a tenth of the time: the states of all clients with two moments for each weight may be
    gigabytes.
    """

    _USUAL, _LONGEST = 10, 60.0  # rounds, seconds
    _SHARE, _CHEAP = 0.1, 1.0  # of the time; seconds that are never too many

    def __init__(self, every: int | None) -> None:
        self._every, self._steady = every or self._USUAL, every is not None
        self._last, self._seconds, self._postponed = time.monotonic(), 0.0, 0

    def due(self, round: int) -> bool:
        """Return whether to write one after this round, the same in every process."""
        regular = round % self._every == 0
        if self._steady:
            return regular
        since = time.monotonic() - self._last
        cheap = self._seconds <= max(self._CHEAP, self._SHARE * since)
        due: bool = processes.from_first(cheap and (regular or since > self._LONGEST))
        self._postponed += regular and not due
        return due

    def timed(self, write: Callable[[int, Tree], None]) -> Callable[[int, Tree], None]:
        """Return a function that writes a checkpoint and notes how long that took."""

        def written(round: int, server: Tree) -> None:
            begin = time.monotonic()
            write(round, server)
            self._last = time.monotonic()
            self._seconds = self._last - begin

        return written

    def notes(self) -> list[str]:
        if not self._postponed:
            return []
        return [
            f"a checkpoint took {self._seconds:.1f} s, so {self._postponed} of those after every {self._every} rounds "
            "were left out; --checkpoint-every N (checkpoint_every=N in Python) writes them all"
        ]


@dataclass(frozen=True)
class _Start:
    """Where a run begins."""

    round: int
    server: Tree  # the state before that round
    label: str  # the experiment's hash when the run began; a later version of the library may compute another
    notes: list[str]


def _opened(experiment: Experiment, federation: Federation, told: dict[str, Any], folder: RunFolder) -> _Start:
    """Return where to begin in a folder that was taken, with states and records as they were there."""
    server, found, label, notes, skipped = federation.start(), None, experiment.hash(), list[str](), list[str]()
    if folder.holds_run():
        label = label_of(folder) or label
        stored, notes = _stored(experiment, folder, told), identity.compare(folder, told)
        found, skipped = newest(folder, federation, server, label)
        if found is None:
            skipped.append(f"{folder.path} holds no intact checkpoint: started again from round 1")
        _check_rounds(stored, experiment, folder, found.round if found else 0)
        if found is not None:
            server, federation.bound.recent = found.server, dict(found.recent)
            notes += [
                note for note in _noted(folder) if note.startswith(SCARCE)
            ]  # it still tells how sums were rounded
    federation.clients.store.open(folder.path / CHECKPOINTS, found.states if found else (), owner=label)
    processes.wait()  # nothing is written before every process has read the folder
    if processes.first():
        folder.truncate(found.offsets if found else dict.fromkeys(folder.offsets(), 0))
        remove_temporaries(folder)
        write_atomic(folder.path / "config.toml", experiment.toml(), RESUME)  # from here on the folder holds a run
        RunFolder.create(folder.path / CHECKPOINTS)
    return _Start(found.round + 1 if found else 1, server, label, notes + skipped)


@dataclass(frozen=True)
class _Reader:
    """The records in a process other than the first: reading works, and only the first one writes."""

    folder: RunFolder

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        pass

    def rounds(self) -> list[dict[str, Any]]:
        return self.folder.rounds()

    def clients(self) -> Iterator[dict[str, Any]]:
        return self.folder.clients()


def _stored(experiment: Experiment, folder: RunFolder, told: dict[str, Any]) -> Experiment:
    """Return the experiment stored in a folder, which must be this one; its number of rounds may differ."""
    stored = from_tables(folder.config(), str(folder.path / "config.toml"), experiment.method)
    if stored.hash() != experiment.hash():
        if experiment.data.name == "arrays" and replace(stored.data, path=experiment.data.path) == experiment.data:
            identity.compare(folder, told)  # the path is a hash of all rows: this names the client
        raise UserError(
            f"{folder.path} holds the run of another experiment (hash {stored.hash()}, this one is "
            f"{experiment.hash()}; {_difference(stored, experiment)}): {ELSEWHERE}"
        )
    return stored


def newest(
    folder: RunFolder,
    federation: Federation,
    server: Tree,
    label: str,
    state: Tree | None = None,
    *,
    timed: bool = True,
) -> tuple[Checkpoint | None, list[str]]:
    """Return a run's newest intact checkpoint, which fits the records, or None, and notes about it; change nothing.

    ``server`` is its state before the first round, ``label`` the hash that the run's checkpoints bear, and ``state``
    what they hold for one client, if not what the clients of this federation keep. Where the run does not go on,
    ``timed`` is False: its record of seconds may be missing.
    """
    task = federation.task
    found, notes = load_newest(
        folder.path / CHECKPOINTS,
        task.device,
        experiment_hash=label,
        like=server,
        clients=federation.total_clients,
        state=federation.clients.sample() if state is None else state,
    )
    if found is None:
        return None, notes
    if processes.first():
        offsets = dict(found.offsets)
        if not timed and not os.path.lexists(folder.path / TIMING):
            del offsets[TIMING]
            notes.append(f"{folder.path / TIMING} is missing: how long the rounds took is not known")
        folder.verify(offsets, found.sums)
        _check_history(folder, found)
    if found.sums is None:
        notes.append(f"{folder.path} has no checksums of its records: only their lengths were compared")
    return found, notes


def _check_rounds(stored: Experiment, experiment: Experiment, folder: RunFolder, done: int) -> None:
    """Refuse to go on after ``done`` rounds if that is more than wanted, or if the run cannot be extended."""
    rounds = experiment.training.rounds
    if rounds < done:
        raise UserError(f"{folder.path} has already done {done} rounds: set training.rounds to {done} or more")
    if experiment.training.full_last and done == stored.training.rounds != rounds:
        raise UserError(
            f"{folder.path} has finished with a last round of all clients, so it cannot be extended: "
            f"run {rounds} rounds in another folder"
        )


def _check_history(folder: RunFolder, found: Checkpoint) -> None:
    """Refuse a checkpoint that is not of the round where its records end, or lacks the state of one who took part."""
    cure = f"restore the folder, or {ELSEWHERE}"
    rows = folder.rounds(found.offsets[ROUNDS])
    if [row["round"] for row in rows] != list(range(1, found.round + 1)):
        raise UserError(f"{folder.path / ROUNDS} does not hold the {found.round} rounds of its checkpoint: {cure}")
    evaluated = next((row["round"] for row in reversed(rows) if "evaluated" in row), 0)
    if evaluated and not found.offsets[CLIENTS]:
        raise UserError(f"{folder.path / CLIENTS} does not hold the evaluation of round {evaluated}: {cure}")
    accepted = {c for row in rows for c in row["cohort"] if str(c) not in row["refused"] | row.get("missing", {})}
    if lacking := accepted - found.clients:
        raise UserError(
            f"the checkpoint of round {found.round} in {folder.path / CHECKPOINTS} has no state of client "
            f"{min(lacking)}, who took part: {cure}"
        )


def label_of(folder: RunFolder) -> str:
    """Return the experiment's hash recorded when the run began, which its checkpoints bear; "" if that is lost."""
    return said(folder, "experiment")


def said(folder: RunFolder, key: str) -> str:
    """Return an entry of a run's ``environment.json`` that is text; "" if it is lost."""
    try:
        told = folder.read_json("environment.json")
    except UserError:
        return ""  # it is written anew
    value = told.get(key) if isinstance(told, dict) else None
    return value if isinstance(value, str) else ""


def _difference(stored: Experiment, experiment: Experiment) -> str:
    """Return the first setting in which two experiments differ; what may follow from others, or change, comes last."""
    there, here = stored.tables(), experiment.tables()
    if there["seed"] != here["seed"]:
        return f"seed is {there['seed']} there and {here['seed']} here"
    keys = [(t, k) for t in ("data", "model", "objective", "algorithm", "training") for k in there[t] | here[t]]
    last = [("data", "path"), ("training", "rounds")]
    for table, key in sorted(keys, key=lambda name: last.index(name) + 1 if name in last else 0):
        if (table, key) == ("objective", "metrics"):
            continue  # which may change
        old, new = there[table].get(key), here[table].get(key)
        if old != new:
            return f"{table}.{key} is {old!r} there and {new!r} here"
    return "no setting differs"


def environment_of(experiment: Experiment, federation: Federation, label: str) -> dict[str, Any]:
    """Return what ran where, for ``environment.json``."""
    device = federation.task.device
    return {
        "bespoke": __version__,
        "git": code_commit(),
        "experiment": label,
        "paths_from": os.path.abspath(experiment.folder),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(federation.task.dtype).removeprefix("torch."),
        "precision": federation.task.precision,
        "backend": federation.clients.name,
        "states": federation.clients.store.kind,
        "world_size": processes.world(),
    }


def _device_seconds(clients: Clients) -> dict[str, Any]:
    """Return the device's seconds by phase, if they are counted."""
    seconds = {name: round(s, 3) for name, s in clients.timings().items()}
    return {"device_seconds": seconds} if seconds else {}


def code_commit() -> str | None:
    """Return what ``BESPOKE_COMMIT`` says, else the commit of a checkout, with "-dirty" if its code was changed."""
    root, named = Path(__file__).parents[3], os.environ.get("BESPOKE_COMMIT")
    if named or not (root / ".git").exists():
        return named
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "-s", "-uno", "--", "src"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changes else commit
