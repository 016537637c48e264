"""The pages of ``docs/results``, written from the table files and the results alone, and the state of all tables."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bespoke.errors import UserError, shown
from bespoke.files import make_folder, read_settings, write_atomic
from bespoke.records import is_count
from bespoke.report.page import markdown
from bespoke.report.table import aligned, for_markdown, markdown_table
from bespoke.tables import reasons, spec, words
from bespoke.tables.beside import Reader
from bespoke.tables.page import Counts, Page, explained
from bespoke.tables.results import Result
from bespoke.tables.sections import sections_of
from bespoke.tables.spec import Table

FRONT = "README.md"
OWN_NEAR, KEPT = 0.75, 2 / 3  # of own numbers and of columns, the shares that are aimed at
REPEATED = "repeated.json"  # among the results: what benchmarks/repeated.py found
HELD = "held.toml"  # among the results: for how many seconds each device was held for them
_WRITTEN = "<!-- Written by `bespoke table --write`; do not edit. -->"


@dataclass(frozen=True)
class Site:
    """All tables with ours beside the papers'."""

    root: Path  # of the results
    pages: tuple[Page, ...]
    reasons: dict[str, reasons.Reason]
    trainings: dict[str, Result]  # every result of a training once, by its settings
    needed: dict[str, set[str]]  # the trainings of each table
    earlier: dict[str, set[str]]  # and those whose settings it has no more

    # --- the state of everything ------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return how far every table is, as plain text."""
        if not self.pages:
            return "there are no tables\n"
        counts = {page.beside.table.name: page.counts for page in self.pages} | {"all": self._total}
        tables = []
        for told in (_progress, _agreement):
            header = ["table", *told(self._total)]
            rows = [[name, *told(own).values()] for name, own in counts.items()]
            tables.append(aligned([header, *rows], range(1, len(header))))
        left_out = words.left_out(number for page in self.pages for number in page.beside.numbers)
        return "\n".join([tables[0], "", tables[1], "", *left_out, self._spent_told(self.trainings)]) + "\n"

    @property
    def _total(self) -> Counts:
        return sum((page.counts for page in self.pages), Counts())

    def as_dict(self) -> dict[str, Any]:
        """Return how far every table is, as plain values."""
        tables = {page.beside.table.name: asdict(page.counts) for page in self.pages}
        return {"tables": tables, "seconds": self._spent(self.trainings)}

    def _spent(self, keys: Iterable[str]) -> dict[str, float]:
        """Return the seconds that trainings took of each device: of several side by side each counts for its share."""
        seconds: dict[str, float] = {}
        for key in keys:
            content = self.trainings[key].content
            own = float(content.get("seconds") or 0.0) / (content.get("environment", {}).get("side_by_side") or 1)
            seconds[self._device(key)] = seconds.get(self._device(key), 0.0) + own
        return dict(sorted(seconds.items()))

    def _device(self, key: str) -> str:
        return str(self.trainings[key].content.get("environment", {}).get("device", "unknown device"))

    def _spent_told(self, keys: Iterable[str]) -> str:
        keys = [*keys]
        number = Counter(map(self._device, keys))
        told = (
            f"{number[device]} training{'s' * (number[device] > 1)}, about {seconds:,.0f} s on one {device}"
            for device, seconds in self._spent(keys).items()
        )
        return "; ".join(told) or "nothing run"

    # --- the pages --------------------------------------------------------------------------------------------------

    def files(self, out: Path) -> dict[str, str]:
        """Return the pages by file name, with links as seen from the folder ``out``."""
        by_paper: dict[str, list[Page]] = {}
        for page in self.pages:
            by_paper.setdefault(page.beside.table.name.partition("/")[0], []).append(page)
        papers = {f"{name}.md": self._paper(own, out) for name, own in by_paper.items()}
        return {FRONT: self._front(by_paper), **papers}

    def _front(self, by_paper: dict[str, list[Page]]) -> str:
        far, well, absent = list[list[str]](), list[list[str]](), list[str]()
        for name, pages in by_paper.items():
            counts = sum((page.counts for page in pages), Counts())
            link = f"[{for_markdown(pages[0].beside.table.paper)}]({name}.md)"
            far.append([link, *_progress(counts).values(), self._spent_told(self._trainings_of(pages))])
            if counts.points or counts.marked or counts.columns:
                well.append([link, *_agreement(counts).values()])
            elif counts.cells and not counts.run:
                absent.append(link)
        far.append(["all", *_progress(self._total).values(), self._spent_told(self.trainings)])
        well.append(["all", *_agreement(self._total).values()])
        lines = [
            "# Results",
            _WRITTEN,
            "",
            "The papers' tables with ours beside them, written by `bespoke table --write docs/results` from `results/`",
            "and `experiments/` alone. [tables.md](../tables.md) says how they are made, and what a mark means.",
            "",
            "## How far",
            "",
            *markdown_table(["paper", *_progress(self._total), "training"], far),
            "",
            *_FAR,
            *self._held_told(),
            *self._repeated_told(),
            "",
            "## How well",
            "",
            *markdown_table(["paper", *_agreement(self._total)], well),
            "",
            *_WELL,
            *(f"Left out is {link}: no printed number of it was run as told; its page tells more." for link in absent),
            "",
            "## What is aimed at",
            "",
            "Three quarters of a paper's own numbers, the paper's best method in two thirds of the columns, and a",
            "reason for every marked number and every other best method. Numbers that are not marked only since they",
            "vary are more than 1.5 points away, and at most two standard deviations.",
            "",
            *markdown_table(["aim", "needed", "so far"], self._aims(by_paper)),
        ]
        return "\n".join(lines) + "\n"

    def _aims(self, by_paper: dict[str, list[Page]]) -> list[list[str]]:
        """Return what is aimed at, paper by paper and for all, with how far it is."""
        aims, total = [], self._total
        for pages in by_paper.values():
            own = sum((page.counts for page in pages), Counts())
            if own.own:
                what = f"{pages[0].beside.table.paper}: numbers of its own method that are not marked"
                wide = f", {own.own_spread} of them only since they vary" if own.own_spread else ""
                needed = f"{math.ceil(OWN_NEAR * own.own)} of {own.own}"
                aims.append([for_markdown(what), needed, f"{own.own_near}{wide}"])
        if total.columns:
            kept = f"{total.winners_kept}, and {total.winners_explained} with a reason for another one"
            needed = f"{math.ceil(KEPT * total.columns)} of {total.columns}"
            aims.append(["columns with the paper's best method", needed, kept])
        told = f"{total.explained}, and {total.tried} tried with the cause open"
        return [*aims, ["marked numbers with a reason", f"all {total.marked}", told]]

    def _held_told(self) -> list[str]:
        """Return for how long devices were held for all of it, if that is written down."""
        path = self.root / HELD
        if not path.exists():
            return []
        told = []
        for device, times in read_settings(path, "hold times").items():
            if not isinstance(times, dict) or not all(map(is_count, times.values())):
                raise UserError(f"{path}: [{shown(device)}] must hold whole numbers of seconds")
            told.append(f"one {device} for at most {sum(times.values()):,} s")
        what = "readings, questions, repeated cells, benchmarks and what was lost"
        return [f"With {what}, it took {' and '.join(told)}."] if told else []

    def _repeated_told(self) -> list[str]:
        """Return, draw by draw, how many of the cells run again gave the number they had then, and how many today's."""
        path = self.root / REPEATED
        if not path.exists():
            return []
        told = list[str]()
        ours = {number.id: number.ours for page in self.pages for number in page.beside.numbers}
        try:
            for draw in json.loads(path.read_text(encoding="utf-8"))["draws"]:
                told.append(f"- Draw {len(told) + 1}, {_draw(draw, ours)}.")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{path}: holds no draws of cells that were run again: restore it") from None
        return [
            "",
            "Cells drawn at random and run again by their commands",
            f"([results/{REPEATED}](../../results/{REPEATED}), [more](../tables.md#the-same-numbers-again)):",
            "",
            *told,
        ]

    def _paper(self, pages: Sequence[Page], out: Path) -> str:
        lines = [f"# {for_markdown(pages[0].beside.table.paper)}", _WRITTEN]
        for page in pages:
            lines += ["", *self._section(page, out)]
        kept = self._reasons_kept(pages)
        if kept:
            lines += [
                "",
                "## Reasons kept",
                "",
                "Of numbers that are not marked, and of columns whose best method is kept, open or not told apart.",
                "",
                *markdown.item_lines((line,) for line in kept),
            ]
        told = self._spent_told(self._trainings_of(pages))
        lines += ["", f"Training of all tables: {told}. [All papers](README.md)"]
        return "\n".join(lines) + "\n"

    def _section(self, page: Page, out: Path) -> list[str]:
        """Return what a paper's page says of one table, with a figure's picture if it is there."""
        table, target = page.beside.table, _linker(out)
        first, *others = sections_of(page, self.root)
        drawn = f"{table.name.replace('/', '_')}.png"
        lines = markdown.section_lines(first, target)
        lines += ["", f"![{for_markdown(table.source)}]({drawn})"] if (out / drawn).is_file() else []
        own, before = self.needed[table.name], self.earlier[table.name]
        if own or before:
            told = f"; earlier ones with other settings: {self._spent_told(before)}" if before else ""
            lines += ["", f"Training: {self._spent_told(own)}{told}."]
        return [*lines, *(line for other in others for line in ("", *markdown.section_lines(other, target, 3)))]

    def _trainings_of(self, pages: Iterable[Page]) -> set[str]:
        names = [page.beside.table.name for page in pages]
        return set[str]().union(*(self.needed[name] | self.earlier[name] for name in names))

    def _reasons_kept(self, pages: Sequence[Page]) -> list[str]:
        kept: dict[reasons.Reason, list[str]] = {}
        for column in (column for page in pages for column in page.beside.columns):
            idle = [number.id for number in column.numbers if not number.marked]
            idle += [] if column.lost else [column.id]
            for id in idle:
                if id in self.reasons:
                    kept.setdefault(self.reasons[id], []).append(id)
        return [f"{', '.join(ids)}: {explained(reason)}" for reason, ids in kept.items()]

    def check(self) -> None:
        """Refuse reasons for numbers and columns that no table has, and evidence that is not there."""
        reasons.check(self.reasons, set[str]().union(*(page.ids for page in self.pages)), self.root)

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
    needed: dict[str, set[str]] = {table.name: set() for table in tables}
    earlier: dict[str, set[str]] = {table.name: set() for table in tables}
    for table in tables:
        for entry in filter(lambda entry: entry.runs, table.entries):
            there, outdated = reader.results(entry)
            for found, own in (there.values(), needed), ([*outdated, *reader.tries(entry)], earlier):
                for result in filter(lambda result: result.done, found):
                    trainings.setdefault(_training(result), result)
                    own[table.name].add(_training(result))
        earlier[table.name] -= needed[table.name]
    return Site(root, pages, known, trainings, needed, earlier)


