"""A whole federation: server and clients from the same experiment, rows with the clients alone, messages as bytes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from network_runs import Wire
from sklearn.datasets import load_digits
from small_runs import same_tensors

import bespoke
from bespoke.core import tree
from bespoke.network.settings import FederationSettings
from bespoke.runs import joining
from bespoke.runs.agreement import terms_of
from bespoke.runs.checkpoint import load_newest
from bespoke.runs.joining import member
from bespoke.runs.serving import serve

SCALED = ("normalise(mean=[0.03137255], deviation=[0.03137255])",)
KEYS = ("key a", "key b", "key c")
QUICK = FederationSettings(round_timeout=0.01, interval=0.001)


def experiment(algorithm="pfedfda", data=None, **changes):
    """Digits over three clients, as a contract or, with the clients' files, as its simulation."""
    contract = bespoke.DataSettings(
        name="contract",
        shape=(1, 8, 8),
        dtype="uint8",
        class_names=tuple("0123456789"),
        clients=3,
        transform=SCALED,
    )
    made = bespoke.Experiment(
        data=data or contract,
        model=bespoke.ModelSettings(name="mlp", hidden=8),
        algorithm=algorithm,
        training=bespoke.Training(rounds=3, rate=0.7, batch=32),
        evaluation=bespoke.Evaluation(every=1),
        federation=QUICK,
    )
    return replace(made, **changes)


def files(folder, clients=3):
    """Unequal shares of the digits, with test rows: one archive for each client."""
    found = load_digits()
    x, y = found.images.astype(np.uint8)[:, None], found.target
    folder.mkdir(exist_ok=True)
    paths = []
    for client, rows in enumerate(np.split(np.arange(400), [80, 220])[:clients]):
        cut = len(rows) * 4 // 5
        paths.append(folder / f"{client}.npz")
        parts = {"x": x[rows[:cut]], "y": y[rows[:cut]], "x_test": x[rows[cut:]], "y_test": y[rows[cut:]]}
        np.savez(paths[-1], **parts)
    return paths


class Members(Wire):
    """A wire to members with these files, each with a home of its own; they are made anew for each message."""

    def __init__(self, experiment, paths, homes, keys=KEYS):
        super().__init__(keys, self.member)
        self.experiment, self.paths, self.homes, self.said = experiment, paths, homes, []

    def member(self, key):
        place = self.keys.index(key)
        return member(self.experiment, self.paths[place], self.homes / key, told=self.said.append)


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["pfedfda", "fedavg", "fedrep"])
def test_a_federation_equals_its_simulation(algorithm, tmp_path):
    paths = files(tmp_path / "data")
    own, said = experiment(algorithm), []
    run = serve(own, Members(own, paths, tmp_path), tmp_path / "out", progress=False, told=said.append)
    same = bespoke.DataSettings(name="files", path=str(tmp_path / "data" / "*.npz"), num_classes=10, transform=SCALED)
    there = bespoke.run(experiment(algorithm, same), tmp_path / "loop", backend="loop", device="cpu", progress=False)
    assert same_tensors(tree.flatten(terms_of(own).params), tree.flatten(there.federation.params))
    last = [load_newest(folder / "checkpoints")[0].server for folder in (tmp_path / "out", tmp_path / "loop")]
    one, two = map(tree.flatten, last)
    assert one.keys() == two.keys() and all(float((one[n] - two[n]).abs().max()) <= 1e-6 for n in one)
    ours, theirs = lines(tmp_path / "out", "clients.jsonl"), lines(tmp_path / "loop", "clients.jsonl")
    assert len(ours) == len(theirs) == 9
    for row, other in zip(ours, theirs, strict=True):
        assert row["client"] == other["client"] and row["metrics"]["accuracy"] == other["metrics"]["accuracy"]
    for client, (name, model) in enumerate(there.models.items()):
        mine = bespoke.load_model(tmp_path / KEYS[client] / joining.MODEL)
        x = np.load(paths[client])["x_test"]
        assert float((mine.logits(x) - model.logits(x)).abs().max()) <= 1e-5, name
    assert run.notes == [] and said[-1] == "3 of 3 clients have their models"
