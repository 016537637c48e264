"""The only training loop: sample, train, aggregate, evaluate, record, checkpoint."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import torch

from bespoke.clients.protocol import Clients, Evaluated, Trained
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import on_device
from bespoke.core.settings import Training, knob
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.errors import UserError

EVALUATED_AT_ONCE = 1000  # clients: bounds the memory of what is sent to each of them and of their counts


@dataclass(frozen=True)
class Evaluation:
    """The ``[evaluation]`` table: when to look, and which number to show first."""

    every: int = knob(0, "evaluate all clients every so many rounds; 0 = after the last round only", low=0)
    when: str = knob(
        "aggregated",
        "after aggregation, or this round's participants before it with what they just trained",
        choices=("aggregated", "local"),
    )
    adapt_rounds: int = knob(1, "rounds of adaptation for a client that never took part", low=0)
    adapt_epochs: int = knob(0, "epochs of such a round where the method sets none; 0 = as in training", low=0)
    metric: str = knob("pooled", "accuracy shown while running", choices=("pooled", "mean"))
    select: str = knob("last", "round shown by compare", choices=("last", "best_val", "best_test"))
    patience: int = knob(0, "stop after so many evaluations without a better validation accuracy; 0 = never", low=0)


class Records(Protocol):
    """Where a run writes its lines: a run folder, or memory."""

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Append rows to ``rounds.jsonl``, ``clients.jsonl`` or ``timing.jsonl``."""
        ...

    def clients(self) -> Iterable[dict[str, Any]]:
        """The rows written to ``clients.jsonl`` so far."""
        ...


@dataclass(frozen=True)
class Event:
    """What callbacks are told after each round."""

    round: int
    rounds: int
    row: dict[str, Any]  # the line of rounds.jsonl
    evaluated: list[dict[str, Any]]  # the lines of clients.jsonl, if this round was evaluated
    seconds: dict[str, float]  # by phase


