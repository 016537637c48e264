"""Readers of sets that are archives of pictures: Tiny ImageNet, MNIST-M, the 12,000 synthetic digits."""

import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from bespoke.data.examples import Examples
from bespoke.data.sources.archives import Files, Member, reading
from bespoke.data.sources.content import split
from bespoke.data.sources.entry import Entry
from bespoke.errors import UserError, natural

if TYPE_CHECKING:
    from PIL import Image

_PICTURE = re.compile(r"\.(jpe?g|png)$", re.IGNORECASE)
_LARGEST = 2048  # pixels per side of a picture that is resized
CONTENT = 2**24  # bytes of a picture's file
_LIST = 2**23  # bytes of a list of pictures


def decoded(content: bytes, where: str, mode: str, fits: Callable[[int, int], bool]) -> "Image.Image":
    """Decode a JPEG or PNG picture in Pillow's mode, if its width and height fit, which is known before its pixels."""
    from PIL import Image, UnidentifiedImageError

    with reading(where), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of many pixels, or of strange remarks in the file
        try:
            with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
                if not fits(*image.size):
                    raise ValueError(f"it is a picture of {image.width} x {image.height} pixels")
                return image.convert(mode)
        except UnidentifiedImageError:
            raise ValueError("it is no JPEG or PNG picture") from None
        except Image.DecompressionBombError:
            raise ValueError("it is a picture of far too many pixels") from None


def picture(member: Member, files: Files, entry: Entry, size: int | None = None) -> np.ndarray:
    """Decode a picture as uint8 (3, H, W): of the set's size, or of any, resized bilinearly to ``size`` squared."""
    from PIL import Image

    content = member.read(CONTENT)
    if size is None:
        found = decoded(content, member.where, "RGB", lambda width, height: (3, height, width) in entry.shapes)
    else:
        found = decoded(content, member.where, "RGB", lambda width, height: max(width, height) <= _LARGEST)
        if found.size != (size, size):
            found = found.resize((size, size), Image.Resampling.BILINEAR)
    row = np.asarray(found, np.uint8).transpose(2, 0, 1)
    files.allowance.spend(row.nbytes, member.where)
    return row


def _list(member: Member, entry: Entry, separator: str | None) -> list[list[str]]:
    """Return the words of each line of a list of pictures."""
    text = member.read(_LIST)
    entry.admit(text.count(b"\n"), member.where)
    with reading(member.where):
        return [line.split(separator) for line in text.decode().splitlines() if line.strip()]


def _by_label(labels: dict[str, int]) -> dict[str, int]:
    return dict(sorted(labels.items(), key=lambda item: (item[1], natural(item[0]))))


def _rows(
    found: dict[str, np.ndarray], labels: dict[str, int], files: Files, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pictures in the order of their labels: uint8 (n, 3, H, W) and int64 (n,)."""
    missing = [name for name in labels if name not in found]
    if missing or not labels:
        raise UserError(f"{files} lacks {repr(missing[0]) if missing else f'the {what} rows'}: get it again")
    x = np.empty((len(labels), *found[next(iter(labels))].shape), np.uint8)
    for i, name in enumerate(labels):
        if found[name].shape != x.shape[1:]:
            raise UserError(f"{name!r} has size {found[name].shape}, others {x.shape[1:]}: get the file again")
        x[i] = found.pop(name)
    return x, np.array(list(labels.values()), np.int64)


def _train_and_test(
    found: dict[str, dict[str, np.ndarray]], labels: dict[str, dict[str, int]], files: Files, entry: Entry
) -> Examples:
    pairs = [_rows(found[part], labels[part], files, part) for part in ("train", "test")]
    return split([x for x, _ in pairs], [y for _, y in pairs], entry.classes, files)


def read_tiny_imagenet(files: Files, entry: Entry) -> Examples:
    """Read tiny-imagenet-200.zip: train/WNID/images/*.JPEG, and val/images/*.JPEG with val/val_annotations.txt.

    Classes are the sorted synset names; train rows are sorted by class, then by number, the others are as listed.
    """
    found: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    synset: dict[str, dict[str, str]] = {"train": {}, "test": {}}
    for member in files.members(lambda name: "/test/" not in name):
        parts = member.name.split("/")
        if member.last == "val_annotations.txt":
            with reading(member.where):
                synset["test"] = {line[0]: line[1] for line in _list(member, entry, "\t")}
        elif _PICTURE.search(member.name) and "train" in parts[:-3] and parts[-2] == "images":
            found["train"][member.last] = picture(member, files, entry)
            synset["train"][member.last] = parts[-3]
        elif _PICTURE.search(member.name) and "val" in parts:
            found["test"][member.last] = picture(member, files, entry)
        entry.admit(sum(map(len, found.values())), files)
    number = {wnid: i for i, wnid in enumerate(sorted(set(synset["train"].values())))}
    unknown = set(synset["test"].values()) - number.keys()
    if unknown:
        raise UserError(f"{files} has no training pictures of {min(unknown)!r}: get it again")
    labels = {part: {name: number[wnid] for name, wnid in own.items()} for part, own in synset.items()}
    return _train_and_test(found, labels | {"train": _by_label(labels["train"])}, files, entry)


def read_mnist_m(files: Files, entry: Entry) -> Examples:
    """Read mnist_m_train/*.png and mnist_m_test/*.png, with lines ``00000000.png 5`` in *_labels.txt."""
    found: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    labels: dict[str, dict[str, int]] = {"train": {}, "test": {}}
    for member in files.members(lambda name: "mnist_m_" in name):
        part = "test" if "mnist_m_test" in member.name else "train"
        if member.name.endswith("_labels.txt"):
            with reading(member.where):
                labels[part] = {line[0]: label(line[1]) for line in _list(member, entry, None)}
        elif _PICTURE.search(member.name):
            found[part][member.last] = picture(member, files, entry)
            entry.admit(sum(map(len, found.values())), files)
    return _train_and_test(found, labels, files, entry)


def read_synthetic_12k(files: Files, entry: Entry) -> Examples:
    """Read the 12,000 synthetic digits: one folder per digit, in imgs_train and imgs_valid; resized to 32x32."""
    found: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    labels: dict[str, dict[str, int]] = {"train": {}, "test": {}}
    for member in files.members(lambda name: bool(re.search(r"/[0-9]/[^/]*$", f"/{name}") and _PICTURE.search(name))):
        *folders, digit, _ = member.name.split("/")
        part = "test" if re.search("valid|test", "/".join(folders)) else "train"
        found[part][member.name], labels[part][member.name] = picture(member, files, entry, 32), int(digit)
        entry.admit(sum(map(len, found.values())), files)
    return _train_and_test(found, {part: _by_label(own) for part, own in labels.items()}, files, entry)


def label(text: str) -> int:
    """Return the class number of a list's line."""
    if not re.fullmatch("[0-9]{1,4}", text):
        raise ValueError(f"{text[:20]!r} is no class number")
    return int(text)
