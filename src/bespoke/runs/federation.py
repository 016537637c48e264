"""The only training loop: draw a cohort, send, train, decide, aggregate; and the evaluation of a round."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bespoke.clients import Clients, Evaluated, Inspectable, Simulated, Trained
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm, Uploads
from bespoke.core.data import on_device
from bespoke.core.settings import Training, knob
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.errors import UserError
from bespoke.runs.bounds import Bound, without

EVALUATED_AT_ONCE = 1000  # clients: bounds the memory for their messages and scores
QUICK = 5  # rounds of adaptation that are no burden at every evaluation


@dataclass(frozen=True)
class Evaluation:
    """The ``[evaluation]`` table: when to evaluate, and which number to show first."""

    every: int = knob(0, "rounds between evaluations; 0 = after the last round only", low=0)
    clients: str = knob(
        "all",
        "whom to evaluate: all clients, the training population, or the new clients",
        choices=("all", "train", "new"),
    )
    when: str = knob(
        "aggregated",
        "after aggregation, or before it, for this round's participants with what they just trained; new clients are "
        "always evaluated after it",
        choices=("aggregated", "local"),
    )
    adapt_rounds: int = knob(1, "rounds of adaptation for a client that never took part", low=0, high=10_000)
    adapt_epochs: int = knob(0, "epochs of such a round if the method sets none; 0 = as in training", low=0)
    adapt_every: int = knob(
        -1,
        "new clients are evaluated only in rounds that this number divides, and the last; 0 = after the last round "
        f"only; -1 = 1 where adapt_rounds is at most {QUICK}, else 0",
        low=-1,
    )
    metric: str = knob("pooled", "value shown while running", choices=("pooled", "mean"))
    select: str = knob("last", "round shown by compare", choices=("last", "best_val", "best_test"))
    patience: int = knob(0, "stop after this many evaluations without a better validation value; 0 = never", low=0)


@dataclass(frozen=True)
class Round:
    """One round, after aggregation."""

    number: int
    cohort: Sequence[int]
    shared: Tree  # what every client of the cohort was sent
    own: Tree  # what each was sent in addition, leaves (K, ...)
    trained: Trained
    server: Tree  # the new state
    note: str  # what a reader should know, or empty
    seconds: dict[str, float]  # of training and aggregation

    @property
    def uploads(self) -> Uploads:
        """What the accepted clients sent."""
        return self.trained.uploads

    @property
    def refused(self) -> dict[int, str]:
        """Why clients were left out."""
        return self.trained.refused


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
    inside: Inspectable | None = None  # the same clients, if they may be inspected

    def __post_init__(self) -> None:
        """Start with a bound that has seen nothing."""
        self.bound = Bound(self.training.bound, self.algorithm.unbounded)

    @staticmethod
    def simulated(clients: Simulated, seed: int, evaluation: Evaluation | None = None) -> "Federation":
        """Return the federation of clients that live in this process."""
        pool = clients.pool
        return Federation(
            clients.algorithm,
            clients.task,
            clients.params,
            clients,
            pool.num_clients,
            pool.total_clients,
            clients.training,
            evaluation or Evaluation(),
            seed,
            inside=clients,
        )

    @property
    def root(self) -> torch.Tensor:
        """The run's root key, on the host."""
        return rng.key(self.seed)

    def inspect(self) -> Inspectable:
        """Return the clients of a simulation; refuse those of a real federation."""
        if self.inside is None:
            raise UserError("these clients cannot be inspected: only a simulation has personal models and probes")
        return self.inside

    def start(self) -> Tree:
        """Return the server's state before the first round."""
        key = rng.stream(self.root, rng.SERVER).to(self.task.device)
        with self._named(0):
            server = self.algorithm.server_init(self.task, self.params, self.num_clients, key)
            return self._state(server, "server_init")

    def rounds(
        self, server: Tree | None = None, first: int = 1, cohort: Callable[[int], Sequence[int]] | None = None
    ) -> Iterator[Round]:
        """Yield the rounds from ``first`` to the last, each after its aggregation.

        ``server`` is the state before round ``first``; ``cohort(round)`` returns the clients of a round, by default
        those that the seed draws. Only the server's state is kept here: to free the memory of the uploads, drop the
        round before asking for the next. Several processes advance together.
        """
        server = self.start() if server is None else server
        for number in range(first, self.training.rounds + 1):
            done = [self._round(number, server, (cohort or self.cohort)(number))]
            server = done[0].server
            yield done.pop()  # a name here would keep the uploads alive until the next round

    def _round(self, number: int, server: Tree, cohort: Sequence[int]) -> Round:
        begin = time.perf_counter()
        with self._named(number):
            shared, own = self.down(server, cohort)
        trained = self.clients.train(number, cohort, shared, own)
        middle = time.perf_counter()
        answered = trained.uploads.clients.tolist()
        refused, sizes = self.bound.judge(trained.uploads.tree, answered, shared, _rows_of(own, cohort, answered))
        server, trained = self._aggregated(number, server, without(trained, refused), shared)
        accepted = [client for client in answered if client not in trained.refused]
        self.clients.accept(accepted, refused)
        self.bound.accept([client not in trained.refused for client in answered], sizes)
        note = "" if accepted else "no upload was accepted: the server's state is unchanged"
        seconds = {"train": middle - begin, "aggregate": time.perf_counter() - middle}
        return Round(number, cohort, shared, own, trained, server, note, seconds)

    @torch.no_grad()
    def _aggregated(self, number: int, server: Tree, trained: Trained, shared: Tree) -> tuple[Tree, Trained]:
        """Return the server's next state and the uploads in it; if that is not finite, the old one without any."""
        if not len(trained.uploads.clients):
            return server, trained
        key = on_device(rng.stream(self.root, rng.SERVER, number), self.task.device)
        uploads = trained.uploads._replace(sent=shared, robust=self.training.robust, trim=self.training.trim)
        with self._named(number):
            new = self._state(self.algorithm.aggregate(self.task, server, uploads, key), "aggregate")
        if tree.finite(new):
            return new, trained
        why = "with the uploads of this round, the server's state would hold NaN or inf"
        return server, without(trained, dict.fromkeys(trained.uploads.clients.tolist(), why))

    def _state(self, server: Any, hook: str) -> Tree:
        """Return a server's state; anything but a tree is refused by name."""
        if not isinstance(server, dict):
            method = type(self.algorithm).__name__
            raise TypeError(f"{method}.{hook} must return the server's state as a dict of tensors, not {server!r}")
        return server

    @contextlib.contextmanager
    def _named(self, number: int) -> Iterator[None]:
        """Let an error in the server half of a method name the method and the round."""
        try:
            yield
        except Exception as error:
            error.add_note(f"This happened in {type(self.algorithm).__name__}, on the server, round {number}.")
            raise

    def down(self, server: Tree, clients: Sequence[int]) -> tuple[Tree, Tree]:
        """Return what these clients receive: the part for all, and the part for each (leaves (K, ...))."""
        ids = on_device(torch.tensor([c if c < self.num_clients else -1 for c in clients]), self.task.device)
        return self.algorithm.broadcast(server), self.algorithm.tailor(server, ids)

    def cohort(self, round: int) -> list[int]:
        """Return the clients of a round."""
        if self.training.full_last and round == self.training.rounds:
            return list(range(self.num_clients))
        try:
            return rng.cohort(self.root, round, self.num_clients, self.training.rate, self.training.sampling)
        except ValueError as error:
            raise UserError(str(error)) from None

    # --- evaluation ---------------------------------------------------------------------------------------------

    def due(self, round: int) -> bool:
        """Return whether a round is to be evaluated."""
        every = self.evaluation.every
        return round == self.training.rounds or bool(every and round % every == 0)

    def new_are_due(self, round: int) -> bool:
        """Return whether new clients are evaluated too if a round is: their adaptation may be long."""
        every = self.evaluation.adapt_every
        every = every if every >= 0 else int(self.evaluation.adapt_rounds <= QUICK)
        return round == self.training.rounds or bool(every and round % every == 0)

    def check(self, round: Round) -> None:
        """Refuse local evaluation of a method whose uploads do not replace its broadcast."""
        missing = round.shared.keys() - round.uploads.tree.keys()
        if missing and self.evaluation.when == "local":
            raise UserError(
                f'[evaluation] when = "local" needs uploads that replace the broadcast, but '
                f'{type(self.algorithm).__name__} sends no {", ".join(sorted(missing))}: use "aggregated"'
            )

    def evaluate(self, round: Round) -> list[Evaluated]:
        """Evaluate who is due: all with the new server state, or the participants with what they just trained."""
        whom, local = self.evaluation.clients, self.evaluation.when == "local"
        found = self._evaluate_local(round) if local and whom != "new" else []
        return found + self.evaluate_with(round.number, round.server, not local, self.new_are_due(round.number))

    def evaluate_with(self, number: int, server: Tree, population: bool = True, new: bool = True) -> list[Evaluated]:
        """Evaluate the training population, new clients or both, as far as asked for, by a state after a round."""
        first = 0 if population and self.evaluation.clients != "new" else self.num_clients
        last = self.total_clients if new and self.evaluation.clients != "train" else self.num_clients
        found: list[Evaluated] = []
        for start in range(first, last, EVALUATED_AT_ONCE):
            some = range(start, min(start + EVALUATED_AT_ONCE, last))
            found += self.clients.evaluate(number, some, *self.down(server, some))
        return found

    def _evaluate_local(self, round: Round) -> list[Evaluated]:
        answered = round.uploads.clients.tolist()
        if not answered:
            return []
        down = _rows_of(round.own, round.cohort, answered) | round.uploads.tree
        return self.clients.evaluate(round.number, answered, round.shared, down)

    def group(self, client: int) -> str:
        """Return the group of a client: new, train (took part), or unseen."""
        if client >= self.num_clients:
            return "new"
        return "train" if self.clients.took_part(client) else "unseen"


def _rows_of(own: Tree, cohort: Sequence[int], clients: Sequence[int]) -> Tree:
    """Return what these clients of a cohort were sent in addition: their rows of ``own``, leaves (K, ...)."""
    if not own or list(clients) == list(cohort):
        return own
    place = {client: i for i, client in enumerate(cohort)}
    places = torch.tensor([place[client] for client in clients], dtype=torch.int64)
    return tree.take(own, on_device(places, next(tree.leaves(own)).device))
