"""FedOpt: FedAvg as a special case, steps computed by hand, the first adaptive step, rounds without uploads."""

import pytest
import torch
import toy
from golden_runs import federation, minibatches, training
from toy import BACKENDS, gap, same_bits

from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedopt import FedOpt
from bespoke.core import tree
from bespoke.core.algorithm import Uploads
from bespoke.core.task import Task

pytestmark = pytest.mark.xdist_group("fedopt")


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_momentum_and_at_a_rate_of_one_it_is_fedavg(backend):
    plain, ours = minibatches(FedAvg(), backend), minibatches(FedOpt(beta1=0.0), backend)
    for a, b in zip(plain.server, ours.server, strict=True):
        assert gap(a["model"], b["model"]) < 1e-12
    assert gap(plain.server[-1]["model"], minibatches(FedOpt(), backend).server[-1]["model"]) > 1e-3


def test_the_names_are_rules_of_one_class():
    assert ALGORITHMS["fedavgm"]() == FedOpt(rule="momentum", server_lr=1.0)
    assert ALGORITHMS["fedadam"]() == FedOpt(rule="adam", server_lr=0.1)
    assert ALGORITHMS["fedyogi"]() == FedOpt(rule="yogi", server_lr=0.1)


def stepped(method, *changes):
    """The server after clients' models that differ from its own by these numbers, two clients a round."""
    server = method.server_init(None, {"w": torch.zeros(1, dtype=torch.float64)}, 2, None)
    for change in changes:
        sent = torch.stack([server["model"]["w"] + change - 1.0, server["model"]["w"] + change + 3.0])
        uploads = Uploads({"model": {"w": sent}}, torch.tensor([3.0, 1.0]), torch.arange(2))  # a mean of `change`
        server = method.aggregate(None, server, uploads, None)
    return {name: leaf["w"].item() for name, leaf in server.items()}


# rule: (w, m, v) after a change of 0.5, and after a further one of -0.3; eta 0.1, betas 0.5 and 0.75, tau 0.25.
BY_HAND = {
    "momentum": [(0.05, 0.5, None), (0.045, -0.05, None)],
    # 0.75 * 0.0625 + 0.25 * 0.25 = 0.109375; then 0.75 * 0.109375 + 0.25 * 0.09 = 0.10453125
    "adam": [(0.04305009, 0.25, 0.109375), (0.03868947, -0.025, 0.10453125)],
    # 0.0625 + 0.25 * 0.25 = 0.125 (0.0625 < 0.25); then 0.125 - 0.25 * 0.09 = 0.1025 (0.125 > 0.09)
    "yogi": [(0.04142136, 0.25, 0.125), (0.03703659, -0.025, 0.1025)],
    "adagrad": [(0.03090170, 0.25, 0.3125), (0.02807502, -0.025, 0.4025)],
}


@pytest.mark.parametrize("rule", BY_HAND)
def test_two_steps_by_hand(rule):
    method = FedOpt(rule=rule, server_lr=0.1, beta1=0.5, beta2=0.75, tau=0.25)
    for rounds, (w, m, v) in enumerate(BY_HAND[rule], 1):
        found = stepped(method, *(0.5, -0.3)[:rounds])
        assert found == pytest.approx({"model": w, "m": m} | ({} if v is None else {"v": v}), abs=1e-8)


@pytest.mark.parametrize(("rule", "kept"), [("adam", 0.99), ("yogi", 1.0), ("adagrad", 1.0)])
@pytest.mark.parametrize("change", [0.02, -0.7])
def test_the_first_adaptive_step_in_closed_form(rule, kept, change):
    """v is tau^2 before it, so the step is eta (1 - beta1) d / (sqrt(kept tau^2 + share d^2) + tau)."""
    share = 1.0 if rule == "adagrad" else 0.01
    step = 0.1 * (1.0 - 0.9) * change / ((kept * 1e-6 + share * change**2) ** 0.5 + 1e-3)
    assert stepped(FedOpt(rule=rule, server_lr=0.1), change)["model"] == pytest.approx(step, rel=1e-12)


class Broken(Task):
    """A task without a finite loss."""

    def loss(self, params, batch):
        return super().loss(params, batch) * torch.nan


@pytest.mark.parametrize("name", ["fedavgm", "fedadam"])
def test_a_round_without_uploads_moves_nothing(name):
    """Not even by the momentum of earlier rounds."""
    method, settings = ALGORITHMS[name](), training("plain", rounds=1)
    (good,) = federation(method, settings, "loop").rounds()
    (bad,) = federation(method, settings, "loop", task=toy.task(Broken)).rounds(good.server)
    assert bad.refused and same_bits(bad.server, good.server)
    assert max(leaf.abs().max() for leaf in tree.leaves(good.server["m"])) > 0
