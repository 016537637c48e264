"""The fixed check on Fashion-MNIST: methods that personalise are well above one model for all. Slow; faster on CUDA."""

from functools import cache

import pytest

from bespoke.data.sources import store
from bespoke.runs import api
from bespoke.runs.experiment import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not store.holds("fashion_mnist"), reason="bespoke data fetch fashion_mnist"),
]
SEEDS = (0, 1, 2)


@cache
def mean_accuracy(name: str) -> float:
    """Mean client accuracy of the last round, all clients, in points, over the seeds."""
    total = 0.0
    for seed in SEEDS:
        run = api.run(load("checks/fmnist", name, seed=seed)[0])
        total += 100 * run.summary["views"]["personal"]["last"]["all"]["mean"]
    return total / len(SEEDS)


@pytest.mark.xdist_group("fmnist")
@pytest.mark.parametrize("name", ["pfedfda", "fedlda", "pfedvmp"])
def test_a_personal_model_is_five_points_above_one_for_all(name):
    assert mean_accuracy(name) >= mean_accuracy("fedavg") + 5.0
