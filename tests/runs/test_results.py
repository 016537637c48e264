"""The numbers of a finished run and how it prints, from records alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_runs import experiment

import bespoke
from bespoke import Run, UserError
from bespoke.data import DATASETS, Examples
from bespoke.records import RunFolder

OLD = Path(__file__).parents[1] / "report" / "old_run" / "fedrod"


def finished(folder=OLD, notes=(), **changes):
    """A run whose records are in a folder; nothing was trained."""
    clients = SimpleNamespace(num_clients=5, total_clients=6)
    return Run(experiment("fedrod", seed=9, **changes), RunFolder(folder), None, {}, clients, list(notes))


def test_a_run_prints_a_few_readable_lines():
    run = finished(notes=["the method runs one client after another"])
    assert str(run).splitlines() == repr(run).splitlines()
    assert str(run).splitlines() == [
        "fedrod on gaussian, seed 9, 3 of 3 rounds",
        "clients: 5 and 1 new",
        "last round (3), personal model, all 5 clients with test rows: accuracy 57.78 % pooled, "
        "58.25 % mean over clients",
        f"records: {OLD}",
        "note: the method runs one client after another",
    ]
    assert "best on test (oracle) (2)" in str(finished(evaluation={"select": "best_test"}, rounds=8))
    assert "3 of 8 rounds" in str(finished(rounds=8))


def test_a_run_prints_even_if_its_records_are_gone(tmp_path):
    assert f"there is no run folder {tmp_path / 'gone'}" in str(finished(tmp_path / "gone"))
    (tmp_path / "empty").mkdir()
    assert "0 rounds: no client was evaluated on test rows" in str(finished(tmp_path / "empty"))


def test_every_number_of_the_summary_can_be_asked_for():
    run, summary = finished(), json.loads((OLD / "summary.json").read_text())
    last = summary["views"]["personal"]["last"]
    assert run.accuracy == run.metric() == run.metric("accuracy") == last["all"]["pooled"]
    assert run.metric("loss") == last["all"]["loss"]
    assert run.metric(statistic="worst10") == last["all"]["worst10"]
    assert run.metric("loss", group="new") == last["new"]["loss"]
    assert run.metric(select="best_val", view="global") == summary["views"]["global"]["best_val"]["all"]["pooled"]


def test_numbers_of_the_clients_of_one_condition(monkeypatch):
    draw = np.random.default_rng(0)
    owner = np.repeat([0, 2, 3, 4], 20)  # the second client has no rows
    rows = Examples(
        draw.standard_normal((80, 4)).astype(np.float32),
        np.arange(80) % 2,
        2,
        owner=owner,
        owner_names=tuple("abcde"),
        domain=(owner % 3 > 0).astype(int),
        domain_names=("hall", "field"),
    )
    monkeypatch.setitem(DATASETS, "rooms", DATASETS.read(lambda: rows, "here"))
    data = bespoke.DataSettings(name="rooms", partition="natural", new_clients=1)
    small = replace(experiment(skip_empty=True, rounds=1, rate=1.0), data=data)
    run = bespoke.run(small)
    assert run.folder.conditions() == ["hall", "field", "hall", "field"] and run.pool.names == ("a", "c", "d", "e")
    right = {line["client"]: line["metrics"]["accuracy"] for line in run.folder.clients() if line["view"] == "personal"}
    (a, c, d, e) = (right[client] for client in range(4))
    assert (
        run.metric(group="train:hall")
        == (a[0] + d[0]) / (a[1] + d[1])
        == run.summary["views"]["personal"]["last"]["conditions"]["hall"]["train"]["pooled"]
    )
    assert [run.metric(group=f"{group}:field") for group in ("all", "new")] == [c[0] / c[1], e[0] / e[1]]
    assert run.metric("loss", group="all:hall") > 0
    with pytest.raises(UserError, match=r"no condition 'cellar' in .*; use one of hall, field"):
        run.metric(group="all:cellar")
    with pytest.raises(UserError, match="there is no accuracy: no client was evaluated"):
        run.metric(group="new:hall")


def test_numbers_that_are_not_there_are_named(tmp_path):
    run = finished()
    for call, words in (
        (lambda: run.metric("mse"), "there is no metric 'mse'; use one of accuracy, loss"),
        (
            lambda: run.metric(statistic="median"),
            "there is no statistic 'median'; use one of clients, ",
        ),
        (lambda: run.metric(view="local"), "there is no view 'local'; use one of personal, global"),
        (lambda: run.metric(statistic="std", group="new"), "there is no accuracy: the std is not defined"),
    ):
        with pytest.raises(UserError, match=words):
            call()
    shutil.copy(OLD / "rounds.jsonl", tmp_path)
    for call in (lambda run: run.accuracy, lambda run: run.metric()):
        with pytest.raises(UserError, match="no client was evaluated on its own test rows"):
            call(finished(tmp_path))


def test_a_client_that_is_not_there_is_named():
    models = bespoke.run(experiment(rounds=1), device="cpu").models
    with pytest.raises(KeyError) as error:
        models["zz"]
    assert str(error.value) == "there is no model of a client 'zz': there are '0', '1', '2', '3', '4', '5'"
    with pytest.raises(UserError, match=r"client 1 \(did you mean '1'\?\)"):
        models[1]
    assert "zz" not in models and models.get("zz") is None
