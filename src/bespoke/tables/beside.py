"""Ours beside the paper's: differences and marks of single numbers, ranks and agreement of whole columns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from bespoke.errors import UserError, shown
from bespoke.report.detection import relative_false_accepts
from bespoke.report.metrics import SeedStatistics, seed_statistics
from bespoke.report.units import SHARES
from bespoke.tables import results, spec
from bespoke.tables.results import Result
from bespoke.tables.spec import Cell, Entry, Table

POINTS = 1.5  # that a number in percent may differ before it is marked; for other numbers percent of the published one
REPETITIONS = 3  # from so many of our own seeds on, their spread counts and not the published one
_ROUNDING = 1e-9
_SPREADS = ("std", "std0", "cv")  # statistics of which less is better


@dataclass(frozen=True)
class Number:
    """One number of a table: the paper's, and ours by seed in the same unit."""

    entry: Entry
    ours: Mapping[int, float]  # by seed
    metric: str = "accuracy"  # or what a derived number is: "round_seconds", "parameters"
    higher: bool = True  # whether more is better
    percent: bool = True  # whether it is in percent, so that differences are in points
    timed: bool = False  # a duration depends on the machine
    stand_in: str = ""
    failed: tuple[str, ...] = ()  # in a sentence each
    outdated: tuple[tuple[str, str, int], ...] = ()  # table, entry and seed of results with other settings, left out
    changed: bool = False  # whether the method's source is another by now
    tries: int = 0  # results with other settings that are kept beside it
    machines: tuple[str, ...] = ()  # "NVIDIA H200, bf16"
    doubts: tuple[str, ...] = ()  # why it may not come out again

    @property
    def id(self) -> str:
        """Its name among all tables: "TABLE/CELL/ROW"."""
        return f"{self.entry.table}/{self.entry.id}"

    @property
    def published(self) -> float | None:
        """The paper's number."""
        return self.entry.published

    @cached_property
    def statistics(self) -> SeedStatistics:
        """Ours over seeds."""
        return seed_statistics([*self.ours.values()]) if self.ours else SeedStatistics(None, None, None)

    @property
    def mean(self) -> float | None:
        """Ours, the mean over seeds."""
        return self.statistics.mean

    @property
    def difference(self) -> float | None:
        """Ours minus the published one."""
        return None if self.mean is None or self.published is None else self.mean - self.published

    @property
    def counted(self) -> bool:
        """Whether ours may be held against the paper's: both are there, of the same data, and of no clock."""
        return self.difference is not None and not self.stand_in and not self.timed

    @property
    def allowed(self) -> float | None:
        """How far ours may be from the published one without a mark; None where it is never marked."""
        if not self.counted or self.published is None:
            return None
        spread = self.statistics.std if len(self.ours) >= REPETITIONS else self.entry.deviation
        return max(POINTS if self.percent else POINTS / 100 * abs(self.published), 2 * (spread or 0.0))

    @property
    def marked(self) -> bool:
        """Whether ours is further from the published one than chance explains."""
        return not self.within(self.allowed)

    def within(self, limit: float | None) -> bool:
        """Return whether ours is at most so far from the published one; None is no limit."""
        return limit is None or self.difference is None or abs(self.difference) <= limit + _ROUNDING


