"""Hostile input by hypothesis: a few fixed cases of each kind in the gate, thousands of new ones by `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

_slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("gate", max_examples=25, deadline=None, derandomize=True, suppress_health_check=_slow)
settings.register_profile("fuzz", max_examples=2500, deadline=None, suppress_health_check=_slow, print_blob=True)
settings.load_profile("fuzz" if os.environ.get("BESPOKE_FUZZ") else "gate")
