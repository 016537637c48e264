"""Clients that never took part: their models fit them, adaptation goes on, and where none is needed none is made."""

import pytest
import torch
import toy
from golden.common import LATE_CLASS, loss_sum
from golden_runs import federation, method_of, one_round, predictions, problem, start, task, training
from toy import same_bits

from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.apfl import APFL
from bespoke.algorithms.fedbabu import FedBABU
from bespoke.algorithms.fedbn import FedBN
from bespoke.algorithms.fedrod import FedRoD
from bespoke.algorithms.pfedme import PFedMe
from bespoke.core import tree
from bespoke.core.settings import Training

NEW = toy.EVERYONE[-1]


def own_loss(method, settings, net="plain", **given):
    """The mean loss on its own train rows of a new client that received the server's first message."""
    world = {"task": task(net), "start": tree.map(torch.from_numpy, start(net))}
    fed = federation(method, settings, "loop", **world, **given)
    (personal,) = fed.clients.personal(1, [NEW], *fed.down(fed.start(), [NEW]))
    x, y = problem("plain").x[NEW], problem("plain").y[NEW]
    return loss_sum(predictions(method, fed.task, personal, x)["personal"].numpy(), y) / len(y)


@pytest.mark.parametrize(
    "made", [APFL(), PFedMe(lam=2.0), FedRoD(), FedBABU(), FedBN()], ids=lambda made: type(made).__name__
)
def test_a_client_that_never_took_part_gets_a_model_that_fits_it(made):
    """Its own training loss falls when it adapts."""
    net, settings = "group" if isinstance(made, FedBN) else "plain", Training(rounds=2, epochs=5, batch=4, lr=0.1)
    still = FedBABU(finetune_epochs=0) if isinstance(made, FedBABU) else made  # it adapts in `personalize`
    assert own_loss(made, settings, net) < 0.9 * own_loss(still, settings, net, adapt_rounds=0)


@pytest.mark.parametrize("name", ["fedpac", "fedproto", "fedcp", "gpfl"])
def test_further_rounds_of_adaptation_go_on(name):
    method, settings = ALGORITHMS[name](), training("plain")
    losses = [own_loss(method, settings, seed=LATE_CLASS, adapt_rounds=rounds) for rounds in (0, 1, 2)]
    assert losses[1] < 0.8 * losses[0] and losses[2] < 0.8 * losses[1], losses


@pytest.mark.parametrize("name", ["apfl", "ditto", "fedala", "fedper", "lg_fedavg", "local", "pfedbred", "pfedvmp"])
def test_a_second_round_of_adaptation_starts_where_the_first_one_ended(name):
    """Batches are all rows: a round that started over would end where the first one did."""

    def logits(rounds):
        fed = federation(method_of(name), training("plain"), "loop", adapt_rounds=rounds)
        (personal,) = fed.clients.personal(1, [NEW], *fed.down(fed.start(), [NEW]))
        return predictions(fed.algorithm, fed.task, personal, problem("plain").x[NEW])["personal"]

    assert (logits(2) - logits(1)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["fedpa", "fedep", "qlsd", "pfedgp", "fedadam", "scaffold", "feddyn"])
def test_a_client_never_seen_is_treated_like_any_other(name):
    """What prediction needs is the broadcast and the client's own rows: a state makes no difference."""
    before = federation(method_of(name), training("plain"), "loop")
    _, _, after = one_round(method_of(name), training("plain"), "loop", who=[1])
    assert after.clients.took_part(1) and not before.clients.took_part(1)
    models = [fed.clients.personal(1, [1], *fed.down(fed.start(), [1]))[0] for fed in (before, after)]
    assert same_bits(*models)