@dataclass(frozen=True)
class Column:
    """A cell of a table with all its rows."""

    table: str
    cell: Cell
    numbers: tuple[Number, ...]

    @property
    def id(self) -> str:
        """Its name among all tables: "TABLE/CELL"."""
        return f"{self.table}/{self.cell.id}"

    @cached_property
    def counted(self) -> tuple[Number, ...]:
        """The rows that both have."""
        return tuple(number for number in self.numbers if number.counted)

    @property
    def stand_in(self) -> str:
        """In words, where the data are not the paper's."""
        return next((number.stand_in for number in self.numbers if number.stand_in), "")

    @cached_property
    def _higher(self) -> bool:
        return all(number.higher for number in self.counted)

    @cached_property
    def ranks(self) -> dict[str, tuple[int, int]]:
        """The paper's rank and ours of each row that both have; 1 is best, and equal numbers share a rank.

        The rows of a benchmark have none: they need not be methods.
        """
        if self.cell.kind == "benchmark":
            return {}
        ids = [number.entry.row.id for number in self.counted]
        theirs, ours = self._values()
        return dict(zip(ids, zip(_ranks(theirs, self._higher), _ranks(ours, self._higher), strict=True), strict=True))

    @property
    def tau(self) -> float | None:
        """How well the two orders of the rows agree, from -1 to 1."""
        return kendall(*self._values()) if self.ranks else None

    @property
    def winners(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The labels of the paper's best rows and of ours; None where the paper's best, or all others, were not run."""
        if self._best is None:
            return None
        theirs, ours = (tuple(number.entry.row.name for number in best) for best in self._best)
        return theirs, ours

    @cached_property
    def _best(self) -> tuple[list[Number], list[Number]] | None:
        """The paper's best rows, first the one of the best rank with us, and those that lead that one by most.

        A lead is one on the seeds that both have.
        """
        if len(self.ranks) < 2:
            return None
        published = [number.published for number in self.numbers if number.published is not None]
        best = max(published) if self._higher else min(published)
        theirs = [number for number in self.counted if number.published == best]
        if not theirs:
            return None
        theirs.sort(key=lambda number: self.ranks[number.entry.row.id][1])
        leads = [self._lead(number, theirs[0]) for number in self.counted]
        most = max(leads) - _ROUNDING
        return theirs, [number for number, lead in zip(self.counted, leads, strict=True) if lead >= most]

    @property
    def winner_kept(self) -> bool | None:
        """Whether a best row of the paper's is a best of ours; None where that is open."""
        return None if self._best is None else any(number in self._best[1] for number in self._best[0])

    @cached_property
    def behind(self) -> SeedStatistics | None:
        """By how much our best row is ahead of the paper's, on the seeds that both have; None where that is kept."""
        return seed_statistics(self._behind_by) if self._behind_by else None

    @property
    def ahead_on(self) -> tuple[int, int]:
        """On how many of the seeds that both have our best row is ahead of the paper's, and how many these are."""
        return sum(lead > 0 for lead in self._behind_by), len(self._behind_by)

    @cached_property
    def _behind_by(self) -> list[float]:
        if self._best is None or self.winner_kept:
            return []
        theirs, ours = self._best
        return self._leads(ours[0], theirs[0])

    def _leads(self, first: Number, second: Number) -> list[float]:
        """Return by how much one row is better than another, on the seeds that both have."""
        sign = 1.0 if self._higher else -1.0
        return [sign * (value - second.ours[seed]) for seed, value in first.ours.items() if seed in second.ours]

    def _lead(self, first: Number, second: Number) -> float:
        """Return by how much one row is better than another: on the seeds that both have, or if none, in the mean."""
        sign = 1.0 if self._higher else -1.0
        leads = self._leads(first, second) or [sign * ((first.mean or 0.0) - (second.mean or 0.0))]
        return sum(leads) / len(leads)

    @property
    def certain(self) -> bool:
        """Whether the paper's best row is ours too, and told apart from every other row."""
        if self._best is None or not self.winner_kept:
            return False
        first = self._best[1][0]
        return all(self._apart(first, rival) for rival in self.counted if rival is not first)

    @property
    def lost(self) -> bool:
        """Whether another row is our best, and told apart from the paper's."""
        if self._best is None or self.winner_kept:
            return False
        theirs, ours = self._best
        return self._apart(ours[0], theirs[0])

    def _apart(self, first: Number, second: Number) -> bool:
        """Return whether one row leads another by more than chance explains; without a common seed that is open.

        That is two standard deviations over three or more seeds; with fewer, as for marks, 1.5 points.
        """
        leads = self._leads(first, second)
        if not leads:
            return False
        mean, std, _ = seed_statistics(leads)
        few = POINTS if first.percent else POINTS / 100 * abs(second.mean or 0.0)
        limit = 2 * (std or 0.0) if len(leads) >= REPETITIONS else few
        return mean is not None and mean > limit + _ROUNDING

    def _values(self) -> tuple[list[float], list[float]]:
        pairs = [(number.published, number.mean) for number in self.counted]
        return [float(a) for a, _ in pairs if a is not None], [float(b) for _, b in pairs if b is not None]


def _ranks(values: Sequence[float], higher: bool) -> list[int]:
    return [1 + sum(other > own if higher else other < own for other in values) for own in values]


def kendall(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two lists [N]; None if one of them has fewer than two different values."""
    signs = [(_sign(a, b), _sign(c, d)) for (a, c), (b, d) in combinations(zip(first, second, strict=True), 2)]
    untied = sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs)
    return sum(a * b for a, b in signs) / untied**0.5 if untied else None


def _sign(a: float, b: float) -> int:
    return (a > b) - (a < b)


@dataclass(frozen=True)
class Beside:
    """A table with ours beside the paper's."""

    table: Table
    columns: tuple[Column, ...]

    @cached_property
    def numbers(self) -> tuple[Number, ...]:
        """All numbers, column after column."""
        return tuple(number for column in self.columns for number in column.numbers)


class Reader:
    """Reads results, each of them once, and computes what is derived from them."""

    def __init__(self, root: Path) -> None:
        """Read from a folder of results."""
        self.root = root
        self._numbers: dict[tuple[str, str], Number] = {}
        self._results: dict[tuple[str, str], tuple[dict[int, Result], list[Result]]] = {}
        self._tries: dict[tuple[str, str], list[Result]] = {}
        self._tables: dict[str, Table] = {}
        self._open: set[tuple[str, str]] = set()  # numbers whose computation has begun
        self._doubts = results.doubts(root)

    def beside(self, table: Table) -> Beside:
        """Return a table with ours beside the paper's."""
        self._tables[table.name] = table
        entries = {cell.id: [entry for entry in table.entries if entry.cell is cell] for cell in table.cells}
        columns = [Column(table.name, cell, tuple(map(self._number, entries[cell.id]))) for cell in table.cells]
        return Beside(table, tuple(columns))

    def _number(self, entry: Entry) -> Number:
        """Return one number."""
        key = entry.table, entry.id
        if key not in self._numbers:
            if key in self._open:
                raise _refused(entry, "is derived from itself")
            self._open.add(key)
            self._numbers[key] = _unknown(entry) if entry.cell.missing else self._obtained(entry)
        return self._numbers[key]

    def _obtained(self, entry: Entry) -> Number:
        if entry.row.best_of:
            return self._computed(
                entry, "best", [self._entry(entry, f"{entry.cell.id}/{r}") for r in entry.row.best_of]
            )
        if entry.cell.kind == "derived":
            return self._computed(entry, entry.cell.how, self._sources(entry))
        how = "value" if entry.cell.kind == "benchmark" else "statistic"
        number = self._collected(entry, entry, how)
        return dataclasses.replace(number, tries=len(self.tries(entry)), stand_in=entry.cell.stand_in)

    def results(self, entry: Entry) -> tuple[dict[int, Result], list[Result]]:
        """Return an entry's results by seed, and those left out since they were made with other settings."""
        key = entry.table, entry.id
        if key not in self._results:
            self._results[key] = results.current(self.root, entry)
        return self._results[key]

    def tries(self, entry: Entry) -> list[Result]:
        """Return the results that an entry once had, with other settings."""
        key = entry.table, entry.id
        if key not in self._tries:
            there, outdated = self.results(entry)
            self._tries[key] = results.tries(self.root, entry, [*there.values(), *outdated])
        return self._tries[key]

    def _doubted(self, result: Result, how: str) -> list[str]:
        """Return why a result may not come out again."""
        commit = str(result.content["source"].get("commit") or "")
        told = [f"Commit {own}: {text}" for own, text in self._doubts.items() if commit.startswith(own)]
        halved = any(note.startswith("memory ran out") for note in result.content.get("notes", ()))
        return [*told, _HALVED] if halved and how == "statistic" else told

    def _computed(self, entry: Entry, how: str, sources: Sequence[Entry]) -> Number:
        """Return a number that is computed from others, seed by seed."""
        if how in _FROM_TWO and len(sources) != 2:
            raise _refused(entry, f"how = {how!r} takes two cells, not {len(sources)}")
        if how in _FROM_NUMBERS:
            parts = [self._number(source) for source in sources]
        elif how in _FROM_TIMES:
            parts = [self._collected(entry, source, _FROM_TIMES[how]) for source in sources]
        elif how in _FROM_RESULTS:
            parts = [self._collected(entry, sources[0], how, sources[-1])]
        else:
            known = ", ".join([*_FROM_NUMBERS, *_FROM_TIMES, *_FROM_RESULTS])
            raise _refused(entry, f"how = {shown(how)} is none of {known}")
        seeds = [seed for seed in parts[0].ours if all(seed in part.ours for part in parts)]
        return dataclasses.replace(
            parts[0],
            entry=entry if how in _FROM_NUMBERS else parts[0].entry,
            ours={seed: _together(how, [part.ours[seed] for part in parts], parts[0].higher) for seed in seeds},
            metric=how if how in _FROM_TIMES else parts[0].metric,
            failed=_joined(part.failed for part in parts),
            outdated=_joined(part.outdated for part in parts),
            machines=_joined(part.machines for part in parts),
            doubts=_joined(part.doubts for part in parts),
            changed=any(part.changed for part in parts),
            tries=0,
            stand_in=next((cell.stand_in for cell in (entry.cell, *(s.cell for s in sources)) if cell.stand_in), ""),
        )

    def _sources(self, entry: Entry) -> list[Entry]:
        """Return the entries that a derived one is computed from."""
        named = entry.cell.sources.get(entry.row.id) or [f"{cell}/{entry.row.id}" for cell in entry.cell.of]
        if not named:
            raise _refused(entry, 'does not say what it is derived from: add of = "CELL"')
        return [self._entry(entry, name) for name in named]

    def _entry(self, entry: Entry, name: str) -> Entry:
        """Return the entry "CELL/ROW" of the same table, or "TABLE:CELL/ROW"."""
        table, _, id = name.rpartition(":")
        try:
            table = table or entry.table
            if table not in self._tables:
                self._tables[table] = spec.find(table)
            return self._tables[table].entry(id)
        except UserError as error:
            raise _refused(entry, str(error)) from None

    def _reread(self, entry: Entry, source: Entry) -> Entry:
        """Return how another statistic is read from the source's results: as the source, but for what is said here."""
        told = {"view": source.view, "selection": source.selection}
        for key, value in told.items():
            if getattr(entry.cell, key) not in ("", value):
                raise _refused(entry, f"{source.id} is of another {key}: derive it from a row of that {key}")
        changed = {key: getattr(entry.cell, key) or getattr(source, key) for key in ("group", "metric", "statistic")}
        return dataclasses.replace(source, **changed)

    def _collected(self, entry: Entry, source: Entry, how: str, baseline: Entry | None = None) -> Number:
        """Return what the results of a source hold, or hold beside a baseline's, and say why others hold nothing."""
        read = self._reread(entry, source) if entry is not source and how in ("statistic", "relative_fa") else source
        told = dataclasses.replace(entry, **{key: getattr(read, key) for key in spec.READ})  # as it is read
        there, outdated = self.results(source)
        others = self.results(baseline)[0] if baseline else {}
        ours, failed, done = {}, [], []
        for seed, result in there.items():
            if how in _TIMES and result.done and result.content["environment"].get("side_by_side", 1) != 1:
                continue  # others made it slower
            try:
                value = _value(result, read, how, others.get(seed))
            except UserError as error:
                sentence = str(error).replace(f"{self.root}/", "")  # the same wherever the results lie
                failed.append(f"{source.id}, seed {seed}: {sentence}")
            else:
                ours[seed] = value
                done.append(result)
        metric, higher, percent = _kind(read, done[0] if done else None, how)
        return Number(
            told,
            {seed: 100.0 * value if percent else value for seed, value in ours.items()},
            metric=metric,
            higher=higher,
            percent=percent,
            timed=how in _TIMES or metric == "shares",
            failed=tuple(failed),
            outdated=tuple((source.table, source.id, result.seed) for result in outdated),
            changed=any(not result.same_source for result in done),
            machines=tuple(dict.fromkeys(map(_machine, done))),
            doubts=tuple(dict.fromkeys(text for result in done for text in self._doubted(result, how))),
        )


_HALVED = "Memory ran out: clients ran in smaller blocks, which moves a long run by some tenths of a point."
_FROM_NUMBERS = ("best", "mean", "difference")
_FROM_TIMES = {"overhead": "round_seconds", "minutes": "seconds"}
_TIMES, _COUNTS = ("round_seconds", "seconds"), ("bytes_up", "bytes_down")
_FROM_RESULTS = ("statistic", "relative_fa", *_TIMES, *_COUNTS)
_FROM_TWO = ("difference", "overhead", "relative_fa")


def _together(how: str, values: Sequence[float], higher: bool) -> float:
    """Return a number from those that it is computed from, [N]."""
    if how == "best":
        return max(values) if higher else min(values)
    if how == "mean":
        return sum(values) / len(values)
    if how == "difference":
        return values[0] - values[1]
    if how == "overhead":
        return 100.0 * (values[0] / values[1] - 1.0)
    return values[0] / 60.0 if how == "minutes" else values[0]


def _value(result: Result, entry: Entry, how: str, baseline: Result | None) -> float:
    """Return what a result holds; a UserError says why it holds nothing."""
    if not result.done:
        raise UserError(result.content["error"])
    if how == "statistic":
        value = result.value(entry)
    elif how == "relative_fa":
        if baseline is None or not baseline.done:
            raise UserError("there is no baseline of this seed")
        own, other = (each.scores(entry.metric, entry.group).merged() for each in (result, baseline))
        value = float(relative_false_accepts(own, other)[0])
        if math.isnan(value):
            raise UserError(
                "nothing is relative to it: the baseline accepts no positive at even odds, or there is none"
            )
    elif how in ("value", "seconds"):  # of a benchmark; of the training
        value = result.content.get(how)
    else:
        value = result.content["totals"].get(how)
    if value is None or not math.isfinite(value):
        raise UserError("the result holds no finite value")
    return float(value)


def _kind(entry: Entry, result: Result | None, how: str) -> tuple[str, bool, bool]:
    """Return the metric, whether more is better, and whether it is in percent; accuracy where no result says it."""
    if how != "statistic":
        return entry.cell.how if how == "value" else how, False, False
    metric = entry.metric or (result.content["metric"] if result else "accuracy")
    higher = result.content["higher"].get(metric, True) if result else metric != "loss"
    return metric, higher and entry.statistic not in _SPREADS, metric.rsplit("_", 1)[-1] in SHARES


def _unknown(entry: Entry) -> Number:
    """Return a number of which only the paper's is known."""
    derived = entry.cell.how if entry.cell.how in (*_FROM_TIMES, *_FROM_RESULTS) else "statistic"
    how = {"run": "statistic", "benchmark": "value", "derived": derived}[entry.cell.kind]
    metric, higher, percent = _kind(entry, None, how)
    return Number(entry, {}, metric=metric, higher=higher, percent=percent)


def _joined(parts: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(each for part in parts for each in part))


def _machine(result: Result) -> str:
    told = result.content.get("environment", {})
    return ", ".join(str(told[key]) for key in ("device", "precision") if key in told)


def _refused(entry: Entry, why: str) -> UserError:
    return UserError(f"{entry.table}: cell {entry.id}: {why}")
