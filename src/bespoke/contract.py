"""What every method must hold, as checks that run on a small federation: ``bespoke.check_method(Mine())``.

The federation is made to be awkward: clients of 1 to 64 rows, one with a single class, classes that are
absent, four of seven clients a round, and a new client that never trains.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from bespoke.clients import BatchedClients, Evaluated, SequentialClients, Simulated
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import FederatedData, Rows
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.runs.federation import Federation

SIZES = (1, 64, 9, 33, 5, 48, 17)  # of the training clients; a new client of 12 rows comes on top
ROUNDS, COHORT, CLASSES, DIM, SEED = 4, 4, 3, 5, 11
EXACT = 0.0

SGD = Training(rounds=ROUNDS, epochs=2, batch=8, lr=0.02, momentum=0.5, weight_decay=1e-3)
ADAM = Training(rounds=ROUNDS, steps=5, batch=8, lr=0.01, optimizer="adam", keep_optimizer=True, clip=1.0)


class _Net(nn.Module):
    """A body with a normalisation layer, and a head: every split that a method may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(DIM, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.hidden(x))))


@lru_cache(maxsize=2)
def toy(device: str = "cpu") -> tuple[FederatedData, Task, Tree]:
    """The awkward federation, its task in float64, and common initial parameters."""
    key = rng.key(7)
    sizes = (*SIZES, 12)
    total = 2 * sum(sizes)  # as many test rows as train rows
    y = (rng.bits(rng.fold_in(key, 0), torch.arange(total)) % CLASSES).long()
    train, test, start = [], [], 0
    for client, n in enumerate(sizes):
        rows = torch.arange(start, start + 2 * n)
        start += 2 * n
        if client == 4:
            y[rows] = 1  # a single class
        if client == 2:
            y[rows] = y[rows] % 2  # a class is absent
        train.append(rows[:n])
        test.append(rows[n:])
    centres = 2.0 * rng.normal(rng.fold_in(key, 1), (CLASSES, DIM), torch.float64)
    x = centres[y] + rng.normal(rng.fold_in(key, 2), (total, DIM), torch.float64)
    names = tuple(f"client {i}" for i in range(len(sizes)))
    pool = FederatedData(
        x, y, Rows.of(train), Rows.of(test), Rows.of([[]] * len(sizes)), CLASSES, num_clients=len(SIZES), names=names
    )
    task = Task(_Net, "head", CLASSES, device, torch.float64)
    return pool, task, task.init(rng.key(3))


@dataclass(frozen=True)
class Outcome:
    """All that a run leaves behind."""

    server: Tree
    states: dict[int, Tree]
    uploads: list[Tree]  # stacked, one a round
    evaluated: list[Evaluated]
    logged: list[dict[str, list[float]]]
    refused: dict[int, str]
    evaluate: Callable[[], list[Evaluated]]  # once more


@dataclass(frozen=True)
class Subject:
    """A method under test, on a device."""

    method: Algorithm
    device: str = "cpu"
    tolerance: float = 1e-9  # largest difference between two ways to compute the same


@lru_cache(maxsize=64)
def trial(
    subject: Subject,
    backend: type[Simulated] = SequentialClients,
    training: Training = SGD,
    chunk: int = 64,
    padding: int = 0,
    backwards: bool = False,
    attempt: int = 0,
    rounds: int = ROUNDS,
) -> Outcome:
    """Train a method for some rounds on the awkward federation; equal arguments are run once.

    ``backwards`` names each cohort in reverse order; ``attempt`` asks for a run of its own.
    """
    method, device = subject.method, subject.device
    pool, task, params = toy(device)
    training = replace(training, rounds=rounds)
    clients = backend(method, task, params, pool, training, seed=SEED)
    if isinstance(clients, BatchedClients):
        # However unequal, all clients of a chunk share a block: the hardest case for masks.
        clients.chunk, clients.padding, clients.similar = chunk, padding, 0.0
        if padding:
            clients.runner.slots = lambda active, lanes: lanes  # a finished client's lane runs on, to no effect
    federation = Federation.simulated(clients, SEED, replace(training, rate=COHORT / len(SIZES)))
    order = -1 if backwards else 1
    uploads: list[Tree] = []
    logged: list[dict[str, list[float]]] = []
    refused: dict[int, str] = {}
    for done in federation.rounds(cohort=lambda number: federation.cohort(number)[::order]):
        refused |= done.refused
        uploads.append(done.uploads.tree)
        logged.append(done.trained.logged)
    _require(not clients.notes, subject, "; ".join(clients.notes))
    evaluated = federation.evaluate(done)
    states = {c: s["state"] for c, s in clients.states().items()}
    return Outcome(done.server, states, uploads, evaluated, logged, refused, lambda: federation.evaluate(done))


