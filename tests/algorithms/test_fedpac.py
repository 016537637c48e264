"""FedPAC: whose heads are mixed, and what a client is sent."""

import torch
from toy import CLASSES, HIDDEN, start, task

from bespoke.algorithms.fedpac import FedPAC
from bespoke.core import rng, tree
from bespoke.core.algorithm import Uploads


def test_fedpac_recovers_a_copied_client():
    """Equal statistics and strangers far away: the two copies mix their heads half and half, and nobody else's."""
    method, draw = FedPAC(), torch.Generator().manual_seed(0)
    names = {name: leaf.shape for name, leaf in task().head(start()).items()}
    up = {
        "body": tree.map(lambda p: p.expand(4, *p.shape), task().body(start())),
        "head": {n: torch.randn(4, *shape, dtype=torch.float64, generator=draw) for n, shape in names.items()},
        "prototype": torch.zeros(4, CLASSES, HIDDEN, dtype=torch.float64),
        "rows": torch.ones(4, CLASSES, dtype=torch.float64),
        "moment": 9.0 * torch.randn(4, CLASSES, HIDDEN, dtype=torch.float64, generator=draw),
        "variance": torch.full((4,), 0.01, dtype=torch.float64),
    }
    up["moment"][2] = up["moment"][0]
    server = method.server_init(task(), start(), 6, rng.key(0))
    who, weights = torch.tensor([1, 2, 4, 5]), torch.tensor([3.0, 5.0, 7.0, 9.0], dtype=torch.float64)
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
