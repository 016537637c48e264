"""Tables in CSV and Parquet files: columns by name, and where each row stands."""

import contextlib
import csv
import os
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from bespoke.core.inputs import MISSING, Where, as_number
from bespoke.data.mapped import Grid, room
from bespoke.data.sources.archives import PIECE, reading
from bespoke.errors import UserError, reason, shown
from bespoke.registry import closest

_BLOCK = 4096  # rows that are text at a time
_BATCH = 2**16  # rows of a Parquet file at a time
_OTHERS = (";", "\t", "|")  # separators that a file may have instead
_LONGEST = csv.field_size_limit()  # characters of a cell, of which a quotation mark without its end is the usual cause


class Table(NamedTuple):
    """The columns of a file that were asked for."""

    # (n,) float64, NaN where there is no value, in a file if they are many; or words, "" where there is none
    columns: dict[str, np.ndarray]
    where: Where  # the place of a row
    path: Path

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(next(iter(self.columns.values())))


class Wanted(NamedTuple):
    """The columns to read: ``features``, or all others if there are none; those in ``text`` are read as words."""

    features: Sequence[str] = ()
    others: Sequence[str] = ()  # client and label
    text: Collection[str] = ()
    optional: Sequence[str] = ()  # read where they are there

    def of(self, header: Sequence[str], path: Path) -> list[str]:
        """Return the columns to read of a file with this header, features first."""
        others = [*self.others, *(name for name in self.optional if name in header)]
        features = self.features or [name for name in header if name not in others]
        for name in (*features, *others):
            if name not in header:
                raise UserError(
                    f"{path} has no column {name!r}{closest(name, header)}; it has {shown(list(header), 200)}"
                )
        if not features:
            raise UserError(f"{path} has no column beside {shown(others)}: give columns of features")
        return [*features, *others]


class _Columns:
    """The columns of a file, filled block by block: numbers, or words from the first block on that has one."""

    def __init__(self, names: Sequence[str], most: int, mapped: bool) -> None:
        self.names, self.rows = names, 0
        self._numbers = Grid(len(names), most, mapped)
        self._words: dict[str, list[np.ndarray]] = {}

    def add(self, block: Sequence[np.ndarray]) -> None:
        """Append some rows (n,) to each column; numbers beside words become their shortest text."""
        for i, (name, values) in enumerate(zip(self.names, block, strict=True)):
            if values.dtype == object and name not in self._words:
                self._words[name] = [_texts(self._numbers.column(i, self.rows))]
            if name in self._words:
                self._words[name].append(values if values.dtype == object else _texts(values))
            else:
                self._numbers.put(i, self.rows, values)
        self.rows += len(block[0])

    def whole(self) -> dict[str, np.ndarray]:
        """Return all columns (rows,) by name."""
        words = {name: np.concatenate(parts) for name, parts in self._words.items()}
        return {name: words.get(name, self._numbers.column(i, self.rows)) for i, name in enumerate(self.names)}


def _words(cells: Sequence[str]) -> np.ndarray:
    """Return words as an array of objects in which equal words are one object."""
    known: dict[str, str] = {}
    found = np.empty(len(cells), object)
    found[:] = [known.setdefault(cell, cell) for cell in cells]
    return found


def _texts(values: np.ndarray) -> np.ndarray:
    return _words(["" if value != value else f"{value:.15g}" for value in values.tolist()])


# --- CSV ----------------------------------------------------------------------------------------------------------


def read_csv(path: Path, wanted: Wanted, delimiter: str = ",", mapped: bool = False) -> Table:
    """Read a CSV file in UTF-8 whose first line names the columns; spaces around a cell do not count.

    A column is numbers, in a file if ``mapped``, if every cell that has a value is one; else words, and so are those in
    ``wanted.text``.
    """
    if len(delimiter) != 1 or delimiter in '"\r\n ':
        raise UserError(f"delimiter = {delimiter!r} cannot separate cells: give one character, such as ';'")
    with reading(path), path.open("rb") as raw:
        if raw.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(f"{path} is UTF-16 text: save it as UTF-8")
    try:
        with reading(path):
            file = path.open(encoding="utf-8-sig", newline="")
        with file:
            return _table(file, path, wanted, delimiter, mapped)
    except UnicodeDecodeError as error:
        line = _line_that_is_not_utf8(path)
        raise UserError(f"{path}, line {line}: it is not UTF-8 text ({error.reason}): save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a file that can be read") from None


def _line_that_is_not_utf8(path: Path) -> int:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _table(file: IO[str], path: Path, wanted: Wanted, delimiter: str, mapped: bool) -> Table:
    rows = csv.reader(file, delimiter=delimiter, strict=True, skipinitialspace=True)
    records = _records(rows, path)
    header = [name.strip() for name in next(records, [])]
    _check_header(header, path, delimiter)
    names = wanted.of(header, path)
    places = [header.index(name) for name in names]
    most = max(1, _line_ends(path))  # rows, of which the last need not have an end, but the header has
    columns, lines, some = _Columns(names, most, mapped), array("q"), []
    for record in records:
        if len(record) != len(header):
            raise UserError(
                f"{path}, line {rows.line_num}: {len(record)} cells under {len(header)} names: "
                "correct the line; a cell with a separator in it needs quotation marks"
            )
        if len(lines) == most:
            raise UserError(f"{path} grew while it was read: read it when it is complete")
        some.append(record)
        lines.append(rows.line_num)
        if len(some) == _BLOCK:
            columns.add(_block(some, names, places, wanted.text))
            some = []
    if not lines:
        raise UserError(f"{path} has no rows below its header: give it some, or leave it out")
    if some:
        columns.add(_block(some, names, places, wanted.text))
    return Table(columns.whole(), lambda row: f"line {lines[row]} of {path}", path)


