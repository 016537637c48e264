"""What a page is made of, as plain values: sections with words, tables and charts.

`render` makes HTML of it and `markdown` Markdown, which leaves out what only a browser shows: charts and folded texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Code:
    """What a person may type."""

    text: str


@dataclass(frozen=True)
class Link:
    """A file or a folder; a page that must stand alone shows the file's text at its own `anchor`, if it has it."""

    text: str
    path: Path
    anchor: str = ""


Words = tuple[str | Code | Link, ...]  # a paragraph or an item of a list


@dataclass(frozen=True)
class Cell:
    """A table's cell: what is shown, and what it is sorted by, where that is another value; "" and "-" come last."""

    text: str
    value: float | str | None = None
    best: bool = False  # `text` is bold
    below: str = ""  # a second line
    marked: bool = False  # `below` is bold
    anchor: str = ""  # of the page's own text about it


@dataclass(frozen=True)
class Table:
    """A table; the first column holds names, the others are right-aligned where `numbers` says so."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    numbers: bool = True
    feet: tuple[tuple[Cell, ...], ...] = ()  # rows about whole columns, which are never sorted


@dataclass(frozen=True)
class Chart:
    """A chart: `figure` is what plotly draws (`data`, `layout`), `alternative` tells in words what it shows."""

    title: str
    caption: str
    alternative: str
    figure: dict[str, Any]
    wide: bool = True  # whether it takes the whole width of the page


@dataclass(frozen=True)
class Details:
    """Text that is folded below its title, as it is; links lead to its `anchor`."""

    title: str
    text: str
    anchor: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page under its own heading; `legend` shows which method has which colour."""

    name: str
    title: str
    paragraphs: tuple[Words, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    items: tuple[Words, ...] = ()  # of a list
    details: tuple[Details, ...] = ()
    legend: bool = False


@dataclass(frozen=True)
class Page:
    """A whole page; `methods` are the labels whose numbers the charts' colours stand for."""

    title: str
    lead: str
    methods: tuple[str, ...]
    warnings: tuple[str, ...]
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Live:
    """What a page that follows runs says of them; `over` if it will not change any more."""

    text: str
    over: bool = False
