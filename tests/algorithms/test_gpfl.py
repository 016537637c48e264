"""GPFL: its two contexts, and the least loss that guidance by cosines can have."""

import numpy as np
import pytest
import torch
from golden.common import LATE_CLASS
from golden_runs import federation, library, problem, training
from toy import BACKENDS, CLASSES, EVERYONE

from bespoke.algorithms.gpfl import GPFL

pytestmark = pytest.mark.xdist_group("gpfl")


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpfls_two_contexts_are_means_of_embeddings(backend):
    """The mean over all classes, and the mean by the client's shares: a client of one class has that class's own."""
    fed = federation(GPFL(), training("plain"), backend, seed=LATE_CLASS)
    server = fed.start()
    look = lambda local, state, down: dict(zip("gp", fed.algorithm._contexts(local, state, down), strict=True))  # noqa: E731
    found = fed.clients.probe(look, list(EVERYONE), *fed.down(server, EVERYONE))
    e = server["embedding"]
    for k, y in enumerate(problem("plain").y):
        assert torch.allclose(found["g"][k], e.mean(dim=0), atol=1e-14)
        assert torch.allclose(found["p"][k], torch.stack([e[c] for c in y]).mean(dim=0), atol=1e-14)
    assert set(problem("plain").y[4]) == {2} and torch.allclose(found["p"][4], e[2], atol=1e-14)


def test_gpfls_guidance_is_bounded():
    """Cosines lie between -1 and 1, and so the guidance's loss cannot vanish."""
    rounds = library("gpfl", "plain", "loop").rounds()
    assert all(row["train_loss"] > np.log(1.0 + (CLASSES - 1) * np.exp(-2.0)) for row in rounds)
