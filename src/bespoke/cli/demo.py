"""The demonstration: a comparison of five methods on one federation of handwritten digits."""

from pathlib import Path

from bespoke.cli.stopping import Stop
from bespoke.report import client_chart, compare
from bespoke.report.table import Comparison
from bespoke.runs import api
from bespoke.runs.experiment import load

METHODS = ("local", "fedavg", "fedavg_ft", "ditto", "fedrep")


def run(folder: Path, progress: bool, stopped: Stop) -> tuple[Comparison, Path]:
    """Train the five methods in ``folder``, and return their comparison and the chart's path.

    Demonstration runs that are already there are resumed.
    """
    for method in METHODS:
        experiment, _ = load("demo", method)
        api.run(experiment, folder / method, resume=True, progress=progress, stop=stopped)
        if stopped():
            raise KeyboardInterrupt(stopped.code)
    comparison = compare([folder / method for method in METHODS])
    return comparison, client_chart(comparison, folder / "demo.png")


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
