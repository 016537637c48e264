"""A page as one HTML file, with everything that it needs inside, and printed by a browser that is there."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from bespoke.errors import UserError, reason, short
from bespoke.files import check_out, write_atomic
from bespoke.report.page.figures import DASHES, HUES
from bespoke.report.page.parts import Live, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
FLAGS = (  # of a browser that prints one page and asks nothing of a network
    "headless",
    "disable-gpu",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "window-size=760,1000",
    "no-pdf-header-footer",
    "virtual-time-budget=20000",
)
SECONDS = 120  # that a browser may take to print


def html(page: Page, live: Live | None = None, bare: bool = False) -> str:
    """Return the page as the text of an HTML file that asks nothing of a network.

    One that is `live` asks whoever serves it for what is new: the same page again, but `bare`, without its scripts.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    plotly = script = ""
    if not bare:
        plotly, script = _plotly(), _own("page.js") + (_own("live.js") if live else "")
    figures = [chart.figure for section in page.sections for chart in section.charts]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["short"] = short
    return environment.from_string(_own("page.html")).render(
        page=page,
        live=live,
        hues=HUES,
        dashes=[*DASHES.values()],
        style=Markup(_own("page.css")),
        plotly=Markup(plotly),
        script=Markup(script),
        figures=Markup(_json(figures)),
        allowed=" ".join(_digest(text) for text in (plotly, script)),
    )


def write(page: Page, path: str | os.PathLike[str]) -> Path:
    """Write the page to `path`, whole or not at all, and return the path."""
    write_atomic(path, html(page))
    return Path(path)


def check_paths(out: Path, printed: Path | None = None) -> None:
    """Refuse paths that cannot become a page and its print, before anything is read."""
    check_out(out, (".html", ".htm"))
    if printed is None:
        return
    check_out(printed, (".pdf",))
    if browser() is None:
        raise UserError("no browser was found to print with: install chromium, or print the page from your own browser")


def browser() -> str | None:
    """Return the path of a browser that prints without a screen, None if there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def pdf(page: Path, path: Path) -> Path:
    """Print a page to `path` through a browser, and return the path."""
    program = browser()
    if program is None:
        raise UserError(f"no browser was found to print with: install chromium, or open and print {page}")
    with tempfile.TemporaryDirectory(prefix="bespoke-print-") as folder:
        target = Path(folder) / "page.pdf"
        flags = [*FLAGS, f"user-data-dir={folder}/profile", f"print-to-pdf={target}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("no-sandbox")  # a browser started by root has none
        command = [program, *(f"--{flag}" for flag in flags), page.resolve().as_uri()]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
            write_atomic(path, target.read_bytes())
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(
                f"{program} could not print {page}: {reason(error)}; print it from your own browser"
            ) from None
    return path


@cache
def _plotly() -> str:
    """Return plotly's script, in which `Plotly.others()` sets up all charts but points and lines.

    That takes more time than everything else, and most of the page needs none of them. A script of another form is left
    as it is, and sets them up at once.
    """
    text = (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return _REGISTERED.sub(r"\1.others=()=>\1\2;", text)


_REGISTERED = re.compile(  # the end of the script: PLOTLY.register([bar(), box(), ...]); MODULE.exports = PLOTLY
    r"\b(\w+)(\.register\(\[(?:\w+\(\),)*\w+\(\)\]\));(?=\w+\.exports=\1\}\);return \w+\(\);\}\)\(\);)"
)


def _own(name: str) -> str:
    """Return the text of a file beside this one."""
    return (resources.files("bespoke.report.page") / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """Return JSON in which nothing can end the element that holds it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(script: str) -> str:
    """Return what allows exactly this script in the page's policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
