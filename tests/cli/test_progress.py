"""What is shown while a run goes on, for any headline metric."""

import itertools
import signal
import sys
from types import SimpleNamespace

import pytest
import toy

from bespoke.algorithms.ditto import Ditto
from bespoke.cli import progress
from bespoke.clients import SequentialClients
from bespoke.core.settings import Training


def event(metric="accuracy", values=((1, 4), (6, 6)), view="personal", number=1, rounds=2):
    """An evaluated round with two clients of the training population, a new one, and a view listed before."""
    groups = (("train", view), ("unseen", view), ("new", view), ("train", "other"))
    pairs = [*values, (0, 90), (0, 90)]
    lines = [
        {"client": i, "group": group, "split": "test", "view": name, "total": 9, "metrics": {metric: list(pair)}}
        for i, ((group, name), pair) in enumerate(zip(groups, pairs, strict=True))
    ][::-1]
    evaluated = {"view": view, "metric": metric, "higher": {metric: True}}
    row = {"train_loss": 0.25, "refused": {}, "evaluated": evaluated}
    return SimpleNamespace(round=number, rounds=rounds, row=row, evaluated=lines)


@pytest.mark.parametrize(
    ("metric", "values", "pooled", "mean"),
    [
        ("accuracy", ((1, 4), (6, 6)), "accuracy 70.00 % (pooled)", "accuracy 62.50 % (mean)"),
        ("mse", ((10.0, 4), (6.0, 2)), "mse 2.667 (pooled)", "mse 2.750 (mean)"),
        ("macro_f1", (([1, 0], [2, 0]), ([1, 3], [2, 3])), "macro_f1 75.00 % (pooled)", "macro_f1 62.50 % (mean)"),
        ("mse", ((None, 4), (6.0, 2)), "mse is not finite", "mse is not finite"),
        ("auroc", ((0, 0), (0, 0)), "", ""),
    ],
)
def test_the_headline_metric_is_shown_whatever_it_is(metric, values, pooled, mean):
    assert progress.headline_text(event(metric, values), "pooled") == pooled
    assert progress.headline_text(event(metric, values), "mean") == mean


def test_a_round_that_was_not_evaluated_shows_nothing():
    quiet = SimpleNamespace(row={"train_loss": None, "refused": {}}, evaluated=[])
    assert progress.headline_text(quiet, "pooled") == ""


def test_a_log_has_one_line_per_evaluated_round(capsys):
    experiment = SimpleNamespace(
        algorithm_name="fedrep", training=SimpleNamespace(rounds=2), evaluation=SimpleNamespace(metric="mean")
    )
    with progress.shown(experiment, quiet=False) as (callback, stopped):
        callback(event("mse", ((10.0, 4), (6.0, 2))))
        callback(event(number=2))
        assert not stopped()
    assert capsys.readouterr().err.splitlines() == [
        "fedrep: round 1/2, train loss 0.2500, mse 2.750 (mean)",
        "fedrep: round 2/2, train loss 0.2500, accuracy 62.50 % (mean)",
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_its_round_and_a_second_one_at_once(number, code, capsys):
    experiment = SimpleNamespace(evaluation=SimpleNamespace(metric="mean"))
    before = signal.getsignal(number)
    with progress.shown(experiment, quiet=True) as (_, stopped):
        assert not stopped() and stopped.code == 130
        signal.raise_signal(number)
        assert stopped() and stopped.code == code
        assert "finishing this round, then saving a checkpoint" in capsys.readouterr().err
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(number)
        assert ended.value.code == code
    assert signal.getsignal(number) is before


def adapted(rounds):
    """Let a new client adapt."""
    clients = SequentialClients(Ditto(), toy.task(), toy.start(), toy.data(), Training(), 1, adapt_rounds=rounds)
    clients.evaluate(1, [4], {"model": toy.start()}, {})


def test_a_long_adaptation_is_told_as_it_goes_on(capsys, monkeypatch):
    experiment = SimpleNamespace(algorithm_name="ditto", evaluation=SimpleNamespace(metric="mean"))
    seconds = itertools.count(step=3.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with progress.shown(experiment, quiet=False):
        adapted(1)
        adapted(6)
    adapted(3)  # nobody looks
    assert capsys.readouterr().err.splitlines() == [
        "ditto: adaptation of new clients, round 2/6 done",
        "ditto: adaptation of new clients, round 4/6 done",
    ]
    with progress.shown(experiment, quiet=True):
        adapted(6)
    monkeypatch.setenv("RANK", "1")  # of several processes the first one speaks
    with progress.shown(experiment, quiet=False):
        adapted(6)
    assert capsys.readouterr().err == ""


def test_a_client_s_name_cannot_steer_the_terminal(capsys):
    experiment = SimpleNamespace(
        algorithm_name="fedrep", training=SimpleNamespace(rounds=2), evaluation=SimpleNamespace(metric="mean")
    )
    shown = event(number=2)
    shown.row["refused"] = {"\x1b[2J\r": "NaN"}
    with progress.shown(experiment, quiet=False) as (callback, _):
        callback(shown)
    assert "\x1b" not in capsys.readouterr().err


def test_a_bar_shows_the_headline_metric(capsys, monkeypatch):
    experiment = SimpleNamespace(
        algorithm_name="fedrep", training=SimpleNamespace(rounds=2), evaluation=SimpleNamespace(metric="pooled")
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress.shown(experiment, quiet=False) as (callback, _):
        callback(event("mse", ((10.0, 4), (6.0, 2))))
    assert "mse 2.667 (pooled)" in capsys.readouterr().err
    with progress.shown(experiment, quiet=False):
        adapted(3)
    assert "round 2/3 done" in capsys.readouterr().err
