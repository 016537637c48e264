"""Prototypes of classes that a client or the whole cohort lacks."""

import torch

from bespoke.core import rng, tree
from bespoke.core.data import Batch
from bespoke.core.local import Features
from bespoke.maths import prototypes


def test_prototypes_of_absent_classes():
    z, y = rng.normal(rng.key(10), (5, 2), torch.float64), torch.tensor([0, 2, 2, 0, 1])
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)  # the only row of class 1 is padding
    mine = prototypes.own(Features(z, y, mask), 4)
    assert mine["rows"].tolist() == [2.0, 0.0, 2.0, 0.0]
    assert torch.allclose(mine["prototype"], torch.stack([(z[0] + z[3]) / 2, 0 * z[0], (z[1] + z[2]) / 2, 0 * z[0]]))
    moment, variance = prototypes.first_moment(Features(z, y, mask), 4)
    assert torch.allclose(moment, mine["prototype"] * mine["rows"][:, None] / 4)
    slots = torch.zeros(4, 4, 2, dtype=torch.float64)
    slots[torch.arange(4), y[:4]] = z[:4]
    assert torch.allclose(variance, slots.flatten(1).var(dim=0, correction=0).sum() / 4)
    before = {
        "prototype": torch.full((4, 2), 7.0, dtype=torch.float64),
        "rows": torch.tensor([1.0, 5.0, 0.0, 0.0]).double(),
    }
    other = {"prototype": torch.ones(4, 2, dtype=torch.float64), "rows": torch.tensor([6.0, 0.0, 0.0, 0.0]).double()}
    both = tree.stack([mine, other])
    now = prototypes.combine(both, both["rows"], before)
    assert now["rows"].tolist() == [8.0, 5.0, 2.0, 0.0]
    assert torch.allclose(now["prototype"][0], (2 * mine["prototype"][0] + 6.0) / 8)
    assert torch.equal(now["prototype"][1], before["prototype"][1])
    assert torch.allclose(now["prototype"][2], mine["prototype"][2])
    batch = Batch(z, y, mask, y, y[0], rng.key(0))
    far = ((z[0] - now["prototype"][0]).square() + (z[3] - now["prototype"][0]).square()).sum() / (4 * 2)
    known = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert torch.allclose(prototypes.pull(z, batch, now["prototype"], known), far)
    means = (mine["prototype"][0] - now["prototype"][0]).norm()
    assert torch.allclose(prototypes.pull_means(z, batch, now["prototype"], known), means, atol=1e-7)
    assert prototypes.nearest(z, now["prototype"], known).argmax(dim=1).max() <= 1
