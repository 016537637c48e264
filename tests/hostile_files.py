"""Hostile files in the official formats, small on disk: each case builds files that pretend to be those of a data set.

``build(folder, size)`` writes the files of a case; a bomb unpacks to about ``size`` bytes.
"""

import bz2
import functools
import gzip
import io
import lzma
import math
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import official_files as official
from official_files import zipped

PIECE = 2**20
Build = Callable[[Path, int], list[Path]]


class Case(NamedTuple):
    name: str
    data: str  # the set that it pretends to be
    build: Build


CASES: list[Case] = []


def case(data: str, *variants: Any) -> Callable[[Callable[..., list[Path]]], Callable[..., list[Path]]]:
    """Add a builder to the cases; with variants, once for each."""

    def add(build: Callable[..., list[Path]]) -> Callable[..., list[Path]]:
        name = build.__name__.replace("_", " ")
        if not variants:
            CASES.append(Case(name, data, build))
        for variant in variants:
            label, *given = variant if isinstance(variant, tuple) else (variant, variant)
            CASES.append(Case(f"{name}: {label}", data, functools.partial(build, *given)))
        return build

    return add


# --- pieces of files ------------------------------------------------------------------------------------------------


def filled(size: int, start: bytes = b"", pattern: bytes = b"\0") -> Iterator[bytes]:
    """Yield ``start`` and then the pattern, again and again, until there are ``size`` bytes."""
    yield start
    block = pattern * max(1, min(PIECE, size // 8) // len(pattern))
    for _ in range(0, size, len(block)):
        yield block


def packed(path: Path, pieces: Iterator[bytes], pack: Callable[[bytes], bytes] = gzip.compress) -> list[Path]:
    """Write pieces as gzip or bzip2 streams behind one another, which unpack to one file; equal ones once."""
    known: dict[bytes, bytes] = {}
    with path.open("wb") as file:
        for piece in pieces:
            if piece not in known:
                known[piece] = pack(piece)
            file.write(known[piece])
    return [path]


gzipped, bzipped = packed, functools.partial(packed, pack=bz2.compress)


def tarred(path: Path, name: str, size: int, mode: str, pattern: bytes = b"\0", **options: Any) -> list[Path]:
    class Endless(io.RawIOBase):
        def read(self, count: int = -1) -> bytes:
            return (pattern * (count // len(pattern) + 1))[:count]

    with tarfile.open(path, mode, **options) as tar:  # type: ignore[call-overload]
        info = tarfile.TarInfo(name)
        info.size = size
        tar.addfile(info, Endless())
    return [path]


def idx(shape: tuple[int, ...], content: bytes = b"", kind: int = 8) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, kind, len(shape), *shape) + content


def png(width: int, height: int, rows: int | None = None, extra: bytes = b"") -> bytes:
    """Return a grey PNG picture of zeros with the pixels of ``rows`` rows, by default all."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    packing = zlib.compressobj(9)
    count = height if rows is None else rows
    pixels = b"".join(packing.compress(bytes(width + 1)) for _ in range(count)) + packing.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    text = chunk(b"zTXt", b"a\0\0" + extra) if extra else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + text + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def npy(
    shape: tuple[int, ...], dtype: str = "|u1", content: bytes = b"", order: bool = False, version: int = 1
) -> bytes:
    header = f"{{'descr': {dtype!r}, 'fortran_order': {order}, 'shape': {shape!r}, }}".encode()
    header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H", len(header)) + header + content


def saved(array: Any) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, np.asarray(array))
    return content.getvalue()


def wav(sound: bytes, rate: int = 8000, channels: int = 1, bits: int = 16, claimed: int | None = None) -> bytes:
    size = len(sound) if claimed is None else claimed
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)
    head = b"RIFF" + struct.pack("<I", min(36 + size, 2**32 - 1)) + b"WAVEfmt " + struct.pack("<I", 16) + form
    return head + b"data" + struct.pack("<I", size) + sound


def mat_variable(kind: int, shape: tuple[int, ...], name: str, data: bytes, stored: int = 2) -> bytes:
    def element(code: int, content: bytes) -> bytes:
        return struct.pack("<II", code, len(content)) + content + bytes(-len(content) % 8)

    inside = element(6, struct.pack("<II", kind, 0)) + element(5, struct.pack(f"<{len(shape)}i", *shape))
    return element(14, inside + element(1, name.encode()) + element(stored, data))


def mat(*variables: bytes) -> bytes:
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM" + b"".join(variables)


def squeezed(pieces: Iterator[bytes]) -> bytes:
    packing = zlib.compressobj(9)
    content = b"".join(packing.compress(piece) for piece in pieces) + packing.flush()
    return struct.pack("<II", 15, len(content)) + content


def good_mnist(folder: Path) -> list[Path]:
    """Write MNIST's four files with two rows in each part."""
    part = np.zeros((2, 28, 28), np.uint8), np.arange(2, dtype=np.uint8)
    return official.mnist_files(folder, *part, *part)


def arrays(n: int = 4, **changes: Any) -> dict[str, bytes]:
    """Return the members of an archive for audiomnist, some of them exchanged."""
    good = {"x": np.zeros((n, 49, 40), np.uint8), "y": np.arange(n), "speaker": np.arange(n), "room": np.arange(n)}
    good["room_names"] = np.array(["Kino", "Ruheraum", "VR-room", "library"])
    found = {f"{name}.npy": saved(array) for name, array in good.items()}
    found |= {f"{name}.npy": value if isinstance(value, bytes) else saved(value) for name, value in changes.items()}
    return found


# --- bombs in compressed files --------------------------------------------------------------------------------------


@case("mnist", "zeros", "a true header", "more rows than there are", "a gzip in it")
def gzip_bomb(kind: str, folder: Path, size: int) -> list[Path]:
    paths = good_mnist(folder)
    start = {"a true header": idx((60000, 28, 28)), "more rows than there are": idx((2**31, 28, 28))}.get(kind, b"")
    pieces = iter([gzip.compress(bytes(PIECE)) * (size // PIECE)]) if kind == "a gzip in it" else filled(size, start)
    gzipped(paths[0], pieces)
    return paths


@case("mnist")
def gzip_of_one_stream(folder: Path, size: int) -> list[Path]:
    paths = good_mnist(folder)
    with gzip.open(paths[0], "wb", compresslevel=1) as file:
        file.writelines(filled(size, idx((60000, 28, 28))))
    return paths


@case("emnist_balanced", "zeros", "a true header", "a gzip in it", "a bzip2 in it")
def zip_bomb(kind: str, folder: Path, size: int) -> list[Path]:
    name = "gzip/emnist-balanced-train-images-idx3-ubyte"
    if kind == "a gzip in it":
        gzipped(folder / "a", filled(size))
        return zipped(folder / "e.zip", {f"{name}.gz": (folder / "a").read_bytes()})
    if kind == "a bzip2 in it":
        bzipped(folder / "a", filled(size))
        return zipped(folder / "e.zip", {f"{name}.bz2": (folder / "a").read_bytes()})
    return zipped(folder / "e.zip", {name: filled(size, idx((112800, 28, 28)) if "header" in kind else b"")})


@case("emnist_balanced", ("bzip2", zipfile.ZIP_BZIP2), ("lzma", zipfile.ZIP_LZMA))
def zip_packed_with(kind: int, folder: Path, size: int) -> list[Path]:
    return zipped(folder / "e.zip", {"emnist-balanced-train-images-idx3-ubyte": filled(size)}, kind)


@case("emnist_balanced")
def zip_whose_files_share_their_bytes(folder: Path, size: int) -> list[Path]:
    name = "emnist-balanced-train-images-idx3-ubyte"
    [path] = zipped(folder / "e.zip", {name: filled(size // 10)})
    whole = path.read_bytes()
    start = whole.index(b"PK\1\2")
    entry, end = whole[start : whole.index(b"PK\5\6")], bytearray(whole[whole.index(b"PK\5\6") :])
    struct.pack_into("<HHI", end, 8, 10, 10, 10 * len(entry))
    path.write_bytes(whole[:start] + entry * 10 + end)
    return [path]


@case("emnist_balanced")
def zip_that_lies_about_a_size(folder: Path, size: int) -> list[Path]:
    [path] = zipped(folder / "e.zip", {"emnist-balanced-train-images-idx3-ubyte": filled(size // 10)})
    whole = bytearray(path.read_bytes())
    struct.pack_into("<I", whole, whole.index(b"PK\1\2") + 24, 100)
    path.write_bytes(whole)
    return [path]


@case("emnist_balanced")
def zip_that_is_encrypted(folder: Path, size: int) -> list[Path]:
    [path] = zipped(folder / "e.zip", {"emnist-balanced-train-images-idx3-ubyte": b"secret"})
    whole = bytearray(path.read_bytes())
    whole[6] |= 1
    whole[whole.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(whole)
    return [path]


@case("emnist_balanced")
def zip_of_many_names(folder: Path, size: int) -> list[Path]:
    count = min(size // 2**13, 60_000)
    entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"a"
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, count * len(entry), len(local), 0)
    (folder / "e.zip").write_bytes(local + entry * count + end)
    return [folder / "e.zip"]


@case("cifar10", ("gzip", "w:gz"), ("bzip2", "w:bz2"), ("xz", "w:xz"), ("none", "w"))
def tar_bomb(mode: str, folder: Path, size: int) -> list[Path]:
    return tarred(folder / "c.tar", "data_batch_1.bin", size if ":" in mode else min(size, 2**24), mode)


@case("cifar10", "data_batch_1.bin", "not_looked_at.bin")
def tar_in_xz_with_a_dictionary_of_a_gigabyte(name: str, folder: Path, size: int) -> list[Path]:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0}]
    content = io.BytesIO()
    with lzma.open(content, "wb", filters=filters) as file:  # type: ignore[arg-type]
        file.write(tar_header(name, size))
        for piece in filled(size):
            file.write(piece)
    whole = bytearray(content.getvalue())
    header = 4 * (whole[12] + 1)
    place = whole.index(b"\x21\x01", 12) + 2
    whole[place] = 36  # 2 ** 30 bytes
    struct.pack_into("<I", whole, 12 + header - 4, zlib.crc32(whole[12 : 12 + header - 4]))
    (folder / "c.tar.xz").write_bytes(whole)
    return [folder / "c.tar.xz"]


def tar_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


@case("cifar10", ("an extended header", b"x"), ("a global header", b"g"), ("a long name", b"L"), ("a long link", b"K"))
def tar_with(kind: bytes, folder: Path, size: int) -> list[Path]:
    return gzipped(folder / "c.tar.gz", filled(size, tar_header("a", size, kind), b"1"))


@case("cifar10", "old", "0.1", "1.0", "1.0 with a long map")
def tar_with_a_sparse_file(kind: str, folder: Path, size: int) -> list[Path]:
    path, name = folder / "c.tar.gz", "data_batch_1.bin"
    if kind == "old":
        block = bytearray(tar_header(name, 0, tarfile.GNUTYPE_SPARSE))
        block[386:410] = b"%011o\0" % (8 * size) + b"%011o\0" % 0
        block[483:495] = b"%011o\0" % (8 * size)
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return gzipped(path, iter([bytes(block) + bytes(1024)]))
    texts = {"GNU.sparse.name": name, "GNU.sparse.size": str(8 * size), "GNU.sparse.realsize": str(8 * size)}
    if kind == "0.1":
        texts |= {"GNU.sparse.map": f"{8 * size},0", "GNU.sparse.numblocks": "1"}
    else:
        texts |= {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    info = tarfile.TarInfo(name)
    long = kind.endswith("map")
    content = b"%d\n" % (size // 2) if long else (b"1\n%d\n0\n" % (8 * size)).ljust(512, b"\0")
    info.size, info.pax_headers = size if long else 512, texts
    header = info.tobuf(tarfile.PAX_FORMAT)
    return gzipped(path, filled(size if long else 0, header + content, b"1\n"))


@case("cifar10")
def tar_of_many_files(folder: Path, size: int) -> list[Path]:
    return gzipped(folder / "c.tar.gz", filled(size, b"", tar_header("a", 0)))


@case("cifar10")
def tar_with_a_file_that_is_not_looked_at(folder: Path, size: int) -> list[Path]:
    return tarred(folder / "c.tar.gz", "readme", size, "w:gz")


@case("usps", ("zeros", b"\0"), ("empty lines", b"\n"), ("digits", b"1"), ("words", b"1 "), ("colons", b"1:0 "))
def bzip2_bomb(pattern: bytes, folder: Path, size: int) -> list[Path]:
    bzipped(folder / "usps.t.bz2", filled(0, b"1 1:0\n"))
    return [*bzipped(folder / "usps.bz2", filled(2 * size, b"", pattern)), folder / "usps.t.bz2"]


@case("usps")
def bzip2_of_endless_rows(folder: Path, size: int) -> list[Path]:
    line = b"1 " + b" ".join(b"%d:0" % i for i in range(1, 257)) + b"\n"
    return bzipped(folder / "usps.bz2", filled(min(size, 2**26), b"", line))


@case("usps", "nan", "1e999", "1e99", "1e38", "300", "x")
def libsvm_value(word: str, folder: Path, size: int) -> list[Path]:
    values = [*("0" for _ in range(255)), word]
    line = "1 " + " ".join(f"{i}:{value}" for i, value in enumerate(values, 1))
    return bzipped(folder / "usps.bz2", iter([line.encode()]))


# --- pictures -------------------------------------------------------------------------------------------------------


@case("mnist_m", (4096, 4096), (13000, 13000), (60000, 60000), (2**31 - 1, 2**31 - 1), (33, 32))
def pictures_of_size(side: int, folder: Path, size: int) -> list[Path]:
    one = png(side, side, side if side <= 4096 else 0)
    return zipped(folder / "m.zip", {f"mnist_m_train/{i}.png": one for i in range(60)})


@case("syn_digits_12k", (2048, 2048), (4096, 4096), (60000, 60000))
def digits_of_size(side: int, folder: Path, size: int) -> list[Path]:
    one = png(side, side, side if side <= 4096 else 0)
    return zipped(folder / "m.zip", {f"imgs_train/{i % 10}/{i}.png": one for i in range(8)})


@case("femnist", (16, 16), (60000, 60000))
def nist_pictures_of_size(side: int, folder: Path, size: int) -> list[Path]:
    one = png(side, side, min(side, 16))
    by_class = zipped(folder / "by_class.zip", {"by_class/30/hsf_0/a.png": one})
    return by_class + zipped(folder / "by_write.zip", {"by_write/hsf_0/f0_0/d0/a.png": one})


@case("tiny_imagenet")
def pictures_of_the_right_size_without_end(folder: Path, size: int) -> list[Path]:
    one, count = png(64, 64), max(10, size // 2**17)
    return zipped(folder / "t.zip", {f"t/train/n1/images/{i}.JPEG": one for i in range(count)}, zipfile.ZIP_STORED)


@case("mnist_m")
def picture_with_a_text_that_unpacks(folder: Path, size: int) -> list[Path]:
    packing = zlib.compressobj(9)
    extra = b"".join(packing.compress(piece) for piece in filled(size)) + packing.flush()
    return zipped(folder / "m.zip", {"mnist_m_train/0.png": png(32, 32, extra=extra)})


@case("mnist_m", ("png", b"\x89PNG\r\n\x1a\n"), ("jpeg", b"\xff\xd8\xff\xe0"))
def picture_of_zeros(start: bytes, folder: Path, size: int) -> list[Path]:
    return zipped(folder / "m.zip", {"mnist_m_train/0.png": filled(size, start)})


@case("mnist_m", ("many", b"0.png 1\n"), ("no label", b"0.png\n"), ("no end", b"0"), ("negative", b"0.png -1\n"))
def list_of_labels(pattern: bytes, folder: Path, size: int) -> list[Path]:
    return zipped(folder / "m.zip", {"mnist_m_train_labels.txt": filled(size, b"", pattern)})


@case("mnist_m", ("5000 digits", "9" * 5000), "１", "1.5")
def label_in_a_list(label: str, folder: Path, size: int) -> list[Path]:
    return zipped(folder / "m.zip", {"mnist_m_train_labels.txt": f"0.png {label}\n".encode()})


@case("syn_digits_12k", "a//x.png", "x.png", "/9/x.png", "\x1b[31m/1/x.png", "../../1/x.png")
def name_in_a_zip(name: str, folder: Path, size: int) -> list[Path]:
    return zipped(folder / "d.zip", {name: b"no picture"})


@case("tiny_imagenet", "train/images/x.JPEG", "images/x.JPEG", "train/x.JPEG", "val/val_annotations.txt")
def place_in_a_zip(name: str, folder: Path, size: int) -> list[Path]:
    return zipped(folder / "t.zip", {name: b"x.JPEG n1" if name.endswith("txt") else png(64, 64)})


# --- ready arrays ---------------------------------------------------------------------------------------------------

AUDIO = {
    "x of a gigabyte": lambda size: {"x": npy((size // 1960, 49, 40))},
    "a header of 1e12 rows": lambda size: {"x": npy((10**12, 49, 40))},
    "a header of 1e30 rows": lambda size: {"x": npy((10**30, 49, 40))},
    "a negative number of rows": lambda size: {"x": npy((-1, 49, 40))},
    "a row of 1e12 numbers": lambda size: {"x": npy((1, 10**12))},
    "a single number": lambda size: {"x": npy((), content=b"1")},
    "labels of 1e12 rows": lambda size: {"y": npy((10**12,), "<i8")},
    "labels without a size": lambda size: {"y": npy((10**12,), "<U0")},
    "labels in a table": lambda size: {"y": np.zeros((4, 1), np.int64)},
    "labels that are no whole numbers": lambda size: {"y": np.array([0.5, 1, 2, 3])},
    "labels that are text": lambda size: {"y": np.array(["a", "b", "c", "d"])},
    "x of numbers with a point": lambda size: {"x": np.zeros((4, 49, 40))},
    "x of pairs": lambda size: {"x": npy((4, 49, 40), "(1000000,)u1")},
    "x that is no array": lambda size: {"x": b"hello"},
    "x with an empty file": lambda size: {"x": b""},
    "x of a later version": lambda size: {"x": npy((4, 49, 40), version=3)},
    "a header that is no table": lambda size: {"x": b"\x93NUMPY\1\0\x05\0hello"},
    "a header that is nested deeply": lambda size: {"x": b"\x93NUMPY\1\0" + struct.pack("<H", 9000) + b"(" * 9000},
    "a header of many signs": lambda size: {"x": b"\x93NUMPY\1\0" + struct.pack("<H", 9000) + b"-" * 8999 + b"1"},
    "a pickled object": lambda size: {"x": b"\x93NUMPY\1\0v\0{'descr': '|O', 'fortran_order': False, 'shape': (4,), }"},
    "speakers as a single number": lambda size: {"speaker": np.array(3)},
    "speakers in a table": lambda size: {"speaker": np.zeros((4, 1), np.int64)},
    "too few speakers": lambda size: {"speaker": np.arange(3)},
    "a negative room": lambda size: {"room": np.array([0, 1, 2, -1])},
    "names of rooms as one text": lambda size: {"room_names": np.array("Kino")},
    "half a character in a name": lambda size: {"room_names": np.array(["Kino", "a", "b", "\udc80"])},
    "a name beyond Unicode": lambda size: {"room_names": npy((4,), "<U1", struct.pack("<4I", 65, 66, 67, 2**31))},
    "names of 1e12 characters": lambda size: {"room_names": npy((4,), "<U250000000000")},
    "columns first": lambda size: {"x": npy((size // 1960, 49, 40), order=True)},
}  # fmt: skip


@case("audiomnist", *AUDIO)
def npz_with(kind: str, folder: Path, size: int) -> list[Path]:
    contents: dict[str, Any] = arrays(4, **AUDIO[kind](size))
    if kind in ("x of a gigabyte", "columns first"):
        contents["x.npy"] = filled(size, contents["x.npy"])
    return zipped(folder / "a.npz", contents)


@case("audiomnist", ("bzip2", zipfile.ZIP_BZIP2), ("lzma", zipfile.ZIP_LZMA))
def npz_packed_with(kind: int, folder: Path, size: int) -> list[Path]:
    return zipped(folder / "a.npz", {"x.npy": filled(size, npy((30000, 49, 40)))}, kind)


@case("cifar10", 10)
@case("cifar100", 100)
def npz_of_the_right_shape_full_of_zeros(classes: int, folder: Path, size: int) -> list[Path]:
    train, test = ((size // 2**29 or 1e-3) * rows for rows in (50_000, 10_000))
    contents: dict[str, Any] = {"junk": os.urandom(size // 100)}  # the files must not be too small for what is inside
    for part, rows in (("train", int(train)), ("test", int(test))):
        contents[f"x_{part}.npy"] = filled(rows * 3072, npy((rows, 32, 32, 3)))
        contents[f"y_{part}.npy"] = saved(np.arange(rows) % classes)
    return zipped(folder / "a.npz", contents)


@case("mnist")
def npz_files_of_unequal_shapes(folder: Path, size: int) -> list[Path]:
    one = zipped(folder / "a.npz", {"x.npy": saved(np.zeros((2, 28, 28), np.uint8)), "y.npy": saved([1, 2])})
    return one + zipped(folder / "b.npz", {"x.npy": saved(np.zeros((2, 28, 27), np.uint8)), "y.npy": saved([1, 2])})


@case("mnist_m")
def npz_parts_of_unequal_shapes(folder: Path, size: int) -> list[Path]:
    x = {f"x_{part}.npy": saved(np.zeros((2, 3, n, n), np.uint8)) for part, n in (("train", 32), ("test", 28))}
    return zipped(folder / "a.npz", x | {f"y_{part}.npy": saved([1, 2]) for part in ("train", "test")})


@case("mnist", ("text", b"hello"), ("nothing", b""), ("a tar", tar_header("x.npy", 0)), ("half", b"PK\3\4"))
def npz_that_is(content: bytes, folder: Path, size: int) -> list[Path]:
    (folder / "a.npz").write_bytes(content)
    return [folder / "a.npz"]


# --- idx ------------------------------------------------------------------------------------------------------------


@case(
    "mnist",
    ("images as a single number", 0, idx((), b"\1")),
    ("labels as a single number", 1, idx((), b"\1")),
    ("labels in a table", 1, idx((2, 1), b"\0\1")),
    ("more labels than images", 1, idx((3,), b"\0\1\2")),
    ("images of 4e9 rows", 0, idx((2**32 - 1, 28, 28))),
    ("255 axes", 0, idx((2**32 - 1,) * 255)),
    ("images of four bytes a pixel", 0, idx((2, 28, 28), bytes(6272), 12)),
    ("images of another size", 0, idx((2, 27, 28), bytes(1512))),
    ("one byte too many", 0, idx((2, 28, 28), bytes(1569))),
    ("one byte too few", 0, idx((2, 28, 28), bytes(1567))),
)
def idx_with(place: int, content: bytes, folder: Path, size: int) -> list[Path]:
    paths = good_mnist(folder)
    paths[place].write_bytes(content)
    return paths


@case("mnist_writers", *((str(shape), shape) for shape in ((), (2,), (2, 7), (2, 8, 1), (0, 8), (2**31, 8))))
def qmnist_of_shape(shape: tuple[int, ...], folder: Path, size: int) -> list[Path]:
    paths = good_mnist(folder)
    for part in ("train", "test"):
        paths.append(folder / f"qmnist-{part}-labels-idx2-int")
        paths[-1].write_bytes(idx(shape, bytes(4 * min(64, math.prod(shape))), 12))
    return paths


# --- MATLAB ---------------------------------------------------------------------------------------------------------

SHAPE = (32, 32, 3, 2)
GOOD_X, GOOD_Y = mat_variable(9, SHAPE, "X", bytes(6144)), mat_variable(9, (2, 1), "y", b"\1\2")
MATLAB = {
    "a variable that unpacks": lambda size: mat(squeezed(filled(size, struct.pack("<II", 14, size))), GOOD_Y),
    "an array that unpacks": lambda size: mat(
        squeezed(filled(size, mat_variable(9, (32, 32, 3, 73257), "X", b"")[:-8] + struct.pack("<II", 2, size))), GOOD_Y
    ),
    "an array of 4e9 rows": lambda size: mat(mat_variable(9, (32, 32, 3, 2**31 - 1), "X", b""), GOOD_Y),
    "a table of tables": lambda size: mat(mat_variable(1, SHAPE, "X", b""), GOOD_Y),
    "a record": lambda size: mat(mat_variable(2, (1, 1), "X", b""), GOOD_Y),
    "images in a table": lambda size: mat(mat_variable(9, (32, 32), "X", bytes(1024)), GOOD_Y),
    "no labels": lambda size: mat(GOOD_X),
    "the label NaN": lambda size: mat(GOOD_X, mat_variable(6, (2, 1), "y", struct.pack("<2d", 1, np.nan), 9)),
    "the label 1.7": lambda size: mat(GOOD_X, mat_variable(6, (2, 1), "y", struct.pack("<2d", 1, 1.7), 9)),
    "too few labels": lambda size: mat(GOOD_X, mat_variable(9, (1, 1), "y", b"\1")),
    "the head of the newest version": lambda size: b"MATLAB 7.3 MAT-file".ljust(124) + b"\0\2IM" + bytes(100),
    "an old version": lambda size: struct.pack("<5i", 50, 2**15, 2**15, 0, 2) + b"X\0",
    "a head alone": lambda size: mat(),
    "elements without a length": lambda size: mat(bytes(4096)),
}


@case("svhn", *MATLAB)
def matlab_file_with(kind: str, folder: Path, size: int) -> list[Path]:
    paths = [folder / "train_32x32.mat", folder / "test_32x32.mat"]
    paths[0].write_bytes(MATLAB[kind](size))
    paths[1].write_bytes(mat(GOOD_X, GOOD_Y))
    return paths


# --- people ---------------------------------------------------------------------------------------------------------

ROW = "[" + ",".join("0" for _ in range(784)) + "]"


def leaf(x: str = f"[{ROW}]", y: str = "[1]", name: str = "a", behind: str = "") -> str:
    """Return LEAF's file with one client."""
    return f'{{"user_data": {{"{name}": {{"x": {x}, "y": {y}}}{behind}}}}}'


def leaf_pixel(word: str) -> str:
    return leaf(f"[{ROW.replace('0', word, 1)}]")


LEAF = {
    "clients in a list": '{"user_data": [1]}',
    "a client that is a number": '{"user_data": {"a": 1}}',
    "rows that are numbers": leaf("[1]"),
    "rows that are text": leaf('"hello"'),
    "a pixel that is text": leaf_pixel('"0"'),
    "a pixel NaN": leaf_pixel("NaN"),
    "a pixel Infinity": leaf_pixel("-Infinity"),
    "a pixel of 400 digits": leaf_pixel("1" * 400),
    "a pixel of 5000 digits": leaf_pixel("1" * 5000),
    "the label 1.7": leaf(y="[1.7]"),
    "the label NaN": leaf(y="[NaN]"),
    "the label true": leaf(y="[true]"),
    "a label of 30 digits": leaf(y=f"[{'1' * 30}]"),
    "fewer labels than rows": leaf(y="[]"),
    "a client twice": leaf(behind=', "a": {"x": [], "y": []}'),
    "half a character in a name": leaf(name="\\ud800"),
    "no clients": '{"users": []}',
    "no rows": '{"user_data": {}}',
    "a list": "[]",
    "a number": "1",
    "nothing": "",
    "a long name": leaf(name="a" * 200_000),
    "something behind it": leaf() + " {}",
    "bytes that are no text": "\udcff{}",
}
ENDLESS = {
    "deep lists": ('{"user_data": ', "["),
    "deep rows": ('{"user_data": {"a": {"x": ', "["),
    "empty rows": ('{"user_data": {"a": {"x": [', "[],"),
    "a long row": ('{"user_data": {"a": {"x": [[0', ",0"),
    "good rows": ('{"user_data": {"a": {"x": [' + ROW, f",{ROW}"),
    "labels": ('{"user_data": {"a": {"y": [1', ",1"),
    "names": ('{"users": ["a"', ',"a"'),
    "spaces": ("", " "),
    "a string": ('{"users": "', "a"),
    "a number": ("", "1"),
}


@case("femnist", *LEAF)
def leaf_file_with(kind: str, folder: Path, size: int) -> list[Path]:
    (folder / "all_data_0.json").write_bytes(LEAF[kind].encode("utf-8", "surrogateescape"))
    return [folder / "all_data_0.json"]


@case("femnist", *ENDLESS)
def leaf_file_of_endless(kind: str, folder: Path, size: int) -> list[Path]:
    start, again = ENDLESS[kind]
    return zipped(folder / "leaf.zip", {"all_data_0.json": filled(size, start.encode(), again.encode())})


TWEET = b'"4","1","Mon","NO_QUERY","amy","%s"\n'


@case(
    "sent140",
    ("one line", b"", b"a"),
    ("an open quote", b'"', b"a\n"),
    ("words", TWEET[:30], b"ab "),
    ("long tweets", b"", TWEET % (b"ab " * 10_000)),
    ("short tweets", b"", TWEET % b"a"),
    ("zeros", b"", b"\0"),
    ("commas", b"", b","),
    ("other fields", b"", b'"1","a"\n'),
)
def tweets_of(start: bytes, pattern: bytes, folder: Path, size: int) -> list[Path]:
    return zipped(folder / "t.zip", {"training.csv": filled(size, start, pattern)})


def audio_zip(folder: Path, people: str, sound: bytes | Iterator[bytes]) -> list[Path]:
    contents = {"audioMNIST_meta.txt": people.encode("utf-8", "surrogatepass"), "data/1/0_1_0.wav": sound}
    return zipped(folder / "a.zip", contents)


@case(
    "audiomnist",
    *("[1]", '{"1": [1]}', '{"1": {}}', "1", '{"a": {"recordingroom": "Kino"}}', "{}"),
    *('{"1": {"recordingroom": "\\ud800"}}', ("deep", "[" * 100_000), ("long", '{"a": "' + "a" * 2**21)),
)
def list_of_speakers(people: str, folder: Path, size: int) -> list[Path]:
    return audio_zip(folder, people, wav(bytes(200)))


@case(
    "audiomnist",
    ("no sound", wav(b"")),
    ("8 bits", wav(bytes(200), bits=8)),
    ("no rate", wav(bytes(200), rate=0)),
    ("a rate of 199,999", wav(bytes(2**19), rate=199_999)),
    ("a rate of 1,001", wav(bytes(2**19), rate=1001)),
    ("no channels", wav(bytes(200), channels=0)),
    ("30,000 channels", wav(bytes(200), channels=30_000)),
    ("4 GB claimed", wav(bytes(200), claimed=2**32 - 1)),
    ("a head alone", wav(b"")[:30]),
    ("text", b"hello"),
)
def recording_with(sound: bytes, folder: Path, size: int) -> list[Path]:
    return audio_zip(folder, '{"1": {"recordingroom": "Kino"}}', sound)


@case("audiomnist")
def recording_that_unpacks(folder: Path, size: int) -> list[Path]:
    return audio_zip(folder, '{"1": {"recordingroom": "Kino"}}', filled(size, wav(b"", claimed=size)))


@case("speech_commands")
def recordings_of_silence_without_end(folder: Path, size: int) -> list[Path]:
    block = tar_header("bed/a_nohash_0.wav", 32044) + wav(bytes(32000)).ljust(32256, b"\0")
    return gzipped(folder / "s.tar.gz", filled(min(size, 2**28), b"", block))
