"""The link over a grid that really serialises: the same numbers, and who cannot answer is named."""

import httpx
import pytest
import torch

pytest.importorskip("flwr")

from flower_grid import OwnGrid, nodes_behind, through_bytes
from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.task_identity import TaskIdentity
from network_runs import Network, data, federation, terms

from bespoke.clients import SequentialClients
from bespoke.core import tree
from bespoke.errors import UserError
from bespoke.flower import keys, link
from bespoke.flower.link import FlowerLink, LinkLost
from bespoke.flower.records import from_records, to_records
from bespoke.network.messages import Message, MessageError, encode


@pytest.fixture(autouse=True)
def task():
    """What Flower's messages take from the process that they are made in."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 2, 3


@pytest.fixture
def network(tmp_path):
    return Network(terms("pfedfda"), tmp_path)


@pytest.fixture
def grid(network):
    return OwnGrid(*nodes_behind(network))


def test_a_round_trip_keeps_every_byte():
    some = {"a": {"b": torch.arange(6.0).reshape(2, 3)}, "empty": torch.empty(0, 3), "n": torch.tensor(7)}
    sent = Message('{"kind": "é"}', encode(some))
    message = FlowerMessage(to_records(sent), 1, "query")
    received = from_records(through_bytes(message).content)
    assert received.head == sent.head and dict(received.leaves) == dict(sent.leaves)


@pytest.mark.parametrize("records", [RecordDict(), RecordDict({"head": ConfigRecord({"json": 3})})])
def test_what_is_no_message_is_refused(records):
    with pytest.raises(MessageError, match="no message"):
        from_records(records)


def test_a_federation_over_a_grid_is_the_loop(network, grid):
    own = network.terms
    network.wire = FlowerLink(grid)
    over, plain = (
        federation(own, clients)
        for clients in (
            network.clients(),
            SequentialClients(own.algorithm, own.task, own.params, data(), own.training, 5),
        )
    )
    for there, here in zip(over.rounds(), plain.rounds(), strict=True):
        assert not there.trained.missing and not there.trained.refused
        for mine, theirs in zip(tree.leaves(there.server), tree.leaves(here.server), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def test_the_link_names_who_cannot_answer(network, grid):
    own = FlowerLink(grid)
    lines = network.keys
    grid.change = lambda place, reply: None  # nobody answers
    assert own.online() == set(lines)
    own.push(dict.fromkeys(lines, Message("{}")))
    assert own.pull() == []
    grid.offline, grid.came = {0}, {1: "later"}
    assert own.online() == set(lines[1:])
    assert own.pull() == [(lines[1], "its node was started again during its work")]
    own.push({lines[0]: Message("{}")})
    assert dict(own.pull()) == {lines[0]: "its message could not be sent"}


def test_a_key_that_the_operator_did_not_register_is_not_there(network, grid):
    own = FlowerLink(grid, known=network.keys[:1])  # whoever reaches a SuperLink may register a key with it
    assert own.online() == set(network.keys[:1])
    assert FlowerLink(grid, known=[]).online() == set()


def test_an_error_is_told_as_a_text_and_an_answer_of_an_earlier_message_is_not_awaited(network, grid):
    own, first = FlowerLink(grid), network.keys[0]
    own.online()
    own.push({first: Message("no JSON")})
    assert own.pull() == [(first, "its program failed: its head is no JSON")]
    late = []
    grid.change = lambda place, reply: late.append(reply)
    own.push({first: Message("{}")})
    (earlier,) = own._pushed[first][:1]
    own.push({first: Message("{ }")})
    grid.replies[earlier] = late[0]
    assert own.pull() == []


def test_a_superlink_that_is_gone_is_lost_and_one_that_stumbles_is_asked_again(network, grid, monkeypatch):
    monkeypatch.setattr(link, "_PAUSE", 0.0)
    failures = [httpx.ConnectError("refused")]
    nodes = grid.get_nodes

    def failing():
        if failures:
            raise failures.pop()
        return nodes()

    monkeypatch.setattr(grid, "get_nodes", failing)
    assert FlowerLink(grid).online() == set(network.keys)
    failures += [httpx.ConnectError("refused")]
    with pytest.raises(LinkLost, match="refused"):
        FlowerLink(grid, alive=lambda: False).online()
    failures += [httpx.ConnectError("refused")] * 4
    with pytest.raises(LinkLost):
        FlowerLink(grid).online()
    assert not failures


def test_a_certificate_is_for_a_plain_name(tmp_path):
    with pytest.raises(UserError, match="is no name of a server"):
        keys.make_certificates(tmp_path, ["sërver"])
    assert not any(tmp_path.iterdir())
