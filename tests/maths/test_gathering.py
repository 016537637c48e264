"""Features gathered in training, against the same steps taken one by one."""

import itertools

import pytest
import torch
import toy
from torch.func import grad
from torch.nn import functional as F

from bespoke.algorithms.fedavg import FedAvg
from bespoke.core import rng, tree
from bespoke.core.local import per_pass
from bespoke.core.settings import Training
from bespoke.maths.gathering import trained_with_features

SETTINGS = {
    "partial batches": Training(epochs=3, batch=4, lr=0.3),
    "whole batches": Training(epochs=3, batch=4, lr=0.3, last_batch="drop"),
    "steps": Training(steps=5, batch=4, lr=0.3),
}


def gathered(backend, training, clients):
    """What clients side by side have gathered, the bodies they trained, and their keys."""
    task, start, scale = toy.task(), toy.start(), torch.tensor(2.0, dtype=torch.float64)

    def loss(body, batch, scale):
        z = task.features(body, batch.x, batch.key)
        return task.error(scale * z[:, : toy.CLASSES], batch), z

    def work(local, state, down):
        body, features = trained_with_features(local, loss, task.body(start), scale)
        return {"body": body, "key": local.key, "features": features._asdict()}

    pool = toy.BACKENDS[backend](FedAvg(), task, start, toy.data(), training, seed=5)
    found = pool.probe(work, clients, {}, {})
    assert not pool.notes
    return found


def batches(key, n, training):
    """The rows of each minibatch: every epoch's shuffle, cut."""
    drop = training.last_batch == "drop"
    steps = training.steps or training.epochs * per_pass(n, training.batch, drop)

    def endless():
        for epoch in itertools.count():
            order = rng.shuffle(rng.fold_in(rng.fold_in(key, 0), 2 * epoch), n, n)
            parts = order.split(min(training.batch, n))
            yield from (part for part in parts if not drop or len(part) == len(parts[0]))

    return itertools.islice(endless(), steps)


@pytest.mark.parametrize("backend", toy.BACKENDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_minibatch_is_gathered_before_its_update(name, backend):
    training, task = SETTINGS[name], toy.task()
    together = gathered(backend, training, toy.EVERYONE)
    for client in toy.EVERYONE:
        x, y = (torch.from_numpy(part[client][: toy.TRAIN_ROWS[client]]) for part in toy.arrays()[:2])
        body, z, labels = task.body(toy.start()), [], []

        def loss(body, rows, x=x, y=y):
            return F.cross_entropy(2.0 * task.features(body, x[rows])[:, : toy.CLASSES], y[rows])

        for rows in batches(together["key"][client], len(y), training):
            z.append(task.features(body, x[rows]))
            labels.append(y[rows])
            body = tree.add(body, grad(loss)(body, rows), -training.lr)
        count = sum(map(len, z))
        alone = gathered(backend, training, [client])
        for found in (tree.map(lambda leaf, c=client: leaf[c], together), tree.map(lambda leaf: leaf[0], alone)):
            features = found["features"]
            assert features["mask"].tolist() == [1.0] * count + [0.0] * (len(features["mask"]) - count)
            assert torch.equal(features["y"][:count], torch.cat(labels))
            assert (features["z"][:count] - torch.cat(z)).abs().max() < 1e-12
            assert toy.gap(found["body"], body) < 1e-12
