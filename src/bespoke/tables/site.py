"""The pages of ``docs/results``, written from the table files and the results alone, and the state of all tables."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bespoke.files import make_folder, write_atomic
from bespoke.report.page import markdown
from bespoke.report.table import aligned, for_markdown, markdown_table
from bespoke.tables import reasons, spec, words
from bespoke.tables.beside import Reader
from bespoke.tables.page import Counts, Page, explained
from bespoke.tables.results import Result
from bespoke.tables.sections import sections_of
from bespoke.tables.spec import Table

FRONT = "README.md"
_WRITTEN = "<!-- Written by `bespoke table --write`; do not edit. -->"


@dataclass(frozen=True)
class Site:
    """All tables with ours beside the papers'."""

    root: Path  # of the results
    pages: tuple[Page, ...]
    reasons: dict[str, reasons.Reason]
    trainings: dict[str, Result]  # every result of a training once, by its settings
    papers: dict[str, dict[str, None]]  # the trainings of each paper's folder, in order

    # --- the state of everything ------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return how far every table is, as plain text."""
        rows = [[page.beside.table.name, *_state(page.counts).values()] for page in self.pages]
        if not rows:
            return "there are no tables\n"
        total = sum((page.counts for page in self.pages), Counts())
        header = ["table", *_state(total)]
        table = aligned([header, *rows, ["all", *_state(total).values()]], range(1, len(header)))
        left_out = words.left_out(number for page in self.pages for number in page.beside.numbers)
        return "\n".join([table, *left_out, self._spent_told(self.trainings)]) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Return how far every table is, as plain values."""
        tables = {page.beside.table.name: asdict(page.counts) for page in self.pages}
        return {"tables": tables, "seconds": self._spent(self.trainings)}

    def _spent(self, keys: Iterable[str]) -> dict[str, float]:
        """Return the seconds of trainings by device."""
        seconds: dict[str, float] = {}
        for key in keys:
            content = self.trainings[key].content
            device = str(content.get("environment", {}).get("device", "unknown device"))
            seconds[device] = seconds.get(device, 0.0) + float(content.get("seconds") or 0.0)
        return dict(sorted(seconds.items()))

    def _spent_told(self, keys: Iterable[str]) -> str:
        return "; ".join(f"{value:,.0f} s on {device}" for device, value in self._spent(keys).items()) or "nothing run"

    # --- the pages --------------------------------------------------------------------------------------------------

    def files(self, out: Path) -> dict[str, str]:
        """Return the pages by file name, with links as seen from the folder ``out``."""
        by_paper: dict[str, list[Page]] = {}
        for page in self.pages:
            by_paper.setdefault(page.beside.table.name.partition("/")[0], []).append(page)
        papers = {f"{name}.md": self._paper(own, out, name) for name, own in by_paper.items()}
        return {FRONT: self._front(by_paper), **papers}

    def _front(self, by_paper: dict[str, list[Page]]) -> str:
        rows = []
        for name, pages in by_paper.items():
            counts = sum((page.counts for page in pages), Counts())
            link = f"[{for_markdown(pages[0].beside.table.paper)}]({name}.md)"
            rows.append([link, *_state(counts).values(), self._spent_told(self.papers[name])])
        total = sum((page.counts for page in self.pages), Counts())
        rows.append(["all", *_state(total).values(), self._spent_told(self.trainings)])
        lines = [
            "# Results",
            _WRITTEN,
            "",
            "The papers' tables with ours beside them, written by `bespoke table --write docs/results` from `results/`",
            "and `experiments/` alone. [tables.md](../tables.md) says how they are made, and what a mark means.",
            "",
            *markdown_table(["paper", *_state(total), "training"], rows),
            "",
            *_LEGEND,
        ]
        return "\n".join(lines) + "\n"

    def _paper(self, pages: Sequence[Page], out: Path, name: str) -> str:
        lines = [f"# {for_markdown(pages[0].beside.table.paper)}", _WRITTEN]
        for page in pages:
            lines += ["", *self._section(page, out)]
        kept = self._reasons_kept(pages)
        if kept:
            lines += [
                "",
                "## Reasons kept",
                "",
                "Of numbers that are not marked any more.",
                "",
                *markdown.item_lines((line,) for line in kept),
            ]
        lines += ["", f"Training: {self._spent_told(self.papers[name])}. [All papers](README.md)"]
        return "\n".join(lines) + "\n"

    def _section(self, page: Page, out: Path) -> list[str]:
        """Return what a paper's page says of one table, with a figure's picture if it is there."""
        table, target = page.beside.table, _linker(out)
        first, *others = sections_of(page, self.root)
        drawn = f"{table.name.replace('/', '_')}.png"
        lines = markdown.section_lines(first, target)
        lines += ["", f"![{for_markdown(table.source)}]({drawn})"] if (out / drawn).is_file() else []
        return [*lines, *(line for other in others for line in ("", *markdown.section_lines(other, target, 3)))]

    def _reasons_kept(self, pages: Sequence[Page]) -> list[str]:
        numbers = [number for page in pages for number in page.beside.numbers if not number.marked]
        return [f"{n.id}: {explained(self.reasons[n.id])}" for n in numbers if n.id in self.reasons]

    def check(self) -> None:
        """Refuse reasons for numbers that no table has, and evidence that is not there."""
        reasons.check(self.reasons, {number.id for page in self.pages for number in page.beside.numbers}, self.root)

    def write(self, out: Path) -> list[Path]:
        """Write the pages, each whole or not at all, after checking that no reason would be lost."""
        self.check()
        make_folder(out)
        files = self.files(out)
        for name, text in files.items():
            write_atomic(out / name, text)
        return [out / name for name in files]


def gather(root: Path, tables: Sequence[Table] | None = None) -> Site:
    """Read all shipped tables and their results."""
    if tables is None:
        tables = [spec.read(path) for path in spec.listed().values()]
    known, reader = reasons.read(root), Reader(root)
    pages = tuple(Page(reader.beside(table), known) for table in tables)
    trainings: dict[str, Result] = {}
    papers: dict[str, dict[str, None]] = {}
    for table in tables:
        own = papers.setdefault(table.name.partition("/")[0], {})
        for entry in filter(lambda entry: entry.runs, table.entries):
            there, outdated = reader.results(entry)
            for result in [*there.values(), *outdated, *reader.tries(entry)]:
                if result.done:
                    trainings.setdefault(_training(result), result)
                    own.setdefault(_training(result))
    return Site(root, pages, known, trainings, papers)


def _training(result: Result) -> str:
    """Return what is the same for all results of one training."""
    settings = {key: value for key, value in result.content["settings"].items() if key != "evaluation"}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _linker(out: Path) -> Callable[[Path], str]:
    """Return a function that turns a path into a link from a page in ``out``."""
    return lambda path: Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()


def _state(counts: Counts) -> dict[str, str]:
    """Return the columns that say how far tables are."""
    return {
        "numbers": str(counts.cells),
        "not at hand": str(counts.missing),
        "stand-ins run": _of(counts.stand_ins_run, counts.stand_ins),
        "run": _of(counts.run, counts.cells - counts.missing - counts.stand_ins),
        "within 1 point": _of(counts.within_1, counts.points),
        "within 2": _of(counts.within_2, counts.points),
        "marked, with a reason": str(counts.explained),
        "without": str(counts.marked - counts.explained),
        "best method kept": _of(counts.winners_kept, counts.columns),
        "failed": str(counts.failed),
    }


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else "-"


_LEGEND = [
    "Numbers are those that a paper prints in its tables, some of them in two, and four in Self-FL's text. Not at",
    "hand: the data are not there, so nothing is run. Stand-ins are run on other data, labelled, and never held",
    "against the paper's. The other numbers are run as the paper tells; those in percent are counted as within 1 or 2",
    "points of the published ones. The best method is kept where the paper's best of a column is ours too, among the",
    "methods that were run. Training is the time of all trainings, each counted once; the times of trainings side by",
    "side are added up.",
]
