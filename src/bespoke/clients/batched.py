"""A cohort at once: the same client code under ``torch.func.vmap``, over blocks of clients of similar size."""

import torch
from torch import Tensor
from torch.func import vmap

from bespoke.clients.loop import one_by_one
from bespoke.clients.simulated import Call, Mapped, Simulated
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

    def _map(self, call: Call) -> Mapped:
        parts, order, used, slots, breaks = [], list[int](), 0.0, 0, 0
        for block in blocks([self.pool.train.sizes[c] for c in call.clients], self.chunk, self.similar):
            part = call.part(block)
            mapped = self._try_block(part) if self.mappable else None
            if mapped is None:
                out, _, broke = one_by_one(self, part)
                breaks += broke
            else:
                out, local = mapped
                used += float(out.pop("used").sum())
                slots += local.slots * len(block)
                breaks += local.breaks
            parts.append(out)
            order += block
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return Mapped(tree.take(tree.concat(parts), back), 1.0 - used / slots if slots else 0.0, breaks)

    def _try_block(self, call: Call) -> tuple[Tree, Local] | None:
        """A block's results and the desk they were made at; None, and a note, if the method cannot be mapped."""
        try:
            return self._block(call)
        except (RuntimeError, NotImplementedError) as error:
            # If the loop fails too, its error is the plain one to show; if not, mapping was the trouble.
            one_by_one(self, call.part([0]))
            self.mappable = False
            reason = str(error).strip().splitlines()[0]
            self.notes.append(f"clients ran one after another, because mapping them failed: {reason}")
            return None

    def _block(self, call: Call) -> tuple[Tree, Local]:
        pool, group, device = self.pool, call.clients, self.root.device
        sizes = [pool.train.sizes[c] for c in group]
        ids = torch.tensor(list(group), device=device)
        rows, n = pool.train.block(group, call.width or max(sizes) + self.padding)
        splits = {
            name: lists.block(group, max(1, *(lists.sizes[c] for c in group)) + self.padding)
            for name, lists in (self.held_out().items() if call.held_out else ())
        }
        stored = self.stored(group, mapped=True)
        keys = rng.stream(self.root, call.purpose, call.round, ids)
        extra = tree.take(pool.extra, ids)
        desks: list[Local] = []

        def one(rows: Tensor, n: Tensor, key: Tensor, extra: Tree, splits: Tree, stored: Tree, own: Tree) -> Tree:
            local = self.desk(call.round, self.data(rows, n, extra), key, stored["moments"], sizes, mapped=True)
            desks.append(local)
            held_out = {name: self.data(rows, n, extra) for name, (rows, n) in splits.items()}
            out = call.fn(local, held_out, stored["state"], call.shared | own)
            return {**out, "used": torch.as_tensor(local.used, dtype=self.task.dtype, device=device)}

        with torch.no_grad():
            out = vmap(one)(rows, n, keys, extra, splits, stored, call.own)
        return out, desks[0]
