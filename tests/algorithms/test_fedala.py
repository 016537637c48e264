"""FedALA: its mixing weights at one and at zero, their slope and bounds, and how long they are learnt."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import toy
from golden import fedala as golden
from golden.common import HEAD, gradient, logits, loss_sum
from golden_runs import SWITCHED, arrays, federation, minibatches, problem, run, training
from scipy.optimize import approx_fprime
from toy import BACKENDS, POPULATION, gap

from bespoke.algorithms.fedala import FedALA
from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedper import FedPer
from bespoke.contract import CHECKS, Subject
from bespoke.core import tree
from bespoke.core.task import Task

pytestmark = pytest.mark.xdist_group("fedala")


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_weights_of_one_that_never_move_it_is_fedavg(backend):
    plain, ours = minibatches(FedAvg(), backend), minibatches(FedALA(mix_lr=0.0, first_passes=1), backend)
    assert all(gap(a, b) < 1e-12 for a, b in zip(plain.server, ours.server, strict=True))
    assert gap(plain.server[-1], minibatches(FedALA(first_passes=2), backend).server[-1]) > 1e-3


@dataclass(frozen=True)
class OwnHead(FedALA):
    """Starts with weights of 0."""

    def client_init(self, task, params, client):
        state = super().client_init(task, params, client)
        return state | {"mix": tree.zeros_like(state["mix"])}


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_weights_of_zero_the_head_stays_local(backend):
    """The body is the global one, so it is FedPer, but for the heads, which are sent and not used."""
    theirs, ours = minibatches(FedPer(), backend), minibatches(OwnHead(mix_lr=0.0, first_passes=1), backend)
    for a, b in zip(theirs.server, ours.server, strict=True):
        assert gap(a["body"], {name: b["model"][name] for name in a["body"]}) < 1e-12
    for k, state in theirs.states[-1].items():
        assert gap(state["head"], {name: ours.states[-1][k]["own"][name] for name in HEAD}) < 1e-12


def test_the_slope_of_the_weights_is_that_of_finite_differences():
    """The golden equations take it by the chain rule, and the library agrees with them."""
    given, draw = problem("plain"), np.random.default_rng(0)
    own = {name: leaf + 0.5 * draw.normal(size=leaf.shape) for name, leaf in given.start.items()}
    mix = {"head.bias": draw.uniform(size=toy.CLASSES)}
    x, y = given.x[1], given.y[1]

    def loss(flat):
        scores = logits(golden.mixture(own, given.start, {"head.bias": flat}), x)
        return loss_sum(scores, y) / len(y)

    slope = gradient(golden.mixture(own, given.start, mix), x, y)["head.bias"]
    slope = slope * (given.start["head.bias"] - own["head.bias"])
    assert np.allclose(approx_fprime(mix["head.bias"], loss, 1e-7), slope, atol=1e-6)
    assert np.abs(slope).max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_stay_between_zero_and_one(backend):
    ran = run(
        FedALA(mix_lr=5.0, first_passes=2), training("momentum", batch=4, rounds=4, rate=0.7), backend, inspect=False
    )
    mixes = torch.cat([leaf.flatten() for state in ran.states[-1].values() for leaf in tree.leaves(state["mix"])])
    assert mixes.min() == 0.0 and mixes.max() == 1.0
    assert ((mixes > 0.0) & (mixes < 1.0)).any()


class Falling(Task):
    """A loss whose slope is 1 for each entry of the head's bias, whatever the rows."""

    def loss(self, params, batch):
        return params["head.bias"].sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_how_long_the_weights_are_learnt(backend):
    """A share of each pass: several passes the first time that the models differ, then one."""
    method, settings = FedALA(mix_lr=1.0, share=0.5, first_passes=3), training("plain", batch=2, lr=1e-4, epochs=1)
    fed, everyone = federation(method, settings, backend, task=toy.task(Falling)), list(range(POPULATION))

    def states(number, received):
        toy.train(fed.clients, number, everyone, {"model": received}, {})
        return {c: s["state"] for c, s in fed.clients.states().items()}

    now = states(1, toy.start())  # nothing differs yet
    assert all((s["mix"]["head.bias"] == 1.0).all() and s["learnt"] == 0.0 for s in now.values())
    counts = [2, 3, 1, 2]  # half of the minibatches of a pass over 5, 11, 3 and 8 rows, rounded up
    for number, passes in ((2, 3), (3, 1), (4, 1)):
        before, received = now, {n: v + 0.01 * number for n, v in toy.start().items()}
        now = states(number, received)
        for c, old in before.items():
            fallen = old["mix"]["head.bias"] - now[c]["mix"]["head.bias"]
            steps = fallen / (received["head.bias"] - old["own"]["head.bias"])
            assert torch.allclose(steps, torch.full_like(steps, passes * counts[c]))


@pytest.mark.parametrize("check", SWITCHED)
def test_the_contract_holds_where_all_layers_are_mixed(check):
    CHECKS[check](Subject(FedALA(part="all", first_passes=2)))


def test_tested_before_averaging_it_is_what_each_client_trained():
    ran = run(FedALA(first_passes=2), training("plain"), "batched", when="local", inspect=False)
    given, cohort = problem("plain"), ran.rounds()[-1]["cohort"]
    scores = [score for score in ran.scores(round=3) if score.client < POPULATION]  # the last client is new
    assert [score.client for score in scores] == cohort
    for score in scores:
        model = arrays(ran.states[-1][score.client]["own"])
        want = loss_sum(logits(model, given.x_test[score.client]), given.y_test[score.client])
        assert score.loss_sum == pytest.approx(want, abs=1e-10)
