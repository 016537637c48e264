"""Any module made fit for clients: BatchNorm and dropout replaced, and every replacement reported."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import bespoke
from bespoke.core import rng
from bespoke.core.task import Task
from bespoke.models import converted, layers

CLASSES = 3


class Net(nn.Module):
    """A small net as people write it: one dropout layer for two places, and a frozen norm."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 12, 3, padding=1), nn.BatchNorm2d(12, affine=False)
        self.drop, self.maps = nn.Dropout(0.3), nn.Dropout2d(0.2)
        self.inner = nn.Sequential(nn.Linear(12 * 16, 10), nn.BatchNorm1d(10), nn.ReLU(), self.drop)
        self.fc = nn.Linear(10, CLASSES)
        self.bn1.requires_grad_(False)

    def forward(self, x):
        x = self.maps(torch.relu(self.bn1(self.conv1(x))))
        x = self.drop(torch.relu(self.bn2(self.conv2(x))))
        return self.fc(self.inner(x.flatten(1)))


def test_every_replacement_is_reported():
    lines = []
    converted(Net(), lines.append)
    assert lines == [
        "bn1: BatchNorm2d -> GroupNorm, 2 groups of 8 channels",
        "bn2: BatchNorm2d -> GroupNorm, 1 groups of 12 channels",
        "drop: Dropout -> bespoke.models.layers.Dropout, p = 0.3",
        "maps: Dropout2d -> bespoke.models.layers.Dropout, p = 0.2, by channel",
        "inner.1: BatchNorm1d -> GroupNorm, 1 groups of 10 channels",
    ]
    lines.clear()
    converted(nn.Linear(2, 2), lines.append)
    assert lines == ["nothing had to be replaced"]


def test_reports_are_printed(capsys):
    converted(nn.Sequential(nn.Dropout(0.5)))
    assert capsys.readouterr().out == "0: Dropout -> bespoke.models.layers.Dropout, p = 0.5\n"


def test_a_converted_model_is_taken_and_the_original_stays():
    model = Net()
    with torch.no_grad():
        model.bn1.weight.uniform_()
    before = copy.deepcopy(model.state_dict())
    made = converted(model, [].append)
    assert isinstance(model.bn1, nn.BatchNorm2d) and isinstance(model.drop, nn.Dropout)
    task = Task(lambda: copy.deepcopy(made), "fc", CLASSES)
    x = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    task.check(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(made.bn1.weight, model.bn1.weight) and not made.bn1.weight.requires_grad
    assert made.drop is made.inner[3]  # one layer in two places
    assert made.bn2.weight is None and made.inner[1].eps == model.inner[1].eps
    params = task.init(rng.key(0))
    assert not torch.equal(task.logits(params, x, rng.key(1)), task.logits(params, x, rng.key(2)))


@pytest.mark.parametrize(("channels", "groups"), [(512, 32), (64, 8), (24, 3), (16, 2), (13, 1), (1, 1)])
def test_groups_divide_the_channels_and_hold_some(channels, groups):
    made = converted(nn.BatchNorm2d(channels), [].append)
    assert made.num_groups == groups


def test_dropout_by_channel_drops_whole_maps():
    layer = layers.Dropout(0.5, by_channel=True)
    layer.start(rng.key(1))
    dropped = layer(torch.ones(6, 8, 3, 3))
    assert set(dropped.flatten(2).float().mean(dim=2).unique().tolist()) == {0.0, 2.0}
    with pytest.raises(bespoke.UserError, match="less than 1, not 1"):
        layers.Dropout(1.0)


class Tokens(nn.Module):
    """A transformer on rows of numbers, as torch ships it: dropout in and between its layers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed, self.encoder = nn.Linear(3, 8), nn.TransformerEncoder(layer, 1)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.fc(self.encoder(self.embed(x)).mean(dim=1))


class Recurrent(nn.Module):
    """An LSTM with dropout between its layers."""

    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(3, 6, num_layers=2, dropout=0.2, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.fc(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize("backend", ["loop", "batched"])
@pytest.mark.parametrize("kind", [Tokens, Recurrent])
def test_attention_and_recurrent_layers_run(kind, backend):
    lines, draw = [], np.random.default_rng(0)
    torch.manual_seed(0)
    model = converted(kind(), lines.append)
    assert any(
        line.endswith("the same with dropout = 0 instead of " + ("0.1" if kind is Tokens else "0.2")) for line in lines
    )
    clients = []
    for _ in range(3):
        y = np.arange(12) % CLASSES
        clients.append(((draw.normal(size=(12, 4, 3)) + y[:, None, None]).astype(np.float32), y))
    run = bespoke.federate(
        clients, model, head="fc", rounds=2, epochs=2, lr=0.1, batch=4, backend=backend, device="cpu"
    )
    start = {name: p.detach() for name, p in model.named_parameters()}
    assert all(not torch.equal(value, start[name]) for name, value in run.server["model"].items())


def test_a_layer_used_twice_is_replaced_everywhere():
    shared = nn.Dropout(0.3)
    made = converted(nn.Sequential(nn.Linear(4, 8), shared, nn.Linear(8, 8), shared, nn.Linear(8, 3)), print)
    assert type(made[1]).__module__ == "bespoke.models.layers" and made[3] is made[1]
