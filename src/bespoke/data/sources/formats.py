"""Readers of array formats: .npz, idx, CIFAR's binary edition, MATLAB files, libsvm text.

A reader takes the files of a data set, archives or not, and returns all rows: official train rows, then official test
rows, each in the file's order, images as uint8 (N, C, H, W). Nothing is ever unpickled.
"""

import io
import itertools
import math
import re
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bespoke.data.examples import Examples, as_labels
from bespoke.data.sources.archives import PIECE, Allowance, Files, Member, reading
from bespoke.data.sources.content import channels_first, join, split
from bespoke.data.sources.entry import Entry, Reader
from bespoke.data.sources.npz import Npz
from bespoke.errors import UserError

OWNERS, DOMAINS = ("owner", "writer", "speaker"), ("domain", "room")
PARTS = ("train", "test")
MAT_COMPRESSED = 15  # the code of a compressed variable in a MATLAB file
_IDX_TYPES = {0x08: ">u1", 0x0C: ">i4"}

Arrays = dict[str, np.ndarray]


# --- .npz ---------------------------------------------------------------------------------------------------------


def read_npz(files: Files, entry: Entry) -> Examples:
    """Read ready arrays: x_train, y_train, x_test, y_test; or x, y, which may continue over several files.

    Owners are named ``owner``, ``writer`` or ``speaker``, domains ``domain`` or ``room``, with the ending of their
    rows (``writer_train``) and, if they are indices, an array of the names (``room_names``).
    """
    archives = [Npz(path, files.allowance) for path in files.paths]
    ends = ("_train", "_test") if any("x_train" in archive.headers for archive in archives) else ("",)
    holding = {}  # archives of each array; x and y may continue
    for name in _wanted(ends):
        found = [archive for archive in archives if name in archive.headers]
        if found:
            holding[name] = found if name in ("x", "y") else found[-1:]
    for name in [kind + end for kind in "xy" for end in ends]:
        if name not in holding:
            raise UserError(f"{files} has no array {name!r}: give x_train, y_train, x_test and y_test, or x and y")
    ys = [
        np.concatenate([as_labels(archive.read("y" + end), str(files)) for archive in holding["y" + end]])
        for end in ends
    ]
    for y, end in zip(ys, ends, strict=True):
        rows = sum(archive.headers["x" + end].rows for archive in holding["x" + end])
        if rows != len(y):
            raise UserError(f"{files} has {rows} rows in x{end} and {len(y)} in y{end}: give equally many")
    x = _images([(archive, "x" + end) for end in ends for archive in holding["x" + end]], entry, files)
    y = np.concatenate(ys)
    held = np.arange(len(y)) >= len(ys[0]) if len(ends) == 2 else _second_part(len(y), entry)
    examples = Examples(x, y, entry.classes, official_test=held)
    arrays = {name: found[0].read(name) for name, found in holding.items() if name[0] not in "xy"}
    owner, owner_names = _marks(arrays, OWNERS, ends, len(examples.y), files)
    domain, domain_names = _marks(arrays, DOMAINS, ends, len(examples.y), files)
    return replace(examples, owner=owner, owner_names=owner_names, domain=domain, domain_names=domain_names)


def _wanted(ends: Sequence[str]) -> list[str]:
    marks = [*OWNERS, *DOMAINS]
    return [kind + end for kind in ("x", "y", *marks) for end in ends] + [f"{mark}_names" for mark in marks]


