"""FEMNIST from NIST's own archives, as LEAF's scripts do it, but without writing a million files."""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bespoke.data.examples import Examples
from bespoke.data.sources.archives import members, reading
from bespoke.data.sources.entry import Entry
from bespoke.data.sources.formats import names_of
from bespoke.data.sources.text import read_leaf
from bespoke.errors import UserError

SIDE = 28


def read_femnist(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read LEAF's .json files, or NIST's by_class.zip and by_write.zip."""
    archives = any(path.name.startswith(("by_class", "by_write")) for path in paths)
    return read_nist(paths, entry) if archives else read_leaf(paths, entry)


def read_nist(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read the labels from by_class/HEX/hsf_*/*.png and the writers from by_write/hsf_*/WRITER/*/*.png.

    The same picture has the same bytes in both. Writers are sorted by name, their pictures by path; as in LEAF,
    pictures are shrunk to 28x28 with the Lanczos filter.
    """
    labels: dict[bytes, int] = {}
    for name, content in members(paths, lambda name: "by_class/" in name and name.endswith(".png")):
        parts = name.split("/")
        if len(parts) >= 3 and "hsf" in parts[-2]:
            labels.setdefault(_digest(content), _class(parts[-3], name))
    pixels = bytearray()
    rows: list[tuple[str, str, int]] = []  # writer, path, label
    for name, content in members(paths, lambda name: "by_write/" in name and name.endswith(".png")):
        parts = name.split("/")
        label = labels.get(_digest(content))
        if label is None or len(parts) < 3:
            raise UserError(f"{name} in {names_of(paths)} has no class: give both by_class.zip and by_write.zip")
        pixels += _shrunk(content, name)
        rows.append((parts[-3], name, label))
    if not rows:
        raise UserError(f"{names_of(paths)} has no pictures by writer: give both by_class.zip and by_write.zip")
    order = sorted(range(len(rows)), key=rows.__getitem__)
    writers = sorted({row[0] for row in rows})
    number = {writer: i for i, writer in enumerate(writers)}
    return Examples(
        x=np.frombuffer(pixels, np.uint8).reshape(-1, 1, SIDE, SIDE)[order],
        y=np.array([rows[i][2] for i in order], np.int64),
        num_classes=entry.classes,
        owner=np.array([number[rows[i][0]] for i in order]),
        owner_names=tuple(writers),
    )


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _class(code: str, name: str) -> int:
    """Return the class of the character with this hexadecimal code: digits, capital letters, small letters."""
    with reading(name):
        character = chr(int(code, 16))
        return "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz".index(character)


def _shrunk(content: bytes, name: str) -> bytes:
    from PIL import Image

    with reading(name), Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        if max(image.size) > 1024 or image.size[0] != image.size[1]:
            raise ValueError(f"it is a picture of {image.size} pixels")
        grey = image.convert("L")
        grey.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        return grey.tobytes()
