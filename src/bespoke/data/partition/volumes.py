"""Partitions that fix the number of rows per client: all equal, or by a power law."""

import numpy as np

from bespoke.data.partition.basic import Partition, check_clients, deal
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
    check_clients(len(labels), clients)
    first_rows = rows_per_class or 5
    classes, sizes = np.unique(labels, return_counts=True)
    if classes_per_client > len(classes):
        raise UserError(
            f"[data] classes_per_client is {classes_per_client}, but the data has {len(classes)} classes: lower it"
        )
    counts = np.zeros((len(classes), clients), dtype=np.int64)
    for j in range(classes_per_client):
        counts[(np.arange(clients) + j) % len(classes), np.arange(clients)] = first_rows
    for k, size in enumerate(sizes):
        owners = np.flatnonzero(counts[k])
        spare = size - first_rows * len(owners)
        if spare < 0:
            raise UserError(
                f"class {classes[k]} has {size} rows, but its {len(owners)} clients need {first_rows} each: "
                "lower [data] clients or rows_per_class"
            )
        share = rng.lognormal(0.0, 2.0, len(owners))
        counts[k, owners] += np.floor(share / share.sum() * spare).astype(np.int64) if len(owners) else 0
    return Partition(deal(labels, classes, counts, rng))
