"""The metrics of every evaluation in one run's records, and their summary.

Three selections, never mixed: `last` is the last evaluated round; `best_val` the evaluated round with the best
pooled validation value of the headline metric, reported on its test rows; `best_test` the one with the best pooled
test value, an oracle. A best round is the same for all clients of the training population, the first on ties. Where
clients of a real federation were missing, best rounds are chosen only among those with equal sets of clients.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from bespoke.errors import UserError
from bespoke.records import RunFolder
from bespoke.report.groups import GROUPS, kind, members, parse, require
from bespoke.report.metrics import Scores, aggregate
from bespoke.report.units import Unit

SELECTIONS = {"last": "last round", "best_val": "best validation round", "best_test": "best on test (oracle)"}
PHASES = ("train", "aggregate", "evaluate", "checkpoint")
Line = dict[str, Any]  # of a record file


# --- the headline of an evaluated round ----------------------------------------------------------------------------


class Headline(NamedTuple):
    """What to show first of an evaluation: a view, a metric, and whether larger is better for each metric."""

    view: str
    metric: str
    higher: dict[str, bool]

    def scores(self, lines: Iterable[Line], split: str = "test") -> Scores:
        """Return the headline metric in a round's lines of `clients.jsonl`: headline view, training population."""
        return Scores.of_lines(population(lines, self.view, split), self.metric)

    def better(self, value: float, other: float) -> bool:
        """Return whether a value of the headline metric is better than another."""
        return value > other if self.higher[self.metric] else value < other


def headline(row: Line, lines: Sequence[Line]) -> Headline | None:
    """Return the headline of a round from its lines of `rounds.jsonl` and `clients.jsonl`; None without the latter.

    A record that does not name it is of a classification, and its headline view is listed first.
    """
    if not lines:
        return None
    named = row.get("evaluated")
    if named is None:
        return Headline(lines[0]["view"], "accuracy", {"accuracy": True, "loss": False})
    return Headline(named["view"], named["metric"], named["higher"])


def population(lines: Iterable[Line], view: str, split: str) -> list[Line]:
    """Return the lines of one round that belong to a view, a split and a client of the training population."""
    return [r for r in lines if r["view"] == view and r["split"] == split and r["group"] in GROUPS["all"]]


# --- one run -------------------------------------------------------------------------------------------------------


class _Block:
    """The clients of one view, split and round, as columns: there may be millions of lines."""

    def __init__(self) -> None:
        self.places: dict[tuple[bool, Any], int] = {}  # (is new, client) -> place in the lists
        self.groups: list[str] = []
        self.rows: list[int] = []
        self.metrics: dict[str, list[Any]] = {}  # [sum, weight] or None by place

    def add(self, line: Line) -> bool:
        """Add a line; return False if its client is already there."""
        key = (line["group"] == "new", line["client"])
        if key in self.places:
            return False
        place = self.places[key] = len(self.groups)
        self.groups.append(sys.intern(line["group"]))
        self.rows.append(line["total"])
        for name, pair in line["metrics"].items():
            column = self.metrics.setdefault(name, [])
            column += [None] * (place - len(column)) + [pair]
        return True

    def clients(self) -> list[Any]:
        """Return the clients' ids, in the order of the lists."""
        return [key[1] for key in self.places]

    def scores(self, metric: str, keep: Sequence[bool]) -> Scores:
        """Return the clients to keep that the metric was recorded for."""
        column, clients = self.metrics.get(metric, []), self.clients()
        own = [i for i, pair in enumerate(column) if pair is not None and keep[i]]
        return Scores.of([clients[i] for i in own], [self.rows[i] for i in own], [column[i] for i in own])


