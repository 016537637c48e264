"""What the records of one run say: the counts of every evaluation, and the summary of them.

Three selections, never mixed: `last` is the last evaluated round; `best_val` the evaluated round with the
largest pooled validation accuracy, reported on its test rows; `best_test` the one with the largest pooled
test accuracy, an oracle. A best is one round for all clients of the training population, the first on ties.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError
from bespoke.records import RunFolder
from bespoke.report.metrics import aggregate, pooled_accuracy

SELECTIONS = ("last", "best_val", "best_test")
GROUPS = {"all": ("train", "unseen"), "train": ("train",), "unseen": ("unseen",), "new": ("new",)}
PHASES = ("train", "aggregate", "evaluate", "checkpoint")


class Counts(NamedTuple):
    """The counts of M clients in the order of their ids; `loss_sum` is NaN where it is not known."""

    clients: list[Any]  # [M]
    correct: NDArray[np.int64]  # [M]
    total: NDArray[np.int64]  # [M]
    loss_sum: NDArray[np.float64]  # [M]


class Evaluations:
    """The evaluations of one run, read once from `clients.jsonl`.

    `views` lists the views that have test rows as they were first recorded: the first is the headline.
    """

    def __init__(self, folder: RunFolder) -> None:
        # (view, split) -> round -> (is new, client) -> (group, correct, total, loss_sum)
        self._rows: dict[tuple[str, str], dict[int, dict[Any, Any]]] = defaultdict(lambda: defaultdict(dict))
        for row in folder.clients():
            rows = self._rows[row["view"], row["split"]][row["round"]]
            key = (row["group"] == "new", row["client"])
            if key in rows:
                raise UserError(
                    f"{folder.path} holds client {row['client']} twice in round {row['round']} "
                    f"({row['split']}, {row['view']}): two runs wrote there; run the experiment again"
                )
            rows[key] = (row["group"], row["correct"], row["total"], row["loss_sum"])
        self.views = [view for view, split in self._rows if split == "test"]

    def rounds(self, view: str, split: str = "test") -> list[int]:
        """The evaluated rounds, ascending."""
        return sorted(self._rows.get((view, split), {}))

    def counts(self, view: str, number: int, group: str = "all", split: str = "test") -> Counts:
        """The counts of a group's clients (a key of `GROUPS`) in one evaluated round."""
        rows = self._rows.get((view, split), {}).get(number, {})
        own = [(key[1], *row[1:]) for key, row in rows.items() if row[0] in GROUPS[group]]
        own.sort(key=lambda row: (isinstance(row[0], str), row[0]))
        return Counts(
            [row[0] for row in own],
            np.array([row[1] for row in own], dtype=np.int64),
            np.array([row[2] for row in own], dtype=np.int64),
            np.array([row[3] for row in own], dtype=np.float64),  # None becomes NaN
        )

    def choose(self, view: str, select: str) -> int | None:
        """The round that `select` (one of `SELECTIONS`) names, or None if there is no such round."""
        rounds = self.rounds(view)
        if select == "last" or not rounds:
            return rounds[-1] if rounds else None
        best, chosen = -1.0, None
        for number in rounds:
            counts = self.counts(view, number, split={"best_val": "val", "best_test": "test"}[select])
            pooled = pooled_accuracy(counts.correct, counts.total)
            if pooled is not None and pooled > best:
                best, chosen = pooled, number
        return chosen

    def summary(self, view: str, number: int) -> dict[str, Any]:
        """The aggregates of every group present in one evaluated round, on the test rows."""
        result: dict[str, Any] = {"round": number}
        for group in GROUPS:
            counts = self.counts(view, number, group)
            if counts.clients:
                result[group] = aggregate(counts.correct, counts.total, counts.loss_sum).as_dict()
        return result


def totals(folder: RunFolder) -> dict[str, Any]:
    """Costs of a run: rounds, participations, bytes, seconds, refused uploads, and distinct notes.

    `seconds` covers all phases; `round_seconds` is the median over rounds of training and aggregation.
    """
    rounds, timing = folder.rounds(), folder.timing()
    return {
        "rounds": len(rounds),
        "participations": sum(len(row["cohort"]) for row in rounds),
        "bytes_down": sum(row["bytes_down"] for row in rounds),
        "bytes_up": sum(row["bytes_up"] for row in rounds),
        "seconds": sum(row[phase] for row in timing for phase in PHASES),
        "round_seconds": statistics.median([r["train"] + r["aggregate"] for r in timing]) if timing else None,
        "refused": sum(len(row["refused"]) for row in rounds),
        "notes": list(dict.fromkeys(row["note"] for row in rounds if row.get("note"))),
    }


def summarise(folder: RunFolder | str | os.PathLike[str]) -> dict[str, Any]:
    """The summary of a run folder, derived from its records alone.

    `{"headline": view, "views": {view: {selection: {"round": r, group: aggregates} | None}}, **totals}`; the
    group `all` is the training population (train and unseen) and never holds new clients.
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    evaluations = Evaluations(folder)
    views: dict[str, Any] = {}
    for view in evaluations.views:
        chosen = {select: evaluations.choose(view, select) for select in SELECTIONS}
        views[view] = {key: None if n is None else evaluations.summary(view, n) for key, n in chosen.items()}
    return {"headline": next(iter(views), None), "views": views, **totals(folder)}
