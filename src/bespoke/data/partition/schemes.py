"""The table of partitions: what ``[data] partition`` may name, and how its keys reach each rule."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bespoke.data.partition import basic, groups, volumes
from bespoke.data.partition.basic import Partition
from bespoke.data.partition.replay import replay
from bespoke.data.settings import DataSettings
from bespoke.errors import UserError


class Known(NamedTuple):
    """What is known of each of the N rows that become clients."""

    labels: np.ndarray  # (N,) int64
    owner: np.ndarray | None = None  # (N,) int: the row's own client
    domain: np.ndarray | None = None  # (N,) int: position in domain_names
    domain_names: tuple[str, ...] = ()
    official: np.ndarray | None = None  # (N,) bool: official test rows that were merged with the others


class PartitionSpec(NamedTuple):
    """A row of the table: ``run(known, settings, rng)`` and a line on what it does.

    ``settings.clients`` is the true number of clients here, never 0.
    """

    run: Callable[[Known, DataSettings, np.random.Generator], Partition]
    doc: str


def _dirichlet(k: Known, s: DataSettings, rng: np.random.Generator) -> Partition:
    if not s.replay:
        return basic.dirichlet(k.labels, rng, s.clients, s.alpha, s.min_rows, s.balance)
    if not s.balance or s.subsample < 1.0 or s.folds or s.validation:
        raise UserError(
            "[data] replay repeats pFedFDA's script: leave balance on, and subsample, folds and validation off"
        )
    return replay(k.labels, s.replay, s.clients, s.alpha, s.min_rows, s.test, s.keep)


PARTITIONS: dict[str, PartitionSpec] = {
    "iid": PartitionSpec(
        lambda k, s, rng: basic.iid(k.labels, rng, s.clients),
        "shuffled rows in equal parts",
    ),
    "dirichlet": PartitionSpec(
        _dirichlet,
        "each class spread over the clients by shares from Dir(alpha)",
    ),
    "equal_dirichlet": PartitionSpec(
        lambda k, s, rng: volumes.equal_dirichlet(k.labels, rng, s.clients, s.alpha, s.volume),
        "volume rows on each client, its classes by shares from Dir(alpha)",
    ),
    "pathological": PartitionSpec(
        lambda k, s, rng: basic.pathological(
            k.labels, rng, s.clients, s.classes_per_client, s.rows_per_class, s.class_draw == "even"
        ),
        "classes_per_client distinct classes on each client",
    ),
    "power_law": PartitionSpec(
        lambda k, s, rng: volumes.power_law(k.labels, rng, s.clients, s.classes_per_client, s.rows_per_class or 5),
        "classes_per_client classes on each client, sizes by a power law",
    ),
    "domain": PartitionSpec(
        lambda k, s, rng: groups.domain(
            k.labels,
            k.domain,
            k.domain_names,
            rng,
            s.clients,
            s.new_clients,
            s.alpha,
            s.min_rows,
            s.balance,
            s.inside,
        ),
        "as many clients in each domain of the data set",
    ),
    "degradations": PartitionSpec(
        lambda k, s, rng: groups.degradations(
            k.labels, rng, s.clients, s.new_clients, s.min_rows, s.balance, k.official
        ),
        "thirds of even, even and unequal classes, for noise, jitter and imbalance",
    ),
    "natural": PartitionSpec(
        lambda k, s, rng: basic.natural(k.owner, s.clients),
        "the data set's own clients",
    ),
}
