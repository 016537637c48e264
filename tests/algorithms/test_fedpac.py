"""FedPAC: whose heads are mixed, and what a client is sent."""

import pytest
import torch
import toy
from golden_runs import SWITCHED, one_round
from toy import CLASSES, HIDDEN, start, task

from bespoke.algorithms.fedpac import FedPAC
from bespoke.contract import CHECKS, Subject
from bespoke.core import rng, tree
from bespoke.core.algorithm import Uploads
from bespoke.core.settings import Training
from bespoke.maths import simplex


def sent_by_four():
    """Uploads whose statistics and heads are all different."""
    draw = torch.Generator().manual_seed(0)
    names = {name: leaf.shape for name, leaf in task().head(start()).items()}
    up = {
        "body": tree.map(lambda p: p.expand(4, *p.shape), task().body(start())),
        "head": {n: torch.randn(4, *shape, dtype=torch.float64, generator=draw) for n, shape in names.items()},
        "prototype": torch.zeros(4, CLASSES, HIDDEN, dtype=torch.float64),
        "rows": torch.ones(4, CLASSES, dtype=torch.float64),
        "moment": 9.0 * torch.randn(4, CLASSES, HIDDEN, dtype=torch.float64, generator=draw),
        "variance": torch.full((4,), 0.01, dtype=torch.float64),
    }
    return up, torch.tensor([3.0, 5.0, 7.0, 9.0], dtype=torch.float64), torch.tensor([1, 2, 4, 5])


def test_without_mixing_everyone_gets_its_own_head_back(monkeypatch):
    """No programme is solved, and the statistics for it are neither sent nor counted."""
    monkeypatch.setattr(simplex, "mixtures", None)
    method, (up, weights, who) = FedPAC(mixing="none"), sent_by_four()
    up = {name: up[name] for name in up if name not in ("moment", "variance")}
    server = method.server_init(task(), start(), 6, rng.key(0))
    new = method.aggregate(task(), server, Uploads(up, weights, who), rng.key(0))["heads"]
    for name, heads in new.items():
        assert torch.equal(heads[who], up["head"][name])
        assert torch.equal(heads[0], start()[name]) and torch.equal(heads[3], start()[name])
    monkeypatch.undo()
    ran = {mixing: one_round(FedPAC(mixing=mixing), Training(), "loop")[0] for mixing in ("solved", "none")}
    sent, all_sent = (ran[mixing].uploads.tree for mixing in ("none", "solved"))
    assert all_sent.keys() - sent.keys() == {"moment", "variance"}
    assert all(toy.same_bits(all_sent[name], sent[name]) for name in ("body", "head"))
    present = (sent["rows"] > 0).sum(dim=1).tolist()
    for more, less, classes in zip(*(ran[m].logged["bytes_up"] for m in ran), present, strict=True):
        assert more - less == 4 * (HIDDEN * classes + 1)


@pytest.mark.parametrize("check", SWITCHED)
def test_the_contract_holds_without_mixing_too(check):
    CHECKS[check](Subject(FedPAC(mixing="none")))


def test_fedpac_recovers_a_copied_client():
    """Equal statistics and strangers far away: the two copies mix their heads half and half, and nobody else's."""
    method, (up, weights, who) = FedPAC(), sent_by_four()
    up["moment"][2] = up["moment"][0]
    server = method.server_init(task(), start(), 6, rng.key(0))
    new = method.aggregate(task(), server, Uploads(up, weights, who), rng.key(0))
    for name, heads in new["heads"].items():
        sent = up["head"][name]
        assert torch.allclose(heads[1], (sent[0] + sent[2]) / 2, atol=1e-12) and torch.equal(heads[1], heads[4])
        assert torch.allclose(heads[2], sent[1], atol=1e-12) and torch.allclose(heads[5], sent[3], atol=1e-12)
        assert torch.equal(heads[0], start()[name]) and torch.equal(heads[3], start()[name])
    down = method.tailor(new, torch.tensor([4, -1, 3]))["head"]
    for name, heads in new["heads"].items():
        mean = (3.0 * heads[1] + 5.0 * heads[2] + 7.0 * heads[4] + 9.0 * heads[5]) / 24.0
        assert torch.equal(down[name][0], heads[4]) and torch.equal(down[name][2], start()[name])
        assert torch.allclose(down[name][1], mean, atol=1e-14)
        assert torch.allclose(method.tailor(server, torch.tensor([-1]))["head"][name][0], start()[name], atol=1e-14)
