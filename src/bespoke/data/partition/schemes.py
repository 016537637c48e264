"""The table of partitions: the names for ``[data] partition``.

A partition is a function that receives its arguments by name: the facts about the rows, ``rng``, and keys of the
``[data]`` table, where ``clients`` is the actual number of clients, never 0.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bespoke.data.partition import basic, groups, volumes
from bespoke.data.partition.basic import Partition
from bespoke.data.partition.replay import replay as replayed
from bespoke.data.settings import DataSettings
from bespoke.errors import UserError
from bespoke.registry import Function, Registry, function


class Known(NamedTuple):
    """The facts about each of the N rows that become clients."""

    labels: np.ndarray  # (N,) int64
    owners: np.ndarray | None = None  # (N,) int: the row's own client
    domains: np.ndarray | None = None  # (N,) int: position in domain_names
    domain_names: tuple[str, ...] = ()
    official: np.ndarray | None = None  # (N,) bool: official test rows that were merged with the others


def dirichlet(
    labels: np.ndarray,
    rng: np.random.Generator,
    clients: int,
    alpha: float,
    min_rows: int,
    balance: bool,
    replay: int,
    test: float,
    keep: float,
) -> Partition:
    """Spread each class over the clients by shares from Dir(alpha)."""
    if replay:
        return replayed(labels, replay, clients, alpha, min_rows, test, keep)
    return basic.dirichlet(labels, rng, clients, alpha, min_rows, balance)


KEYS = tuple(field.name for field in dataclasses.fields(DataSettings))


def _partition(thing: Any, where: str) -> Function:
    return function(thing, (*Known._fields, "rng", "settings"), "data", KEYS, where)


_SHIPPED = (
    basic.iid,
    dirichlet,
    volumes.equal_dirichlet,
    basic.pathological,
    volumes.power_law,
    volumes.letters,
    volumes.pfedme,
    groups.domain,
    groups.degradations,
    basic.natural,
    basic.owner_groups,
)

PARTITIONS: Registry[Function] = Registry(
    "partition",
    {rule.__name__: _partition(rule, rule.__name__) for rule in _SHIPPED},
    _partition,
    "bespoke.partitions",
    reserved=("auto",),
)


def register_partition(name: str, split: Callable[..., Any]) -> None:
    """Add your own partition under a name for ``[data] partition``.

    The parameters of ``split`` may be ``labels`` (N,), ``rng`` (a NumPy generator), ``owners``, ``domains`` and
    ``domain_names`` where the data set has them, and any key of ``[data]``, such as ``clients`` and ``alpha``. It
    returns one array of row numbers per client. Registering your own name again replaces it.
    """
    PARTITIONS.register(name, split, "register_partition")


def split_rows(known: Known, settings: DataSettings, rng: np.random.Generator, own_number: bool) -> Partition:
    """Divide the rows among clients by the partition that the settings name.

    With ``own_number`` the settings give no number of clients, so a user's partition may choose it.
    """
    offered = known._asdict() | {"rng": rng, "settings": settings} | vars(settings)
    found = PARTITIONS.find(settings.partition, "[data] partition")(offered)
    if settings.partition in PARTITIONS.shipped:
        return found
    where = f"the partition {settings.partition}"
    if not isinstance(found, Partition):
        found = Partition(_row_lists(found, where))
    _check(found.lists, len(known.labels), where)
    if found.conditions and len(found.conditions) != len(found.lists):
        raise UserError(
            f"{where} names {len(found.conditions)} conditions for {len(found.lists)} clients: name one for each"
        )
    if len(found.lists) != settings.clients and not own_number:
        raise UserError(
            f"{where} makes {len(found.lists)} clients, but [data] clients is {settings.clients}: "
            "leave that out, or use it in the partition"
        )
    return found


def _row_lists(found: Any, where: str) -> list[np.ndarray]:
    """Turn what a user's partition returned into one ascending array of row numbers per client."""
    if not isinstance(found, Sequence):
        raise UserError(
            f"{where} returns an object of type {type(found).__name__}: return a list with one array of rows per client"
        )
    lists = [np.asarray(rows) for rows in found]
    for i, rows in enumerate(lists):
        if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
            raise UserError(f"{where} gives client {i} {rows.dtype} of shape {rows.shape}: return row numbers, (n,)")
    return [np.sort(rows).astype(np.int64) for rows in lists]


def _check(lists: Sequence[np.ndarray], total: int, where: str) -> None:
    """Refuse rows that do not exist, or that two clients hold."""
    rows = np.concatenate([*lists, np.empty(0, np.int64)])
    if len(rows) and (rows.min() < 0 or rows.max() >= total):
        raise UserError(f"{where} gives rows {rows.min()} to {rows.max()}, but the data set has 0 to {total - 1}")
    values, counts = np.unique(rows, return_counts=True)
    if len(values) < len(rows):
        raise UserError(f"{where} gives row {values[counts > 1][0]} out twice: give each row to at most one client")
