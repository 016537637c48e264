"""Who is not let in, each with a sentence: real processes."""

import signal
import time

import numpy as np
import pytest

pytest.importorskip("flwr")

from flower_processes import Machines
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
from small_runs import command

from bespoke.flower import children, keys
from bespoke.flower.tasks import control

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """A server that waits for two clients, of which one is there."""
    with Machines(tmp_path_factory.mktemp("machines")) as found:
        found.serve("--wait", "900")
        found.join(0)
        found.until(lambda: "waiting for 1 of 2 clients" in found.text("server.txt"), "the first client")
        yield found


def refused(machines, *more, code=2, patience=60, **changes):
    """What a second client is told."""
    home = machines.folder / "stranger"
    process = machines.join(1, *more, log="stranger.txt", **({"home": home} | changes))
    before = len(machines.text("stranger.txt"))
    machines.ended(process, code, patience)
    return machines.text("stranger.txt")[before:]


def test_a_key_that_is_not_registered(machines):
    keys.make_key(machines.folder / "stranger.key")
    assert "does not know this client's key" in refused(machines, key=machines.folder / "stranger.key")


def test_another_authority(machines):
    keys.make_certificates(machines.folder / "others", ["127.0.0.1"])
    told = refused(machines, ca=machines.folder / "others" / keys.CA)
    assert "shows a certificate that --ca" in told and "does not vouch for" in told


def test_without_tls(machines):
    assert "speaks TLS: leave out --insecure" in refused(machines, "--insecure", key=None, ca=None)


def test_a_second_node_with_a_live_key(machines):
    told = refused(machines, key=machines.homes[0] / "node.key", patience=200)
    assert "another client with the same key is connected" in told


def test_another_experiment(machines):
    other = machines.folder / "other.toml"
    other.write_text(machines.experiment.read_text().replace("batch = 32", "batch = 16"))
    assert "the server runs another experiment" in refused(machines, experiment=other)
    machines.until(lambda: "another experiment" in machines.text("server.txt"), "the server's sentence", 20)


def test_data_that_break_the_contract(machines):
    data = machines.folder / "narrow.npz"
    np.savez(data, x=np.zeros((20, 63), np.uint8), y=np.zeros(20, np.int64))
    assert "breaks the contract of the federation" in refused(machines, data=data)


def test_a_home_that_is_in_use(machines):
    assert "is in use by another process" in refused(machines, home=machines.homes[0])


def test_a_servers_folder_that_is_in_use(machines):
    words = ("serve", machines.experiment, "--out", machines.out, "--certificates", machines.certificates)
    elsewhere = ("--register", machines.public, "--address", f"127.0.0.1:{children.free_port()}")
    machines.ended(machines.start("second.txt", *words, *elsewhere), 2, 60)
    assert "is in use by another process" in machines.text("second.txt")


def test_status_shows_who_is_there(machines):
    shown = command("federation", "status", machines.address, "--ca", machines.certificates / keys.CA)
    assert shown.code == 0 and shown.out.count("client ") == 2 and ": online since" in shown.out and "run " in shown.out


def test_status_without_the_servers_certificate(tmp_path):
    shown = command("federation", "status", "127.0.0.1:9", "--ca", tmp_path / "ca.crt")
    assert shown.code == 2 and "ca.crt is no file" in shown.err


def test_a_key_that_a_stranger_has_registered(machines):
    line = keys.make_key(machines.folder / "crept.key")
    with control(machines.address, (machines.certificates / keys.CA).read_bytes()) as client:
        client.RegisterNode(RegisterNodeRequest(public_key=keys.pem_of_line(line)))
        process = machines.join(1, log="crept.txt", home=machines.folder / "crept", key=machines.folder / "crept.key")

        def there():
            nodes = client.ListNodes(ListNodesRequest()).nodes_info
            return line in {keys.line_of_pem(node.public_key) for node in nodes if node.status == "online"}

        machines.until(there, "the stranger")
    time.sleep(3.0)  # long enough to be asked for its rows
    assert "Received" not in (machines.folder / "crept" / "node.log").read_text()
    children.stop(process)
    told = machines.text("server.txt")
    assert "waiting for 1 of 2 clients" in told and "here" not in told


def test_who_is_stopped_says_how_to_go_on(tmp_path):
    with Machines(tmp_path) as machines:
        server = machines.serve()
        client = machines.join(0)
        machines.until(lambda: "waiting for 1 of 2 clients" in machines.text("server.txt"), "the first client")
        for process, log, code in ((client, "client0.txt", 130), (server, "server.txt", 130)):
            process.send_signal(signal.SIGINT)
            machines.ended(process, code, 60)
            assert machines.text(log).splitlines()[-1].startswith("bespoke: stopped: ")
