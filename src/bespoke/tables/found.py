"""The results that a figure is drawn from, what is missing of them, and the words beside the picture."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from bespoke.errors import UserError
from bespoke.report.groups import people
from bespoke.report.papers import Words
from bespoke.report.summary import SELECTIONS
from bespoke.tables import results
from bespoke.tables.results import Result
from bespoke.tables.spec import STATISTICS, Cell, Entry, Table

Seeds = dict[int, Result]  # results that came to their end, by seed
Used = Sequence[tuple[Entry, list[Result]]]
NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Found:
    """A figure and the results it has."""

    table: Table
    root: Path
    results: Mapping[str, Seeds]  # by the entry's id; only entries that have any
    missing: list[str]  # a sentence each; who cannot draw a result adds one

    @classmethod
    def read(cls, table: Table, root: Path) -> "Found":
        """Read the results of a figure's entries."""
        have: dict[str, Seeds] = {}
        missing = [f"{cell_name(cell)}: {cell.missing}" for cell in table.cells if cell.missing]
        outdated: list[Result] = []
        for entry in table.entries:
            if not entry.runs:
                continue
            there, older = results.current(root, entry)
            outdated += older
            done = {seed: result for seed, result in there.items() if result.done}
            if done:
                have[entry.id] = done
            elif there or not older:
                why = next((f"failed: {result.content['error']}" for result in there.values()), NOT_RUN)
                missing.append(f"{name(entry)}: {why}")
        said = [results.left_out(table.name, [result.seed for result in outdated])] if outdated else []
        return cls(table, root, have, said + missing)

    def entries(self) -> list[tuple[Entry, Seeds]]:
        """Return the entries that have results; refuse a figure that has none at all."""
        found = [(entry, self.results[entry.id]) for entry in self.table.entries if entry.id in self.results]
        if not found:
            why = "; ".join(told for told in self.missing if not told.endswith(NOT_RUN))
            there, named = f"{self.root}{f' ({why})' if why else ''}", self.table.name
            raise UserError(f"{named} has no results in {there}: make them with bespoke sweep {named}")
        return found

    def cells(self) -> Iterator[tuple[Cell, list[tuple[Entry, Seeds]]]]:
        """Yield each cell that has results, with its entries."""
        for _, group in groupby(self.entries(), key=lambda pair: pair[0].cell.id):
            own = list(group)
            yield own[0][0].cell, own

    def probed(self, probe: str) -> list[tuple[Entry, dict[int, dict[str, Any]]]]:
        """Return the entries for which a probe was taken, with its values by seed; note those without."""
        found = []
        for entry, seeds in self.entries():
            told = {seed: result.content.get("probe") or {} for seed, result in seeds.items()}
            own = {seed: values[probe] for seed, values in told.items() if probe in values}
            if own:
                found.append((entry, own))
            else:
                self.missing.append(f"{name(entry)}: its result holds no {probe}")
        if not found:
            named = self.table.name
            raise UserError(f"{named}: no result in {self.root} holds {probe}: make them with bespoke sweep {named}")
        return found

    def option(self, key: str, default: Any) -> Any:
        """Return an option of the drawing function."""
        return self.table.options.get(key, default)

    def words(
        self, subtitle: str, what: str, drawn: Sequence[tuple[Entry, Iterable[int]]], views: bool = True
    ) -> Words:
        """Return title, subtitle and caption.

        ``what`` says which number was read, ``drawn`` from which entries and seeds; ``views`` whether the view matters.
        """
        used = [(entry, [self.results[entry.id][seed] for seed in seeds]) for entry, seeds in drawn]
        facts = [what, _clients(used), *([_views(used)] if views else []), _seeds(used), _devices(used)]
        entries = [entry for entry, _ in drawn]
        told = [f"{'; '.join(facts)}.", *_published(entries), *stand_ins(e.cell for e in entries), *_older(used)]
        return titled(self.table, subtitle, [*told, *lacking(self.missing)])


def titled(table: Table, subtitle: str, sentences: Sequence[str]) -> Words:
    """Return the words beside a figure, whose caption has these sentences."""
    return Words(f"{table.paper}, {table.source}: {table.title}", subtitle, " ".join(sentences))


def cell_name(cell: Cell) -> str:
    """Return a cell's name for people; a stand-in is told to be one."""
    return cell.name + (" (stand-in)" if cell.stand_in else "")


def name(entry: Entry) -> str:
    """Return an entry's name for people."""
    return f"{cell_name(entry.cell)}, {entry.row.name}"


def metric(entry: Entry, seeds: Seeds) -> str:
    """Return the metric that is read from an entry's results."""
    return entry.metric or str(next(iter(seeds.values())).content["metric"])


# --- what the numbers are -------------------------------------------------------------------------------------------


def statistic(entry: Entry, seeds: Seeds) -> str:
    """Return in words which number of its clients an entry asks for."""
    return f"test {metric(entry, seeds).replace('_', ' ')}, {STATISTICS[entry.statistic]}"


def what(entries: Sequence[tuple[Entry, Seeds]]) -> str:
    """Return in words which numbers of which round entries ask for."""
    named = dict.fromkeys(statistic(*pair) for pair in entries)
    rounds = dict.fromkeys(SELECTIONS[entry.selection] for entry, _ in entries)
    first = " and ".join(named)
    return f"{first[0].upper()}{first[1:]}, {' or '.join(rounds)}"


def _clients(used: Used) -> str:
    numbers = sorted({len(result.scores(entry.metric, entry.group).clients) for entry, own in used for result in own})
    count = f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"
    named = dict.fromkeys(people(entry.group) for entry, _ in used)
    return f"{count} clients ({' or '.join(named)})"


def _views(used: Used) -> str:
    """Return the view, or the views with the methods that are read so."""
    views: dict[str, list[str]] = {}
    for entry, own in used:
        views.setdefault(own[0].content["view"], []).append(entry.row.name)
    if len(views) == 1:
        return f"{next(iter(views))} models"
    return ", ".join(f"{view} models of {', '.join(dict.fromkeys(names))}" for view, names in views.items())


def _seeds(used: Used) -> str:
    each = [{result.seed for result in own} for _, own in used]
    every = sorted(set.union(*each))
    told = f"seed{'s' if len(every) > 1 else ''} {', '.join(map(str, every))}"
    return told if all(own == set(every) for own in each) else f"{told}, not all of them for each"


def _devices(used: Used) -> str:
    told = [result.content["environment"] for _, own in used for result in own]
    return " and ".join(dict.fromkeys(f"{each.get('device', '?')} in {each.get('precision', '?')}" for each in told))


def _published(entries: Sequence[Entry]) -> list[str]:
    told = {name(entry): f"{entry.published:g}" for entry in entries if entry.published is not None}
    return [f"The paper prints: {'; '.join(f'{key} {value}' for key, value in told.items())}."] if told else []


def stand_ins(cells: Iterable[Cell]) -> list[str]:
    """Return a sentence for each kind of data that stands in for the paper's."""
    return [f"STAND-IN: {words}." for words in dict.fromkeys(cell.stand_in for cell in cells) if words]


def _older(used: Used) -> list[str]:
    older = [name(entry) for entry, own in used if not all(result.same_source for result in own)]
    return [f"From older source code of the method: {', '.join(dict.fromkeys(older))}."] if older else []


def lacking(missing: Sequence[str], most: int = 6) -> list[str]:
    """Return a sentence about what is missing."""
    more = f"; and {len(missing) - most} more" if len(missing) > most else ""
    return [f"MISSING: {'; '.join(missing[:most])}{more}."] if missing else []
