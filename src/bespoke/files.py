"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from bespoke.errors import UserError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_error(path: Path, error: OSError) -> UserError:
    """The sentence for a file that the system did not let us write."""
    cure = "make room" if error.errno in _FULL else "mend that"
    reason = error.strerror or str(error)
    return UserError(f"cannot write {path}: {reason}; {cure}, then continue a started run with --resume")


def fsync_folder(path: Path) -> None:
    """Make new names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: str | os.PathLike[str], data: bytes | str | Iterable[bytes]) -> None:
    """Writes `path` whole or not at all: temporary file beside it, fsync, rename, fsync of the folder.

    `data` may come in pieces, made while they are written, so that a large file never lies in memory.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    pieces = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    try:
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
    except OSError as error:
        raise write_error(path, error) from error
