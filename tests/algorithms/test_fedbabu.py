"""FedBABU: its head is the first one until it is fine-tuned."""

import pytest
import toy
from golden_runs import ROUNDS, SWITCHED, run
from toy import BACKENDS, same_bits

from bespoke.algorithms.fedbabu import FedBABU
from bespoke.contract import CHECKS, Subject
from bespoke.core.settings import Training

pytestmark = pytest.mark.xdist_group("fedbabu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedbabus_head_never_moves_in_training(backend):
    task = toy.task()
    first = task.head(toy.start())
    made = Training(rounds=ROUNDS, epochs=2, batch=4, lr=0.2, momentum=0.8, weight_decay=0.1)
    ran = run(FedBABU(), made, backend)
    assert all(same_bits(s["head"], first) for states in ran.states for s in states.values())
    assert all(server.keys() == {"body"} for server in ran.server)
    assert not same_bits(ran.server[-1]["body"], ran.server[0]["body"])
    for personal in ran.personal[-1]:  # what is common to all, and a head of each client's own
        assert same_bits(task.head(personal["global"]), first)
        assert not same_bits(task.head(personal["personal"]), first)


@pytest.mark.parametrize("check", SWITCHED)
def test_the_contract_holds_for_the_variants_too(check):
    CHECKS[check](Subject(FedBABU(finetune_part="head")))
