"""SCAFFOLD: the control as printed, the tie between c and all c_i, FedAvg without controls, an exact optimum."""

import numpy as np
import pytest
import toy
from golden.common import gradient
from golden_runs import SWITCHED, federation, minibatches, one_round, problem, run, training
from toy import BACKENDS, POPULATION, TRAIN_ROWS, gap

from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.scaffold import Scaffold
from bespoke.contract import CHECKS, Subject
from bespoke.core import tree

pytestmark = pytest.mark.xdist_group("scaffold")


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_plain_steps_the_control_is_option_two_as_printed(backend):
    """c_i+ = c_i - c + (x - y) / (K lr), K being the client's own number of steps."""
    ran = run(Scaffold(), training("plain", batch=4, epochs=2), backend, inspect=False)
    old = {k: {"own": tree.zeros_like(toy.start())} for k in range(POPULATION)}
    for (shared, _), uploads, states in zip(ran.sent, ran.uploads, ran.states, strict=True):
        for k, up in uploads.items():
            steps = 2 * -(-TRAIN_ROWS[k] // 4)
            moved = tree.sub(shared["model"], up["model"])
            want = tree.add(tree.sub(old[k]["own"], shared["control"]), moved, 1.0 / (0.4 * steps))
            assert gap(states[k]["own"], want) < 1e-12
            assert gap(up["change"], tree.sub(states[k]["own"], old[k]["own"])) == 0.0
        old |= states
    assert len({-(-n // 4) for n in TRAIN_ROWS[:POPULATION]}) > 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("control", ["steps", "start"])
def test_the_servers_control_is_the_mean_of_all_clients_whoever_took_part(backend, control):
    ran = run(Scaffold(control=control), training("momentum", batch=4, rounds=4), backend, inspect=False)
    for server, states in zip(ran.server, ran.states, strict=True):
        total = tree.zeros_like(toy.start())  # a client that never took part has 0
        for state in states.values():
            total = tree.add(total, state["own"])
        assert gap(server["control"], tree.map(lambda leaf: leaf / POPULATION, total)) < 1e-14
    assert len(ran.states[0]) < POPULATION
    assert max(leaf.abs().max() for leaf in tree.leaves(ran.server[-1]["control"])) > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_while_controls_are_zero_it_is_fedavg(backend):
    """As in the first round; later ones differ."""
    plain, ours = minibatches(FedAvg(), backend), minibatches(Scaffold(), backend)
    assert gap(plain.server[0]["model"], ours.server[0]["model"]) < 1e-12
    assert gap(plain.server[-1]["model"], ours.server[-1]["model"]) > 1e-3


@pytest.mark.parametrize("control", ["steps", "start"])
def test_it_finds_the_minimum_of_quadratics_of_different_curvature(control):
    """FedAvg, which takes several local steps at a constant rate too, ends elsewhere."""
    settings = training("plain", rate=1.0, rounds=25, epochs=4, lr=0.2, weighting="uniform")
    rows = [toy.arrays()[0][k][: TRAIN_ROWS[k], : toy.CLASSES] for k in range(POPULATION)]
    curvature = np.stack([0.3 + np.square(x).mean(axis=0) for x in rows])
    centre = np.stack([x.mean(axis=0) for x in rows])
    best = (curvature * centre).sum(axis=0) / curvature.sum(axis=0)
    away = {}
    for method in (Scaffold(control=control), FedAvg()):
        *_, last = federation(method, settings, "batched", task=toy.task(toy.OwnQuadratic)).rounds()
        away[type(method)] = np.abs(last.server["model"]["head.bias"].numpy() - best).max()
    assert away[Scaffold] < 1e-5 and away[FedAvg] > 1e-2


def test_the_other_option_is_the_gradient_at_the_received_model():
    given = problem("plain")
    _, states, _ = one_round(Scaffold(control="start"), training("plain", batch=4), "loop")
    for k in range(POPULATION):
        assert gap(states[k]["own"], gradient(given.start, given.x[k], given.y[k])) < 1e-14


@pytest.mark.parametrize("check", SWITCHED)
def test_the_contract_holds_with_the_other_option_too(check):
    CHECKS[check](Subject(Scaffold(control="start")))
