"""How rows become clients: pure functions of the labels and a generator.

Each returns a :class:`Partition`: one ascending array of row numbers per client, disjoint.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bespoke.errors import UserError

MAX_TRIES = 100_000
_DRAWS_AT_ONCE = 2**22  # numbers in the largest array of a batch of tries


class Partition(NamedTuple):
    """The rows of each client, the number of draws, and what else a scheme decides about its clients."""

    lists: list[np.ndarray]  # int64 (n_i,) per client
    tries: int = 1
    test: list[np.ndarray] | None = None  # the test rows among ``lists``, where the scheme splits as well,
    train: list[np.ndarray] | None = None  # and the train rows
    kinds: tuple[str, ...] = ()  # each client's group, such as its domain
    ranks: tuple[int, ...] = ()  # and its number within the group
    conditions: tuple[str, ...] = ()  # each client's corruption, degradation or domain; empty = nobody has any

    def names(self) -> tuple[str, ...] | None:
        """Return the clients' names, where they belong to groups: ``mnist-0``, ``mnist-1``, ..."""
        return tuple(f"{kind}-{rank}" for kind, rank in zip(self.kinds, self.ranks, strict=True)) or None

    def hash(self) -> str:
        """Return 16 digits that identify a partition: the clients' rows and, where it is known, their split."""
        digest = hashlib.sha256()
        for rows in (*self.lists, *(self.test or ()), *(self.train or ())):
            digest.update(len(rows).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(rows, dtype="<i8").tobytes())
        return digest.hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Return the partition's part of a run's record."""
        told: dict[str, Any] = {"partition": self.hash(), "tries": self.tries}
        return told | ({"conditions": list(self.conditions)} if self.conditions else {})


def iid(labels: np.ndarray, rng: np.random.Generator, clients: int) -> Partition:
    """Shuffle all rows and cut them into equal parts.

    Only the number of ``labels`` (N,) matters; sizes differ by at most one.
    """
    check_clients(len(labels), clients)
    return Partition([np.sort(rows) for rows in np.array_split(rng.permutation(len(labels)), clients)])


def dirichlet(
    labels: np.ndarray,
    rng: np.random.Generator,
    clients: int,
    alpha: float,
    min_rows: int = 1,
    balance: bool = True,
) -> Partition:
    """Spread each class of ``labels`` (N,) over the M clients by shares p ~ Dir(alpha, ..., alpha).

    With ``balance`` a client that already holds N/M rows or more gets p = 0 and the others' shares are
    scaled up. The n_k rows of a class are cut at floor(cumsum(p) n_k), and the last client takes the
    rest. Everything is redrawn until every client has ``min_rows`` rows. Counts depend on the labels
    only through n_k, so they are drawn for many tries at once, and rows are dealt only for the accepted
    try.
    """
    if not alpha > 0:
        raise UserError(f"[data] alpha must be greater than 0, not {alpha!r}")
    check_clients(len(labels), clients, min_rows)
    classes, sizes = np.unique(labels, return_counts=True)
    largest = max(1, _DRAWS_AT_ONCE // (len(sizes) * clients))
    done, batch = 0, min(4, largest)
    while done < MAX_TRIES:
        batch = min(batch, largest, MAX_TRIES - done)
        counts = dirichlet_counts(rng, sizes, clients, alpha, balance, batch)
        accepted = np.flatnonzero(counts.sum(axis=1).min(axis=1) >= min_rows)
        if len(accepted):
            lists = deal(labels, classes, counts[accepted[0]], rng)
            return Partition(lists, done + int(accepted[0]) + 1)
        done += batch
        batch *= 2
    raise UserError(
        f"{MAX_TRIES:,} draws of Dir({alpha:g}) over {clients} clients never gave each of them {min_rows} "
        "rows: raise [data] alpha, or lower clients or min_rows"
    )


def dirichlet_counts(
    rng: np.random.Generator, sizes: np.ndarray, clients: int, alpha: float, balance: bool, tries: int
) -> np.ndarray:
    """Draw the rows of each class on each client in independent tries: int64 (tries, classes, clients).

    ``sizes`` (classes,) are the rows n_k of each class. Dirichlet shares are normalised gamma draws; they
    are drawn as logarithms, because for a small alpha the draws themselves would underflow to zero.
    """
    counts = np.empty((tries, len(sizes), clients), dtype=np.int64)
    held = np.zeros((tries, clients), dtype=np.int64)
    even = sizes.sum() / clients
    for k, size in enumerate(sizes):
        logs = np.log(rng.standard_gamma(alpha + 1.0, held.shape)) - rng.standard_exponential(held.shape) / alpha
        if balance:
            logs[held >= even] = -np.inf  # never all clients: a class is still to come
        cuts = np.exp(logs - logs.max(axis=1, keepdims=True)).cumsum(axis=1)
        cuts = np.floor(cuts / cuts[:, -1:] * size).astype(np.int64)
        counts[:, k] = np.diff(cuts, axis=1, prepend=0)
        held += counts[:, k]
    return counts


def pathological(
    labels: np.ndarray,
    rng: np.random.Generator,
    clients: int,
    classes_per_client: int,
    rows_per_class: int = 0,
    class_draw: str = "even",
) -> Partition:
    """Give each client classes_per_client distinct classes.

    ``labels`` are (N,). With an ``even`` draw every class goes to equally many clients, give or take one; with an
    ``independent`` draw each client draws its own classes. With ``rows_per_class`` a client has this many rows of each
    of its classes and the rest is left out; with 0 the rows of a class are split evenly among its clients. Classes that
    no client drew are left out.
    """
    check_clients(len(labels), clients)
    classes, sizes = np.unique(labels, return_counts=True)
    check_classes(classes_per_client, len(classes))
    counts = np.zeros((len(classes), clients), dtype=np.int64)
    free = np.full(len(classes), clients * classes_per_client // len(classes))
    free[rng.permutation(len(classes))[: clients * classes_per_client % len(classes)]] += 1
    for client in rng.permutation(clients):
        # The classes with the most slots left, at random among equals: this order never reaches a dead end.
        own = np.lexsort((rng.random(len(classes)), -free if class_draw == "even" else 0 * free))[:classes_per_client]
        free[own] -= 1
        counts[own, client] = 1
    takers_of = counts.sum(axis=1)
    needed = takers_of * max(1, rows_per_class)
    if (needed > sizes).any():
        k = int(np.argmax(needed - sizes))
        raise UserError(
            f"class {classes[k]} has {sizes[k]} rows, but its {takers_of[k]} clients need {needed[k]}: "
            "lower [data] clients, classes_per_client or rows_per_class"
        )
    for k, size in enumerate(sizes):
        takers = np.flatnonzero(counts[k])
        if rows_per_class:
            counts[k, takers] = rows_per_class
        elif len(takers):
            counts[k, takers] = size // len(takers)
            counts[k, rng.permutation(takers)[: size % len(takers)]] += 1
    return Partition(deal(labels, classes, counts, rng))


def natural(owners: np.ndarray | None, clients: int) -> Partition:
    """Keep the data set's own clients.

    These are the first ``clients`` clients, by the ``owners`` (N,) of the rows: 0, 1, ...
    """
    if owners is None:
        raise UserError(
            "the data set has no clients of its own: set [data] partition to iid, dirichlet or pathological"
        )
    return Partition([np.flatnonzero(owners == i) for i in range(clients)])


def owner_groups(owners: np.ndarray | None, clients: int) -> Partition:
    """Join the data set's own clients, in their order, into groups of equally many, give or take one.

    ``owners`` (N,) are the own clients of the rows: 0, 1, ...
    """
    if owners is None:
        raise UserError(
            'the data set has no clients of its own to join: set [data] partition to another, such as "iid"'
        )
    people = np.unique(owners)
    if clients > len(people):
        raise UserError(f"{clients} groups are more than the data set's {len(people)} clients: lower [data] clients")
    return Partition([np.flatnonzero(np.isin(owners, group)) for group in np.array_split(people, clients)])


def follow(
    labels: np.ndarray, lists: Sequence[np.ndarray], others: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Deal out other rows in the proportions of a partition: positions in ``others`` (R,) for each client.

    A client that holds a share s of a class in ``lists`` (rows of ``labels`` (N,)) gets the share s of that class in
    ``others``, up to rounding. Rows of a class that no client holds are left out.
    """
    classes = np.unique(others)
    counts = np.zeros((len(classes), len(lists)), dtype=np.int64)
    for k, label in enumerate(classes):
        held = np.array([np.count_nonzero(labels[rows] == label) for rows in lists])
        if held.any():
            counts[k] = np.diff(held.cumsum() * np.count_nonzero(others == label) // held.sum(), prepend=0)
    return deal(others, classes, counts, rng)


def deal(labels: np.ndarray, classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle the rows of each class and deal out ``counts`` (classes, clients) of them."""
    hands: list[list[np.ndarray]] = [[] for _ in range(counts.shape[1])]
    for label, count in zip(classes, counts, strict=True):
        rows = rng.permutation(np.flatnonzero(labels == label))
        for hand, own in zip(hands, np.split(rows[: count.sum()], count.cumsum()[:-1]), strict=True):
            hand.append(own)
    return [np.sort(np.concatenate(hand)) for hand in hands]


def check_clients(rows: int, clients: int, min_rows: int = 1) -> None:
    """Refuse a number of clients that is below one, or for whom there are not enough rows."""
    if clients < 1:
        raise UserError(f"[data] clients is {clients}: give at least one")
    if clients > rows:
        raise UserError(f"{clients} clients are more than the {rows} rows there are: lower [data] clients")
    if clients * min_rows > rows:
        raise UserError(
            f"{clients} clients with at least {min_rows} rows each need more than the {rows} rows there are: "
            "lower [data] min_rows or clients"
        )


def check_classes(classes_per_client: int, classes: int) -> None:
    """Refuse more classes per client than the data have."""
    if classes_per_client > classes:
        raise UserError(
            f"[data] classes_per_client is {classes_per_client}, but the data has {classes} classes: lower it"
        )
