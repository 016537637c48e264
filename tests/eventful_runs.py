"""A federation with a refused upload, an absence and a server that dies, beside one client after another."""

import network_runs
import pytest
import torch
import toy
from network_runs import HASH, ROUNDS, SEED, TRAINING, data, federation, terms

from bespoke.clients import SequentialClients
from bespoke.core import rng
from bespoke.network.messages import Message, encode
from bespoke.records import COLUMNS
from bespoke.runs.bounds import without
from bespoke.runs.checkpoint import Checkpoint, load_newest, save


def drawn(round, place):
    """A round, and the client at this place of its cohort."""
    cohort = rng.cohort(rng.key(SEED), round, network_runs.POPULATION, TRAINING.rate, TRAINING.sampling)
    assert len(cohort) == 2
    return round, cohort[place]


REFUSED, ABSENT, LOST = drawn(2, 0), drawn(3, 1), 3  # the server dies after round 3, before its checkpoint


class Eventful(SequentialClients):
    """One client after another; one upload is refused and one never comes."""

    def train(self, round, clients, shared, own):
        trained = super().train(round, clients, shared, own)
        return without(trained, {client: "gone" for number, client in (REFUSED, ABSENT) if number == round})


def loop(method):
    """The server's state, the states of the clients, and all evaluations, of one client after another."""
    own = terms(method)
    clients = Eventful(own.algorithm, own.task, own.params, data(), own.training, SEED)
    plain, found = federation(own, clients), []
    for done in plain.rounds():
        found += plain.evaluate(done) if plain.due(done.number) else []
    return done.server, clients.states(), found


def spoil(request, reply):
    """A reply with NaN in its first array, in one round and for one client."""
    if request["kind"] != "train" or (request["round"], request["client"]) != REFUSED:
        return reply
    if not reply.leaves:  # of a method that uploads nothing
        return Message("{}")
    (name, content), *others = reply.leaves
    nan = encode({"x": torch.full((), torch.nan, dtype=torch.float64)})[0][1][-8:]
    return Message(reply.head, [(name, content[:-8] + nan), *others])


def over_a_network(network):
    """The same of a network, and its rounds."""
    clients = network.clients()
    over, found, rounds, server, first, lost = federation(network.terms, clients), [], [], None, 1, False
    clients.store.open(network.server, owner=HASH)
    while first <= ROUNDS:
        network.wire.offline = {network.keys[ABSENT[1]]} if first == ABSENT[0] else set()
        done = next(over.rounds(server, first))
        network.wire.offline = set()
        if first == LOST and not lost:
            lost, clients = True, network.clients()
            over = federation(network.terms, clients)
            like = {"like": over.start(), "clients": over.total_clients, "state": clients.sample()}
            last, notes = load_newest(network.server, "cpu", experiment_hash=HASH, **like)
            assert not notes and last.round == LOST - 1
            clients.store.open(network.server, last.states, owner=HASH)
            server, over.bound.recent = last.server, dict(last.recent)
            continue
        server = done.server
        found += over.evaluate(done) if over.due(first) else []
        rounds.append(done)
        files, ends = clients.store.flush(), dict.fromkeys(COLUMNS, 0)
        save(network.server, Checkpoint(first, server, files, ends, None, over.bound.recent), HASH)
        first += 1
    return server, network.states(clients), found, rounds


def assert_the_same_as_a_simulation(name, network):
    """Compare a method over a network, whose replies go through :func:`spoil`, with the loop."""
    server, states, found = loop(name)
    other, others, evaluated, rounds = over_a_network(network)
    assert toy.gap(server, other) <= 1e-6
    assert states.keys() == others.keys()
    assert all(toy.gap(states[client], others[client]) <= 1e-6 for client in states)
    assert [row[:4] for row in found] == [row[:4] for row in evaluated]
    assert {row.client for row in found} == {0, 1, 2, 3}  # the last one is new
    for one, two in zip(found, evaluated, strict=True):
        assert one.logged == pytest.approx(two.logged, abs=1e-6, nan_ok=True)
        assert list(one.metrics) == list(two.metrics)
        for metric, pair in one.metrics.items():
            assert pair == pytest.approx(two.metrics[metric], abs=1e-6), metric
    assert [list(done.refused) for done in rounds] == [[], [REFUSED[1]], [], []]
    assert [done.trained.missing for done in rounds] == [{}, {}, {ABSENT[1]: "it was offline"}, {}]
