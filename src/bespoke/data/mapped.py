"""Rows too many for memory: in a file without a name below the data folder, memory-mapped, gone with the process."""

import math
import mmap
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np

from bespoke.core import memory
from bespoke.data.home import nearest, root, writing

SHARE = 4  # an array of more than this part of the free memory is kept in a file
SMALL = 2**26  # bytes that are copied to memory although they come from a file
PIECE = 2**24  # bytes that are read or written at once

_WHAT = "rows that are too many for memory"


def too_large(size: float) -> bool:
    """Return whether so many bytes belong in a file."""
    return size > memory.free() / SHARE


def room() -> float:
    """Return the bytes that there is room for, in memory or in a file."""
    return max(memory.free(), shutil.disk_usage(nearest()).free)


def mapping(values: Any) -> mmap.mmap | None:
    """Return the mapped file that an array's numbers are in, as those of ``numpy.load(path, mmap_mode="r")`` are."""
    while values is not None and not isinstance(values, mmap.mmap):
        values = getattr(values, "base", None)
    return values


def spans(rows: int, size: int) -> Iterator[slice]:
    """Yield so many rows of ``size`` bytes in order, some at a time."""
    step = max(1, PIECE // max(1, size))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array (n, ...) in order, some rows at a time."""
    return (values[some] for some in spans(len(values), values[:1].nbytes))


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
    parts = (values[rows[some]] for some in spans(len(rows), values[:1].nbytes))
    return stacked(parts, (len(rows), *values.shape[1:]), values.dtype, mapping(values) is not None)


def joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Return arrays (n, ...) of one shape and type one after another.

    Memory-mapped ones stay so: as they are if they follow each other in one file, else copied to another.
    """
    first, shape = arrays[0], (sum(map(len, arrays)), *arrays[0].shape[1:])
    mapped = [mapping(each) for each in arrays]
    starts = [each.ctypes.data for each in arrays]
    ends = [start + each.nbytes for start, each in zip(starts, arrays, strict=True)]
    # Two files may be mapped one right after the other, so the addresses alone do not tell.
    if mapped[0] is not None and all(each is mapped[0] for each in mapped) and starts[1:] == ends[:-1]:
        whole = np.ndarray(shape, first.dtype, mapped[0], starts[0] - np.frombuffer(mapped[0], np.uint8).ctypes.data)
        whole.flags.writeable = False
        return whole
    large = sum(each.nbytes for each in arrays) > SMALL
    return stacked(arrays, shape, first.dtype, large and any(each is not None for each in mapped))


class Grid:
    """Columns of float64 numbers with room for so many rows, filled block by block: in memory, or in a file."""

    def __init__(self, columns: int, rows: int, mapped: bool) -> None:
        self.rows, self._file = rows, None
        if not mapped:
            self._values = np.empty((columns, rows))  # whose pages are taken when they are filled
            return
        with writing(_WHAT):
            self._file = _nameless(buffering=0)  # what is written is seen in the mapped numbers at once
            weakref.finalize(self, self._file.close)
            self._file.truncate(8 * columns * rows)
            self._values = np.memmap(self._file, np.float64, "r", shape=(columns, rows))

    def put(self, column: int, start: int, values: np.ndarray) -> None:
        """Write numbers (n,) to a column from row ``start`` on; refuse those beyond its end."""
        if start + len(values) > self.rows:
            raise ValueError(f"it has more than the {self.rows:,} rows that it should have")
        if self._file is None:
            self._values[column, start : start + len(values)] = values
            return
        left = values.astype(np.float64).view(np.uint8).data
        with writing(_WHAT):
            self._file.seek(8 * (column * self.rows + start))
            while left:  # a disk that is nearly full takes a part
                left = left[self._file.write(left) :]

    def column(self, column: int, rows: int) -> np.ndarray:
        """Return the first rows of a column: (rows,)."""
        return self._values[column, :rows]


def _nameless(buffering: int = -1) -> IO[bytes]:
    """Open a file that has no name, and so ends with its last user, however that ends."""
    root().mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryFile(buffering=buffering, dir=root())
