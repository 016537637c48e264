"""A paper's table or figure as a file: its methods, its cells, and the published numbers beside them."""

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bespoke.errors import UserError, shown
from bespoke.files import experiments_folder, read_settings
from bespoke.registry import closest
from bespoke.report.groups import GROUPS
from bespoke.report.summary import SELECTIONS

KINDS = ("run", "derived", "benchmark")
PROBES = ("embeddings", "features", "gaussianity", "hierarchy", "norms")  # of `probes`, which imports torch
STATISTICS = {  # of the clients' metrics, in words
    "pooled": "pooled over all test rows",
    "mean": "mean over clients",
    "std": "standard deviation over clients (ddof 1)",
    "std0": "standard deviation over clients (ddof 0)",
    "worst10": "mean of the worst tenth of the clients",
    "top10_samples": "pooled over the tenth of the clients with the most rows",
    "cv": "standard deviation over clients divided by the pooled value",
}
_ID = re.compile(r"[a-z0-9][a-z0-9_.+-]*")
_NAMES = {"sources": "from"}  # of a key that cannot be a field
READ = ("view", "group", "metric", "statistic", "selection")  # how a number is read from a run

Settings = tuple[str, ...]  # overrides, "table.key=value"


@dataclass(frozen=True)
class Row:
    """A method of a table, with its own settings in every cell."""

    id: str
    label: str = ""
    algorithm: str = ""  # the id by default
    set: Settings = ()
    best_of: tuple[str, ...] = ()  # other rows: in each cell the best of them, chosen on test rows; nothing is run
    view: str = ""
    group: str = ""
    metric: str = ""
    statistic: str = ""
    selection: str = ""

    @property
    def name(self) -> str:
        """Its name for people."""
        return self.label or self.id


@dataclass(frozen=True)
class Cell:
    """A column of a table: one setting for all its rows, and what the paper prints there."""

    id: str
    label: str = ""
    kind: str = "run"
    base: str = ""  # the run file
    set: Settings = ()
    by_seed: Mapping[str, int] = field(default_factory=dict)  # settings to which the seed is added
    rows: tuple[str, ...] = ()  # all by default
    reading_of: str = ""  # another cell, of whose printed numbers this is another reading: shown, not counted
    evaluate: Settings = ()  # overrides for evaluating the trained run once more
    start: str = ""  # another entry of the table, "CELL/ROW", whose trained global model is [model] start
    probe: str = ""  # what else to take from the run
    alone: bool = False  # whether times are read: its trainings of the table's seed have the machine to themselves
    view: str = ""
    group: str = ""
    metric: str = ""
    statistic: str = ""
    selection: str = ""
    stand_in: str = ""  # in words, where the data are not the paper's
    missing: str = ""  # in words, where the data are not at hand
    published: Mapping[str, float] = field(default_factory=dict)  # by row
    deviation: Mapping[str, float] = field(default_factory=dict)  # over repetitions, by row
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings of one row here
    how: str = ""  # what a derived cell or a benchmark computes
    of: tuple[str, ...] = ()  # the cells that it is derived from, "CELL" or "TABLE:CELL"
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # [cell.from]: other rows, by row

    @property
    def name(self) -> str:
        """Its name for people."""
        return self.label or self.id