def _mean_loss(rows: list[Evaluated]) -> float:
    headline = [r for r in rows if r.view == rows[0].view and r.split == "test"]
    return sum(_loss(r) for r in headline) / sum(r.total for r in headline)


def _loss(row: Evaluated) -> float:
    """Return the loss summed over a client's rows."""
    return float(row.metrics["loss"][0])


def _require(condition: bool, subject: Subject, sentence: str) -> None:
    if not condition:
        raise AssertionError(f"{type(subject.method).__name__}: {sentence}")


def _require_equal(subject: Subject, a: Outcome, b: Outcome, tolerance: float, what: str) -> None:
    """Servers, states and evaluations agree within ``tolerance`` (0 asks for the same bits)."""
    mine = tree.flatten({"server": a.server, "clients": {str(c): s for c, s in sorted(a.states.items())}})
    theirs = tree.flatten({"server": b.server, "clients": {str(c): s for c, s in sorted(b.states.items())}})
    _require(mine.keys() == theirs.keys(), subject, f"{what}: the states have other names")
    for name, value in mine.items():
        if value.numel():
            gap = float((value.double() - theirs[name].double()).abs().max())
            _require(gap <= tolerance, subject, f"{what}: {name} differs by {gap:.1e} (allowed {tolerance:.0e})")
    for left, right in zip(a.evaluated, b.evaluated, strict=True):
        mine_, theirs_ = ((*row[:4], row.metrics["accuracy"]) for row in (left, right))
        _require(mine_ == theirs_, subject, f"{what}: client {left.client} counts {mine_} and {theirs_}")
        gap = abs(_loss(left) - _loss(right))
        _require(gap <= 100 * tolerance, subject, f"{what}: client {left.client}'s loss differs by {gap:.1e}")


# --- the checks -------------------------------------------------------------------------------------------------


def is_frozen(subject: Subject) -> None:
    """The method is a frozen dataclass that a copy of its fields rebuilds."""
    method = subject.method
    own = vars(type(method)).get("__dataclass_params__")  # not the base class's
    _require(
        own is not None and own.frozen, subject, "is no frozen dataclass: decorate it with @dataclass(frozen=True)"
    )
    fields: dict[str, Any] = dataclasses.asdict(method)
    _require(type(method)(**fields) == method, subject, "its fields do not rebuild it")


def loop_equals_batched(subject: Subject) -> None:
    """One client after another and a cohort at once give the same numbers."""
    _require_equal(subject, trial(subject), trial(subject, BatchedClients), subject.tolerance, "loop against batched")


def loop_equals_batched_with_kept_moments(subject: Subject) -> None:
    """The same with Adam, whose moments stay on the clients, and rounds counted in steps."""
    loop, batched = trial(subject, training=ADAM), trial(subject, BatchedClients, ADAM)
    _require_equal(subject, loop, batched, subject.tolerance, "loop against batched with kept moments")


def chunks_change_nothing(subject: Subject) -> None:
    """Blocks of two clients give the same numbers as larger ones."""
    chunked = trial(subject, BatchedClients, chunk=2)
    _require_equal(subject, trial(subject, BatchedClients), chunked, subject.tolerance, "large against small blocks")


def padding_changes_nothing(subject: Subject) -> None:
    """More padded rows, and so more idle steps, give the same numbers."""
    padded = trial(subject, BatchedClients, padding=11)
    _require_equal(subject, trial(subject, BatchedClients), padded, subject.tolerance, "without and with extra padding")


def same_seed_same_bits(subject: Subject) -> None:
    """A run can be repeated to the bit, on either backend."""
    for backend in (SequentialClients, BatchedClients):
        again = trial(subject, backend, attempt=1)
        _require_equal(subject, trial(subject, backend), again, EXACT, f"two equal runs ({backend.name})")


