"""Methods that compute their own gradient: plain steps along it as published, or the optimiser of [training]."""

from dataclasses import replace

import pytest
import toy
from golden_runs import SWITCHED, one_round
from toy import BACKENDS, gap

from bespoke.algorithms.per_fedavg import PerFedAvg
from bespoke.algorithms.pfedbred import PFedBreD
from bespoke.algorithms.pfedme import PFedMe
from bespoke.contract import CHECKS, Subject
from bespoke.core import tree
from bespoke.core.settings import Training

# With these settings a step depends on w and on nothing that an earlier step has left.
PLAIN = Training(lr=0.1, batch=64)
METHODS = {
    "pfedme": PFedMe(inner_start="w", lam=2.0),
    "per_fedavg": PerFedAvg(alpha=0.2),
    "per_fedavg/exact": PerFedAvg(alpha=0.2, variant="exact"),
    "pfedbred/lg": PFedBreD(prior="lg", lam=2.0),
    "pfedbred/mh": PFedBreD(prior="mh", lam=2.0, eta=0.0),
}


def after(method, steps, backend, received=None, **changes):
    """The models that the clients send after some steps on all rows, stacked."""
    settings, down = replace(PLAIN, steps=steps, **changes), {"model": received or toy.start()}
    return one_round(method, settings, backend, down)[0].uploads.tree["model"]


def of(stacked, client):
    return tree.map(lambda leaf: leaf[client], stacked)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", METHODS)
def test_published_steps_take_no_notice_of_the_optimiser(name, backend):
    plain = after(METHODS[name], 2, backend)
    for changes in ({"momentum": 0.6}, {"optimizer": "adam"}, {"clip": 0.01}):
        assert gap(after(METHODS[name], 2, backend, **changes), plain) == 0.0
    assert gap(after(replace(METHODS[name], optimizer="training"), 2, backend), plain) < 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", METHODS)
def test_the_optimiser_steps_along_the_published_gradient(name, backend):
    """Heavy ball: w2 = (a plain step from w1) + momentum (w1 - w0)."""
    ours = after(replace(METHODS[name], optimizer="training"), 2, backend, momentum=0.6)
    one = after(METHODS[name], 1, backend)
    for client in range(toy.POPULATION):
        w1 = of(one, client)
        two = of(after(METHODS[name], 1, backend, w1), client)
        want = tree.add(two, tree.sub(w1, toy.start()), 0.6)
        assert gap(of(ours, client), want) < 1e-12
        assert gap(want, two) > 1e-4


@pytest.mark.parametrize("check", SWITCHED)
@pytest.mark.parametrize("name", ["pfedme", "per_fedavg", "pfedbred/mh"])
def test_the_contract_holds_with_the_optimiser_too(name, check):
    CHECKS[check](Subject(replace(METHODS[name], optimizer="training")))
