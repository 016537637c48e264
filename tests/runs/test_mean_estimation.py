"""The synthetic hierarchy as a run: means are estimated, and scored by the squared error to the true ones."""

import numpy as np
import pytest
import torch

import bespoke
from bespoke.maths.hierarchy import references
from bespoke.runs.experiment import load

SHORT = ["data.clients=12", "training.rounds=5", "training.steps=8", "training.lr=0.3"]
OWN = ["algorithm.warm_rounds=1", "algorithm.default_steps=8", "algorithm.max_steps=16"]


def ran(algorithm, between, *more):
    spec, _ = load("self_fl/synthetic", algorithm, [f"data.between={between}", *SHORT, *more])
    return bespoke.run(spec, backend="batched", device="cpu")


def true_means(pool):
    return torch.stack([pool.y[pool.test.client(m)][0] for m in range(pool.total_clients)]).numpy()


def test_the_shipped_experiment_is_scored_by_the_error_to_the_true_means():
    run = ran("self_fl", 1.0, *OWN)
    outputs = np.array([model.predict(torch.zeros(1, 1)).item() for model in run.models.values()])
    assert run.metric() == pytest.approx(np.mean((outputs - true_means(run.pool)) ** 2), rel=1e-5)
    assert run.metric("loss") == pytest.approx(0.5 * run.metric())
    assert run.summary["metric"] == "squared_error" and run.summary["higher"]["squared_error"] is False
    assert "all 12 clients with test rows: squared_error 0.0" in str(run)
    views = run.summary["views"]
    assert list(views) == ["personal", "global"]
    assert views["global"]["last"]["all"]["pooled"] > 0.3  # clients differ by 1, and no mean fits all


def test_self_fl_relies_on_itself_where_clients_differ_and_on_the_others_where_they_do_not():
    alike, apart = (ran("self_fl", between, *OWN) for between in (0.001, 1.0))
    closed = references(alike.pool, 0.001)
    assert max(alike.metric(), closed["paper"], closed["bayes"]) < 0.5 * closed["local"]
    assert apart.metric() < 2.0 * references(apart.pool, 1.0)["local"] < 0.1 * apart.metric(view="global")


def test_a_client_alone_finds_the_mean_of_its_rows():
    alone = ran("local", 1.0)
    assert alone.metric() == pytest.approx(references(alone.pool, 1.0)["local"], rel=1e-3)


def test_several_targets_are_one_vector():
    draw = np.random.default_rng(0)
    x = np.zeros((30, 1), np.float32)
    truth = draw.normal(size=(3, 2))
    clients = [(x, mean + draw.normal(size=(30, 2)), x[:1], mean[None]) for mean in truth]
    settings = {"objective": "mean_estimation", "rounds": 4, "steps": 10, "batch": 30, "lr": 0.5}
    run = bespoke.federate(clients, torch.nn.Sequential(torch.nn.Linear(1, 2)), "0", "local", device="cpu", **settings)
    errors = [np.sum((rows.mean(axis=0) - mean[0]) ** 2) for _, rows, _, mean in clients]
    assert run.metric("squared_error", "mean") == pytest.approx(np.mean(errors), rel=1e-3)
