"""Parts of a page as lines of Markdown: words, tables and lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bespoke.report.page.parts import Bullets, Cell, Code, Link, Section, Table, Words
from bespoke.report.table import for_markdown


def section_lines(section: Section, target: Callable[[Path], str], level: int = 2) -> list[str]:
    """Return a section below its heading; `target` turns a file's path into a link's."""
    lines = [f"{'#' * level} {for_markdown(section.title)}"]
    for paragraph in section.paragraphs:
        lines += ["", words(paragraph, target)]
    for table in section.tables:
        lines += ["", *table_lines(table)]
    for bullets in section.lists:
        lines += ["", *bullet_lines(bullets, target)]
    return lines


def words(parts: Words, target: Callable[[Path], str] = str) -> str:
    """Return a paragraph in one line."""

    def written(part: str | Code | Link) -> str:
        if isinstance(part, Code):
            return f"`{part.text}`"
        return f"[{for_markdown(part.text)}]({target(part.path)})" if isinstance(part, Link) else for_markdown(part)

    return "".join(map(written, parts))


def bullet_lines(bullets: Bullets, target: Callable[[Path], str] = str) -> list[str]:
    """Return a list below its title, if it has one."""
    title = [f"{for_markdown(bullets.title)}:", ""] if bullets.title else []
    return [*title, *(f"- {words(item, target)}" for item in bullets.items)]


def table_lines(table: Table) -> list[str]:
    """Return a table, the rows about whole columns last, and its caption."""
    rows = [[_cell(cell) for cell in row] for row in (*table.rows, *table.feet)]
    caption = [for_markdown(line) for line in table.caption.splitlines()]
    return [
        *(grid([for_markdown(name) for name in table.header], rows) if rows else []),
        *([""] if rows else []),
        *caption,
    ]


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns, but for the first, are right-aligned; texts are Markdown already."""
    return ["| " + " | ".join(row) + " |" for row in [header, ["---", *["---:"] * (len(header) - 1)], *rows]]


def _cell(cell: Cell) -> str:
    lines = [(cell.text, cell.best), *([(cell.below, cell.marked)] if cell.below else [])]
    return "<br>".join(f"**{for_markdown(text)}**" if bold else for_markdown(text) for text, bold in lines)
