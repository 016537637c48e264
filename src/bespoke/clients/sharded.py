"""Clients spread over the processes of a run: each trains and evaluates its own, and all receive the answers."""

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bespoke.clients import processes
from bespoke.clients.protocol import Evaluated, Trained
from bespoke.clients.simulated import Simulated
from bespoke.clients.states import StateStore
from bespoke.core import tree
from bespoke.core.algorithm import Uploads
from bespoke.core.local import Local
from bespoke.core.tree import Tree


def homes(sizes: Sequence[int], population: int, world: int) -> list[int]:
    """Assign each client to a process: the largest clients first, each to the process with the fewest rows so far.

    New clients, those from ``population`` on, are assigned last: they never train.
    """
    home = [0] * len(sizes)
    least = [(0, 0, rank) for rank in range(world)]  # rows, clients, process
    for client in sorted(range(len(sizes)), key=lambda c: (c >= population, -sizes[c], c)):
        rows, clients, rank = heapq.heappop(least)
        home[client] = rank
        heapq.heappush(least, (rows + sizes[client], clients + 1, rank))
    return home


class ShardedStates:
    """The states of the clients of all processes: each process keeps and writes those of its own clients."""

    def __init__(self, own: StateStore, home: Sequence[int]) -> None:
        """Take this process's ``own`` store and the ``home`` process of each client."""
        self.own, self.kind, self.home = own, own.kind, home
        self.took_part: set[int] = set()  # in any process

    def open(self, folder: Path, files: Sequence[Mapping[str, str]] = (), *, owner: str = "") -> None:
        """Keep files in ``folder`` from now on, and hold only the states of ``files``, whichever process wrote them."""
        rank = processes.rank()
        self.own.open(folder, files, lambda client: self.home[client] == rank, rank, processes.world(), owner)
        self.took_part = {client for ids, _ in processes.gather(self.own.ids(), {}) for client in ids}

    def flush(self) -> list[dict[str, str]]:
        """Let each process write what changed, and return the files that hold all states, oldest first."""
        files = {entry["file"]: entry for entries, _ in processes.gather(self.own.flush(), {}) for entry in entries}
        return [files[name] for name in sorted(files, key=lambda name: (len(name), name))]


