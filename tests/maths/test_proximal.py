"""Gradient steps of a method's own, against their formulas."""

import pytest
import torch
from torch.func import grad

from bespoke.core import tree
from bespoke.core.local import Local
from bespoke.engine.purity import refuse_tensors
from bespoke.maths.proximal import descend, near


def example(seed):
    draw = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(3, 2, generator=draw).double(), "b": {"c": torch.randn(4, generator=draw).double()}}


def loss(params, batch):
    return (params["a"].sum() - batch) ** 2 + params["b"]["c"].pow(3).sum()


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("rate", [0.2, torch.tensor(0.2).double()])
def test_a_plain_step(rate, decay):
    params, slope = example(0), example(1)
    found = descend(params, slope, rate, decay)
    for got, p, g in zip(*map(tree.leaves, (found, params, slope)), strict=True):
        assert (got - ((1.0 - 0.2 * decay) * p - 0.2 * g)).abs().max() < 1e-7


def test_a_loss_near_an_anchor_pulls_towards_it():
    params, anchor = example(0), example(1)
    tied, batch = near(loss, 0.7), torch.tensor(0.5).double()
    assert float(tied(params, batch, params)) == float(loss(params, batch))
    plain, pulled = grad(loss)(params, batch), grad(tied)(params, batch, anchor)
    for got, g, p, a in zip(*map(tree.leaves, (pulled, plain, params, anchor)), strict=True):
        assert (got - (g + 0.7 * (p - a))).abs().max() < 1e-14


def test_a_loss_near_an_anchor_is_looked_into_for_tensors():
    refuse_tensors(near(loss, 0.7), Local, "loss")
    with pytest.raises(TypeError, match="closes over the tensor 'strength'"):
        refuse_tensors(near(loss, torch.tensor(0.7)), Local, "loss")
