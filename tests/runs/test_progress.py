"""What is shown while a run goes on, for any headline metric."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import toy
from small_runs import experiment as small
from small_runs import federated

import bespoke
from bespoke.algorithms.ditto import Ditto
from bespoke.clients import SequentialClients, processes
from bespoke.core.settings import Training
from bespoke.runs import progress


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


def experiment(name="fedrep", statistic="mean", rounds=2):
    return SimpleNamespace(
        algorithm_name=name, training=SimpleNamespace(rounds=rounds), evaluation=SimpleNamespace(metric=statistic)
    )


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
    with progress.shown(experiment(), True) as callback:
        callback(event("mse", ((10.0, 4), (6.0, 2))))
        callback(event(number=2))
    assert capsys.readouterr().err.splitlines() == [
        "fedrep: round 1/2, train loss 0.2500, mse 2.750 (mean)",
        "fedrep: round 2/2, train loss 0.2500, accuracy 62.50 % (mean)",
    ]


def adapted(rounds):
    """Let a new client adapt."""
    clients = SequentialClients(Ditto(), toy.task(), toy.start(), toy.data(), Training(), 1, adapt_rounds=rounds)
    clients.evaluate(1, [4], {"model": toy.start()}, {})


def test_a_long_adaptation_is_told_as_it_goes_on(capsys, monkeypatch):
    seconds = itertools.count(step=3.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with progress.shown(experiment("ditto"), True):
        adapted(1)
        adapted(6)
    adapted(3)  # nobody looks
    assert capsys.readouterr().err.splitlines() == [
        "ditto: adaptation of new clients, round 2/6 done",
        "ditto: adaptation of new clients, round 4/6 done",
    ]
    for wanted in (False, None):
        with progress.shown(experiment("ditto"), wanted):
            adapted(6)
    assert capsys.readouterr().err == ""


def test_a_client_s_name_cannot_steer_the_terminal(capsys):
    shown = event(number=2)
    shown.row["refused"] = {"\x1b[2J\r": "NaN"}
    with progress.shown(experiment(), True) as callback:
        callback(shown)
    assert "\x1b" not in capsys.readouterr().err


# --- where somebody looks -----------------------------------------------------------------------------------------


def pretend_terminal(monkeypatch):
    """Make stderr a terminal; to be called in the test, whose capture begins after its fixtures'."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.parametrize("wanted", [None, True])
def test_a_bar_shows_the_headline_metric(wanted, monkeypatch, capsys):
    pretend_terminal(monkeypatch)
    with progress.shown(experiment(statistic="pooled"), wanted) as callback:
        callback(event("mse", ((10.0, 4), (6.0, 2))))
    assert "mse 2.667 (pooled)" in capsys.readouterr().err
    with progress.shown(experiment(), wanted):
        adapted(3)
    assert "round 2/3 done" in capsys.readouterr().err


def test_a_bar_of_a_resumed_run_begins_where_it_goes_on(monkeypatch, capsys):
    pretend_terminal(monkeypatch)
    with progress.shown(experiment(rounds=9)) as callback:
        callback(event(number=8, rounds=9))
    assert "8/9" in capsys.readouterr().err


def run_once(**options):
    return bespoke.run(small(rounds=2, evaluation={"every": 1}), **options)


def test_a_run_from_python_shows_a_bar_where_somebody_looks_unless_told_otherwise(monkeypatch, capsys):
    pretend_terminal(monkeypatch)
    run_once()
    assert "rounds" in capsys.readouterr().err
    federated()
    assert "rounds" in capsys.readouterr().err
    run_once(progress=False)
    federated(progress=False)
    assert capsys.readouterr().err == ""


def test_a_run_from_python_is_silent_in_a_pipe_unless_told_otherwise(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes nobody look
    run_once()
    federated()
    assert capsys.readouterr().err == ""
    run_once(progress=True)
    assert [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"fedavg: round {number}/2" for number in (1, 2)
    ]


def test_of_several_processes_the_first_one_shows_progress(monkeypatch):
    def shown(_, wanted):
        raise InterruptedError(wanted)

    monkeypatch.setattr(progress, "shown", shown)
    for first in (True, False):
        monkeypatch.setattr(processes, "first", lambda first=first: first)
        with pytest.raises(InterruptedError, match=str(first)):
            run_once(progress=True)


def test_progress_is_a_bool_or_nothing():
    with pytest.raises(bespoke.UserError, match=r"progress=...\) takes True, False or None, not 'bar'"):
        run_once(progress="bar")


@pytest.fixture
def notebook(monkeypatch):
    """What IPython offers in a notebook; the display's contents, in their order."""
    displayed = []

    def display(thing, display_id):
        assert display_id is True
        displayed.append(thing._repr_html_())
        return SimpleNamespace(update=lambda again: displayed.append(again._repr_html_()))

    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return displayed


def test_a_notebook_has_a_bar_of_its_own(notebook, capsys):
    run_once()
    assert '<progress max="2" value="0">' in notebook[0]
    assert '<progress max="2" value="2"></progress> 2/2 rounds accuracy ' in notebook[-1]
    assert capsys.readouterr().err == ""
    notebook.clear()
    run_once(progress=False)
    assert notebook == []


def test_a_notebook_keeps_the_last_round_of_a_run_that_stops_early(notebook, monkeypatch):
    monkeypatch.setattr(progress._NotebookBar, "_PAUSE", 1e9)
    with pytest.raises(KeyboardInterrupt), progress.shown(experiment(rounds=9)) as callback:
        for number in (1, 2, 3):
            callback(event(number=number, rounds=9))
        assert len(notebook) == 1  # a display for each round would be too many
        raise KeyboardInterrupt
    assert len(notebook) == 2 and "3/9 rounds accuracy 62.50 % (mean)" in notebook[-1]


def test_nothing_of_a_client_is_html_in_a_notebook(notebook):
    refused = event(number=2)
    refused.row["refused"] = {"<b>": "NaN"}
    with progress.shown(experiment()) as callback:
        callback(refused)
    assert "round 2: refused {&#x27;&lt;b&gt;&#x27;: &#x27;NaN&#x27;}<br>" in notebook[-1]


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    run_once()
    assert capsys.readouterr().err == ""
