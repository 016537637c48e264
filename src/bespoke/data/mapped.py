"""Rows too many for memory: in a file without a name below the data folder, memory-mapped, gone with the process."""

import math
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np

from bespoke.core import memory
from bespoke.data.home import root, writing

SHARE = 4  # an array of more than this part of the free memory is kept in a file
SMALL = 2**26  # bytes that are copied to memory although they come from a file
PIECE = 2**24  # bytes that are read or written at once

_WHAT = "rows that are too many for memory"


def too_large(size: float) -> bool:
    """Return whether so many bytes belong in a file."""
    return size > memory.free() / SHARE


def room() -> float:
    """Return the bytes that there is room for, in memory or in a file."""
    there = next(folder for folder in (root(), *root().absolute().parents) if folder.is_dir())
    return max(memory.free(), shutil.disk_usage(there).free)


def is_mapped(values: Any) -> bool:
    """Return whether an array's numbers are in a file, as those of ``numpy.load(path, mmap_mode="r")`` are."""
    while values is not None and not isinstance(values, mmap.mmap):
        values = getattr(values, "base", None)
    return values is not None


def pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array (n, ...) in order, some rows at a time."""
    step = max(1, PIECE // max(1, values[:1].nbytes))
    yield from (values[i : i + step] for i in range(0, len(values), step))


def stacked(parts: Iterable[np.ndarray], shape: tuple[int, ...], dtype: Any, mapped: bool = False) -> np.ndarray:
    """Return parts (n, ...) one after another as an array of that shape and type.

    It is in memory, or memory-mapped and read-only if it is to be ``mapped`` or too large.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if not size or not (mapped or too_large(size)):
        out, start = np.empty(shape, dtype), 0
        for part in parts:
            out[start : start + len(part)] = part
            start += len(part)
        return out
    with writing(_WHAT), _nameless() as file:
        for part in parts:
            for piece in pieces(part):
                file.write(np.ascontiguousarray(piece, dtype).data)
        file.flush()
        return np.memmap(file, dtype, "r", shape=shape)


def taken(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the rows (n,) of an array (N, ...), memory-mapped if the array is: (n, ...)."""
    step = max(1, PIECE // max(1, values[:1].nbytes))
    parts = (values[rows[i : i + step]] for i in range(0, len(rows), step))
    return stacked(parts, (len(rows), *values.shape[1:]), values.dtype, is_mapped(values))


def joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Return arrays (n, ...) of one shape and type one after another.

    Memory-mapped ones stay so: as they are if they follow each other in one file, else copied to another.
    """
    first, rows = arrays[0], sum(map(len, arrays))
    shape, mapped = (rows, *first.shape[1:]), [is_mapped(each) for each in arrays]
    ends = [each.ctypes.data + each.nbytes for each in arrays]
    if all(mapped) and all(each.ctypes.data == end for each, end in zip(arrays[1:], ends[:-1], strict=True)):
        return np.lib.stride_tricks.as_strided(first, shape, writeable=False)
    return stacked(arrays, shape, first.dtype, any(mapped) and sum(each.nbytes for each in arrays) > SMALL)


class Grid:
    """Columns of float64 numbers with room for so many rows, filled block by block: in memory, or in a file."""

    def __init__(self, columns: int, rows: int, mapped: bool) -> None:
        self.rows, self._descriptor = rows, -1
        if not mapped:
            self._values = np.empty((columns, rows))  # whose pages are taken when they are filled
            return
        with writing(_WHAT), _nameless() as file:
            file.truncate(8 * columns * rows)
            self._values = np.memmap(file, np.float64, "r", shape=(columns, rows))
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def put(self, column: int, start: int, values: np.ndarray) -> None:
        """Write numbers (n,) to a column from row ``start`` on."""
        if self._descriptor < 0:
            self._values[column, start : start + len(values)] = values
            return
        with writing(_WHAT):
            os.pwrite(self._descriptor, values.astype(np.float64).data, 8 * (column * self.rows + start))

    def column(self, column: int, rows: int) -> np.ndarray:
        """Return the first rows of a column: (rows,)."""
        return self._values[column, :rows]


def _nameless() -> IO[bytes]:
    """Open a file that has no name, and so ends with its last user, however that ends."""
    root().mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=root())
