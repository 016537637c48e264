"""What a data set provides: all its examples, and the facts about each row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bespoke.core.data import Transform
from bespoke.core.inputs import InputContract, as_array, as_reals
from bespoke.data.mapped import joined, mapping, pieces, stacked
from bespoke.errors import UserError


@dataclass(frozen=True)
class Examples:
    """All rows of a data set, in a fixed order, before they are spread over clients."""

    x: np.ndarray  # (N, ...) uint8, floating, or integer tokens
    y: np.ndarray  # (N,) integer labels in 0..num_classes-1; or (N,) or (N, T) numbers
    num_classes: int  # 0 where the targets are not classes
    official_test: np.ndarray | None = None  # (N,) bool: the rows of the official test set
    owner: np.ndarray | None = None  # (N,) int: position in owner_names of the row's own client
    owner_names: tuple[str, ...] = ()
    transform: Transform | None = None  # applied to every gathered batch
    domain: np.ndarray | None = None  # (N,) int: position in domain_names of the row's domain
    domain_names: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # for texts: the word that each token stands for
    contract: InputContract | None = None  # the names of features and classes, where the data gave any
    notes: tuple[str, ...] = ()  # what the record says of the data

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one example."""
        return self.x.shape[1:]


class ClientArrays(NamedTuple):
    """One client's own arrays; the test rows are None where the client brings none."""

    name: str
    where: str  # its name in error messages
    x: Any  # (n, ...)
    y: Any  # (n,), or (n, T)
    x_test: Any = None  # (m, ...)
    y_test: Any = None  # (m,), or (m, T)


def as_inputs(x: Any, where: str) -> np.ndarray:
    """Return examples (n, ...) as the nearest of uint8, float32, float64 and int64; refuse other types.

    Those that are memory-mapped stay so.
    """
    x = as_reals(x, f"x of {where}")
    targets: dict[str, Any] = {
        "f": np.float64 if x.dtype.itemsize >= 8 else np.float32,
        "b": np.float32,
        "i": np.int64,
    }
    targets["u"] = np.uint8 if x.dtype.itemsize == 1 else np.int64
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise UserError(f"x of {where} has shape {x.shape}: give (rows, features) or (rows, channels, height, width)")
    dtype = np.dtype(targets[x.dtype.kind])
    if x.dtype != dtype or not (x.flags.c_contiguous and x.flags.aligned):
        return stacked(pieces(x), x.shape, dtype, mapping(x) is not None)
    return x if mapping(x) is not None else np.require(x, requirements="W")


def as_labels(y: Any, where: str) -> np.ndarray:
    """Return labels (n,) as int64; refuse anything that is not an integer."""
    y = as_array(y, f"y of {where}")
    if y.ndim != 1:
        raise UserError(f"y of {where} has shape {y.shape}: give one class number per row, shape (rows,)")
    if len(y) and y.dtype.kind not in "iub":
        raise UserError(
            f"y of {where} holds {y.dtype} values: give class numbers 0, 1, ... of an integer type, "
            "or an objective without classes"
        )
    return y.astype(np.int64)


def as_targets(y: Any, where: str) -> np.ndarray:
    """Return numbers (n,) or (n, T) as float32 or float64, whichever is nearer."""
    y = as_reals(y, f"y of {where}")
    if y.ndim not in (1, 2) or 0 in y.shape[1:]:
        raise UserError(f"y of {where} has shape {y.shape}: give (rows,), or (rows, targets) for several targets")
    return np.require(y, np.float32 if y.dtype.itemsize < 4 or y.dtype == np.float32 else np.float64, ["C", "W"])


def join(
    clients: Sequence[ClientArrays],
    num_classes: int,
    test: float,
    rng: np.random.Generator,
    classes: bool | None = True,
) -> Examples:
    """Join the clients' own arrays, each row marked with its owner.

    Shapes and types must agree between clients. If any client brings its own test rows, a share ``test`` of the
    rows of every client that brings none is drawn as test rows; an empty ``x_test`` means a client without test
    rows. ``num_classes`` 0 means the largest label plus one. Targets that are not ``classes`` may be any numbers;
    with None the first client decides: its whole numbers are classes.
    """
    if classes is None:
        found = [as_array(c.y, f"y of {c.where}") for c in clients]
        like = next((y for y in found if y.size), np.zeros(1, np.int64))
        classes = like.dtype.kind in "iub" and like.ndim == 1
    as_y = as_labels if classes else as_targets
    xs: list[np.ndarray] = []
    ys: list[np.ndarray] = []
    owners, tests = [], []
    first = ""
    official = any(c.x_test is not None for c in clients)
    for i, client in enumerate(clients):
        if (client.x_test is None) != (client.y_test is None):
            raise UserError(f"{client.where} has only one of x_test and y_test: give both or neither")
        parts = [(client.x, client.y, "")] + [(client.x_test, client.y_test, "_test")] * (client.x_test is not None)
        for x, y, suffix in parts:
            where = client.where + (" (test rows)" if suffix else "")
            y = as_y(y, where)
            if not len(y) and not len(as_array(x, where)):
                continue  # an empty client may not even know its shape
            x = as_inputs(x, where)
            if len(x) != len(y):
                raise UserError(f"{where} has {len(x)} rows in x{suffix} and {len(y)} in y{suffix}: give equally many")
            if xs and (x.shape[1:], x.dtype) != (xs[0].shape[1:], xs[0].dtype):
                raise UserError(
                    f"examples of {where} are {x.dtype} of shape {x.shape[1:]}, those of {first} are "
                    f"{xs[0].dtype} of shape {xs[0].shape[1:]}: give all clients the same shape and type"
                )
            if ys and y.shape[1:] != ys[0].shape[1:]:
                raise UserError(
                    f"targets of {where} have shape {y.shape[1:]}, those of {first} {ys[0].shape[1:]}: "
                    "give all clients the same shape"
                )
            first = first or where
            held = np.full(len(y), bool(suffix))
            if official and client.x_test is None:
                held[rng.permutation(len(y))[train_count(len(y), test) :]] = True
            xs.append(x)
            ys.append(y)
            tests.append(held)
            owners.append(np.full(len(y), i))
    if not xs:
        raise UserError(f"none of the {len(clients)} clients has any rows: give at least one client some data")
    y = np.concatenate(ys)
    return Examples(
        x=joined(xs),
        y=y,
        num_classes=(num_classes or _count_classes(y)) if classes else 0,
        official_test=np.concatenate(tests) if official else None,
        owner=np.concatenate(owners),
        owner_names=tuple(c.name for c in clients),
    )


def _count_classes(y: np.ndarray) -> int:
    found = max(1, int(y.max()) + 1)
    if found > max(1000, len(y)):  # numbers with such gaps are identifiers, not classes
        raise UserError(
            f"the largest label is {found - 1} with {len(y)} rows in all: number the classes 0, 1, ... "
            "without gaps, or give num_classes"
        )
    return found


def share_of(share: float, n: int) -> int:
    """Return floor(share * n), safe against a product such as 0.29 * 100 = 28.999..."""
    return int(share * n + 1e-9)


def train_count(n: int, test: float) -> int:
    """Return how many of n rows are for training: floor((1 - test) * n), but at least one."""
    return min(n, max(1, share_of(1.0 - test, n)))