@dataclass
class Federation:
    """A method, its clients and its settings, ready to run."""

    algorithm: Algorithm
    task: Task
    params: Tree  # the common initial parameters
    clients: Clients
    num_clients: int  # the training population
    total_clients: int  # with the new clients
    training: Training
    evaluation: Evaluation
    seed: int
    callbacks: Sequence[Callable[[Event], None]] = ()

    @property
    def root(self) -> torch.Tensor:
        """The run's root key, on the host."""
        return rng.key(self.seed)

    def start(self) -> Tree:
        """The server's state before the first round."""
        key = rng.stream(self.root, rng.SERVER).to(self.task.device)
        return self.algorithm.server_init(self.task, self.params, self.num_clients, key)

    def run(
        self,
        records: Records,
        server: Tree | None = None,
        first: int = 1,
        checkpoint: Callable[[int, Tree], None] | None = None,
        checkpoint_every: int = 10,
        stop: Callable[[], bool] = lambda: False,
    ) -> Tree:
        """Run from round ``first`` to the last and return the server's state.

        ``checkpoint(round, server)`` is called every so many rounds and after the last. When ``stop()``
        turns true, the round is finished, checkpointed, and the loop ends.
        """
        server = self.start() if server is None else server
        history = [] if first == 1 else _validation_curve(records.clients())
        rounds, saving = self.training.rounds, 0.0
        for round in range(first, rounds + 1):
            if _out_of_patience(history, self.evaluation.patience):
                break
            clock = _Clock()
            cohort = self._cohort(round)
            shared, own = self.down(server, cohort)
            trained = self.clients.train(round, cohort, shared, own)
            self._check_local(shared, trained)
            clock.lap("train")
            due = round == rounds or (self.evaluation.every and round % self.evaluation.every == 0)
            before = self._evaluate_local(round, trained, shared, own, cohort) if due else []
            clock.lap("evaluate")
            note = ""
            if len(trained.uploads.clients):
                key = on_device(rng.stream(self.root, rng.SERVER, round), self.task.device)
                with torch.no_grad():
                    server = self.algorithm.aggregate(self.task, server, trained.uploads, key)
            else:
                note = "no client sent a sound upload: the server's state is unchanged"
            clock.lap("aggregate")
            rows = before or (self._evaluate(round, server) if due else [])
            clock.lap("evaluate")
            row = self._row(round, cohort, trained, shared, own, note)
            records.append("rounds.jsonl", [row])
            if rows:
                records.append("clients.jsonl", rows)
                history.append(_pooled(rows, "val"))
            records.append("timing.jsonl", [{"round": round, **clock.seconds, "checkpoint": saving}])
            stopping = stop() or round == rounds or _out_of_patience(history, self.evaluation.patience)
            clock.lap("record")
            if checkpoint and (stopping or round % checkpoint_every == 0):
                checkpoint(round, server)
            saving = clock.lap("checkpoint")
            for callback in self.callbacks:
                callback(Event(round, rounds, row, rows, clock.seconds))
            if stopping:
                break
        return server

    def down(self, server: Tree, clients: Sequence[int]) -> tuple[Tree, Tree]:
        """What these clients receive: the part for all, and each one's own (leaves (K, ...))."""
        ids = on_device(torch.tensor([c if c < self.num_clients else -1 for c in clients]), self.task.device)
        return self.algorithm.broadcast(server), self.algorithm.tailor(server, ids)

    # --- the parts of a round -----------------------------------------------------------------------------------

    def _cohort(self, round: int) -> list[int]:
        if self.training.full_last and round == self.training.rounds:
            return list(range(self.num_clients))
        try:
            return rng.cohort(self.root, round, self.num_clients, self.training.rate, self.training.sampling)
        except ValueError as error:
            raise UserError(str(error)) from None

    def _evaluate(self, round: int, server: Tree) -> list[dict[str, Any]]:
        if self.evaluation.when == "local":
            return []
        counts: list[Evaluated] = []
        for start in range(0, self.total_clients, EVALUATED_AT_ONCE):
            some = range(start, min(start + EVALUATED_AT_ONCE, self.total_clients))
            counts += self.clients.evaluate(round, some, *self.down(server, some))
        return self._rows(round, counts)

    def _check_local(self, shared: Tree, trained: Trained) -> None:
        missing = shared.keys() - trained.uploads.tree.keys()
        if missing and self.evaluation.when == "local":
            raise UserError(
                f'[evaluation] when = "local" needs uploads that replace the broadcast, but '
                f'{type(self.algorithm).__name__} sends no {", ".join(sorted(missing))}: use "aggregated"'
            )

    def _evaluate_local(
        self, round: int, trained: Trained, shared: Tree, own: Tree, cohort: Sequence[int]
    ) -> list[dict[str, Any]]:
        """The participants with what they just trained in place of what they received."""
        if self.evaluation.when != "local" or not len(trained.uploads.clients):
            return []
        answered, place = trained.uploads.clients.tolist(), {c: i for i, c in enumerate(cohort)}
        places = torch.tensor([place[c] for c in answered], device=self.task.device)
        down = tree.take(own, places) | trained.uploads.tree
        return self._rows(round, self.clients.evaluate(round, answered, shared, down))

    def _rows(self, round: int, counts: list[Evaluated]) -> list[dict[str, Any]]:
        return [
            {
                "round": round,
                "client": e.client,
                "group": "new"
                if e.client >= self.num_clients
                else ("train" if self.clients.took_part(e.client) else "unseen"),
                "split": e.split,
                "view": e.view,
                "correct": e.correct,
                "total": e.total,
                "loss_sum": e.loss_sum,
                "logged": e.logged,
            }
            for e in counts
        ]

    def _row(
        self, round: int, cohort: list[int], trained: Trained, shared: Tree, own: Tree, note: str
    ) -> dict[str, Any]:
        uploads, logged = trained.uploads, dict(trained.logged)
        each = tree.nbytes(uploads.tree, stacked=True)
        own_count = logged.pop("bytes_up", None)
        sent = [each] * len(uploads.clients) if own_count is None else [int(b) for b in own_count]
        place = {c: i for i, c in enumerate(uploads.clients.tolist())}
        losses, weights = logged.get("loss"), uploads.weights.tolist()
        row = {
            "round": round,
            "cohort": cohort,
            "refused": {str(c): reason for c, reason in trained.refused.items()},
            "train_loss": _weighted_mean(losses, weights) if losses else None,
            "bytes_down": len(cohort) * tree.nbytes(shared) + tree.nbytes(own),
            "bytes_up": sum(sent) + each * len(trained.refused),
            "padding_waste": trained.padding_waste,
            "host_breaks": trained.host_breaks,
            "logged": {
                name: [values[place[c]] if c in place else None for c in cohort] for name, values in logged.items()
            },
        }
        return row | {"note": note} if note else row


class _Clock:
    """Seconds by phase of a round."""

    def __init__(self) -> None:
        self.seconds = {"train": 0.0, "aggregate": 0.0, "evaluate": 0.0}  # as in timing.jsonl
        self._last = time.perf_counter()

    def lap(self, phase: str) -> float:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
        return self.seconds[phase]


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def _pooled(rows: list[dict[str, Any]], split: str) -> float | None:
    """Pooled accuracy of the headline view over the training population, or None without such rows."""
    view = rows[0]["view"]
    counts = [
        (r["correct"], r["total"]) for r in rows if r["split"] == split and r["view"] == view and r["group"] != "new"
    ]
    total = sum(t for _, t in counts)
    return sum(c for c, _ in counts) / total if total else None


def _validation_curve(rows: Iterable[dict[str, Any]]) -> list[float | None]:
    """The pooled validation accuracy of each evaluated round; rounds lie one after another, so one is in memory."""
    return [_pooled(list(group), "val") for _, group in groupby(rows, key=itemgetter("round"))]


def _out_of_patience(history: list[float | None], patience: int) -> bool:
    """Whether the last ``patience`` evaluations brought nothing better than what was before them."""
    curve = [v for v in history if v is not None]
    return bool(patience) and len(curve) > patience and max(curve[-patience:]) <= max(curve[:-patience])
