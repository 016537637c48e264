"""A cohort at once: the same client code under ``torch.func.vmap``, over blocks of clients of similar size."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.func import vmap

from bespoke.clients.sequential import one_by_one
from bespoke.clients.simulated import Call, Mapped, Simulated
from bespoke.clients.work import OUTPUTS, desk
from bespoke.core import rng, tree
from bespoke.core.data import on_device
from bespoke.core.local import collected
from bespoke.core.tree import Tree
from bespoke.engine.graphs import Recorded
from bespoke.engine.lanes import Called, Eager, Lanes, Runner, blocks
from bespoke.errors import is_out_of_device_memory, reason
from bespoke.gpu.step import has_triton

SCARCE = "memory ran out"  # begins the note on blocks that were halved


class BatchedClients(Simulated):
    """Clients sorted by size, padded in blocks of at most ``chunk``, each block one mapped call.

    On CUDA a block's work is recorded as graphs and replayed (``graphs``). Work that cannot be mapped runs one client
    after another instead; ``notes`` says so, and why.
    """

    name, at_once = "batched", True
    chunk = 64  # clients in one mapped call; halved when memory runs out
    similar = 0.5  # a block's smallest client has at least this share of its largest client's rows
    padding = 0  # extra rows beyond a block's largest client: only costs time; for tests

    def __init__(self, *args: Any, graphs: bool = True, **options: Any) -> None:
        """Take what :class:`Simulated` takes; without ``graphs`` nothing is recorded, even on CUDA."""
        super().__init__(*args, **options)
        self.fewest = max(1, min(self.pool.train.sizes))
        self.runner: Runner = Eager()
        self._unmapped: set[str] = set()  # names of work that cannot be mapped
        self._forms: dict[str, list[list[str]]] = {}  # the names of the states that work was done on
        self._gathered = self._metrics_that_do_not_map()
        if self.task.device.type == "cuda":
            if not has_triton():
                self.notes.append(
                    "without Triton and a C compiler everything runs on torch's own kernels, far slower: install both"
                )
            self.similar = 0.0  # lanes are dropped as clients finish, so unequal clients may share a block
            most = min(self.chunk, self.pool.total_clients)
            self.runner = Recorded(self.task.device, most, max(self.pool.train.sizes), graphs, self.notes)

    def timings(self) -> dict[str, float]:
        """Return the device's seconds by phase, if they are counted."""
        return self.runner.timings()

    def _metrics_that_do_not_map(self) -> frozenset[str]:
        """Return the metrics to compute from gathered outputs, with a note; the clients' work stays mapped."""
        y = self.pool.y[:3]
        outputs = torch.zeros(2, len(y), self.task.num_outputs, dtype=self.task.dtype, device=self.root.device)
        mask = torch.ones(2, len(y), dtype=self.task.dtype, device=self.root.device)
        found = []
        for name, metric in self.task.objective.metrics.items():
            try:
                vmap(metric.fn)(outputs, torch.stack([y, y]), mask)
            except Exception as error:
                metric.fn(outputs[0], y, mask[0])  # if this fails too, its error is the plain one to show
                why = reason(error)
                self.notes.append(f"the metric {name} runs on gathered outputs, because mapping it failed: {why}")
                found.append(name)
        return frozenset(found)

    def _measure(self, call: Call, out: Tree) -> Tree:
        """Replace the outputs that a block's clients gathered by the metrics that do not map."""
        scores: Tree = {}
        for split, views in out["scores"].items():
            rows = [self.rows_of(self.held_out()[split], client).labels() for client in call.clients]
            scores[split] = {}
            for view, found in views.items():
                kept = {name: pair for name, pair in found.items() if name != OUTPUTS}
                for name in self._gathered:
                    fn = self.task.objective.metrics[name].fn
                    own = zip(found[OUTPUTS], rows, strict=True)
                    pairs = [fn(outputs[: len(mask)], y, mask) for outputs, (y, mask) in own]
                    kept |= tree.stack([{name: {"sum": total, "weight": weight}} for total, weight in pairs])
                scores[split][view] = kept
        return out | {"scores": scores}

    def _map(self, call: Call) -> Mapped:
        while True:
            try:
                return self._map_blocks(call)
            except Exception as error:
                fewer = min(self.chunk, len(call.clients)) // 2
                if not (fewer and self.halve and is_out_of_device_memory(error)):
                    raise
                self.chunk = fewer
                self.runner.forget(fewer)
                self.notes.append(f"{SCARCE}: at most {fewer} clients run at once")

    def _blocks(self, clients: Sequence[int]) -> list[list[int]]:
        return blocks([self.pool.train.sizes[c] for c in clients], self.chunk, self.similar)

    def _map_blocks(self, call: Call) -> Mapped:
        parts, places, breaks, computed, seen = [], [], 0, 0, 0
        for block in self._blocks(call.clients):
            part = call.part(block)
            done = self._try_block(part) if call.name not in self._unmapped else self._one_by_one(part)
            breaks, computed, seen = breaks + done.breaks, computed + done.computed, seen + done.seen
            parts.append(done.tree)
            places.append(block)
        return Mapped(tree.merge(parts, places), 1.0 - seen / computed if computed else 0.0, breaks)

    def _one_by_one(self, call: Call) -> Called:
        out, _, breaks = one_by_one(self, call)
        return Called(out, breaks, computed=0, seen=0)

    def _try_block(self, call: Call) -> Called:
        """Run a block at once, or one client after another, with a note, if the work cannot be mapped."""
        try:
            done = self._block(call)
        except Exception as error:
            if is_out_of_device_memory(error):
                raise
            done = self._one_by_one(call)  # if this fails too, its error is plain and names the client
            self._unmapped |= {call.name} - {""}
            note = f"clients ran one after another, because mapping them failed: {reason(error)}"
            if note not in self.notes:
                self.notes.append(note)
            return done
        return done._replace(tree=self._measure(call, done.tree)) if call.held_out and self._gathered else done

    def _block(self, call: Call) -> Called:
        pool, device, count = self.pool, self.root.device, len(call.clients)
        sizes = [pool.train.sizes[c] for c in call.clients]
        runner = self.runner if call.name else Eager()
        idle = runner.lanes(count) - count
        call = call.part([*range(count), *[count - 1] * idle])  # an idle lane repeats the last client, without effect
        group = call.clients
        # The recording of this block serves others too, so it may depend on the sizes only through this.
        most = runner.width(max(sizes))
        width = call.width or most + self.padding
        ids = on_device(torch.tensor(list(group)), device)
        kept = self.kept(call, mapped=True)
        lanes = {
            "data": pool.train.block(group, width),
            "splits": {
                split: lists.block(group, runner.width(max(1, *(lists.sizes[c] for c in group))) + self.padding)
                for split, lists in (self.held_out().items() if call.held_out else ())
            },
            "key": on_device(rng.stream(self.host_root, call.purpose, call.round, torch.tensor(list(group))), device),
            "extra": tree.take(pool.extra, ids),
            "kept": kept,
            "own": call.own,
        }
        same = {"shared": call.shared, "clock": self.clock(call)}
        work = replace(self.work, gathered=self._gathered)

        def one(lane: Tree, same: Tree) -> tuple[Tree, int]:
            extra, kept = lane["extra"], lane["kept"]
            rows, n = lane["data"]
            strategy = Lanes(self.rows(rows, n, extra), self.fewest, most, runner)
            local = desk(self.task, self.training, strategy, lane["key"], same["clock"], kept["moments"])
            held_out = {split: self.rows(rows, n, extra) for split, (rows, n) in lane["splits"].items()}
            out = call.fn(work, local, held_out, kept["state"], same["shared"] | lane["own"])
            return out, collected(local).breaks

        done = runner.call(self._name_of(call, kept["state"]), sizes, one, {"lanes": lanes, "same": same})
        return done._replace(tree=tree.map(lambda x: x[:count], done.tree)) if idle else done

    def _name_of(self, call: Call, state: Tree) -> str:
        """Return a call's name, another one for states of another form: there a method may do something else."""
        if not call.name:
            return ""
        forms, form = self._forms.setdefault(call.name, []), list(tree.flatten(state))
        if form not in forms:
            forms.append(form)
        number = forms.index(form) + 1
        return call.name if number == 1 else f"{call.name} {number}"
