"""The options ``--live`` and ``--watch``: a page about runs that follows them."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from bespoke.errors import UserError

USUAL = "usual"  # stands for the port that an option was given without
FOLLOWING = ("--live", "--watch")

Live = Annotated[
    str | None,
    typer.Option(
        "--live",
        metavar="[PORT]",
        help="Serve the report's page on this machine while running; port 8470, or this one.",
    ),
]
Watch = Annotated[
    str | None,
    typer.Option(
        "--watch",
        metavar="[PORT]",
        help="Write no file: serve the page on this machine, following the runs, until Ctrl-C.",
    ),
]


def with_ports(words: list[str]) -> list[str]:
    """Rewrite ``--live`` and ``--watch`` that no number follows, since the parser expects one."""
    pairs = zip_longest(words, words[1:], fillvalue="")
    return [f"{word}={USUAL}" if word in FOLLOWING and not after.isdecimal() else word for word, after in pairs]


def show_beside(live: str | None, folders: Sequence[Path]) -> None:
    """Serve the page about the runs in ``folders`` until the command ends, if ``--live`` says so."""
    if live is None:
        return
    from bespoke.report.page.live import beside

    url = click.get_current_context().with_resource(beside(folders, _port("--live", live)))
    print(f"live: {url}", file=sys.stderr, flush=True)


def watch(port: str, folders: Sequence[Path], make: Callable[[list[Path]], Any]) -> None:
    """Serve the page about the runs in ``folders``, which ``make`` makes, until Ctrl-C."""
    from bespoke.report.page.live import Followed, Server, listen

    if absent := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(f"there is no folder {absent[0]}; give run folders or folders that contain them")
    with Server(listen(_port("--watch", port)), Followed(folders, make)) as server, suppress(KeyboardInterrupt):
        print(f"watching: {server.url} until Ctrl-C", flush=True)
        server.serve_forever()


def _port(option: str, text: str) -> int | None:
    """Return the port of an option, None for the usual one."""
    if text == USUAL:
        return None
    if not text.isdecimal():
        raise UserError(f"{option} takes the number of a port, or none, not {text!r}")
    return int(text)
