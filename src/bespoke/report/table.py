"""A comparison of methods as a table: for a terminal, as plain text, Markdown or JSON."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import visible
from bespoke.report.metrics import SeedStatistics
from bespoke.report.units import Unit

if TYPE_CHECKING:
    from rich.console import RenderableType

AT_ONCE = 5  # columns beside the methods that fit on a narrow terminal


@dataclass(frozen=True)
class Difference:
    """A method's value minus the baseline's: the mean of paired differences, and its 95 % interval if it has one."""

    mean: float
    low: float | None
    high: float | None
    over: str  # what was paired, and what the interval covers: clients or seeds
    pairs: int


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> str:
    """Return rows of cells as lines with columns two spaces apart; the columns in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def html_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    bold: Collection[tuple[int, int]] = (),
    notes: Sequence[str] = (),
) -> str:
    """Return rows of cells as an HTML table for a notebook; the cells at (row, column) in `bold` are bold."""
    lines = [f"<p><b>{html.escape(title)}</b></p>"] if title else []
    lines += ["<table>", f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in header)}</tr>"]
    for i, row in enumerate(rows):
        cells = [f"<b>{html.escape(cell)}</b>" if (i, j) in bold else html.escape(cell) for j, cell in enumerate(row)]
        lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return "\n".join([*lines, "</table>", *(f"<p>{html.escape(note)}</p>" for note in notes)])


@dataclass(frozen=True)
class ConditionRow:
    """A method's values on the clients of one kind of condition; statistics are over seeds."""

    clients: int  # with a defined value, in the first seed
    mean: SeedStatistics  # of the clients' mean
    pooled: SeedStatistics

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"clients": self.clients, "mean": self.mean._asdict(), "pooled": self.pooled._asdict()}