def _draw(draw: dict[str, Any], ours: Mapping[str, Mapping[int, float]]) -> str:
    """Return how many cells of a draw gave the number that they had, and how many the one that they have today."""
    cells, whole = draw["cells"], len(draw["drawn"])
    then = sum(cell["same_number"] is True for cell in cells)
    now = sum(
        abs(ours.get(cell["cell"], {}).get(cell["seed"], math.inf) - cell["again"]["value"]) < 1e-9 for cell in cells
    )
    today = "" if now == then else f", {now} of {whole} the one that it has today"
    unfinished = f", {whole - len(cells)} came to no end" if len(cells) < whole else ""
    data = f" of {' and '.join(draw['data'])}" if "data" in draw else ""
    where = f"on one {draw['device']}, of {draw['drawn_of']:,} results{data}"
    where += f" whose trainings took at most {draw['longest_seconds']:,.0f} s"
    return f"{where}: {then} of {whole} gave the number that the cell had{today}{unfinished}"


def _training(result: Result) -> str:
    """Return what is the same for all results of one training."""
    settings = {key: value for key, value in result.content["settings"].items() if key != "evaluation"}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _linker(out: Path) -> Callable[[Path], str]:
    """Return a function that turns a path into a link from a page in ``out``."""
    return lambda path: Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()


