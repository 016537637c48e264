"""What reaches a tracking tool, seen through stand-ins for the tools."""

import sys
from types import SimpleNamespace

import pytest

from bespoke import loggers
from bespoke.errors import UserError
from bespoke.runs.federation import Event

CONFIG = {"seed": 1, "training": {"lr": 0.1}}


def event(round=3, evaluated=True):
    count = {"round": round, "split": "test", "view": "personal", "loss_sum": 1.0, "logged": {}}
    rows = [
        count | {"client": 0, "group": "train", "correct": 1, "total": 4},
        count | {"client": 1, "group": "unseen", "correct": 6, "total": 6},
        count | {"client": 2, "group": "new", "correct": 0, "total": 90},
    ]
    row = {"train_loss": 0.5, "bytes_down": 8, "bytes_up": 4, "refused": {"5": "NaN"}}
    return Event(round, 9, row, rows if evaluated else [], {"train": 2.0})


def test_scalars_are_those_of_the_training_population():
    values = loggers.scalars(event())
    assert values["accuracy/personal/test/pooled"] == 0.7
    assert values["accuracy/personal/test/mean"] == (0.25 + 1.0) / 2
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
