"""Objectives of whole runs: from TOML and from Python, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bespoke
from bespoke.runs.experiment import from_tables, load

BEFORE = "ae4e993b98cac303"


def clients(targets=1, seed=0):
    draw, found = np.random.default_rng(seed), []
    for n in (20, 12, 16):
        x = draw.normal(size=(n, 3)).astype(np.float32)
        y = x @ np.array([[1.0, -1.0, 0.5], [0.0, 2.0, 0.0]]).T[:, :targets]
        found.append((x, y[:, 0] if targets == 1 else y))
    return found


def linear(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def federated(data=None, model=None, objective="regression", **settings):
    settings = {"rounds": 2, "lr": 0.1, "batch": 8, "device": "cpu"} | settings
    return bespoke.federate(data or clients(), model or linear(), head="2", objective=objective, **settings)


# --- experiments ----------------------------------------------------------------------------------------------------


def test_an_experiment_without_an_objective_is_what_it_was():
    plain = bespoke.Experiment()
    assert plain.hash() == BEFORE
    chosen = replace(plain, objective=bespoke.ObjectiveSettings(metrics=("auroc",)))
    assert chosen.hash() == BEFORE  # metrics do not change what is learned
    assert replace(plain, objective=bespoke.ObjectiveSettings("regression")).hash() != BEFORE


def test_an_objective_goes_through_toml(tmp_path):
    made = bespoke.Experiment(objective=bespoke.ObjectiveSettings("regression", ("mae", "r2")))
    path = tmp_path / "mine.toml"
    path.write_text(made.toml())
    assert load(path)[0] == made
    old = made.tables()
    del old["objective"]
    assert from_tables(old, "old").objective == bespoke.ObjectiveSettings()


def test_regression_from_files(tmp_path):
    for i, (x, y) in enumerate(clients(2)):
        np.savez(tmp_path / f"{i}.npz", x=x, y=y)
    path = tmp_path / "mine.toml"
    path.write_text(
        f"""
[data]
name = "files"
path = "{tmp_path}/*.npz"

[model]
name = "mlp"

[objective]
name = "regression"
metrics = ["mae", "r2"]

