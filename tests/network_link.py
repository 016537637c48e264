"""A network in one process: a link that turns every message into bytes and back, and nodes with folders of their own."""

import struct

from bespoke.network.messages import Message

SIZE = struct.Struct("<I")


def to_bytes(message):
    """A message as one text of bytes: each part after its length."""
    parts = [message.head.encode()]
    for name, content in message.leaves:
        parts += [name.encode(), content]
    return b"".join(SIZE.pack(len(part)) + part for part in parts)


def from_bytes(content):
    """Undo it."""
    parts, place = [], 0
    while place < len(content):
        (length,) = SIZE.unpack_from(content, place)
        parts.append(content[place + SIZE.size : place + SIZE.size + length])
        place += SIZE.size + length
    names = [part.decode() for part in parts[1::2]]
    return Message(parts[0].decode(), list(zip(names, parts[2::2], strict=True)))


class TestLink:
    """Carries messages to ``make_node(key)``, a new node for each message, as a process of its own would be.

    ``change(key, request, reply)`` may return another reply, a text instead of one, several in a list, or None.
    """

    __test__ = False

    def __init__(self, keys, make_node, change=None):
        self.keys, self.make_node, self.change = keys, make_node, change
        self.offline, self.waiting, self.down, self.up = set(), [], 0, 0

    def online(self):
        return set(self.keys) - self.offline

    def push(self, messages):
        for key, message in messages.items():
            sent = to_bytes(message)
            self.down += len(sent)
            answer = self.make_node(key).answer(from_bytes(sent))
            reply = self.change(key, message, answer) if self.change else answer
            for each in reply if isinstance(reply, list) else [reply]:
                if isinstance(each, Message):
                    received = to_bytes(each)
                    self.up += len(received)
                    each = from_bytes(received)
                if each is not None:
                    self.waiting.append((key, each))

    def pull(self):
        came, self.waiting = self.waiting, []
        return came
