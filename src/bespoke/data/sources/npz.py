"""Arrays of .npz archives: their headers are looked at before anything is read, and nothing is ever unpickled."""

import math
import tokenize
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from bespoke.data.mapped import stacked, too_large
from bespoke.data.sources.archives import PIECE, Allowance, opened, reading
from bespoke.errors import UserError, shown


class Header(NamedTuple):
    """What an array's first bytes say of it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    columns_first: bool  # Fortran's order

    @property
    def rows(self) -> int:
        """Return the length of the first axis; a single number counts as one row."""
        return self.shape[0] if self.shape else 1


class Npz:
    """The arrays of an .npz archive by name: ``headers`` of all, and each array when it is asked for."""

    def __init__(self, path: Path, allowance: Allowance) -> None:
        self.path, self.allowance = path, allowance
        self.headers: dict[str, Header] = {}
        with reading(path):
            if not zipfile.is_zipfile(path) and path.is_file():
                raise ValueError("it is not a zip archive")
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    if info.filename.endswith(".npy"):
                        with reading(self._where(info.filename)), opened(archive, info) as file:
                            self.headers[info.filename.removesuffix(".npy")] = _header(file)

    def _where(self, file: str) -> str:
        return f"{shown(file, 100)} in {self.path.name}"

    def read(self, name: str) -> np.ndarray:
        """Return an array whole, memory-mapped if it is too large for memory."""
        header, pieces = self.headers[name], self.pieces(name)
        if not header.shape:
            return next(pieces).reshape(())
        with reading(self._where(f"{name}.npy")):
            return stacked(pieces, header.shape, header.dtype)

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """Return an array in order, some rows (n, ...) at a time; it is refused at once if it is too large."""
        header = self.headers[name]
        if header.dtype.hasobject:
            raise UserError(
                f"{self.path} holds a pickled object in {name!r}, and nothing is ever unpickled: "
                "save it again as plain numbers"
            )
        size = math.prod(header.shape) * max(1, header.dtype.itemsize)
        self.allowance.spend(size, self._where(f"{name}.npy"))
        return self._pieces(name)

    def _pieces(self, name: str) -> Iterator[np.ndarray]:
        header, where = self.headers[name], self._where(f"{name}.npy")
        dtype, row = header.dtype, math.prod(header.shape[1:])
        with reading(where), zipfile.ZipFile(self.path) as archive, archive.open(f"{name}.npy") as file:
            _header(file)
            if header.columns_first:
                values = _exactly(file, dtype, header.rows * row)
                yield values.reshape(header.shape, order="F")
                return
            some = max(1, PIECE // max(1, row * dtype.itemsize))
            for start in range(0, header.rows, some):
                count = min(some, header.rows - start)
                yield _exactly(file, dtype, count * row).reshape(count, *header.shape[1:])


def read_all(wanted: Sequence[tuple[Npz, str]]) -> list[np.ndarray]:
    """Return arrays of several archives; together too large for memory, they follow each other in one mapped file."""
    headers = [archive.headers[name] for archive, name in wanted]
    first, rows = headers[0], [header.rows for header in headers]
    alike = first.shape and len({(header.shape[1:], header.dtype) for header in headers}) == 1
    if not (alike and too_large(first.dtype.itemsize * math.prod(first.shape[1:]) * sum(rows))):
        return [archive.read(name) for archive, name in wanted]
    parts = (piece for archive, name in wanted for piece in archive.pieces(name))
    return np.split(stacked(parts, (sum(rows), *first.shape[1:]), first.dtype), np.cumsum(rows)[:-1])


def _header(file: IO[bytes]) -> Header:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"it is no plain array, but has the version {version}")
    parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers written by Python 2, which are parsed in another way
        try:
            shape, columns_first, dtype = parse(file)
        except (tokenize.TokenError, MemoryError):  # Python's parser has no room for deep nesting
            raise ValueError("its header is no table") from None
    if min(shape, default=0) < 0 or dtype.kind == "V":
        raise ValueError(f"it is no plain array, but {dtype} of shape {shape}")
    return Header(shape, dtype, columns_first)


def _exactly(file: IO[bytes], dtype: np.dtype, count: int) -> np.ndarray:
    """Read ``count`` values (count,), or refuse a file that ends before them."""
    content = file.read(count * dtype.itemsize)
    if len(content) < count * dtype.itemsize:
        raise EOFError("it ends before its last row")
    return np.frombuffer(content, dtype, count)
