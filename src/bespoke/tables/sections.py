"""What is said of one table: sections that `docs/results` shows as Markdown and `bespoke report --table` as HTML."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bespoke.errors import UserError
from bespoke.files import experiments_folder
from bespoke.report.page import parts
from bespoke.report.page.figures import Strip, against, axis, plain, strips
from bespoke.report.page.parts import Chart, Code, Details, Link, Section, Words
from bespoke.tables import readings, reasons, spec
from bespoke.tables.beside import Number, Reader
from bespoke.tables.page import Page
from bespoke.tables.spec import Cell, Row, Table


def beside(table: Table, root: Path) -> Page:
    """Return a table with ours beside the paper's and its reasons, which have to fit it."""
    page = Page(Reader(root).beside(table), reasons.read(root))
    own = {id: reason for id, reason in page.reasons.items() if id.startswith(f"{table.name}/")}
    reasons.check(own, page.ids, root)
    return page


def page_of(name: str, root: Path) -> parts.Page:
    """Return the page about one table, from a folder of results."""
    table = spec.find(name)
    if not root.is_dir():
        raise UserError(f"there is no folder {root}: name that of the results, or make it with bespoke sweep {name}")
    page = beside(table, root)
    if not page.shown().rows:
        how = f"bespoke sweep {table.name} makes them" if any(entry.runs for entry in table.entries) else "none is run"
        how = f"bespoke figure {table.name} draws it" if table.kind == "figure" else how
        raise UserError(f"{table.name} has no numbers that could be shown: {how}")
    sections = sections_of(page, root)
    commands = "; a number leads to the command that makes it" if any(entry.runs for entry in table.entries) else ""
    return parts.Page(
        title=table.doc,
        lead=f"The paper's numbers with ours beside them{commands}.",
        methods=(),
        warnings=(),
        sections=(*sections[:-1], _alone(sections[-1], table, page)),
    )


def sections_of(page: Page, root: Path) -> tuple[Section, ...]:
    """Return the table, its marked numbers with their reasons, and its settings; of a figure what there is."""
    table = page.beside.table
    paragraphs: list[Words] = [(" ".join(part.split()),) for part in table.about.split("\n\n") if part.strip()]
    if table.kind == "figure":
        wanted = [number for number in page.beside.numbers if number.entry.runs]
        run = f"; {sum(bool(number.ours) for number in wanted)} of {len(wanted)} runs are there" if wanted else ""
        paragraphs.append(("Draw it with ", Code(f"bespoke figure {table.name}"), f"{run}."))
    if said := agreement(page):
        paragraphs.append((said,))
    if table.kind == "table":
        with_numbers = bool(table.cells)
    else:
        with_numbers = table.figure in _OF_NUMBERS and bool(page.shown().rows)
    first = Section(
        "table",
        f"{table.source}: {table.title}",
        tuple(paragraphs),
        tuple(_charts(page)),
        (page.shown(),) if with_numbers else (),
        tuple((note,) for note in page.notes) if with_numbers else (),
    )
    misses, losses = (tuple((text,) for text in own) for own in (page.misses, page.losses))
    marked = Section("marked", "Marked numbers", items=misses) if misses else None
    lost = Section("lost", "Other best methods", items=losses) if losses else None
    return tuple(filter(None, (first, marked, lost, _readings(table, root), _settings(page, root))))


_OF_NUMBERS = ("curves", "epochs", "hierarchy", "rows")  # figures that draw a table's numbers


def agreement(page: Page) -> str:
    """Return how well a table agrees with the paper's, in a sentence; "" where nothing can be held against it."""
    counts = page.counts
    if not counts.points:
        return ""
    said = f"{counts.within_1} of {counts.points} numbers are within 1 point, {counts.within_2} within 2"
    if counts.columns:
        said += f"; the best method is kept in {counts.winners_kept} of {counts.columns} columns"
        said += f" ({counts.winners_certain} of them told apart from all others)" if counts.winners_kept else ""
        said += f", and not told apart from ours in {counts.winners_tied}" if counts.winners_tied else ""
    return f"{said}."


# --- charts ---------------------------------------------------------------------------------------------------------


