"""Hostile input by hypothesis: a few fixed cases of each kind in the gate, thousands of new ones by `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def hostile(cases=25, many=2500):
    """A test's settings: so many cases in the gate, always the same ones, and ``many`` by `make fuzz`."""
    common = settings(deadline=None, suppress_health_check=_SLOW)
    if os.environ.get("BESPOKE_FUZZ"):
        return settings(common, max_examples=many, print_blob=True)
    return settings(common, max_examples=cases, derandomize=True)
