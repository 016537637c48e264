"""One whole federation of real processes, with TLS and keys: the numbers of its simulation, and models that predict."""

import json

import numpy as np
import pytest

pytest.importorskip("flwr")

from flower_processes import Machines, check_equal
from small_runs import command


@pytest.mark.xdist_group("flower")
def test_a_whole_federation_equals_its_simulation(tmp_path):
    with Machines(tmp_path, rounds=1) as machines:
        server, _, _ = machines.serve(), *map(machines.join, range(2))
        machines.ended(server)  # the clients stay a while, in case it comes back
    check_equal(machines, tmp_path / "loop")
    assert "2 of 2 clients have their models" in machines.text("server.txt")
    for home in machines.homes:
        report = json.loads((home / "report.json").read_text())
        assert 0 <= report["before"] <= 1 and 0 <= report["after"] <= 1
    out = tmp_path / "predictions.csv"
    model, data = machines.homes[0] / "model.safetensors", tmp_path / "data" / "0.npz"
    assert command("predict", model, "--data", data, "-o", out).code == 0
    assert len(out.read_text().splitlines()) == 1 + len(np.load(data)["x"])
    assert not list(machines.out.rglob("superlink.db*"))  # it held what clients had sent
    files = [machines.out, *machines.out.rglob("*"), machines.homes[0] / "states", *machines.homes[0].rglob("*.*")]
    assert {path.stat().st_mode & 0o077 for path in files if path.name != "node.key.pub"} == {0}  # for the owner alone


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_a_federation_on_one_machine_needs_neither_tls_nor_keys(tmp_path):
    with Machines(tmp_path, rounds=1) as machines:
        joins = (machines.join(client, "--insecure", key=None, ca=None) for client in range(2))
        for process in (machines.serve("--insecure"), *joins):
            machines.ended(process)
    assert "2 of 2 clients have their models" in machines.text("server.txt")
    reports = [json.loads((home / "report.json").read_text()) for home in machines.homes]
    assert {report["client"] for report in reports} == {"0", "1"}  # by keys that Flower has made up


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
@pytest.mark.parametrize("algorithm", ["pfedfda", "fedavg", "fedrep", "pfedvmp", "self_fl"])
def test_methods_over_processes_equal_their_simulation(algorithm, tmp_path):
    with Machines(tmp_path, algorithm=algorithm) as machines:
        for process in (machines.serve(), *map(machines.join, range(2))):
            machines.ended(process)
    check_equal(machines, tmp_path / "loop")
