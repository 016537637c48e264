"""The data folder: where data sets are kept, and rows that are too many for memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bespoke.errors import UserError
from bespoke.files import reason_and_cure

VARIABLE = "BESPOKE_DATA"


def root() -> Path:
    """Return the folder of all data sets, ``$BESPOKE_DATA`` or one in the user's cache; it need not exist."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "bespoke"


def nearest() -> Path:
    """Return the data folder, or what is there of the folders above it."""
    return next(path for path in (root(), *root().absolute().parents) if path.exists())


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Report in one sentence why something could not be written to the data folder."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {what} below {root()}: {reason_and_cure(error)}, or set {VARIABLE} to another folder"
        ) from error
