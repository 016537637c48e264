"""A table with ours beside the paper's, as it is shown: for a terminal, as plain text, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bespoke.errors import visible
from bespoke.report.page import markdown, parts
from bespoke.report.table import aligned
from bespoke.tables import words
from bespoke.tables.beside import POINTS, REPETITIONS, Beside, Column, Number
from bespoke.tables.reasons import ARGUED, TRIED, Reason

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 120  # of plain text
MARK, CHANGED, NOT_APART = "*", "†", "(not told apart)"
FEET = ("Kendall's tau", "best method", "ahead by", "within 1, 2 points")  # rows about whole columns


@dataclass(frozen=True)
class Counts:
    """How far a table is, and how well it agrees."""

    cells: int = 0  # numbers that the paper prints
    missing: int = 0  # of these: data not at hand
    stand_ins: int = 0  # of these: on other data than the paper's
    stand_ins_run: int = 0
    run: int = 0  # of the others: run
    points: int = 0  # of these: held against the paper's, in percent
    within_1: int = 0
    within_2: int = 0
    marked: int = 0
    explained: int = 0  # of the marked ones: with a reason
    tried: int = 0  # of the marked ones: the cause is open, after runs of this method on such data
    argued: int = 0  # likewise, but judged by other methods, other data or the paper's own numbers
    own: int = 0  # of the paper's own method, begun
    own_near: int = 0  # of these: not marked
    own_spread: int = 0  # of these: only since they vary over seeds or repetitions
    failed: int = 0  # numbers for which a run failed
    columns: int = 0  # in which the paper's best method was run
    winners_kept: int = 0
    winners_certain: int = 0  # of these: told apart from all others
    winners_tied: int = 0  # another one is best, but not told apart from the paper's
    winners_explained: int = 0  # another one is best, and told apart, with a reason
    winners_open: int = 0  # likewise, but what is told leaves the cause open

    def __add__(self, other: Counts) -> Counts:
        """Return the sum."""
        return Counts(**{key: value + asdict(other)[key] for key, value in asdict(self).items()})


@dataclass(frozen=True)
class Page:
    """One table, ready to be shown; `text`, `table`, `markdown` and `as_dict` show the same numbers."""

    beside: Beside
    reasons: Mapping[str, Reason] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The table's name and what it is."""
        return f"{self.beside.table.name}: {self.beside.table.doc}"

    @cached_property
    def counts(self) -> Counts:
        """How far the table is, and how well it agrees."""
        columns = [column for column in self.beside.columns if not column.cell.reading_of]
        printed = [number for column in columns for number in column.numbers if number.published is not None]
        held = [number for number in printed if number.counted]
        points = [number for number in held if number.percent and number.higher]  # no spreads
        marked = [number for number in held if number.marked]
        own = [number for number in points if self._own(number)]
        decided = [column for column in columns if column.winner_kept is not None]
        known = [self.reasons[number.id] for number in marked if number.id in self.reasons]
        lost = [self.reasons[column.id] for column in decided if column.lost and column.id in self.reasons]
        return Counts(
            cells=len(printed),
            missing=sum(bool(number.entry.cell.missing) for number in printed),
            stand_ins=sum(bool(number.stand_in) for number in printed),
            stand_ins_run=sum(bool(number.stand_in and number.ours) for number in printed),
            run=sum(bool(number.ours and not number.stand_in) for number in printed),
            points=len(points),
            within_1=sum(number.within(1.0) for number in points),
            within_2=sum(number.within(2.0) for number in points),
            marked=len(marked),
            explained=sum(not reason.open for reason in known),
            tried=sum(reason.open == TRIED for reason in known),
            argued=sum(reason.open == ARGUED for reason in known),
            own=len(own),
            own_near=sum(not number.marked for number in own),
            own_spread=sum(not number.marked and not number.within(POINTS) for number in own),
            failed=sum(bool(number.failed) for number in self.beside.numbers),
            columns=len(decided),
            winners_kept=sum(bool(column.winner_kept) for column in decided),
            winners_certain=sum(column.certain for column in decided),
            winners_tied=sum(column.winner_kept is False and not column.lost for column in decided),
            winners_explained=sum(not reason.open for reason in lost),
            winners_open=sum(bool(reason.open) for reason in lost),
        )

    def _own(self, number: Number) -> bool:
        """Return whether a number is of the method whose paper it is; a row with settings of its own is a variant."""
        entry = number.entry
        return entry.algorithm == self.beside.table.name.partition("/")[0] and not entry.row.set

    # --- the grid ---------------------------------------------------------------------------------------------------

    @cached_property
    def _seeds(self) -> set[tuple[int, ...]]:
        return {tuple(number.ours) for number in self.beside.numbers if number.ours}

    @cached_property
    def _columns(self) -> tuple[Column, ...]:
        """The columns in which there is anything to show; others are there for numbers that are derived from them."""
        return tuple(column for column in self.beside.columns if any(map(_shown, column.numbers)))

    @cached_property
    def _printed(self) -> bool:
        """Whether the paper prints any number of it."""
        return any(number.published is not None for number in self.beside.numbers)

    @cached_property
    def _decimals(self) -> dict[str, tuple[int, int]]:
        """How many decimals the paper prints of numbers of a kind, and of their deviations.

        The most that one of them has: read from the table's file, a number has lost its last zeros.
        """
        found: dict[str, tuple[int, int]] = {}
        for number in self.beside.numbers:
            if number.published is not None:
                most = found.get(_kind(number), (_least(number),) * 2)
                own = _decimals(number.published), _decimals(number.entry.deviation or 0.0)
                found[_kind(number)] = max(most[0], own[0]), max(most[1], own[1])
        return found

    def _places(self, number: Number) -> int:
        """Return how many decimals a number has: as many as the paper prints."""
        if _kind(number) in self._decimals:
            return self._decimals[_kind(number)][0]
        return _least(number) if number.percent or number.mean == round(number.mean or 0.0) else 3

    def _theirs(self, number: Number) -> str:
        """Return the published number, with its deviation over repetitions."""
        if number.published is None:
            return ""
        deviation = number.entry.deviation
        told = "" if deviation is None else f"±{deviation:.{self._decimals[_kind(number)][1]}f}"
        return _written(number.published, self._places(number), number.percent) + told

    def _difference(self, number: Number) -> str:
        """Return ours minus published, with its sign; what rounds to nothing has a plus."""
        text = f"{number.difference:+,.{self._places(number)}f}"
        return text.replace("-", "+") if not text.strip("+-0.") else text

    def _cell(self, column: Column, number: Number | None) -> list[str]:
        """Return a number in at most two lines: published → ours, and the difference with both ranks."""
        if number is None:
            return [""]
        theirs = self._theirs(number)
        if number.mean is None:
            return [f"{theirs} → failed".strip() if number.failed else theirs]
        both = [value for value in (number.mean, number.statistics.std) if value is not None]
        ours = "±".join(_written(value, self._places(number), number.percent) for value in both)
        ours += CHANGED if number.changed else ""
        ours += f" ({len(number.ours)})" if len({len(seeds) for seeds in self._seeds}) > 1 else ""
        first = f"{theirs} → {ours}".strip() if self._printed else ours
        if not number.counted or number.difference is None:
            return [first]
        rank = column.ranks.get(number.entry.row.id)
        ranked = "" if rank is None else f", {rank[0]}→{rank[1]}"
        return [first, f"{self._difference(number)}{MARK if number.marked else ''}{ranked}"]

    def _foot(self, column: Column) -> list[str]:
        """Return what is said of a whole column: tau, the best method and by how much, how many are near."""
        if len(column.counted) < 2:
            return [""] * len(FEET)
        tau = column.tau
        near = [number for number in column.counted if number.percent]
        counted = [sum(number.within(limit) for number in near) for limit in (1.0, 2.0)]
        told = f"{counted[0]}, {counted[1]} of {len(near)}" if near else ""
        return ["" if tau is None else f"{tau:.2f}", _best(column), self._behind(column), told]

    def _behind(self, column: Column) -> str:
        """Return by how much another method is ahead of the paper's best one."""
        if column.behind is None:
            return ""
        like = column.counted[0]
        both = [value for value in (column.behind.mean, column.behind.std) if value is not None]
        told = "±".join(_written(value, self._places(like), like.percent) for value in both)
        ahead, seeds = column.ahead_on
        return f"{told}, on {ahead} of {seeds} seeds" if seeds > 1 else told

    def _rows(self, columns: Sequence[Column]) -> list[tuple[str, list[Number | None]]]:
        """Return the rows in which there is anything to show: a name and a number for each column, if it has one."""
        by_row = [{number.entry.row.id: number for number in column.numbers if _shown(number)} for column in columns]
        rows = [(row.name, [own.get(row.id) for own in by_row]) for row in self.beside.table.rows]
        return [(name, numbers) for name, numbers in rows if any(numbers)]

    def _feet(self, columns: Sequence[Column]) -> list[list[str]]:
        """Return the rows about whole columns that have anything to say, each with its name."""
        named = [[*row] for row in zip(FEET, *map(self._foot, columns), strict=True)]
        return [row for row in named if any(row[1:])]

    def _grid(self, columns: Sequence[Column]) -> tuple[list[str], list[list[list[str]]]]:
        """Return the header, and rows of cells of lines, those about whole columns last."""
        header = ["method", *(_head(column) for column in columns)]
        rows = [
            [[name], *(self._cell(column, number) for column, number in zip(columns, numbers, strict=True))]
            for name, numbers in self._rows(columns)
        ]
        return header, rows + [[[text] for text in row] for row in self._feet(columns)]

    def _blocks(self, width: int) -> Iterable[tuple[list[str], list[list[list[str]]]]]:
        """Yield the grid in parts that fit a width; at least one column each."""
        columns, start = self._columns, 0
        while start < len(columns):
            end = start + 1
            while end < len(columns) and _width(self._grid(columns[start : end + 1])) <= width:
                end += 1
            yield self._grid(columns[start:end])
            start = end

    # --- what is said below it --------------------------------------------------------------------------------------

    @cached_property
    def caption(self) -> list[str]:
        """What the numbers are, a sentence each."""
        said = words.readings(self.beside.table, [number for number in self.beside.numbers if _shown(number)])
        over = [self.beside.table.published_over] if self._printed and self.beside.table.published_over else []
        if any(number.published is not None and number.entry.deviation is not None for number in self.beside.numbers):
            over.append("± standard deviation over repetitions")
        said += [f"Published: {', '.join(over)}."] if over else []
        numbers = [number for number in self.beside.numbers if number.ours]
        if not numbers:
            theirs = "the numbers are the paper's" if self._printed else "no numbers of it are published"
            how = "with these settings " if any(number.outdated for number in self.beside.numbers) else ""
            return [f"None of it has been run {how}yet: {theirs}.", *said]
        ranks = ", and the paper's rank → ours" if any(column.ranks for column in self.beside.columns) else ""
        below = f"; below, ours minus published{ranks}" if any(number.counted for number in numbers) else ""
        shown = f"{'Published → ours' if self._printed else 'Ours'}{words.repeated(self._seeds)}"
        said = [f"{shown}{below if self._printed else '; no numbers of it are published'}.", *said]
        machines = words.machines(numbers)
        return [*said, f"Ours: {words.seeds(self._seeds)}; {machines}."] if machines else said

    @cached_property
    def notes(self) -> list[str]:
        """What must be known about single columns and numbers, a sentence each."""
        columns, numbers = self._columns, self.beside.numbers
        missing, stand_ins = _names(columns, lambda c: c.cell.missing), _names(columns, lambda c: c.stand_in)
        said = [f"Not run: {names}: {why}." for why, names in missing.items()]
        said += [f"Stand-in, never held against the paper's: {names}: {why}." for why, names in stand_ins.items()]
        if any(number.marked for number in numbers):
            said.append(
                f"{MARK} further from the published number than {POINTS} points (for numbers that are no percentages, "
                f"{POINTS} % of it) and two standard deviations: over our seeds, or with fewer than {REPETITIONS} of "
                "them over the paper's repetitions where it tells."
            )
        if any(NOT_APART in _best(column) for column in columns):
            said.append(
                "Not told apart: the best method leads the paper's best one, or where that is kept some other, by at "
                "most two standard deviations over the seeds that both have, or with fewer than "
                f"{REPETITIONS} of them by at most {POINTS} points (of numbers that are no percentages {POINTS} %)."
            )
        if any(number.timed and number.ours for number in numbers):
            said.append("Durations depend on the machine and are not held against the paper's.")
        if any(number.changed for number in numbers):
            said.append(f"{CHANGED} the method's source has changed since.")
        for doubt in dict.fromkeys(text for number in numbers for text in number.doubts):
            own = ((column, sum(doubt in number.doubts for number in column.numbers)) for column in columns)
            told = (f"{c.cell.name}: {n} of {sum(bool(number.ours) for number in c.numbers)}" for c, n in own if n)
            said.append(f"{doubt} Numbers that such a result is, or is a part of: {'; '.join(told)}.")
        said += words.left_out(numbers)
        said += [f"failed: {text}" for text in dict.fromkeys(text for number in numbers for text in number.failed)]
        said += [
            f"{number.entry.id}: {number.tries} earlier results with other settings are kept beside it."
            if number.tries > 1
            else f"{number.entry.id}: one earlier result with other settings is kept beside it."
            for number in numbers
            if number.tries
        ]
        return said

    @cached_property
    def misses(self) -> list[str]:
        """Every marked number with its difference: those with one reason together, those without one last."""
        told: dict[Reason | None, dict[str, list[str]]] = {}
        for column in self.beside.columns:
            for number in filter(lambda number: number.marked, column.numbers):
                by_column = told.setdefault(self.reasons.get(number.id), {})
                one = f"{number.entry.row.name} {self._difference(number)}"
                by_column.setdefault(column.cell.name, []).append(one)
        said = {
            why: "; ".join(f"{name}: {', '.join(own)}" for name, own in found.items()) for why, found in told.items()
        }
        return [f"{said[reason]}. {explained(reason)}" for reason in sorted(said, key=lambda reason: reason is None)]

    @cached_property
    def losses(self) -> list[str]:
        """Every column in which another method is best: those with one reason together, those without one last."""
        told: dict[Reason | None, list[str]] = {}
        for column in filter(lambda column: column.lost, self.beside.columns):
            ahead = f"{_best(column)}, ahead by {self._behind(column) or 'an unknown amount'}"
            told.setdefault(self.reasons.get(column.id), []).append(f"{column.cell.name}: {ahead}")
        return [
            f"{'; '.join(told[reason])}. {explained(reason)}" for reason in sorted(told, key=lambda each: each is None)
        ]

    @property
    def ids(self) -> set[str]:
        """The names of its numbers and columns, for which there may be reasons."""
        columns = self.beside.columns
        return {column.id for column in columns} | {number.id for column in columns for number in column.numbers}

    # --- as it is shown ---------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return plain text."""
        blocks = [aligned(_flat(header, rows), range(1, len(header))) for header, rows in self._blocks(WIDTH)]
        return visible_lines("\n\n".join([self.title, *blocks, "\n".join(self._below)]))

    def table(self, width: int = WIDTH) -> RenderableType:
        """Return the table and its notes for `rich`."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        blocks: list[RenderableType] = []
        for header, rows in self._blocks(width):
            table = Table(title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
            for i, name in enumerate(header):
                table.add_column(Text(visible(name)), justify="right" if i else "left")
            for row in rows:
                cells = ["\n".join(map(visible, lines)) for lines in row]
                table.add_row(*(Text(cell, "bold" if MARK in cell else "") for cell in cells))
            blocks.append(table)
        below = [Text(visible(line), style="dim") for line in self._below]
        return Group(Text(visible(self.title), "bold"), *blocks, *below)

    @property
    def _below(self) -> list[str]:
        return [*self.caption, *self.notes, *self.misses, *self.losses]

    def shown(self) -> parts.Table:
        """Return the table for a page; numbers that are marked are bold, and lead to how they are obtained."""
        columns = self._columns
        rows = [
            (parts.Cell(name), *(self._shown_cell(c, number) for c, number in zip(columns, numbers, strict=True)))
            for name, numbers in self._rows(columns)
        ]
        feet = tuple(tuple(parts.Cell(text) for text in row) for row in self._feet(columns))
        header = ("method", *(_head(column) for column in columns))
        return parts.Table(header, tuple(rows), "\n".join(self.caption), feet=feet)

    def _shown_cell(self, column: Column, number: Number | None) -> parts.Cell:
        if number is None:
            return parts.Cell("")
        first, *below = self._cell(column, number)
        value = number.published if number.mean is None else number.mean
        anchor = f"cell-{column.cell.id}" if number.entry.runs else ""
        return parts.Cell(first, value, below="".join(below), marked=number.marked, anchor=anchor)

    def markdown(self) -> str:
        """Return a Markdown table with what is said below it; numbers that are marked are bold."""
        lines = markdown.table_lines(self.shown())
        if self.notes:
            lines += ["", *markdown.item_lines((note,) for note in self.notes)]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; accuracies are in percent, as they are published."""
        table = self.beside.table
        named = {"table": table.name, "paper": table.paper, "source": table.source, "title": table.title}
        columns = [self._column_as_dict(column) for column in self.beside.columns]
        said = {"caption": self.caption, "notes": self.notes}
        return (
            named | {"published_over": table.published_over, "columns": columns, "counts": asdict(self.counts)} | said
        )

    def _column_as_dict(self, column: Column) -> dict[str, Any]:
        cell = column.cell
        return {
            **{"id": cell.id, "label": cell.label, "kind": cell.kind},
            **{"missing": cell.missing or None, "stand_in": column.stand_in or None},
            **{"tau": column.tau, "winners": column.winners, "winner_kept": column.winner_kept},
            **{"certain": column.certain, "lost": column.lost, "reason": self._reason_as_dict(column.id)},
            "behind": column.behind and column.behind._asdict(),
            "rows": [self._number_as_dict(column, number) for number in column.numbers],
        }

    def _number_as_dict(self, column: Column, number: Number) -> dict[str, Any]:
        rank = column.ranks.get(number.entry.row.id)
        return {
            **{"id": number.entry.row.id, "label": number.entry.row.label, "metric": number.metric},
            **{"published": number.published, "deviation": number.entry.deviation},
            **{"ours": number.mean, "std": number.statistics.std, "seeds": {str(s): v for s, v in number.ours.items()}},
            **{"difference": number.difference, "allowed": number.allowed, "marked": number.marked},
            "rank": None if rank is None else {"published": rank[0], "ours": rank[1]},
            **{"failed": list(number.failed), "source_changed": number.changed, "earlier_results": number.tries},
            "reason": self._reason_as_dict(number.id),
        }

    def _reason_as_dict(self, id: str) -> dict[str, Any] | None:
        return asdict(self.reasons[id]) if id in self.reasons else None