def _images(parts: Sequence[tuple[Npz, str]], entry: Entry, files: Files) -> np.ndarray:
    """Return the rows of several arrays, one after another, in the shape of the data set's rows."""
    headers = [archive.headers[name] for archive, name in parts]
    shapes = set()
    for header in headers:
        if header.dtype != entry.dtype and (entry.dtype == "uint8" or header.dtype.kind not in "iu"):
            raise UserError(
                f"x of {files} holds {header.dtype} values, but {entry.name} is stored as {entry.dtype}: convert it"
            )
        none = np.empty((0, *header.shape[1:]), entry.dtype)
        shapes.add(channels_first(none, entry.shapes, str(files)).shape[1:])
    if len(shapes) > 1:
        raise UserError(f"{files} has rows of unequal shapes: give one edition of the data set")
    total = sum(header.rows for header in headers)
    entry.admit(total, files)
    pieces = [archive.pieces(name) for archive, name in parts]
    rows, start = np.empty((total, *shapes.pop()), entry.dtype), 0
    for piece in itertools.chain.from_iterable(pieces):
        rows[start : start + len(piece)] = channels_first(piece, entry.shapes, str(files))
        start += len(piece)
    return rows


def _second_part(rows: int, entry: Entry) -> np.ndarray | None:
    """Return the test marks (N,) of rows in arrays without an ending: the rows after an edition's train rows."""
    for train, test in entry.sizes:
        if test and rows == train + test:
            return np.arange(rows) >= train
    return None


