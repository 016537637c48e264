"""Clients that live in this process: their data and their states, however they are run."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from bespoke.clients.protocol import Evaluated, Trained
from bespoke.clients.states import StateStore
from bespoke.clients.work import HeldOut, Work, clock
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm, Uploads
from bespoke.core.data import FederatedData, Rows, on_device
from bespoke.core.local import Local
from bespoke.core.settings import Training
from bespoke.core.task import Task, arithmetic
from bespoke.core.tree import Tree
from bespoke.engine.rows import ClientRows

_adaptation = logging.getLogger("bespoke.adaptation")  # it may be long: a display can follow it

# What runs on a client: the work at hand, its desk, its held-out rows by split, its state, what it received -> a tree.
ClientFunction = Callable[[Work, Local, HeldOut, Tree, Tree], Tree]


@dataclass(frozen=True)
class Call:
    """A function to run on several clients, and its inputs."""

    fn: ClientFunction
    clients: Sequence[int]
    purpose: int  # the stream that the clients' keys come from
    round: int
    shared: Tree
    own: Tree  # leaves (K, ...)
    held_out: bool = False  # whether ``fn`` gets test and validation rows
    name: str = ""  # the same for the same work, so that it can be recorded; a probe may do anything and has none
    width: int | None = None  # pad the train rows to this number; None = as is best
    adapting: int = 0  # the number of this round of adaptation; 0 = none
    kept: Tree | None = None  # the clients' states and moments, leaves (K, ...); None = those stored, or first ones

    def part(self, places: Sequence[int]) -> "Call":
        """Return the same call for some of the clients, by their places in the list."""
        count = len(self.clients)
        kept = None if self.kept is None else _some(self.kept, places, count)
        own = _some(self.own, places, count)
        return replace(self, clients=[self.clients[i] for i in places], own=own, kept=kept)


class Mapped(NamedTuple):
    """The result of a call."""

    tree: Tree  # leaves (K, ...), in the order of the call's clients
    padding_waste: float = 0.0
    host_breaks: int = 0


def _to_host(columns: dict[str, Tensor]) -> dict[str, list[float]]:
    """Return values (K,) by name as lists, in one transfer."""
    rows = torch.stack([column.double() for column in columns.values()]).tolist()
    return dict(zip(columns, rows, strict=True))


class Simulated(ABC):
    """Clients that live in this process. A subclass only defines how to run a function over several: :meth:`_map`."""

    name: str
    at_once = False  # whether several clients run at once

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        params: Tree,
        pool: FederatedData,
        training: Training,
        seed: int,
        *,
        adapt_rounds: int = 1,
        adapt_epochs: int = 0,
        states: str = "device",
        halve: bool = True,
    ) -> None:
        """Take the common initial ``params``; ``adapt_epochs`` 0 means as in the training settings.

        ``states`` says where the states of the clients that took part are kept: see :mod:`bespoke.clients.states`.
        With ``halve`` blocks of clients are halved when memory runs out; without it that is an error.
        """
        self.work, self.adapt_rounds = Work(algorithm, task, adapt_epochs), adapt_rounds
        self.task, self.params, self.training = task, params, training
        self.pool = pool.to(task.device, task.dtype)
        self.root = rng.key(seed, task.device)
        self.host_root = rng.key(seed)  # keys are made on the host, where they cost no launches
        self.halve = halve
        self.notes: list[str] = []
        self.store = StateStore(states, task.device)  # of the clients that took part: {"state": ..., "moments": ...}
        self._proposed: tuple[Sequence[int], Tree] = ((), {})  # states waiting to be accepted, leaves (K, ...)

    @property
    def algorithm(self) -> Algorithm:
        """The method whose client half runs here."""
        return self.work.algorithm

    # --- the protocol -------------------------------------------------------------------------------------------

    def train(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> Trained:
        """Run ``client_update`` for each client."""
        call = Call(Work.update, clients, rng.TRAIN, round, shared, own, name="update")
        out, padding, breaks = self._run(call)
        flags = {f"sound/{part}": sound for part, sound in out["sound"].items()}
        values = _to_host(flags | {f"logged/{name}": value for name, value in out["logged"].items()})
        refused = {
            client: f"its {'state' if upload else 'upload'} holds NaN or inf"
            for client, upload, state in zip(clients, values["sound/up"], values["sound/kept"], strict=True)
            if not (upload and state)
        }
        places = [i for i, c in enumerate(clients) if c not in refused]
        answered = [clients[i] for i in places]
        up = _some(out["up"], places, len(clients))
        self._proposed = clients, {"state": out["state"], "moments": out["moments"]}
        by_rows = self.training.weighting == "samples"
        weights = [float(self.pool.train.sizes[c]) if by_rows else 1.0 for c in answered]
        uploads = Uploads(
            up,
            on_device(torch.tensor(weights, dtype=torch.float64), self.root.device),
            on_device(torch.tensor(answered, dtype=torch.int64), self.root.device),
        )
        logged = {name: [values[f"logged/{name}"][i] for i in places] for name in out["logged"]}
        return Trained(uploads, refused, logged, padding, breaks)

    @property
    def absent(self) -> dict[int, str]:
        """Nobody: these clients live here."""
        return {}

    def accept(self, clients: Sequence[int], refused: Collection[int] = ()) -> None:
        """Store the states that these clients proposed, and drop those of the others."""
        (proposed, stacked), self._proposed = self._proposed, ((), {})
        place = {client: i for i, client in enumerate(proposed)}
        missing = [client for client in clients if client not in place]
        if missing:
            raise ValueError(f"clients {missing} cannot be accepted: they did not answer the last call to train")
        self.store.put(clients, _some(stacked, [place[client] for client in clients], len(proposed)))

    def evaluate(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> list[Evaluated]:
        """Run ``personalize`` and ``predict`` for each client, after ``adapt`` for those that never took part."""
        call = Call(Work.evaluate, clients, rng.EVAL, round, shared, own, held_out=True, name="evaluate")
        rows: dict[int, list[Evaluated]] = {}
        for part in self._ready(call):
            rows |= self._evaluated(part.clients, self._run(part).tree)
        return [row for c in clients for row in rows[c]]

    def took_part(self, client: int) -> bool:
        """Return whether an upload of this client was ever accepted."""
        return client in self.store

    def sample(self) -> Tree:
        """Return a client's first state."""
        return self.work.first(self.params, torch.tensor(0, device=self.root.device))

    def timings(self) -> dict[str, float]:
        """Return nothing; a subclass that counts the device's time overrides this."""
        return {}

    # --- a look into clients ------------------------------------------------------------------------------------

    def states(self) -> dict[int, Tree]:
        """Return all stored states by client; there may be many."""
        ids = self.store.ids()
        return dict(zip(ids, tree.unstack(self.store.get(ids), len(ids)), strict=True)) if ids else {}

    def probe(
        self,
        fn: Callable[[Local, Tree, Tree], Tree],
        clients: Sequence[int],
        shared: Tree,
        own: Tree,
        width: int | None = None,
    ) -> Tree:
        """Map ``fn(local, state, down) -> tree`` over clients and stack: leaves (K, ...). For figures only."""
        width = width or max(self.pool.train.sizes[c] for c in clients)

        def work(_: Work, local: Local, __: HeldOut, state: Tree, down: Tree) -> Tree:
            return fn(local, state, down)

        return self._run(Call(work, clients, rng.EVAL, 0, shared, own, width=width)).tree

    def personal(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> list[Tree]:
        """Return the personal models themselves, one tree per client, for saving and for use outside."""
        call = Call(Work.personalize, clients, rng.EVAL, round, shared, own, name="personalize")
        models: dict[int, Tree] = {}
        for part in self._ready(call):
            for i, client in enumerate(part.clients):  # one at a time, so that only the results are in memory
                (models[client],) = tree.unstack(self._run(part.part([i])).tree, 1)
        return [models[client] for client in clients]

    def examples(self, client: int, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a client's rows of a split in chunks, as its model takes them: x (B, ...), y (B,)."""
        lists = {"train": self.pool.train, "test": self.pool.test, "val": self.pool.val}[split]
        if lists.sizes[client]:
            for part in self.rows_of(lists, client).chunks(rng.fold_in(self.root, client)):
                yield part.x, part.y

    # --- clients that never took part ---------------------------------------------------------------------------

    def _ready(self, call: Call) -> Iterator[Call]:
        """Yield a call in parts: for those that took part, and for the others a block at a time, adapted first."""
        seen = [self.took_part(client) for client in call.clients]
        if any(seen):
            yield call.part([i for i, took_part in enumerate(seen) if took_part])
        new = [i for i, took_part in enumerate(seen) if not took_part]
        for block in self._blocks([call.clients[i] for i in new]):  # so that only a block's states are in memory
            yield self._adapted(call.part([new[i] for i in block]))

    def _adapted(self, call: Call) -> Call:
        """Return a call with the clients' states after all rounds of adaptation, each of them one call."""
        with arithmetic(self.task.precision):
            kept = {"state": self._first(call.clients, self.at_once)["state"], "moments": {}}
        adapts = type(self.algorithm).adapt is not Algorithm.adapt
        for number in range(1, self.adapt_rounds + 1) if adapts else ():
            one = replace(call, fn=Work.adapt, held_out=False, name="adapt", adapting=number, kept=kept)
            kept = tree.map(Tensor.contiguous, self._run(one).tree)  # also a leaf that is the same for all clients
            if number < self.adapt_rounds:
                _adaptation.info("adaptation of new clients, round %d/%d done", number, self.adapt_rounds)
        return replace(call, kept={"state": kept["state"], "moments": {}})

    # --- preparing a call ---------------------------------------------------------------------------------------

    def held_out(self) -> dict[str, Rows]:
        """Return the splits that have any rows, by name."""
        splits = {"test": self.pool.test, "val": self.pool.val}
        return {name: rows for name, rows in splits.items() if len(rows.index)}

    def kept(self, call: Call, mapped: bool = False) -> Tree:
        """Return the states and moments that a call's clients start from, leaves (K, ...)."""
        return self.stored(call.clients, mapped) if call.kept is None else call.kept

    def stored(self, clients: Sequence[int], mapped: bool = False) -> Tree:
        """Return states and moments, leaves (K, ...): stored ones, or first ones for clients that never took part."""
        parts, places = list[Tree](), list[list[int]]()
        for seen in (True, False):
            if chosen := [i for i, c in enumerate(clients) if self.took_part(c) == seen]:
                ids = [clients[i] for i in chosen]
                parts.append(self.store.get(ids) if seen else self._first(ids, mapped))
                places.append(chosen)
        return tree.merge(parts, places)

    def _first(self, clients: Sequence[int], mapped: bool) -> Tree:
        """Return the initial states and moments of clients that never took part, leaves (K, ...)."""
        device, known = self.root.device, [c if c < self.pool.num_clients else -1 for c in clients]
        ids = torch.tensor(known, device=device)

        def init(client: Tensor) -> Tree:
            return self.work.first(self.params, client)

        try:
            state = tree.map(Tensor.contiguous, vmap(init)(ids)) if mapped else tree.stack([init(c) for c in ids])
        except RuntimeError:  # only the first state reads the id's value: the client's work may still be mapped
            state = tree.stack([init(c) for c in ids])
        moments = self.store.layout.get("moments", {})
        zeros = tree.map(lambda x: torch.zeros((len(clients), *x.shape), dtype=x.dtype, device=device), moments)
        return {"state": state, "moments": zeros}

    def clock(self, call: Call) -> Tree:
        """Return a client's clock."""
        if call.adapting:
            return clock(self.task, self.training, call.adapting, self.adapt_rounds)
        return clock(self.task, self.training, call.round)

    def rows(self, rows: Tensor, n: Tensor, extra: Tree) -> ClientRows:
        """Return the client's view of the pool through its rows (width,)."""
        pool = self.pool
        return ClientRows(pool.x, pool.y, rows, n, extra, pool.transform, self.task.dtype)

    def rows_of(self, lists: Rows, client: int, width: int | None = None) -> ClientRows:
        """Return one client's rows of a split, padded to ``width``; without any row there is one, masked."""
        rows, n = lists.block([client], width or max(1, lists.sizes[client]))
        return self.rows(rows[0], n[0], tree.map(lambda x: x[client], self.pool.extra))

    def _run(self, call: Call) -> Mapped:
        """Run a call in the task's precision."""
        with arithmetic(self.task.precision):
            return self._map(call)

    def _blocks(self, clients: Sequence[int]) -> list[list[int]]:
        """Return the places of those clients that run at once, for all of them."""
        return [[place] for place in range(len(clients))]

    @abstractmethod
    def _map(self, call: Call) -> Mapped:
        """Run a function on each client and stack the results."""

    # --- reading the answer -------------------------------------------------------------------------------------

    def _evaluated(self, clients: Sequence[int], out: Tree) -> dict[int, list[Evaluated]]:
        logged = {name: values.tolist() for name, values in out["logged"].items()}
        rows: dict[int, list[Evaluated]] = {c: [] for c in clients}
        for split, views in out["scores"].items():
            sizes = self.held_out()[split].sizes
            for view, scores in views.items():
                columns = {
                    name: (scores[name]["sum"].tolist(), scores[name]["weight"].tolist())
                    for name in self.task.objective.metrics
                }
                for i, c in enumerate(clients):
                    values = {name: v[i] for name, v in logged.items()}
                    found = {name: [sums[i], weights[i]] for name, (sums, weights) in columns.items()}
                    rows[c].append(Evaluated(c, split, view, sizes[c], found, values))
        return rows


def _some(stacked: Tree, places: Sequence[int], count: int) -> Tree:
    """Return these rows of a tree of ``count`` rows, or the tree itself if they are all rows in order."""
    if list(places) == list(range(count)):
        return stacked
    like = next(tree.leaves(stacked), torch.empty(0))
    return tree.take(stacked, on_device(torch.tensor(list(places), dtype=torch.int64), like.device))