def _charts(page: Page) -> list[Chart]:
    """Return published against ours, and ours minus published by method, of the numbers in percent that both have."""
    numbers = [number for column in page.beside.columns for number in column.counted if number.percent]
    if len(numbers) < 2:
        return []
    columns = list(dict.fromkeys(number.entry.cell.name for number in numbers))
    theirs, ours = (np.array([getattr(n, key) for n in numbers], dtype=np.float64) for key in ("published", "mean"))
    beside = against(
        "Published and ours",
        "A point is a number of the table; on the line both are the same, between the dotted ones they differ by at "
        "most 2 points.",
        axis("published, %"),
        axis("ours, %"),
        {name: np.array([n.entry.cell.name == name for n in numbers]) for name in columns},
        theirs,
        ours,
        list(map(_hover, numbers)),
        2.0,
    )
    rows: list[Strip] = []
    for row in page.beside.table.rows:
        own = [n for n in numbers if n.entry.row.id == row.id]
        far = f": {sum(n.marked for n in own)} of {len(own)} marked" if any(n.marked for n in own) else ""
        if own:
            differences = np.array([n.difference for n in own], dtype=np.float64)
            rows.append(Strip(row.name, len(rows), len(rows), differences, list(map(_hover, own)), far))
    caption = "A point is a number of the table, right of 0 where ours is higher; the thick line is the mean."
    differs = strips("Ours minus published", caption, axis("percentage points"), rows, zero=True, each="number")
    return [replace(chart, wide=False) for chart in (beside, differs)]


def _hover(number: Number) -> str:
    """Return what hovering over a number says: its method and column, both values and their difference."""
    entry = number.entry
    values = f"published {number.published:.4g}, ours {number.mean:.4g}: <b>{number.difference:+.2f}</b>"
    return f"{plain(entry.row.name)}<br>{plain(entry.cell.name)}<br>{values}"


# --- readings -------------------------------------------------------------------------------------------------------


def _readings(table: Table, root: Path) -> Section | None:
    """Return how often the papers' words were read in another way, for the methods of a table; None if never."""
    paper, texts, items = table.name.partition("/")[0], list[Words](), list[Words]()
    for own in readings.read(root):
        names = [row.name for row in table.rows if (row.algorithm or row.id) == own.method]
        if names and own.readings and own.column.partition("/")[0] == paper:
            others = f", and {own.others} more to see what decides" if own.others else ""
            chosen = f"; chosen by its number there, and so used everywhere: {own.chosen}" if own.chosen else ""
            told = f"{names[0]}: {own.readings} tried on {own.column}{others}{chosen} ("
            items.append((told, Link(f"results/readings/{own.path.name}", own.path), ")."))
    texts += [_ON_ONE_COLUMN] if items else []
    questions = [each for each in _questions(paper) if _methods(each) & _methods(table)]
    for question in questions:
        everything = Reader(root).beside(question).numbers
        numbers = [n for n in everything if not _in_brackets(n.entry.row) and not _in_brackets(n.entry.cell)]
        run = f"{sum(bool(n.ours) for n in numbers)} of {len(numbers)}"
        told = f"{question.title}: {run} numbers of its readings are there{_chosen(question)} ("
        items.append((told, Link(question.name, question.path), ")."))
    texts += [_IN_A_QUESTION] if questions else []
    return Section("readings", "Readings tried", tuple(texts), items=tuple(items)) if items else None


_ON_ONE_COLUMN: Words = (
    "Where a paper leaves a setting open, ways to read it were run on one column. Chosen was the first in the order "
    "written down of those within 0.3 points of the closest to the published number. Which were left out, or written "
    "down after first numbers were known, ",
    Code("docs/methods"),
    " and ",
    Code("benchmarks/readings.py"),
    " say. They were run by earlier versions of the code, whose commit was not noted; in the tables the same settings "
    "give up to 0.5 points more or less.",
)
_IN_A_QUESTION: Words = ("Open questions try further readings; their page says whether one is chosen.",)


def _chosen(question: Table) -> str:
    """Return which of a question's columns was chosen, and of how many; "" if none."""
    columns = [cell for cell in question.cells if not _in_brackets(cell)]
    names = (cell.name for cell in columns if cell.id == question.chosen)
    return "".join(f"; of {len(columns)} columns one was chosen: {name}" for name in names)


def _questions(paper: str) -> list[Table]:
    """Return the tables of open questions that try readings for a paper's tables."""
    tables = map(spec.read, spec.listed().values())
    return [table for table in tables if table.readings_for == paper]


def _in_brackets(part: Row | Cell) -> bool:
    """Return whether a question has a row or a column only to show what decides."""
    return part.name.startswith("(")


def _methods(table: Table) -> set[str]:
    return {entry.algorithm for entry in table.entries if entry.runs or entry.cell.how == "statistic"}


# --- settings -------------------------------------------------------------------------------------------------------


