"""Your own data: tables and folders of pictures, as clients by name with a contract of their inputs."""

import glob
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.core.inputs import MISSING, Column, InputContract, as_number, missing, ordered
from bespoke.data.mapped import pieces, room, spans, stacked, taken, too_large
from bespoke.data.sources import folders
from bespoke.data.sources.archives import Allowance, plausible, reading
from bespoke.data.sources.npz import Npz
from bespoke.data.sources.tables import Table, Wanted, cells_of_parquet, of_arrow, read_csv, read_parquet, size_of
from bespoke.errors import UserError, shown
from bespoke.registry import closest

_DECIMAL_COMMA = re.compile(r"\s*[-+]?\d+,\d+\s*")
MOST_CATEGORIES = 1000  # of a column; more are names or numbers of cases
_EXACT = 2**24  # whole numbers up to this are float32 numbers

Arrays = tuple[np.ndarray, np.ndarray]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, repr=False, eq=False)
class OwnClients(Mapping[str, Arrays]):
    """Your own clients by name, in order: each ``(x, y)``, as ``bespoke.federate`` takes them, and their contract."""

    arrays: dict[str, Arrays]  # x (n, ...) and y (n,)
    contract: InputContract
    notes: tuple[str, ...] = ()  # what a run's record says of the reading

    def __getitem__(self, name: str) -> Arrays:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __repr__(self) -> str:
        rows, contract = sum(len(y) for _, y in self.arrays.values()), self.contract
        targets = f"classes {shown(list(contract.classes))}" if contract.classes else "numbers as targets"
        return f"{len(self)} clients {shown(list(self))}, {rows:,} rows of shape {contract.shape}, {targets}"


def matched(paths: Paths, what: str) -> list[Path]:
    """Return the files that patterns such as ``clients/*.csv`` match, sorted; ``what`` they should be."""
    patterns = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not patterns or not all(isinstance(p, str | os.PathLike) and os.fspath(p) for p in patterns):
        raise UserError(f'path is empty: give the pattern of {what}, such as "clients/*"')
    found: set[str] = set()
    for pattern in (str(os.fspath(each)) for each in patterns):
        there = [pattern] if os.path.isfile(pattern) else glob.glob(os.path.expanduser(pattern), recursive=True)
        if not there:
            raise UserError(
                f"no file matches path = {pattern!r} beside the experiment's file or below {os.getcwd()}: "
                "correct the pattern"
            )
        found.update(there)
    return [Path(each) for each in sorted(found)]


def named_by_file(paths: Sequence[Path]) -> list[str]:
    """Return the clients' names, those of their files; refuse two files of one name."""
    names = [path.stem for path in paths]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"several files are named {min(twice)!r}, which names the client: rename all but one")
    return names


# --- tables -------------------------------------------------------------------------------------------------------


def from_csv(
    paths: Paths,
    *,
    label: str,
    client: str | None = None,
    features: Sequence[str] = (),
    categorical: Sequence[str] = (),
    delimiter: str = ",",
) -> OwnClients:
    """Read clients from CSV files in UTF-8 with a header: one client per file, or by the column ``client``.

    ``paths`` is a pattern or a list of them, ``label`` the column of the classes or targets. ``features`` are the other
    columns to use, all if left out, in their order in the first file: numbers as float32, and words as one feature for
    each category. ``categorical`` columns are categories although they look like numbers.
    """
    found = matched(paths, "the clients' CSV files")
    mapped = too_large(size_of(found))  # a number takes 8 bytes, and mostly as many characters
    return _clients(
        found, lambda path, wanted: read_csv(path, wanted, delimiter, mapped), client, label, features, categorical
    )


def from_parquet(
    paths: Paths,
    *,
    label: str,
    client: str | None = None,
    features: Sequence[str] = (),
    categorical: Sequence[str] = (),
) -> OwnClients:
    """Read clients from Parquet files; the arguments are those of :func:`from_csv`."""
    found = matched(paths, "the clients' Parquet files")
    mapped = too_large(sum(8 * cells_of_parquet(path, _names(features)) for path in found))
    return _clients(
        found, lambda path, wanted: read_parquet(path, wanted, mapped), client, label, features, categorical
    )


