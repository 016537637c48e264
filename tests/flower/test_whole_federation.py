"""One whole federation of real processes, with TLS and keys: the numbers of its simulation, and models that predict."""

import json

import numpy as np
import pytest

pytest.importorskip("flwr")

from flower_processes import Machines
from small_runs import command

import bespoke
from bespoke.core import tree
from bespoke.runs.checkpoint import load_newest
from bespoke.runs.experiment import load


def simulated(machines, out):
    """The run of one client after another with the same rows."""
    loaded, _ = load(str(machines.experiment))
    data = bespoke.DataSettings(
        name="files", path=str(machines.folder / "data" / "*.npz"), num_classes=10, transform=loaded.data.transform
    )
    tables = {name: getattr(loaded, name) for name in ("model", "training", "evaluation", "seed")}
    same = bespoke.Experiment(data=data, algorithm=loaded.algorithm_name, **tables)
    return bespoke.run(same, out, backend="loop", device="cpu", progress=False)


def check_equal(machines, out):
    """The server's last state and every personal model are the simulation's."""
    there = simulated(machines, out)
    last = [load_newest(folder / "checkpoints")[0].server for folder in (machines.out / "run", out)]
    one, two = map(tree.flatten, last)
    assert one.keys() == two.keys() and all(float((one[n] - two[n]).abs().max()) <= 1e-6 for n in one)
    for client, model in enumerate(there.models.values()):
        mine = bespoke.load_model(machines.homes[client] / "model.safetensors")
        x = np.load(machines.folder / "data" / f"{client}.npz")["x_test"]
        assert float((mine.logits(x) - model.logits(x)).abs().max()) <= 1e-5


@pytest.mark.xdist_group("flower")
def test_a_whole_federation_equals_its_simulation(tmp_path):
    with Machines(tmp_path) as machines:
        server, clients = machines.serve(), [machines.join(client) for client in range(2)]
        for process in (server, *clients):
            machines.ended(process)
    check_equal(machines, tmp_path / "loop")
    assert "2 of 2 clients have their models" in machines.text("server.txt")
    for home in machines.homes:
        report = json.loads((home / "report.json").read_text())
        assert 0 <= report["before"] <= 1 and 0 <= report["after"] <= 1
    out = tmp_path / "predictions.csv"
    model, data = machines.homes[0] / "model.safetensors", tmp_path / "data" / "0.npz"
    assert command("predict", model, "--data", data, "-o", out).code == 0
    assert len(out.read_text().splitlines()) == 1 + len(np.load(data)["x"])
    assert not list(machines.out.glob("superlink.db*"))  # it held what clients had sent
