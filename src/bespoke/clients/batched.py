"""A cohort at once: the same client code under ``torch.func.vmap``, over blocks of clients of similar size."""

from typing import Any

import torch
from torch.func import vmap

from bespoke.clients.sequential import one_by_one
from bespoke.clients.simulated import Call, Mapped, Simulated
from bespoke.core import rng, tree
from bespoke.core.data import blocks, on_device
from bespoke.core.tree import Tree
from bespoke.engine.graphs import Graphs
from bespoke.engine.lanes import Eager
from bespoke.gpu.step import has_triton


class BatchedClients(Simulated):
    """Clients sorted by size, padded in blocks of at most ``chunk``, each block one mapped call.

    On CUDA a block's work is recorded as graphs and replayed (``graphs``). A method that cannot be mapped runs one
    client after another instead; ``notes`` says so, and why.
    """

    name = "batched"
    chunk = 64  # clients in one mapped call; halved when memory runs out
    similar = 0.5  # a block's smallest client has at least this share of its largest one's rows
    padding = 0  # extra rows beyond a block's largest client: changes nothing but time; for tests
    mappable = True

    def __init__(self, *args: Any, graphs: bool = True, **options: Any) -> None:
        """As :class:`Simulated`; without ``graphs`` nothing is recorded, also on CUDA."""
        super().__init__(*args, **options)
        self.fewest = max(1, min(self.pool.train.sizes))
        self.runner: Eager = Eager()
        if self.task.device.type == "cuda":
            if not has_triton():
                self.notes.append("without Triton all runs by torch's own kernels, far slower: install triton")
            self.similar = 0.0  # lanes are dropped as clients finish, so that unequal ones may share a block
            most = min(self.chunk, self.pool.total_clients)
            self.runner = Graphs(self.task.device, most, max(self.pool.train.sizes), graphs, self.notes)

    def _map(self, call: Call) -> Mapped:
        while True:
            try:
                return self._map_blocks(call)
            except torch.OutOfMemoryError:
                fewer = min(self.chunk, len(call.clients)) // 2
                if not fewer:
                    raise
                self.chunk = fewer
                self.runner.forget(fewer)
                self.notes.append(f"memory ran out: at most {fewer} clients run at once")

    def _map_blocks(self, call: Call) -> Mapped:
        parts, places, breaks, computed, seen = [], [], 0, 0, 0
        for block in blocks([self.pool.train.sizes[c] for c in call.clients], self.chunk, self.similar):
            part = call.part(block)
            mapped = self._try_block(part) if self.mappable else None
            if mapped is None:
                out, _, broke = one_by_one(self, part)
            else:
                out, broke = mapped
                computed, seen = computed + self.runner.computed, seen + self.runner.seen
            breaks += broke
            parts.append(out)
            places.append(block)
        return Mapped(tree.merge(parts, places), 1.0 - seen / computed if computed else 0.0, breaks)

    def _try_block(self, call: Call) -> tuple[Tree, int] | None:
        """A block's results and its breaks; None, and a note, if the method cannot be mapped."""
        try:
            return self._block(call)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            # If the loop fails too, its error is the plain one to show; if not, mapping was the trouble.
            one_by_one(self, call.part([0]))
            self.mappable = False
            reason = str(error).strip().splitlines()[0]
            self.notes.append(f"clients ran one after another, because mapping them failed: {reason}")
            return None

    def _block(self, call: Call) -> tuple[Tree, int]:
        pool, device, count = self.pool, self.root.device, len(call.clients)
        sizes = [pool.train.sizes[c] for c in call.clients]
        # Work of the clients' own can be recorded by its name; what a probe brings along may be anything.
        name = call.fn.__name__.strip("_") if getattr(call.fn, "__self__", None) is self else ""
        runner = self.runner if name else Eager()
        idle = runner.lanes(count) - count
        call = call.part([*range(count), *[count - 1] * idle])  # an idle lane repeats the last client, to no effect
        group = call.clients
        # What is recorded for this block serves others too, so it may know no more of the sizes than this.
        most = runner.width(max(sizes))
        width = call.width or most + self.padding
        ids = on_device(torch.tensor(list(group)), device)
        lanes = {
            "data": pool.train.block(group, width),
            "splits": {
                split: lists.block(group, runner.width(max(1, *(lists.sizes[c] for c in group))) + self.padding)
                for split, lists in (self.held_out().items() if call.held_out else ())
            },
            "key": on_device(rng.stream(self.host_root, call.purpose, call.round, torch.tensor(list(group))), device),
            "extra": tree.take(pool.extra, ids),
            "stored": self.stored(group, mapped=True),
            "own": call.own,
        }
        same = {"shared": call.shared, "clock": self.clock(call.round)}

        def one(lane: Tree, same: Tree) -> Tree:
            rows, n = lane["data"]
            data, extra, stored = self.data(rows, n, lane["extra"]), lane["extra"], lane["stored"]
            local = self.desk(same["clock"], data, lane["key"], stored["moments"], self.fewest, most, runner)
            held_out = {split: self.data(rows, n, extra) for split, (rows, n) in lane["splits"].items()}
            out = call.fn(local, held_out, stored["state"], same["shared"] | lane["own"])
            breaks.append(local.breaks)
            return out

        def block(inputs: Tree) -> tuple[Tree, int]:
            breaks.clear()
            with torch.no_grad():
                return vmap(one, in_dims=(0, None))(inputs["lanes"], inputs["same"]), breaks[0]

        breaks: list[int] = []
        out, broke = runner.call(name, sizes, block, {"lanes": lanes, "same": same})
        return (tree.map(lambda x: x[:count], out) if idle else out), broke
