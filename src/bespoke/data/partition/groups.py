"""Partitions whose clients belong to groups: domains, and FedPCE's three kinds of degradation."""

from collections.abc import Sequence

import numpy as np

from bespoke.data.partition.basic import MAX_TRIES, Partition, check_clients, deal, dirichlet, dirichlet_counts, iid
from bespoke.errors import UserError

KINDS = ("noise", "jitter", "imbalance")
LOW_ALPHA, HIGH_ALPHA = 0.1, 10.0  # of the imbalance pairs, on a logarithmic scale


def domain(
    labels: np.ndarray,
    domains: np.ndarray | None,
    domain_names: Sequence[str],
    rng: np.random.Generator,
    clients: int,
    new_clients: int = 0,
    alpha: float = 0.5,
    min_rows: int = 1,
    balance: bool = True,
    inside: str = "dirichlet",
    new_draw: str = "seed",
) -> Partition:
    """Make equally many clients from each domain of the data set.

    ``domains`` (N,) holds positions in ``domain_names``; no client is in two domains. The rows of a domain become
    clients by Dir(``alpha``) or in equal parts (``inside`` = iid). New clients are drawn at random, equally many from
    each domain, and come last; with ``new_draw`` = code by the rule of FedPCE's later code.
    """
    if domains is None:
        raise UserError('the data set has no domains: set [data] partition to another scheme, such as "dirichlet"')
    each = _per_group(clients, new_clients, len(domain_names), f"{len(domain_names)} domains")
    lists: list[np.ndarray] = []
    tries = 0
    for d in range(len(domain_names)):
        rows = np.flatnonzero(domains == d)
        if inside == "iid":
            found = iid(labels[rows], rng, each)
        else:
            found = dirichlet(labels[rows], rng, each, alpha, min_rows, balance)
        lists += [rows[part] for part in found.lists]
        tries = max(tries, found.tries)
    return _grouped(lists, domain_names, each, new_clients, tries, rng, new_draw)


def degradations(
    labels: np.ndarray,
    rng: np.random.Generator,
    clients: int,
    new_clients: int = 0,
    min_rows: int = 10,
    balance: bool = True,
    official: np.ndarray | None = None,
    new_draw: str = "seed",
) -> Partition:
    """Make a third of the clients each for noise and jitter (even classes) and imbalance (unequal classes).

    These are FedPCE's 2M noise clients, 2M jitter clients, and M pairs of clients with unequal classes. A noise or
    jitter client gets an even share of every class of ``labels`` (N,). A pair shares twice as much, class by class by a
    two-dimensional Dir(alpha), alpha from 0.1 to 10 over the pairs, with the balance rule and redrawn until both have
    ``min_rows`` rows. ``official`` (N,) marks official test rows: they are spread in the same proportions as the train
    rows, and the rules apply to each part separately. New clients are drawn at random, equally many of each kind, and
    come last; with ``new_draw`` = code by the rule of FedPCE's later code.
    """
    check_clients(len(labels), clients, min_rows)
    each = _per_group(clients, new_clients, len(KINDS), "three degradations")
    if each % 2:
        raise UserError(f"{clients} clients cannot be split into thirds of pairs: make [data] clients a multiple of 6")
    if official is None:
        official = np.zeros(len(labels), dtype=bool)
    num_classes = int(labels.max()) + 1
    stratum = labels * 2 + official  # a class of the official train or test rows
    sizes = np.bincount(stratum, minlength=2 * num_classes).reshape(num_classes, 2)
    share = np.full((num_classes, clients), 1.0 / clients)
    tries = 0
    for pair, alpha in enumerate(alphas(each)[::2]):
        first = 2 * each + 2 * pair
        split, used = _split_pair(rng, sizes * 2 / clients, alpha, min_rows, balance)
        share[:, first : first + 2] = split * 2 / clients
        tries = max(tries, used)
    cuts = np.zeros((num_classes, 2, clients + 1))
    cuts[:, :, 1:] = share.cumsum(axis=1)[:, None] * sizes[:, :, None]
    cuts[:, :, -1] = sizes
    # A random offset rounds each cut without bias: no client gains a row in every class.
    counts = np.diff(np.floor(cuts + rng.random((num_classes, 2, 1))).astype(np.int64), axis=2)
    present = np.flatnonzero(sizes.reshape(-1))
    lists = deal(stratum, present, counts.reshape(2 * num_classes, clients)[present], rng)
    return _grouped(lists, KINDS, each, new_clients, tries, rng, new_draw)


def alphas(each: int) -> np.ndarray:
    """Return the Dirichlet parameter of each of the imbalance clients, in their order: (each,), equal in a pair."""
    return np.repeat(np.geomspace(LOW_ALPHA, HIGH_ALPHA, each // 2), 2)


def _split_pair(
    rng: np.random.Generator, sizes: np.ndarray, alpha: float, min_rows: int, balance: bool
) -> tuple[np.ndarray, int]:
    """Draw the shares (classes, 2) of a pair with ``sizes`` (classes, 2) train and test rows; also return the tries."""
    train = np.maximum(1, np.round(sizes[:, 0])).astype(np.int64)
    parts = sizes.sum(axis=0) > 0  # without official marks there is only one part
    for attempt in range(1, MAX_TRIES + 1):
        split = dirichlet_counts(rng, train, 2, alpha, balance, 1)[0] / train[:, None]
        if ((split.T @ sizes)[:, parts] >= min_rows).all():
            return split, attempt
    raise UserError(
        f"{MAX_TRIES:,} draws of Dir({alpha:g}) never gave both clients of a pair {min_rows} rows: "
        "lower [data] clients or min_rows"
    )


def _per_group(clients: int, new_clients: int, groups: int, what: str) -> int:
    for key, number in (("clients", clients), ("new_clients", new_clients)):
        if number % groups:
            raise UserError(
                f"[data] {key} = {number} is not a multiple of the {what}: change it, so that each gets as many"
            )
    return clients // groups


def _grouped(
    lists: list[np.ndarray],
    names: Sequence[str],
    each: int,
    new_clients: int,
    tries: int,
    rng: np.random.Generator,
    new_draw: str,
) -> Partition:
    """Return the partition of lists ordered by group, with the new clients of every group moved to the end.

    FedPCE's later code draws them from a generator that begins at 0, whatever the seed.
    """
    draws = np.random.default_rng(0) if new_draw == "code" else rng
    new = new_clients // len(names)
    number = np.arange(len(lists)).reshape(len(names), each)
    drawn = np.stack([np.sort(draws.permutation(each)[:new]) for _ in names])  # (groups, new)
    last = np.take_along_axis(number, drawn, axis=1).reshape(-1)
    order = [*np.setdiff1d(number, last), *last]
    return Partition(
        [lists[i] for i in order],
        tries,
        kinds=tuple(names[i // each] for i in order),
        ranks=tuple(int(i % each) for i in order),
    )
