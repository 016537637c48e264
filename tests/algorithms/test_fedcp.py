"""FedCP: its context, and a gate that is idle while both heads agree."""

import pytest
import torch
from golden.common import LATE_CLASS
from golden_runs import federation, library, predictions, training
from toy import data, start, task

from bespoke.algorithms.fedcp import FedCP

pytestmark = pytest.mark.xdist_group("fedcp")


@pytest.mark.parametrize("variant", ["plain", "momentum"])
def test_fedcps_context_never_turns_under_sgd(variant):
    """Cross entropy moves the rows of a linear head by amounts that sum to 0; decay only scales them."""
    first = start()["head.weight"].sum(dim=0)
    for state in library("fedcp", variant, "batched").states[-1].values():
        last = state["personal"]["head.weight"].sum(dim=0)
        assert (last / last.norm() - first / first.norm()).abs().max() < 1e-12
        assert (state["personal"]["head.weight"] - start()["head.weight"]).abs().max() > 1e-2


def test_fedcps_gate_is_idle_while_both_heads_agree():
    fed = federation(FedCP(new_head_epochs=0), training("plain"), "batched", seed=LATE_CLASS)
    x = data().x[:7]
    for personal in fed.clients.personal(0, [0, 4], *fed.down(fed.start(), [0, 4])):
        want = task().logits(start(), x) + start()["head.bias"]
        assert torch.allclose(predictions(fed.algorithm, task(), personal, x)["personal"], want, atol=1e-13)
