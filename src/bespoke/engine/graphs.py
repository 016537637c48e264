"""CUDA graphs: the work of a block of clients is recorded once and replayed for later blocks of the same shape.

A block's work is a *plan*: recorded pieces, and between them the work outside vmap (a loop over minibatches, a
host function). A loop is a *program*: one recorded step per number of lanes, on its own buffers, replayed as
often as the current clients need, with fewer lanes as they finish. Programs serve all plans of a method.

Before the first block of a kind, its work is *rehearsed*: gone through once, with one step of each loop, so that all
its kernels are compiled at once. Nothing is kept of that but the kernels.
"""

import contextlib
import gc
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.engine.lanes import Called, Job, One, OnHost, Work, mapped, schedule
from bespoke.errors import reason
from bespoke.gpu.launching import rehearse

# A step is recorded for numbers of lanes that are multiples of the first (and 1 and 2), a plan for multiples of the
# second: a step is cheap to record and runs often, a plan is expensive and runs once per round.
STEP_LANES, PLAN_LANES = 4, 16
WIDTHS = 1.5  # a plan's rows are rounded up by at most this factor
MOST_PLANS = 24  # kept, and fewer
SPARE = 0.1  # if less than this share of the device's memory is free


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _slots(active: int, lanes: int) -> int:
    """Return the next larger number of lanes for which steps are recorded."""
    return min(lanes, active if active <= 2 else _up(active, STEP_LANES))


