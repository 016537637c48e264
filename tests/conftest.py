"""One thread for each test process, Ctrl-C as in a terminal; and at the head of a test run, which real data it uses."""

import os
import signal
from pathlib import Path

import pytest

# Before torch is there: the threads of two workers would only fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# A shell's background jobs ignore Ctrl-C, and so would the programs that tests start and stop by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start programs that import what tests share.
_paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))


def pytest_report_header():
    from bespoke.data.home import root
    from bespoke.data.sources import store
    from bespoke.data.sources.catalogue import CATALOGUE

    found = [name for name in CATALOGUE if store.holds(name)]
    return f"real data sets in {root()}: {', '.join(found) or 'none'}"


SHORT = (
    "data.clients=6",
    "model.width=4",
    "model.hidden=8",
    "training.rounds=2",
    "training.epochs=1",
    "training.batch=64",
    "evaluation.every=1",
)


@pytest.fixture
def short_demo(monkeypatch):
    """The demonstration has fewer clients, a smaller model and two rounds."""
    _shorten(monkeypatch)


@pytest.fixture(scope="session")
def demonstrated(tmp_path_factory):
    """What such a demonstration printed, and its folder; its tests share one, in the xdist group `browser`."""
    from small_runs import command

    folder = tmp_path_factory.mktemp("demonstrated") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        _shorten(patch)
        return command("demo", "--out", folder), folder


def _shorten(patch):
    from bespoke.cli import demo
    from bespoke.runs.experiment import load

    patch.setattr(demo, "load", lambda name, algorithm: load(name, algorithm, SHORT))
