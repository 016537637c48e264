"""Every method over a grid that really serialises: the same numbers as one client after another, events included."""

import json

import pytest

pytest.importorskip("flwr")

from eventful_runs import assert_the_same_as_a_simulation, spoil
from flower_grid import OwnGrid, deflated, nodes_behind
from flwr.supercore.task_identity import TaskIdentity
from network_runs import Network, terms

from bespoke.algorithms import ALGORITHMS
from bespoke.flower.link import FlowerLink
from bespoke.flower.records import from_records, to_records
from bespoke.network.messages import overhead

KINDS = {"trained": "train", "unsound": "train"}  # of a reply and of its request


class Link(FlowerLink):
    """A link some of whose clients may be offline, by key."""

    network = None

    @property
    def offline(self):
        return {self.network.keys[place] for place in self.grid.offline}

    @offline.setter
    def offline(self, keys):
        self.grid.offline = {self.network.keys.index(key) for key in keys}


def spoilt(place, reply):
    """A reply of Flower's, in one round and for one client with NaN in it."""
    message = from_records(reply.content)
    told = json.loads(message.head)
    reply.content = to_records(spoil(told | {"kind": KINDS.get(told["kind"], "")}, message))
    return reply


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_method_over_a_grid_equals_its_simulation(name, tmp_path):
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 2, 3  # which Flower's messages take
    network = Network(terms(name), tmp_path)
    network.wire = Link(OwnGrid(*nodes_behind(network), spoilt))
    network.wire.network = network
    assert_the_same_as_a_simulation(name, network)
    check_sizes(network)


def check_sizes(network):
    """Every upload takes the bytes of its tree and the stated overhead, and Flower adds no more than it is said to."""
    up, checked = network.clients().answers.up, 0
    for reply in network.wire.grid.received:
        message = from_records(reply.content)
        if json.loads(message.head).get("kind") == "trained":
            size = sum(len(name.encode()) + len(content) for name, content in message.leaves)
            assert size == sum(leaf.nbytes for leaf in up.values()) + overhead(up)
            assert sum(map(len, deflated(reply).values())) - size - len(message.head) <= 600 + 350 * len(up)
            checked += 1
    assert checked > 4