@dataclass(frozen=True)
class Row:
    """One method of a comparison, its values in the metric's own scale; statistics are over seeds."""

    label: str
    view: str
    rounds: tuple[int, ...]  # the chosen round of each seed
    seeds: tuple[int, ...]
    mean: SeedStatistics  # of the clients' mean
    std: float | None  # over clients (ddof 1), averaged over seeds
    pooled: SeedStatistics
    worst10: SeedStatistics
    top10_samples: SeedStatistics
    cv: SeedStatistics  # coefficient of variation: std over clients (ddof 0) by pooled
    bytes_per_round: float  # up and down
    seconds: float  # of a whole run
    difference: Difference | None  # to the baseline
    excluded: int  # clients without test rows, at most
    values: NDArray[np.float64]  # of every client with test rows, seed after seed
    conditions: dict[str, ConditionRow] = field(default_factory=dict)  # by kind, if they were asked for


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods side by side; `print`, `table`, `text`, `markdown` and `as_dict` show the same numbers."""

    rows: tuple[Row, ...]
    baseline: str
    metric: str
    higher: bool  # whether a larger value is better
    select: str
    title: str
    scope: str  # whose values: metric, clients, model, round, seeds
    spread: str  # what the measures of uncertainty cover
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        return self.text().rstrip()

    def _repr_html_(self) -> str:
        header, rows = self.cells()
        return html_table(header, rows, title=visible(self.title), bold=self.best(), notes=self._notes())

    @property
    def caption(self) -> str:
        """What the numbers are, in one line."""
        return f"{self.scope}; {self.spread}"

    @property
    def unit(self) -> Unit:
        """How the values are written."""
        return Unit.of(self.metric, [row.mean.mean for row in self.rows])

    def cells(self, written: Callable[[str], str] = visible) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows as strings, with the methods' labels as ``written(label)``."""
        unit = self.unit
        header = ["method", "mean (std)", *(written(name) for name, _ in self._columns(self.rows[0]))]
        rows = [
            [
                written(row.label),
                f"{with_std(unit, row.mean)} ({unit.text(row.std)})",
                *(with_std(unit, value) for _, value in self._columns(row)),
            ]
            for row in self.rows
        ]
        if not self.kinds:
            header += ["bytes/round", "seconds", f"minus {written(self.baseline)} [95 %]"]
            rows = [[*cells, *self._costs(row)] for cells, row in zip(rows, self.rows, strict=True)]
        if len({row.seeds for row in self.rows}) > 1:  # else the caption names them for all
            header.append("seeds")
            rows = [[*cells, str(len(row.seeds))] for cells, row in zip(rows, self.rows, strict=True)]
        return header, rows

    @property
    def kinds(self) -> list[str]:
        """The kinds of condition that have a column."""
        return list(dict.fromkeys(name for row in self.rows for name in row.conditions))

    def _columns(self, row: Row) -> list[tuple[str, SeedStatistics]]:
        """Return a row's values of the metric that follow the mean, each with the name of its column."""
        if not self.kinds:
            return [("pooled", row.pooled), ("worst 10 %", row.worst10)]
        unknown = SeedStatistics(None, None, None)
        means = {name: own.mean for name, own in row.conditions.items()}
        return [("pooled", row.pooled), *((name, means.get(name, unknown)) for name in self.kinds)]

    def _costs(self, row: Row) -> list[str]:
        """Return a row's bytes, seconds and difference to the baseline."""
        seconds = f"{row.seconds:.1f}" if row.seconds < 100 else f"{row.seconds:.0f}"
        difference = "baseline" if row.label == self.baseline else interval(self.unit, row.difference)
        return [human_bytes(row.bytes_per_round), seconds, difference]

    def best(self) -> set[tuple[int, int]]:
        """Return the (row, column) of the best value in each column of the metric."""
        sign = 1.0 if self.higher else -1.0
        found = [[row.mean.mean, *(value.mean for _, value in self._columns(row))] for row in self.rows]
        columns = np.array([[-np.inf if v is None else sign * v for v in values] for values in found])
        best = np.isfinite(columns) & (columns == columns.max(axis=0))
        return {(int(i), int(j) + 1) for i, j in np.argwhere(best)}

    def table(self) -> RenderableType:
        """Return the table and its notes for `rich`; the best of each column of the metric is bold."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        header, rows = self.cells()
        best, tables = self.best(), []
        each = AT_ONCE if self.kinds else len(header)  # many conditions become tables one below the other
        for start in range(1, len(header), each):
            title = Text(visible(self.title)) if start == 1 else None
            table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
            shown = [0, *range(start, min(start + each, len(header)))]
            for i in shown:
                cells = [row[i] for row in rows]
                name = re.sub(r" (?=\[|10)|(?<=/)", "\n", header[i])
                widest = max(len(word) for cell in (name, *cells) for word in cell.split())
                whole = i > 0 and not self.kinds and not re.search(r"[(\[]", name)
                table.add_column(Text(name), justify="right" if i else "left", min_width=widest, no_wrap=whole)
            for i, row in enumerate(rows):
                table.add_row(*(Text(row[j], style="bold" if (i, j) in best else "") for j in shown))
            tables.append(table)
        return Group(*tables, *(Text(note, style="dim") for note in self._notes()))

    def _notes(self) -> list[str]:
        return [visible(self.caption), *(visible(f"warning: {text}") for text in self.warnings)]

    def text(self) -> str:
        """Return plain text."""
        header, rows = self.cells()
        return "\n".join([visible(self.title), aligned([header, *rows], range(1, len(header))), *self._notes()]) + "\n"

    def markdown(self) -> str:
        """Return a Markdown table; the best of each column of the metric is bold."""
        header, rows = self.cells(for_markdown)
        best = self.best()
        bold = [[f"**{c}**" if (i, j) in best else c for j, c in enumerate(row)] for i, row in enumerate(rows)]
        lines = markdown_table(header, bold)
        return "\n".join(lines) + "\n\n" + "\n\n".join(map(for_markdown, self._notes())) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, in the metric's own scale (an accuracy is a fraction)."""
        rows = [
            {"label": row.label, "view": row.view, "rounds": list(row.rounds), "seeds": list(row.seeds)}
            | {key: getattr(row, key)._asdict() for key in ("mean", "pooled", "worst10", "top10_samples")}
            | {key: getattr(row, key) for key in ("std", "excluded", "bytes_per_round", "seconds")}
            | {"difference": asdict(row.difference) if row.difference else None}
            | ({"conditions": {name: own.as_dict() for name, own in row.conditions.items()}} if self.kinds else {})
            for row in self.rows
        ]
        named = {"metric": self.metric, "higher_is_better": self.higher, "select": self.select}
        notes = {"title": self.title, "caption": self.caption, "warnings": list(self.warnings)}
        return {**named, "baseline": self.baseline, **notes, "rows": rows}


def for_markdown(text: str) -> str:
    """Return text in which nothing is Markdown or HTML, and nothing ends a cell; underscores inside words may stay."""
    return re.sub(r"[\\`*<|\[]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", visible(text))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns, but for the first, are right-aligned; texts are Markdown already."""
    return ["| " + " | ".join(row) + " |" for row in [header, ["---", *["---:"] * (len(header) - 1)], *rows]]


def with_std(unit: Unit, value: SeedStatistics) -> str:
    """Return a mean over seeds and their deviation, if there are several."""
    return unit.text(value.mean) + ("" if value.std is None else f"±{unit.text(value.std)}")


def interval(unit: Unit, value: Difference | None) -> str:
    """Return a difference and the interval that it has; `-` where nothing was paired."""
    if value is None:
        return "-"
    ends = "" if value.low is None else f" [{unit.text(value.low)},{unit.text(value.high)}]"
    return unit.text(value.mean, plus=True) + ends


def human_bytes(count: float) -> str:
    """Return a number of bytes in decimal units, such as 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
