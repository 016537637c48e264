"""A process that carries out one training after another, and writes the results of the cells it serves."""

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from bespoke.errors import UserError, is_out_of_device_memory, reason
from bespoke.records import RunFolder
from bespoke.runs.api import Built, built
from bespoke.runs.api import carry_out as run_built
from bespoke.runs.evaluating import evaluate
from bespoke.runs.experiment import Experiment
from bespoke.runs.lock import FolderLock, InUse, check_idle
from bespoke.runs.results import Run
from bespoke.tables import probes, reading, results
from bespoke.tables.plan import Job, unfinished

RUNNING = ".running"  # a folder among the results, with one for each training that is going on
DONE, STOPPED, ELSEWHERE = "done", "stopped", "elsewhere"
PROGRESS, FAILED, UNREAD = "progress", "failed", "unread"
CROWDED = "crowded"  # memory ran out beside others; after this, as after a failure, the process ends


@dataclass(frozen=True)
class Place:
    """Where a sweep writes and computes."""

    root: Path  # of the results
    work: Path  # of the runs, until their results are written
    device: str = "auto"
    precision: str = "auto"
    backend: str = "auto"
    processes: int = 1  # side by side
    environment: Mapping[str, str] = field(default_factory=dict)  # of the worker processes, beside this one's


class Busy(Exception):
    """Another process is at the same training, or at one beside which this one's time would count for nothing."""


class Unread(Exception):
    """The training came to its end, but not every cell could be read from it."""


def main(pipe: Connection, place: Place, stop: Event) -> None:
    """Carry out the jobs that come through a pipe, until it is closed or a job fails.

    After a failure the process ends, since a broken device or a full memory would spoil the next job as well.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the sweep hears them too, and says so by ``stop``
        signal.signal(number, signal.SIG_IGN)
    os.environ.update(place.environment)  # nothing has looked for a GPU yet
    torch.set_num_threads(1)
    parent, bench = multiprocessing.parent_process(), Bench(place)

    def stopping() -> bool:
        return stop.is_set() or parent is None or not parent.is_alive()

    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            job: Job = pipe.recv()
            begin = time.monotonic()
            try:
                how = carry_out(job, place, stopping, lambda *done: pipe.send((PROGRESS, done)), bench)
            except (EOFError, BrokenPipeError):
                raise
            except Busy:
                how = ELSEWHERE
            except Unread as error:
                pipe.send((UNREAD, str(error)))
                continue
            except Exception as error:
                crowded = place.processes > 1 and is_out_of_device_memory(error)
                if not crowded:
                    folders = (place.work / job.key / "run", place.work, place.root)
                    fail(job, place.root, reading.without(_sentence(error), *folders))
                pipe.send((CROWDED if crowded else FAILED, _sentence(error)))
                raise SystemExit(1) from None
            pipe.send((how, time.monotonic() - begin))
            gc.collect()


def carry_out(
    job: Job, place: Place, stop: Callable[[], bool], told: Callable[[int, int], None], bench: "Bench | None" = None
) -> str:
    """Train, or go on training, and write a result for each entry; return how it ended.

    The run's folder is scratch: it is removed once every entry has its result, and begun again if it cannot be resumed.
    """
    folder = place.work / job.key
    with contextlib.ExitStack() as held:
        try:
            for each in (place.root / RUNNING / job.key, folder):  # beside the results: others may work elsewhere
                each.mkdir(parents=True, exist_ok=True)
                held.enter_context(contextlib.closing(_locked(each)))
        except (InUse, FileNotFoundError, FileExistsError) as error:  # or made and removed by another this moment
            raise Busy from error
        except UserError as error:
            if each.is_dir():
                raise
            raise Busy from error
        left = unfinished([job], place.root)
        if not left:  # another sweep has finished it meanwhile
            _remove(job, place)
            return ELSEWHERE
        if left[0].timed and _going_on(place.root) > 1:
            raise Busy
        run = _trained(left[0], place, folder / "run", stop, told, bench or Bench(place))
        if run is None:
            return STOPPED
        failed = _write(left[0], place.root, run, run.summary["seconds"])
        if failed:
            raise Unread("; ".join(dict.fromkeys(failed)))
        _remove(job, place)
    return DONE


def _locked(folder: Path) -> FolderLock:
    """Lock a folder. Another sweep that looks whether somebody is at it holds it for a moment."""
    try:
        return FolderLock(folder)
    except InUse:
        time.sleep(0.1)
        return FolderLock(folder)


def _remove(job: Job, place: Place) -> None:
    """Remove the folders of a training that has all its results; who still waits for one will find those."""
    for folder in (place.work / job.key, place.root / RUNNING / job.key):
        shutil.rmtree(folder, ignore_errors=True)


class Bench:
    """What a worker keeps from one job for the next: the data and the model, where they are the same."""

    def __init__(self, place: Place) -> None:
        """Start with nothing."""
        self.place = place
        self._key: Any = None
        self._parts: Built | None = None

    def parts(self, experiment: Experiment) -> Built:
        """Return data, model and initial weights of an experiment."""
        about = (experiment.data, experiment.model, experiment.objective, experiment.seed)
        key = (*about, experiment.folder, experiment.training.skip_empty)
        if self._parts is None or key != self._key:
            self._key, self._parts = None, None  # so that two sets are never in memory together
            self._key, self._parts = key, built(experiment, self.place.device, self.place.precision)
        return self._parts


def _trained(
    job: Job, place: Place, folder: Path, stop: Callable[[], bool], told: Callable[[int, int], None], bench: Bench
) -> Run | None:
    """Run or resume the experiment; return None if it was stopped before its end."""
    if job.start is not None:
        if not _provide(job.start, place, place.work / job.experiment.model.start, stop, bench):
            return None
        job = replace(job, experiment=replace(job.experiment, folder=str(place.work)))
    parts = bench.parts(job.experiment)
    watching = probes.callbacks([entry.cell.probe for entry in job.entries], folder)
    begun = list[int]()  # rounds of this attempt
    told(0, job.experiment.training.rounds)

    def once() -> Run | None:
        run = run_built(
            job.experiment,
            parts,
            folder,
            resume=True,
            backend=place.backend,
            progress=False,
            halve=place.processes == 1,  # a result may not depend on what others leave
            stop=stop,
            callbacks=[
                *watching,
                lambda event: begun.append(event.round),
                lambda event: told(event.round, event.rounds),
            ],
            about={"settings_from": job.source, "side_by_side": _side_by_side(place, folder)},
        )
        return None if run.summary["rounds"] < job.experiment.training.rounds and stop() else run

    resumed = folder.exists() and any(folder.iterdir())
    try:
        return once()
    except UserError:
        if begun or not resumed:
            raise
        shutil.rmtree(folder)  # damaged, or of older code: a training may always begin again
        return once()


def _side_by_side(place: Place, folder: Path) -> int:
    """Return how many trainings share the machine, as far as it is known when one begins.

    They are as many as this sweep runs at once, or as those of any sweep that write to these results now, if these are
    more; one that goes on keeps the most that it ever had.
    """
    now, before = max(place.processes, _going_on(place.root)), 1
    with contextlib.suppress(UserError):
        if RunFolder(folder).rounds():
            before = RunFolder(folder).read_json("environment.json").get("side_by_side", 1)
    return max(now, before)


def _going_on(root: Path) -> int:
    """Return the number of trainings whose results will be written to a folder, this process's own included."""
    number = 0
    for folder in (root / RUNNING).iterdir():
        try:
            check_idle(folder)
        except InUse:
            number += 1
    return number


