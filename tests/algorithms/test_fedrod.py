"""FedRoD: the two heads know of each other what they may, and the hyper network makes heads from class shares."""

import dataclasses

import numpy as np
import pytest
import torch
import toy
from golden_runs import SWITCHED, one_round, run, training, undecayed
from toy import BACKENDS, CLASSES, EVERYONE, gap, same_bits

from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedrod import FedRoD
from bespoke.contract import CHECKS, Subject
from bespoke.core import tree
from bespoke.core.settings import Training

pytestmark = pytest.mark.xdist_group("fedrod")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedrods_generic_branch_knows_nothing_of_the_personal_head(backend):
    """With a personal head at zero both predict alike; and the generic model moves the same whatever the head."""
    zero, copy = undecayed(FedRoD(new_head_epochs=0), backend), undecayed(FedRoD(head_start="copy"), backend)
    assert all(same_bits(a, b) for a, b in zip(zero.server, copy.server, strict=True))
    views = {(s.round, s.client, s.view): s.loss_sum for s in zero.scores()}
    unseen = {(s.round, s.client) for s in zero.scores() if s.group != "train"}
    seen = {(s.round, s.client) for s in zero.scores(group="train")}
    assert unseen and all(views[*who, "personal"] == views[*who, "global"] for who in unseen)
    assert seen and all(views[*who, "personal"] != views[*who, "global"] for who in seen)
    # Without balancing (gamma = 0) the generic model is FedAvg's.
    plain = undecayed(FedAvg(), backend)
    for a, b in zip(undecayed(FedRoD(gamma=0.0), backend).server, plain.server, strict=True):
        assert gap(a, b) < 1e-12
    assert gap(zero.server[-1], plain.server[-1]) > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedrods_heads_of_a_client_with_one_class(backend):
    """Its balanced loss is exactly 0 and trains nothing shared; its personal head trains."""
    data = toy.data()
    mine = torch.isin(torch.arange(len(data.y)), data.train.client(1))
    single = dataclasses.replace(data, y=torch.where(mine, 2, data.y))
    trained, states, _ = one_round(FedRoD(), Training(lr=0.2, batch=4), backend, who=[1, 3], data=single)
    sent = [tree.map(lambda leaf, i=i: leaf[i], trained.uploads.tree["model"]) for i in (0, 1)]
    assert same_bits(sent[0], toy.start()) and not same_bits(sent[1], toy.start())
    head = states[1]["head"]
    assert head["head.bias"][2] > 0.1 and (head["head.bias"][:2] < 0).all()


def test_fedrods_hyper_network_gives_a_client_that_never_took_part_a_head():
    """Nothing is fitted: clients with the same class shares get the same head, and the shares decide."""
    ran = run(FedRoD(heads="hyper"), training("momentum", batch=4, epochs=2, weight_decay=0.0), "batched")
    hyper, heads = ran.server[-1]["hyper"], [personal["head"] for personal in ran.personal[-1]]
    assert tree.sq_norm(hyper) > 1e-3
    for k in EVERYONE:
        y = toy.data().y[toy.data().train.client(k)]
        share = np.bincount(y, minlength=CLASSES) / len(y)
        for name, leaf in heads[k].items():
            assert np.abs(leaf.numpy() - hyper[name].numpy() @ share).max() < 1e-14
    assert not same_bits(heads[0], heads[1])


@pytest.mark.parametrize("check", SWITCHED)
def test_the_contract_holds_for_the_variants_too(check):
    CHECKS[check](Subject(FedRoD(heads="hyper", refit_epochs=1)))