class Evaluations:
    """The evaluations of one run, read once from its records.

    `views` lists the views that have test rows, the headline first; `metric` is the headline metric, `higher` says
    for each recorded metric whether larger is better. The last evaluated round decides. `trained` has the lines of
    `rounds.jsonl`.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._blocks: dict[tuple[str, str], dict[int, _Block]] = defaultdict(lambda: defaultdict(_Block))
        self.logged: dict[int, tuple[int, dict[str, Any]]] = {}  # what each client last logged, and its round
        for line in folder.clients():
            if not self._blocks[line["view"], line["split"]][line["round"]].add(line):
                raise UserError(
                    f"{folder.path} holds client {line['client']} twice in round {line['round']} "
                    f"({line['split']}, {line['view']}): two runs wrote there; run the experiment again"
                )
            if line["logged"]:
                self.logged[line["client"]] = line["round"], line["logged"]
        self.trained = folder.rounds()
        named: Line = next((row for row in reversed(self.trained) if "evaluated" in row), {})
        views = [view for view, split in self._blocks if split == "test"]
        found = headline(named, [{"view": view} for view in views])
        self.views = sorted(views, key=lambda view: found is None or view != found.view)
        self.metric = found.metric if found else None
        self.higher = found.higher if found else {}

    def rounds(self, view: str, split: str = "test") -> list[int]:
        """Return the evaluated rounds, ascending."""
        return sorted(self._blocks.get((view, split), {}))

    def last(self, view: str, split: str = "test") -> dict[Any, tuple[int, str]]:
        """Return the last round in which each client was evaluated, and its group then."""
        return {
            client: (number, group)
            for number, block in sorted(self._blocks.get((view, split), {}).items())
            for client, group in zip(block.clients(), block.groups, strict=True)
        }

    def scores(self, view: str, metric: str, number: int, group: str = "all", split: str = "test") -> Scores:
        """Return a metric of a group's clients in one evaluated round; `bespoke.report.groups` says what groups are."""
        block = self._blocks.get((view, split), {}).get(number, _Block())
        conditions = self._conditions_of(block.clients()) if ":" in group else None
        keep = members(group, block.groups, conditions, str(self.folder.path))
        try:
            return block.scores(metric, keep)
        except ValueError as error:
            raise UserError(
                f"{self.folder.path} holds {metric} of different lengths in round {number} ({split}, {view}): a "
                "metric must have one length for all clients"
            ) from error

    @cached_property
    def conditions(self) -> list[str]:
        """The condition of each client of the run, by its id; empty if the data name none."""
        return self.folder.conditions()

    def _conditions_of(self, clients: Sequence[Any]) -> list[str]:
        """Return the conditions of these clients, empty if the data name none."""
        known = dict(enumerate(self.conditions))
        if known and not known.keys() >= set(clients):
            stranger = next(client for client in clients if client not in known)
            raise UserError(f"{self.folder.path} names no condition of client {stranger}; run the experiment again")
        return [known[client] for client in clients] if known else []

    def by_kind(self, scores: Scores) -> dict[str, Scores]:
        """Divide the clients of one round's scores by the kind of their condition; empty if the data name none."""
        own = [kind(condition) for condition in self._conditions_of(scores.clients)]
        kinds = dict.fromkeys(map(kind, self.conditions))
        return {name: scores.take(np.array([k == name for k in own])) for name in kinds if name in own}

    def choose(self, view: str, select: str) -> int | None:
        """Return the round that `select` (a key of `SELECTIONS`) names, or None if there is no such round."""
        rounds = self.rounds(view)
        if select == "last" or not rounds or self.metric is None:
            return rounds[-1] if rounds else None
        rounds = self._comparable(view, rounds)
        sign = 1 if self.higher[self.metric] else -1
        split = {"best_val": "val", "best_test": "test"}[select]
        pooled = {number: self.scores(view, self.metric, number, split=split).pooled() for number in rounds}
        known = {number: sign * value for number, value in pooled.items() if value is not None}
        return max(known, key=lambda number: known[number], default=None)

    def _comparable(self, view: str, rounds: Sequence[int]) -> list[int]:
        """Return the rounds among which the best one is chosen: where clients were missing, those with equal clients.

        These are the clients of the last of the rounds with the fewest missing.
        """
        if not any(row.get("evaluated", {}).get("missing") for row in self.trained):
            return list(rounds)
        blocks = self._blocks[view, "test"]
        there = {number: {client for new, client in blocks[number].places if not new} for number in rounds}
        most = max(reversed(rounds), key=lambda number: len(there[number]))
        return [number for number in rounds if there[number] == there[most]]

    def summary(self, view: str, number: int) -> dict[str, Any]:
        """Return the aggregates of every group present in one evaluated round, on the test rows.

        Those of the headline metric are `{group: aggregates}`, the others `{"metrics": {name: {group: ...}}}`, and
        those of the headline metric by kind of condition, if the data name any, `{"conditions": {kind: {group: ...}}}`.
        """
        scores = {metric: {g: self.scores(view, metric, number, g) for g in GROUPS} for metric in self.higher}
        found = {
            metric: {g: aggregate(s, self.higher[metric]).as_dict() for g, s in groups.items() if s.clients}
            for metric, groups in scores.items()
        }
        metric = str(self.metric)
        own = found.pop(metric, {})
        by_kind: dict[str, dict[str, Any]] = {}
        for group, aggregates in own.items():
            aggregates["loss"] = found.get("loss", {}).get(group, {}).get("pooled")
            for name, part in self.by_kind(scores[metric][group]).items():
                by_kind.setdefault(name, {})[group] = aggregate(part, self.higher[metric]).as_dict()
        return {"round": number, **own, "metrics": found} | ({"conditions": by_kind} if by_kind else {})

    def pick(
        self, metric: str | None = None, view: str | None = None, select: str = "last", group: str = "all"
    ) -> dict[str, Any]:
        """Return what :func:`pick` returns from a summary, for any metric and any condition."""
        metric, view = metric or self.metric, view or next(iter(self.views), None)
        if view is None or metric is None:
            return {}
        _check(metric, self.higher, view, self.views, select)
        number = self.choose(view, select)
        scores = None if number is None else self.scores(view, metric, number, group)
        return aggregate(scores, self.higher[metric]).as_dict() if scores and scores.clients else {}


