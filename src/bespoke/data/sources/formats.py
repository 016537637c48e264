"""Readers of array formats: .npz, idx, CIFAR's binary edition, MATLAB files, libsvm text.

A reader takes the files of a data set, archives or not, and returns all rows: official train rows, then official test
rows, each in the file's order, images as uint8 (N, C, H, W). Nothing is ever unpickled.
"""

import io
import re
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bespoke.data.examples import Examples, as_labels
from bespoke.data.sources.archives import members, reading
from bespoke.data.sources.content import channels_first, split
from bespoke.data.sources.entry import Entry, Reader
from bespoke.errors import UserError

OWNERS, DOMAINS = ("owner", "writer", "speaker"), ("domain", "room")
_IDX_TYPES = {0x08: ">u1", 0x0C: ">i4"}

Arrays = dict[str, np.ndarray]


def names_of(paths: Sequence[Path]) -> str:
    """Return the files' names for a sentence."""
    return ", ".join(path.name for path in paths)


# --- .npz ---------------------------------------------------------------------------------------------------------


def read_npz(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read ready arrays: x_train, y_train, x_test, y_test; or x, y, which may continue over several files.

    Owners are named ``owner``, ``writer`` or ``speaker``, domains ``domain`` or ``room``, with the ending of their
    rows (``writer_train``) and, if they are indices, an array of the names (``room_names``).
    """
    arrays: Arrays = {}
    for path in paths:
        for name, array in _plain_arrays(path).items():
            joined = name in ("x", "y") and name in arrays
            arrays[name] = np.concatenate([arrays[name], array]) if joined else array
    where = names_of(paths)
    halves = "x_train" in arrays
    ends = ("_train", "_test") if halves else ("",)
    for name in [kind + end for kind in "xy" for end in ends]:
        if name not in arrays:
            raise UserError(f"{where} has no array {name!r}: give x_train, y_train, x_test and y_test, or x and y")
    xs = [channels_first(_typed(arrays["x" + end], entry, where), entry.shapes, where) for end in ends]
    ys = [as_labels(arrays["y" + end], where) for end in ends]
    for x, y, end in zip(xs, ys, ends, strict=True):
        if len(x) != len(y):
            raise UserError(f"{where} has {len(x)} rows in x{end} and {len(y)} in y{end}: give equally many")
    if halves:
        examples = split(xs[0], ys[0], xs[1], ys[1], entry.classes)
    else:
        examples = Examples(xs[0], ys[0], entry.classes, official_test=_second_part(len(ys[0]), entry))
    owner, owner_names = _marks(arrays, OWNERS, ends, len(examples.y), where)
    domain, domain_names = _marks(arrays, DOMAINS, ends, len(examples.y), where)
    return replace(examples, owner=owner, owner_names=owner_names, domain=domain, domain_names=domain_names)


def _plain_arrays(path: Path) -> Arrays:
    with reading(path):
        if not zipfile.is_zipfile(path) and path.is_file():
            raise ValueError("it is not a zip archive")
        with np.load(path, allow_pickle=False) as archive:
            found = {}
            for name in archive.files:
                try:
                    found[name] = archive[name]
                except ValueError as error:
                    if "allow_pickle" not in str(error):
                        raise
                    raise UserError(
                        f"{path} holds a pickled object in {name!r}, and nothing is ever unpickled: "
                        "save it again as plain numbers"
                    ) from None
    return found


def _typed(x: np.ndarray, entry: Entry, where: str) -> np.ndarray:
    if x.dtype == entry.dtype or (entry.dtype != "uint8" and x.dtype.kind in "iu"):
        return x.astype(entry.dtype, copy=False)
    raise UserError(f"x of {where} holds {x.dtype} values, but {entry.name} is stored as {entry.dtype}: convert it")


def _second_part(rows: int, entry: Entry) -> np.ndarray | None:
    """Return the test marks (N,) of rows in arrays without an ending: the rows after an edition's train rows."""
    for train, test in entry.sizes:
        if test and rows == train + test:
            return np.arange(rows) >= train
    return None


def _marks(
    arrays: Arrays, keys: Sequence[str], ends: Sequence[str], rows: int, where: str
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    for key in keys:
        if all(key + end in arrays for end in ends):
            values = np.concatenate([arrays[key + end] for end in ends])
            if values.shape != (rows,):
                raise UserError(f"{where} has {values.shape} values in {key}, but {rows} rows: give one value per row")
            names = arrays.get(f"{key}_names")
            if names is not None and values.dtype.kind in "iu" and len(names) > values.max(initial=0):
                return values.astype(np.int64), tuple(str(name) for name in names)
            found, index = np.unique(values, return_inverse=True)
            return index.astype(np.int64), tuple(str(value) for value in found)
    return None, ()


# --- idx ----------------------------------------------------------------------------------------------------------


def idx_array(content: bytes, name: str) -> np.ndarray:
    """Parse an idx file: two zero bytes, type, number of dimensions, big-endian sizes, values."""
    with reading(name):
        if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
            raise ValueError("it does not start like an idx file")
        start = 4 + 4 * content[3]
        if len(content) < start:
            raise ValueError("its sizes are missing")
        shape = struct.unpack_from(f">{content[3]}I", content, 4)
        found = np.frombuffer(content, _IDX_TYPES[content[2]], offset=start)
        return found.reshape(shape)


def idx_reader(prefix: str = "", first_label: int = 0) -> Reader:
    """Return a reader of MNIST's four files; ``prefix`` selects among the files of an archive with several sets.

    QMNIST's label files (``qmnist-train-labels-idx2-int``) may be given as well: their third column is the writer,
    and their first rows are those of MNIST.
    """

    def read(paths: Sequence[Path], entry: Entry) -> Examples:
        found: Arrays = {}
        for name, content in members(paths, lambda name: prefix in name and "-idx" in name):
            last = name.rpartition("/")[2]
            part = "test" if re.search("t10k|test", last) else "train"
            kind = "writer" if "idx2" in last else "x" if "images" in last else "y"
            found[f"{kind}_{part}"] = idx_array(content, name)
        where = names_of(paths)
        x = [channels_first(need(found, f"x_{part}", where), entry.shapes, where) for part in ("train", "test")]
        y = [need(found, f"y_{part}", where) for part in ("train", "test")]
        whole = split(x[0], y[0], x[1], y[1], entry.classes)
        whole = replace(whole, y=whole.y - first_label)
        if "writer_train" not in found or "writer_test" not in found:
            return whole
        table = np.concatenate([found["writer_train"][: len(y[0])], found["writer_test"][: len(y[1])]])
        if table.shape[1:] != (8,) or not np.array_equal(table[:, 0], whole.y):
            raise UserError(f"the writers in {where} do not match its images: give QMNIST's train and test labels")
        writers, owner = np.unique(table[:, 2], return_inverse=True)
        return replace(whole, owner=owner, owner_names=tuple(str(writer) for writer in writers))

    return read


def need(found: Arrays, key: str, where: str) -> np.ndarray:
    """Return an array, or refuse files that lack it."""
    if key not in found:
        what = {"x": "images", "y": "labels"}[key[0]]
        raise UserError(f"{where} lacks the {key[2:]} {what}: give all files of the data set")
    return found[key]


# --- CIFAR --------------------------------------------------------------------------------------------------------


def read_cifar10(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read the binary edition: rows of one label byte and 3,072 pixels, red plane first, in six files."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    batches = _batches(paths, names, 1)
    train, test = np.concatenate([batches[name] for name in names[:5]]), batches[names[5]]
    return _cifar(train, test, 0, entry)


def read_cifar100(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read the binary edition: rows of a coarse and a fine label byte and 3,072 pixels; use the fine labels."""
    batches = _batches(paths, ["train.bin", "test.bin"], 2)
    return _cifar(batches["train.bin"], batches["test.bin"], 1, entry)


def _batches(paths: Sequence[Path], names: Sequence[str], labels: int) -> Arrays:
    found = {}
    for name, content in members(paths, lambda name: name.rpartition("/")[2] in names):
        with reading(name):
            found[name.rpartition("/")[2]] = np.frombuffer(content, np.uint8).reshape(-1, labels + 3072)
    missing = [name for name in names if name not in found]
    if missing:
        raise UserError(f"{names_of(paths)} holds no {missing[0]}: give the binary edition, which has no pickles")
    return found


def _cifar(train: np.ndarray, test: np.ndarray, label: int, entry: Entry) -> Examples:
    x, y = [rows[:, label + 1 :].reshape(-1, 3, 32, 32) for rows in (train, test)], [train[:, label], test[:, label]]
    return split(x[0], y[0], x[1], y[1], entry.classes)


# --- MATLAB and libsvm --------------------------------------------------------------------------------------------


def read_mat(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read SVHN's or SynthDigits' train and test files: X (H, W, C, N), y (N, 1) with 10 for the digit 0."""
    from scipy.io import loadmat

    found: Arrays = {}
    for name, content in members(paths, lambda name: name.endswith(".mat") and "extra" not in name):
        part = "test" if "test" in name.rpartition("/")[2] else "train"
        with reading(name):
            mat = loadmat(io.BytesIO(content), variable_names=("X", "y"))
            found[f"x_{part}"] = np.ascontiguousarray(mat["X"].transpose(3, 2, 0, 1))
            found[f"y_{part}"] = mat["y"].reshape(-1).astype(np.int64) % 10
    where = names_of(paths)
    x = [channels_first(need(found, f"x_{part}", where), entry.shapes, where) for part in ("train", "test")]
    return split(x[0], need(found, "y_train", where), x[1], need(found, "y_test", where), entry.classes)


def read_usps(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read libsvm's text: ``label 1:value ... 256:value`` with labels 1..10 for 0..9 and values in [-1, 1].

    Grey levels are 255 (value + 1) / 2 in float32, truncated to whole numbers.
    """
    found: Arrays = {}
    for name, content in members(paths, lambda name: "usps" in name):
        part = "test" if name.endswith(".t") else "train"
        with reading(name):
            lines = [line.split() for line in content.decode("ascii").splitlines() if line.strip()]
            values = np.array([[float(word.partition(":")[2]) for word in line[1:]] for line in lines], np.float32)
            if values.ndim != 2 or values.shape[1] != 256:
                raise ValueError("a line does not have 256 values")
            found[f"x_{part}"] = ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 1, 16, 16)
            found[f"y_{part}"] = np.array([int(line[0]) - 1 for line in lines])
    where = names_of(paths)
    x, y = ([need(found, f"{kind}_{part}", where) for part in ("train", "test")] for kind in "xy")
    return split(x[0], y[0], x[1], y[1], entry.classes)
