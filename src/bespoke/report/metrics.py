"""Aggregates of one metric over clients, each derived from recorded sums and weights.

Client i's value is sums[i] / weights[i]: correct answers over rows for accuracy, squared errors over rows for the mean
squared error. A metric may have several entries, for example one per class; its value is then the mean of the entries'
ratios, over the entries with a positive weight. Clients for whom no entry has a positive weight enter no aggregate;
they are counted as `excluded`. Clients are ordered by id, and ties go to the lower id. An undefined value (the spread
of one client) or a non-finite one is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
overflowing = np.errstate(over="ignore", invalid="ignore")  # what overflows is not finite, and shown so


@dataclass(frozen=True)
class Scores:
    """One metric of M clients, V entries each, in the order of the clients' ids; NaN marks an unknown number."""

    clients: list[Any]  # [M]
    rows: NDArray[np.int64]  # [M]
    sums: Floats  # [V, M]
    weights: Floats  # [V, M]

    @classmethod
    def of(cls, clients: Sequence[Any], rows: Sequence[int], pairs: Sequence[Sequence[Any]]) -> Scores:
        """Sort clients by id; `pairs` holds [sum, weight] as recorded: two numbers or two lists of V, with None."""
        order = sorted(range(len(clients)), key=lambda i: (isinstance(clients[i], str), clients[i]))
        parts = [np.array([pairs[i][part] for i in order], dtype=np.float64) for part in (0, 1)]  # None becomes NaN
        sums, weights = (np.ascontiguousarray(np.atleast_2d(part.T)) for part in parts)
        return cls([clients[i] for i in order], np.array([rows[i] for i in order], dtype=np.int64), sums, weights)

    @classmethod
    def of_lines(cls, lines: Iterable[dict[str, Any]], metric: str) -> Scores:
        """Return the metric in lines of `clients.jsonl`, which are of one round, split and view."""
        own = [line for line in lines if metric in line["metrics"]]
        return cls.of([r["client"] for r in own], [r["total"] for r in own], [r["metrics"][metric] for r in own])

    @property
    def defined(self) -> NDArray[np.bool_]:
        """Which clients have a positive weight, [M]."""
        return (self.weights != 0).any(axis=0)

    def take(self, keep: NDArray[Any]) -> Scores:
        """Return the clients at the positions, or under the mask, `keep`."""
        places = np.arange(len(self.clients))[keep]
        return Scores([self.clients[i] for i in places], self.rows[keep], self.sums[:, keep], self.weights[:, keep])

    def values(self) -> Floats:
        """Return every client's value, [M]; NaN if it is undefined or unknown."""
        return _ratio(self.sums, self.weights)

    @overflowing
    def merged(self) -> Scores:
        """Return all clients' rows as those of one client: sums and weights added, [V, 1]."""
        own = self.take(self.defined)
        zero = own.weights == 0  # the sum of an entry without weight says nothing
        sums = np.where(zero, 0.0, own.sums).sum(axis=1, keepdims=True)
        return Scores(["all"], own.rows.sum(keepdims=True), sums, own.weights.sum(axis=1, keepdims=True))

    def pooled(self) -> float | None:
        """Return the value of all clients' rows together: sums over clients, divided by their weights."""
        return _known(float(self.merged().values()[0]))


@overflowing
def _ratio(sums: Floats, weights: Floats) -> Floats:
    """Return the mean of sums / weights over entries with a positive weight: [V, M] -> [M], NaN if there are none."""
    counted = weights != 0  # NaN counts, so that unknown values stay unknown
    ratios = np.divide(sums, weights, out=np.zeros_like(sums), where=counted)
    entries = counted.sum(axis=0)
    return np.divide(ratios.sum(axis=0), entries, out=np.full(entries.shape, np.nan), where=entries > 0)


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None


@dataclass(frozen=True)
class Aggregates:
    """The aggregates of one metric over clients."""

    clients: int  # clients with a positive weight
    excluded: int  # clients without
    pooled: float | None  # sum of the sums / sum of the weights
    mean: float | None  # unweighted mean of the clients' values
    std: float | None  # of the clients' values, ddof 1
    std0: float | None  # of the clients' values, ddof 0
    worst10: float | None  # unweighted mean of the worst tenth of the clients' values
    top10_samples: float | None  # pooled over the tenth of the clients with the most rows
    cv: float | None  # std0 / pooled; none of a pooled value below 0, by which less would not be more even

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON."""
        return asdict(self)


def tenth(clients: int) -> int:
    """Return a tenth of the clients, rounded up, at least one."""
    return max(1, -(-clients // 10))


@overflowing
def aggregate(scores: Scores, higher: bool = True) -> Aggregates:
    """Return every aggregate of a metric; `higher` says whether a larger value is better.

    A client with a non-finite value makes every aggregate that it enters None.
    """
    own = scores.take(scores.defined)
    values, pooled = own.values(), own.pooled()
    clients = values.size
    std0 = _known(float(values.std())) if clients else None
    worst = np.sort(values if higher else -values)[: tenth(clients)]
    largest = np.argsort(-own.rows, kind="stable")[: tenth(clients)]
    sound = bool(np.isfinite(values).all())
    return Aggregates(
        clients=clients,
        excluded=len(scores.clients) - clients,
        pooled=pooled,
        mean=_known(float(values.mean())) if clients else None,
        std=_known(float(values.std(ddof=1))) if clients > 1 else None,
        std0=std0,
        worst10=_known(float(worst.mean() if higher else -worst.mean())) if clients and sound else None,
        top10_samples=own.take(largest).pooled() if clients else None,
        cv=_known(std0 / pooled) if pooled and pooled > 0 and std0 is not None else None,
    )


class SeedStatistics(NamedTuple):
    """Mean over repetitions, their standard deviation (ddof 1) and the mean's standard error."""

    mean: float | None
    std: float | None
    se: float | None


class Interval(NamedTuple):
    """A mean and the ends of its interval, which a single value does not have, nor values whose spread overflows."""

    mean: float
    low: float | None
    high: float | None


@overflowing
def t_interval(values: ArrayLike, confidence: float = 0.95) -> Interval:
    """Return the mean of values [N] and Student's t interval of it, with N - 1 degrees of freedom."""
    v = np.asarray(values, dtype=np.float64)
    if v.ndim != 1 or not v.size:
        raise ValueError(f"need a non-empty vector of values, got shape {v.shape}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    mean = float(v.mean())
    if v.size == 1:
        return Interval(mean, None, None)
    from scipy.special import stdtrit  # quantile of Student's t

    half = float(stdtrit(v.size - 1, 0.5 + confidence / 2) * v.std(ddof=1) / np.sqrt(v.size))
    ends = mean - half, mean + half
    return Interval(mean, *ends) if np.isfinite(ends).all() else Interval(mean, None, None)


@overflowing
def seed_statistics(values: Sequence[float | None]) -> SeedStatistics:
    """Return mean, std (ddof 1) and standard error of one value per repetition, [R].

    A single value has no spread; if one value is unknown, so is everything.
    """
    if not len(values):
        raise ValueError("need at least one value")
    if any(value is None for value in values):
        return SeedStatistics(None, None, None)
    v = np.asarray(values, dtype=np.float64)
    if v.size == 1:
        return SeedStatistics(float(v[0]), None, None)
    std = _known(float(v.std(ddof=1)))
    return SeedStatistics(_known(float(v.mean())), std, None if std is None else std / float(np.sqrt(v.size)))