class Recorded:
    """Runs blocks on CUDA: the first of a kind eagerly, then each shape is recorded once and replayed."""

    owns_carry = True

    def __init__(self, device: torch.device, most: int, largest: int, record: bool, notes: list[str]) -> None:
        """Take the number of clients in the largest block, ``most``, and of rows of the largest client, ``largest``."""
        self.slots: Callable[[int, int], int] = _slots
        self.device, self.most, self.largest, self.record, self.notes = device, most, largest, record, notes
        self.stream = torch.cuda.Stream(device)
        self.seconds = {"recording": 0.0, "steps": 0.0}
        self._plans: OrderedDict[Hashable, _Plan] = OrderedDict()
        self._failures: dict[Hashable, int] = {}
        self._warm: set[str] = set()
        self._programs: dict[Hashable, _Program] = {}
        self._marks: deque[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._recording: _Plan | None = None
        self._rehearsing = False
        self._loops = 0
        self._name = ""
        self._sizes: Sequence[int] = ()
        self._computed = self._seen = 0
        self.forget(most)

    def forget(self, most: int) -> None:
        """Free all recordings and their memory."""
        self.most = most
        self._plans.clear()
        self._programs.clear()
        # Pieces of a plan and steps of a program run in turn, so they may not share memory with each other.
        self._pieces, self._steps = _Memory(self.stream), _Memory(self.stream)
        torch.cuda.empty_cache()

    def width(self, rows: int) -> int:
        """Return ``rows`` or a few more, so that blocks of similar size have the same shape."""
        wide = max(rows, self.largest)
        while wide / WIDTHS >= rows:
            wide = int(wide / WIDTHS)
        return wide

    def lanes(self, clients: int) -> int:
        """Return ``clients`` or a few more, for the same reason."""
        return max(clients, min(self.most, _up(clients, PLAN_LANES)))

    def call(self, name: str, sizes: Sequence[int], one: One, inputs: Tree) -> Called:
        """Map ``one`` over the lanes in the way that the shape of ``inputs`` allows."""
        self._name = name
        self._begin(sizes)
        flat, spec = tree.flatten_any(inputs)
        key = (name, str(spec), tuple((x.shape, x.dtype) for x in flat))
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):
                if name not in self._warm:
                    self._rehearse(one, inputs)
                with self._timed(name):
                    out, breaks = self._call(name, key, one, inputs, flat)
                return Called(out, breaks, self._computed, self._seen)
        finally:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _begin(self, sizes: Sequence[int]) -> None:
        self._sizes, self._computed, self._seen, self._loops = sizes, 0, 0, 0

    def _rehearse(self, one: One, inputs: Tree) -> None:
        self._rehearsing = True
        try:
            rehearse(lambda: mapped(one, inputs))
        finally:
            self._rehearsing = False

    def _call(self, name: str, key: Hashable, one: One, inputs: Tree, flat: list[Tensor]) -> tuple[Tree, int]:
        plan = self._plans.get(key)
        known = name in self._warm  # before, libraries and kernels may be missing that cannot be loaded in a recording
        self._warm.add(name)
        if plan is not None:
            self._plans.move_to_end(key)
            plan.replay(flat)
        elif self.record and known and self._failures.get(key, 0) < 2:
            plan = self._try_to_record(name, key, one, inputs)
        if plan is None:
            self._begin(self._sizes)
            return mapped(one, inputs)
        return tree.map(torch.clone, plan.result), plan.breaks

    def _try_to_record(self, name: str, key: Hashable, one: One, inputs: Tree) -> "_Plan | None":
        plan = _Plan(inputs)
        try:
            self._record(plan, one)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._failures[key] = self._failures.get(key, 0) + 1
            if self._failures[key] == 2:
                self._tell(name, error)
            return None
        self._plans[key] = plan
        while len(self._plans) > MOST_PLANS or (len(self._plans) > 1 and self._crowded()):
            self._plans.popitem(last=False)  # the least recently used
        return plan

    def _crowded(self) -> bool:
        free, total = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device) < SPARE * total

    def _tell(self, what: str, error: Exception) -> None:
        note = f"{what} runs without a recorded graph: {reason(error)}"
        if note not in self.notes:
            self.notes.append(note)

    @contextlib.contextmanager
    def _timed(self, phase: str, within: str = "") -> Iterator[None]:
        """Count the device's time in a phase, without waiting for it, and not in the phase that contains it."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._marks.append((phase, within, begin, end))
        while len(self._marks) > 64 and self._marks[0][3].query():
            self._count_mark()

    def _count_mark(self) -> None:
        phase, within, begin, end = self._marks.popleft()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        if within:
            self.seconds[within] = self.seconds.get(within, 0.0) - seconds

    def timings(self) -> dict[str, float]:
        """Return the seconds so far: ``steps`` of all loops, the rest of each work by its name, and ``recording``.

        Recording is host time, which is contained in the others.
        """
        while self._marks:
            self._count_mark()
        return dict(self.seconds)

    def _record(self, plan: "_Plan", one: One) -> None:
        begin = time.perf_counter()
        self._recording = plan
        try:
            self._pieces.start()
            plan.result, plan.breaks = mapped(one, plan.inputs)
            plan.piece(self._pieces.stop())
        except BaseException:
            self._pieces.give_up()
            raise
        finally:
            self._recording = None
        self.seconds["recording"] += time.perf_counter() - begin

    def out(self, work: Work, lanes: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Do ``work``, between two pieces if a plan is being recorded."""
        if self._rehearsing and isinstance(work, OnHost):
            raise RuntimeError("a rehearsal ends here: a host function gets no made-up numbers")
        plan = self._recording
        if plan is None:
            return [x.clone() for x in work(lanes, dims, tensors)]
        plan.piece(self._pieces.stop())
        self._recording, begin = None, time.perf_counter()
        result = [x.clone() for x in work(lanes, dims, tensors)]
        self.seconds["recording"] -= time.perf_counter() - begin  # this was no recording
        self._recording = plan
        plan.between(work, lanes, dims, tensors, result)
        self._pieces.start()
        return result

    def run(self, job: Job) -> list[Tensor]:
        """Return the carry after each lane's own number of steps, as views of a program's buffers."""
        if self._rehearsing:
            program = _Program(job, len(job.carry[0]), job.most, self._steps)
            program.load(job, len(job.carry[0]))
            program.try_out(len(job.carry[0]))
            return program.carry
        shapes = tuple((x.shape[1:], x.dtype) for x in job.carry)
        given = tuple(
            (x.shape if same else x.shape[1:] if i >= job.timed else x.shape[2:], x.dtype, same)
            for i, (x, same) in enumerate(zip(job.inputs, job.shared, strict=True))
        )
        key = (self._name, self._loops, shapes, given)
        self._loops += 1
        if key not in self._programs:
            self._programs[key] = _Program(
                job, max(self.most, len(job.carry[0])), job.num_steps(self.largest), self._steps
            )
        program, lanes = self._programs[key], len(job.carry[0])
        program.load(job, lanes)
        with self._timed("steps", within=self._name):
            planned = schedule(job, self._sizes, self.slots)
            self._computed, self._seen = self._computed + planned.computed, self._seen + planned.seen
            for _, _, running in planned.steps:
                begin = time.perf_counter()
                if program.step(running, self.record):
                    self.seconds["recording"] += time.perf_counter() - begin
        if program.trouble:
            self._tell(f"a loop of {self._name}", program.trouble)
        return [x[:lanes] for x in program.carry]