def _marks(
    arrays: Arrays, keys: Sequence[str], ends: Sequence[str], rows: int, where: object
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return each row's place (rows,) int64 among the names of its owner or domain, and these names.

    The first of the ``keys`` that is there for all ``ends`` counts; None and no names if there is none.
    """
    for key in keys:
        if all(key + end in arrays for end in ends):
            parts = [arrays[key + end] for end in ends]
            if any(part.ndim != 1 for part in parts) or sum(len(part) for part in parts) != rows:
                shapes = " and ".join(str(part.shape) for part in parts)
                raise UserError(f"{where} has {shapes} values in {key}, but {rows} rows: give one value per row")
            with reading(f"{key} of {where}"):
                values = np.concatenate(parts)
                names = arrays.get(f"{key}_names")
                if names is not None and names.ndim != 1:
                    raise ValueError(f"its names have the shape {names.shape}")
                if names is not None and values.dtype.kind in "iu" and len(names) > values.max(initial=0):
                    if values.min(initial=0) < 0:
                        raise ValueError(f"the value {values.min()} is no place in its names")
                    return values.astype(np.int64), _texts(names)
                found, index = np.unique(values, return_inverse=True)
                return index.astype(np.int64), _texts(found)
    return None, ()


def _texts(names: np.ndarray) -> tuple[str, ...]:
    if names.dtype.kind == "U":
        codes = np.frombuffer(names.tobytes(), np.dtype("u4").newbyteorder(names.dtype.byteorder))
        if codes.max(initial=0) > sys.maxunicode:
            raise ValueError("a name holds what is no character")
    return tuple(str(name) for name in names)


# --- idx ----------------------------------------------------------------------------------------------------------


def idx_array(member: Member, entry: Entry, dtype: str, rows: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Parse an idx file of bytes or of int32, whose rows have one of the shapes: (n, ...).

    It has two zero bytes, a code for the type, the number of dimensions, big-endian sizes, and the values.
    """
    start = member.file.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _IDX_TYPES:
        raise ValueError("it does not start like an idx file")
    sizes = member.file.read(4 * start[3])
    if len(sizes) < 4 * start[3]:
        raise ValueError("its sizes are missing")
    shape, found = struct.unpack(f">{start[3]}I", sizes), np.dtype(_IDX_TYPES[start[2]])
    if found != dtype or not shape or shape[1:] not in rows:
        raise ValueError(f"it holds {found.name} of shape {shape}, which is not that of {entry.name}")
    entry.admit(shape[0], member.where)
    return np.frombuffer(member.read(math.prod(shape) * found.itemsize), found).reshape(shape)


def idx_reader(prefix: str = "", first_label: int = 0) -> Reader:
    """Return a reader of MNIST's four files; ``prefix`` selects among the files of an archive with several sets.

    QMNIST's label files (``qmnist-train-labels-idx2-int``) may be given as well: their third column is the writer,
    and their first rows are those of MNIST.
    """

    def read(files: Files, entry: Entry) -> Examples:
        pictures = [*entry.shapes, *(shape[1:] for shape in entry.shapes if shape[0] == 1)]
        kinds: dict[str, tuple[str, list[tuple[int, ...]]]] = {
            "x": (">u1", pictures),
            "y": (">u1", [()]),
            "writer": (">i4", [(8,)]),
        }
        found: Arrays = {}
        for member in files.members(lambda name: prefix in name and "-idx" in name):
            part = "test" if re.search("t10k|test", member.last) else "train"
            kind = "writer" if "idx2" in member.last else "x" if "images" in member.last else "y"
            with reading(member.where):
                found[f"{kind}_{part}"] = idx_array(member, entry, *kinds[kind])
        x = [channels_first(need(found, f"x_{part}", files), entry.shapes, str(files)) for part in PARTS]
        y = [need(found, f"y_{part}", files) for part in PARTS]
        counts = [len(labels) for labels in y]
        whole = split(x, y, entry.classes, files)
        whole = replace(whole, y=whole.y - first_label)
        if "writer_train" not in found or "writer_test" not in found:
            return whole
        table = np.concatenate([found[f"writer_{part}"][:count] for part, count in zip(PARTS, counts, strict=True)])
        if not np.array_equal(table[:, 0], whole.y):
            raise UserError(f"the writers in {files} do not match its images: give QMNIST's train and test labels")
        writers, owner = np.unique(table[:, 2], return_inverse=True)
        return replace(whole, owner=owner, owner_names=tuple(str(writer) for writer in writers))

    return read


def need(found: Arrays, key: str, where: object) -> np.ndarray:
    """Take an array out of those found, or refuse files that lack it."""
    if key not in found:
        what = {"x": "images", "y": "labels"}[key[0]]
        raise UserError(f"{where} lacks the {key[2:]} {what}: give all files of the data set")
    return found.pop(key)


# --- CIFAR --------------------------------------------------------------------------------------------------------


def read_cifar10(files: Files, entry: Entry) -> Examples:
    """Read the binary edition: rows of one label byte and 3,072 pixels, red plane first, in six files."""
    return _cifar(files, [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin", 1, entry)


def read_cifar100(files: Files, entry: Entry) -> Examples:
    """Read the binary edition: rows of a coarse and a fine label byte and 3,072 pixels; use the fine labels."""
    return _cifar(files, ["train.bin"], "test.bin", 2, entry)


def _cifar(files: Files, train: list[str], test: str, labels: int, entry: Entry) -> Examples:
    """Read rows whose last label byte, of ``labels``, counts."""
    names = [*train, test]
    x: Arrays = {}
    y: Arrays = {}
    row = labels + 3072
    for member in files.members(lambda name: name.rpartition("/")[2] in names):
        with reading(member.where):
            content = member.read((entry.most_rows or int(files.allowance.most) // row) * row)
            rows = np.frombuffer(content, np.uint8).reshape(-1, row)
            x[member.last], y[member.last] = rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1].copy()
    missing = [name for name in names if name not in x]
    if missing:
        raise UserError(f"{files} holds no {missing[0]}: give the binary edition, which has no pickles")
    entry.admit(sum(len(part) for part in y.values()), files)
    pixels = [x.pop(name) for name in names]
    held = np.repeat([name == test for name in names], [len(y[name]) for name in names])
    targets = np.concatenate([y[name] for name in names]).astype(np.int64)
    return Examples(join(pixels), targets, entry.classes, official_test=held)


# --- MATLAB and libsvm --------------------------------------------------------------------------------------------


def read_mat(files: Files, entry: Entry) -> Examples:
    """Read SVHN's or SynthDigits' train and test files: X (H, W, C, N), y (N, 1) with 10 for the digit 0."""
    found: Arrays = {}
    for member in files.members(lambda name: name.endswith(".mat") and "extra" not in name):
        part = "test" if "test" in member.last else "train"
        with reading(member.where):
            x, y = _mat_arrays(member, entry, files.allowance)
            found[f"x_{part}"], found[f"y_{part}"] = x.transpose(3, 2, 0, 1), y % 10
    xs = [channels_first(need(found, f"x_{part}", files), entry.shapes, str(files)) for part in PARTS]
    return split(xs, [need(found, f"y_{part}", files) for part in PARTS], entry.classes, files)


def _mat_arrays(member: Member, entry: Entry, allowance: Allowance) -> tuple[np.ndarray, np.ndarray]:
    """Return X (H, W, C, N) uint8 and the labels y (N,), 10 for the digit 0, of a MATLAB file."""
    from scipy.io import loadmat, whosmat
    from scipy.io.matlab import MatReadError, matfile_version

    content = member.read(entry.most_bytes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of variables that are there twice
            if matfile_version(io.BytesIO(content))[0] == 1:
                _count_unpacked(content, member.where, allowance)
            known = {name: (shape, kind) for name, shape, kind in whosmat(io.BytesIO(content))}
            for name, axes in (("X", 4), ("y", 2)):
                shape, kind = known.get(name, ((), "missing"))
                if len(shape) != axes or kind not in ("uint8", "double"):
                    raise ValueError(f"its {name} is {kind} of shape {shape}")
                entry.admit(max(shape[:2]) if name == "y" else shape[3], member.where)
            mat = loadmat(io.BytesIO(content), variable_names=("X", "y"))
    except MatReadError as error:
        raise ValueError(str(error)) from None
    y = mat["y"].reshape(-1)
    if not np.isin(y, np.arange(11)).all():
        raise ValueError("a label is not one of 1..10")
    return mat["X"], y.astype(np.int64)


def _count_unpacked(content: bytes, where: str, allowance: Allowance) -> None:
    """Unpack the compressed variables of a MATLAB file (version 5) in pieces, only to count their bytes."""
    order = ">" if content[126:128] == b"MI" else "<"
    place = 128
    while place + 8 <= len(content):
        kind, size = struct.unpack_from(f"{order}II", content, place)
        if kind == MAT_COMPRESSED:
            unpacking, rest = zlib.decompressobj(), content[place + 8 : place + 8 + size]
            while rest and not unpacking.eof:
                allowance.spend(len(unpacking.decompress(rest, PIECE)), where)
                rest = unpacking.unconsumed_tail
        place += 8 + size


def read_usps(files: Files, entry: Entry) -> Examples:
    """Read libsvm's text: ``label 1:value ... 256:value`` with labels 1..10 for 0..9 and values in [-1, 1].

    Grey levels are 255 (value + 1) / 2 in float32, truncated to whole numbers.
    """
    found: Arrays = {}
    for member in files.members(lambda name: "usps" in name):
        part = "test" if member.name.endswith(".t") else "train"
        pixels, labels = bytearray(), []
        for grey, label in _libsvm_rows(member):
            pixels += grey.tobytes()
            labels.append(label)
            entry.admit(len(labels), member.where)
        found[f"x_{part}"] = np.frombuffer(pixels, np.uint8).reshape(-1, 1, 16, 16)
        found[f"y_{part}"] = np.array(labels, np.int64)
    x, y = ([need(found, f"{kind}_{part}", files) for part in PARTS] for kind in "xy")
    return split(x, y, entry.classes, files)


def _libsvm_rows(member: Member) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the grey levels (256,) uint8 and the label, from 0, of each line."""
    with reading(member.where):
        for words in (line.decode("ascii").split() for line in member.lines()):
            if not words:
                continue
            with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused below
                values = np.array([float(word.partition(":")[2]) for word in words[1:]], np.float32)
                grey = (values + 1) / 2 * 255
            if values.shape != (256,) or not ((grey >= 0) & (grey < 256)).all():
                raise ValueError("a line does not have 256 values in [-1, 1]")
            yield grey.astype(np.uint8), int(words[0]) - 1
