"""Frozen layers and buffers: equal after training, in no tree and no message, whatever the method."""

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import bespoke

DIM, CLASSES = 4, 3
SIZES = (14, 9, 6)


class Net(nn.Module):
    """A pretrained first layer that stays, a scale that is a buffer, and a rest that trains."""

    def __init__(self):
        super().__init__()
        self.register_buffer("per_input", torch.rand(DIM) + 0.5)
        self.given, self.norm = nn.Linear(DIM, 8).requires_grad_(False), nn.LayerNorm(8)
        self.inner, self.fc = nn.Linear(8, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.fc(torch.tanh(self.inner(torch.tanh(self.norm(self.given(x * self.per_input))))))


def federated(name, model, **settings):
    draw, clients = np.random.default_rng(0), []
    for n in SIZES:
        y = np.arange(n) % CLASSES
        clients.append(((draw.normal(size=(n, DIM)) + np.eye(CLASSES, DIM)[y]).astype(np.float32), y))
    settings = {"rounds": 2, "batch": 4, "lr": 0.1, "device": "cpu", "new_clients": 1} | settings
    return bespoke.federate(clients, model, head="fc", algorithm=name, **settings)


def seeded(kind):
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("name", bespoke.ALGORITHMS)
def test_constants_stay_and_are_in_no_tree(name, tmp_path):
    model = seeded(Net)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run = federated(name, model)
    constants = run.federation.task.constants()
    assert constants.keys() == {"per_input", "given.weight", "given.bias"}
    assert all(torch.equal(value, before[key]) for key, value in constants.items())
    trees = bespoke.tree.flatten({"server": run.server, **{key: m.personal for key, m in run.models.items()}})
    assert not [key for key in trees if key.rpartition("/")[2] in constants]
    saved = safetensors.torch.load_file(run.save_models(tmp_path) / "0.safetensors")
    assert all(torch.equal(saved[f"constants/{key}"], value) for key, value in constants.items())
    assert run.models["0"].logits(np.zeros((2, DIM), np.float32)).shape == (2, CLASSES)


@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_frozen_layers_are_not_sent(backend):
    model = seeded(Net)
    run = federated("fedavg", model, backend=backend)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for row in run.folder.rounds():
        assert row["bytes_up"] == row["bytes_down"] == len(row["cohort"]) * 4 * trained
    assert run.server["model"].keys() == {key for key, p in model.named_parameters() if p.requires_grad}
    assert all(not torch.equal(p, model.state_dict()[key]) for key, p in run.server["model"].items())


def test_freezing_is_the_same_as_training_the_rest_alone():
    class Rest(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner, self.fc = nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, CLASSES)

        def forward(self, z):
            return self.fc(torch.tanh(self.inner(torch.tanh(self.norm(z)))))

    model, rest = seeded(Net), Rest()
    rest.load_state_dict({key: value for key, value in model.state_dict().items() if key in rest.state_dict()})
    whole = federated("fedavg", model)
    with torch.no_grad():
        z = model.given(whole.pool.x * model.per_input).numpy()
    cut = np.split(z, np.cumsum(SIZES)[:-1])
    clients = [(part, np.arange(n) % CLASSES) for part, n in zip(cut, SIZES, strict=True)]
    alone = bespoke.federate(
        clients, rest, head="fc", algorithm="fedavg", rounds=2, batch=4, lr=0.1, device="cpu", new_clients=1
    )
    for key, value in alone.server["model"].items():
        assert torch.allclose(value, whole.server["model"][key], atol=1e-6), key


def test_freezing_makes_another_experiment(tmp_path):
    federated("fedavg", seeded(Net), out=tmp_path)
    other = seeded(Net)
    other.given.requires_grad_(True)
    with pytest.raises(bespoke.UserError, match=r"another experiment .*model\.name"):
        federated("fedavg", other, out=tmp_path, resume=True)
    assert federated("fedavg", seeded(Net), out=tmp_path, resume=True).summary["rounds"] == 2


def test_a_frozen_body_trains_heads_alone():
    model = seeded(Net).requires_grad_(False)
    model.fc.requires_grad_(True)
    run = federated("fedrep", model)
    assert run.server == {"body": {}}
    heads = [run.models[key].personal for key in ("0", "1")]
    assert heads[0].keys() == {"fc.weight", "fc.bias"}
    assert not torch.equal(heads[0]["fc.weight"], heads[1]["fc.weight"])


def test_the_seed_covers_constants_drawn_by_a_shipped_model(monkeypatch):
    from bespoke.models import MODELS, ModelSpec, layers

    def drawn(settings, shape, num_outputs):
        first = nn.Linear(int(np.prod(shape)), 8).requires_grad_(False)
        return layers.Classifier(nn.Sequential(nn.Flatten(), first, nn.Tanh()), nn.Linear(8, num_outputs))

    monkeypatch.setitem(MODELS, "drawn", ModelSpec(drawn, "random features"))
    data = bespoke.DataSettings(name="gaussian", rows=60, dim=3, num_classes=2, clients=3)
    settings = {"data": data, "model": bespoke.ModelSettings("drawn"), "training": bespoke.Training(rounds=1)}
    first, again, other = (
        bespoke.run(bespoke.Experiment(seed=seed, **settings), device="cpu").federation.task.constants()
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    assert not torch.equal(first["body.1.weight"], other["body.1.weight"])
