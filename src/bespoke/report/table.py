"""A comparison of methods as a table: for a terminal, as plain text, Markdown or JSON."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bespoke.report.metrics import SeedStatistics

if TYPE_CHECKING:
    from rich.console import RenderableType

Difference = tuple[float, float | None, float | None]  # mean, and the interval's low and high end


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> str:
    """Rows of cells as lines of columns two blanks apart; the columns in ``right`` end at one place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


@dataclass(frozen=True)
class Row:
    """One method of a comparison; accuracies are fractions, statistics are over seeds."""

    label: str
    view: str
    rounds: tuple[int, ...]  # the chosen round of each seed
    seeds: tuple[int, ...]
    mean: SeedStatistics  # of the clients' mean
    std: float | None  # over clients (ddof 1), averaged over seeds
    pooled: SeedStatistics
    worst10: SeedStatistics
    bytes_per_round: float  # up and down
    seconds: float  # of a whole run
    difference: Difference | None  # to the baseline, paired over clients
    pairs: int  # clients that the difference is taken over
    excluded: int  # clients without test rows, at most
    accuracies: NDArray[np.float64]  # of every client with test rows, seed after seed


@dataclass(frozen=True)
class Comparison:
    """Methods side by side; `table`, `text`, `markdown` and `as_dict` show the same."""

    rows: tuple[Row, ...]
    baseline: str
    select: str
    title: str
    caption: str
    warnings: tuple[str, ...]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The header and the rows as strings, accuracies in percent."""
        header = ["method", "mean (std)", "pooled", "worst 10 %", "bytes/round", "seconds"]
        rows = [
            [
                row.label,
                f"{_percent(row.mean)} ({'-' if row.std is None else f'{100 * row.std:.1f}'})",
                _percent(row.pooled),
                _percent(row.worst10),
                human_bytes(row.bytes_per_round),
                f"{row.seconds:.1f}" if row.seconds < 100 else f"{row.seconds:.0f}",
                "baseline" if row.label == self.baseline else _interval(row.difference),
            ]
            for row in self.rows
        ]
        header.append(f"minus {self.baseline} [95 %]")
        if len({row.seeds for row in self.rows}) > 1:  # else the caption says it for all
            header.append("seeds")
            rows = [[*cells, str(len(row.seeds))] for cells, row in zip(rows, self.rows, strict=True)]
        return header, rows

    def _best(self) -> set[tuple[int, int]]:
        """The (row, column) of the largest value in each column of accuracies."""
        columns = [[row.mean.mean, row.pooled.mean, row.worst10.mean] for row in self.rows]
        best = np.max(columns, axis=0)
        return {(i, j + 1) for i, values in enumerate(columns) for j in range(3) if values[j] == best[j]}

    def table(self) -> RenderableType:
        """For `rich`: the table and its notes; the best of each column of accuracies is bold."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        header, rows = self.cells()
        best = self._best()
        table = Table(title=Text(self.title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, column in enumerate(zip(header, *rows, strict=True)):
            name = re.sub(r" (?=\[|10)|(?<=/)", "\n", column[0])
            widest = max(len(word) for cell in (name, *column[1:]) for word in cell.split())
            whole = i > 0 and not re.search(r"[(\[]", name)
            table.add_column(Text(name), justify="right" if i else "left", min_width=widest, no_wrap=whole)
        for i, row in enumerate(rows):
            table.add_row(*(Text(cell, style="bold" if (i, j) in best else "") for j, cell in enumerate(row)))
        return Group(table, *(Text(note, style="dim") for note in self._notes()))

    def _notes(self) -> list[str]:
        return [self.caption, *(f"warning: {text}" for text in self.warnings)]

    def text(self) -> str:
        """Plain text."""
        header, rows = self.cells()
        return "\n".join([self.title, aligned([header, *rows], range(1, len(header))), *self._notes()]) + "\n"

    def markdown(self) -> str:
        """A Markdown table; the best of each column of accuracies is bold."""
        header, rows = self.cells()
        best = self._best()
        bold = [[f"**{c}**" if (i, j) in best else c for j, c in enumerate(row)] for i, row in enumerate(rows)]
        rule = ["---", *["---:"] * (len(header) - 1)]
        lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in [header, rule, *bold]]
        return "\n".join(lines) + "\n\n" + "\n\n".join(self._notes()) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, accuracies as fractions."""
        rows = []
        for row in self.rows:
            low_high = dict(zip(("mean", "low", "high"), row.difference or (), strict=False))
            rows.append(
                {"label": row.label, "view": row.view, "rounds": list(row.rounds), "seeds": list(row.seeds)}
                | {key: getattr(row, key)._asdict() for key in ("mean", "pooled", "worst10")}
                | {
                    "std": row.std,
                    "excluded": row.excluded,
                    "bytes_per_round": row.bytes_per_round,
                    "seconds": row.seconds,
                }
                | {"difference": low_high | {"clients": row.pairs} if row.difference else None}
            )
        notes = {"title": self.title, "caption": self.caption, "warnings": list(self.warnings)}
        return {"select": self.select, "baseline": self.baseline, **notes, "rows": rows}


def _percent(value: SeedStatistics) -> str:
    return f"{100 * value.mean:.1f}" + ("" if value.std is None else f"±{100 * value.std:.1f}")


def _interval(value: Difference | None) -> str:
    if value is None:
        return "-"
    mean, low, high = value
    return f"{100 * mean:+.1f}" + ("" if low is None or high is None else f" [{100 * low:.1f},{100 * high:.1f}]")


def human_bytes(count: float) -> str:
    """A number of bytes in decimal units, such as 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
