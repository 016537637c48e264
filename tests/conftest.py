"""Says at the head of a test run which real data sets it uses."""


def pytest_report_header():
    from bespoke.datasets import store
    from bespoke.datasets.catalogue import CATALOGUE

    found = [name for name in CATALOGUE if store.holds(name)]
    return f"real data sets in {store.root()}: {', '.join(found) or 'none'}"
