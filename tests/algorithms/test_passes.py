"""The passes of a method over its rows: each keeps an optimiser of its own."""

import pytest
from golden.common import ALL, BODY, HEAD
from golden_runs import method_of, run, training
from toy import BACKENDS

PASSES = {"fedavg": [ALL], "fedper": [ALL], "fedrep": [HEAD, BODY], "ditto": [ALL, ALL]}  # by tag


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PASSES)
def test_every_pass_keeps_moments_of_its_own(name, backend):
    """With a kept optimiser, momentum of one pass never enters another."""
    ran = run(method_of(name), training("momentum", keep_optimizer=True), backend, inspect=False)
    for stored in ran.federation.clients.states().values():
        kept = {tag: set(moments["m"]) for tag, moments in stored["moments"].items()}
        assert kept == {str(tag): set(part) for tag, part in enumerate(PASSES[name])}
