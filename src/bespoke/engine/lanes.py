"""Clients side by side in lanes: how the one loop runs for a whole block, outside ``torch.func.vmap``.

A method's code runs inside vmap, for one client. At a loop it steps out: there the lanes' tensors are plain, with a
leading axis, so that a lane can be dropped when its client has finished, a step can be recorded once and replayed, and
the optimiser can update all clients with one operation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from bespoke.core import tree
from bespoke.core.data import Batch
from bespoke.core.local import Descended, Descent, Length, Local, Step
from bespoke.core.tree import Tree
from bespoke.engine.descent import descend
from bespoke.engine.purity import refuse_tensors
from bespoke.engine.rows import ClientRows, fetch
from bespoke.engine.scan import Scan, layout, take_over

TIMED = 2  # inputs of a lane that have one entry per minibatch: its integers (rows, positions, key) and its mask

# advance(carry, inputs, t, idle) -> carry: one step of the first k lanes, all leaves (k, ...) but the shared inputs;
# t is the step's number (0-d), and ``idle`` says that some of these lanes may have finished.
Advance = Callable[[list[Tensor], list[Tensor], Tensor, bool], list[Tensor]]
# work(lanes, dims, tensors) -> tensors: work outside vmap; dims as in torch.func (None: the same for all).
Work = Callable[[int, Sequence[int | None], Sequence[Tensor]], list[Tensor]]
# one(lane, same) -> (tree, breaks): one client's work inside vmap, and how often it called the host.
One = Callable[[Tree, Tree], tuple[Tree, int]]


@dataclass(frozen=True)
class Job:
    """A loop over minibatches of a block of clients."""

    advance: Advance
    carry: list[Tensor]  # leaves (K, ...)
    inputs: list[Tensor]  # leaves (K, ...), or of any shape if ``shared``
    shared: list[bool]
    num_steps: Callable[[int], int]  # steps of a client with n rows
    rows_seen: Callable[[int], int]  # rows that it sees in them
    rows: int  # rows that a lane computes per step
    timed: int  # the first inputs are (K, T, ...): T minibatches one after another,
    most: int  # for this number of steps


class Called(NamedTuple):
    """The result of a block's work."""

    tree: Tree  # leaves (K, ...)
    breaks: int  # calls to the host
    computed: int  # rows computed in its loops, padding included
    seen: int  # rows seen by clients in them


