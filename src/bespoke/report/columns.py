"""One run's numbers as small tables: its clients, and its metrics over rounds; from the records alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from bespoke.errors import UserError, visible
from bespoke.records import RunFolder
from bespoke.report.metrics import Aggregates, aggregate
from bespoke.report.summary import Evaluations
from bespoke.report.table import aligned, html_table

_SHOWN = 20  # rows that a table shows of itself


class Columns(dict[str, list[Any]]):
    """A table as a dict of columns [N], which `pandas.DataFrame` takes as it is; None marks an unknown value."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows, each by column."""
        return [dict(zip(self, values, strict=True)) for values in zip(*self.values(), strict=True)]

    def _cells(self) -> tuple[list[list[str]], str]:
        """Return the first rows as text, and how many more there are, in words."""
        firsts = list(zip(*(column[:_SHOWN] for column in self.values()), strict=True))
        more = len(next(iter(self.values()), ())) - len(firsts)
        return [[_text(value) for value in row] for row in firsts], f"... and {more} more rows" if more else ""

    def __repr__(self) -> str:
        cells, more = self._cells()
        right = [i for i, column in enumerate(self.values()) if not any(isinstance(v, str) for v in column)]
        return "\n".join(filter(None, [aligned([list(self), *cells], right), more]))

    def _repr_html_(self) -> str:
        cells, more = self._cells()
        return html_table(list(self), cells, notes=[more] if more else ())


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else visible(str(value))


def client_table(folder: RunFolder) -> Columns:
    """Return a run's clients, new ones included, each with the metrics of its last evaluation on its own test rows.

    The columns are `name`, `group` (train, unseen or new), `condition` where the data name any, `train_rows`,
    `val_rows`, `test_rows`, `round` (of the evaluation), and a column for each metric. `accuracy` is that of the
    headline view, the personal model; another view's has its name before it: `global_accuracy` is that of the shared
    model, before personalisation, where the method predicts with it.
    """
    evaluations, told = Evaluations(folder), folder.federation()
    last: dict[Any, tuple[int, str]] = {}
    for view in reversed(evaluations.views):  # the headline view decides
        last |= evaluations.last(view)
    everyone = range(len(told["names"])) if told else list(last)
    rounds = evaluations.trained
    took_part = {c for row in rounds for c in row["cohort"] if str(c) not in row["refused"] | row.get("missing", {})}

    def group(client: Any) -> str:
        if told and client >= told["clients"]:
            return "new"
        return "train" if client in took_part else "unseen"

    table = Columns(name=list(told["names"]) if told else [str(client) for client in everyone])
    table["group"] = [last[client][1] if client in last else group(client) for client in everyone]
    if told and "conditions" in told:
        table["condition"] = list(told["conditions"])
    for split in ("train", "val", "test"):
        table[f"{split}_rows"] = list(told[split]) if told else [None] * len(everyone)
    table["round"] = [last[client][0] if client in last else None for client in everyone]
    for view in evaluations.views:
        for metric in evaluations.higher:
            found = _last_values(evaluations, view, metric)
            table[_column(view, metric, evaluations.views)] = [_known(found.get(client)) for client in everyone]
    return table


def _last_values(evaluations: Evaluations, view: str, metric: str) -> dict[Any, float]:
    """Return a metric of each client, new ones included, in the last round that it was evaluated in."""
    found: dict[Any, float] = {}
    for number in evaluations.rounds(view):
        for group in ("all", "new"):
            scores = evaluations.scores(view, metric, number, group)
            found |= zip(scores.clients, scores.values().tolist(), strict=True)
    return found


def curve_table(folder: RunFolder, statistic: str = "pooled", group: str = "all", split: str = "test") -> Columns:
    """Return a run's metrics over its evaluated rounds: `round`, `train_loss`, and a column for each metric.

    `statistic` is `pooled`, `mean`, `std`, `worst10` or another aggregate over clients, `group` the clients (`all` of
    the training population, `train`, `unseen` or `new`), `split` their `test` or `val` rows. Metrics are named as by
    :func:`client_table`.
    """
    for what, value, known in (
        ("statistic", statistic, tuple(Aggregates.__dataclass_fields__)),
        ("split", split, ("test", "val")),
    ):
        if value not in known:
            raise UserError(f"there is no {what} {value!r}; use one of {', '.join(known)}")
    evaluations = Evaluations(folder)
    numbers = sorted({number for view in evaluations.views for number in evaluations.rounds(view, split)})
    losses = {row["round"]: row["train_loss"] for row in evaluations.trained}
    table = Columns(round=numbers, train_loss=[losses.get(number) for number in numbers])
    for view in evaluations.views:
        for metric, higher in evaluations.higher.items():
            found = [aggregate(evaluations.scores(view, metric, n, group, split), higher) for n in numbers]
            table[_column(view, metric, evaluations.views)] = [getattr(each, statistic) for each in found]
    return table


def _column(view: str, metric: str, views: Iterable[str]) -> str:
    return metric if view == next(iter(views)) else f"{view}_{metric}"


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
