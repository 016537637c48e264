"""What dies in the middle of a federation of real processes, and what becomes of the run."""

import json
import shutil

import pytest

pytest.importorskip("flwr")

from flower_processes import Machines, check_equal

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]

ROUNDS = 6


@pytest.fixture
def machines(tmp_path):
    """Two clients whose rounds take some seconds."""
    with Machines(tmp_path, algorithm="fedrep", rounds=ROUNDS, options="head_epochs = 300", quorum=1) as found:
        yield found


@pytest.fixture
def running(machines):
    server, clients = machines.serve(), [machines.join(client) for client in range(2)]
    machines.in_work(1)
    return machines, server, clients


def finished(machines, processes, tmp_path, what, said):
    """Wait for the end; return who was missing in which round."""
    seconds = machines.until(lambda: all(process.poll() is not None for process in processes), "the end")
    assert [process.returncode for process in processes] == [0] * len(processes)
    print(f"{what}: finished {seconds:.0f} s later")
    assert said in "".join(machines.text(path.name) for path in machines.logs())
    rows = machines.rounds()
    assert [row["round"] for row in rows] == [*range(1, ROUNDS + 1)] and not any(row["refused"] for row in rows)
    for home in machines.homes:
        assert json.loads((home / "report.json").read_text())["round"] == ROUNDS
    check_equal(machines, tmp_path / "loop")
    return {row["round"]: row["missing"] for row in rows if row.get("missing")}


def check_who_came_back(missing):
    """Nobody was missing, or some were in one round: where the SuperLink was away for long, their nodes still wait."""
    assert len(missing) <= 1 and all("offline" in why for told in missing.values() for why in told.values())


def test_a_node_is_killed_in_a_round(running, tmp_path):
    machines, server, clients = running
    machines.kill(clients[1], "supernode")
    missing = finished(machines, [server, *clients], tmp_path, "node killed", "the node ended; it is started again")
    (_, told), *later = missing.items()
    assert list(told) == ["1"] and "during its work" in told["1"]
    assert all(told == {"1": "it was offline"} for _, told in later)  # while Flower refuses its key
    assert ROUNDS not in missing


def test_a_client_s_process_is_killed_in_a_round(running, tmp_path):
    machines, server, clients = running
    machines.kill(clients[1], "worker")
    said = "the client's process ended with code -9; it is started again"
    missing = finished(machines, [server, *clients], tmp_path, "client's process killed", said)
    ((_, told),) = missing.items()
    assert list(told) == ["1"] and "its program failed" in told["1"]


def test_the_superlink_is_killed_in_a_round(running, tmp_path):
    machines, server, clients = running
    machines.kill(server, "superlink")
    said = "it is started again, and the run goes on from its last round"
    check_who_came_back(finished(machines, [server, *clients], tmp_path, "SuperLink killed", said))


def test_the_server_is_killed_in_a_round_and_resumed(running, tmp_path):
    machines, server, clients = running
    machines.kill(server)
    server.wait()
    again = machines.serve("--resume")
    check_who_came_back(finished(machines, [again, *clients], tmp_path, "server killed", "listening"))


def test_a_killed_command_takes_its_processes_with_it(machines):
    server, client = machines.serve(), machines.join(0)
    machines.until(lambda: "waiting for 1 of 2 clients" in machines.text("server.txt"), "the client")
    started = ((server, "superlink"), (client, "supernode"), (client, "worker"))
    assert all(machines.child(*each) for each in started)
    for process in (server, client):
        machines.kill(process)
        process.wait()
    seconds = machines.until(lambda: not any(machines.child(*each) for each in started), "their end", 60)
    print(f"commands killed: what they had started ended {seconds:.0f} s later")


def test_a_client_that_lost_its_disk_begins_anew(running):
    machines, server, clients = running

    def lost():
        shutil.rmtree(machines.homes[1] / "states", ignore_errors=True)
        return "is lost, so that it begins anew" in machines.text("server.txt")

    machines.until(lost, "the server's sentence")
    seconds = machines.until(lambda: all(p.poll() is not None for p in (server, *clients)), "the end")
    assert [process.returncode for process in (server, *clients)] == [0, 0, 0]
    print(f"disk lost: finished {seconds:.0f} s later")
    missing = [list(row.get("missing", {})) for row in machines.rounds()]
    assert ["1"] in missing and missing[0] == missing[-1] == []  # it took part again
    assert json.loads((machines.homes[1] / "report.json").read_text())["round"] == ROUNDS
