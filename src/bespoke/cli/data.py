"""The commands of ``bespoke data``: import, fetch, list, show."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bespoke.errors import visible

app = typer.Typer(help="Download, import, list and inspect data sets.", no_args_is_help=True)

Trust = Annotated[
    str | None,
    typer.Option(metavar="HASH", help="Accept content with this hash although no published hash is known."),
]


def _tell(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)


def _stored(name: str, manifest: dict[str, Any]) -> None:
    checked = "verified" if manifest["verified"] else "trusted, not verified"
    facts = f"{manifest['rows']} rows, {manifest['classes']} classes, {_size(manifest['bytes'])}, {checked}"
    print(visible(f"{name}: {facts}"))
    if not manifest["official_order"]:
        _tell(f"note: the rows of {name} are not in the official order: published partitions cannot be replayed on it")


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


@app.command("show")
def show(
    experiment: Annotated[str, typer.Argument(help="An experiment file, or the name of a shipped one.")],
    chart: Annotated[Path | None, typer.Option(help="Also draw the clients' classes (.png, .svg or .pdf).")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE...", help="Change settings, one or several.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the federation.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show the federation of an experiment: clients, sizes, classes, skew."""
    from bespoke.cli import show

    shown = show.show(experiment, chart, set_ or [], seed)
    print(json.dumps(shown.as_dict(), indent=2) if as_json else shown.text(), end="\n" if as_json else "")
    if chart is not None:
        _tell(f"chart: {chart}")


@app.command("import")
def import_(
    name: Annotated[str, typer.Argument(help="Data set, as bespoke data list names it.")],
    files: Annotated[list[Path], typer.Argument(help="A ready .npz, or the official archive or files.")],
    trust: Trust = None,
) -> None:
    """Check a data set that you have as files, and store it."""
    from bespoke.data.sources import acquire, catalogue
    from bespoke.errors import UserError

    entry = catalogue.find(name)
    if entry.parts:
        raise UserError(f"{name} is made of {', '.join(entry.parts)}: import these instead")
    _stored(name, acquire.import_files(entry, files, trust, _tell))


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Data set, as bespoke data list names it.")],
    trust: Trust = None,
) -> None:
    """Download a data set from its official address, check it, and store it."""
    from bespoke.data.sources import acquire, catalogue

    entry = catalogue.find(name)
    if not entry.parts:
        _stored(name, acquire.fetch(entry, trust, _tell, _bar if sys.stderr.isatty() else None))
        return
    for part in catalogue.missing(name):
        fetch(part)
    if entry.stored:
        _stored(name, acquire.make(entry, catalogue.load, _tell))
    else:
        print(f"{name}: built from {', '.join(entry.parts)} each time it is used")


class _Bar:
    """A progress bar with pooch's interface: ``total``, ``update``, ``reset``, ``close``."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(name), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.progress.add_task(name, total=None)
        self.progress.start()

    @property
    def total(self) -> float | None:
        return self.progress.tasks[0].total

    @total.setter
    def total(self, value: int) -> None:
        self.progress.update(self.task, total=value or None)

    def update(self, count: int) -> None:
        self.progress.advance(self.task, count)

    def reset(self) -> None:
        self.progress.reset(self.task, total=self.total)

    def close(self) -> None:
        self.progress.stop()


def _bar(name: str) -> _Bar:
    return _Bar(name)


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False) -> None:
    """List every data set: whether it is stored here, its size, and its source."""
    rows = _rows()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = [[visible(cell) for cell in _cells(row)] for row in rows]
    heads = ["name", "here", "size", "rows", "classes", "checked", "source"]
    numbers = range(2, 5)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        shown = Table(box=None, header_style="bold")
        for i, head in enumerate(heads):
            shown.add_column(head, no_wrap=head != "source", justify="right" if i in numbers else "left")
        for cells in table:
            shown.add_row(*map(Text, cells))
        Console().print(shown)
        return
    from bespoke.report.table import aligned

    print(aligned([heads, *table], numbers))


def _rows() -> list[dict[str, Any]]:
    """Return the facts about each data set, and about the stored copy if there is one."""
    from bespoke.data.sources import catalogue, store
    from bespoke.data.sources.built_in import BUILT_IN

    rows: list[dict[str, Any]] = [_built_in(load.__name__, load.__doc__ or "") for load in BUILT_IN]
    for name, entry in catalogue.CATALOGUE.items():
        kept = store.manifest(name) if store.holds(name) else None
        rows.append(
            {
                "name": name,
                "about": entry.doc,
                "here": not catalogue.missing(name),
                "bytes": kept["bytes"] if kept else None,
                "rows": kept["rows"] if kept else None,
                "classes": entry.classes,
                "verified": kept["verified"] if kept else entry.verified,
                "source": kept["source"] if kept else None,
                "date": kept["date"] if kept else None,
                "content_hash": kept["content_hash"] if kept else entry.content_hash,
                "parts": list(entry.parts),
                "addresses": [file.addresses[0] for file in entry.files],
                "licence": entry.licence,
            }
        )
    return rows


def _built_in(name: str, about: str) -> dict[str, Any]:
    unknown = dict.fromkeys(("bytes", "rows", "classes", "verified", "date", "content_hash"))
    fixed = {"source": "comes with bespoke", "parts": [], "addresses": [], "licence": ""}
    return {"name": name, "about": about.splitlines()[0], "here": True, **unknown, **fixed}


def _cells(row: dict[str, Any]) -> list[str]:
    """Return a row as text; the source of a set that is not here is the command that gets it."""
    get = f"made of {', '.join(row['parts'])}" if row["parts"] else "bespoke data fetch"
    get = get if row["parts"] or row["addresses"] else "bespoke data import"
    checked = {True: "verified", False: "not verified", None: ""}[row["verified"]]
    return [
        row["name"],
        "yes" if row["here"] else "no",
        _size(row["bytes"]) if row["bytes"] else "",
        str(row["rows"] or ""),
        str(row["classes"] or ""),
        "" if row["parts"] and not row["source"] else checked,
        row["source"] or get,
    ]
