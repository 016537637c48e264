"""What strangers who reach a SuperLink of ours can do: a real one, without any node."""

import hashlib

import httpx
import pytest

pytest.importorskip("flwr")

from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import StartRunRequest, StopRunRequest
from flwr.supercore.fab import Fab

from bespoke.flower import children, keys, tasks
from bespoke.flower.link import LinkLost
from bespoke.flower.server import APP, SuperLink, supervised

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("flower"),
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),  # Flower's own
]


@pytest.fixture(scope="module")
def superlink(tmp_path_factory):
    folder = tmp_path_factory.mktemp("superlink")
    keys.make_certificates(folder / "certificates", ["127.0.0.1"])
    found = SuperLink(folder / "server", "127.0.0.1", children.free_port(), folder / "certificates")
    try:
        found.start()
        yield found
    finally:
        found.stop()


def submit(superlink):
    """Start a run as anybody can who has the authority's certificate; return its number."""
    content = build_fab_from_disk(APP)
    fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
    with tasks.control(superlink.api.address, superlink.ca) as client:
        return client.StartRun(StartRunRequest(fab=fab)).run_id


def test_a_task_is_given_to_nobody_without_the_secret(superlink):
    submit(superlink)
    with superlink.api._replace(secret=b"x" * 32).client() as stranger, pytest.raises(httpx.HTTPStatusError) as error:
        tasks.acquire(stranger, "flwr-serverapp")
    assert error.value.response.status_code == 401


def test_a_foreign_run_is_not_carried_out(superlink):
    foreign = submit(superlink)
    with superlink.run(60.0):  # which waits for the task of its own run, and gives others back
        runs = tasks.runs(superlink.api.address, superlink.ca)
        (ended,) = [run.status for run in runs if run.run_id == foreign]
        assert (ended.status, ended.sub_status) == ("finished", "failed")


def test_a_run_that_somebody_stops_begins_again(superlink):
    attempts, said = [], []

    def work(link, attempt):
        attempts.append(attempt)
        if not attempt:
            with tasks.control(superlink.api.address, superlink.ca) as client:
                client.StopRun(StopRunRequest(run_id=link.grid.run.run_id))
        return link.online()

    assert supervised(superlink, 60.0, work, said.append) == set()
    assert attempts == [0, 1] and "it is started again" in said[0]


def test_a_superlink_that_is_gone_is_lost(superlink):
    with superlink.run(60.0) as link:
        superlink.stop()
        with pytest.raises(LinkLost):
            link.online()
