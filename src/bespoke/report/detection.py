"""A detector against a baseline: false accepts at the baseline's false-reject rate, from recorded error curves.

The metric `detection_CLASS` records for each client the false accepts of its negatives at rising thresholds, then the
false rejects of its positives at the same thresholds, which lie evenly on both sides of even odds.
"""

from __future__ import annotations

import numpy as np

from bespoke.errors import UserError
from bespoke.report.metrics import Floats, Scores


def relative_false_accepts(scores: Scores, baseline: Scores, false_rejects: float | None = None) -> Floats:
    """Return each client's false accepts over the baseline's, both where they reject equally many positives: [M].

    `scores` and `baseline` hold the metric `detection_CLASS` of the same clients and rows; `Scores.merged` makes one
    client of several. The baseline's false-reject rate at even odds is the rate at which both are read, or
    `false_rejects` if it is given. A curve between two thresholds is a straight line, and where several thresholds
    reject equally many, the one that accepts least counts. Where the baseline accepts no negative, half a negative is
    added to both. Below 1 is better than the baseline, which is 1 itself; NaN marks a client without positives or
    negatives, and one whose baseline rejects every positive: there nobody accepts anything, whatever it has learnt.
    """
    if scores.clients != baseline.clients or not np.array_equal(scores.weights, baseline.weights):
        raise UserError("the detector and its baseline were tested on different clients or rows: evaluate both alike")
    if len(scores.sums) % 4 != 2:
        raise UserError("these are no error curves of a detector: record the metric detection_CLASS")
    if false_rejects is not None and not 0 <= false_rejects < 1:
        raise UserError(f"false accepts are read at a false-reject rate from 0 to below 1, not {false_rejects:g}")
    middle = len(scores.sums) // 4  # even odds
    found = np.full(len(scores.clients), np.nan)
    for i, (negatives, positives) in enumerate(scores.weights[[0, -1]].T):
        if negatives > 0 and positives > 0:
            accepts, rejects = _curves(baseline, i)
            rate = rejects[1 + middle] if false_rejects is None else false_rejects
            if rate == 1:
                continue
            own, other = _accepted(*_curves(scores, i), rate), _accepted(accepts, rejects, rate)
            added = 0.5 / negatives if other == 0 else 0.0
            found[i] = (own + added) / (other + added)
    return found


def _curves(scores: Scores, client: int) -> tuple[Floats, Floats]:
    """Return a client's false-accept and false-reject rates from accepting everything to rejecting everything: [T]."""
    accepts, rejects = np.split(scores.sums[:, client] / scores.weights[:, client], 2)
    return np.concatenate([[1.0], accepts, [0.0]]), np.concatenate([[0.0], rejects, [1.0]])


def _accepted(accepts: Floats, rejects: Floats, rate: float) -> float:
    """Return the false-accept rate at a false-reject rate, on the line between the two thresholds around it."""
    below = int(np.searchsorted(rejects, rate, side="right")) - 1  # the last that rejects no more
    if rejects[below] == rate:
        return float(accepts[below])
    share = (rate - rejects[below]) / (rejects[below + 1] - rejects[below])
    return float(accepts[below] + share * (accepts[below + 1] - accepts[below]))