def _provide(start: Job, place: Place, path: Path, stop: Callable[[], bool], bench: Bench) -> bool:
    """Train the global model that a job starts from, unless its file is there; return False if stopped before.

    Wait for another process that is at it.
    """
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    while not path.exists() and not stop():
        try:
            lock = FolderLock(folder)
        except InUse:
            time.sleep(1.0)
            continue
        with contextlib.closing(lock):
            run = None if path.exists() else _trained(start, place, folder / "run", stop, lambda *done: None, bench)
            if run is not None:
                run.save_start(path)
                shutil.rmtree(folder / "run", ignore_errors=True)
    return path.exists()


def _write(job: Job, root: Path, run: Run, seconds: float) -> list[str]:
    """Write every entry's result, also that one could not be read, and return the sentences of those."""
    evaluated: dict[tuple[str, ...], Run] = {(): run}
    failed = []
    for entry in job.entries:
        how = entry.cell.evaluate
        try:
            if how not in evaluated:
                evaluated[how] = evaluate(run, how)
            probe = {entry.cell.probe: probes.take(entry.cell.probe, run)} if entry.cell.probe else None
            content = reading.result(job, entry, run, evaluated[how], seconds, probe)
        except UserError as error:
            content = reading.failure(job, entry, reading.without(str(error), run.folder.path))
            failed.append(str(error))
        results.write(root, entry, content)
    return failed


def _sentence(error: Exception) -> str:
    """Return an error in a line: a user's mistake as it is, any other with its type."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {reason(error)}"


def fail(job: Job, root: Path, sentence: str) -> None:
    """Record for every entry that has no result why there is none; where that cannot be written, it is only told."""
    for left in unfinished([job], root):
        for entry in left.entries:
            with contextlib.suppress(OSError, UserError):
                results.write(root, entry, reading.failure(job, entry, sentence))
