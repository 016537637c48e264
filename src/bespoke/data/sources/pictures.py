"""Readers of sets that are archives of pictures: Tiny ImageNet, MNIST-M, the 12,000 synthetic digits."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bespoke.data.examples import Examples
from bespoke.data.sources.archives import members, reading
from bespoke.data.sources.content import split
from bespoke.data.sources.entry import Entry
from bespoke.data.sources.formats import names_of
from bespoke.errors import UserError

_PICTURE = re.compile(r"\.(jpe?g|png)$", re.IGNORECASE)
_LARGEST = 4096  # pixels per side


def picture(content: bytes, name: str, size: int | None = None) -> np.ndarray:
    """Decode a JPEG or PNG picture as uint8 (3, H, W), resized bilinearly to ``size`` squared if that is given."""
    from PIL import Image

    with reading(name):
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
            if max(image.size) > _LARGEST:
                raise ValueError(f"it is a picture of {image.size} pixels")
            found = image.convert("RGB")
        if size is not None and found.size != (size, size):
            found = found.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(found, np.uint8).transpose(2, 0, 1)


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts names by the numbers in them: x_2 before x_10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def _by_label(labels: dict[str, int]) -> dict[str, int]:
    return dict(sorted(labels.items(), key=lambda item: (item[1], natural(item[0]))))


def _rows(
    found: dict[str, np.ndarray], labels: dict[str, int], paths: Sequence[Path], what: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pictures in the order of their labels: uint8 (n, 3, H, W) and int64 (n,)."""
    missing = [name for name in labels if name not in found]
    if missing or not labels:
        raise UserError(f"{names_of(paths)} lacks {missing[0] if missing else f'the {what} rows'}: get it again")
    x = np.empty((len(labels), *found[next(iter(labels))].shape), np.uint8)
    for i, name in enumerate(labels):
        if found[name].shape != x.shape[1:]:
            raise UserError(f"{name} has size {found[name].shape}, others {x.shape[1:]}: get the file again")
        x[i] = found.pop(name)
    return x, np.array(list(labels.values()), np.int64)


def read_tiny_imagenet(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read tiny-imagenet-200.zip: train/WNID/images/*.JPEG, and val/images/*.JPEG with val/val_annotations.txt.

    Classes are the sorted synset names; train rows are sorted by class, then by number, the others are as listed.
    """
    train: dict[str, np.ndarray] = {}
    val: dict[str, np.ndarray] = {}
    synset: dict[str, str] = {}
    val_synset: dict[str, str] = {}
    for name, content in members(paths, lambda name: "/test/" not in name):
        parts = name.split("/")
        if parts[-1] == "val_annotations.txt":
            with reading(name):
                lines = [line.split("\t") for line in content.decode().splitlines()]
                val_synset = {line[0]: line[1] for line in lines}
        elif _PICTURE.search(name) and "train" in parts and parts[-2] == "images":
            train[parts[-1]], synset[parts[-1]] = picture(content, name), parts[-3]
        elif _PICTURE.search(name) and "val" in parts:
            val[parts[-1]] = picture(content, name)
    number = {wnid: i for i, wnid in enumerate(sorted(set(synset.values())))}
    unknown = set(val_synset.values()) - number.keys()
    if unknown:
        raise UserError(f"{names_of(paths)} has no training pictures of {min(unknown)}: get it again")
    labels = {name: number[wnid] for name, wnid in synset.items()}
    val_labels = {name: number[wnid] for name, wnid in val_synset.items()}
    x, y = _rows(train, _by_label(labels), paths, "train")
    return split(x, y, *_rows(val, val_labels, paths, "validation"), entry.classes)


def read_mnist_m(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read mnist_m_train/*.png and mnist_m_test/*.png, with lines ``00000000.png 5`` in *_labels.txt."""
    found: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    labels: dict[str, dict[str, int]] = {"train": {}, "test": {}}
    for name, content in members(paths, lambda name: "mnist_m_" in name):
        part = "test" if "mnist_m_test" in name else "train"
        if name.endswith("_labels.txt"):
            with reading(name):
                lines = [line.split() for line in content.decode().splitlines() if line.strip()]
                labels[part] = {line[0]: int(line[1]) for line in lines}
        elif _PICTURE.search(name):
            found[part][name.rpartition("/")[2]] = picture(content, name)
    x, y = _rows(found["train"], labels["train"], paths, "train")
    return split(x, y, *_rows(found["test"], labels["test"], paths, "test"), entry.classes)


def read_synthetic_12k(paths: Sequence[Path], entry: Entry) -> Examples:
    """Read the 12,000 synthetic digits: one folder per digit, in imgs_train and imgs_valid; resized to 32x32."""
    found: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    labels: dict[str, dict[str, int]] = {"train": {}, "test": {}}
    for name, content in members(paths, lambda name: bool(_PICTURE.search(name))):
        parts = name.split("/")
        if len(parts) > 1 and parts[-2] in "0123456789":
            part = "test" if re.search("valid|test", "/".join(parts[:-2])) else "train"
            found[part][name], labels[part][name] = picture(content, name, 32), int(parts[-2])
    x, y = _rows(found["train"], _by_label(labels["train"]), paths, "train")
    return split(x, y, *_rows(found["test"], _by_label(labels["test"]), paths, "validation"), entry.classes)
