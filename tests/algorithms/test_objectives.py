"""Objectives without classes: which methods take them, and that those learn."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, make_multilabel_classification
from sklearn.metrics import f1_score
from torch import nn

import bespoke
from bespoke.algorithms import method_class

NEEDY = {"fedlda", "pfedfda", "pfedvmp", "fedproto", "fedpac", "gpfl", "pfedgp", "fedrod"}
FREE = [name for name in bespoke.ALGORITHMS if name not in NEEDY]
DIM, SIZES = 4, (21, 9, 15)


class Net(nn.Module):
    """A body with a norm layer, and a head."""

    def __init__(self, inputs, outputs, hidden=16):
        super().__init__()
        self.body, self.norm, self.fc = nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.body(x))))


def net(inputs, outputs, seed=1, **options):
    torch.manual_seed(seed)
    return Net(inputs, outputs, **options)


def toy(objective):
    """Clients whose targets follow from x by a rule that they share, and an offset of their own."""
    draw, clients = np.random.default_rng(0), []
    rule = draw.normal(size=(DIM, 2))
    for n in SIZES:
        x = draw.normal(size=(2 * n, DIM))
        y = x @ rule + draw.normal(size=2)
        y = y if objective == "regression" else (y > 0).astype(int)
        clients.append((x[:n].astype(np.float32), y[:n], x[n:].astype(np.float32), y[n:]))
    return clients


def train(name, objective, backend="loop", **settings):
    settings = {"rounds": 8, "epochs": 2, "batch": 8, "lr": 0.05} | settings
    return bespoke.federate(
        toy(objective),
        net(DIM, 2),
        head="fc",
        algorithm=name,
        objective=objective,
        backend=backend,
        device="cpu",
        **settings,
    )


def loss(objective, outputs):
    """The mean loss of the clients' test rows for outputs(client's name, x)."""
    row_losses = bespoke.OBJECTIVES[objective].row_losses
    each = [row_losses(outputs(str(i), x), torch.tensor(y).float()) for i, (_, _, x, y) in enumerate(toy(objective))]
    return torch.cat(each).mean().item()


def test_methods_say_whether_they_need_classes():
    assert {name for name in bespoke.ALGORITHMS if method_class(name).needs_classes} == NEEDY


@pytest.mark.parametrize("name", sorted(NEEDY))
@pytest.mark.parametrize("objective", ["regression", "multilabel"])
def test_a_method_that_needs_classes_is_refused_without_any(name, objective):
    with pytest.raises(bespoke.UserError, match=f"^{name} needs classes, which the objective '{objective}' does not"):
        train(name, objective)


LONGER = {"qlsd": 30, "qlsd_ft": 20, "pfedbred": 12}  # rounds of methods that go slowly


@pytest.mark.parametrize("objective", ["regression", "multilabel"])
@pytest.mark.parametrize("name", FREE)
def test_every_other_method_learns(name, objective):
    """That the loop gives the same is part of the contract."""
    algorithm = bespoke.QLSD(temperature=0.0) if name == "qlsd" else name  # so few rows drown in the sampler's noise
    first = net(DIM, 2)
    with torch.no_grad():
        before = loss(objective, lambda client, x: first(torch.tensor(x)))
    run = train(algorithm, objective, "batched", rounds=LONGER.get(name, 7))
    assert not [note for note in run.notes if "ignores [training]" not in note]
    assert loss(objective, lambda client, x: run.models[client].logits(x)) < 0.9 * before


# --- data that people know ------------------------------------------------------------------------------------------


def held_out(run):
    """Targets and predictions of each client's test rows, and the mean of all train targets."""
    pool = run.pool
    rows = [pool.test.client(i) for i in range(pool.num_clients)]
    train = torch.cat([pool.y[pool.train.client(i)] for i in range(pool.num_clients)])
    found = [(pool.y[r], run.models[name].predict(pool.x[r])) for name, r in zip(pool.names, rows, strict=True)]
    return found, train.mean(dim=0)


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_diabetes_by_age(name):
    """R2 within clients is at least 0.3 for FedAvg; both beat the train rows' mean. More methods: objectives.md."""
    x, y = load_diabetes(return_X_y=True)
    x, y = x / x.std(axis=0), (y - y.mean()) / y.std()
    parts = np.array_split(np.argsort(x[:, 0], kind="stable"), 8)
    run = bespoke.federate(
        [(x[rows].astype(np.float32), y[rows]) for rows in parts],
        net(10, 1),
        head="fc",
        algorithm=name,
        objective="regression",
        rounds=12,
        batch=16,
        lr=0.05,
        device="cpu",
    )
    found, mean = held_out(run)
    error = sum(((y - said) ** 2).sum().item() for y, said in found)
    spread = sum(((y - y.mean()) ** 2).sum().item() for y, _ in found)
    assert 1.0 - error / spread >= (0.3 if name == "fedavg" else 0.0)
    assert error < sum(((y - mean) ** 2).sum().item() for y, _ in found)


def test_multi_label():
    """Macro F1 is at least 0.1 above that of the best constant, all labels."""
    x, y = make_multilabel_classification(1600, n_classes=5, random_state=0)
    x = ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32)
    parts = np.array_split(np.argsort(x[:, 0], kind="stable"), 8)
    run = bespoke.federate(
        [(x[rows], y[rows]) for rows in parts],
        net(20, 5, hidden=32),
        head="fc",
        objective="multilabel",
        rounds=10,
        epochs=5,
        lr=0.5,
        device="cpu",
    )
    found, _ = held_out(run)
    truth, said = (torch.cat(parts) for parts in zip(*found, strict=True))
    constants = (f1_score(truth, torch.full_like(said, c), average="macro", zero_division=0) for c in (0, 1))
    assert f1_score(truth, said, average="macro") >= max(constants) + 0.1
