"""The committed errors on Self-FL's synthetic hierarchy agree with a calculation that shares no code with this package.

That calculation follows the paper's equations for three worlds of its own, so that both sides are means over three
worlds with the noise of such a mean: standard errors from many simulated worlds. Where the noise is as large as the
number, at the small variance, only a gross mistake is found; at the large one also a factor of two.
"""

import math
from pathlib import Path
from statistics import fmean

import pytest

from bespoke.tables import results, spec

ROOT = Path(__file__).parents[2] / "results"
TABLE = spec.find("self_fl/synthetic")
METHODS, ESTIMATES = ("self_fl", "self_fl_sum", "self_fl_fixed"), ("local", "paper", "bayes")
REFERENCE = {  # mean over three worlds, and its standard error
    "between0.001": {
        "local": (0.0135, 0.0027),
        "paper": (0.0015, 0.0006),
        "bayes": (0.0016, 0.0006),
        "self_fl": (0.0017, 0.0011),
        "self_fl_sum": (0.0017, 0.0011),
        "self_fl_fixed": (0.0063, 0.0012),
    },
    "between1": {
        "local": (0.0135, 0.0027),
        "paper": (0.0444, 0.022),
        "bayes": (0.0138, 0.0026),
        "self_fl": (0.0307, 0.0048),
        "self_fl_sum": (0.712, 0.22),
        "self_fl_fixed": (0.124, 0.028),
    },
}


def ours(cell: str, name: str) -> float:
    """The mean over the three seeds of a method's error, or of an estimate that knows the variances."""
    entry = TABLE.entry(f"{cell}/{name if name in METHODS else METHODS[0]}")
    found = results.of(ROOT, entry)
    assert sorted(found) == [0, 1, 2] and all(result.done for result in found.values())
    if name in METHODS:
        return fmean(result.value(entry) for result in found.values())
    return fmean(result.content["probe"]["hierarchy"][name] for result in found.values())


def agrees(value: float, cell: str, name: str) -> bool:
    mean, error = REFERENCE[cell][name]
    return abs(value - mean) <= 2.5 * math.sqrt(2) * error


@pytest.mark.parametrize("cell", REFERENCE)
@pytest.mark.parametrize("name", [*ESTIMATES, *METHODS])
def test_errors_agree_with_an_independent_calculation(cell, name):
    assert agrees(ours(cell, name), cell, name)


def test_other_numbers_would_not_agree():
    assert not agrees(2 * ours("between1", "bayes"), "between1", "bayes")
    assert not agrees(2 * ours("between1", "self_fl"), "between1", "self_fl")
    assert not agrees(ours("between1", "self_fl_fixed"), "between1", "self_fl")
    assert not agrees(ours("between0.001", "local"), "between0.001", "bayes")
