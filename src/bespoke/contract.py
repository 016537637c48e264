"""What every method must satisfy, as checks on a small federation: ``bespoke.check_method(Mine())``.

The federation is awkward on purpose: clients with 1 to 32 rows, one with a single class, absent classes,
four of seven clients per round, and a new client that never trains.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from bespoke.clients import BatchedClients, Evaluated, SequentialClients, Simulated
from bespoke.clients.simulated import Call, Mapped
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import FederatedData, Rows
from bespoke.core.local import Local
from bespoke.core.objective import CLASSIFICATION, REGRESSION
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.engine.rows import ClientRows
from bespoke.errors import reason
from bespoke.models.layers import Dropout
from bespoke.runs.federation import Federation

SIZES = (1, 32, 9, 25, 5, 24, 17)  # of the training clients; a new client with 12 rows is added
ROUNDS, COHORT, CLASSES, DIM, SEED = 4, 4, 3, 5, 11
COMPANY = (4, 6)  # clients of 5 and 17 rows, beside whom another may be the smallest or the largest
EXACT = 0.0

SGD = Training(rounds=ROUNDS, epochs=2, batch=8, lr=0.02, momentum=0.5, weight_decay=1e-3)
ADAM = Training(rounds=ROUNDS, steps=5, batch=8, lr=0.01, optimizer="adam", keep_optimizer=True, clip=1.0)


class _Net(nn.Module):
    """A body with a normalisation layer, and a head: every split that a method may need."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.hidden = nn.Linear(DIM, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.hidden(x))))


class _DroppingNet(_Net):
    """The same with dropout before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = _WatchedDropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.hidden(x)))))


class _WatchedDropout(Dropout):
    """Dropout that refuses a training pass in which it cannot draw."""

    def forward(self, x: Tensor) -> Tensor:
        if self._key is None and torch.is_grad_enabled():
            raise ValueError("trains through task.features, task.logits or task.classify without key=batch.key")
        return super().forward(x)


class _FrozenNet(_Net):
    """The same behind a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = nn.Linear(DIM, DIM).requires_grad_(False)
        self.register_buffer("constant_shift", torch.linspace(-0.1, 0.1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.constant(x) + self.constant_shift)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": _Net,
    "dropout": _DroppingNet,
    "frozen": _FrozenNet,
    "regression": lambda: _Net(1),
}


@lru_cache(maxsize=8)
def toy(device: str = "cpu", kind: str = "plain") -> tuple[FederatedData, Task, Tree]:
    """Return the awkward federation, its task in float64, and the initial parameters; ``kind`` is one of KINDS."""
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
    outputs, objective = CLASSES, CLASSIFICATION
    if kind == "regression":
        line = rng.normal(rng.fold_in(key, 3), (DIM,), torch.float64)
        pool, outputs, objective = replace(pool, y=torch.tanh(x @ line), num_classes=0), 1, REGRESSION
    task = Task(KINDS[kind], "head", outputs, device, torch.float64, objective=objective, key=rng.key(3))
    return pool, task, task.init(rng.key(3))


@dataclass(frozen=True)
class Outcome:
    """Everything that a run leaves behind."""

    server: Tree
    states: dict[int, Tree]
    uploads: list[Tree]  # stacked, one per round
    evaluated: list[Evaluated]
    logged: list[dict[str, list[float]]]
    refused: dict[int, str]
    evaluate: Callable[[], list[Evaluated]]  # once more


@dataclass(frozen=True)
class Subject:
    """A method under test, on a device."""

    method: Algorithm
    device: str = "cpu"
    tolerance: float = 1e-9  # largest difference between two computations of the same numbers


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
    kind: str = "plain",
) -> Outcome:
    """Train a method for some rounds on the awkward federation; equal arguments share one run.

    ``backwards`` lists each cohort in reverse order; another ``attempt`` is another run.
    """
    method, device = subject.method, subject.device
    pool, task, params = toy(device, kind)
    training = replace(training, rounds=rounds, rate=COHORT / len(SIZES))
    clients = backend(method, task, params, pool, training, seed=SEED)
    if isinstance(clients, BatchedClients):
        # All clients of a chunk share a block, however unequal: the hardest case for masks.
        clients.chunk, clients.padding, clients.similar = chunk, padding, 0.0
        if padding:
            clients.runner.slots = lambda active, lanes: lanes  # a finished client's lane runs on, to no effect
    federation = Federation.simulated(clients, SEED)
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
    """Require servers, states and evaluations that agree within ``tolerance`` (0 means to the bit)."""
    mine = tree.flatten({"server": a.server, "clients": {str(c): s for c, s in sorted(a.states.items())}})
    theirs = tree.flatten({"server": b.server, "clients": {str(c): s for c, s in sorted(b.states.items())}})
    _require(mine.keys() == theirs.keys(), subject, f"{what}: the states have different names")
    for name, value in mine.items():
        if value.numel():
            gap = float((value.double() - theirs[name].double()).abs().max())
            _require(gap <= tolerance, subject, f"{what}: {name} differs by {gap:.1e} (allowed {tolerance:.0e})")
    for left, right in zip(a.evaluated, b.evaluated, strict=True):
        counts = [(*row[:4], row.metrics.get("accuracy")) for row in (left, right)]
        _require(counts[0] == counts[1], subject, f"{what}: client {left.client} has {counts[0]} and {counts[1]}")
        gap = abs(_loss(left) - _loss(right))
        _require(gap <= 100 * tolerance, subject, f"{what}: client {left.client}'s loss differs by {gap:.1e}")


