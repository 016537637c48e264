"""A grid in this process that turns every message into Flower's bytes and back, with nodes of ours behind it."""

from types import SimpleNamespace

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from bespoke.flower import keys
from bespoke.flower.client_app import answered


def public_keys(number):
    """Public keys as Flower tells them."""
    return [public_key_to_bytes(ec.generate_private_key(ec.SECP256R1()).public_key()) for _ in range(number)]


def nodes_behind(network):
    """Give a network's clients real public keys; return these, and the nodes by place."""
    pems = public_keys(len(network.keys))
    network.keys = [keys.line_of_pem(pem) for pem in pems]
    return pems, lambda place: network.node(network.keys[place])


def deflated(message):
    """The objects that Flower sends for a message, by name: bytes."""
    return {name: part.deflate() for name, part in get_all_nested_objects(message).items()}


def through_bytes(message):
    """A message after Flower's own way over a wire."""
    contents = deflated(message)
    received = inflate_object_from_contents(message.object_id, contents)
    received.metadata.__dict__["_message_id"] = message.object_id
    return received


class OwnGrid(Grid):
    """Answers at once; ``change(node, reply)`` may return another reply, or None for none."""

    def __init__(self, pems, node, change=lambda place, reply: reply):
        self.pems, self.node, self.change = pems, node, change
        self.offline, self.came, self.replies, self.received = set(), {}, {}, []

    def set_run(self, run):
        raise NotImplementedError

    run = create_message = send_and_receive = None

    def get_node_ids(self):
        return [node.node_id for node in self.get_nodes()]

    def get_nodes(self):
        return [
            SimpleNamespace(node_id=2**63 + place, public_key=pem, last_activated_at=self.came.get(place, "first"))
            for place, pem in enumerate(self.pems)
            if place not in self.offline
        ]

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            place = message.metadata.dst_node_id - 2**63
            message.metadata.__dict__["_message_id"] = message.object_id
            asked = through_bytes(message)
            reply = self.change(place, answered(self.node(place), asked)[0])
            if isinstance(reply, Message):
                self.replies[message.object_id] = through_bytes(reply)
                self.received.append(reply)
            numbers.append(message.object_id)
        return numbers

    def pull_messages(self, numbers):
        return [self.replies.pop(number) for number in numbers if number in self.replies]
