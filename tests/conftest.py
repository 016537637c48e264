"""One thread for each test process; and at the head of a test run, which real data sets it uses."""

import os
from pathlib import Path

# Before torch is there: the threads of two workers would only fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Tests start programs that import what tests share.
_paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))


def pytest_report_header():
    from bespoke.data.home import root
    from bespoke.data.sources import store
    from bespoke.data.sources.catalogue import CATALOGUE

    found = [name for name in CATALOGUE if store.holds(name)]
    return f"real data sets in {root()}: {', '.join(found) or 'none'}"
