"""Parts of a page as lines of Markdown: words, tables and lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from bespoke.report.page.parts import Cell, Code, Link, Section, Table, Words
from bespoke.report.table import for_markdown, markdown_table


def section_lines(section: Section, target: Callable[[Path], str], level: int = 2) -> list[str]:
    """Return a section below its heading; `target` turns a file's path into a link's."""
    lines = [f"{'#' * level} {for_markdown(section.title)}"]
    for paragraph in section.paragraphs:
        lines += ["", words(paragraph, target)]
    for table in section.tables:
        lines += ["", *table_lines(table)]
    if section.items:
        lines += ["", *item_lines(section.items, target)]
    return lines


def words(parts: Words, target: Callable[[Path], str] = str) -> str:
    """Return a paragraph in one line."""

    def written(part: str | Code | Link) -> str:
        if isinstance(part, Code):
            return f"`{part.text}`"
        return f"[{for_markdown(part.text)}]({target(part.path)})" if isinstance(part, Link) else for_markdown(part)

    return "".join(map(written, parts))


def item_lines(items: Iterable[Words], target: Callable[[Path], str] = str) -> list[str]:
    """Return the lines of a list."""
    return [f"- {words(item, target)}" for item in items]


def table_lines(table: Table) -> list[str]:
    """Return a table, the rows about whole columns last, and its caption."""
    rows = [[_cell(cell) for cell in row] for row in (*table.rows, *table.feet)]
    caption = [for_markdown(line) for line in table.caption.splitlines()]
    return [*markdown_table([for_markdown(name) for name in table.header], rows), "", *caption] if rows else caption


def _cell(cell: Cell) -> str:
    lines = [(cell.text, cell.best), *([(cell.below, cell.marked)] if cell.below else [])]
    return "<br>".join(f"**{for_markdown(text)}**" if bold else for_markdown(text) for text, bold in lines)
