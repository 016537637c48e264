"""Sets built from other sets: unions of digits from several domains, and wake-word tasks."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bespoke.data.examples import Examples
from bespoke.data.sources.entry import Builder

DIGIT5 = ("mnist", "svhn", "usps", "syn_digits", "mnist_m")
DIGITS4 = ("mnist", "usps", "svhn", "syn_digits_12k")
DIGITS2 = DIGITS4[:2]
SIDE = 32
TRAIN_ROWS = 7438  # of each domain of digit5: the train side of the smallest one


def resized(x: np.ndarray) -> np.ndarray:
    """Resize images uint8 (n, 1 or 3, H, W) bilinearly to colour (n, 3, 32, 32)."""
    from PIL import Image

    if x.shape[1:] == (3, SIDE, SIDE):
        return np.asarray(x)
    grey = x.shape[1] == 1
    out = np.empty((len(x), 3, SIDE, SIDE), np.uint8)
    for i, row in enumerate(x):
        image = Image.fromarray(row[0] if grey else np.ascontiguousarray(row.transpose(1, 2, 0)))
        small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        out[i] = small if grey else small.transpose(2, 0, 1)
    return out


def digit5(parts: Sequence[Examples]) -> Examples:
    """Build FedBN's files: the rows of :func:`fedbn_rows`, one domain after another."""
    chosen = [fedbn_rows(part.y) for part in parts]
    return _union(parts, DIGIT5, [rows for rows, _ in chosen], [held for _, held in chosen])


def fedbn_rows(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a stratified 80/20 split of a domain with labels y (N,): rows and test marks (n,), train rows first.

    The split is scikit-learn's ``StratifiedShuffleSplit(test_size=0.2, random_state=0)`` on the rows in the official
    order, with its first 7,438 train rows and all test rows.
    """
    from sklearn.model_selection import StratifiedShuffleSplit

    cut = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0)
    train, test = next(cut.split(np.zeros((len(y), 1)), y))
    train = train[:TRAIN_ROWS]
    return np.concatenate([train, test]), np.arange(len(train) + len(test)) >= len(train)


def every_row(names: Sequence[str]) -> Builder:
    """Return a builder that joins all rows of the sets, one set after another, each in its official order."""

    def build(parts: Sequence[Examples]) -> Examples:
        held = [part.official_test if part.official_test is not None else np.zeros(len(part.y), bool) for part in parts]
        return _union(parts, names, [np.arange(len(part.y)) for part in parts], held)

    return build


def _union(
    parts: Sequence[Examples], names: Sequence[str], rows: Sequence[np.ndarray], held: Sequence[np.ndarray]
) -> Examples:
    return Examples(
        x=np.concatenate([resized(part.x[own]) for part, own in zip(parts, rows, strict=True)]),
        y=np.concatenate([part.y[own] for part, own in zip(parts, rows, strict=True)]).astype(np.int64),
        num_classes=10,
        official_test=np.concatenate(held),
        domain=np.concatenate([np.full(len(own), i) for i, own in enumerate(rows)]),
        domain_names=tuple(names),
    )


def wake_word(label: int) -> Builder:
    """Return a builder of the task that separates one label (1) from all others (0)."""

    def build(parts: Sequence[Examples]) -> Examples:
        return replace(parts[0], y=(parts[0].y == label).astype(np.int64), num_classes=2)

    return build
