"""Taking a run's folder: for one run at a time, and only if it is empty or holds this run."""

import contextlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from bespoke.clients import processes
from bespoke.errors import UserError
from bespoke.files import temporary_of
from bespoke.records import CLIENTS, COLUMNS, EVALUATION, FEDERATION, RESUME_OPTION, ROUNDS, START, SUMMARY, RunFolder
from bespoke.runs import checkpoint
from bespoke.runs.lock import LOCK, FolderLock

ELSEWHERE = "choose another folder with --out (out= in Python)"
CHECKPOINTS = "checkpoints"  # in a run's folder

_DESCRIPTIONS = (FEDERATION, START, EVALUATION, "environment.json", SUMMARY)
_RECORDS = (*COLUMNS, *_DESCRIPTIONS, CHECKPOINTS)
_EXPORTS = [Path(name).with_suffix(".parquet").name for name in (ROUNDS, CLIENTS)]
_WHOLE = {"config.toml", *_DESCRIPTIONS, *_EXPORTS}  # what a run writes at once, beside checkpoints
_TEMPORARY = "bespoke-"  # how the names of temporary folders begin


@contextlib.contextmanager
def taken(out: str | Path | None, resume: bool) -> Iterator[tuple[RunFolder, list[str]]]:
    """Yield the run's folder, or a temporary one, which no other run can take meanwhile, and notes about that.

    Every process of a run calls this: the first makes and locks the folder, the others join. A folder that holds
    anything is refused, unless that is a run and ``resume`` is set.
    """
    with contextlib.ExitStack() as held:
        made = None
        if processes.first():
            made = _temporary_folder() if out is None else RunFolder.create(out)
            if not made.holds_run():  # who runs there is told before anything else
                check_free(made, resume)  # so that a refused folder is left as it is, without a lock
            lock = held.enter_context(contextlib.closing(FolderLock(made.path)))
            check_free(made, resume)  # again, because another run may have begun in between
            if processes.world() > 1:
                lock.share()
        path = processes.from_first(str(made.path) if made else None)
        folder = made or RunFolder(path)
        if not folder.path.is_dir():
            raise UserError(
                f"process {processes.rank()} does not see the folder {folder.path}: choose one that all processes share"
            )
        if made is None:
            lock = held.enter_context(contextlib.closing(FolderLock(folder.path, join=True)))
        new = made is not None and not made.holds_run()
        try:
            yield folder, [lock.note] if lock.note else []
        except BaseException:
            if new:
                _undo(folder)
            raise


def _undo(folder: RunFolder) -> None:
    """Empty the folder of a run that failed before it recorded a round, so that the next one may start there."""
    checkpoints = folder.path / CHECKPOINTS
    if (folder.path / ROUNDS).exists() or (checkpoints.is_dir() and any(checkpoints.iterdir())):
        return
    with contextlib.suppress(OSError):
        for name in ("environment.json", FEDERATION, START):
            (folder.path / name).unlink(missing_ok=True)
        if checkpoints.is_dir():
            checkpoints.rmdir()
        (folder.path / "config.toml").unlink(missing_ok=True)  # last: until here the folder holds a run


class TemporaryFolder(RunFolder):
    """The folder of a run that was given none; it is removed once nothing refers to it."""


def _temporary_folder() -> RunFolder:
    folder = TemporaryFolder.create(tempfile.mkdtemp(prefix=_TEMPORARY))
    weakref.finalize(folder, shutil.rmtree, folder.path, ignore_errors=True)
    return folder


def is_temporary(path: Path) -> bool:
    """Return whether a path looks like that of a :class:`TemporaryFolder`, whether or not it is still there."""
    drawn = re.fullmatch(f"{_TEMPORARY}[a-z0-9_]{{8}}", path.name)
    return drawn is not None and path.parent == Path(tempfile.gettempdir()) and not (path / START).exists()


def check_free(folder: RunFolder, resume: bool) -> None:
    """Refuse a folder that is neither empty nor a run to resume; our lock or a first file cut short do not count."""
    if folder.holds_run():
        if not resume:
            raise UserError(f"{folder.path} already holds a run: add {RESUME_OPTION} to continue it, or {ELSEWHERE}")
        if (folder.path / EVALUATION).exists():
            raise UserError(f"{folder.path} holds an evaluation of a run, which cannot go on: {ELSEWHERE}")
        return
    names = (entry.name for entry in os.scandir(folder.path))
    found = sorted(name for name in names if name != LOCK and temporary_of(name) != "config.toml")
    if any(name in _RECORDS for name in found):
        raise UserError(f"{folder.path} holds records but no config.toml: restore it, or {ELSEWHERE}")
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(f"{folder.path} is not empty (it holds {found[0]!r}{more}): empty it, or {ELSEWHERE}")


def _is_written(name: str) -> bool:
    """Return whether a run writes a file of this name whole, so that it may leave a temporary one behind."""
    return name in _WHOLE or any(pattern.fullmatch(name) for pattern in checkpoint.PATTERNS)


def remove_temporaries(folder: RunFolder) -> None:
    """Remove what an interrupted write of this run left behind; call this with the folder taken."""
    for place in (folder.path, folder.path / CHECKPOINTS):
        for entry in os.scandir(place) if place.is_dir() else ():
            name = temporary_of(entry.name)
            if name and _is_written(name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