@dataclass(frozen=True)
class Entry:
    """One number of a table: a row of a cell, with all that decides how it is obtained."""

    table: str
    cell: Cell
    row: Row
    base: Path | None  # the run file; None where nothing is run
    seed: int  # which is run where none is given
    start: "Entry | None"  # whose trained global model this one starts from
    view: str  # "" is the method's headline
    group: str
    metric: str  # "" is the run's headline
    statistic: str
    selection: str

    @property
    def id(self) -> str:
        """Its place in the table, "CELL/ROW"."""
        return f"{self.cell.id}/{self.row.id}"

    @property
    def algorithm(self) -> str:
        """The method's name."""
        return self.row.algorithm or self.row.id

    @property
    def runs(self) -> bool:
        """Whether a run gives this number."""
        return self.cell.kind == "run" and not self.cell.missing and not self.row.best_of

    @property
    def published(self) -> float | None:
        """The paper's number."""
        return self.cell.published.get(self.row.id)

    @property
    def deviation(self) -> float | None:
        """The paper's standard deviation over repetitions."""
        return self.cell.deviation.get(self.row.id)

    def timed(self, seed: int) -> bool:
        """Return whether the time of its training with a seed is read; the times of other seeds are extra."""
        return self.cell.alone and seed == self.seed

    def overrides(self, seed: int) -> list[str]:
        """Return the settings that differ from those of the run file and the method's preset."""
        own = self.cell.methods.get(self.row.id, {}).get("set", ())
        by_seed = [f"{key}={number + seed}" for key, number in self.cell.by_seed.items()]
        return [*self.cell.set, *by_seed, *self.row.set, *own]


@dataclass(frozen=True)
class Table:
    """A table or a figure of a paper."""

    name: str  # "pfedfda/t2"
    path: Path
    paper: str
    source: str  # "Table 2"
    title: str
    about: str = ""
    kind: str = "table"
    figure: str = ""  # the function that draws it
    options: Mapping[str, Any] = field(default_factory=dict)  # of that function
    statistic: str = "pooled"
    selection: str = "last"
    published_over: str = ""
    seed: int = 0  # which is run where none is given
    readings_for: str = ""  # the paper whose readings it tries; rows and columns in brackets are none
    chosen: str = ""  # of these the column as which that paper's tables are read
    rows: tuple[Row, ...] = ()
    cells: tuple[Cell, ...] = ()

    @property
    def doc(self) -> str:
        """One line that says what it is."""
        return f"{self.paper}, {self.source}: {self.title}"

    @property
    def derived_from(self) -> list[str]:
        """The other tables from whose cells its own are derived."""
        sources = [source for own in self.cells for named in (own.of, *own.sources.values()) for source in named]
        return list(dict.fromkeys(source.partition(":")[0] for source in sources if ":" in source))

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Every row of every cell, cell after cell."""
        rows = {row.id: row for row in self.rows}
        return tuple(self._entry(cell, rows[id]) for cell in self.cells for id in cell.rows or rows)

    def entry(self, id: str) -> Entry:
        """Return the entry at "CELL/ROW"."""
        for entry in self.entries:
            if entry.id == id:
                return entry
        raise UserError(f"{self.name} has no cell {shown(id)}{closest(id, [e.id for e in self.entries])}")

    def _entry(self, cell: Cell, row: Row) -> Entry:
        own, told = cell.methods.get(row.id, {}), {"statistic": self.statistic, "selection": self.selection}
        parts = {n: own.get(n) or getattr(row, n) or getattr(cell, n) or told.get(n, "") for n in READ}
        parts["group"] = parts["group"] or "all"
        file, start = run_file(self.path, cell.base) if cell.base else None, None
        if cell.start:
            rows, (id, _, other) = {row.id: row for row in self.rows}, cell.start.partition("/")
            start = self._entry(next(each for each in self.cells if each.id == id), rows[other])
        return Entry(self.name, cell, row, file, self.seed, start, **parts)


def listed() -> dict[str, Path]:
    """Return the files of all shipped tables and figures by name."""
    root = experiments_folder()
    found = sorted(root.glob("*/tables/*.toml"), key=lambda path: (path.parents[1].name, _order(path.stem)))
    return {f"{path.parents[1].name}/{path.stem}": path for path in found}


def _order(name: str) -> tuple[bool, str, int, str]:
    """Sort tables before figures, and t10 after t9."""
    found = re.fullmatch(r"([a-z_]+?)(\d*)([a-z]*)", name)
    letters, number, rest = found.groups() if found else (name, "", "")
    return letters != "t", letters, int(number or 0), rest


def find(name: str) -> Table:
    """Return a shipped table by its name, or one by the path of its file."""
    known = listed()
    if name in known:
        return read(known[name])
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return read(path)
    parts = [each for each in known if each.startswith(name) and each.removeprefix(name) in "abc"]
    near = f"; its parts are {', '.join(parts)}" if parts else closest(name, known)
    raise UserError(f"there is no table or figure {shown(name)}{near}; bespoke list tables shows them")


def read(path: Path) -> Table:
    """Read a table's file; refuse what cannot be one in a sentence that names the place."""
    tables = read_settings(path, "be a table", levels=6)  # [cell.methods.ROW] set = [...]
    rows = tuple(_part(Row, row, f"{path}: [[row]]") for row in _list(tables.pop("row", []), f"{path}: row"))
    cells = tuple(_part(Cell, cell, f"{path}: [[cell]]") for cell in _list(tables.pop("cell", []), f"{path}: cell"))
    name = f"{path.resolve().parents[1].name}/{path.stem}"
    known = [f.name for f in dataclasses.fields(Table) if f.name not in ("name", "path", "rows", "cells")]
    _check_keys(tables, known, str(path))
    for key, value in tables.items():
        kind, words = {"options": (dict, "a table"), "seed": (int, "a whole number")}.get(key, (str, "a string"))
        _of(value, kind, f"{path}: {key}", words)
    if lacking := {"paper", "source", "title"} - tables.keys():
        raise UserError(f"{path}: has no {min(lacking)}: add it")
    table = Table(name=name, path=path.resolve(), rows=rows, cells=cells, **tables)
    _check(table)
    return table


