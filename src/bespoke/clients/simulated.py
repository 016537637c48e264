"""Clients that live in this process: what one of them does, whatever way they are run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from bespoke.clients.protocol import Evaluated, Trained
from bespoke.clients.states import StateStore
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm, Uploads
from bespoke.core.data import Data, FederatedData, Rows, on_device
from bespoke.core.local import Local
from bespoke.core.settings import Training
from bespoke.core.task import Task, arithmetic, row_losses
from bespoke.core.tree import Tree
from bespoke.engine.lanes import Eager, Runner

TEST_CHUNK = 256

# What runs on a client: its desk, its held-out rows by split, its state, what it received -> a tree.
ClientFunction = Callable[[Local, dict[str, Data], Tree, Tree], Tree]


@dataclass(frozen=True)
class Call:
    """A function to run on several clients, and what they need for it."""

    fn: ClientFunction
    clients: Sequence[int]
    purpose: int  # the stream that the clients' keys come from
    round: int
    shared: Tree
    own: Tree  # leaves (K, ...)
    held_out: bool = False  # whether ``fn`` is given test and validation rows
    width: int | None = None  # pad the train rows to so many; None = as is best

    def part(self, places: Sequence[int]) -> "Call":
        """The same call for some of the clients, by their places in the list."""
        index = torch.tensor(list(places), dtype=torch.int64)
        return replace(self, clients=[self.clients[i] for i in places], own=tree.take(self.own, index))


class Mapped(NamedTuple):
    """What came of a call."""

    tree: Tree  # leaves (K, ...), in the order of the call's clients
    padding_waste: float = 0.0
    host_breaks: int = 0


def _to_host(columns: dict[str, Tensor]) -> dict[str, list[float]]:
    """Values (K,) by name as lists, in one transfer."""
    rows = torch.stack([column.double() for column in columns.values()]).tolist()
    return dict(zip(columns, rows, strict=True))


class Simulated(ABC):
    """Clients that live in this process: their data, their states, and how one of them works.

    A subclass says only how to run a function over several clients: :meth:`_map`.
    """

    name: str

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
    ) -> None:
        """``params`` are the common initial parameters; ``adapt_epochs`` 0 means the training settings'.

        ``states`` says where the states of the clients that took part are kept: see :mod:`bespoke.clients.states`.
        """
        self.algorithm, self.task, self.params, self.training = algorithm, task, params, training
        self.pool = pool.to(task.device, task.dtype)
        self.root = rng.key(seed, task.device)
        self.host_root = rng.key(seed)  # keys are made on the host, where they cost no launches
        self.adapt_rounds, self.adapt_epochs = adapt_rounds, adapt_epochs
        self.notes: list[str] = []
        self.store = StateStore(states, task.device)  # of the clients that took part: {"state": ..., "moments": ...}

    # --- the protocol -------------------------------------------------------------------------------------------

    def train(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> Trained:
        """Run ``client_update`` for each client."""
        out, padding, breaks = self._work(Call(self._update, clients, rng.TRAIN, round, shared, own))
        flags = {f"sound/{part}": sound for part, sound in out["sound"].items()}
        told = _to_host(flags | {f"logged/{name}": value for name, value in out["logged"].items()})
        refused = {
            client: f"its {'state' if upload else 'upload'} holds NaN or inf"
            for client, upload, state in zip(clients, told["sound/up"], told["sound/kept"], strict=True)
            if not (upload and state)
        }
        places = [i for i, c in enumerate(clients) if c not in refused]
        accepted = [clients[i] for i in places]
        up, kept = out["up"], {"state": out["state"], "moments": out["moments"]}
        if refused:
            index = on_device(torch.tensor(places, dtype=torch.int64), self.root.device)
            up, kept = tree.take(up, index), tree.take(kept, index)
        self.store.put(accepted, kept)
        by_rows = self.training.weighting == "samples"
        weights = [float(self.pool.train.sizes[c]) if by_rows else 1.0 for c in accepted]
        uploads = Uploads(
            up,
            on_device(torch.tensor(weights, dtype=torch.float64), self.root.device),
            on_device(torch.tensor(accepted, dtype=torch.int64), self.root.device),
        )
        logged = {name: [told[f"logged/{name}"][i] for i in places] for name in out["logged"]}
        return Trained(uploads, refused, logged, padding, breaks)

    def evaluate(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> list[Evaluated]:
        """Run ``personalize`` and ``predict`` for each client, after ``adapt`` for those that never took part."""
        rows: dict[int, list[Evaluated]] = {}
        for seen, work in ((True, self._count), (False, self._adapt_and_count)):
            places = [i for i, c in enumerate(clients) if self.took_part(c) == seen]
            if places:
                call = Call(work, clients, rng.EVAL, round, shared, own, held_out=True).part(places)
                rows |= self._rows(call.clients, self._work(call).tree)
        return [row for c in clients for row in rows[c]]

    def took_part(self, client: int) -> bool:
        """Whether an upload of this client was ever accepted."""
        return client in self.store

    def states(self) -> dict[int, Tree]:
        """All stored states by client, for a look at them: they may be many."""
        ids = self.store.ids()
        return dict(zip(ids, tree.unstack(self.store.get(ids), len(ids)), strict=True)) if ids else {}

    def probe(self, fn: Callable[[Local, Tree, Tree], Tree], clients: Sequence[int], shared: Tree, own: Tree) -> Tree:
        """Map ``fn(local, state, down) -> tree`` over clients and stack: leaves (K, ...). For figures only."""
        width = max(self.pool.train.sizes[c] for c in clients)

        def work(local: Local, _: dict[str, Data], state: Tree, down: Tree) -> Tree:
            return fn(local, state, down)

        return self._work(Call(work, clients, rng.EVAL, 0, shared, own, width=width)).tree

    def personal(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> list[Tree]:
        """The personal models themselves, one tree a client: for saving and for use outside."""
        models = []
        for i, client in enumerate(clients):  # one at a time, so that only the results lie in memory
            work = self._personal if self.took_part(client) else self._adapted_personal
            call = Call(work, clients, rng.EVAL, round, shared, own).part([i])
            models += tree.unstack(self._work(call).tree, 1)
        return models

    # --- one client's work --------------------------------------------------------------------------------------

    def _update(self, local: Local, _: dict[str, Data], state: Tree, down: Tree) -> Tree:
        new, up = self.algorithm.client_update(local, state, down)
        leaked = up.keys() & set(self.algorithm.private)
        if leaked:
            raise ValueError(f"{type(self.algorithm).__name__} uploads {sorted(leaked)}, which it declares private")
        sound = {"up": tree.sound(up), "kept": tree.sound({"state": new, "moments": local.moments})}
        flags = {part: torch.ones_like(local.n, dtype=torch.bool) if ok is None else ok for part, ok in sound.items()}
        return {"state": new, "up": up, "moments": local.moments, "logged": local.logged, "sound": flags}

    def _adapt(self, local: Local, state: Tree, down: Tree) -> Tree:
        training = replace(local.training, epochs=self.adapt_epochs, steps=0) if self.adapt_epochs else local.training
        rounds = torch.full_like(local.rounds, self.adapt_rounds)
        moments: Tree = {}
        for r in range(self.adapt_rounds):
            desk = replace(
                local,
                key=rng.fold_in(rng.fold_in(local.key, rng.ADAPT), r),
                training=training,
                round=torch.full_like(local.round, r + 1),
                rounds=rounds,
                lr=torch.full_like(local.lr, training.lr * training.lr_factor(r + 1, self.adapt_rounds)),
                moments=moments,
                logged={},
            )
            state = self.algorithm.adapt(desk, state, down)
            moments = desk.moments
        return state

    def _count(self, local: Local, held_out: dict[str, Data], state: Tree, down: Tree) -> Tree:
        personal = self._personal(local, held_out, state, down)
        counts = {split: self._score(local, data, personal) for split, data in held_out.items()}
        return {"counts": counts, "logged": local.logged}

    def _adapt_and_count(self, local: Local, held_out: dict[str, Data], state: Tree, down: Tree) -> Tree:
        return self._count(local, held_out, self._adapt(local, state, down), down)

    def _personal(self, local: Local, _: dict[str, Data], state: Tree, down: Tree) -> Tree:
        local.moments = {}  # kept moments belong to training
        return self.algorithm.personalize(local, state, down)

    def _adapted_personal(self, local: Local, _: dict[str, Data], state: Tree, down: Tree) -> Tree:
        return self._personal(local, _, self._adapt(local, state, down), down)

    def _score(self, local: Local, data: Data, personal: Tree) -> Tree:
        """Counts by view: correct predictions and summed cross entropy. A row with NaN logits is wrong."""
        views: dict[str, Tree] = {}
        index = torch.arange(data.width, device=self.root.device)
        real = data.mask()
        with torch.no_grad():
            for i, rows in enumerate(index.split(TEST_CHUNK)):
                x, y = data.gather(rows, rng.fold_in(rng.fold_in(local.key, -3), i), train=False)
                predictions = self.algorithm.predict(self.task, personal, x)
                named = predictions if isinstance(predictions, dict) else {"personal": predictions}
                for view, logits in named.items():
                    right = (logits.argmax(dim=-1) == y) & torch.isfinite(logits).all(dim=-1)
                    loss = row_losses(logits, y)
                    part = {
                        "correct": (right.to(real.dtype) * real[rows]).sum(),
                        # where, not a product: padding must not turn an unsound loss into NaN, nor hide one
                        "loss_sum": torch.where(real[rows] > 0, loss, torch.zeros_like(loss)).sum(),
                    }
                    views[view] = tree.add(views[view], part) if view in views else part
        return views

    def _rows(self, clients: Sequence[int], out: Tree) -> dict[int, list[Evaluated]]:
        logged = {name: values.tolist() for name, values in out["logged"].items()}
        rows: dict[int, list[Evaluated]] = {c: [] for c in clients}
        for split, views in out["counts"].items():
            sizes = self.held_out()[split].sizes
            for view, counts in views.items():
                correct, loss_sum = counts["correct"].tolist(), counts["loss_sum"].tolist()
                for i, c in enumerate(clients):
                    values = {name: v[i] for name, v in logged.items()}
                    rows[c].append(Evaluated(c, split, view, round(correct[i]), sizes[c], loss_sum[i], values))
        return rows

    # --- preparing the call -------------------------------------------------------------------------------------

    def held_out(self) -> dict[str, Rows]:
        """The splits that have rows at all, by name."""
        splits = {"test": self.pool.test, "val": self.pool.val}
        return {name: rows for name, rows in splits.items() if len(rows.index)}

    def stored(self, clients: Sequence[int], mapped: bool = False) -> Tree:
        """States and moments, leaves (K, ...): stored ones, or the first ones of clients that never took part."""
        parts, places = list[Tree](), list[list[int]]()
        for seen in (True, False):
            if chosen := [i for i, c in enumerate(clients) if self.took_part(c) == seen]:
                ids = [clients[i] for i in chosen]
                parts.append(self.store.get(ids) if seen else self._first(ids, mapped))
                places.append(chosen)
        return tree.merge(parts, places)

    def _first(self, clients: Sequence[int], mapped: bool) -> Tree:
        """What clients that never took part start with, leaves (K, ...)."""
        device, known = self.root.device, [c if c < self.pool.num_clients else -1 for c in clients]
        ids = torch.tensor(known, device=device)

        def init(client: Tensor) -> Tree:
            return self.algorithm.client_init(self.task, self.params, client)

        try:
            state = tree.map(Tensor.contiguous, vmap(init)(ids)) if mapped else tree.stack([init(c) for c in ids])
        except RuntimeError:  # only the first state looks at the id's value: the client's work may still be mapped
            state = tree.stack([init(c) for c in ids])
        moments = self.store.layout.get("moments", {})
        zeros = tree.map(lambda x: torch.zeros((len(clients), *x.shape), dtype=x.dtype, device=device), moments)
        return {"state": state, "moments": zeros}

    def clock(self, round: int) -> Tree:
        """What tells a client the time, as 0-d tensors: the round, their number, and the round's learning rate."""
        lr = self.training.lr * self.training.lr_factor(max(round, 1))
        device = self.root.device
        return {
            "round": torch.full((), round, dtype=torch.int64, device=device),
            "rounds": torch.full((), self.training.rounds, dtype=torch.int64, device=device),
            "lr": torch.full((), lr, dtype=self.task.dtype, device=device),
        }

    def desk(
        self,
        clock: Tree,
        data: Data,
        key: Tensor,
        moments: Tree,
        smallest: int,
        largest: int,
        runner: Runner | None = None,
    ) -> Local:
        """The desk of a client; with a runner, of each client of a block inside vmap."""
        return Local(
            task=self.task,
            data=data,
            key=key,
            **clock,
            training=self.training,
            smallest=smallest,
            largest=largest,
            mapped=runner is not None,
            runner=runner or Eager(),
            moments=moments,
        )

    def data(self, rows: Tensor, n: Tensor, extra: Tree) -> Data:
        """What a client sees of the pool through its rows (width,)."""
        pool = self.pool
        return Data(pool.x, pool.y, rows, n, extra, pool.transform, self.task.dtype)

    def _work(self, call: Call) -> Mapped:
        """Run a call in the task's precision."""
        with arithmetic(self.task.precision):
            return self._map(call)

    @abstractmethod
    def _map(self, call: Call) -> Mapped:
        """Run a function on each client and stack the results."""
