"""Ditto: its global model is FedAvg's, its personal one is local training with a tie."""

from dataclasses import dataclass
from typing import final

import numpy as np
import pytest
import toy
from golden_runs import minibatches, one_round, run, training
from toy import BACKENDS, POPULATION, TRAIN_ROWS, same_bits

from bespoke.algorithms.ditto import Ditto
from bespoke.algorithms.fedavg import FedAvg
from bespoke.core.algorithm import Algorithm

pytestmark = pytest.mark.xdist_group("ditto")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_dittos_global_model_moves_as_in_fedavg_to_the_bit(backend, lam):
    plain, ditto = minibatches(FedAvg(), backend), minibatches(Ditto(lam=lam), backend)
    assert all(same_bits(a, b) for a, b in zip(plain.server, ditto.server, strict=True))


@final
@dataclass(frozen=True)
class LocalWithTag(Algorithm):
    """Local training on the batches of another pass."""

    tag: int = 1

    def server_init(self, task, params, num_clients, key):
        return {}

    def broadcast(self, server):
        return {}

    def client_init(self, task, params, client):
        return {"personal": params}

    def client_update(self, local, state, down):
        return {"personal": local.sgd(local.task.loss, state["personal"], tag=self.tag)}, {}

    def personalize(self, local, state, down):
        return state["personal"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_untied_ditto_is_local_training_on_the_same_batches(backend):
    settings = training("momentum", batch=4, epochs=2)
    untied = run(Ditto(lam=0.0), settings, backend).states[-1]
    alone = run(LocalWithTag(tag=1), settings, backend).states[-1]
    other = run(LocalWithTag(tag=0), settings, backend).states[-1]
    assert untied.keys() == alone.keys()
    assert all(same_bits(untied[c], alone[c]) for c in untied)
    assert not any(same_bits(untied[c], other[c]) for c in untied if TRAIN_ROWS[c] > 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_fixed_point_on_a_quadratic(backend):
    lam, received = 0.7, {n: v + 0.5 for n, v in toy.start().items()}
    settings, task = training("plain", epochs=150, lr=0.4), toy.task(toy.Quadratic)
    _, states, _ = one_round(Ditto(lam=lam), settings, backend, {"model": received}, task=task)
    for k in range(POPULATION):
        found = states[k]["personal"]
        anchor = received["head.bias"].numpy()
        want = toy.proximal_point(k, anchor, lam)
        assert np.abs(found["head.bias"].numpy() - want).max() < 1e-6
        assert np.abs(want - anchor).max() > 1e-2
        # What the loss does not depend on is drawn to the received model alone.
        assert (found["body.weight"] - received["body.weight"]).abs().max() < 1e-6
