"""What `bespoke run --probe` keeps of a run for its report: features of a sample of rows, and clients' embeddings.

One `.npz` file of plain arrays, written whole or not at all and read without pickle; at most `BYTES` long.
"""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError
from bespoke.files import open_regular, write_atomic

NAME = "probe.npz"
ROWS, EACH = 2000, 20  # rows in all, and of one client
NUMBERS = 2**20  # of all rows' features, and of all embeddings
BYTES = 2**24
_VAST = (MemoryError, OverflowError)  # shapes for which there is no memory
_KINDS = {
    "rows": "U",
    "round": "iu",
    "vectors": "f",
    "classes": "iu",
    "clients": "iu",
    "embeddings": "f",
    "members": "iu",
}


@dataclass(frozen=True)
class Probe:
    """Features (N, d) of rows with classes (N,), or (0,) where there are none, and clients (N,); embeddings (K, E)."""

    rows: str  # which rows: "train"
    round: int
    vectors: NDArray[np.float32]
    classes: NDArray[np.int64]
    clients: NDArray[np.int64]
    embeddings: NDArray[np.float32]
    members: NDArray[np.int64]  # whose embeddings, (K,)


def shares(sizes: list[int], width: int) -> dict[int, int]:
    """Return how many rows to take of each client with any, by client: evenly, and within the bounds."""
    most = max(1, min(ROWS, NUMBERS // max(1, width)))
    there = [client for client, size in enumerate(sizes) if size]
    if len(there) > most:
        there = [there[i] for i in np.unique(np.linspace(0, len(there) - 1, most).round().astype(np.int64))]
    each = min(EACH, max(1, most // max(1, len(there))))
    return {client: min(each, sizes[client]) for client in there}


def write(folder: Path, probe: Probe) -> Path:
    """Write a probe into a run's folder and return its path."""
    held = io.BytesIO()
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in asdict(probe).items()}
    np.savez(held, **arrays)
    write_atomic(folder / NAME, held.getvalue())
    return folder / NAME


def read(folder: Path) -> Probe | None:
    """Return the probe of a run's folder, None if there is none; refuse a file that is no probe."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with open_regular(path) as file:
            with zipfile.ZipFile(file) as packed:
                if os.fstat(file.fileno()).st_size > BYTES or any(each.compress_type for each in packed.infolist()):
                    raise ValueError("too large, or packed")
            file.seek(0)
            with np.load(file, allow_pickle=False) as stored:
                found: dict[str, Any] = {name: stored[name] for name in _KINDS}
        if not _sound(found):
            raise ValueError("other arrays")
    except (OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile, *_VAST):
        again = "bespoke run ... --resume --probe, or bespoke.analysis.probe in Python"
        raise UserError(f"{path} is damaged: remove it, or write it again with {again}") from None
    return Probe(**found | {"rows": str(found["rows"]), "round": int(found["round"])})


def _sound(found: dict[str, Any]) -> bool:
    """Return whether all arrays are of their kind and fit each other."""
    if any(array.dtype.kind not in _KINDS[name] for name, array in found.items()):
        return False
    vectors, embeddings = found["vectors"], found["embeddings"]
    shapes = [found["rows"].shape == found["round"].shape == (), vectors.ndim == embeddings.ndim == 2]
    if not all(shapes):
        return False
    counts = len(vectors) == len(found["clients"]) and len(embeddings) == len(found["members"])
    flat = all(found[name].ndim == 1 for name in ("classes", "clients", "members"))
    places = all((found[name] >= 0).all() for name in ("clients", "members"))
    numbers = all(np.isfinite(array).all() and (array.size or not len(array)) for array in (vectors, embeddings))
    return counts and flat and places and numbers and len(found["classes"]) in (0, len(vectors))
