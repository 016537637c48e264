"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from bespoke.errors import UserError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def reason_and_cure(error: OSError) -> str:
    """Return why writing failed, and what to do about it."""
    return f"{error.strerror or error}; {'make room' if error.errno in _FULL else 'fix the problem'}"


def write_error(path: Path, error: OSError) -> UserError:
    """Return the error for a file that could not be written."""
    return UserError(f"cannot write {path}: {reason_and_cure(error)}, then continue a started run with --resume")


def fsync_folder(path: Path) -> None:
    """Flush new names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file whole or not at all: a temporary file next to it, fsync, rename, fsync of the folder.

    The pieces may be generated during writing, so that a large file is never in memory as a whole.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except BaseException:
        if temporary.is_file():
            temporary.unlink()
        raise


def write_atomic(path: str | os.PathLike[str], data: bytes | str | Iterable[bytes]) -> None:
    """Write a file of a run whole or not at all, or say in one sentence why that failed."""
    pieces = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    try:
        write_whole(Path(path), pieces)
    except OSError as error:
        raise write_error(Path(path), error) from error
