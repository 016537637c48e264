"""FedDyn: the tie between h and the clients' gradients, a client's fixed point, and an exact optimum."""

import numpy as np
import pytest
import toy
from golden_runs import federation, one_round, run, training
from toy import BACKENDS, POPULATION, TRAIN_ROWS, gap

from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.feddyn import FedDyn
from bespoke.core import tree

pytestmark = pytest.mark.xdist_group("feddyn")


@pytest.mark.parametrize("backend", BACKENDS)
def test_h_is_the_mean_of_all_clients_gradients_whoever_took_part(backend):
    ran = run(FedDyn(alpha=0.3), training("momentum", batch=4, rounds=4), backend, inspect=False)
    for server, states in zip(ran.server, ran.states, strict=True):
        total = tree.zeros_like(toy.start())  # a client that never took part has 0
        for state in states.values():
            total = tree.add(total, state["slope"])
        assert gap(server["h"], tree.map(lambda leaf: leaf / POPULATION, total)) < 1e-14
    assert len(ran.states[0]) < POPULATION
    assert max(leaf.abs().max() for leaf in tree.leaves(ran.server[-1]["h"])) > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_a_minimum_the_kept_vector_is_the_clients_gradient(backend):
    """The first g_i is 0, so a client goes to its proximal point and keeps its gradient there."""
    alpha, received = 0.7, {n: v + 0.5 for n, v in toy.start().items()}
    settings, task = training("plain", epochs=100, lr=0.4), toy.task(toy.Quadratic)
    trained, states, _ = one_round(FedDyn(alpha=alpha), settings, backend, {"model": received}, task=task)
    for k in range(POPULATION):
        want = toy.proximal_point(k, received["head.bias"].numpy(), alpha)
        assert np.abs(trained.uploads.tree["model"]["head.bias"][k].numpy() - want).max() < 1e-6
        gradient = toy.Quadratic.curvature.numpy() @ (want - toy.centre(k))
        assert np.abs(states[k]["slope"]["head.bias"].numpy() - gradient).max() < 1e-6
        assert np.abs(gradient).max() > 1e-2


def test_it_finds_the_minimum_of_quadratics_of_different_curvature():
    """FedAvg with as many local steps ends elsewhere."""
    settings = training("plain", rate=1.0, rounds=20, epochs=6, lr=0.2, weighting="uniform")
    rows = [toy.arrays()[0][k][: TRAIN_ROWS[k], : toy.CLASSES] for k in range(POPULATION)]
    curvature = np.stack([0.3 + np.square(x).mean(axis=0) for x in rows])
    centre = np.stack([x.mean(axis=0) for x in rows])
    best = (curvature * centre).sum(axis=0) / curvature.sum(axis=0)
    away = {}
    for method in (FedDyn(alpha=1.0), FedAvg()):
        *_, last = federation(method, settings, "batched", task=toy.task(toy.OwnQuadratic)).rounds()
        away[type(method)] = np.abs(last.server["model"]["head.bias"].numpy() - best).max()
    assert away[FedDyn] < 1e-3 and away[FedAvg] > 1e-2