def _part(kind: type, values: Any, where: str) -> Any:
    """Return a row or a cell from its table."""
    if not isinstance(values, dict):
        raise UserError(f"{where} must be a table, not {shown(values)}")
    id = values.get("id")
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise UserError(f"{where}: id must be lower-case letters, digits and _.+-, not {shown(id)}")
    where = f"{where} {id}"
    fields = {_NAMES.get(f.name, f.name): f for f in dataclasses.fields(kind)}
    _check_keys(values, fields, where)
    found = {key: (fields[key].name, fields[key].type) for key in values}
    return kind(**{name: _value(values[key], name, type, f"{where}: {key}") for key, (name, type) in found.items()})


def _value(value: Any, key: str, kind: Any, where: str) -> Any:
    """Return a value as its field has it: a string, a tuple of strings, or a table."""
    if kind is str:
        return _of(value, str, where, "a string")
    if kind is bool:
        if not isinstance(value, bool):
            raise UserError(f"{where} must be true or false, not {shown(value)}")
        return value
    if key == "of" and isinstance(value, str):
        value = [value]
    if kind in (Settings, tuple[str, ...]):
        return tuple(_of(each, str, where, "a list of strings") for each in _list(value, where))
    table = _of(value, dict, where, "a table")
    if key in ("published", "deviation"):
        least = 0.0 if key == "deviation" else -sys.float_info.max
        return {row: _number(number, f"{where}.{row}", least) for row, number in table.items()}
    if key == "sources":
        return {row: _value(cells, "of", tuple[str, ...], f"{where}.{row}") for row, cells in table.items()}
    if key == "by_seed":
        return {name: _of(number, int, f"{where}.{name}", "a whole number") for name, number in table.items()}
    return {row: _method(own, f"{where}.{row}") for row, own in table.items()}


def _method(values: Any, where: str) -> dict[str, Any]:
    """Return what a cell says of one row."""
    _check_keys(_of(values, dict, where, "a table"), ("set", *READ), where)
    return {key: _value(v, key, Settings if key == "set" else str, f"{where}.{key}") for key, v in values.items()}


