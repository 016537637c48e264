"""Partitions that fix the number of rows per client: all equal, by a power law, or as two papers' scripts draw them."""

import random

import numpy as np

from bespoke.data.partition.basic import Partition, check_classes, check_clients, deal
from bespoke.errors import UserError

MISSES = 1000  # draws of exhausted classes before the shares are redrawn
MAX_REDRAWS = 1000


def equal_dirichlet(labels: np.ndarray, rng: np.random.Generator, clients: int, alpha: float, volume: int) -> Partition:
    """Give each client volume rows, with its own class shares from Dir(alpha).

    The shares q ~ Dir(alpha, ..., alpha) are over the classes of ``labels`` (N,). Rows are drawn one at a time without
    replacement, for a client drawn at random among those that still need some: a class from q, and another if that one
    has run out. After 1,000 such misses for one row the shares of all clients are redrawn; the volume stays.
    """
    check_clients(len(labels), clients)
    if clients * volume > len(labels):
        raise UserError(
            f"{clients} clients with {volume} rows each need more than the {len(labels)} rows there are: "
            "lower [data] volume or clients"
        )
    classes, sizes = np.unique(labels, return_counts=True)
    for attempt in range(1, MAX_REDRAWS + 1):
        counts = _equal_counts(rng, sizes, clients, alpha, volume)
        if counts is not None:
            return Partition(deal(labels, classes, counts, rng), attempt)
    raise UserError(
        f"{MAX_REDRAWS:,} draws of Dir({alpha:g}) never left {clients} clients {volume} rows each of their "
        "own classes: lower [data] volume or clients, or raise alpha"
    )


def _equal_counts(
    rng: np.random.Generator, sizes: np.ndarray, clients: int, alpha: float, volume: int
) -> np.ndarray | None:
    """Draw the rows of each class on each client: int64 (classes, clients), or None if the classes run out."""
    bounds = rng.dirichlet(np.full(len(sizes), alpha), clients).cumsum(axis=1)
    bounds /= bounds[:, -1:]
    left, counts = sizes.copy(), np.zeros((len(sizes), clients), dtype=np.int64)
    waiting, missing = list(range(clients)), [volume] * clients
    visits, picks = rng.random(clients * volume), rng.random(clients * volume)
    for visit, pick in zip(visits, picks, strict=True):
        place = int(visit * len(waiting))
        client = waiting[place]
        k = int(np.searchsorted(bounds[client], pick, side="right"))
        if not left[k]:
            again = np.searchsorted(bounds[client], rng.random(MISSES - 1), side="right")
            open_ = np.flatnonzero(left[again])
            if not len(open_):
                return None
            k = int(again[open_[0]])
        left[k] -= 1
        counts[k, client] += 1
        missing[client] -= 1
        if not missing[client]:
            waiting.pop(place)
    return counts


def power_law(
    labels: np.ndarray, rng: np.random.Generator, clients: int, classes_per_client: int = 2, rows_per_class: int = 0
) -> Partition:
    """Give each client classes_per_client classes, with power-law numbers of rows.

    Client u has the classes u, u+1, ... (mod C) of ``labels`` (N,). It gets ``rows_per_class`` rows of each of them, 5
    if that is 0; the rest of a class is shared by its clients in proportion to lognormal(0, 2) draws, rounded down
    (FedProx: MNIST, 1,000 clients).
    """
    first = rows_per_class or 5
    classes, sizes, counts = _neighbours(labels, clients, classes_per_client, first, "rows_per_class")
    for k, size in enumerate(sizes):
        owners = np.flatnonzero(counts[k])
        share = rng.lognormal(0.0, 2.0, len(owners))
        spare = size - first * len(owners)
        counts[k, owners] += np.floor(share / share.sum() * spare).astype(np.int64) if len(owners) else 0
    return Partition(deal(labels, classes, counts, rng))


