"""Every method over a network of bytes: the same numbers as one client after another, through refusals and a resume."""

import functools
import json
from dataclasses import replace

import pytest
import torch
import toy
from network_link import TestLink
from torch import nn

from bespoke.algorithms import ALGORITHMS
from bespoke.clients import SequentialClients
from bespoke.core import rng, tree
from bespoke.core.data import Rows
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.network.clients import NetworkClients, Patience
from bespoke.network.ledger import Ledger, Member
from bespoke.network.messages import Message, encode
from bespoke.network.node import Node
from bespoke.network.terms import Terms, dry_run, made_up, rows_of
from bespoke.network.versions import Versions
from bespoke.runs.bounds import without
from bespoke.runs.checkpoint import Checkpoint, load_newest, save
from bespoke.runs.federation import Evaluation, Federation

ROUNDS, SEED, POPULATION = 4, 5, 3
TRAINING = Training(rounds=ROUNDS, epochs=1, batch=4, lr=0.05, momentum=0.5, keep_optimizer=True, rate=0.7)
REFUSED, ABSENT, RESUMED = (2, 0), (3, 1), 3  # round and place in the cohort; the round after which the server dies
HASH = "0123456789abcdef"


@functools.cache
def task():
    """A net with a norm layer and a linear head."""
    return Task(functools.partial(toy.Net, norm=nn.LayerNorm), "head", toy.CLASSES, dtype=torch.float64)


@functools.cache
def data():
    """Three clients that train, and a new one."""
    whole = toy.data()
    some = {split: Rows.of([getattr(whole, split).client(c) for c in (0, 1, 3, 4)]) for split in ("train", "test", "val")}
    return replace(whole, **some, num_clients=POPULATION, names=whole.names[:4])


def terms(name):
    params = task().init(rng.key(1))
    return Terms(HASH, ALGORITHMS[name](), task(), params, TRAINING, SEED, POPULATION)


def event(spec):
    """The round and the client that something happens to."""
    number, place = spec
    return number, rng.cohort(rng.key(SEED), number, POPULATION, TRAINING.rate, TRAINING.sampling)[place]


class Eventful(SequentialClients):
    """One client after another; one upload is refused and one never comes."""

    def train(self, round, clients, shared, own):
        trained = super().train(round, clients, shared, own)
        return without(trained, {c: "gone" for number, c in map(event, (REFUSED, ABSENT)) if number == round})


def federation(terms, clients):
    evaluation = Evaluation(every=2)
    total = data().total_clients
    return Federation(terms.algorithm, terms.task, terms.params, clients, POPULATION, total, TRAINING, evaluation, SEED)


def loop(name):
    """The server's state, the states of the clients, and all evaluations of the loop."""
    own = terms(name)
    clients = Eventful(own.algorithm, own.task, own.params, data(), TRAINING, SEED)
    plain, found = federation(own, clients), []
    for done in plain.rounds():
        found += plain.evaluate(done) if plain.due(done.number) else []
    return done.server, clients.states(), found


def spoil(key, message, answer):
    """A reply with NaN in it, in one round and for one client."""
    request, reply = json.loads(message.head), json.loads(answer.head)
    if reply["kind"] != "trained" or (request["round"], request["client"]) != event(REFUSED):
        return answer
    if not answer.leaves:  # a method that uploads nothing
        return Message("{}", [])
    name, content = answer.leaves[0]
    wrong = encode({"x": torch.full((), torch.nan, dtype=torch.float64)})[0][1][-8:]
    return Message(answer.head, [(name, content[:-8] + wrong), *answer.leaves[1:]])


class Network:
    """A federation over the test link, with the folders of its server and its nodes."""

    def __init__(self, name, folder):
        self.name, self.folder, self.server = name, folder, folder / "server"
        self.server.mkdir()
        self.keys = [f"key {c}" for c in range(data().total_clients)]

    def node(self, key):
        client = self.keys.index(key)
        rows = {split: getattr(data(), split).client(client) for split in ("train", "test")}
        mine = {split: rows_of(task(), data().x[index], data().y[index]) for split, index in rows.items()}
        return Node(terms(self.name), mine, self.folder / key)

    def started(self):
        """New clients and a federation of them, with nothing in memory from before."""
        own = terms(self.name)
        members = [Member(key, data().train.sizes[c]) for c, key in enumerate(self.keys)]
        self.link = TestLink(self.keys, self.node, spoil)
        answers = dry_run(own, made_up(task(), data().inputs))
        clients = NetworkClients(own, answers, Ledger(members), self.link, patience=Patience(0.0, 1, 0.0))
        return clients, federation(own, clients)

    def run(self):
        """The server's state, the accepted states of the clients, all evaluations and the rounds."""
        clients, over = self.started()
        clients.store.open(self.server, owner=HASH)
        found, rounds, server, first = [], [], None, 1
        while first <= ROUNDS:
            if first == RESUMED + 1:
                clients, over = self.started()
                last, notes = load_newest(
                    self.server,
                    "cpu",
                    experiment_hash=HASH,
                    like=over.start(),
                    clients=over.total_clients,
                    state=clients.sample(),
                )
                assert not notes and last.round == RESUMED
                clients.store.open(self.server, last.states, owner=HASH)
                server, over.bound.recent = last.server, dict(last.recent)
            number, absent = event(ABSENT)
            self.link.offline = {self.keys[absent]} if first == number else set()
            done = next(over.rounds(server, first))
            server = done.server
            self.link.offline = set()
            found += over.evaluate(done) if over.due(first) else []
            rounds.append(done)
            save(self.server, Checkpoint(first, server, clients.store.flush(), {}, {}, over.bound.recent), HASH)
            first += 1
        states = {}
        for c, member in enumerate(clients.store.members):
            if member.accepted:
                kept = Versions(self.folder / member.key / clients.store.federation / str(c))
                states[c] = kept.load(member.accepted, member.version)
        return server, states, found, rounds


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_federation_over_a_network_equals_its_simulation(name, tmp_path):
    server, states, found = loop(name)
    other, others, evaluated, rounds = Network(name, tmp_path).run()
    assert toy.gap(server, other) <= 1e-6
    assert states.keys() == others.keys()
    assert all(toy.gap(states[c], others[c]) <= 1e-6 for c in states)
    assert [(e.client, e.split, e.view, e.total) for e in found] == [
        (e.client, e.split, e.view, e.total) for e in evaluated
    ]
    assert {e.client for e in found} == {0, 1, 2, 3}  # the last one is new
    for one, two in zip(found, evaluated, strict=True):
        assert list(one.metrics) == list(two.metrics)
        assert one.logged == pytest.approx(two.logged, abs=1e-6, nan_ok=True)
        for metric, pair in one.metrics.items():
            assert pair == pytest.approx(two.metrics[metric], abs=1e-6), metric
    assert [list(done.refused) for done in rounds] == [[], [event(REFUSED)[1]], [], []]
    assert [done.trained.missing for done in rounds] == [{}, {}, {event(ABSENT)[1]: "it was offline"}, {}]


def test_leaves_differ_between_clients_and_rounds():
    """What the comparison above would not notice if nothing ever changed."""
    server, states, _ = loop("ditto")
    start = federation(terms("ditto"), None).start()
    assert toy.gap(server, start) > 1e-3 and toy.gap(states[0], states[1]) > 1e-3
    assert tree.nbytes(start) > 0
