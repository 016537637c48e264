"""Dropout by keys: in training alone, the same in loop and batched, and the mean kept."""

import pytest
import torch

from bespoke.algorithms.fedavg import FedAvg
from bespoke.clients import BatchedClients, SequentialClients
from bespoke.core import rng, tree
from bespoke.core.data import Batch, FederatedData, Rows
from bespoke.core.settings import Training
from bespoke.models import ModelSettings, build_task, layers

SIZES = (9, 5, 14)


def task(dropout):
    return build_task(ModelSettings("cnn", width=2, hidden=30, dropout=dropout), (1, 8, 8), 3, dtype=torch.float64)


def batch(rows=6, key=4):
    x, y = rng.normal(rng.key(1), (rows, 1, 8, 8), torch.float64), torch.arange(rows) % 3
    return Batch(x, y, torch.ones(rows, dtype=torch.float64), torch.arange(rows), torch.tensor(0), rng.key(key))


def test_a_share_of_the_values_is_dropped_and_the_rest_raised():
    layer = layers.Dropout(0.3)
    x = torch.ones(200, 500)
    assert torch.equal(layer(x), x)  # no key: not training
    layer.start(rng.key(7))
    dropped = layer(x)
    assert dropped.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    assert (dropped == 0).double().mean() == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / x.numel()) ** 0.5)
    layer.start(rng.key(8))
    assert not torch.equal(layer(x), dropped)


def test_training_draws_by_the_batchs_key_and_prediction_does_not():
    wet, dry = task(0.5), task(0.0)
    params = wet.init(rng.key(0))
    assert wet.init(rng.key(0)).keys() == dry.init(rng.key(0)).keys()
    losses = [wet.loss(params, batch(key=key)) for key in (4, 4, 5)]
    assert losses[0] == losses[1] != losses[2]
    assert dry.loss(params, batch(key=4)) == dry.loss(params, batch(key=5)) != losses[0]
    x = batch().x
    assert torch.equal(wet.logits(params, x), dry.logits(params, x))


def test_a_rows_draws_do_not_depend_on_how_many_follow():
    layer = layers.Dropout(0.5)
    layer.start(rng.key(3))
    x = torch.ones(7, 20)
    whole = layer(x)
    layer.start(rng.key(3))
    assert torch.equal(whole[:4], layer(x[:4]))


def test_loop_and_batched_drop_the_same():
    total = sum(SIZES)
    x, y = rng.normal(rng.key(1), (total, 1, 8, 8), torch.float64), torch.arange(total) % 3
    train, none = Rows.of(list(torch.arange(total).split(SIZES))), Rows.of([[]] * len(SIZES))
    pool = FederatedData(x, y, train, none, none, 3, len(SIZES), tuple("abc"))
    uploads = []
    for backend, dropout in ((SequentialClients, 0.5), (BatchedClients, 0.5), (SequentialClients, 0.0)):
        made = task(dropout)
        params = made.init(rng.key(0))
        clients = backend(FedAvg(), made, params, pool, Training(batch=4, epochs=2, lr=0.1), seed=2)
        uploads.append(clients.train(1, [0, 1, 2], {"model": params}, {}).uploads.tree)
        assert not clients.notes
    gaps = [
        max(float((a - b).abs().max()) for a, b in zip(*map(tree.leaves, (uploads[0], u)), strict=True))
        for u in uploads
    ]
    assert gaps[1] < 1e-12
    assert gaps[2] > 1e-3