def _line_ends(path: Path) -> int:
    r"""Return how often a file has \n, \r or \r\n."""
    found, last = 0, b""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            found += piece.count(b"\n") + piece.count(b"\r") - (last + piece).count(b"\r\n")
            last = piece[-1:]
    return found


def _records(rows: Any, path: Path) -> Iterator[list[str]]:
    """Yield the records that are not empty lines."""
    try:
        for record in rows:
            if record:
                yield record
    except csv.Error as error:
        if "field limit" in str(error):
            what = f"a cell of more than {_LONGEST:,} characters: shorten it, or close the quotation mark before it"
        else:
            what = f"{reason(error)}: check the quotation marks"
        raise UserError(f"{path}, line {rows.line_num}: {what}") from None


def _check_header(header: Sequence[str], path: Path, delimiter: str) -> None:
    if not header:
        raise UserError(f"{path} is empty: give a file whose first line names the columns")
    other = next((mark for mark in _OTHERS if len(header) == 1 and mark != delimiter and mark in header[0]), None)
    if other:
        raise UserError(
            f"{path} has one column, {shown(header[0])}: its cells are separated by {other!r}, so set delimiter"
        )
    if "" in header:
        raise UserError(f"{path} has no name for column {header.index('') + 1}: name every column in the first line")
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise UserError(f"{path} has two columns {twice!r}: rename one")


def _block(
    rows: Sequence[list[str]], names: Sequence[str], places: Sequence[int], text: Collection[str]
) -> list[np.ndarray]:
    """Return some rows' cells of each column (n,), as numbers where all cells are."""
    found = []
    for name, place in zip(names, places, strict=True):
        cells = [row[place] for row in rows]
        values = None if name in text else _numbers(cells)
        found.append(_words([cell.strip() for cell in cells]) if values is None else values)
    return found


def _numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Return cells as float64, NaN where there is no value, or None if one is a word."""
    together = "".join(cells)
    if together.isascii() and "_" not in together:  # what as_number asks of each
        with contextlib.suppress(ValueError):
            return np.array([float(cell) for cell in cells], np.float64)
    found = [float("nan") if cell.strip() in MISSING else as_number(cell) for cell in cells]
    return None if None in found else np.array(found, np.float64)


# --- Parquet and Arrow --------------------------------------------------------------------------------------------


def read_parquet(path: Path, wanted: Wanted, mapped: bool = False) -> Table:
    """Read the columns of a Parquet file that are asked for; numbers are kept in a file if ``mapped``."""
    import pyarrow
    import pyarrow.parquet

    with reading(path), path.open("rb") as file:
        opened = pyarrow.parquet.ParquetFile(file)
        header = opened.schema_arrow.names
        if len(set(header)) < len(header):
            raise ValueError("it has two columns of one name")
        names, rows = wanted.of(header, path), opened.metadata.num_rows
        if 8 * rows * len(names) > room():
            raise UserError(
                f"there is no room for {rows:,} rows of {path}: name fewer columns in features, or make room"
            )
        batches = (pyarrow.Table.from_batches([batch]) for batch in opened.iter_batches(_BATCH, columns=names))
        return _of_batches(batches, names, rows, wanted, path, mapped)


def cells_of_parquet(path: Path, columns: Sequence[str]) -> int:
    """Return how many cells a Parquet file has in these columns, or in all if there are none."""
    import pyarrow.parquet

    with reading(path), path.open("rb") as file:
        found = pyarrow.parquet.ParquetFile(file).metadata
        return int(found.num_rows * (len(columns) or found.num_columns))


def of_arrow(table: Any, wanted: Wanted, path: Path) -> Table:
    """Return the columns of an Arrow table that are asked for; ``path`` is its name in sentences."""
    return _of_batches([table], wanted.of(table.column_names, path), table.num_rows, wanted, path, mapped=False)


def _of_batches(
    batches: Iterable[Any], names: Sequence[str], rows: int, wanted: Wanted, path: Path, mapped: bool
) -> Table:
    """Return the columns of Arrow tables one below the other, which have so many rows."""
    if not rows:
        raise UserError(f"{path} has no rows: give it some, or leave it out")
    columns = _Columns(names, rows, mapped)
    for batch in batches:
        columns.add([_of_arrow(batch[name], name, name in wanted.text, path) for name in names])
    return Table(columns.whole(), lambda row: f"row {row} of {path}", path)


def _of_arrow(column: Any, name: str, text: bool, path: Path) -> np.ndarray:
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if (
        types.is_string(kind)
        or types.is_large_string(kind)
        or (text and (types.is_integer(kind) or types.is_boolean(kind)))
    ):
        return _words(["" if value is None else str(value).strip() for value in column.to_pylist()])
    numeric = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    if not numeric:
        raise UserError(f"column {name!r} of {path} holds {kind} values: leave it out with features, or convert it")
    found = column.cast(kind).cast("float64", safe=False).to_numpy()
    return _texts(found) if text else found


# --- files --------------------------------------------------------------------------------------------------------


def size_of(paths: Sequence[Path]) -> int:
    """Return the bytes of files that are there."""
    return sum(os.path.getsize(path) for path in paths if path.is_file())