def _best(column: Column) -> str:
    """Return the paper's best method and ours, and whether seeds tell; "" where that is open."""
    if column.winners is None:
        return ""
    theirs, ours = (" and ".join(labels) for labels in column.winners)
    if column.winner_kept:
        return f"kept: {theirs}" if column.certain else f"kept: {theirs} {NOT_APART}"
    return f"{theirs} → {ours}" if column.lost else f"{theirs} → {ours} {NOT_APART}"


def explained(reason: Reason | None) -> str:
    """Return a reason and its evidence in words."""
    return f"{reason.reason} ({', '.join(reason.evidence)})" if reason else "No reason is known yet."


def visible_lines(text: str) -> str:
    """Return text of several lines, each safe for a terminal."""
    return "\n".join(map(visible, text.split("\n"))) + "\n"


def _shown(number: Number) -> bool:
    return number.published is not None or bool(number.ours or number.failed)


def _names(columns: Iterable[Column], text: Callable[[Column], str]) -> dict[str, str]:
    """Return the columns' names by what is said of them, those of which nothing is said left out."""
    groups: dict[str, list[str]] = {}
    for column in columns:
        if said := text(column):
            groups.setdefault(said, []).append(column.cell.name)
    return {said: "; ".join(names) for said, names in groups.items()}