def order_does_not_matter(subject: Subject) -> None:
    """The order in which clients are named changes nothing."""
    _require_equal(
        subject, trial(subject), trial(subject, backwards=True), subject.tolerance, "clients forwards and backwards"
    )


def shapes_stay(subject: Subject) -> None:
    """States and uploads have the same names, shapes and types in every round."""
    outcome = trial(subject)
    kinds = {_shapes({"state": s}) for s in outcome.states.values()}
    _require(len(kinds) == 1, subject, "clients' states differ in names, shapes or types")
    pool, task, params = toy(subject.device)
    first = subject.method.client_init(task, params, torch.tensor(0, device=subject.device))
    _require(kinds == {_shapes({"state": first})}, subject, "client_update changes the state's names, shapes or types")
    uploads = {_shapes(u) for u in outcome.uploads}
    _require(len(uploads) == 1, subject, "uploads differ between rounds in names, shapes or types")
    key = rng.stream(rng.key(SEED, subject.device), rng.SERVER)
    start = subject.method.server_init(task, params, pool.num_clients, key)
    _require(
        _shapes(start) == _shapes(outcome.server), subject, "aggregate changes the server's names, shapes or types"
    )


def _shapes(value: Tree) -> tuple[Any, ...]:
    return tuple((n, tuple(t.shape), str(t.dtype)) for n, t in sorted(tree.flatten(value).items()))


def awkward_clients_work(subject: Subject) -> None:
    """Clients with one row, one class or an absent class give finite numbers, and nobody is refused."""
    for outcome in (trial(subject), trial(subject, BatchedClients)):
        _require(not outcome.refused, subject, f"clients were refused: {outcome.refused}")
        for row in outcome.evaluated:
            _require(math.isfinite(_loss(row)), subject, f"client {row.client} predicts with a loss that is not finite")


def private_stays_private(subject: Subject) -> None:
    """What is declared private is part of the state and of no upload."""
    outcome = trial(subject)
    state = next(iter(outcome.states.values()))
    missing = set(subject.method.private) - state.keys()
    _require(not missing, subject, f"declares {sorted(missing)} private, but its state has no such name")
    leaked = set(subject.method.private) & set().union(*(u.keys() for u in outcome.uploads))
    _require(not leaked, subject, f"uploads {sorted(leaked)}, which it declares private")


def evaluation_changes_nothing(subject: Subject) -> None:
    """Evaluating twice gives the same numbers: personalisation leaves no trace."""
    outcome = trial(subject)
    _require(outcome.evaluated == outcome.evaluate(), subject, "a second evaluation gives other numbers")


def new_client_works(subject: Subject) -> None:
    """A client that never took part can be adapted and personalised, on either backend alike."""
    new = len(SIZES)
    for backend in (SequentialClients, BatchedClients):
        rows = [r for r in trial(subject, backend).evaluated if r.client == new]
        _require(bool(rows), subject, f"a new client got no prediction ({backend.name})")
        _require(
            all(math.isfinite(_loss(r)) for r in rows), subject, f"a new client's loss is not finite ({backend.name})"
        )


def learns(subject: Subject) -> None:
    """Training for a while makes personal models that do better on held-out rows than an even guess."""
    outcome = trial(subject, BatchedClients, rounds=12)
    loss, guess = _mean_loss(outcome.evaluated), math.log(CLASSES)
    _require(loss < 0.9 * guess, subject, f"the personal models' loss is {loss:.3f}, and an even guess has {guess:.3f}")


CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__: check
    for check in (
        is_frozen,
        loop_equals_batched,
        loop_equals_batched_with_kept_moments,
        chunks_change_nothing,
        padding_changes_nothing,
        same_seed_same_bits,
        order_does_not_matter,
        shapes_stay,
        awkward_clients_work,
        private_stays_private,
        evaluation_changes_nothing,
        new_client_works,
        learns,
    )
}


def check_method(method: Algorithm, device: str = "cpu", tolerance: float = 1e-9) -> list[str]:
    """Run every check on a method and return their names; the first that fails is an AssertionError that says why.

    ``tolerance`` is the largest difference allowed between two ways to compute the same in float64.
    """
    for check in CHECKS.values():
        check(Subject(method, device, tolerance))
    return list(CHECKS)
