"""The content of a data set, independent of the order of its rows: hashes, canonical order, checks."""

import hashlib
from typing import NamedTuple

import numpy as np

from bespoke.data.examples import Examples
from bespoke.errors import UserError


class Hashes(NamedTuple):
    """SHA-256 of a data set in hexadecimal digits."""

    content: str  # independent of the order of the rows
    order: str  # the rows in their order


def hashes(examples: Examples) -> Hashes:
    """Return the hashes of a data set.

    A row's digest is the SHA-256 of its bytes (C order), its label as a little-endian int64 and, where the set has
    them, a zero byte and the name of the row's owner, and of its domain, in UTF-8. ``content`` is the SHA-256 of
    all digests, sorted and joined; ``order`` the same without sorting.
    """
    marks = [b""] * len(examples.y)
    for index, names in ((examples.owner, examples.owner_names), (examples.domain, examples.domain_names)):
        if index is not None:
            coded = [b"\0" + name.encode() for name in names]
            marks = [mark + coded[i] for mark, i in zip(marks, index.tolist(), strict=True)]
    labels = np.asarray(examples.y, "<i8")
    digests = []
    for row, label, mark in zip(examples.x, labels, marks, strict=True):
        digests.append(hashlib.sha256(row.tobytes() + label.tobytes() + mark).digest())
    return Hashes(_joined(sorted(digests)), _joined(digests))


def _joined(digests: list[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def sort_test_rows(examples: Examples) -> Examples:
    """Sort the rows of the official test set, in place, by label and then by the SHA-256 of the row's bytes."""
    assert examples.official_test is not None
    held = np.flatnonzero(examples.official_test)
    keys = [(int(examples.y[i]), hashlib.sha256(examples.x[i].tobytes()).digest()) for i in held]
    order = held[sorted(range(len(held)), key=keys.__getitem__)]
    examples.x[held], examples.y[held] = examples.x[order], examples.y[order]
    return examples


def split(xs: list[np.ndarray], ys: list[np.ndarray], num_classes: int, where: object) -> Examples:
    """Join official train rows and official test rows, in this order: x (n, ...) and y (n,) of each.

    The list ``xs`` is emptied on the way, so that no row is in memory twice.
    """
    for x, y in zip(xs, ys, strict=True):
        if y.shape != x.shape[:1] or y.dtype.kind not in "iu":
            raise UserError(f"{where} has images of shape {x.shape} with labels of shape {y.shape}: get it again")
    if xs[0].shape[1:] != xs[1].shape[1:]:
        raise UserError(f"{where} has rows of shape {xs[0].shape[1:]} and of shape {xs[1].shape[1:]}: get it again")
    held = np.arange(len(ys[0]) + len(ys[1])) >= len(ys[0])
    return Examples(join(xs), np.concatenate(ys).astype(np.int64), num_classes, official_test=held)


def join(parts: list[np.ndarray]) -> np.ndarray:
    """Return the rows of all parts (n, ...), which have one shape and type; the list is emptied on the way."""
    out = np.empty((sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].dtype)
    start = 0
    while parts:
        part = parts.pop(0)
        out[start : start + len(part)] = part
        start += len(part)
    return out


def channels_first(x: np.ndarray, shapes: tuple[tuple[int, ...], ...], what: str) -> np.ndarray:
    """Return rows (n, ...) in one of the shapes: add a missing channel, move channels from the end to the front."""
    for shape in shapes:
        if x.shape[1:] == shape:
            return x
        if len(shape) == 3 and shape[0] == 1 and x.shape[1:] == shape[1:]:
            return x[:, None]
        if len(shape) == 3 and x.shape[1:] == (*shape[1:], shape[0]):
            return np.ascontiguousarray(np.moveaxis(x, -1, 1))
    wanted = " or ".join(str(shape) for shape in shapes)
    raise UserError(f"a row of {what} has shape {x.shape[1:]}, but {wanted} is expected: it is another data set")
