"""One run's numbers as small tables: its clients, and its metrics over rounds; from the records alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from bespoke.errors import UserError, visible
from bespoke.records import FEDERATION, RunFolder, is_count, is_list_of, is_text
from bespoke.report.metrics import Aggregates, Scores, aggregate
from bespoke.report.summary import Evaluations, headline
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
    rounds = folder.rounds()
    last: dict[str, dict[Any, dict[str, Any]]] = {}  # by view and client
    for line in folder.clients():
        if line["split"] == "test":
            last.setdefault(line["view"], {})[line["client"]] = line
    named = headline(_evaluated(rounds), [{"view": view} for view in last])
    views = sorted(last, key=lambda view: named is None or view != named.view)
    told, conditions = _federation(folder), folder.conditions()
    everyone = range(len(told["names"])) if told else list(dict.fromkeys(c for lines in last.values() for c in lines))
    lines = [next((last[view][c] for view in views if c in last[view]), None) for c in everyone]
    took_part = {c for row in rounds for c in row["cohort"] if str(c) not in row["refused"] | row.get("missing", {})}

    def group(client: Any) -> str:
        if told and client >= told["clients"]:
            return "new"
        return "train" if client in took_part else "unseen"

    table = Columns(name=list(told["names"]) if told else [str(client) for client in everyone])
    table["group"] = [line["group"] if line else group(c) for c, line in zip(everyone, lines, strict=True)]
    if conditions:
        table["condition"] = list(conditions)
    for split in ("train", "val", "test"):
        table[f"{split}_rows"] = list(told[split]) if told else [None] * len(lines)
    table["round"] = [line["round"] if line else None for line in lines]
    for view in views:
        for metric in named.higher if named else ():
            scores = Scores.of_lines(last[view].values(), metric)
            found = dict(zip(scores.clients, scores.values().tolist(), strict=True))
            table[_column(view, metric, views)] = [_known(found.get(client)) for client in everyone]
    return table


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
    losses = {row["round"]: row["train_loss"] for row in folder.rounds()}
    table = Columns(round=numbers, train_loss=[losses.get(number) for number in numbers])
    for view in evaluations.views:
        for metric, higher in evaluations.higher.items():
            found = [aggregate(evaluations.scores(view, metric, n, group, split), higher) for n in numbers]
            table[_column(view, metric, evaluations.views)] = [getattr(each, statistic) for each in found]
    return table


def _column(view: str, metric: str, views: Iterable[str]) -> str:
    return metric if view == next(iter(views)) else f"{view}_{metric}"


def _evaluated(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the line of the last evaluated round; an empty one if no line says so."""
    return next((row for row in reversed(rounds) if "evaluated" in row), {})


def _federation(folder: RunFolder) -> dict[str, Any]:
    """Return what `federation.json` says of the clients; nothing for a folder of an earlier version, without one."""
    path = folder.path / FEDERATION
    told = folder.read_json(FEDERATION) if path.exists() else {}
    if isinstance(told, dict) and "names" not in told:
        return {}
    sizes = ("train", "val", "test")
    sound = (
        isinstance(told, dict)
        and is_count(told.get("clients"))
        and is_list_of(is_text)(told["names"])
        and all(is_list_of(is_count)(told.get(key)) and len(told[key]) == len(told["names"]) for key in sizes)
    )
    if not sound:
        raise UserError(f"{path} is damaged; restore it or run the experiment again")
    return told


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
