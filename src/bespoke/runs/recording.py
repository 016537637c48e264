"""What surrounds the training loop: evaluation, records, timing, checkpoints, patience, callbacks."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

from bespoke.clients.protocol import Evaluated
from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.report.summary import headline
from bespoke.runs.federation import Federation, Round


class Records(Protocol):
    """Where a run writes its lines: a run folder, or memory."""

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Append rows to ``rounds.jsonl``, ``clients.jsonl`` or ``timing.jsonl``."""
        ...

    def rounds(self) -> Iterable[dict[str, Any]]:
        """Return the rows written to ``rounds.jsonl`` so far."""
        ...

    def clients(self) -> Iterable[dict[str, Any]]:
        """Return the rows written to ``clients.jsonl`` so far."""
        ...


@dataclass(frozen=True)
class Event:
    """What a callback receives after each round."""

    round: int
    rounds: int
    row: dict[str, Any]  # the line of rounds.jsonl
    evaluated: list[dict[str, Any]]  # the lines of clients.jsonl, if this round was evaluated
    seconds: dict[str, float]  # by phase
    server: Tree  # the server's state after the round
    federation: Federation  # a simulation's can be inspected, where it has one process


def recorded(
    federation: Federation,
    records: Records,
    server: Tree | None = None,
    first: int = 1,
    *,
    checkpoint: Callable[[int, Tree], None] | None = None,
    due: Callable[[int], bool] = lambda round: round % 10 == 0,
    stop: Callable[[], bool] = lambda: False,
    callbacks: Sequence[Callable[[Event], None]] = (),
) -> Tree:
    """Run from round ``first`` to the last, record every round, and return the server's state.

    ``checkpoint(round, server)`` is called after the rounds that are ``due`` and after the last. When ``stop()``
    turns true, the round is finished and checkpointed, and the loop ends.
    """
    server = federation.start() if server is None else server
    patience, rounds, saving = federation.evaluation.patience, federation.training.rounds, 0.0
    metric = next(iter(federation.task.objective.metrics))
    history = validation_curve(records, metric) if patience and first > 1 else []
    if _out_of_patience(history, patience):
        return server
    for done in federation.rounds(server, first):
        server, clock = done.server, _Clock(done.seconds)
        federation.check(done)
        evaluated = federation.evaluate(done) if federation.due(done.number) else []
        row, lines = round_line(done), client_lines(federation, done.number, evaluated)
        if lines:
            row["evaluated"] = named_first(federation, evaluated)
            history.append(_validation(row, lines))
        if _out_of_patience(history, patience) and not federation.new_are_due(done.number):
            evaluated = federation.evaluate_with(done.number, server, population=False)
            lines += client_lines(federation, done.number, evaluated)
        clock.lap("evaluate")
        records.append("rounds.jsonl", [row])
        records.append("clients.jsonl", lines)
        records.append("timing.jsonl", [{"round": done.number, **clock.seconds, "checkpoint": saving}])
        stopping = stop() or done.number == rounds or _out_of_patience(history, patience)
        clock.lap("record")
        if checkpoint and (stopping or due(done.number)):
            checkpoint(done.number, server)
        saving = clock.lap("checkpoint")
        for callback in callbacks:
            callback(Event(done.number, rounds, row, lines, clock.seconds, server, federation))
        del done, evaluated  # free the uploads' memory before the next round needs it
        if stopping:
            break
    return server


def named_first(federation: Federation, evaluated: Sequence[Evaluated]) -> dict[str, Any]:
    """Return the view and the metric to show first, for every metric whether larger is better, and who is missing."""
    metrics = federation.task.objective.metrics
    higher = {name: metric.higher for name, metric in metrics.items()}
    missing = {str(client): reason for client, reason in sorted(federation.clients.absent.items())}
    named = {"view": evaluated[0].view, "metric": next(iter(metrics)), "higher": higher}
    return named | ({"missing": missing} if missing else {})


def client_lines(federation: Federation, round: int, evaluated: Sequence[Evaluated]) -> list[dict[str, Any]]:
    """Return the lines of clients.jsonl."""
    return [
        {
            "round": round,
            "client": e.client,
            "group": federation.group(e.client),
            "split": e.split,
            "view": e.view,
            "total": e.total,
            "metrics": e.metrics,
            "logged": e.logged,
        }
        for e in evaluated
    ]


def round_line(round: Round) -> dict[str, Any]:
    """Return the line of rounds.jsonl."""
    trained, uploads, logged = round.trained, round.uploads, dict(round.trained.logged)
    up, answered = tree.nbytes(uploads.tree, stacked=True), len(uploads.clients)
    down = tree.nbytes(round.shared) + tree.nbytes(round.own, stacked=True)
    sent, received = logged.pop("bytes_up", [up] * answered), logged.pop("bytes_down", [down] * answered)
    place = {c: i for i, c in enumerate(uploads.clients.tolist())}
    losses, weights = logged.get("loss"), uploads.weights.tolist()
    row = {
        "round": round.number,
        "cohort": list(round.cohort),
        "refused": {str(c): reason for c, reason in round.refused.items()},
        "train_loss": _weighted_mean(losses, weights) if losses else None,
        "bytes_down": sum(map(int, received)) + down * (len(round.cohort) - answered),
        "bytes_up": sum(map(int, sent)) + up * len(round.refused),
        "padding_waste": trained.padding_waste,
        "host_breaks": trained.host_breaks,
        "logged": {
            name: [values[place[c]] if c in place else None for c in round.cohort] for name, values in logged.items()
        },
    }
    missing = {str(c): reason for c, reason in trained.missing.items()}
    return row | ({"missing": missing} if missing else {}) | ({"note": round.note} if round.note else {})


class _Clock:
    """Seconds by phase of a round."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = dict(seconds)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> float:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
        return self.seconds[phase]


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def validation_curve(records: Records, metric: str) -> list[float | None]:
    """Return the headline value on validation rows of each round that was evaluated by this headline metric.

    One round's lines are in memory at a time.
    """
    rows, found = {row["round"]: row for row in records.rounds()}, []
    for round, group in groupby(records.clients(), key=itemgetter("round")):
        lines = list(group)
        shown = headline(rows[round], lines)
        if shown and shown.metric == metric:
            found.append(_validation(rows[round], lines))
    return found


def _validation(row: dict[str, Any], lines: Sequence[dict[str, Any]]) -> float | None:
    """Return the pooled headline metric on validation rows, signed so that larger is better; None without such rows.

    Rounds with other clients cannot be compared: one whose evaluation somebody missed has no value.
    """
    shown = headline(row, lines)
    value = shown.scores(lines, "val").pooled() if shown and not row.get("evaluated", {}).get("missing") else None
    return value if shown is None or value is None or shown.higher[shown.metric] else -value


def _out_of_patience(history: list[float | None], patience: int) -> bool:
    """Return whether the last ``patience`` evaluations brought no improvement on those before them."""
    curve = [v for v in history if v is not None]
    return bool(patience) and len(curve) > patience and max(curve[-patience:]) <= max(curve[:-patience])
