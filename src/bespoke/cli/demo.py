"""The demonstration: the papers' five methods beside three simple ones, on one federation of handwritten digits."""

import os
import sys
import webbrowser
from pathlib import Path

from bespoke.cli.stopping import Stop
from bespoke.report import compare, page
from bespoke.report.table import Comparison
from bespoke.runs import api
from bespoke.runs.experiment import load

METHODS = ("local", "fedavg", "fedavg_ft", "pfedfda", "self_fl", "fedlda", "fedpce", "pfedvmp")
UNSEEN = ("CI", "SSH_CONNECTION", "SSH_TTY", "PYTEST_CURRENT_TEST")  # a window would open for nobody


def run(folder: Path, progress: bool, stopped: Stop) -> tuple[Comparison, Path]:
    """Train the methods in ``folder``, and return their comparison and the path of the report about them.

    Demonstration runs that are already there are resumed.
    """
    for method in METHODS:
        experiment, _ = load("demo", method)
        api.run(experiment, folder / method, resume=True, progress=progress, stop=stopped)
        if stopped():
            raise KeyboardInterrupt(stopped.code)
    runs = [folder / method for method in METHODS]
    return compare(runs), page.write(page.page_of(runs), folder / "report.html")


def lesson(comparison: Comparison) -> str:
    """Return one sentence on what the table shows, built from its numbers."""
    mean = {row.label: 100 * row.mean.mean for row in comparison.rows if row.mean.mean is not None}
    best = max(mean, key=lambda name: mean[name])
    gain = mean[best] - mean["fedavg"]
    if gain <= 0:
        return f"Here no personal model beat the one model for all (fedavg, {mean['fedavg']:.1f} %)."
    return (
        f"On clients this different, one model for all reaches {mean['fedavg']:.1f} % on the average client and "
        f"training alone {mean['local']:.1f} %; personal models that learn from the other clients reach "
        f"{mean[best]:.1f} % ({best})."
    )


def show(report: Path) -> bool:
    """Open a page in a browser window, and return whether one was opened: only where somebody sits at a screen."""
    if not sys.stdout.isatty() or any(name in os.environ for name in UNSEEN):
        return False
    if sys.platform not in ("darwin", "win32") and not {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
        return False
    try:
        browser = webbrowser.get()
        in_terminal = type(browser) is webbrowser.GenericBrowser  # such as lynx, which would take the terminal
        return not in_terminal and browser.open(report.resolve().as_uri())
    except webbrowser.Error:  # there is none
        return False
