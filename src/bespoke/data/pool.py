"""The federation's pool: each client's rows, split into train, validation and test, and checked."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bespoke.core import rng as streams
from bespoke.core import tree
from bespoke.core.data import FederatedData, Rows, Transform
from bespoke.core.inputs import InputContract
from bespoke.core.tree import Tree
from bespoke.data.examples import as_inputs, as_labels, as_targets, share_of, train_count
from bespoke.data.mapped import pieces
from bespoke.data.settings import DataSettings
from bespoke.errors import UserError

# One generator for each purpose, so that no purpose can disturb another.
LOAD, PARTITION, TEST, KEEP, VALIDATION, SUBSAMPLE, DEGRADE = range(7)

_LARGEST = np.finfo(np.float32).max

Lists = Sequence[np.ndarray]


def generator(seed: int, purpose: int) -> np.random.Generator:
    """Return the generator for one purpose of the data stream: equal seeds give every method equal federations."""
    return np.random.default_rng(np.random.SeedSequence(seed % 2**64, spawn_key=(streams.DATA, purpose)))


def cut(lists: Lists, settings: DataSettings, seed: int, test_lists: Lists | None = None) -> tuple[Lists, Lists, Lists]:
    """Split the rows ``lists`` of each client into train, test and validation rows.

    Of n rows floor((1 - test) n) are for training, drawn regardless of class; a client with one row trains on
    it. With ``folds`` the shuffled rows are cut into that many nearly equal parts, and part ``fold`` is the test
    rows. ``test_lists`` gives the test rows instead, and all of ``lists`` are for training. Of n train rows of the
    clients that keep_clients names floor(keep n), at least one and at most keep_rows, are kept; of n kept rows
    floor(validation n) are set aside.
    """
    train, held, val = [], [], []
    test_rng, keep_rng, val_rng = (generator(seed, purpose) for purpose in (TEST, KEEP, VALIDATION))
    first_new = len(lists) - settings.new_clients
    for i, rows in enumerate(lists):
        if test_lists is not None:
            own, apart = rows, test_lists[i]
        elif settings.folds and len(rows) > 1:
            parts = np.array_split(test_rng.permutation(len(rows)), settings.folds)
            apart = rows[np.sort(parts.pop(settings.fold))]
            own = rows[np.sort(np.concatenate(parts))]
        else:
            own, apart = _draw(rows, train_count(len(rows), settings.test), test_rng)
        kept = max(1, share_of(settings.keep, len(own)))
        kept = min(kept, settings.keep_rows or kept)
        spared = {"all": False, "new": i < first_new, "train": i >= first_new}[settings.keep_clients]
        if kept < len(own) and not spared:
            own, _ = _draw(own, kept, keep_rng)
        aside, own = _draw(own, share_of(settings.validation, len(own)), val_rng) if settings.validation else ([], own)
        val.append(np.asarray(aside, dtype=np.int64))
        train.append(own)
        held.append(apart)
    return train, held, val


def _draw(rows: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``count`` rows without replacement; return them and the others, both ascending."""
    order = rng.permutation(len(rows))
    return rows[np.sort(order[:count])], rows[np.sort(order[count:])]


def _as_tensor(values: np.ndarray) -> torch.Tensor:
    """Return a tensor of the same memory, which may be a file's and read-only: nobody writes to a pool."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(values)


def pool_of(
    x: Any,
    y: Any,
    train: Lists,
    test: Lists,
    val: Lists,
    *,
    num_classes: int,
    names: Sequence[str] | None = None,
    new_clients: int = 0,
    transform: Transform | None = None,
    extra: Tree | None = None,
    skip_empty: bool = False,
    contract: InputContract | None = None,
    notes: Sequence[str] = (),
) -> FederatedData:
    """Return the federation's pool; report anything wrong with the examples in one sentence.

    ``x`` (N, ...) and ``y`` (N,) hold all examples, ``train``, ``test`` and ``val`` each client's rows of
    them. ``y`` holds class numbers or, where ``num_classes`` is 0, any numbers (N,) or (N, T). The last
    ``new_clients`` appear only in evaluation. ``extra`` holds each client's constants for the ``transform``,
    leaves (clients, ...). ``contract`` and ``notes`` are kept as they are. A client without train rows is refused by
    name, or left out with ``skip_empty``.
    """
    if not train:
        raise UserError("there are no clients: give at least one")
    names = tuple(names) if names is not None else tuple(str(i) for i in range(len(train)))
    if not 0 <= new_clients < len(train):
        raise UserError(f"{new_clients} of {len(train)} clients cannot be new: at least one must take part in training")
    x, y = as_inputs(x, "the data"), (as_labels if num_classes else as_targets)(y, "the data")
    if len(x) != len(y):
        raise UserError(f"the data has {len(x)} rows in x and {len(y)} in y: give equally many")

    def holder(row: int) -> str:
        for i, name in enumerate(names):
            if any(row in rows[i] for rows in (train, test, val)):
                return f"client {name!r}"
        return f"row {row} of the data"

    outside = np.flatnonzero((y < 0) | (y >= num_classes)) if num_classes else np.empty(0, np.int64)
    if len(outside):
        raise UserError(
            f"{holder(outside[0])} has the label {y[outside[0]]}, outside 0..{num_classes - 1}: "
            "number the classes from 0 and give the right num_classes"
        )
    for name, values in (("x", x), ("y", y)):
        if values.dtype.kind != "f":
            continue
        parts = [(np.abs(piece) <= _LARGEST).reshape(len(piece), -1).all(axis=1) for piece in pieces(values)]
        sound = np.concatenate([np.ones(0, bool), *parts])
        if not sound.all():
            raise UserError(
                f"{holder(int(np.argmin(sound)))} has NaN, infinity or a number beyond float32 in {name}: "
                "fix or remove such rows"
            )
    keep = [i for i, rows in enumerate(train) if len(rows)]
    if len(keep) < len(train) and not skip_empty:
        empty = min(set(range(len(train))) - set(keep))
        raise UserError(f"client {names[empty]!r} has no training rows: give it some, or set skip_empty = true")
    training = sum(i < len(train) - new_clients for i in keep)
    if not training:
        raise UserError("no client of the training population has any training rows: give at least one some data")
    return FederatedData(
        x=_as_tensor(x),
        y=_as_tensor(y),
        train=Rows.of([train[i] for i in keep]),
        test=Rows.of([test[i] for i in keep]),
        val=Rows.of([val[i] for i in keep]),
        num_classes=num_classes,
        num_clients=training,
        names=tuple(names[i] for i in keep),
        extra=tree.map(lambda leaf: leaf if len(keep) == len(train) else leaf[keep], extra or {}),
        transform=transform,
        contract=contract,
        notes=tuple(notes),
    )