def totals(rounds: Sequence[Line], timing: Sequence[Line]) -> dict[str, Any]:
    """Return the costs of a run: rounds, participations, bytes, seconds, refused uploads, and distinct notes.

    They are those of the lines of `rounds.jsonl` and `timing.jsonl`.
    `seconds` covers all phases; `round_seconds` is the median over rounds of training and aggregation; in
    `rounds_refused` rounds every upload was refused or `missing`, so that nothing was learned.
    """
    missing = [len(row.get("missing", {})) for row in rounds]
    return {
        "rounds": len(rounds),
        "participations": sum(len(row["cohort"]) for row in rounds),
        "bytes_down": sum(row["bytes_down"] for row in rounds),
        "bytes_up": sum(row["bytes_up"] for row in rounds),
        "seconds": sum(row[phase] for row in timing for phase in PHASES),
        "round_seconds": statistics.median([r["train"] + r["aggregate"] for r in timing]) if timing else None,
        "refused": sum(len(row["refused"]) for row in rounds),
        "rounds_refused": sum(
            0 < len(row["cohort"]) <= len(row["refused"]) + absent for row, absent in zip(rounds, missing, strict=True)
        ),
        **({"missing": sum(missing)} if any(missing) else {}),
        "notes": list(dict.fromkeys(row["note"] for row in rounds if row.get("note"))),
    }


