"""Clients one after another: the reference that every faster way must equal."""

from collections.abc import Sequence

import torch

from bespoke.clients.base import ClientFunction, Simulated
from bespoke.core import rng, tree
from bespoke.core.tree import Tree


class LoopClients(Simulated):
    """Each client alone, with exactly its own rows: nothing is padded and nothing is mapped."""

    name = "loop"

    def _map(
        self,
        fn: ClientFunction,
        clients: Sequence[int],
        purpose: int,
        round: int,
        shared: Tree,
        own: Tree,
        *,
        held_out: bool = False,
        width: int | None = None,
    ) -> tuple[Tree, float, int]:
        results, breaks = [], 0
        ids = torch.tensor(list(clients), device=self.root.device)
        keys = rng.stream(self.root, purpose, round, ids)
        for i, client in enumerate(clients):
            n = self.pool.train.sizes[client]
            rows, size = self.pool.train.block([client], width or n)
            extra = tree.map(lambda x, c=client: x[c], self.pool.extra)
            splits = {}
            for name, lists in self._held_out().items() if held_out else ():
                split_rows, split_size = lists.block([client], max(1, lists.sizes[client]))
                splits[name] = self._data(split_rows[0], split_size[0], extra)
            stored = self._stored(client)
            local = self._desk(
                round,
                self._data(rows[0], size[0], extra),
                keys[i],
                stored["moments"],
                [n],
                mapped=False,
            )
            with torch.no_grad():
                result = fn(local, splits, stored["state"], shared | tree.map(lambda x, i=i: x[i], own))
            results.append(tree.detach(result))
            breaks += local.breaks
        return tree.stack(results), 0.0, breaks
