"""A cohort at once: the same client code under ``torch.func.vmap``, over blocks of clients of similar size."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from bespoke.clients.base import ClientFunction, Simulated
from bespoke.clients.loop import LoopClients
from bespoke.core import rng, tree
from bespoke.core.data import blocks
from bespoke.core.local import Local
from bespoke.core.tree import Tree


class BatchedClients(Simulated):
    """Clients sorted by size, padded in blocks of at most ``chunk``, each block one mapped call.

    A method that cannot be mapped runs one client after another instead; ``notes`` says so, and why.
    """

    name = "batched"
    chunk = 64  # clients in one mapped call: bounds memory
    similar = 0.5  # a block's smallest client has at least this share of its largest one's rows
    padding = 0  # extra rows beyond a block's largest client: changes nothing but time; for tests
    mappable = True

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
        parts, order, used, slots, breaks = [], [], 0.0, 0, 0
        for block in blocks([self.pool.train.sizes[c] for c in clients], self.chunk, self.similar):
            group = [clients[i] for i in block]
            part = tree.take(own, torch.tensor(block, device=self.root.device))
            if self.mappable:
                try:
                    out, local = self._run_block(fn, group, purpose, round, shared, part, held_out, width)
                except (RuntimeError, NotImplementedError) as error:
                    # If the loop fails too, its error is the plain one to show; if not, mapping was the trouble.
                    out, _, broke = self._loop(fn, group, purpose, round, shared, part, held_out, width)
                    breaks += broke
                    self.mappable = False
                    reason = str(error).strip().splitlines()[0]
                    self.notes.append(f"clients ran one after another, because mapping them failed: {reason}")
                else:
                    used += float(out.pop("used").sum())
                    slots += local.slots * len(group)
                    breaks += local.breaks
            else:
                out, _, broke = self._loop(fn, group, purpose, round, shared, part, held_out, width)
                breaks += broke
            parts.append(out)
            order += block
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return tree.take(tree.concat(parts), back), 1.0 - used / slots if slots else 0.0, breaks

    def _loop(
        self,
        fn: ClientFunction,
        group: Sequence[int],
        purpose: int,
        round: int,
        shared: Tree,
        own: Tree,
        held_out: bool,
        width: int | None,
    ) -> tuple[Tree, float, int]:
        # LoopClients needs nothing that this class does not have; it is borrowed, not built.
        return LoopClients._map(self, fn, group, purpose, round, shared, own, held_out=held_out, width=width)  # type: ignore[arg-type]

    def _run_block(
        self,
        fn: ClientFunction,
        group: Sequence[int],
        purpose: int,
        round: int,
        shared: Tree,
        own: Tree,
        held_out: bool,
        width: int | None,
    ) -> tuple[Tree, Local]:
        pool, device = self.pool, self.root.device
        sizes = [pool.train.sizes[c] for c in group]
        ids = torch.tensor(list(group), device=device)
        rows, n = pool.train.block(group, width or max(sizes) + self.padding)
        splits = {
            name: lists.block(group, max(1, *(lists.sizes[c] for c in group)) + self.padding)
            for name, lists in (self._held_out().items() if held_out else ())
        }
        stored = tree.stack([self._stored(c) for c in group])
        keys = rng.stream(self.root, purpose, round, ids)
        extra = tree.take(pool.extra, ids)
        desks: list[Local] = []

        def one(rows: Tensor, n: Tensor, key: Tensor, extra: Tree, splits: Tree, stored: Tree, own: Tree) -> Tree:
            data = self._data(rows, n, extra)
            local = self._desk(round, data, key, stored["moments"], sizes, mapped=True)
            desks.append(local)
            held = {name: self._data(rows, n, extra) for name, (rows, n) in splits.items()}
            out = fn(local, held, stored["state"], shared | own)
            return {**out, "used": torch.as_tensor(local.used, dtype=self.task.dtype, device=device)}

        with torch.no_grad():
            out = vmap(one)(rows, n, keys, extra, splits, stored, own)
        return out, desks[0]