class Runner(Protocol):
    """What runs blocks of clients: step after step (:class:`Eager`), or recorded (:mod:`bespoke.engine.graphs`)."""

    owns_carry: bool  # a step may overwrite its carry
    slots: Callable[[int, int], int]  # (active, lanes) -> the number of lanes to run

    def width(self, rows: int) -> int:
        """Return the number of rows to pad blocks of ``rows`` to."""
        ...

    def lanes(self, clients: int) -> int:
        """Return the number of lanes to pad blocks of ``clients`` to."""
        ...

    def call(self, name: str, sizes: Sequence[int], one: One, inputs: Tree) -> Called:
        """Map ``one`` over ``inputs["lanes"]``, clients of these sizes, largest first; ``inputs["same"]`` is for all.

        A ``name`` always stands for the same work; without one, the work may be anything.
        """
        ...

    def out(self, work: Work, lanes: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Do ``work`` between two mapped parts."""
        ...

    def run(self, job: Job) -> list[Tensor]:
        """Return the carry after each lane's own number of steps."""
        ...

    def forget(self, most: int) -> None:
        """Free what was kept for later blocks, which will have at most ``most`` clients."""
        ...

    def timings(self) -> dict[str, float]:
        """Return seconds by phase, if they are counted."""
        ...


def exactly(active: int, lanes: int) -> int:
    """Return the number of active lanes: run just those."""
    return active


class Schedule(NamedTuple):
    """The steps of a job, and what they cost."""

    steps: list[tuple[int, int, int]]  # number of the step, active lanes, lanes to run
    computed: int
    seen: int


def schedule(job: Job, sizes: Sequence[int], slots: Callable[[int, int], int]) -> Schedule:
    """Plan a job for clients of these sizes, largest first."""
    counts = [job.num_steps(n) for n in sizes]
    steps, active, lanes = [], len(counts), len(job.carry[0])
    for t in range(max(counts, default=0)):
        while counts[active - 1] <= t:
            active -= 1
        lanes = min(lanes, slots(active, lanes))
        steps.append((t, active, lanes))
    return Schedule(steps, job.rows * sum(lanes for _, _, lanes in steps), sum(job.rows_seen(n) for n in sizes))


def mapped(one: One, inputs: Tree) -> tuple[Tree, int]:
    """Map ``one`` over the lanes, and return the stacked tree and the breaks, which are the same for all lanes."""
    breaks = 0

    def lane(lane: Tree, same: Tree) -> Tree:
        nonlocal breaks
        out, breaks = one(lane, same)
        return out

    with torch.no_grad():
        out = vmap(lane, in_dims=(0, None))(inputs["lanes"], inputs["same"])
    return out, breaks


class Eager:
    """Runs blocks step after step, and drops lanes that have finished."""

    owns_carry = False

    def __init__(self, slots: Callable[[int, int], int] = exactly) -> None:
        """Take ``slots(active, lanes)``, the number of lanes to run."""
        self.slots = slots
        self._sizes: Sequence[int] = ()
        self._computed = self._seen = 0

    def width(self, rows: int) -> int:
        """Return just these rows."""
        return rows

    def lanes(self, clients: int) -> int:
        """Return just these clients."""
        return clients

    def call(self, name: str, sizes: Sequence[int], one: One, inputs: Tree) -> Called:
        """Map ``one`` over the lanes."""
        self._sizes, self._computed, self._seen = sizes, 0, 0
        return Called(*mapped(one, inputs), self._computed, self._seen)

    def out(self, work: Work, lanes: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Do ``work``."""
        return work(lanes, dims, tensors)

    def run(self, job: Job) -> list[Tensor]:
        """Return the carry after each lane's own number of steps."""
        carry, inputs, finished = job.carry, job.inputs, list[list[Tensor]]()
        planned, lanes = schedule(job, self._sizes, self.slots), len(job.carry[0])
        self._computed, self._seen = self._computed + planned.computed, self._seen + planned.seen
        for t, active, wanted in planned.steps:
            if wanted < lanes:
                finished.append([x[wanted:] for x in carry])
                carry, lanes = [x[:wanted] for x in carry], wanted
                inputs = [x if same else x[:wanted] for x, same in zip(inputs, job.shared, strict=True)]
            number = torch.full((), t, dtype=torch.int64, device=carry[0].device)
            carry = job.advance(carry, inputs, number, active < lanes)
        parts = [carry, *reversed(finished)]
        return [torch.cat(leaves) for leaves in zip(*parts, strict=True)] if finished else carry

    def forget(self, most: int) -> None:
        """Keep nothing in the first place."""

    def timings(self) -> dict[str, float]:
        """Count nothing."""
        return {}


class Lanes:
    """The desk's strategy for each client of a block, inside vmap: its loops are the runner's."""

    def __init__(self, rows: ClientRows, smallest: int, largest: int, runner: Runner) -> None:
        """Take the client's rows; every client of the block has ``smallest`` to ``largest`` real rows."""
        self._rows, self._smallest, self._largest, self._runner = rows, smallest, largest, runner

    @property
    def n(self) -> Tensor:
        """The number of train rows, 0-d int64."""
        return self._rows.n

    def labels(self) -> tuple[Tensor, Tensor]:
        """Return the labels of all rows, padding included, and their mask."""
        return self._rows.labels()

    def chunks(self, key: Tensor) -> Iterator[Batch]:
        """Yield all rows, padding included, in order, without augmentation."""
        return self._rows.chunks(key)

    def scan(self, desk: Local, step: Step, carry: Tree, consts: tuple[Any, ...], length: Length, tag: int) -> Tree:
        """Return the carry after the client's own number of steps."""
        refuse_tensors(step, Local, "step")
        return self._run(desk, Scan.of(desk, step, take_over, consts, length, tag), carry)

    def descend(self, desk: Local, descent: Descent) -> Descended:
        """Run the optimiser on all lanes at once."""
        return descend(desk, descent, self._run, lanes=True, in_place=self._runner.owns_carry)

    def host(self, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call ``fn`` with the lanes' tensors, stacked."""
        return host(self._runner.out, fn, tensors)

    def _run(self, desk: Local, scan: Scan, carry: Tree) -> Tree:
        """Lay out the batches of every lane, and hand them to the runner."""
        steps, per_step = scan.num_steps(self._largest), scan.length.per_step
        if not steps:
            return carry
        data, limit = self._rows, scan.length.limit
        positions, real, keys = layout(desk.key, scan, data.width, data.n, self._smallest, steps * per_step)
        own = scan.num_steps(data.n)
        own = own if limit is None else torch.minimum(own, limit)
        rows, mask = data.rows[positions], real.to(desk.task.dtype)
        start, carry_spec = tree.flatten_any(carry)
        given, spec = tree.flatten_any({"own": own, "extra": data.extra, "consts": scan.consts})
        x, y, transform, dtype, runner = data.x, data.y, data.transform, data.dtype, self._runner
        scan = replace(scan, consts=())  # they are inputs now, and a recorded step would keep the first ones alive

        def work(lanes: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
            first = len(start)
            shared = [dim is None for dim in dims[first:]]
            full = [stacked(lanes, dim, t) for dim, t in zip(dims[:first], tensors[:first], strict=True)]
            pairs = zip(dims[first:], tensors[first:], strict=True)
            inputs = [t if dim is None else t.movedim(dim, 0) for dim, t in pairs]
            in_dims = [None if same else 0 for same in shared]

            def advance(carry: list[Tensor], inputs: list[Tensor], t: Tensor, idle: bool) -> list[Tensor]:
                places = t[None] if per_step == 1 else t * per_step + torch.arange(per_step, device=t.device)
                now, rest = [b.index_select(1, places) for b in inputs[:TIMED]], inputs[TIMED:]

                def one(carry: Tree, now: list[Tensor], rest: list[Tensor]) -> Tree:
                    known, group = tree.unflatten_any(rest, spec), []
                    for integers, mask in zip(*(b.unbind(0) for b in now), strict=True):
                        rows, positions, key = integers.split([len(mask), len(mask), 2])
                        examples, labels = fetch(x, y, rows, key, known["extra"], transform, dtype, train=True)
                        group.append(Batch(examples, labels, mask, positions, t, key))
                    batch = tuple(group) if per_step > 1 else group[0]
                    return scan.step(carry, batch, *known["consts"])

                whole = tree.unflatten_any(carry, carry_spec)
                out = scan.once(vmap(one, in_dims=(0, 0, in_dims[TIMED:])), whole, now, rest)
                known = tree.unflatten_any(rest, spec)
                active = t < known["own"] if idle or limit is not None else None
                return tree.flatten_any(scan.finish(whole, out, known["consts"], active))[0]

            width = mask.shape[-1] * per_step
            return runner.run(Job(advance, full, inputs, shared, scan.num_steps, scan.rows_seen, width, TIMED, steps))

        integers = torch.cat([rows, positions, keys], dim=-1)  # side by side, so that one kernel fetches a batch's
        done = step_out(runner.out, work, [*start, integers, mask, *given])
        result: Tree = tree.unflatten_any(done, carry_spec)
        return result


# --- leaving vmap -------------------------------------------------------------------------------------------------

Out = Callable[[Work, int, Sequence[int | None], Sequence[Tensor]], list[Tensor]]


def step_out(out: Out, work: Work, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Leave vmap, let ``out`` do ``work`` on the stacked tensors, and come back. Not differentiable."""
    return tuple(_Out.apply(out, work, *tensors))


class _Out(torch.autograd.Function):
    """Its vmap rule sees the stacked tensors; outside vmap there is one lane."""

    @staticmethod
    def forward(out: Out, work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x[0] for x in out(work, 1, [0] * len(tensors), [t[None] for t in tensors]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, out: Out, work: Work, *tensors: Tensor) -> tuple[Any, Any]:
        done = out(work, info.batch_size, in_dims[2:], tensors)
        return tuple(done), (0,) * len(done)


def host(out: Out, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Leave vmap and call ``fn`` with each tensor stacked: (lanes, ...)."""
    return step_out(out, OnHost(fn), tensors)


@dataclass(frozen=True)
class OnHost:
    """The work of a host function, which a runner can tell from a loop."""

    fn: Callable[..., Any]

    def __call__(self, lanes: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function with each tensor stacked."""
        return list(self.fn(*(stacked(lanes, dim, t) for dim, t in zip(dims, tensors, strict=True))))


def stacked(lanes: int, dim: int | None, tensor: Tensor) -> Tensor:
    """Return a tensor of vmap as (lanes, ...)."""
    return tensor.expand(lanes, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


# --- packing ------------------------------------------------------------------------------------------------------


def blocks(sizes: Sequence[int], chunk: int, similar: float = 0.5) -> list[list[int]]:
    """Pack positions into blocks of at most ``chunk`` whose sizes are at least ``similar`` times the block's largest.

    Small clients are kept together whatever their ratio, since a few padded rows cost less than a call.
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    packed: list[list[int]] = []
    for i in order:
        if packed and len(packed[-1]) < chunk:
            largest = sizes[packed[-1][0]]
            if sizes[i] >= similar * largest or largest <= 16:
                packed[-1].append(i)
                continue
        packed.append([i])
    return packed
