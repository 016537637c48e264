"""Tuning: on validation rows alone, with every trial in a log."""

import json
from dataclasses import replace

import pytest
import torch
from small_runs import command
from small_tables import RUN

from bespoke.errors import UserError
from bespoke.runs import api
from bespoke.runs.experiment import load
from bespoke.tuning import BEST, LOG, Range, parse_range, tune, validated

pytest.importorskip("optuna", reason="the extra tune is not installed")

SMALL = RUN.replace("[model]", "validation = 0.25\n[model]")


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("training.lr=0.001:0.1:log", Range("training.lr", low=0.001, high=0.1, log=True)),
        ("algorithm.head_epochs=1:10", Range("algorithm.head_epochs", low=1, high=10)),
        ("training.momentum=0,0.5,0.9", Range("training.momentum", choices=(0, 0.5, 0.9))),
        ("training.sampling=fixed,bernoulli", Range("training.sampling", choices=("fixed", "bernoulli"))),
    ],
)
def test_ranges_are_read(text, found):
    assert parse_range(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "lr=1:2",
        "training.lr",
        "training.lr=2:1",
        "training.lr=0:1:log",
        "training.lr=3",
        "training.lr=a:b",
        "training.lr=1:2:3",
    ],
)
def test_a_wrong_range_is_told(text):
    with pytest.raises(UserError, match="--search"):
        parse_range(text)


def test_the_value_is_that_of_the_validation_rows(experiment):
    """Against a plain run, which evaluates both; other test rows change nothing."""
    loaded = load(experiment)[0]
    plain = api.run(loaded)
    lines = [r for r in plain.folder.clients() if r["round"] == 4 and r["split"] == "val"]
    right, rows = (sum(line["metrics"]["accuracy"][part] for line in lines) for part in (0, 1))
    assert validated(loaded) == pytest.approx(right / rows)


def test_no_test_row_is_predicted(experiment, monkeypatch):
    seen = []
    from bespoke.clients.work import Work

    score = Work._score
    monkeypatch.setattr(Work, "_score", lambda self, key, rows, own: seen.append(rows) or score(self, key, rows, own))
    loaded = load(experiment)[0]
    validated(loaded)
    parts = api.built(loaded, "cpu", "auto")
    test = set(torch.cat([parts.pool.test.client(i) for i in range(6)]).tolist())
    used = {int(row) for rows in seen for row in rows.rows[: int(rows.n)]}
    assert used and not used & test


def test_every_trial_is_in_the_log_and_a_search_goes_on(experiment, tmp_path):
    ranges = [parse_range("training.lr=0.001:1.0:log"), parse_range("training.momentum=0,0.5")]
    best = tune(experiment, ranges, tmp_path / "out", trials=3)
    first = (tmp_path / "out" / LOG).read_text().splitlines()
    assert len(first) == 4  # what is searched, and three trials
    told = []
    best = tune(experiment, ranges, tmp_path / "out", trials=5, told=told.append)
    lines = (tmp_path / "out" / LOG).read_text().splitlines()
    assert lines[:4] == first and len(lines) == 6 and [line["trial"] for line in told] == [3, 4]
    trials = [json.loads(line) for line in lines[1:]]
    assert best == max(trials, key=lambda line: line["value"])
    loaded = load(experiment)[0]
    values = best["values"]
    chosen = replace(loaded.training, lr=values["training.lr"], momentum=values["training.momentum"])
    assert validated(replace(loaded, training=chosen)) == best["value"]
    assert f"lr = {values['training.lr']}" in (tmp_path / "out" / BEST).read_text()


