"""A federation in one process whose every message becomes bytes and back, and whose nodes have folders of their own."""

import functools
import json
import struct
from dataclasses import replace

import torch
import toy
from torch import nn

from bespoke.algorithms import ALGORITHMS
from bespoke.core import rng, tree
from bespoke.core.data import Rows
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.network.clients import NetworkClients
from bespoke.network.ledger import Ledger, Member, fingerprint
from bespoke.network.messages import Message
from bespoke.network.node import Node
from bespoke.network.settings import FederationSettings
from bespoke.network.terms import Terms, dry_run, made_up, rows_of
from bespoke.network.versions import Versions
from bespoke.runs.federation import Evaluation, Federation

ROUNDS, SEED, POPULATION, HASH = 4, 5, 3, "0123456789abcdef"
TRAINING = Training(rounds=ROUNDS, epochs=1, batch=4, lr=0.05, momentum=0.5, keep_optimizer=True, rate=0.7)

_SIZE = struct.Struct("<I")


def to_bytes(message):
    """A message as bytes: each part after its length, the arrays backwards, since they may come in any order."""
    parts = [message.head.encode()]
    for name, content in reversed(message.leaves):
        parts += [name.encode(), content]
    return b"".join(_SIZE.pack(len(part)) + part for part in parts)


def from_bytes(content):
    """Undo it."""
    parts, place = [], 0
    while place < len(content):
        (length,) = _SIZE.unpack_from(content, place)
        place += _SIZE.size + length
        parts.append(content[place - length : place])
    names = [part.decode() for part in parts[1::2]]
    return Message(parts[0].decode(), list(zip(names, parts[2::2], strict=True)))


class Wire:
    """A link to ``node(key)``, a new one for each message, as a process of its own would be.

    ``change(request, reply)`` may return another reply, a text instead of one, several in a list, or None for none;
    the request is the head that was sent, as a table.
    """

    def __init__(self, keys, node, change=lambda request, reply: reply):
        self.keys, self.node, self.change = keys, node, change
        self.offline, self.waiting, self.received = set(), [], []

    def online(self):
        return set(self.keys) - self.offline

    def push(self, messages):
        for key, message in messages.items():
            answer = self.node(key).answer(from_bytes(to_bytes(message)))
            changed = self.change(json.loads(message.head), answer)
            for reply in changed if type(changed) is list else [changed]:
                if isinstance(reply, Message):
                    self.received.append(to_bytes(reply))
                    self.waiting.append((key, from_bytes(self.received[-1])))
                elif reply is not None:
                    self.waiting.append((key, reply))

    def pull(self):
        came, self.waiting = self.waiting, []
        return came


class Clock:
    """Seconds that pass only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@functools.cache
def task(dtype=torch.float64):
    """A net with a norm layer and a linear head."""
    return Task(functools.partial(toy.Net, norm=nn.LayerNorm), "head", toy.CLASSES, dtype=dtype)


@functools.cache
def data():
    """Three clients that train, and a new one."""
    whole, chosen = toy.data(), (0, 1, 3, 4)
    some = {split: Rows.of([getattr(whole, split).client(c) for c in chosen]) for split in ("train", "test", "val")}
    return replace(whole, **some, num_clients=POPULATION, names=whole.names[: len(chosen)])


def terms(method, training=TRAINING, task=None):
    """What server and clients have in common."""
    method = ALGORITHMS[method]() if isinstance(method, str) else method
    task = task or globals()["task"]()
    return Terms(HASH, method, task, task.init(rng.key(1)), training, SEED, POPULATION)


def federation(terms, clients):
    """A federation of these clients."""
    parts = terms.algorithm, terms.task, terms.params, clients, POPULATION, data().total_clients, terms.training
    return Federation(*parts, Evaluation(every=2), SEED)


class Network:
    """The folders of a server and its nodes, in which a federation may begin again and again."""

    def __init__(self, terms, folder, change=lambda request, reply: reply, pool=None):
        self.terms, self.pool, self.folder, self.server = terms, pool or data(), folder, folder / "server"
        self.server.mkdir(parents=True, exist_ok=True)
        self.keys = [f"key {c}" for c in range(self.pool.total_clients)]
        self.finished = {}
        self.wire = Wire(self.keys, self.node, change)

    def node(self, key):
        """A client's node, with its own rows alone."""
        client, pool, task = self.keys.index(key), self.pool, self.terms.task
        rows = {split: getattr(pool, split).client(client) for split in ("train", "test", "val")}
        extra = tree.map(lambda leaf: leaf[client], pool.extra)
        mine = {
            split: rows_of(task, pool.x[own].clone(), pool.y[own].clone(), extra, pool.transform)
            for split, own in rows.items()
            if len(own)
        }
        return Node(
            self.terms,
            mine,
            self.folder / f"client {client}",
            lambda request, personal, before: self.finished.update({client: personal}),
        )

    def clients(self, settings=FederationSettings(0.0, 1, 0.0), terms=None, **options):  # noqa: B008 - it is frozen
        """The server's side, with nothing in memory from before; its terms may be others than the nodes'."""
        terms = terms or self.terms
        train, test, val = self.pool.train.sizes, self.pool.test.sizes, self.pool.val.sizes
        members = [Member(fingerprint(key), train[c], test=test[c], val=val[c]) for c, key in enumerate(self.keys)]
        extra = tree.map(lambda leaf: leaf[0], self.pool.extra)
        answers = dry_run(terms, made_up(terms.task, self.pool.inputs, extra, self.pool.transform))
        return NetworkClients(terms, answers, Ledger(members), self.wire, settings=settings, **options)

    def versions(self, clients, client):
        """A client's states on its disk."""
        return Versions(self.folder / f"client {client}" / clients.store.federation / str(client))

    def states(self, clients):
        """The accepted states, as they are on the clients' disks."""
        members = {c: member for c, member in enumerate(clients.store.members) if member.accepted}
        return {c: self.versions(clients, c).load(m.accepted, m.version) for c, m in members.items()}
