"""Run what a table lacks: several processes, the longest trainings first, until all is done or the time is over."""

import contextlib
import dataclasses
import heapq
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch

from bespoke.core import memory
from bespoke.files import make_folder
from bespoke.machine import cores
from bespoke.runs.api import pick_device
from bespoke.tables import mps, results, worker
from bespoke.tables.plan import Clock, Job, adopt, adoptable, needed, unfinished
from bespoke.tables.worker import Place

_RESERVE = 3.0  # seconds at least before the end of a budget in which a round may end and a checkpoint be written
_ROUNDS = 1.5  # longest rounds that the reserve has room for
_TEARDOWN = 10.0  # seconds that a failed worker has to leave its device
_TICK = 0.5  # seconds between looks at the clock

# What runs side by side where nobody says how many. By benchmarks/side_by_side.py six do 1.9 times the rounds of one on
# a GPU that they share by MPS. Each needs about two cores, for what its host does between kernels and for records.
_ON_ONE_GPU, _CORES_EACH, _GPU_MEMORY = 6, 2, 8e9
_CPU_MEMORY = 2e9  # bytes


@dataclass
class State:
    """How far a sweep is, for whoever shows it."""

    total: int = 0  # entries that a result is wanted for
    before: int = 0  # entries that had one
    adopted: int = 0  # entries whose result another table had
    finished: list[Job] = field(default_factory=list)
    failed: list[tuple[Job, str]] = field(default_factory=list)  # with the sentence
    elsewhere: list[Job] = field(default_factory=list)  # another sweep is at it
    waiting: list[Job] = field(default_factory=list)
    running: dict[str, tuple[Job, float]] = field(default_factory=dict)  # by key: the share that is done
    seconds_left: float | None = None  # a guess; None if nothing like it has run
    out_of_time: bool = False
    crowded: int = 0  # trainings whose memory ran out beside others
    cut: int = 0  # trainings that were ended within a round
    interrupted: bool = False
    how: str = ""  # what runs side by side, in words

    @property
    def done(self) -> int:
        """Entries that have a result."""
        return self.before + self.adopted + count(self.finished)

    @property
    def left(self) -> int:
        """Entries that nobody is at any more."""
        return count(self.waiting) + count([job for job, _ in self.running.values()])


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    job: Job | None = None
    heard: float = 0.0  # when it last told of its job
    told: int = 0  # how often: when training began, then after each round
    longest: float = 0.0  # seconds of a round, the first one left out, which may compile

    @property
    def round_seconds(self) -> float:
        """How long a round of its job takes, as far as is known."""
        return max(self.longest, time.monotonic() - self.heard) if self.told else 0.0

    def hear(self) -> None:
        """Note that it told of its job."""
        self.longest = self.round_seconds if self.told > 1 else 0.0
        self.heard, self.told = time.monotonic(), self.told + 1


def sweep(
    jobs: Sequence[Job],
    place: Place,
    *,
    processes: int | None = 1,
    budget: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
    show: Callable[[State], None] = lambda state: None,
) -> State:
    """Carry out what the jobs lack; return how it ended.

    ``processes`` is the number of trainings side by side; None chooses it by the machine. Several on a GPU share it by
    NVIDIA's MPS, where that runs. ``budget`` is in seconds: shortly before its end the running trainings are told to
    save and stop, and at its end they are ended. ``stopped()`` ends the sweep in the same way, after the round.
    ``show(state)`` is called now and then.
    """
    deadline = None if budget is None else time.monotonic() + budget
    device = pick_device(place.device)
    lacking, found, left, clock = needed(jobs, place.root, device)
    adopt(found, place.root)
    together, total = sum(not job.alone for job in left), count(jobs)
    processes = processes or side_by_side(device, together)
    state = State(total=total, before=total - count(lacking), adopted=len(found))
    state.waiting = _longest_first(left, clock)
    with contextlib.ExitStack() as held:
        shared = dataclasses.replace(place, processes=processes)
        if together and processes > 1:
            state.how = f"{processes} trainings side by side"
            if device.type == "cuda":
                service = held.enter_context(mps.service())
                shared = dataclasses.replace(shared, environment=service.environment)
                state.how += f", {service.words}"
        _work(state, shared, clock, deadline, stopped, show, alone=False)
    _work(state, dataclasses.replace(place, processes=1), clock, deadline, stopped, show, alone=True)
    others = unfinished(state.elsewhere, place.root)  # by now they may be done, also as cells of another table
    found, left = adoptable(others, results.everything(place.root)) if others else ([], [])
    adopt(found, place.root)
    state.before += count(state.elsewhere) - count(others)
    state.adopted += len(found)
    state.elsewhere = left
    return state