def test_a_line_that_was_cut_short_is_tried_again(experiment, tmp_path):
    ranges = [parse_range("training.lr=0.1,0.2")]
    tune(experiment, ranges, tmp_path / "out", trials=2)
    log = tmp_path / "out" / LOG
    whole = log.read_text()
    log.write_text(whole[:-20])
    tune(experiment, ranges, tmp_path / "out", trials=2)
    assert [json.loads(line)["trial"] for line in log.read_text().splitlines()[1:]] == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"value": ...},
        {"value": "0.5"},
        {"value": float("nan")},
        {"value": None},
        {"values": ...},
        {"values": {"training.lr": 0.15}},
        {"values": {"training.lr": 0.1}},
        {"values": {"training.lr": 0.1, "training.batch": 8.5}},
        {"values": {"training.lr": 0.1, "training.batch": 9999}},
        {"trial": 3},
        [],
    ],
    ids=str,
)
def test_a_damaged_line_is_told_and_the_log_stays(experiment, tmp_path, change):
    ranges = [parse_range("training.lr=0.1,0.2"), parse_range("training.batch=4:16")]
    tune(experiment, ranges, tmp_path / "out", trials=1)
    log = tmp_path / "out" / LOG
    first, line = log.read_text().splitlines()
    found = json.loads(line) | change if change else change
    if change:
        found = {key: value for key, value in found.items() if value is not ...}
    log.write_text(f"{first}\n{json.dumps(found)}\n")
    before = log.read_bytes()
    with pytest.raises(UserError, match=r"trials\.jsonl, line 2, is no trial of this search: restore it, or choose"):
        tune(experiment, ranges, tmp_path / "out", trials=2)
    assert log.read_bytes() == before


def test_a_log_without_a_whole_line_is_begun_again(experiment, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOG).write_text('{"experiment": {"se')
    tune(experiment, [parse_range("training.lr=0.1,0.2")], tmp_path / "out", trials=1)
    assert len((tmp_path / "out" / LOG).read_text().splitlines()) == 2


def test_a_log_that_is_no_json_is_told(experiment, tmp_path):
    (tmp_path / "out").mkdir()
    for text in ("{\n", "[" * 100_000 + "\n"):
        (tmp_path / "out" / LOG).write_text(text)
        with pytest.raises(UserError, match=r"trials\.jsonl cannot be read: .*: choose another folder with --out"):
            tune(experiment, [parse_range("training.lr=0.1,0.2")], tmp_path / "out", trials=1)


def test_a_folder_that_cannot_be_made_is_named(experiment, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "x", "/proc/x"):
        told = command("tune", experiment, "--search", "training.lr=0.1,0.2", "--trials", "1", "--out", out).sentence
        assert told.startswith(f"cannot make the folder {out}: ") and told.endswith(
            "; choose another folder with --out"
        )


def test_a_log_of_another_search_is_refused(experiment, tmp_path):
    tune(experiment, [parse_range("training.lr=0.1,0.2")], tmp_path / "out", trials=1)
    with pytest.raises(UserError, match="another search"):
        tune(experiment, [parse_range("training.lr=0.1,0.3")], tmp_path / "out", trials=1)


def test_a_failed_trial_is_noted_and_the_others_count(experiment, tmp_path):
    best = tune(experiment, [parse_range("training.lr=-1.0,0.3")], tmp_path / "out", trials=6)
    lines = [json.loads(line) for line in (tmp_path / "out" / LOG).read_text().splitlines()[1:]]
    assert best["values"] == {"training.lr": 0.3}
    assert all(("error" in line) == (line["values"]["training.lr"] < 0) for line in lines)
    assert any("error" in line for line in lines)


def test_without_validation_rows_nothing_is_tuned(tmp_path):
    (tmp_path / "small.toml").write_text(RUN)
    with pytest.raises(UserError, match=r"data\.validation"):
        tune(tmp_path / "small.toml", [parse_range("training.lr=0.1,0.2")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "words"), [("training.lrr=0.1,0.2", "lrr"), ("data.validation=0.1:0.4", "own rows")])
def test_what_cannot_be_tuned_is_refused_before_any_trial(experiment, tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        tune(experiment, [parse_range(text)], tmp_path / "out", trials=2)
    assert not (tmp_path / "out").exists()
