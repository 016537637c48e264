"""Small runs whose personal models are saved, loaded and exported."""

import numpy as np
import torch
from torch import nn

import bespoke

DIM, CLASSES, ROWS = 6, 3, 12
NEW = np.random.default_rng(7).normal(size=(9, DIM)).astype(np.float32)


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner, self.norm, self.fc = nn.Linear(DIM, width), nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.inner(x))))


def hospitals():
    draw = np.random.default_rng(0)
    return {f"h{i}": (draw.normal(size=(ROWS, DIM)).astype(np.float32), np.arange(ROWS) % CLASSES) for i in range(5)}


def federated(name="fedavg", model=None, clients=None, **settings):
    settings = {"rounds": 1, "batch": ROWS, "lr": 0.1, "device": "cpu", "backend": "loop"} | settings
    torch.manual_seed(0)
    return bespoke.federate(clients or hospitals(), model or Net(), "fc", name, **settings)


def shipped(name, data, model):
    """A run on a data set and a model by name."""
    parts = {"data": bespoke.DataSettings(**data), "model": bespoke.ModelSettings(**model)}
    training = bespoke.Training(rounds=1, batch=4, lr=0.1, steps=2)
    return bespoke.run(bespoke.Experiment(algorithm=name, training=training, **parts), device="cpu", backend="loop")
