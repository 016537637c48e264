"""FEMNIST from NIST's own archives, as LEAF's scripts do it, but without writing a million files."""

import hashlib

import numpy as np

from bespoke.data.examples import Examples
from bespoke.data.sources.archives import Files, reading
from bespoke.data.sources.entry import Entry
from bespoke.data.sources.pictures import CONTENT, decoded
from bespoke.data.sources.text import read_leaf
from bespoke.errors import UserError

SIDE = 28


def read_femnist(files: Files, entry: Entry) -> Examples:
    """Read LEAF's .json files, or NIST's by_class.zip and by_write.zip."""
    archives = any(path.name.startswith(("by_class", "by_write")) for path in files.paths)
    return read_nist(files, entry) if archives else read_leaf(files, entry)


def read_nist(files: Files, entry: Entry) -> Examples:
    """Read the labels from by_class/HEX/hsf_*/*.png and the writers from by_write/hsf_*/WRITER/*/*.png.

    The same picture has the same bytes in both. Writers are sorted by name, their pictures by path; as in LEAF,
    pictures are shrunk to 28x28 with the Lanczos filter.
    """
    labels: dict[bytes, int] = {}
    for member in files.members(lambda name: "by_class/" in name and name.endswith(".png")):
        parts = member.name.split("/")
        if len(parts) >= 3 and "hsf" in parts[-2]:
            labels.setdefault(_digest(member.read(CONTENT)), _class(parts[-3], member.where))
            entry.admit(len(labels), files)
    pixels = bytearray()
    rows: list[tuple[str, str, int]] = []  # writer, path, label
    for member in files.members(lambda name: "by_write/" in name and name.endswith(".png")):
        parts = member.name.split("/")
        content = member.read(CONTENT)
        label = labels.get(_digest(content))
        if label is None or len(parts) < 3:
            raise UserError(f"{member.where} has no class: give both by_class.zip and by_write.zip")
        pixels += _shrunk(content, member.where)
        files.allowance.spend(SIDE * SIDE, member.where)
        rows.append((parts[-3], member.name, label))
    if not rows:
        raise UserError(f"{files} has no pictures by writer: give both by_class.zip and by_write.zip")
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


def _class(code: str, where: str) -> int:
    """Return the class of the character with this hexadecimal code: digits, capital letters, small letters."""
    with reading(where):
        character = chr(int(code, 16))
        return "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz".index(character)


def _shrunk(content: bytes, where: str) -> bytes:
    from PIL import Image

    grey = decoded(content, where, "L", lambda width, height: SIDE <= width == height <= 1024)
    grey.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return grey.tobytes()