def _settings(page: Page, root: Path) -> Section:
    """Return where a table's settings are: its file, the run files, and what differs from them."""
    table = page.beside.table
    places: list[str | Code | Link] = [Link("The table's file", table.path, _anchor(table.path))]
    for what, files in _files(table).items():
        for i, (name, path) in enumerate(files.items()):
            places += [", " if i else f"; {what} ", Link(name, path, _anchor(path))]
    if table.derived_from:
        places.append(f"; the runs are those of {', '.join(table.derived_from)}")
    if (own := root / table.name).is_dir():
        places += ["; ", Link("results", own)]
    if any(entry.runs for entry in table.entries) and table.kind == "table":
        told = f"report --table {table.name} -o table.html" if page.shown().rows else f"sweep {table.name}"
        places += [". Every number's command: ", Code(f"bespoke {told}")]
    of_seed = f" Its seed is {table.seed} where none is given." if table.seed else ""
    return Section("settings", "Settings", ((*places, f".{of_seed}"),), items=tuple(_changes(table)))


def _files(table: Table) -> dict[str, dict[str, Path]]:
    """Return the run files and the methods' presets of a table, by kind and name."""
    run = [(entry, entry.base) for entry in table.entries if entry.runs and entry.base]
    presets = {entry.algorithm: path.parent / "algorithms" / f"{entry.algorithm}.toml" for entry, path in run}
    return {
        "run files": {entry.cell.base: path for entry, path in run},
        "presets": {name: path for name, path in presets.items() if path.is_file()},
    }


def _anchor(path: Path) -> str:
    return f"file-{'-'.join(path.parts[-2:])}"


def _changes(table: Table) -> list[Words]:
    """Return what columns and rows change in their run files; first what all columns change."""
    cells = [cell for cell in table.cells if not cell.missing and cell.kind != "derived"]
    changes = [_cell_changes(cell) for cell in cells]
    common = [part for part in next(iter(changes), []) if all(part in own for own in changes)]
    said = [("every column: ", *_joined(common))] if common else []
    for cell, own in zip(cells, changes, strict=True):
        if rest := [part for part in own if part not in common]:
            said.append((f"{cell.name}: ", *_joined(rest)))
    return said + [(f"{row.name}: ", *_codes(row.set)) for row in table.rows if row.set]


def _cell_changes(cell: Cell) -> list[Words]:
    own: list[Words] = [(Code(text),) for text in cell.set]
    own += [(Code(key), f" = {number} + seed") for key, number in cell.by_seed.items()]
    own += [(f"for {row} ", *_codes(told["set"])) for row, told in cell.methods.items() if told.get("set")]
    return [*own, *([("evaluated again with ", *_codes(cell.evaluate))] if cell.evaluate else [])]


def _codes(overrides: Iterable[str]) -> Words:
    return _joined([(Code(text),) for text in overrides])


def _joined(several: Sequence[Words]) -> Words:
    return tuple(part for i, own in enumerate(several) for part in ((", ", *own) if i else own))


# --- what a page that must stand alone adds -------------------------------------------------------------------------


def _alone(settings: Section, table: Table, page: Page) -> Section:
    """Return the settings with the commands of every column and the texts of all files below them."""
    details = []
    for column in page.beside.columns:
        lines = [line for number in column.numbers if number.entry.runs for line in commands(number)]
        if lines:
            details.append(Details(f"{column.cell.name}: commands", "\n".join(lines), f"cell-{column.cell.id}"))
    files = [path for own in _files(table).values() for path in own.values()]
    for path in dict.fromkeys((table.path, *files)):
        text = path.read_text(encoding="utf-8")
        details.append(Details(f"{_shipped(path).removesuffix('.toml')}.toml", text, _anchor(path)))
    return replace(settings, details=tuple(details))


def commands(number: Number) -> list[str]:
    """Return what to type for a number that is run: for each seed that was, else for the table's."""
    entry, lines = number.entry, [f"# {number.entry.row.name}"]
    for seed in number.ours or (entry.seed,):
        if entry.start is not None or entry.base is None:
            cell, row = entry.cell.id, entry.row.id
            lines.append(f"bespoke sweep {entry.table} --cells {cell} --methods {row} --seeds {seed}")
            continue
        out = f"runs/{entry.table.replace('/', '-')}-{entry.cell.id}-{entry.row.id}-{seed}"
        sets = [word for text in entry.overrides(seed) for word in ("--set", text)]
        run = ["bespoke", "run", _shipped(entry.base), "--algorithm", entry.algorithm, *sets]
        lines.append(shlex.join([*run, "--seed", str(seed), "--out", out]))
        if entry.cell.evaluate:
            again = [word for text in entry.cell.evaluate for word in ("--set", text)]
            lines.append(shlex.join(["bespoke", "evaluate", out, *again]))
    return lines


def _shipped(path: Path) -> str:
    """Return a run file as it is typed: the name of a shipped one, or its path."""
    known = experiments_folder().resolve()
    there = path.resolve().is_relative_to(known)
    return str(path.resolve().relative_to(known).with_suffix("")) if there else str(path)