def _progress(counts: Counts) -> dict[str, str]:
    """Return the columns that say how far tables are."""
    return {
        "numbers": str(counts.cells),
        "not at hand": str(counts.missing),
        "stand-ins run": _of(counts.stand_ins_run, counts.stand_ins),
        "run": _of(counts.run, counts.cells - counts.missing - counts.stand_ins),
        "failed": str(counts.failed),
    }


def _agreement(counts: Counts) -> dict[str, str]:
    """Return the columns that say how well tables agree with the papers'."""
    told = counts.winners_explained + counts.winners_open
    return {
        "within 1 point": _of(counts.within_1, counts.points),
        "within 2": _of(counts.within_2, counts.points),
        "own method not marked": _of(counts.own_near, counts.own),
        "marked, with a reason": str(counts.explained),
        "marked, tried, cause open": str(counts.tried),
        "marked, argued, cause open": str(counts.argued),
        "marked, nothing known": str(counts.marked - counts.explained - counts.tried - counts.argued),
        "best method kept": _of(counts.winners_kept, counts.columns),
        "of these told apart": str(counts.winners_certain),
        "other, not told apart": str(counts.winners_tied),
        "other, with a reason": str(counts.winners_explained),
        "other, cause open": str(counts.winners_open),
        "other, nothing known": str(counts.columns - counts.winners_kept - counts.winners_tied - told),
    }


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else "-"


_FAR = [
    "Numbers are those that a paper prints in its tables, some of them in two, and four in Self-FL's text. Not at",
    "hand: the data are not there, so nothing is run. Stand-ins are run on other data, labelled, and never held",
    "against the paper's. Numbers of parameters are counted without training. Training is the time of a whole device,",
    "each training counted once: of several side by side each counts for its share, so a little more passes where",
    "fewer are left at the end.",
]
_WELL = [
    "Of what was run as the paper tells: accuracies within 1 and 2 points of the published ones; accuracies of the",
    "paper's own method that are not marked as far away; marked numbers of any method: with a reason; tried, which is",
    "with runs of that method on such data that leave the cause open; argued, from other methods, other data or the",
    "paper's own numbers, likewise; and without anything. The best method is kept where the paper's best of a column",
    "is ours too, among the methods that were run. Two methods are told apart by a lead of more than two standard",
    "deviations over three or more seeds that both have, or of more than 1.5 points over fewer. Where another one is",
    "best and told apart, it has a reason, one that leaves the cause open, or none. Several numbers and columns are",
    "often of one training, and some columns chose a reading ([what other counts would",
    "be](../tables.md#what-is-counted)). Where a table has several readings of the same printed numbers, the first is",
    "counted.",
]