def from_hf(
    dataset: Any,
    *,
    client: str,
    label: str,
    features: Sequence[str] = (),
    categorical: Sequence[str] = (),
    size: int = 0,
) -> OwnClients:
    """Take clients from a Hugging Face ``datasets.Dataset`` by the column ``client``.

    A table is read as by :func:`from_csv`; where one of ``features``, or the only other column, holds images, they are
    read as by :func:`from_image_folder`. A column of the type ClassLabel keeps its classes' names.
    """
    if not all(hasattr(dataset, name) for name in ("with_format", "features", "column_names")):
        raise UserError(f"from_hf(...) takes one split of a datasets.Dataset, not {shown(dataset)}: load that")
    if not client:
        raise UserError("client is empty: name the column of each row's client")
    table, where = dataset.with_format("arrow")[:], Path("the data set")
    for name in table.column_names:
        spelled = getattr(dataset.features[name], "names", None)
        if isinstance(spelled, list):
            table = _spelled(table, name, spelled)
    used = _names(features) or [name for name in table.column_names if name not in (client, label)]
    images = [name for name in used if type(dataset.features.get(name)).__name__ == "Image"]
    if not images:
        return _clients([where], lambda path, wanted: of_arrow(table, wanted, path), client, label, used, categorical)
    if len(used) > 1 or categorical:
        raise UserError(
            f"column {images[0]!r} holds images, which cannot be mixed with others: name it in features alone"
        )
    found = of_arrow(table, Wanted((client,), (label,), {client, label}), where)
    pictures = [folders.Picture(f"row {row} of the data set", cell) for row, cell in enumerate(_bytes(table[used[0]]))]
    return _of_pictures(list(zip(_present(found, client), _present(found, label), pictures, strict=True)), size, label)


def _spelled(table: Any, name: str, words: list[str]) -> Any:
    """Return an Arrow table with the words of a column's class numbers in place of these."""
    import pyarrow

    found = [words[i] if i is not None and 0 <= i < len(words) else None for i in table[name].to_pylist()]
    return table.set_column(table.column_names.index(name), name, pyarrow.array(found, pyarrow.string()))


def _bytes(column: Any) -> Iterator[bytes | Path]:
    """Yield the file of each picture of an image column, or where it is."""
    for cell in column.to_pylist():
        yield b"" if cell is None else cell["bytes"] if cell["bytes"] is not None else Path(cell["path"])


