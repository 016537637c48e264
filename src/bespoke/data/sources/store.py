"""The data folder: one subfolder per data set, with memory-mapped .npy arrays and a manifest.

A set is written to a temporary folder beside it and renamed as a whole, so it is there completely or not at all.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.data.examples import Examples
from bespoke.data.home import root, writing
from bespoke.data.sources.content import Hashes
from bespoke.errors import UserError
from bespoke.files import fsync_folder, write_whole

MANIFEST = "manifest.json"
FORMAT = 1

_ARRAYS = {"x": "x", "y": "y", "test": "official_test", "owner": "owner", "domain": "domain"}  # file to field
_NAMES = ("owner_names", "domain_names", "words")
_CHUNK = 2**24  # bytes

Manifest = dict[str, Any]


def folder(name: str) -> Path:
    """Return the folder of one data set."""
    return root() / name


def holds(name: str) -> bool:
    """Return whether a data set is stored here."""
    return (folder(name) / MANIFEST).is_file()


@contextmanager
def locked(name: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the data set's lock, so that only one process writes it; ``waiting`` is called before a wait."""
    import fcntl

    with writing(f"the lock of {name}"):
        root().mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root() / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which releases the lock


def write(name: str, examples: Examples, found: Hashes, source: str, verified: bool, official_order: bool) -> Manifest:
    """Write a data set completely or not at all; call this with its lock held."""
    temporary = root() / f".{name}.tmp"
    with writing(f"the data set {name}"):
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
        try:
            temporary.mkdir(parents=True)
            arrays: dict[str, Any] = {}
            for file, field in _ARRAYS.items():
                array = getattr(examples, field)
                if array is not None:
                    path = temporary / f"{file}.npy"
                    write_whole(path, npy(np.asarray(array)))
                    size = path.stat().st_size
                    arrays[file] = {"shape": list(array.shape), "dtype": array.dtype.str, "bytes": size}
            manifest = {
                "format": FORMAT,
                "name": name,
                "content_hash": found.content,
                "order_hash": found.order,
                "verified": verified,
                "official_order": official_order,
                "source": source,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "rows": len(examples.y),
                "classes": examples.num_classes,
                "bytes": sum(array["bytes"] for array in arrays.values()),
                "arrays": arrays,
                **{key: list(getattr(examples, key)) for key in _NAMES},
            }
            write_whole(temporary / MANIFEST, [(json.dumps(manifest, indent=1) + "\n").encode()])
            os.rename(temporary, folder(name))
            fsync_folder(root())
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return manifest


def manifest(name: str) -> Manifest:
    """Return the manifest of a stored data set."""
    path = folder(name) / MANIFEST
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT or found["name"] != name or not {"x", "y"} <= found["arrays"].keys():
            raise ValueError("it belongs to another version or set")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(name, f"its {MANIFEST} cannot be read: {error}") from None


def load(name: str) -> Examples:
    """Return a stored data set, its arrays memory-mapped: x (N, ...), y (N,) int64; nothing is hashed again.

    The maps are private: writing to an array leaves the file as it is.
    """
    known = manifest(name)
    fields: dict[str, Any] = {key: tuple(known[key]) for key in _NAMES}
    for file, expected in known["arrays"].items():
        path = folder(name) / f"{file}.npy"
        try:
            if path.stat().st_size != expected["bytes"]:
                raise ValueError(f"it has {path.stat().st_size} bytes instead of {expected['bytes']}")
            array = np.load(path, mmap_mode="c", allow_pickle=False)
            if list(array.shape) != expected["shape"] or array.dtype.str != expected["dtype"]:
                raise ValueError(f"it is {array.dtype} of shape {array.shape}")
        except (OSError, ValueError, EOFError) as error:
            raise _damaged(name, f"{path.name}: {error}") from None
        fields[_ARRAYS[file]] = array
    return Examples(num_classes=known["classes"], **fields)


def _damaged(name: str, reason: str) -> UserError:
    return UserError(f"the data set in {folder(name)} is damaged ({reason}): remove that folder and import it again")


def npy(array: np.ndarray) -> Iterator[bytes]:
    """Yield an array's ``.npy`` file in pieces, row by row, for any memory layout."""
    header: dict[str, Any] = np.lib.format.header_data_from_array_1_0(np.ascontiguousarray(array[:1]))
    start = BytesIO()
    np.lib.format.write_array_header_1_0(start, header | {"shape": array.shape})
    yield start.getvalue()
    rows = max(1, _CHUNK // max(1, array[:1].nbytes))
    yield from (array[i : i + rows].tobytes() for i in range(0, len(array), rows))