class ShardedClients:
    """The clients of all processes, seen from each of them.

    A client has one home, fixed for the run, so that its state never moves. Every process makes the same calls
    and gets the same answers, in the order of the clients asked for, so a server that runs in every process
    needs no messages of its own.
    """

    def __init__(self, inner: Simulated) -> None:
        """Take ``inner``, which runs the clients whose home is this process."""
        self.inner, self.name = inner, inner.name
        self.home = homes(inner.pool.train.sizes, inner.pool.num_clients, processes.world())
        self.store = ShardedStates(inner.store, self.home)
        self.notes: list[str] = []

    # --- the protocol -------------------------------------------------------------------------------------------

    def train(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> Trained:
        """Let each process train its clients, then gather the uploads."""
        mine, theirs = self._share(clients, own)
        done = self.inner.train(round, mine, shared, theirs) if mine else None
        said = done and {
            "rows": sum(self.inner.pool.train.sizes[c] for c in mine),
            "refused": list(done.refused.items()),
            "logged": done.logged,
            "padding_waste": done.padding_waste,
            "host_breaks": done.host_breaks,
        }
        answers = [a for a in self._gather(said, _tensors(done.uploads) if done else {}) if a[0]]
        heads = [said for said, _ in answers]
        stacked = tree.concat([part for _, part in answers])
        ids = stacked["clients"].tolist()
        place = {c: i for i, c in enumerate(clients)}
        order = sorted(range(len(ids)), key=lambda i: place[ids[i]])
        logged = {name: [v for said in heads for v in said["logged"][name]] for name in heads[0]["logged"]}
        refused = {client: reason for said in heads for client, reason in said["refused"]}
        rows = sum(said["rows"] for said in heads)
        return Trained(
            Uploads(**tree.take(stacked, torch.tensor(order, dtype=torch.int64))),
            {c: refused[c] for c in clients if c in refused},
            {name: [values[i] for i in order] for name, values in logged.items()},
            sum(said["padding_waste"] * said["rows"] for said in heads) / rows if rows else 0.0,
            sum(said["host_breaks"] for said in heads),
        )

    def evaluate(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> list[Evaluated]:
        """Let each process evaluate its clients, then gather the metrics."""
        mine, theirs = self._share(clients, own)
        rows: dict[int, list[Evaluated]] = {c: [] for c in clients}
        for counted, _ in self._gather(self.inner.evaluate(round, mine, shared, theirs) if mine else [], {}):
            for row in map(Evaluated._make, counted):
                rows[row.client].append(row)
        return [row for c in clients for row in rows[c]]

    @property
    def absent(self) -> dict[int, str]:
        """Nobody: a process that is lost ends the run."""
        return {}

    def accept(self, clients: Sequence[int], refused: Collection[int] = ()) -> None:
        """Let each process commit the states of its own clients."""
        rank = processes.rank()
        self.inner.accept([c for c in clients if self.home[c] == rank])
        self.store.took_part.update(clients)

    def took_part(self, client: int) -> bool:
        """Return whether an upload of this client was ever accepted."""
        return client in self.store.took_part

    def sample(self) -> Tree:
        """Return a client's first state."""
        return self.inner.sample()

    def timings(self) -> dict[str, float]:
        """Return the seconds of this process's device."""
        return self.inner.timings()

    def personal(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> list[Tree]:
        """Return the personal models themselves, one tree per client, in every process."""
        mine, theirs = self._share(clients, own)
        models = self.inner.personal(round, mine, shared, theirs) if mine else []
        part = {"models": tree.stack(models)} if models else {}
        found: dict[int, Tree] = {}
        for ids, gathered in self._gather(mine, part):
            if ids:
                found |= zip(ids, tree.unstack(gathered["models"], len(ids)), strict=True)
        return [found[c] for c in clients]

    def probe(self, fn: Callable[[Local, Tree, Tree], Tree], clients: Sequence[int], shared: Tree, own: Tree) -> Tree:
        """Map ``fn`` over the clients of all processes and stack: leaves (K, ...), in every process."""
        mine, theirs = self._share(clients, own)
        width = max(self.inner.pool.train.sizes[c] for c in clients)
        part = {"probed": self.inner.probe(fn, mine, shared, theirs, width)} if mine else {}
        answers = [(ids, found["probed"]) for ids, found in self._gather(mine, part) if ids]
        place = {c: i for i, c in enumerate(clients)}
        return tree.merge([found for _, found in answers], [[place[c] for c in ids] for ids, _ in answers])

    def examples(self, client: int, split: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a client's rows of a split in chunks; every process holds the pool."""
        return self.inner.examples(client, split)

    def states(self) -> dict[int, Tree]:
        """Return all stored states by client, in every process."""
        found: dict[int, Tree] = {}
        own = self.inner.store.ids()
        for ids, part in self._gather(own, {"states": self.inner.store.get(own)} if own else {}):
            if ids:
                found |= zip(ids, tree.unstack(part["states"], len(ids)), strict=True)
        return dict(sorted(found.items()))

    def _gather(self, value: Any, part: Tree) -> list[tuple[Any, Tree]]:
        """Gather a value and a tree from each process, and collect their notes."""
        answers = processes.gather([value, self.inner.notes], part, self.inner.root.device)
        self.notes = list(dict.fromkeys(note for (_, notes), _ in answers for note in notes))
        return [(value, part) for (value, _), part in answers]

    def _share(self, clients: Sequence[int], own: Tree) -> tuple[list[int], Tree]:
        """Return the clients whose home is this process, and their rows of ``own``."""
        places = [i for i, c in enumerate(clients) if self.home[c] == processes.rank()]
        return [clients[i] for i in places], tree.take(own, torch.tensor(places, dtype=torch.int64))


def _tensors(uploads: Uploads) -> Tree:
    return {"tree": uploads.tree, "weights": uploads.weights, "clients": uploads.clients}