def summarise(folder: RunFolder | str | os.PathLike[str]) -> dict[str, Any]:
    """Return the summary of a run folder, derived from its records alone.

    `{"headline": view, "metric": name, "higher": {metric: bool}, "views": {view: {selection: {"round": r, group:
    aggregates, "metrics": {name: {group: aggregates}}} | None}}, **totals}`. The aggregates of a group are those of
    the headline metric, which also chooses the best rounds, and the loss; `metrics` has those of every other metric.
    `all` is the training population, without new clients. `"conditions": {kind: ...}` is as in `Evaluations.summary`.
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    evaluations = Evaluations(folder)
    views: dict[str, Any] = {}
    for view in evaluations.views:
        chosen = {select: evaluations.choose(view, select) for select in SELECTIONS}
        views[view] = {key: None if n is None else evaluations.summary(view, n) for key, n in chosen.items()}
    named = {"headline": next(iter(views), None), "metric": evaluations.metric, "higher": evaluations.higher}
    return {**named, "views": views, **totals(evaluations.trained, folder.timing())}


# --- a summary's numbers -------------------------------------------------------------------------------------------


def pick(
    summary: dict[str, Any],
    metric: str | None = None,
    view: str | None = None,
    select: str = "last",
    group: str = "all",
) -> dict[str, Any]:
    """Return the aggregates of a metric in a summary, by default the headline's; empty if no client was evaluated.

    A group may name a kind of condition, `train:noise`, for the headline metric.
    """
    metric, view = metric or summary["metric"], view or summary["headline"]
    if view is None or metric is None:
        return {}
    name, condition = parse(group)
    _check(metric, summary["higher"], view, summary["views"], select)
    chosen = summary["views"][view][select]
    if chosen is None:
        return {}
    found = chosen if metric == summary["metric"] else chosen["metrics"].get(metric, {})
    if condition and found is not chosen:
        raise UserError(f"a summary has {summary['metric']} alone by condition: read {metric} with Evaluations.pick")
    if condition:
        known = chosen.get("conditions", {})
        require(condition, known, "the summary")
        found = known[condition]
    return dict(found.get(name, {}))


def _check(metric: str, metrics: Collection[str], view: str, views: Collection[str], select: str) -> None:
    """Refuse a metric, a view or a selection that there is not."""
    for what, value, known in (("metric", metric, metrics), ("view", view, views), ("selection", select, SELECTIONS)):
        if value not in known:
            raise UserError(f"there is no {what} {value!r}; use one of {', '.join(known)}")


def trouble(summary: dict[str, Any]) -> str:
    """Return in words that a run learned nothing in some rounds, or from most uploads; "" if all is well."""
    rounds, refused = summary["rounds_refused"], summary["refused"]
    if rounds:
        how = "refused or missing" if summary.get("missing") else "refused"
        return f"every upload was {how} in {rounds} of {summary['rounds']} rounds, which taught nothing"
    if 2 * refused > summary["participations"]:
        return f"{refused} of {summary['participations']} uploads were refused"
    return ""


def often_refused(rounds: Iterable[Line], names: Sequence[str], most: int = 5) -> list[str]:
    """Return a note that names the clients most of whose uploads were refused, with the last reason; few of many."""
    asked: Counter[int] = Counter()
    refused: Counter[int] = Counter()
    why: dict[int, str] = {}
    for row in rounds:
        asked.update(row["cohort"])
        for client, reason in row["refused"].items():
            refused[int(client)] += 1
            why[int(client)] = reason
    found = [client for client, count in refused.items() if 2 * count > asked[client]]
    notes = [f"{refused[c]} of {asked[c]} uploads of {names[c]} were refused: {why[c]}" for c in found[:most]]
    return notes + ([f"most uploads of {len(found) - most} more clients were refused"] if len(found) > most else [])


def sentence(summary: dict[str, Any], select: str = "last") -> str:
    """Return the headline number of a summary in words: round, model and clients; pooled and mean over clients.

    Where only new clients were evaluated, it is theirs. What :func:`trouble` finds follows.
    """
    group = "new" if pick(summary, select=select, group="new") and not pick(summary, select=select) else "all"
    return "; ".join(filter(None, [numbers_of(summary, select, group), trouble(summary)]))


def numbers_of(summary: dict[str, Any], select: str = "last", group: str = "all") -> str:
    """Return the headline number of one group of clients in words."""
    numbers = pick(summary, select=select, group=group)
    if not numbers.get("clients"):
        return f"{summary['rounds']} rounds: no client was evaluated on test rows"
    metric, view = summary["metric"], summary["headline"]
    when = f"{SELECTIONS[select]} ({summary['views'][view][select]['round']})"
    having = "test rows" if metric == "accuracy" or not numbers["excluded"] else f"a defined {metric}"
    whose = "new clients" if group == "new" else "clients"
    who = f"{when}, {view} model, all {numbers['clients']} {whose} with {having}"
    if numbers["pooled"] is None:
        return f"{who}: {metric} is not finite"
    unit = Unit.of(metric, [numbers["pooled"]], places=2)
    pooled, mean = (f"{unit.text(numbers[key])}{unit.sign}" for key in ("pooled", "mean"))
    return f"{who}: {metric} {pooled} pooled, {mean} mean over clients"
