"""pFedGP: predictions that neither padding nor order change, clients of one class, and clients of many rows."""

import functools

import numpy as np
import pytest
import torch
import toy
from golden_runs import federation, training
from toy import CLASSES, gap, same_bits, start, task

from bespoke.algorithms.pfedgp import PFedGP
from bespoke.core import rng, tree
from bespoke.core.algorithm import Uploads
from bespoke.core.task import Task
from bespoke.maths import gp


def gp_client(x, y, method, padding=0):
    """The personal model of a client that is alone with these rows, or padded."""
    data = toy.data_of(torch.tensor(x), torch.tensor(y), [range(len(y))])
    fed = federation(method, training("plain"), "batched" if padding else "loop", data=data)
    fed.clients.padding = padding
    return fed.clients.personal(1, [0], *fed.down(fed.start(), [0]))[0]


def predicted(method, personal, x):
    return method.predict(task(), personal, torch.tensor(x))


def blobs(n, seed=0, labels=(0, 1, 2)):
    draw = np.random.default_rng(seed)
    y = np.array(labels)[np.arange(n) % len(labels)]
    return 4.0 * np.eye(4)[y] + 0.3 * draw.normal(size=(n, 4)), y


def test_a_separable_toy_is_solved_and_probabilities_sum_to_one():
    x, y = blobs(30)
    new, truth = blobs(21, seed=1)
    for method in (PFedGP(), PFedGP(link="exp_log"), PFedGP(inference="gibbs", chains=8)):
        out = predicted(method, gp_client(x, y, method), new)
        assert (out.argmax(dim=1).numpy() == truth).all()
        assert (out.exp().sum(dim=1) - 1.0).abs().max() < 1e-9


def test_mean_field_and_gibbs_agree():
    draw = np.random.default_rng(2)
    x, y = blobs(24)
    x = x + 2.0 * draw.normal(size=x.shape)  # classes overlap
    new, _ = blobs(15, seed=3)
    methods = PFedGP(), PFedGP(inference="gibbs", chains=60)
    outs = [predicted(method, gp_client(x, y, method), new).exp() for method in methods]
    assert (outs[0] - outs[1]).abs().max() < 0.05
    assert outs[0].max() - outs[0].min() > 0.3


def test_neither_the_order_of_the_rows_nor_padding_changes_a_prediction():
    x, y = blobs(20)
    x = x + np.random.default_rng(2).normal(size=x.shape)
    turn = np.random.default_rng(3).permutation(20)
    new, _ = blobs(9, seed=1)
    method = PFedGP()
    plain = predicted(method, gp_client(x, y, method), new)
    turned = predicted(method, gp_client(x[turn], y[turn], method), new)
    padded = predicted(method, gp_client(x, y, method, padding=13), new)
    assert (plain - turned).abs().max() < 1e-9 and (plain - padded).abs().max() < 1e-9
    drawn = PFedGP(inference="gibbs", chains=2)
    one, two = (predicted(drawn, gp_client(x, y, drawn, padding=p), new) for p in (0, 13))
    assert (one - two).abs().max() < 1e-9


def test_a_client_with_one_class_predicts_it_and_is_left_out_of_the_mean():
    x, y = blobs(6, labels=(2,))
    method, body = PFedGP(), task().body(start())
    out = predicted(method, gp_client(x, y, method), blobs(5)[0])
    assert (out.argmax(dim=1) == 2).all() and out[:, :2].max() == gp.LOG_FLOOR
    ups = {"body": tree.stack([body, tree.map(lambda p: p + 1.0, body)]), "learned": torch.tensor([0.0, 1.0])}
    rows = torch.tensor([5.0, 5.0], dtype=torch.float64)
    new = method.aggregate(task(), {"body": body}, Uploads(ups, rows, torch.arange(2)), rng.key(0))
    assert gap(new["body"], tree.map(lambda p: p + 1.0, body)) < 1e-14
    ups["learned"] = torch.zeros(2)
    new = method.aggregate(task(), {"body": body}, Uploads(ups, rows, torch.arange(2)), rng.key(0))
    assert same_bits(new["body"], body)


def test_a_large_client_predicts_with_some_of_its_rows():
    x, labels = blobs(40)
    method = PFedGP(max_rows=12)
    personal = gp_client(x, labels, method)
    assert personal["z"].shape == (12, 5) and personal["omega"].shape == (1, CLASSES - 1, 12)
    new, truth = blobs(12, seed=4)
    assert (predicted(method, personal, new).argmax(dim=1).numpy() == truth).all()


@pytest.mark.parametrize("backend", toy.BACKENDS)
@pytest.mark.parametrize("inference", ["mean_field", "gibbs"])
def test_a_federation_of_one_class_trains_and_predicts_it(backend, inference):
    """There is no node to learn at: the body stays, and the one class has probability one."""
    made = Task(functools.partial(toy.Net, classes=1), "head", 1, dtype=torch.float64)
    x, y = toy.data().x, torch.zeros_like(toy.data().y)
    data = toy.data_of(x, y, [range(5), range(5, 9)], [range(9, 12), range(12, 16)], classes=1)
    method, first = PFedGP(inference=inference, chains=2), made.init(rng.key(0))
    fed = federation(method, training("plain"), backend, task=made, start=first, data=data)
    server = [done.server for done in fed.rounds()][-1]
    assert same_bits(server["body"], made.body(first)) and not fed.clients.notes
    personal = fed.clients.personal(1, [0], *fed.down(server, [0]))[0]
    assert method.predict(made, personal, x[:3]).tolist() == [[0.0]] * 3
