"""What a table needs: which trainings, how much of them is done, and how long the rest may take."""

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bespoke.core.settings import Training
from bespoke.data.federate import check_settings
from bespoke.data.settings import DataSettings
from bespoke.errors import UserError
from bespoke.registry import closest
from bespoke.runs.experiment import Experiment, from_tables, load
from bespoke.tables import results
from bespoke.tables.results import Result
from bespoke.tables.spec import Entry, Table


@dataclass(frozen=True)
class Job:
    """One training, and the entries that are read from it."""

    experiment: Experiment
    source: str  # of the method's settings
    entries: tuple[Entry, ...]
    start: "Job | None" = None  # whose global model this one starts from: [model] start names its key
    crowded: bool = False  # whether memory ran out when it ran beside others

    @cached_property
    def key(self) -> str:
        """A hash of the full settings: trainings with the same key are the same."""
        return hashlib.sha256(json.dumps(self.experiment.tables(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def timed(self) -> bool:
        """Whether its time is read, so that nothing else may run beside it."""
        return any(entry.timed(self.experiment.seed) for entry in self.entries)

    @property
    def alone(self) -> bool:
        """Whether a sweep runs it by itself."""
        return self.crowded or self.timed

    @property
    def title(self) -> str:
        """What is trained, in a few words."""
        return f"{self.entries[0].id}, seed {self.experiment.seed}"


def experiment_of(entry: Entry, seed: int) -> tuple[Experiment, str]:
    """Return the experiment that an entry is read from, and the source of its method's settings."""
    if entry.base is None:
        raise UserError(f"{entry.table}: cell {entry.id} is not run")
    try:
        experiment, source = load(entry.base, entry.algorithm, entry.overrides(seed), seed)
        check_settings(experiment.data)
        return experiment, source
    except UserError as error:
        raise UserError(f"{entry.table}: cell {entry.id}: {error}") from None


def chosen(tables: Sequence[Table], methods: Collection[str] = (), cells: Collection[str] = ()) -> list[Entry]:
    """Return the entries that are run, of some rows and of some cells.

    A row is named by its id, or with all others of its method by the method's name where that is no row's id. Each name
    must be one of at least one table.
    """
    rows = [name for table in tables for row in table.rows for name in (row.id, row.algorithm or row.id)]
    columns = [cell.id for table in tables for cell in table.cells]
    named = " and ".join(table.name for table in tables)
    for what, given, known in (("method", methods, rows), ("cell", cells, columns)):
        there = list(dict.fromkeys(known))
        for name in given:
            if name not in there:
                verb, they = ("has", "it has") if len(tables) == 1 else ("have", "they have")
                raise UserError(f"{named} {verb} no {what} {name!r}{closest(name, there)}; {they} {', '.join(there)}")
    return [
        entry
        for table in tables
        for entry in table.entries
        if entry.runs and (not methods or _named(entry, table, methods)) and (not cells or entry.cell.id in cells)
    ]


def _named(entry: Entry, table: Table, methods: Collection[str]) -> bool:
    """Return whether some rows, named one way or the other, include an entry's."""
    of_all = {*methods} - {row.id for row in table.rows}
    return entry.row.id in methods or entry.algorithm in of_all


def job_of(entry: Entry, seed: int) -> Job:
    """Return the training that an entry needs."""
    job = Job(*experiment_of(entry, seed), (entry,))
    return job if entry.start is None else started(job, job_of(entry.start, seed))


def started(job: Job, start: Job) -> Job:
    """Return a job that starts from the global model of another."""
    model = dataclasses.replace(job.experiment.model, start=f"starts/{start.key}.safetensors")
    return dataclasses.replace(job, experiment=dataclasses.replace(job.experiment, model=model), start=start)


def jobs(entries: Iterable[Entry], seeds: Collection[int] = ()) -> list[Job]:
    """Return the trainings that entries need: one for all that differ only in what is read from the trained run.

    Where no seeds are given, an entry's is its table's.
    """
    return merged(job_of(entry, seed) for entry in entries for seed in seeds or (entry.seed,))


def merged(jobs: Iterable[Job]) -> list[Job]:
    """Return one job for all that are the same training."""
    found: dict[str, Job] = {}
    for job in jobs:
        if job.key in found:
            job = dataclasses.replace(job, entries=(*found[job.key].entries, *job.entries))
        found[job.key] = job
    return list(found.values())


def answers(result: Result | None, job: Job, entry: Entry) -> bool:
    """Return whether a result is what this entry of the job would give: same settings, same reading."""
    if result is None or not result.done:
        return False
    told = result.content
    read = told["evaluate"] == list(entry.cell.evaluate) and told["selection"] == entry.selection
    return (
        read
        and told["view"] == (entry.view or told["headline"])
        and told["group"] == entry.group
        and (not entry.cell.probe or entry.cell.probe in told.get("probe", {}))
        and (not entry.timed(job.experiment.seed) or told["environment"].get("side_by_side") == 1)
        and same_settings(told["settings"], job.experiment)
    )


def same_settings(told: dict[str, Any], experiment: Experiment) -> bool:
    """Return whether recorded settings are those of an experiment; settings that are newer have their defaults."""
    if told == experiment.tables():
        return True
    try:
        return from_tables(told, "result", experiment.method).tables() == experiment.tables()
    except UserError:
        return False  # a setting that is no more


def unfinished(jobs: Iterable[Job], root: Path) -> list[Job]:
    """Return the jobs with the entries that have no result yet."""
    left = [dataclasses.replace(job, entries=tuple(_lacking(job, root))) for job in jobs]
    return [job for job in left if job.entries]


def _lacking(job: Job, root: Path) -> list[Entry]:
    seed = job.experiment.seed
    return [entry for entry in job.entries if not answers(results.at(root, entry, seed), job, entry)]


def adoptable(jobs: Iterable[Job], there: Iterable[Result]) -> tuple[list[tuple[Entry, Result]], list[Job]]:
    """Return the entries whose result another table has, of the same training and reading, and the jobs left."""
    known: dict[tuple[str, int], list[Result]] = {}
    for result in there:
        known.setdefault((result.content["settings"]["algorithm"]["name"], result.seed), []).append(result)
    found, left = [], []
    for job in jobs:
        others = known.get((job.experiment.algorithm_name, job.experiment.seed), [])
        lacking = []
        for entry in job.entries:
            same = next((other for other in others if answers(other, job, entry) and _readable(other, entry)), None)
            if same is None:
                lacking.append(entry)
            else:
                found.append((entry, same))
        if lacking:
            left.append(dataclasses.replace(job, entries=tuple(lacking)))
    return found, left


def adopt(found: Iterable[tuple[Entry, Result]], root: Path) -> None:
    """Give entries the results of other tables."""
    for entry, same in found:
        about = {"table": entry.table, "cell": entry.id, "adopted_from": _name(same), "shared_with": []}
        results.write(root, entry, same.content | about)


def _readable(result: Result, entry: Entry) -> bool:
    """Return whether a result holds the metric and the clients that an entry is about."""
    try:
        result.value(entry)
    except UserError:
        return False
    return True


def _name(result: Result) -> str:
    return result.content.get("adopted_from") or f"{result.content['table']}:{result.content['cell']}"


# --- how long -------------------------------------------------------------------------------------------------------


class Clock:
    """Guesses a training's seconds from those of its run file, on the same kind of device, by their rounds and steps.

    Of a method's trainings there, those with the same settings of the method count, or else all. Where it has not run
    there, the file's typical training counts, times the method's ratio elsewhere.
    """

    def __init__(self, known: Iterable[Result] = (), cpu: bool = True) -> None:
        """Learn from results that were made on the CPU, or from those that were not."""
        self._rates: dict[tuple[str, str], list[float]] = {}  # seconds of a unit of work, by file and method
        self._own: dict[tuple[str, str], list[float]] = {}  # the same, by file and the method with its settings
        for result in known:
            told = result.content
            if not told.get("adopted_from") and (told["environment"]["device"] == "cpu") == cpu:
                self._learn(file_of(told["table"], told.get("base", "")), told["settings"], told["seconds"])

    def learn(self, job: Job, seconds: float) -> None:
        """Note how long a training took."""
        self._learn(_file(job), job.experiment.tables(), seconds)

    def _learn(self, file: str, settings: Mapping[str, Any], seconds: float) -> None:
        rate = seconds / _work(settings)
        self._rates.setdefault((file, settings["algorithm"]["name"]), []).append(rate)
        self._own.setdefault((file, json.dumps(settings["algorithm"], sort_keys=True)), []).append(rate)

    def guess(self, job: Job) -> float | None:
        """Return the seconds that a job may take; None if nothing of its file has run."""
        settings = job.experiment.tables()
        file, method, work = _file(job), job.experiment.algorithm_name, _work(settings)
        if same := self._own.get((file, json.dumps(settings["algorithm"], sort_keys=True))):
            return work * statistics.median(same)
        if (file, method) in self._rates:
            return work * self._typical([(file, method)])
        if not (own := self._of(file)):
            return None
        elsewhere = [key for key in self._rates if key[1] == method]
        ratios = [self._typical([key]) / self._typical(self._of(key[0])) for key in elsewhere]
        return work * self._typical(own) * (statistics.fmean(ratios) if ratios else 1.0)

    def _of(self, file: str) -> list[tuple[str, str]]:
        return [key for key in self._rates if key[0] == file]

    def _typical(self, keys: Sequence[tuple[str, str]]) -> float:
        return statistics.fmean(statistics.median(self._rates[key]) for key in keys)


def _work(settings: Mapping[str, Any]) -> float:
    """Return how much is trained, in passes of one client over its rows; of one run file these can be compared."""
    training, data = asdict(Training()) | settings["training"], asdict(DataSettings()) | settings["data"]
    share = training["rate"] * data["subsample"] * data["keep"]
    return max(1.0, training["rounds"] * (training["steps"] or training["epochs"]) * share)


def _file(job: Job) -> str:
    return file_of(job.entries[0].table, job.entries[0].cell.base)


class Needed(NamedTuple):
    """What jobs lack."""

    lacking: list[Job]  # what has no result
    found: list[tuple[Entry, Result]]  # of that, what another table has
    left: list[Job]  # and what must be run
    clock: Clock


def needed(jobs: Iterable[Job], root: Path, device: torch.device) -> Needed:
    """Return what jobs lack, with a clock for those that must be run on this device."""
    there, lacking = [*results.everything(root)], unfinished(jobs, root)
    return Needed(lacking, *adoptable(lacking, there), Clock(there, device.type == "cpu"))


def file_of(table: str, base: str) -> str:
    """Return a cell's run file, named with its paper."""
    return base if "/" in base else f"{table.partition('/')[0]}/{base}"
