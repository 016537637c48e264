"""Data with one class: a classifier has nothing to learn; the two-level Gaussian, which has none, is for regression."""

import numpy as np
import pytest
import torch
from torch import nn

import bespoke
from bespoke.errors import UserError


def test_one_class_is_refused_before_training():
    one = [(np.ones((6, 3), np.float32), np.zeros(6, np.int64))] * 2
    with pytest.raises(UserError, match="the data has one class: nothing to learn"):
        bespoke.federate(one, nn.Sequential(nn.Linear(3, 1)), "0", rounds=1)
    settings = bespoke.DataSettings(name="gaussian", num_classes=1, clients=2)
    with pytest.raises(UserError, match="the data has one class: nothing to learn"):
        bespoke.run(bespoke.Experiment(data=settings))


def test_the_two_level_gaussian_is_refused_for_classes_and_its_means_are_found_by_regression():
    data = bespoke.DataSettings(name="synthetic_hierarchy", clients=4)
    with pytest.raises(UserError, match="the objective 'classification' needs class numbers"):
        bespoke.run(bespoke.Experiment(data=data))
    run = bespoke.run(
        bespoke.Experiment(
            data=data,
            model=bespoke.ModelSettings(name="linear"),
            objective=bespoke.ObjectiveSettings("regression"),
            algorithm="local",
            training=bespoke.Training(rounds=30, batch=200, lr=0.3),
        ),
        backend="loop",
    )
    means = [run.pool.y[run.pool.train.client(client)].mean().item() for client in range(4)]
    found = [model.predict(torch.zeros(1, 1)).item() for model in run.models.values()]
    assert found == pytest.approx(means, abs=1e-4)
    assert np.std(means) > 0.1
