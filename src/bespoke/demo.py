"""The demonstration: five methods on the same federation of handwritten digits, compared."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bespoke import api
from bespoke.experiment import Experiment, load
from bespoke.report import accuracy_chart, compare
from bespoke.report.table import Comparison

METHODS = ("local", "fedavg", "fedavg_ft", "ditto", "fedrep")


def run(out: Path | None, progress: Callable[[Experiment], AbstractContextManager[Any]]) -> tuple[Comparison, Path]:
    """Train the five methods, and return their comparison and the chart's path.

    Without ``out`` the runs are kept in a temporary folder and the chart lies beside them; in a folder that
    holds runs of the demonstration these are finished and shown. ``progress(experiment)`` gives a callback for
    each round and a function that says whether to stop.
    """
    folder = Path(tempfile.mkdtemp(prefix="bespoke-demo-")) if out is None else out
    for method in METHODS:
        experiment, _ = load("demo", method)
        with progress(experiment) as (callback, stopped):
            api.run(experiment, folder / method, resume=True, callbacks=[callback], stop=stopped)
        if stopped():
            raise KeyboardInterrupt
    comparison = compare([folder / method for method in METHODS])
    return comparison, accuracy_chart(comparison, folder / "demo.png")


def lesson(comparison: Comparison) -> str:
    """One sentence on what the table shows, made from its own numbers."""
    mean = {row.label: 100 * row.mean.mean for row in comparison.rows}
    best = max(mean, key=lambda name: mean[name])
    gain = mean[best] - mean["fedavg"]
    if gain <= 0:
        return f"Here one model for all (fedavg, {mean['fedavg']:.1f} %) was not beaten by a model for each client."
    return (
        f"On clients this different, one model for all reaches {mean['fedavg']:.1f} % on the average client and "
        f"training alone {mean['local']:.1f} %; a model for each client that learns from the others reaches "
        f"{mean[best]:.1f} % ({best})."
    )