def _number(value: Any, where: str, least: float) -> float:
    number = _of(value, int | float, where, "a number")
    if not least <= number <= sys.float_info.max:
        raise UserError(f"{where} must be {'finite' if least else 'finite and not negative'}, not {shown(value)}")
    return float(number)


def _of(value: Any, kind: Any, where: str, words: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UserError(f"{where} must be {words}, not {shown(value)}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    return _of(value, list, where, "a list")


def _check_keys(values: Mapping[str, Any], known: Any, where: str) -> None:
    for key in values:
        if key not in known:
            raise UserError(f"{where}: unknown key {shown(key)}{closest(key, known)}; allowed are {', '.join(known)}")


def _check(table: Table) -> None:
    """Refuse a table whose parts do not fit each other."""
    where, rows = str(table.path), [row.id for row in table.rows]
    for what, ids in (("rows", rows), ("cells", [cell.id for cell in table.cells])):
        if twice := [id for id in ids if ids.count(id) > 1]:
            raise UserError(f"{where}: two {what} have the id {twice[0]!r}: give each its own")
    for row in table.rows:
        for other in row.best_of:
            _check_choice(other, rows, f"{where}: row {row.id}: best_of")
    _check_choice(table.kind, ("table", "figure"), f"{where}: kind")
    if table.readings_for and not (table.path.parents[2] / table.readings_for).is_dir():
        raise UserError(f"{where}: readings_for: there is no paper {shown(table.readings_for)} in this folder")
    if table.chosen:
        _check_choice(table.chosen, [cell.id for cell in table.cells], f"{where}: chosen")
    if table.seed < 0:
        raise UserError(f"{where}: seed must not be negative, and is {table.seed}")
    if table.kind == "figure" and not table.figure:
        raise UserError(f"{where}: a figure names the function that draws it: add figure = ...")
    for cell in table.cells:
        own = f"{where}: cell {cell.id}"
        _check_choice(cell.kind, KINDS, f"{own}: kind")
        for key in ("rows", "published", "deviation", "methods", "sources"):
            for row in getattr(cell, key):
                _check_choice(row, rows, f"{own}: {_NAMES.get(key, key)}")
        if unlisted := set(cell.published).difference(cell.rows or rows):
            raise UserError(f"{own}: published has {min(unlisted)}, which is not in rows: add it there")
        if cell.kind == "run" and not cell.missing and not cell.base:
            raise UserError(f"{own}: names no run file: add base = ..., or say why it is missing")
        if cell.reading_of:
            _check_choice(cell.reading_of, [each.id for each in table.cells], f"{own}: reading_of")
        first, _, other = cell.start.partition("/")
        if cell.start and (first not in [each.id for each in table.cells if not each.start] or other not in rows):
            raise UserError(f"{own}: start = {shown(cell.start)} is no CELL/ROW of this table that starts by itself")
        if cell.probe:
            _check_choice(cell.probe, PROBES, f"{own}: probe")
        if cell.base and not run_file(table.path, cell.base).is_file():
            raise UserError(f"{own}: there is no run file {cell.base}")
        if cell.kind != "run" and not cell.how and not cell.missing:
            raise UserError(f"{own}: does not say how it is computed: add how = ...")
    for entry in table.entries:
        own = f"{where}: cell {entry.id}"
        _check_choice(entry.statistic, tuple(STATISTICS), f"{own}: statistic")
        _check_choice(entry.group.partition(":")[0], tuple(GROUPS), f"{own}: group")
        _check_choice(entry.selection, tuple(SELECTIONS), f"{own}: selection")


def _check_choice(value: str, known: Sequence[str], where: str) -> None:
    if value not in known:
        raise UserError(f"{where}: {shown(value)} is none of {', '.join(known)}{closest(value, known)}")


def run_file(path: Path, base: str) -> Path:
    """Return a run file: beside the paper's tables, or with a slash from the folder of experiments."""
    folder = path.parents[2] if "/" in base else path.parents[1]
    return folder / f"{base}.toml"
