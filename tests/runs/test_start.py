"""Weights that every method starts from: what is accepted, what is refused, and whose they are on resuming."""

import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch
import toy
from small_runs import command, experiment, same_tensors, write
from torch import nn

import bespoke
from bespoke.core import rng
from bespoke.core.task import Task
from bespoke.errors import UserError
from bespoke.models.start import read_start, write_start
from bespoke.runs.evaluating import evaluate, reopened

MLP = {"name": "mlp", "hidden": 5}


def spec(start="", algorithm="fedavg", **settings):
    return experiment(algorithm, **({"model": MLP | {"start": str(start)}, "rounds": 2} | settings))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of FedAvg, and its model as a file to start from."""
    run = bespoke.run(spec(seed=3))
    path = tmp_path_factory.mktemp("start") / "model.safetensors"
    run.save_start(path)
    return run, path


@pytest.mark.parametrize("name", ["fedavg", "fedper", "ditto", "pfedfda", "local", "apfl"])
def test_every_method_starts_from_the_weights(name, saved):
    run, path = saved
    done = bespoke.run(spec(path, name, rounds=1))
    assert same_tensors(done.federation.params, run.server["model"])
    assert same_tensors(done.federation.inspect().params, run.server["model"])


def test_training_goes_on_from_there(saved):
    run, path = saved
    still = bespoke.run(spec(path, rounds=1, lr=1e-9))
    far = bespoke.run(spec(rounds=1, lr=1e-9))
    assert (
        toy.gap(still.server["model"], run.server["model"]) < 1e-6 < toy.gap(far.server["model"], run.server["model"])
    )


def test_the_drawn_weights_from_a_file_give_the_same_run_to_the_bit(tmp_path):
    plain = bespoke.run(spec())
    write_start(tmp_path / "drawn.safetensors", plain.federation.params, plain.federation.task)
    again = bespoke.run(spec(tmp_path / "drawn.safetensors"))
    assert toy.same_bits(again.server, plain.server)
    assert again.experiment.hash() != plain.experiment.hash()


def test_a_saved_personal_model_is_a_start_and_its_path_is_beside_the_experiment(tmp_path, monkeypatch):
    path = write(tmp_path / "there" / "x.toml", model=MLP)
    monkeypatch.chdir(tmp_path)
    assert command("run", path, "--out", "first", "--save-models", "--quiet").code == 0
    (tmp_path / "first" / "models" / "0.safetensors").rename(tmp_path / "there" / "global.safetensors")
    path = write(
        tmp_path / "there" / "y.toml", model=MLP | {"start": "global.safetensors"}, algorithm={"name": "fedper"}
    )
    assert command("run", path, "--out", "second", "--quiet").code == 0
    held = safetensors.torch.load_file(tmp_path / "there" / "global.safetensors")
    assert same_tensors(reopened("second").federation.params, held)
    typed = ("--set", "model.start=there/global.safetensors")
    assert command("run", tmp_path / "there" / "x.toml", *typed, "--out", "third", "--quiet").code == 0


def changed(path, out, **leaves):
    """A copy of a file of weights with leaves replaced; None removes one."""
    held = safetensors.torch.load_file(path) | leaves
    safetensors.torch.save_file({name: leaf for name, leaf in held.items() if leaf is not None}, out)
    return out


WRONG = {
    "'head.bias' is missing": {"head.bias": None},
    "'head.bias' has the shape [4] there and [3] here": {"head.bias": torch.zeros(4)},
    "it has no 'model/head.bias'": {"model/head.bias": torch.zeros(3)},
    "'head.bias' holds something else than finite numbers": {"head.bias": torch.tensor([0.0, float("nan"), 0.0])},
}


@pytest.mark.parametrize("words", WRONG)
def test_weights_of_another_model_are_refused_in_one_sentence(words, saved, tmp_path):
    path = changed(saved[1], tmp_path / "x.safetensors", **WRONG[words])
    with pytest.raises(UserError) as caught:
        bespoke.run(spec(path))
    assert f"[model] start = '{path}': these are not the weights of this model: {words}" == str(caught.value)
    numbers = changed(saved[1], tmp_path / "y.safetensors", **{"head.bias": torch.zeros(3, dtype=torch.int64)})
    with pytest.raises(UserError, match=r"'head\.bias' holds something else than finite numbers"):
        bespoke.run(spec(numbers))


def test_a_file_that_is_none_is_refused_in_one_sentence(saved, tmp_path):
    (tmp_path / "cut").write_bytes(saved[1].read_bytes()[:-5])
    (tmp_path / "text").write_text("weights")
    for name, words in {
        "gone": "cannot be read",
        "cut": "is not a .safetensors",
        "text": "is not a .safetensors",
    }.items():
        with pytest.raises(UserError, match=words) as caught:
            bespoke.run(spec(tmp_path / name))
        assert str(caught.value).startswith(f"[model] start = '{tmp_path / name}'") and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        bespoke.run(spec(tmp_path))


def test_a_run_goes_on_only_with_the_weights_it_began_with(saved, tmp_path):
    path, folder = tmp_path / "start.safetensors", tmp_path / "run"
    changed(saved[1], path)
    bespoke.run(spec(path), folder)
    assert len(json.loads((folder / "federation.json").read_text())["start"]) == 32
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, {"other": "words around the same weights"})
    longer = spec(path, rounds=3)
    bespoke.run(longer, folder, resume=True)
    assert evaluate(folder).accuracy == reopened(folder).accuracy
    changed(saved[1], path, **{"head.bias": torch.ones(3)})
    words = r"the weights of \[model\] start are not those that the run in .* began with: restore the file, or "
    with pytest.raises(UserError, match=words):
        bespoke.run(spec(path, rounds=4), folder, resume=True)
    with pytest.raises(UserError, match=words + "run the experiment again"):
        reopened(folder)
    path.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        reopened(folder)


def test_runs_without_start_weights_keep_their_hash():
    tables = spec().tables()
    assert tables["model"]["start"] == ""
    assert spec().hash() == replace(spec(), model=bespoke.ModelSettings(**MLP)).hash() != spec("a").hash()


def test_a_server_without_a_whole_model_has_none_to_save(tmp_path):
    run = bespoke.run(spec(algorithm="fedper", rounds=1))
    with pytest.raises(UserError, match="the server of fedper keeps no whole model to start from"):
        run.save_start(tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


class Scaled(nn.Module):
    """A model with a constant."""

    def __init__(self, scale=2.0):
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.scale * x)


class Plain(nn.Module):
    """The same without it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x)


def test_constants_must_be_those_of_the_model(tmp_path):
    task = Task(Scaled, "head", 2)
    params = task.init(rng.key(1))
    write_start(tmp_path / "x", params, task)
    assert same_tensors(read_start(str(tmp_path / "x"), task), params)
    with pytest.raises(UserError, match="its constant 'scale' is not that of this model"):
        read_start(str(tmp_path / "x"), Task(lambda: Scaled(3.0), "head", 2))
    with pytest.raises(UserError, match="its constant 'scale' is not that of this model"):
        read_start(str(tmp_path / "x"), Task(Plain, "head", 2))
    half = read_start(str(tmp_path / "x"), Task(Scaled, "head", 2, dtype=torch.float64))
    assert {leaf.dtype for leaf in half.values()} == {torch.float64}
