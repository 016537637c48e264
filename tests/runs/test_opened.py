"""A finished run is a thing one can open: from its folder alone, for a client that comes later."""

import numpy as np
import pytest
import torch
from personal_models import CLASSES, DIM, NEW, ROWS, Net, federated, hospitals, shipped

import bespoke
from bespoke import UserError, load_model, open_run
from bespoke.core import tree

LATE = np.random.default_rng(3).normal(size=(10, DIM)).astype(np.float32), np.arange(10) % CLASSES


def first_newcomer(run):
    """The tree of the first new client of a run, and its train rows."""
    client = run.pool.num_clients
    down = run.federation.down(run.server, [client])
    (personal,) = run.federation.inspect().personal(run.last_round, [client], *down)
    rows = run.pool.train.client(client)
    return personal, run.pool.x[rows], run.pool.y[rows]


def equal(one, two):
    one, two = tree.flatten(one), tree.flatten(two)
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", sorted(bespoke.ALGORITHMS.shipped))
def test_a_client_that_comes_later_equals_one_that_was_new_from_the_start(name, tmp_path):
    few = dict(list(hospitals().items())[:3])
    with_new = federated(name, clients=few | {"late": LATE}, new_clients=1, rounds=2, batch=4)
    personal, x, y = first_newcomer(with_new)
    federated(name, clients=few, out=tmp_path / "run", rounds=2, batch=4)
    run = open_run(tmp_path / "run", model=Net)
    model = run.personalize(x, y, name="late")
    assert equal(model.personal, personal)
    assert torch.equal(model.logits(NEW), with_new._model(personal, "late", 8, {}, None).logits(NEW))