# --- the checks -------------------------------------------------------------------------------------------------


def is_frozen(subject: Subject) -> None:
    """Check that the method is a frozen dataclass that can be rebuilt from its fields."""
    method = subject.method
    own = vars(type(method)).get("__dataclass_params__")  # not the base class's
    _require(
        own is not None and own.frozen, subject, "is not a frozen dataclass: decorate it with @dataclass(frozen=True)"
    )
    fields: dict[str, Any] = dataclasses.asdict(method)
    _require(type(method)(**fields) == method, subject, "cannot be rebuilt from its fields")


def answers_are_sound(subject: Subject) -> None:
    """Check that each hook returns what it should, with finite numbers, and leaves its arguments unchanged."""
    method = subject.method
    pool, task, params = toy(subject.device)
    clients = SequentialClients(_watching(method), task, params, pool, replace(SGD, rounds=1), seed=SEED)
    federation = Federation.simulated(clients, SEED)
    try:
        first = federation.start()
        done = next(federation.rounds(first))
        same = _shapes(first) == _shapes(done.server)
        _require(same, subject, "aggregate changes the server's names, shapes or types: did it forget the mean?")
        federation.evaluate(done)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(method).__name__}: {error}") from error
    _require(not done.refused, subject, f"clients were refused, since their answers are not finite: {done.refused}")


def _watching(method: Algorithm) -> Algorithm:
    """Return a copy of a method whose client half may not change its arguments."""

    def watched(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Algorithm, local: Local, state: Tree, down: Tree) -> Any:
            given = {"its state": state, "what it received": down}
            before = {what: tree.map(Tensor.clone, value) for what, value in given.items()}
            out = hook(self, local, state, down)
            for what, value in given.items():
                for (leaf, now), old in zip(tree.flatten(value).items(), tree.leaves(before[what]), strict=True):
                    if not torch.equal(now, old):
                        raise ValueError(f"{name} changes {what} in place ({leaf}): make a new tensor instead")
            return out

        return call

    kind, copied = type(method), copy.copy(method)
    hooks = {name: watched(name, getattr(kind, name)) for name in ("client_update", "adapt", "personalize")}
    object.__setattr__(copied, "__class__", type(kind.__name__, (kind,), hooks))
    return copied


def desk_values_stay_tensors(subject: Subject) -> None:
    """Check that no hook turns a value of the desk (n, round, rounds, lr) into a Python number or a branch."""
    method = subject.method
    pool, task, params = toy(subject.device)
    clients = _GuardedClients(method, task, params, pool, replace(SGD, rounds=1), seed=SEED)
    federation = Federation.simulated(clients, SEED)
    try:
        federation.evaluate(next(federation.rounds()))
    except _GuardedError as error:
        raise AssertionError(f"{type(method).__name__}: {error}") from error


class _GuardedError(RuntimeError):
    pass


class _Guarded(Tensor):
    """A tensor that refuses to become a Python number, as does any tensor computed from it."""

    def _refuse(self, *_: Any) -> Any:
        raise _GuardedError(
            "a value of the desk (n, round, rounds, lr) becomes a Python number or decides a branch; a recorded step "
            "would keep the first round's value: compute with the tensor, and choose with torch.where"
        )

    item: Any = _refuse
    tolist: Any = _refuse
    numpy: Any = _refuse
    __bool__: Any = _refuse
    __int__: Any = _refuse
    __float__: Any = _refuse
    __index__: Any = _refuse


class _GuardedClients(SequentialClients):
    """Clients whose desks have guarded values; the library itself may read the results."""

    def _map(self, call: Call) -> Mapped:
        out = super()._map(call)
        return out._replace(tree=tree.map(lambda t: t.as_subclass(Tensor), out.tree))

    def clock(self, call: Call) -> Tree:
        return tree.map(lambda t: t.as_subclass(_Guarded), super().clock(call))

    def rows(self, rows: Tensor, n: Tensor, extra: Tree) -> ClientRows:
        return super().rows(rows, n.as_subclass(_Guarded), extra)