def side_by_side(device: torch.device, trainings: int) -> int:
    """Return how many of the trainings to run at once on a device, by its host's cores and by memory."""
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory / _GPU_MEMORY
        most = min(_ON_ONE_GPU, cores() // _CORES_EACH, room)
    else:
        most = min(cores(), memory.free() / _CPU_MEMORY)
    return max(1, int(min(trainings, most)))


def _work(
    state: State,
    place: Place,
    clock: Clock,
    deadline: float | None,
    stopped: Callable[[], bool],
    show: Callable[[State], None],
    alone: bool,
) -> None:
    """Give what waits to worker processes, until nothing waits, time is over or the sweep is stopped.

    Jobs that run ``alone`` are for a call of their own: their times are read, and a shared GPU is slower for each; or
    the memory that others left was too small.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    workers: list[_Worker] = []

    def start() -> _Worker:
        here, there = context.Pipe()
        process = context.Process(target=worker.main, args=(there, place, stop), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here)

    try:
        while True:
            now = time.monotonic()
            state.interrupted = state.interrupted or stopped()
            busy = [each for each in workers if each.job is not None]
            reserve = max([_RESERVE, *(_ROUNDS * each.round_seconds for each in busy)])
            state.out_of_time = state.out_of_time or (deadline is not None and now > deadline - reserve)
            if state.interrupted or state.out_of_time:
                stop.set()
            if deadline is not None and now > deadline:
                state.cut = len(busy)
                break
            while not stop.is_set() and state.waiting and state.waiting[0].alone == alone:
                idle = next((each for each in workers if each.job is None), None)
                if idle is None and len(workers) == place.processes:
                    break
                if idle is None:
                    workers.append(idle := start())
                _give(idle, state)
            state.seconds_left = _seconds_left(state, clock, place.processes)
            show(state)
            busy = [each for each in workers if each.job is not None]
            if not busy:
                break
            ready = wait([each.pipe for each in busy], timeout=_TICK)
            for each in busy:
                if each.pipe in ready and not _heard(each, state, clock, place.root):
                    workers.remove(each)
    finally:
        _end(workers)


def count(jobs: Sequence[Job]) -> int:
    """Return the number of entries."""
    return sum(len(job.entries) for job in jobs)


def _longest_first(jobs: Sequence[Job], clock: Clock) -> list[Job]:
    """Return the jobs by their guessed seconds; those of which nothing is known come first, those run alone last."""
    guesses = {job.key: clock.guess(job) for job in jobs}
    return sorted(jobs, key=lambda job: (job.alone, -(guesses[job.key] or float("inf"))))


def _give(each: _Worker, state: State) -> None:
    each.job = state.waiting.pop(0)
    each.told, each.longest = 0, 0.0
    state.running[each.job.key] = each.job, 0.0
    with contextlib.suppress(BrokenPipeError):  # its end is noticed by whoever listens
        each.pipe.send(each.job)


def _heard(each: _Worker, state: State, clock: Clock, root: Path) -> bool:
    """Take in what a worker says; return whether it lives on."""
    job = each.job
    assert job is not None  # only busy workers are listened to
    try:
        what, told = each.pipe.recv()
    except (EOFError, OSError):
        each.process.join()
        code = each.process.exitcode or 0
        sentence = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"
        worker.fail(job, root, sentence)
        what, told = worker.FAILED, sentence
    if what == worker.PROGRESS:
        state.running[job.key] = job, told[0] / told[1]
        each.hear()
        return True
    del state.running[job.key]
    each.job = None
    if what in (worker.FAILED, worker.UNREAD):
        state.failed.append((job, told))
    elif what == worker.CROWDED:
        state.crowded += 1
        state.waiting.append(dataclasses.replace(job, crowded=True))  # it goes on alone, after all others
    elif what == worker.DONE:
        state.finished.append(job)
        clock.learn(job, told)
    elif what == worker.ELSEWHERE:
        state.elsewhere.append(job)
    else:
        state.waiting.insert(0, job)
    if what not in (worker.FAILED, worker.CROWDED):
        return True
    each.pipe.close()
    each.process.join(timeout=_TEARDOWN)
    if each.process.is_alive():
        each.process.kill()
    return False


def _seconds_left(state: State, clock: Clock, processes: int) -> float | None:
    """Guess how long the rest takes: a process that is free takes the next job, and those run alone come last."""
    guesses = {job.key: clock.guess(job) for job in (*state.waiting, *(job for job, _ in state.running.values()))}
    known = [guess for guess in guesses.values() if guess is not None]
    if not known:
        return None if guesses else 0.0
    seconds = {key: statistics.fmean(known) if guess is None else guess for key, guess in guesses.items()}
    running = [seconds[job.key] * (1.0 - share) for job, share in state.running.values()]
    ends = running + [0.0] * (processes - len(running))
    heapq.heapify(ends)
    for job in (job for job in state.waiting if not job.alone):
        heapq.heapreplace(ends, ends[0] + seconds[job.key])
    return max(ends) + sum(seconds[job.key] for job in state.waiting if job.alone)


def _end(workers: Sequence[_Worker]) -> None:
    """End all workers: idle ones when their pipe closes, others at once."""
    for each in workers:
        each.pipe.close()
    for each in workers:
        each.process.join(timeout=0 if each.job is not None else 2.0)
        if each.process.is_alive():
            each.process.kill()
        each.process.join()


def place_at(root: Path, work: Path, device: str, precision: str, backend: str) -> Place:
    """Return where to write, after checking that it can be written there."""
    for folder in (root, work):
        make_folder(folder)
    return Place(root, work, device, precision, backend)