def _names(given: Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _clients(
    paths: Sequence[Path],
    read: Callable[[Path, Wanted], Table],
    client: str | None,
    label: str,
    features: Sequence[str],
    categorical: Sequence[str],
) -> OwnClients:
    features, categorical, client = _names(features), _names(categorical), client or ""
    if not label:
        raise UserError("label is empty: name the column of the classes or targets")
    if label == client:
        raise UserError(f"column {label!r} cannot be both label and client: name two columns")
    for role, name in (("label", label), ("client", client)):
        if name in (*features, *categorical):
            raise UserError(f"column {name!r} is the {role}: take it out of features and categorical")
    others = (label, client) if client else (label,)
    files = named_by_file(paths) if not client else []
    tables = [read(path, Wanted(features, others, {*others, *categorical})) for path in paths]
    names = [name for name in tables[0].columns if name not in others]
    _check_columns(tables, names, categorical)
    classes = _classes(tables, label)
    columns = tuple(_column(tables, name, name in categorical) for name in names)
    width, sizes = sum(len(column.features) for column in columns), [table.rows for table in tables]
    contract = InputContract((width,), "float32", columns, classes, label)
    x = stacked(_encoded(tables, contract), (sum(sizes), width), np.float32)
    y = np.concatenate([contract.encode_labels(table.columns[label], table.where) for table in tables])
    if client:
        owner = np.concatenate([_present(table, client) for table in tables]).tolist()
        place = {name: i for i, name in enumerate(ordered(owner))}
        number = np.array([place[name] for name in owner])
        order, files, sizes = np.argsort(number, kind="stable"), list(place), np.bincount(number).tolist()
        x, y = (x, y) if (np.diff(order) == 1).all() else (taken(x, order), y[order])
    ends = np.cumsum(sizes)[:-1]
    parts = zip(np.split(x, ends), np.split(y, ends), strict=True)
    return OwnClients(dict(zip(files, parts, strict=True)), contract, _notes(tables, columns))


def _encoded(tables: Sequence[Table], contract: InputContract) -> Iterator[np.ndarray]:
    """Yield the features (n, F) of all tables in order, some rows at a time."""
    for table in tables:
        for some in spans(table.rows, 8 * contract.shape[0]):
            rows = {name: values[some] for name, values in table.columns.items()}
            yield contract.encode(rows, partial(_place, table, some.start))


def _place(table: Table, first: int, row: int) -> str:
    return table.where(first + row)


def _check_columns(tables: Sequence[Table], names: Sequence[str], categorical: Sequence[str]) -> None:
    """Refuse files whose columns differ, and categorical columns that are not there."""
    for table in tables[1:]:
        for lacks, has in ((table, tables[0]), (tables[0], table)):
            if other := sorted(has.columns.keys() - lacks.columns.keys()):
                raise UserError(
                    f"{lacks.path} has no column {other[0]!r}, which {has.path} has: name the columns to use in "
                    "features"
                )
    for name in categorical:
        if name not in names:
            raise UserError(
                f"categorical names {name!r}{closest(name, names)}, and the features are {shown(list(names))}"
            )


def _present(table: Table, name: str) -> np.ndarray:
    """Return a column of words, all of which have a value."""
    words = table.columns[name]
    absent = next((row for row, word in enumerate(words) if word in MISSING), None)
    if absent is not None:
        raise UserError(missing(name, table.where(absent)))
    return words


def _classes(tables: Sequence[Table], label: str) -> tuple[str, ...]:
    """Return the classes' names in order, none where the labels are numbers that are not whole."""
    words = ordered([word for table in tables for word in _present(table, label)])
    values = [as_number(word) for word in words]
    if any(value is None for value in values):
        return tuple(words)
    if all(value is not None and math.isfinite(value) and value == int(value) for value in values):
        return tuple(dict.fromkeys(str(int(value)) for value in values if value is not None))
    return ()


def _column(tables: Sequence[Table], name: str, declared: bool) -> Column:
    """Decide from all files whether a column holds numbers or categories; refuse a mixture."""
    if not declared and all(table.columns[name].dtype != object for table in tables):
        return Column(name)
    words = {word for table in tables if table.columns[name].dtype == object for word in table.columns[name].tolist()}
    words -= {""} if declared else MISSING
    if not declared:
        place = {kind: _first(tables, name, kind) for kind in ("number", "word")}
        if place["number"] and place["word"]:
            raise UserError(
                f"column {name!r} holds the number {place['number']} and the word {place['word']}: correct it, or name "
                "it in categorical"
            )
        if words and all(map(_DECIMAL_COMMA.fullmatch, words)):
            raise UserError(
                f"column {name!r} holds {shown(min(words))}, a number with a comma: write it with a point, or name the "
                "column in categorical"
            )
    if len(words) > MOST_CATEGORIES:
        raise UserError(
            f"column {name!r} holds {len(words):,} different words, more than {MOST_CATEGORIES:,}: leave it out with "
            "features"
        )
    return Column(name, tuple(ordered(list(words))))


def _first(tables: Sequence[Table], name: str, kind: str) -> str:
    """Return the first number or word of a column and its place, or an empty text."""
    for table in tables:
        for row, value in enumerate(table.columns[name].tolist()):
            number = as_number(value) if isinstance(value, str) else value
            absent = value in MISSING if isinstance(value, str) else value != value
            if not absent and (number is not None) == (kind == "number"):
                text = shown(value) if isinstance(value, str) else f"{value:g}"
                return f"{text} ({table.where(row)})"
    return ""


def _notes(tables: Sequence[Table], columns: Sequence[Column]) -> tuple[str, ...]:
    """Say which whole numbers become floats, and which of them lose digits."""
    whole, large = [], []
    for column in columns:
        if column.categories:
            continue
        parts = [piece for table in tables for piece in pieces(table.columns[column.name])]
        if all((part == np.floor(part)).all() for part in parts):
            whole.append(column.name)
            large += [column.name] if any((np.abs(part) > _EXACT).any() for part in parts) else []
    told = [f"whole numbers are read as float32 in the columns {', '.join(whole)}"] if whole else []
    if large:
        told.append(
            f"float32 rounds whole numbers beyond {_EXACT:,}, which the columns {', '.join(large)} have: leave out "
            "columns that number cases"
        )
    return tuple(told)


# --- pictures -----------------------------------------------------------------------------------------------------


def from_image_folder(root: str | os.PathLike[str], *, size: int = 0) -> OwnClients:
    """Read clients from pictures ``root/client/class/*.png`` (or .jpg) as uint8 (n, 1 or 3, H, W).

    Clients, classes and a class's pictures are in the order of their names. All pictures have one size, or are resized
    to ``size`` x ``size``. If all are grey there is one channel, else three.
    """
    if not os.fspath(root):
        raise UserError("path is empty: give the folder that holds root/client/class/*.png")
    if not isinstance(size, int) or not 0 <= size <= folders.LARGEST_SIDE:
        raise UserError(
            f"size={shown(size)} is no side of a picture: give whole pixels from 0 to {folders.LARGEST_SIDE:,}"
        )
    return _of_pictures(folders.find(Path(os.path.expanduser(root))), size)


def _of_pictures(found: Sequence[folders.Found], size: int, label: str = "") -> OwnClients:
    """Decode pictures (client, class, picture), which are in order within their class."""
    shape = folders.common_shape([picture for _, _, picture in found], size)
    clients, classes = ordered([client for client, _, _ in found]), tuple(ordered([word for _, word, _ in found]))
    number = {word: i for i, word in enumerate(classes)}
    own: dict[str, list[tuple[int, folders.Picture]]] = {client: [] for client in clients}
    for client, word, picture in found:
        own[client].append((number[word], picture))
    for rows in own.values():
        rows.sort(key=lambda row: row[0])
    pixels = (folders.decode(picture, shape, resize=size > 0)[None] for rows in own.values() for _, picture in rows)
    x = stacked(pixels, (len(found), *shape), np.uint8)
    ends = np.cumsum([len(rows) for rows in own.values()])[:-1]
    ys = [np.array([label for label, _ in rows], np.int64) for rows in own.values()]
    arrays = dict(zip(own, zip(np.split(x, ends), ys, strict=True), strict=True))
    return OwnClients(arrays, InputContract(shape, "uint8", classes=classes, label=label, resized=size > 0))


# --- new rows -----------------------------------------------------------------------------------------------------


def read_rows(
    path: str | os.PathLike[str], contract: InputContract, *, delimiter: str = ","
) -> tuple[np.ndarray, np.ndarray | None]:
    """Read new rows in a contract's form: x (n, ...), and y (n,), or None where there are no labels.

    ``path`` is a .csv, .parquet or .npz file, or a folder of pictures: ``class/*.png``, or ``*.png`` without labels.
    """
    path = Path(os.path.expanduser(path))
    if path.is_dir():
        return _read_pictures(path, contract)
    if path.suffix == ".npz":
        archive = _archive(path)
        if "x" not in archive.headers:
            raise UserError(f"{path} has no array 'x': save it with numpy.savez(path, x=...)")
        y = archive.read("y") if "y" in archive.headers else None
        return contract.encode(archive.read("x")), y
    readers = {".csv": lambda wanted: read_csv(path, wanted, delimiter), ".parquet": lambda w: read_parquet(path, w)}
    if path.suffix not in readers:
        raise UserError(f"{path} is no .csv, .parquet or .npz file and no folder of pictures: give one of these")
    if not contract.columns:
        raise UserError(f"{path} is a table, and the model's inputs have no columns: give an .npz archive or pictures")
    words = {column.name for column in contract.columns if column.categories}
    label = [contract.label] if contract.label else []
    table = readers[path.suffix](Wanted([column.name for column in contract.columns], (), {*words, *label}, label))
    y = contract.encode_labels(table.columns[label[0]], table.where) if {*label} & {*table.columns} else None
    return contract.encode(table.columns, table.where), y


def picture_names(root: str | os.PathLike[str]) -> list[str]:
    """Return the path within its folder of each picture that :func:`read_rows` reads, in the same order."""
    root = Path(os.path.expanduser(root))
    paths = (Path(picture.where).relative_to(root).as_posix() for _, picture in folders.of_one_client(root))
    return [os.fsencode(path).decode(errors="backslashreplace") for path in paths]


def read_test_rows(path: str | os.PathLike[str], contract: InputContract) -> tuple[np.ndarray, np.ndarray] | None:
    """Read the test rows ``x_test`` (m, ...) and ``y_test`` (m,) of an .npz file, None where it is none or has none."""
    path = Path(os.path.expanduser(path))
    archive = _archive(path) if path.suffix == ".npz" else None
    found = {name: archive.read(name) for name in ("x_test", "y_test") if name in archive.headers} if archive else {}
    if len(found) == 1:
        raise UserError(f"{path} has only one of x_test and y_test: give both or neither")
    return (contract.encode(found["x_test"]), found["y_test"]) if found else None


def _archive(path: Path) -> Npz:
    return Npz(path, Allowance(min(room(), plausible([path]))))


def _read_pictures(root: Path, contract: InputContract) -> tuple[np.ndarray, np.ndarray | None]:
    if len(contract.shape) != 3 or contract.dtype != "uint8":
        raise UserError(f"{root} is a folder, and the model's inputs are no pictures: give a file")
    found = folders.of_one_client(root)
    x = np.empty((len(found), *contract.shape), np.uint8)
    for i, (_, picture) in enumerate(found):
        x[i] = folders.decode(picture, contract.shape, contract.resized)
    labels = [label for label, _ in found]
    return x, contract.encode_labels(labels, lambda row: found[row][1].where) if any(labels) else None


# --- data sets of [data] ------------------------------------------------------------------------------------------


def csv(
    path: str, client: str, label: str, features: tuple[str, ...], categorical: tuple[str, ...], delimiter: str
) -> OwnClients:
    """Your own: CSV tables at path, a client per file or by a column (client, label, features)."""
    return from_csv(path, client=client, label=label, features=features, categorical=categorical, delimiter=delimiter)


def parquet(path: str, client: str, label: str, features: tuple[str, ...], categorical: tuple[str, ...]) -> OwnClients:
    """Your own: Parquet tables at path, a client per file or by a column (client, label, features)."""
    return from_parquet(path, client=client, label=label, features=features, categorical=categorical)


def image_folder(path: str, size: int) -> OwnClients:
    """Your own: pictures path/client/class/*.png, of one size or resized (size)."""
    return from_image_folder(path, size=size)


def hf(
    path: str, client: str, label: str, features: tuple[str, ...], categorical: tuple[str, ...], size: int
) -> OwnClients:
    """Your own: a Hugging Face data set stored at path by save_to_disk (client, label, features, size)."""
    path = os.path.expanduser(path)
    if not os.path.isdir(path):  # which an address, from which datasets would download, is not
        raise UserError(f"there is no folder {path!r}: give the one that save_to_disk wrote")
    try:
        import datasets
    except ImportError:
        raise UserError('[data] name = "hf" needs the package datasets: pip install "bespoke-fl[hf]"') from None
    with reading(path):
        found = datasets.load_from_disk(path)
    if not isinstance(found, datasets.Dataset):
        raise UserError(f"{path} holds several splits, {shown(list(found))}: give the folder of one of them")
    return from_hf(found, client=client, label=label, features=features, categorical=categorical, size=size)