def neighbours_do_not_matter(subject: Subject) -> None:
    """With garbage in all rows but one client's train rows, nothing of that client's changes by one bit."""
    new = len(SIZES)
    loop, batched = (2, new), (0, 2, 3, new)  # in the loop nobody has a neighbour of another size
    for backend, chosen in ((SequentialClients, loop), (BatchedClients, batched)):
        for client in chosen:
            clean = _in_company(subject, backend, client, spoilt=False)
            spoilt = _in_company(subject, backend, client, spoilt=True)
            where = f"client {client}, {backend.name}"
            _require(bool(clean), subject, f"was refused ({where})")
            for name, value in clean.items():
                same = name in spoilt and torch.equal(value, spoilt[name])
                _require(same, subject, f"another client's rows, or test rows, change {name} ({where})")


@lru_cache(maxsize=16)
def _in_company(subject: Subject, backend: type[Simulated], client: int, spoilt: bool) -> dict[str, Tensor]:
    """Return all that one client makes in two rounds and an evaluation, by name; others answer too, to no effect."""
    pool, task, params = toy(subject.device)
    if spoilt:
        others = torch.ones(len(pool.y), dtype=torch.bool)
        others[pool.train.client(client)] = False
        x = torch.where(others[:, None], torch.nan, pool.x)
        pool = replace(pool, x=x, y=torch.where(others, (pool.y + 1) % CLASSES, pool.y))
    clients = backend(subject.method, task, params, pool, replace(SGD, rounds=2), seed=SEED)
    federation = Federation.simulated(clients, SEED)
    server, made = federation.start(), dict[str, Any]()
    for number in (1, 2) if client < pool.num_clients else ():
        cohort = sorted({client, *COMPANY})
        trained = clients.train(number, cohort, *federation.down(server, cohort))
        answered = trained.uploads.clients.tolist()
        if client not in answered:
            return {}
        clients.accept([client])
        place = answered.index(client)
        made[f"the upload of round {number}"] = tree.map(lambda leaf, i=place: leaf[i], trained.uploads.tree)
        made[f"the state of round {number}"] = clients.states()[client]
        made[f"logged in round {number}"] = {n: torch.tensor(v[place]) for n, v in trained.logged.items()}
    down = federation.down(server, [client])
    made["the personal model"] = clients.personal(2, [client], *down)[0]
    logged = clients.evaluate(2, [client], *down)[0].logged
    made["logged in evaluation"] = {name: torch.tensor(value) for name, value in logged.items()}
    return tree.flatten(made)


def dropout_draws_in_training(subject: Subject) -> None:
    """Check that every training loss passes the batch's key to dropout, with equal results, and evaluation does not."""
    try:
        loop = trial(subject, kind="dropout", rounds=2)
    except ValueError as error:
        raise AssertionError(f"{type(subject.method).__name__}: {error}") from error
    batched = trial(subject, BatchedClients, kind="dropout", rounds=2)
    _require_equal(subject, loop, batched, subject.tolerance, "loop against batched with dropout")
    _require(loop.evaluated == loop.evaluate(), subject, "a second evaluation gives different numbers with dropout")


def constants_stay_at_home(subject: Subject) -> None:
    """Check that frozen parameters and buffers are in no state and no message, and that the method works with them."""
    _, task, _ = toy(subject.device, "frozen")
    loop, batched = (trial(subject, b, kind="frozen", rounds=2) for b in (SequentialClients, BatchedClients))
    _require_equal(subject, loop, batched, subject.tolerance, "loop against batched with frozen layers")
    for what, trees in (("server", [loop.server]), ("uploads", loop.uploads), ("states", list(loop.states.values()))):
        names = {name.rpartition("/")[2] for value in trees for name in tree.flatten(value)}
        held = sorted(names & task.constants().keys())
        _require(not held, subject, f"its {what} hold {held}, which the model keeps constant")


def any_objective_works(subject: Subject) -> None:
    """Check that the method supports regression too, or declares that it needs classes."""
    if subject.method.needs_classes:
        return
    try:
        loop, batched = (trial(subject, b, kind="regression", rounds=3) for b in (SequentialClients, BatchedClients))
    except Exception as error:
        raise AssertionError(
            f"{type(subject.method).__name__}: fails on a regression ({reason(error)}): use the task's "
            "own loss, or declare needs_classes = True"
        ) from error
    _require_equal(subject, loop, batched, subject.tolerance, "loop against batched on a regression")
    _require(not loop.refused, subject, f"clients were refused on a regression: {loop.refused}")
    _require(math.isfinite(_mean_loss(loop.evaluated)), subject, "its loss on a regression is not finite")


