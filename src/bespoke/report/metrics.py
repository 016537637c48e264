"""Accuracy aggregates over clients, each derived from integer counts.

Client i answers `correct[i]` of its `total[i]` test rows, so its accuracy is A_i = correct[i] / total[i].
Clients with `total[i] == 0` enter no value; they are counted as `excluded`. Arrays are ordered by client
id, and ties go to the lower id. A value that is not defined (the spread of one client) is None.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Aggregates:
    """What `aggregate` returns; accuracies are fractions."""

    clients: int  # clients with at least one row
    excluded: int  # clients without rows
    pooled: float | None  # sum of correct / sum of total
    mean: float | None  # unweighted mean of A_i
    std: float | None  # of A_i, ddof 1
    std0: float | None  # of A_i, ddof 0
    worst10: float | None  # unweighted mean of the lowest tenth of A_i
    top10_samples: float | None  # pooled over the tenth of the clients with most rows
    cv: float | None  # std0 / pooled
    loss: float | None  # sum of loss_sum / sum of total

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


class SeedStatistics(NamedTuple):
    """Mean over repetitions, their standard deviation (ddof 1) and the mean's standard error."""

    mean: float
    std: float | None
    se: float | None


def _counts(correct: ArrayLike, total: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    c, n = np.asarray(correct), np.asarray(total)
    if c.ndim != 1 or c.shape != n.shape:
        raise ValueError(f"correct and total must be vectors of one length, got {c.shape} and {n.shape}")
    if c.size and not (np.issubdtype(c.dtype, np.integer) and np.issubdtype(n.dtype, np.integer)):
        raise ValueError(f"correct and total must be integers, got {c.dtype} and {n.dtype}")
    if np.any(c < 0) or np.any(c > n):
        raise ValueError("every client needs 0 <= correct <= total")
    return c.astype(np.int64), n.astype(np.int64)


def tenth(clients: int) -> int:
    """A tenth of the clients, rounded up, at least one."""
    return max(1, -(-clients // 10))


def accuracies(correct: ArrayLike, total: ArrayLike) -> NDArray[np.float64]:
    """A_i of the clients that have rows: [M] -> [M minus excluded]."""
    c, n = _counts(correct, total)
    return c[n > 0] / n[n > 0]


def pooled_accuracy(correct: ArrayLike, total: ArrayLike) -> float | None:
    """All correct answers over all rows, [M] -> number; None without rows."""
    c, n = _counts(correct, total)
    return float(c.sum() / n.sum()) if n.sum() else None


def worst10(correct: ArrayLike, total: ArrayLike) -> float | None:
    """Unweighted mean accuracy of the tenth of the clients with the lowest A_i, [M] -> number."""
    a = np.sort(accuracies(correct, total))
    return float(a[: tenth(a.size)].mean()) if a.size else None


def top10_samples(correct: ArrayLike, total: ArrayLike, sizes: ArrayLike | None = None) -> float | None:
    """Pooled accuracy of the tenth of the clients with the most rows, [M] -> number.

    `sizes` [M] ranks the clients by another count (their train rows, say); default: `total`.
    """
    c, n = _counts(correct, total)
    rank = n if sizes is None else np.asarray(sizes)
    if rank.shape != n.shape:
        raise ValueError(f"sizes must have one entry a client, got {rank.shape} for {n.shape}")
    has = n > 0
    largest = np.argsort(-rank[has].astype(np.int64), kind="stable")[: tenth(int(has.sum()))]
    return pooled_accuracy(c[has][largest], n[has][largest])


def aggregate(correct: ArrayLike, total: ArrayLike, loss_sum: ArrayLike | None = None) -> Aggregates:
    """Every aggregate of `correct` [M], `total` [M] and, where known, `loss_sum` [M].

    A loss that is NaN or infinite for a client with rows makes `loss` None.
    """
    c, n = _counts(correct, total)
    a = accuracies(c, n)
    pooled = pooled_accuracy(c, n)
    std0 = float(a.std()) if a.size else None
    loss = None
    if loss_sum is not None and a.size:
        value = float(np.asarray(loss_sum, dtype=np.float64)[n > 0].sum() / n.sum())
        loss = value if np.isfinite(value) else None
    return Aggregates(
        clients=a.size,
        excluded=n.size - a.size,
        pooled=pooled,
        mean=float(a.mean()) if a.size else None,
        std=float(a.std(ddof=1)) if a.size > 1 else None,
        std0=std0,
        worst10=worst10(c, n),
        top10_samples=top10_samples(c, n),
        cv=std0 / pooled if pooled and std0 is not None else None,
        loss=loss,
    )


def paired_difference(
    acc_a: ArrayLike, acc_b: ArrayLike, confidence: float = 0.95
) -> tuple[float, float | None, float | None]:
    """Mean of `acc_a` - `acc_b` ([M] each, same clients in the same order) and its t interval.

    One client has no interval: (mean, None, None).
    """
    a, b = np.asarray(acc_a, dtype=np.float64), np.asarray(acc_b, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or not a.size:
        raise ValueError(f"need two non-empty vectors of one length, got {a.shape} and {b.shape}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    difference = a - b
    mean = float(difference.mean())
    if a.size == 1:
        return mean, None, None
    from scipy.special import stdtrit  # quantile of Student's t

    t = stdtrit(a.size - 1, 0.5 + confidence / 2)
    half = float(t * difference.std(ddof=1) / np.sqrt(a.size))
    return mean, mean - half, mean + half


def seed_statistics(values: ArrayLike) -> SeedStatistics:
    """Mean, std (ddof 1) and standard error of one value per repetition, [R]; one alone has no spread."""
    v = np.asarray(values, dtype=np.float64)
    if v.ndim != 1 or not v.size:
        raise ValueError(f"need a non-empty vector of values, got shape {v.shape}")
    if v.size == 1:
        return SeedStatistics(float(v[0]), None, None)
    std = float(v.std(ddof=1))
    return SeedStatistics(float(v.mean()), std, std / float(np.sqrt(v.size)))
