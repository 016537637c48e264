"""Dropout in every method: training losses draw by the batch's key, statistics and predictions do not draw."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

import bespoke
from bespoke.core.task import Task
from bespoke.models.layers import Dropout

DIM, CLASSES = 5, 3
SIZES = (19, 8, 13)


class Net(nn.Module):
    """Dropout in the body and in front of the head; a norm layer, for methods that want one."""

    def __init__(self, p=0.5):
        super().__init__()
        self.body, self.norm, self.inner = nn.Linear(DIM, 12), nn.LayerNorm(12), Dropout(p)
        self.last, self.drop, self.fc = nn.Linear(12, 8), Dropout(p), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.fc(self.drop(torch.tanh(self.last(self.inner(torch.tanh(self.norm(self.body(x))))))))


def clients():
    draw, found = np.random.default_rng(0), []
    for n in SIZES:
        y = np.arange(n) % CLASSES
        found.append(((draw.normal(size=(n, DIM)) + 2.0 * np.eye(CLASSES, DIM)[y]).astype(np.float32), y))
    return found


def federated(algorithm, p=0.5, backend="loop", **settings):
    torch.manual_seed(3)
    settings = {"rounds": 2, "epochs": 2, "batch": 4, "lr": 0.05, "new_clients": 1} | settings
    return bespoke.federate(
        clients(), Net(p), head="fc", algorithm=algorithm, backend=backend, device="cpu", **settings
    )


def tensors(run):
    return bespoke.tree.flatten({"server": run.server, **{n: m.personal for n, m in run.models.items()}})


@pytest.mark.parametrize("name", bespoke.ALGORITHMS)
def test_every_training_loss_hands_on_the_batchs_key_and_nothing_else_draws(name, monkeypatch):
    """Losses are computed where gradients are; statistics and predictions are not."""
    seen = {"training": 0, "other": 0}

    def watched(call):
        @functools.wraps(call)
        def wrapper(self, params, x, key=None):
            training = torch.is_grad_enabled()
            assert (key is not None) == training, f"{call.__name__} {'without' if training else 'with'} a key"
            seen["training" if training else "other"] += 1
            return call(self, params, x, key)

        return wrapper

    run = federated(name, rounds=1)  # assembled before the watch, since checks of the model draw nothing either
    for call in ("logits", "features", "classify"):
        monkeypatch.setattr(Task, call, watched(getattr(Task, call)))
    federation = run.federation
    everyone = range(run.pool.num_clients)
    federation.clients.train(2, list(everyone), *federation.down(run.server, everyone))
    assert seen["training"] > 0
    run.models["0"].predict(clients()[0][0])
    run.models["2"].predict(clients()[2][0])  # a new client, which adapts
    assert seen["other"] > 0


@pytest.mark.parametrize("name", bespoke.ALGORITHMS)
def test_dropout_changes_what_is_learned(name):
    wet, dry = tensors(federated(name)), tensors(federated(name, p=0.0))
    assert wet.keys() == dry.keys()
    assert any(not torch.equal(value, dry[key]) for key, value in wet.items())


@pytest.mark.parametrize("backend", ["loop", "batched"])
@pytest.mark.parametrize("method", [bespoke.MOON(mu=0.0), bespoke.FedProx(mu=0.0)])
def test_without_their_term_moon_and_fedprox_are_fedavg_to_the_bit(method, backend):
    found, want = (federated(m, backend=backend, rounds=3).server["model"] for m in (method, bespoke.FedAvg()))
    assert found.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in found.items())
    dry = federated(bespoke.FedAvg(), p=0.0, backend=backend, rounds=3).server["model"]
    assert not torch.equal(dry["fc.weight"], want["fc.weight"])


@pytest.mark.parametrize("name", ["moon", "fedrod", "fedcp", "pfedgp", "apfl", "fedpac"])
def test_loop_and_batched_drop_the_same(name):
    loop, batched = (tensors(federated(name, backend=backend)) for backend in ("loop", "batched"))
    for key, value in loop.items():
        if value.is_floating_point():
            assert torch.allclose(value, batched[key], rtol=1e-3, atol=1e-4), key