def loop_equals_batched(subject: Subject) -> None:
    """Check that one client after another and a cohort at once give the same numbers."""
    _require_equal(subject, trial(subject), trial(subject, BatchedClients), subject.tolerance, "loop against batched")


def loop_equals_batched_with_kept_moments(subject: Subject) -> None:
    """Check the same with Adam, whose moments stay on the clients, and rounds counted in steps."""
    loop, batched = (trial(subject, b, ADAM, rounds=3) for b in (SequentialClients, BatchedClients))
    _require_equal(subject, loop, batched, subject.tolerance, "loop against batched with kept moments")


def chunks_change_nothing(subject: Subject) -> None:
    """Check that blocks of two clients give the same numbers as larger ones."""
    chunked = trial(subject, BatchedClients, chunk=2)
    _require_equal(subject, trial(subject, BatchedClients), chunked, subject.tolerance, "large against small blocks")


def padding_changes_nothing(subject: Subject) -> None:
    """Check that more padded rows, and so more idle steps, give the same numbers."""
    padded = trial(subject, BatchedClients, padding=11)
    _require_equal(subject, trial(subject, BatchedClients), padded, subject.tolerance, "without and with extra padding")


def same_seed_same_bits(subject: Subject) -> None:
    """Check that a run can be repeated to the bit on either backend."""
    for backend in (SequentialClients, BatchedClients):
        again = trial(subject, backend, attempt=1)
        _require_equal(subject, trial(subject, backend), again, EXACT, f"two equal runs ({backend.name})")


def order_does_not_matter(subject: Subject) -> None:
    """Check that the order of the clients does not matter."""
    _require_equal(
        subject, trial(subject), trial(subject, backwards=True), subject.tolerance, "clients forwards and backwards"
    )


def shapes_stay(subject: Subject) -> None:
    """Check that states and uploads have the same names, shapes and types in every round."""
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
    """Check that clients with one row, one class or an absent class give finite numbers, and that none is refused."""
    for outcome in (trial(subject), trial(subject, BatchedClients)):
        _require(not outcome.refused, subject, f"clients were refused: {outcome.refused}")
        for row in outcome.evaluated:
            _require(math.isfinite(_loss(row)), subject, f"client {row.client} has a non-finite loss")


def private_stays_private(subject: Subject) -> None:
    """Check that names declared private are in the state and in no upload."""
    outcome = trial(subject)
    state = next(iter(outcome.states.values()))
    missing = set(subject.method.private) - state.keys()
    _require(not missing, subject, f"declares {sorted(missing)} private, but its state has no such name")
    leaked = set(subject.method.private) & set().union(*(u.keys() for u in outcome.uploads))
    _require(not leaked, subject, f"uploads {sorted(leaked)}, which it declares private")


def evaluation_changes_nothing(subject: Subject) -> None:
    """Check that evaluating twice gives the same numbers: personalisation leaves no trace."""
    outcome = trial(subject)
    _require(outcome.evaluated == outcome.evaluate(), subject, "a second evaluation gives different numbers")


def new_client_works(subject: Subject) -> None:
    """Check that a client that never took part can be adapted and personalised on either backend."""
    new = len(SIZES)
    for backend in (SequentialClients, BatchedClients):
        rows = [r for r in trial(subject, backend).evaluated if r.client == new]
        _require(bool(rows), subject, f"a new client got no prediction ({backend.name})")
        _require(
            all(math.isfinite(_loss(r)) for r in rows), subject, f"a new client's loss is not finite ({backend.name})"
        )


def learns(subject: Subject) -> None:
    """Check that some training makes personal models that beat an even guess on held-out rows."""
    guess = math.log(CLASSES)
    loss = _mean_loss(trial(subject, BatchedClients).evaluated)  # a trial that other checks have made
    if loss >= 0.9 * guess:
        loss = _mean_loss(trial(subject, BatchedClients, rounds=12).evaluated)
    _require(loss < 0.9 * guess, subject, f"the personal models' loss is {loss:.3f}, and an even guess has {guess:.3f}")


CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__: check
    for check in (
        is_frozen,
        answers_are_sound,
        desk_values_stay_tensors,
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
        neighbours_do_not_matter,
        dropout_draws_in_training,
        constants_stay_at_home,
        any_objective_works,
        learns,
    )
}


def check_method(method: Algorithm, device: str = "cpu", tolerance: float = 1e-9) -> list[str]:
    """Run every check on a method and return their names; the first that fails raises an AssertionError that says why.

    ``tolerance`` is the largest difference allowed between two float64 computations of the same numbers.
    """
    for check in CHECKS.values():
        check(Subject(method, device, tolerance))
    return list(CHECKS)
