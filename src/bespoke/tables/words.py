"""What the numbers of a table are, in words."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from bespoke.report.groups import people
from bespoke.report.summary import SELECTIONS
from bespoke.tables import results
from bespoke.tables.beside import Number
from bespoke.tables.spec import STATISTICS, Entry, Table

_DERIVED = {
    "best": "the best of {of}",
    "mean": "the mean of {of}",
    "difference": "the difference of {of}",
    "overhead": "percent by which a round takes longer",
    "minutes": "minutes of the training",
    "relative_fa": "false accepts over those of the baseline, where both reject equally many",
    "round_seconds": "seconds of a round",
    "seconds": "seconds of the training",
    "bytes_up": "bytes that clients sent, in all rounds",
    "bytes_down": "bytes that clients received, in all rounds",
}
_BENCHMARKS = {
    "parameters": "numbers of the model, counted",
    "trained": "numbers that are trained, counted",
    "trained_new": "numbers that a new client trains, counted",
    "shares": "percent of a client's time",
    "partition": "rows of the clients",
}


def readings(table: Table, numbers: Sequence[Number]) -> list[str]:
    """Return how the shown numbers are obtained, a sentence each: what most have in common, then what differs."""
    there = [number for number in numbers if not number.entry.cell.missing]
    shown = {number.entry.cell.id for number in numbers}
    computed = {number.id: _derivation(number.entry, table, shown) for number in there}
    read = [number for number in there if computed[number.id] is None]
    usual, others = [], []
    for aspect in (_what, _people, _view, _selection) if read else ():
        (text, _), *rest = _grouped(read, aspect)
        usual.append(text)
        others += [f"{_whole(numbers, read)}: {text}." for text, numbers in rest]
    derived = _grouped([n for n in there if computed[n.id] is not None], lambda n: computed[n.id] or "")
    others += [f"{_whole(numbers, there)}: {text}." for text, numbers in derived]
    first = "If not said otherwise, a number is" if others else "Each number is"
    return [*([f"{first} {'; '.join(usual)}."] if read else []), *others]


def _grouped(numbers: Sequence[Number], text: Callable[[Number], str]) -> list[tuple[str, list[Number]]]:
    """Return numbers by what is said of them, the largest group first."""
    groups: dict[str, list[Number]] = {}
    for number in numbers:
        groups.setdefault(text(number), []).append(number)
    return sorted(groups.items(), key=lambda group: -len(group[1]))


def _what(number: Number) -> str:
    return f"test {number.metric}{' in %' if number.percent else ''}, {STATISTICS[number.entry.statistic]}"


def _people(number: Number) -> str:
    return people(number.entry.group)


def _view(number: Number) -> str:
    return f"view {number.entry.view}" if number.entry.view else "the method's headline view"


def _selection(number: Number) -> str:
    return SELECTIONS[number.entry.selection]


def _derivation(entry: Entry, table: Table, shown: Collection[str]) -> str | None:
    """Return how a number is computed, where only some cells are shown; None if it is read from a run."""
    row, cell = entry.row, entry.cell
    if row.best_of:
        labels = {each.id: each.name for each in table.rows}
        return f"the best of {' and '.join(labels[id] for id in row.best_of)}, chosen on the test rows, seed by seed"
    if cell.kind == "benchmark":
        return _BENCHMARKS.get(cell.how, cell.how)
    if cell.kind != "derived" or cell.how not in _DERIVED:
        return None
    cells = {each.id: each for each in table.cells}
    hidden = [dataclasses.replace(entry, cell=cells[id]) for id in cell.of if id in cells and id not in shown]
    inner = dict.fromkeys(filter(None, (_derivation(each, table, shown) for each in hidden)))
    if inner:  # a column that is not shown has no name
        of = f"{len(cell.sources.get(row.id, cell.of))} numbers: {'; '.join(inner)}"
    elif 0 < len(cell.of) < 4:
        of = " and ".join(cells[id].name if id in cells else id for id in cell.of)
    else:
        of = f"{len(cell.of) or 2} columns"
    return _DERIVED[cell.how].format(of=of)


def _whole(some: Sequence[Number], all: Sequence[Number]) -> str:
    """Return the names of the rows or of the columns that some numbers of all make up, or of the numbers."""
    own = {number.entry.id for number in some}
    if len(some) == len(all):
        return "All numbers"
    for name in ("row", "cell"):
        parts = {getattr(number.entry, name).id: getattr(number.entry, name) for number in some}
        if own == {number.entry.id for number in all if getattr(number.entry, name).id in parts}:
            return "; ".join(part.name for part in parts.values())
    return "; ".join(sorted(own))


def repeated(seeds: set[tuple[int, ...]]) -> str:
    """Return what a number over several seeds is, in brackets."""
    if all(len(own) < 2 for own in seeds):
        return ""
    number = "; in brackets the number of seeds" if len({len(own) for own in seeds}) > 1 else ""
    return f" (mean ± standard deviation over seeds, ddof 1{number})"


def seeds(seeds: set[tuple[int, ...]]) -> str:
    """Return which seeds were run."""
    if len(seeds) > 1:
        return (
            f"seeds {', '.join(map(str, sorted({seed for own in seeds for seed in own})))}, not all of them everywhere"
        )
    own = next(iter(seeds))
    return f"seed {own[0]}" if len(own) == 1 else f"seeds {', '.join(map(str, own))}"


def left_out(numbers: Iterable[Number]) -> list[str]:
    """Return a sentence for each table of which results with other settings were left out."""
    outdated = dict.fromkeys(each for number in numbers for each in number.outdated)
    seeds: dict[str, list[int]] = {}
    for table, _, seed in outdated:
        seeds.setdefault(table, []).append(seed)
    return [f"{results.left_out(table, own)}." for table, own in seeds.items()]


def machines(numbers: Iterable[Number]) -> str:
    """Return where the numbers were computed, the most common place first; "" for what is only counted."""
    found = Counter(machine for number in numbers for machine in number.machines if machine)
    return " and ".join(sorted(found, key=lambda name: (-found[name], name)))
