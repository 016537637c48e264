"""What reaches a tracking tool, seen through stand-ins for the tools."""

import sys
from types import SimpleNamespace

import pytest

from bespoke import loggers
from bespoke.errors import UserError

CONFIG = {"seed": 1, "training": {"lr": 0.1}}


HEADLINE = {"view": "personal", "metric": "accuracy", "higher": {"accuracy": True, "mse": False}}


def event(evaluated=True):
    """Round 3 of 9: a training population of two clients, a new client, and another view."""

    def line(client, group, correct, total, mse, view="personal"):
        metrics = {"accuracy": [correct, total], "mse": [mse, total]}
        own = {"round": 3, "client": client, "group": group, "split": "test", "view": view}
        return own | {"total": total, "metrics": metrics, "logged": {}}

    lines = [
        line(0, "train", 1, 4, 8.0),
        line(1, "unseen", 6, 6, 3.0),
        line(2, "new", 0, 90, 0.0),
        line(0, "train", 4, 4, None, "global"),
    ]
    row = {"train_loss": 0.5, "bytes_down": 8, "bytes_up": 4, "refused": {"5": "NaN"}}
    row |= {"evaluated": HEADLINE} if evaluated else {}
    return SimpleNamespace(round=3, rounds=9, row=row, evaluated=lines if evaluated else [], seconds={"train": 2.0})


def test_scalars_are_those_of_the_training_population():
    values = loggers.scalars(event())
    assert values["accuracy/personal/test/pooled"] == 0.7
    assert values["accuracy/personal/test/mean"] == (0.25 + 1.0) / 2
    assert values["mse/personal/test/pooled"] == 1.1
    assert values["mse/personal/test/mean"] == (2.0 + 0.5) / 2
    assert values["accuracy/global/test/pooled"] == 1.0
    assert not any(name.startswith("mse/global") for name in values)  # it is not finite
    assert values["loss/train"] == 0.5 and values["seconds/train"] == 2.0
    assert (values["bytes/down"], values["bytes/up"], values["refused"]) == (8, 4, 1)
    assert not any(name.startswith("accuracy") for name in loggers.scalars(event(evaluated=False)))


def test_tensorboard(monkeypatch, tmp_path):
    seen = {}

    class Writer:
        def __init__(self, folder):
            seen["folder"] = folder

        def add_scalar(self, tag, value, step):
            seen[tag] = (value, step)

        def flush(self):
            seen["flushed"] = True

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    loggers.make("tensorboard", tmp_path, "run", CONFIG)(event())
    assert seen["folder"] == str(tmp_path / "tensorboard") and seen["flushed"]
    assert seen["accuracy/personal/test/pooled"] == (0.7, 3)


def test_a_tool_starts_after_the_first_round(monkeypatch, tmp_path):
    folders = []
    writer = SimpleNamespace(add_scalar=lambda *args: None, flush=lambda: None)
    stand_in = SimpleNamespace(SummaryWriter=lambda folder: folders.append(folder) or writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    callback = loggers.make("tensorboard", tmp_path, "run", CONFIG)
    assert folders == []  # until then a folder may be refused
    callback(event())
    callback(event())
    assert folders == [str(tmp_path / "tensorboard")]


def test_wandb(monkeypatch, tmp_path):
    calls = []
    run = SimpleNamespace(log=lambda values, step: calls.append((values, step)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **kwargs: calls.append(kwargs) or run))
    loggers.make("wandb", tmp_path, "label", CONFIG)(event())
    assert calls[0] == {"name": "label", "dir": str(tmp_path), "config": CONFIG}
    assert calls[1] == (loggers.scalars(event()), 3)


def test_mlflow(monkeypatch, tmp_path):
    calls = {}
    stand_in = SimpleNamespace(
        start_run=lambda run_name: calls.update(name=run_name),
        log_params=lambda params: calls.update(params=params),
        log_metrics=lambda values, step: calls.update(values=values, step=step),
    )
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    loggers.make("mlflow", tmp_path, "label", CONFIG)(event())
    assert calls == {"name": "label", "params": {"training.lr": 0.1}, "values": loggers.scalars(event()), "step": 3}


def test_a_missing_tool_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'bespoke-fl\[wandb\]'"):
        loggers.make("wandb", tmp_path, "label", CONFIG)
    with pytest.raises(UserError, match="use one of tensorboard, wandb, mlflow"):
        loggers.make("paper", tmp_path, "label", CONFIG)