def letters(labels: np.ndarray, rng: np.random.Generator, clients: int, classes_per_client: int = 2) -> Partition:
    """Give each client as many rows of each of classes_per_client classes, with lognormal numbers of rows.

    FedProx's script for FEMNIST's letters a to j (200 clients). Client u has the classes u, u+1, ... (mod C) of
    ``labels`` (N,) and lognormal(4, 1) + 5 rows, divided by its classes and rounded down, but at least 2 of each. The
    script deals the same first rows to many clients, so that a client's train rows are test rows of others; here every
    row goes to one client at most. Where a class has too few rows, its clients get fewer beyond the 2, in proportion.
    """
    classes, sizes, counts = _neighbours(labels, clients, classes_per_client, 2, "classes_per_client")
    volumes = rng.lognormal(4.0, 1.0, clients) + 5.0
    beyond = np.maximum(0, (volumes / classes_per_client).astype(np.int64) - 2) * (counts > 0)  # (classes, clients)
    spare, wanted = (sizes - counts.sum(axis=1))[:, None], np.maximum(1, beyond.sum(axis=1))[:, None]
    return Partition(deal(labels, classes, counts + beyond * np.minimum(spare, wanted) // wanted, rng))


def pfedme(
    labels: np.ndarray, rng: np.random.Generator, clients: int, classes_per_client: int = 2, replay: int = 0
) -> Partition:
    """Give each client classes_per_client classes, with the numbers of rows of pFedMe's CIFAR-10.

    Client u has the classes u, u+1, ... (mod C) of ``labels`` (N,) and 10 rows of each. Then client by client and class
    by class it gets more: of the n_k - M rows of a class a share from lognormal(0, 2) draws, plus 300 to 600; with at
    most 20 clients twice that; nothing if the class would run out. ``replay`` is the seed of the legacy generators of
    pFedMe's script, which takes rows in their order: 1 gives its own federation, whatever ``rng`` is.
    """
    classes, sizes, _ = _neighbours(labels, clients, classes_per_client, 10, "classes_per_client")
    rows = [np.flatnonzero(labels == label) for label in classes]
    draws: np.random.RandomState | np.random.Generator = rng
    if replay:
        draws, python = np.random.RandomState(replay), random.Random(replay)
    else:
        rows, python = [rng.permutation(own) for own in rows], random.Random(int(rng.integers(2**32)))
    share = draws.lognormal(0.0, 2.0, (len(classes), clients, classes_per_client))
    share = np.maximum(0, sizes - clients)[:, None, None] * share / share.sum(axis=(1, 2), keepdims=True)
    hands: list[list[np.ndarray]] = [[] for _ in range(clients)]
    taken = np.zeros(len(classes), dtype=np.int64)

    def take(client: int, k: int, count: int) -> None:
        hands[client].append(rows[k][taken[k] : taken[k] + count])
        taken[k] += count

    turns = [(u, j, (u + j) % len(classes)) for u in range(clients) for j in range(classes_per_client)]
    for u, _, k in turns:
        take(u, k, 10)
    for u, j, k in turns:
        more = int(share[k, u // max(1, clients // len(classes)), j]) + python.randint(300, 600)
        more *= 2 if clients <= 20 else 1
        if taken[k] + more < sizes[k]:
            take(u, k, more)
    return Partition([np.sort(np.concatenate(hand)) for hand in hands])


def _neighbours(
    labels: np.ndarray, clients: int, classes_per_client: int, first: int, lower: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the classes (C,), their rows (C,), and ``first`` rows of the classes u, u+1, ... (mod C) for client u.

    The last is int64 (C, clients). If a class has fewer rows, the error says to ``lower`` that setting or clients.
    """
    check_clients(len(labels), clients)
    classes, sizes = np.unique(labels, return_counts=True)
    check_classes(classes_per_client, len(classes))
    counts = np.zeros((len(classes), clients), dtype=np.int64)
    for j in range(classes_per_client):
        counts[(np.arange(clients) + j) % len(classes), np.arange(clients)] = first
    short = np.flatnonzero(counts.sum(axis=1) > sizes)
    if len(short):
        k = short[0]
        raise UserError(
            f"class {classes[k]} has {sizes[k]} rows, but its {np.count_nonzero(counts[k])} clients need {first} each: "
            f"lower [data] clients or {lower}"
        )
    return classes, sizes, counts