[training]
rounds = 3
lr = 0.1
"""
    )
    run = bespoke.run(path, device="cpu")
    task = run.federation.task
    assert (task.num_outputs, run.pool.num_classes) == (2, 0)
    assert list(task.objective.metrics) == ["mae", "r2", "loss"]
    assert run.models["0"].predict(clients(2)[0][0]).shape == (20, 2)
    with pytest.raises(
        bespoke.UserError, match="objective 'classification' needs class numbers, and the data has other"
    ):
        bespoke.run(load(path, overrides=["objective.name=classification"])[0], device="cpu")
    with pytest.raises(bespoke.UserError, match='partition = "dirichlet" deals rows by class, but targets are not'):
        bespoke.run(load(path, overrides=["data.partition=dirichlet"])[0], device="cpu")
    assert bespoke.run(load(path, overrides=["data.partition=iid", "data.clients=4"])[0]).pool.num_clients == 4


def test_class_numbers_may_be_taken_for_numbers(tmp_path):
    data = bespoke.DataSettings(name="gaussian", rows=60, dim=3, num_classes=4, clients=3)
    settings = {"data": data, "model": bespoke.ModelSettings("mlp"), "training": bespoke.Training(rounds=1)}
    run = bespoke.run(bespoke.Experiment(objective=bespoke.ObjectiveSettings("regression"), **settings), device="cpu")
    assert run.pool.y.is_floating_point() and run.federation.task.num_outputs == 1


# --- one's own clients ----------------------------------------------------------------------------------------------


def test_predictions_have_the_form_of_the_targets():
    x = clients()[0][0]
    assert federated().models["0"].predict(x).shape == (20,)
    assert federated(clients(2), linear(2)).models["0"].predict(x).shape == (20, 2)
    labels = [(x, (y > 0).astype(int)) for x, y in clients(2)]
    found = federated(labels, linear(2), "multilabel").models["0"].predict(x)
    assert found.dtype == torch.int64 and set(found.unique().tolist()) <= {0, 1}


def test_targets_of_any_number_type_in_the_models_precision():
    whole = [(x, (10 * y).astype(int)) for x, y in clients()]
    run = federated(whole)
    assert run.pool.y.dtype == torch.float64  # as given
    assert run.federation.params["0.weight"].dtype == torch.float32
    assert all(torch.isfinite(p).all() for p in run.server["model"].values())


def test_a_loss_and_metrics_of_ones_own(tmp_path):
    def huber(outputs, y):
        return F.huber_loss(outputs[:, 0], y, reduction="none")

    near = bespoke.Metric(lambda output, y, mask: ((((output[:, 0] - y).abs() < 0.5) * mask).sum(), mask.sum()))
    own = bespoke.Objective(
        "huber", huber, lambda outputs: outputs[:, 0], {"near": near, "mae": bespoke.METRICS["mae"]}
    )
    run = federated(objective=own, out=tmp_path)
    assert run.experiment.objective == bespoke.ObjectiveSettings("own:huber", ("near", "mae", "loss"))
    plain = federated()
    assert not torch.equal(run.server["model"]["2.weight"], plain.server["model"]["2.weight"])
    assert federated(objective=own, out=tmp_path, resume=True, rounds=3).summary["rounds"] == 3
    with pytest.raises(bespoke.UserError, match="another experiment"):
        federated(out=tmp_path, resume=True)


def test_two_outputs_for_one_target():
    def likelihood(outputs, y):
        return F.gaussian_nll_loss(outputs[:, 0], y, outputs[:, 1].exp(), reduction="none")

    own = bespoke.Objective("gaussian", likelihood, lambda outputs: outputs[:, 0], outputs=2)
    run = federated(model=linear(2), objective=own)
    assert run.models["0"].logits(clients()[0][0]).shape == (20, 2)
    assert run.models["0"].predict(clients()[0][0]).shape == (20,)


def test_other_metrics_are_no_other_experiment(tmp_path):
    federated(out=tmp_path)
    run = federated(out=tmp_path, metrics=("mae",), resume=True, rounds=3)
    assert list(run.federation.task.objective.metrics) == ["mae", "loss"]


SPOILED = [(x, np.where(np.arange(len(y)) == 3, np.nan, y)) for x, y in clients()]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"objective": "regresion"}, r"no objective 'regresion' \(did you mean 'regression'\?\)"),
        ({"objective": 3}, r"federate\(objective=...\) takes a name or an Objective, not 3"),
        ({"metrics": ("r3",)}, "there is no metric 'r3'"),
        ({"metrics": ("accuracy",), "objective": "multilabel"}, "labels are 0 or 1"),
        ({"num_classes": 3}, "num_classes means nothing to the objective 'regression'"),
        ({"objective": "classification"}, "y of client '0' holds float64 values.*or an objective without classes"),
        ({"data": SPOILED}, "client '0' has NaN, infinity or a number beyond float32 in y"),
        ({"data": [*clients(), clients(2)[0]]}, r"targets of client '3' have shape \(2,\), those of client '0' \(\)"),
        ({"data": [(clients()[0][0], ["a"] * 20)]}, "y of client '0' holds <U1 values: give real numbers"),
        ({"data": [(clients()[0][0], np.zeros((20, 2, 2)))]}, r"y of client '0' has shape \(20, 2, 2\)"),
        ({"model": linear(2)}, r"outputs of shape \(4, 2\) for 4 examples, but the objective 'regression' needs 1"),
        ({"algorithm": "fedlda"}, "fedlda needs classes"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(settings, sentence):
    with pytest.raises(bespoke.UserError, match=sentence) as caught:
        federated(**settings)
    assert "\n" not in str(caught.value)
