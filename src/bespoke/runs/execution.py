"""One run in its folder: start or resume it, record each round, and summarise it at the end."""

import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bespoke import __version__
from bespoke.clients import Clients, processes
from bespoke.core.data import FederatedData
from bespoke.core.tree import Tree
from bespoke.errors import UserError
from bespoke.files import write_atomic
from bespoke.records import RunFolder
from bespoke.runs.checkpoint import Checkpoint, load_newest, save
from bespoke.runs.experiment import Experiment, from_tables
from bespoke.runs.federation import Federation
from bespoke.runs.recording import Event, recorded
from bespoke.runs.results import Run


def execute(
    experiment: Experiment,
    federation: Federation,
    pool: FederatedData,
    described: dict[str, Any],
    out: str | Path | None,
    resume: bool,
    checkpoint_every: int,
    stop: Callable[[], bool],
    callbacks: Sequence[Callable[[Event], None]],
    about: dict[str, Any],
) -> Run:
    """Run or resume an experiment in the folder ``out``, or a temporary one; every process of a run calls this.

    ``described`` is added to the description of the data in ``federation.json``, ``about`` to ``environment.json``;
    ``stop()`` is called after each round.
    """
    if checkpoint_every < 1:
        raise UserError(f"checkpoint_every must be at least 1, not {checkpoint_every!r}")
    processes.same(f"experiment {experiment.hash()} on {federation.task.device.type} in {federation.task.precision}")
    folder = _folder(out)
    checkpoints, store = folder.path / "checkpoints", federation.clients.store
    first, server, found, notes, offsets = 1, None, None, list[str](), dict[str, int]()
    if folder.holds_run():
        if not resume:
            raise UserError(
                f"{folder.path} already holds a run: add --resume to continue it, or choose another folder with --out"
            )
        found, notes = _find_start(experiment, folder, federation)
        if found is not None:
            first, server = found.round + 1, found.server
        offsets = found.offsets if found else dict.fromkeys(folder.offsets(), 0)
    store.open(checkpoints, found.states if found else ())
    environment = _environment(federation, experiment) | about
    processes.wait()  # nothing is written before every process has read the folder
    if processes.first():
        RunFolder.create(checkpoints)
        folder.truncate(offsets)
        write_atomic(folder.path / "config.toml", experiment.toml())
        folder.write_json("federation.json", _describe(pool) | described)
        folder.write_json("environment.json", environment | {"notes": notes})
    processes.wait()

    def checkpoint(round: int, server: Tree) -> None:
        files = store.flush()
        if processes.first():
            save(checkpoints, Checkpoint(round, server, files, folder.offsets()), experiment.hash())
        processes.wait()  # files that no checkpoint names are removed before any process writes new ones

    records = folder if processes.first() else _Reader(folder)
    server = recorded(
        federation,
        records,
        server,
        first,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        stop=lambda: processes.any_of(stop()),
        callbacks=callbacks if processes.first() else (),
    )
    notes = notes + federation.clients.notes
    done = Run(experiment, folder, federation, server, pool, notes)
    if processes.first():
        folder.write_json("environment.json", environment | _device_seconds(federation.clients) | {"notes": notes})
        folder.write_json("summary.json", done.summary)
        if out is not None:
            folder.export_parquet()
    processes.wait()
    _ = done.summary  # which the others read while the first process keeps the folder
    processes.wait()
    return done


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


def _folder(out: str | Path | None) -> RunFolder:
    """Return the run's folder, which the first process makes and all see."""
    made = (_temporary_folder() if out is None else RunFolder.create(out)) if processes.first() else None
    path = processes.from_first(str(made.path) if made else None)
    folder = made or RunFolder(path)
    if not folder.path.is_dir():
        raise UserError(
            f"process {processes.rank()} does not see the folder {folder.path}: choose one that all processes share"
        )
    return folder


def _temporary_folder() -> RunFolder:
    """Make a folder that is removed once nothing refers to it."""
    folder = RunFolder.create(tempfile.mkdtemp(prefix="bespoke-"))
    weakref.finalize(folder, shutil.rmtree, folder.path, ignore_errors=True)
    return folder


def _find_start(
    experiment: Experiment, folder: RunFolder, federation: Federation
) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to continue from, after checking that it belongs to this experiment."""
    stored = from_tables(folder.config(), str(folder.path / "config.toml"), experiment.method)
    if stored.hash() != experiment.hash():
        raise UserError(
            f"{folder.path} holds the run of another experiment (hash {stored.hash()}, this one is "
            f"{experiment.hash()}; {_difference(stored, experiment)}): choose another folder with --out"
        )
    found, notes = load_newest(folder.path / "checkpoints", federation.task.device)
    rounds, done = experiment.training.rounds, found.round if found else 0
    if rounds < done:
        raise UserError(f"{folder.path} has already done {done} rounds: set training.rounds to {done} or more")
    if experiment.training.full_last and done == stored.training.rounds != rounds:
        raise UserError(
            f"{folder.path} has finished with a last round of all clients, so it cannot be extended: "
            f"run {rounds} rounds in another folder"
        )
    if found is None:
        notes = [*notes, f"{folder.path} holds no intact checkpoint: started again from round 1"]
    return found, notes


def _difference(stored: Experiment, experiment: Experiment) -> str:
    """Return the first setting in which two experiments differ."""
    there, here = stored.tables(), experiment.tables()
    if there["seed"] != here["seed"]:
        return f"seed is {there['seed']} there and {here['seed']} here"
    for table in ("data", "model", "objective", "algorithm", "training"):
        for key in there[table] | here[table]:
            if (table, key) == ("objective", "metrics"):
                continue  # which may change
            old, new = there[table].get(key), here[table].get(key)
            if old != new:
                return f"{table}.{key} is {old!r} there and {new!r} here"
    return "no setting differs"


def _describe(pool: FederatedData) -> dict[str, Any]:
    everyone = map(pool.train.client, range(pool.total_clients))
    classes = [int(pool.y[rows].unique().numel()) for rows in everyone] if pool.num_classes else None
    return {
        "clients": pool.num_clients,
        "new_clients": pool.total_clients - pool.num_clients,
        "names": list(pool.names),
        "train": list(pool.train.sizes),
        "val": list(pool.val.sizes),
        "test": list(pool.test.sizes),
        "classes": classes,
        "num_classes": pool.num_classes,
    }


def _environment(federation: Federation, experiment: Experiment) -> dict[str, Any]:
    device = federation.task.device
    return {
        "bespoke": __version__,
        "git": _git_hash(),
        "experiment": experiment.hash(),
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


def _git_hash() -> str | None:
    """Return the commit of the running source tree, if it is a checkout."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
