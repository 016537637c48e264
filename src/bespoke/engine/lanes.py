"""Clients side by side in lanes: how the one loop runs for a whole block, outside ``torch.func.vmap``.

A method's code runs inside vmap, for one client. At a loop it steps out: there the lanes' tensors are plain ones with a
leading axis, so that a lane can be dropped when its client has finished, a step can be recorded once and replayed, and
the optimiser can update all clients with one operation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bespoke.core.tree import Tree

# advance(carry, inputs, t, idle) -> carry: one step of the first k lanes, all leaves (k, ...) but the shared inputs;
# t is the step's number (0-d), and ``idle`` says that some of these lanes may have finished.
Advance = Callable[[list[Tensor], list[Tensor], Tensor, bool], list[Tensor]]
# work(lanes, dims, tensors) -> tensors: what is done outside vmap; dims as in torch.func (None: the same for all).
Work = Callable[[int, Sequence[int | None], Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Job:
    """A loop over minibatches of a block of clients."""

    advance: Advance
    carry: list[Tensor]  # leaves (K, ...)
    inputs: list[Tensor]  # leaves (K, ...), or of any shape where ``shared``
    shared: list[bool]
    calls: Callable[[int], int]  # steps of a client with so many rows
    seen: Callable[[int], int]  # rows that it sees in them
    rows: int  # rows that a lane computes in one step
    timed: int  # the first inputs are (K, T, ...): T minibatches after another,
    most: int  # for this number of steps


class Runner(Protocol):
    """Who runs loops for the lanes."""

    owns_carry: bool  # a step may overwrite the carry that it is given

    def out(self, work: Work, lanes: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Do ``work`` between two mapped parts."""
        ...

    def fold(self, job: Job) -> list[Tensor]:
        """The carry after each lane's own number of steps."""
        ...


def exactly(active: int, lanes: int) -> int:
    """Run just the lanes that are active."""
    return active


class Eager:
    """Step after step, with the finished lanes dropped. ``sizes`` are the clients' rows, largest first."""

    owns_carry = False

    def __init__(self, slots: Callable[[int, int], int] = exactly) -> None:
        """``slots(active, lanes)`` is the number of lanes to run when so many of them are active."""
        self.slots = slots
        self.computed = self.seen = 0  # rows, for the padding waste
        self.sizes: list[int] = []

    def begin(self, sizes: Sequence[int]) -> None:
        """A block of clients comes."""
        self.sizes, self.computed, self.seen = list(sizes), 0, 0

    def width(self, rows: int) -> int:
        """The number of rows that blocks of so many are padded to."""
        return rows

    def lanes(self, clients: int) -> int:
        """The number of lanes that blocks of so many clients are padded to."""
        return clients

    def timings(self) -> dict[str, float]:
        """Seconds by phase, where they are counted."""
        return {}

    def call(
        self, name: str, sizes: Sequence[int], block: Callable[[Tree], tuple[Tree, int]], inputs: Tree
    ) -> tuple[Tree, int]:
        """What ``block(inputs)`` gives for clients of these sizes: a stacked tree and its breaks."""
        self.begin(sizes)
        return block(inputs)

    def forget(self, most: int) -> None:
        """Give back what was kept for later blocks, which will have at most so many clients."""

    def out(self, work: Work, lanes: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Do ``work``."""
        return work(lanes, dims, tensors)

    def fold(self, job: Job) -> list[Tensor]:
        """The carry after each lane's own number of steps."""
        carry, inputs, finished = job.carry, job.inputs, list[list[Tensor]]()
        lanes = len(self.sizes)
        for t, active, wanted in self.schedule(job, self.sizes):
            if wanted < lanes:
                finished.append([x[wanted:] for x in carry])
                carry, lanes = [x[:wanted] for x in carry], wanted
                inputs = [x if same else x[:wanted] for x, same in zip(inputs, job.shared, strict=True)]
            number = torch.full((), t, dtype=torch.int64, device=carry[0].device)
            carry = job.advance(carry, inputs, number, active < lanes)
        parts = [carry, *reversed(finished)]
        return [torch.cat(leaves) for leaves in zip(*parts, strict=True)] if finished else carry

    def schedule(self, job: Job, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Each step's number, how many lanes are active, and how many to run; counts the rows on the way."""
        counts = [job.calls(n) for n in sizes]
        plan, active, lanes = [], len(counts), len(job.carry[0])
        for t in range(max(counts, default=0)):
            while counts[active - 1] <= t:
                active -= 1
            lanes = min(lanes, self.slots(active, lanes))
            plan.append((t, active, lanes))
        self.computed += job.rows * sum(lanes for _, _, lanes in plan)
        self.seen += sum(job.seen(n) for n in sizes)
        return plan


def step_out(runner: Runner, work: Work, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Leave vmap, do ``work`` on the stacked tensors, and come back. Not differentiable."""
    return tuple(_Out.apply(runner, work, *tensors))


class _Out(torch.autograd.Function):
    """Its vmap rule sees the stacked tensors; outside vmap there is one lane."""

    @staticmethod
    def forward(runner: Runner, work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        out = runner.out(work, 1, [0] * len(tensors), [t[None] for t in tensors])
        return tuple(x[0] for x in out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, runner: Runner, work: Work, *tensors: Tensor) -> tuple[Any, Any]:
        out = runner.out(work, info.batch_size, in_dims[2:], tensors)
        return tuple(out), (0,) * len(out)


def stacked(lanes: int, dim: int | None, tensor: Tensor) -> Tensor:
    """A tensor of vmap as (lanes, ...)."""
    return tensor.expand(lanes, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def choose(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """``new`` (k, ...) in the lanes where ``active`` (k,) holds, else ``old``; an unsound value not taken does no harm.

    Without lanes, ``active`` is 0-d.
    """
    return torch.where(active.reshape(active.shape + (1,) * (new.ndim - active.ndim)), new, old)