class _Memory:
    """Memory that recordings share, and the recording in progress in it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._graph: torch.cuda.CUDAGraph | None = None
        self._firsts: list[torch.cuda.CUDAGraph] = []
        self._renew()

    def _renew(self) -> None:
        """Start a new pool. One without any recording would be freed, so it gets a first one."""
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            self.start()
            torch.zeros(1, device=self._stream.device)
            self._firsts.append(self.stop())

    def start(self) -> None:
        """Record from here on."""
        self._collects = gc.isenabled()
        gc.disable()  # what the collector would free on the device cannot be freed in a recording
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def stop(self) -> torch.cuda.CUDAGraph:
        """End and return the recording."""
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        if self._collects:
            gc.enable()
        return graph

    def give_up(self) -> None:
        """Abandon a recording that an operation has spoilt, and with it the pool, which torch may not release."""
        if self._graph is not None:
            with contextlib.suppress(RuntimeError):
                self.stop()
        if self._collects:
            gc.enable()
        self._renew()


class _Plan:
    """A block's work for one shape: recorded pieces and the work between them, on inputs that stay in place."""

    def __init__(self, inputs: Tree) -> None:
        flat, spec = tree.flatten_any(inputs)
        self.flat = [x.clone() for x in flat]
        self.inputs: Tree = tree.unflatten_any(self.flat, spec)
        self.result: Tree = {}
        self.breaks = 0
        self._todo: list[Callable[[], Any]] = []
        self._kept: list[Any] = []

    def piece(self, graph: torch.cuda.CUDAGraph) -> None:
        """Run what was just recorded, so that its tensors hold values, and keep it."""
        graph.replay()
        self._todo.append(graph.replay)

    def between(self, work: Work, lanes: int, dims: Any, tensors: Any, result: list[Tensor]) -> None:
        self._todo.append(lambda: torch._foreach_copy_(result, work(lanes, dims, tensors)))
        self._kept.append((tensors, result))  # a tensor that a piece writes or reads must keep its memory

    def replay(self, flat: list[Tensor]) -> None:
        torch._foreach_copy_(self.flat, flat)
        for do in self._todo:
            do()


class _Program:
    """One step of a loop, recorded for several numbers of lanes on the same buffers."""

    def __init__(self, job: Job, lanes: int, most: int, memory: _Memory) -> None:
        """Make buffers for at most ``lanes`` lanes and ``most`` steps."""
        self._advance, self._memory, self._timed = job.advance, memory, job.timed
        self._shared = job.shared
        self.trouble: RuntimeError | None = None  # why steps cannot be recorded
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._t = torch.zeros((), dtype=torch.int64, device=job.carry[0].device)
        self.carry = [x.new_zeros(lanes, *x.shape[1:]) for x in job.carry]
        per_step = job.inputs[0].shape[1] // max(1, job.most)
        self._inputs = []
        for i, (x, same) in enumerate(zip(job.inputs, job.shared, strict=True)):
            own = (lanes, most * per_step, *x.shape[2:]) if i < job.timed else (lanes, *x.shape[1:])
            self._inputs.append(x.new_zeros(x.shape if same else own))

    def load(self, job: Job, count: int) -> None:
        """Load the ``count`` lanes of a job."""
        self._t.zero_()
        into = [buffer[:count] for buffer in self.carry]
        for i, (buffer, x) in enumerate(zip(self._inputs, job.inputs, strict=True)):
            view = buffer if self._shared[i] else buffer[:count]
            into.append(view[:, : x.shape[1]] if i < self._timed else view)
        torch._foreach_copy_(into, [*job.carry, *job.inputs])

    def step(self, lanes: int, record: bool) -> bool:
        """Run one step of the first lanes, and return whether it had to be recorded first."""
        fresh = record and self.trouble is None and lanes not in self._graphs
        if fresh:
            try:
                self._record(lanes)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.trouble = error
        if record and lanes in self._graphs:
            self._graphs[lanes].replay()
        else:
            self._once(lanes)
        return fresh

    def _once(self, lanes: int) -> None:
        carry, inputs = self._view(lanes)
        new = self._advance(carry, inputs, self._t, True)
        changed = [(old, x) for old, x in zip(carry, new, strict=True) if x is not old]
        torch._foreach_copy_([old for old, _ in changed], [x for _, x in changed])
        self._t.add_(1)

    def _view(self, lanes: int) -> tuple[list[Tensor], list[Tensor]]:
        inputs = [x if same else x[:lanes] for x, same in zip(self._inputs, self._shared, strict=True)]
        return [x[:lanes] for x in self.carry], inputs

    def try_out(self, lanes: int) -> None:
        """Take a step and forget it. That loads kernels and libraries, which cannot be done in a recording."""
        carry, inputs = self._view(lanes)
        self._advance([x.clone() for x in carry], inputs, self._t, True)

    def _record(self, lanes: int) -> None:
        self.try_out(lanes)
        try:
            self._memory.start()
            self._once(lanes)
            self._graphs[lanes] = self._memory.stop()
        except BaseException:
            self._memory.give_up()
            raise