def _head(column: Column) -> str:
    return column.cell.name + (" (not run)" if column.cell.missing else " (stand-in)" if column.stand_in else "")


def _kind(number: Number) -> str:
    """Return what is the same for numbers with equally many decimals: rows of a benchmark need not be alike."""
    return number.id if number.entry.cell.kind == "benchmark" else number.metric


def _least(number: Number) -> int:
    return 1 if number.percent else 0


def _decimals(value: float) -> int:
    """Return how many decimals a number of a file has."""
    return len(f"{value:.4f}".rstrip("0").partition(".")[2])


def _written(value: float, decimals: int, percent: bool) -> str:
    """Return a number with so many decimals; a small number that is no percentage is not written as nothing."""
    small = value and abs(value) < 0.5 * 10**-decimals and not percent
    return f"{value:.2g}" if small else f"{value:,.{decimals}f}"


def _flat(header: list[str], rows: list[list[list[str]]]) -> list[list[str]]:
    """Return rows of single lines."""
    flat = [header]
    for row in rows:
        flat += [[cell[i] if i < len(cell) else "" for cell in row] for i in range(max(map(len, row)))]
    return flat


def _width(grid: tuple[list[str], list[list[list[str]]]]) -> int:
    columns = zip(*_flat(*grid), strict=True)
    return sum(max(map(len, column)) + 2 for column in columns)
