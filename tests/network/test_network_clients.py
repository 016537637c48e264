"""Clients that live elsewhere: who is missed, who is refused, and what survives on either side."""

import json
import logging
from dataclasses import dataclass, replace
from typing import final

import pytest
import torch
import toy
from network_runs import HASH, SEED, TRAINING, Clock, Network, data, federation, task, terms

from bespoke.algorithms import ALGORITHMS, method_class
from bespoke.clients import SequentialClients
from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.errors import UserError
from bespoke.network.checks import check_upload
from bespoke.network.clients import NetworkClients
from bespoke.network.ledger import Ledger, Member, fingerprint
from bespoke.network.messages import Message, MessageError
from bespoke.network.settings import FederationSettings
from bespoke.network.terms import dry_run, made_up
from bespoke.network.versions import Versions
from bespoke.runs.federation import Evaluation

FULL = replace(TRAINING, rate=1.0)


def rounds(network, clients, count=1, server=None, first=1):
    """So many rounds of a federation of all clients."""
    over = federation(network.terms, clients)
    done = []
    for number in range(first, first + count):
        done.append(next(over.rounds(server, number)))
        server = done[-1].server
    return done


@pytest.fixture
def network(tmp_path):
    """A federation of three clients that keep a personal model."""
    return Network(terms("ditto", FULL), tmp_path)


# --- who answers ---------------------------------------------------------------------------------------------------


def test_offline_clients_are_named_at_once_and_late_ones_after_the_time(network):
    clients = network.clients()
    network.wire.offline = {"key 0"}
    network.wire.change = lambda request, reply: None if request["client"] == 1 else reply
    (done,) = rounds(network, clients)
    assert done.trained.missing == {0: "it was offline", 1: "it did not answer within 0 s"}
    assert done.uploads.clients.tolist() == [2] and not done.refused
    assert [clients.took_part(client) for client in range(4)] == [False, False, True, False]


def test_with_nobody_there_a_round_changes_nothing(network):
    clients = network.clients()
    network.wire.offline = set(network.keys)
    (done,) = rounds(network, clients)
    assert len(done.trained.missing) == 3 and "no upload was accepted" in done.note
    assert toy.same_bits(done.server, federation(network.terms, clients).start())
    assert clients.evaluate(1, range(4), *federation(network.terms, clients).down(done.server, range(4))) == []


def test_a_transport_may_say_why_there_is_no_answer(network):
    network.wire.change = lambda request, reply: "its app\nended" if request["client"] == 1 else reply
    (done,) = rounds(network, network.clients())
    assert done.trained.missing == {1: r"its app\nended"}


def test_below_the_quorum_a_round_does_not_count_and_nobody_is_blamed(network):
    clients = network.clients(FederationSettings(0.0, quorum=3, interval=0.0))
    network.wire.offline = {"key 0"}
    (done,) = rounds(network, clients)
    assert done.refused == dict.fromkeys([1, 2], "only 2 sound uploads came, and the quorum is 3")
    assert [member.strikes for member in clients.store.members] == [0, 0, 0, 0]
    assert toy.same_bits(done.server, federation(network.terms, clients).start())


def test_late_and_repeated_answers_do_not_count_and_end_no_waiting(network):
    clients, kept = network.clients(), {}

    def late(request, reply):
        kept.setdefault(request["client"], []).append(reply)
        old = kept[request["client"]][:-1]
        return [*old, reply, reply]

    network.wire.change = late
    done = rounds(network, clients, 3)
    assert [round.uploads.clients.tolist() for round in done] == [[0, 1, 2]] * 3
    assert not any(round.refused or round.trained.missing for round in done)
    network.wire.change = lambda request, reply: kept[0] * 3 if request["client"] == 0 else reply
    (last,) = rounds(network, clients, 1, done[-1].server, 4)
    assert last.trained.missing == {0: "it did not answer within 0 s"} and not last.refused


def test_three_refusals_in_a_row_put_a_client_in_quarantine(network):
    clients = network.clients()
    spoiled = {1: (1, 2, 4), 2: (1, 2, 3)}  # rounds by client

    def change(request, reply):
        wrong = request["kind"] == "train" and request["round"] in spoiled.get(request["client"], ())
        return Message("nonsense") if wrong else reply

    network.wire.change = change
    done = rounds(network, clients, 4)
    why = "its head is no JSON"
    full = f"{why}; after 3 such uploads in a row it is in quarantine"
    assert [round.refused for round in done] == [{1: why, 2: why}, {1: why, 2: why}, {2: full}, {1: why}]
    assert done[3].trained.missing == {2: "it is in quarantine, since 3 uploads in a row were refused"}
    assert clients.notes == ["client 2 is in quarantine after round 3: 3 uploads in a row were refused"]
    assert [member.strikes for member in clients.store.members] == [0, 1, 3, 0]


def test_an_upload_beyond_the_bound_is_a_refusal_too(tmp_path):
    network = Network(terms("fedavg", FULL), tmp_path)
    clients = network.clients()
    over, shift = federation(network.terms, clients), tree.map(lambda x: x + 1e9, network.terms.params)
    done = next(over.rounds())
    plain = NetworkClients._upload

    def large(self, client, reply, message):
        return {"model": shift} if client == 1 else plain(self, client, reply, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NetworkClients, "_upload", large)
        done = next(over.rounds(done.server, 2))
    assert "beyond [training] bound" in done.refused[1]
    assert [member.strikes for member in clients.store.members] == [0, 1, 0, 0]
    assert [member.accepted for member in clients.store.members] == [2, 1, 2, 0]


def test_a_lone_client_beyond_the_bound_is_refused_until_it_is_in_quarantine(tmp_path):
    network = Network(terms("fedavg", FULL), tmp_path)
    clients, shift = network.clients(), tree.map(lambda x: x + 1e9, network.terms.params)
    over = federation(network.terms, clients)
    server = next(over.rounds()).server
    network.wire.offline = {"key 0", "key 2"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NetworkClients, "_upload", lambda *_: {"model": shift})
        for number in (2, 3, 4):
            done = next(over.rounds(server, number))
            assert "beyond [training] bound" in done.refused[1] and toy.same_bits(done.server, server)
    assert [member.strikes for member in clients.store.members] == [0, 3, 0, 0]
    assert clients.notes == ["client 1 is in quarantine after round 4: 3 uploads in a row were refused"]


def test_a_step_of_the_servers_that_fails_blames_nobody(tmp_path):
    network = Network(terms("fedavg", FULL), tmp_path)
    clients = network.clients()
    over = federation(network.terms, clients)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(network.terms.algorithm), "aggregate", lambda *_: {"model": {"x": torch.tensor(torch.nan)}})
        done = next(over.rounds())
    assert list(done.refused) == [0, 1, 2] and [member.strikes for member in clients.store.members] == [0] * 4


def test_only_those_who_answered_can_be_accepted(network):
    clients = network.clients()
    over = federation(network.terms, clients)
    clients.train(1, [0, 1], *over.down(over.start(), [0, 1]))
    with pytest.raises(ValueError, match=r"clients \[2\] cannot be accepted"):
        clients.accept([0, 2])


@final
@dataclass(frozen=True)
class Fails(Algorithm):
    """Fails on a client with eight rows, and tells its secret."""

    def client_update(self, local, state, down):
        if int(local.n) == 8:
            raise RuntimeError("the secret is 42")
        return state, down

    def personalize(self, local, state, down):
        return down["model"]


def test_a_failing_client_is_refused_and_its_error_stays_with_it(tmp_path, caplog):
    network = Network(terms(Fails(), FULL), tmp_path)
    with caplog.at_level(logging.CRITICAL, "bespoke.node"):
        (done,) = rounds(network, network.clients())
    assert done.refused == {2: "its work failed with RuntimeError"} and data().train.sizes[2] == 8
    assert not any(b"42" in sent and b"secret" in sent for sent in network.wire.received)


@final
@dataclass(frozen=True)
class Unsound(Algorithm):
    """Has NaN in its upload or in its state."""

    where: str = "up"

    def client_init(self, task, params, client):
        return {"own": torch.zeros(())}

    def client_update(self, local, state, down):
        good, bad = torch.ones(()), torch.tensor(torch.nan)
        kept, up = (bad if self.where == part else good for part in ("state", "up"))
        return {"own": kept}, {"x": up}

    def personalize(self, local, state, down):
        return down["model"]


@pytest.mark.parametrize(("where", "word"), [("up", "upload"), ("state", "state")])
def test_an_answer_that_is_not_finite_is_refused_with_the_words_of_a_simulation(where, word, tmp_path):
    own = terms(Unsound(where), FULL)
    network = Network(own, tmp_path)
    clients = network.clients()
    simulated = SequentialClients(own.algorithm, own.task, own.params, data(), FULL, SEED)
    down = {"model": own.params}
    one, two = (each.train(1, [0, 1, 2], down, {}) for each in (clients, simulated))
    assert one.refused == two.refused == dict.fromkeys([0, 1, 2], f"its {word} holds NaN or inf")
    assert not list(tmp_path.glob("**/*.state"))


# --- what survives -------------------------------------------------------------------------------------------------


def test_a_client_that_lost_its_state_says_so_and_begins_anew(network):
    clients = network.clients()
    (done,) = rounds(network, clients)
    for path in network.versions(clients, 1).folder.iterdir():
        path.unlink()
    (second,) = rounds(network, clients, 1, done.server, 2)
    assert second.trained.missing == {1: "its state of round 1 is lost, so that it begins anew"}
    assert clients.notes == ["client 1 has lost its state of round 1 and begins anew"] and not clients.took_part(1)
    (third,) = rounds(network, clients, 1, second.server, 3)
    assert not third.trained.missing and clients.took_part(1)


def test_a_client_cannot_make_another_one_begin_anew(network):
    clients = network.clients()

    def change(request, reply):
        told = {"kind": "lost", "client": 0}
        return Message(json.dumps(json.loads(reply.head) | told)) if request["client"] == 2 else reply

    (done,) = rounds(network, clients)
    network.wire.change = change
    (second,) = rounds(network, clients, 1, done.server, 2)
    assert [member.accepted for member in clients.store.members][:2] == [2, 2]
    assert 2 in second.trained.missing


def test_old_versions_are_removed_once_no_checkpoint_needs_them(network):
    clients, found = network.clients(), []
    clients.store.open(network.server, owner=HASH)
    server = None
    for number in range(1, 5):
        (done,) = rounds(network, clients, 1, server, number)
        server = done.server
        clients.store.flush()
        found.append(sorted(int(path.name[:6]) for path in network.versions(clients, 0).folder.iterdir()))
    assert found == [[1], [1, 2], [1, 2, 3], [2, 3, 4]]  # in round 4 the checkpoints of rounds 2 and 3 are there


def test_versions_are_whole_exact_and_never_replaced(tmp_path):
    versions = Versions(tmp_path / "a" / "b")
    kept = {"state": {"z": torch.arange(3.0), "a": torch.tensor(True)}, "moments": {}}
    first, second = versions.save(7, kept), versions.save(7, {"state": {}, "moments": {}})
    assert first != second and list(versions.load(7, first)["state"]) == ["z", "a"]
    assert toy.same_bits(versions.load(7, first), kept) and versions.load(7, second) == {"state": {}, "moments": {}}
    assert versions.load(6, first) is None and versions.load(7, "0" * 16) is None
    path = next(tmp_path.glob(f"a/b/*{first}*"))
    content = path.read_bytes()
    for damaged in (content[:-1], content[:10], b"", content[:60] + b"x" + content[61:]):
        path.write_bytes(damaged)
        assert versions.load(7, first) is None
    for name in ("note.txt", f".000007-{first}.state.{first}.tmp", f".000008-{first}.state.{first}.tmp"):
        (tmp_path / "a" / "b" / name).touch()  # two processes died while they wrote
    versions.forget(8)
    left = sorted(each.name for each in (tmp_path / "a" / "b").iterdir())
    assert left == [f".000008-{first}.state.{first}.tmp", "note.txt"]


def test_a_ledger_comes_back_from_its_files_and_refuses_another_roster(tmp_path):
    a, b = map(fingerprint, "ab")
    members = [Member(a, 5, 3, "ab" * 8, 1), Member(b, 6), Member()]
    ledger = Ledger([replace(member) for member in members])
    ledger.open(tmp_path, owner=HASH)
    files = ledger.flush()

    def opened(*roster):
        again = Ledger([Member(key, rows) for key, rows in roster])
        again.open(tmp_path, files, owner=HASH)
        return again

    for roster in ([(a, 5), (b, 6), ("", 0)], [("", 0)] * 3):  # the same one, or none before the files are read
        again = opened(*roster)
        assert again.members == members and again.federation == ledger.federation
    for roster, why in {
        ((b, 6), (a, 5), ("", 0)): "client 0 of the roster has another key",
        ((a, 5), (b, 7), ("", 0)): "client 1 of the roster has another key or another number of rows",
        ((a, 5),): "has 3 clients, and the roster 1",
    }.items():
        with pytest.raises(UserError, match=why):
            opened(*roster)
    with pytest.raises(UserError, match="two clients of the roster have the same key"):
        Ledger([Member(a, 1), Member(a, 2)])
    with pytest.raises(UserError, match="client 1 of the roster has no train rows"):
        Ledger([Member(a, 1), Member(b, 0)])


@pytest.mark.parametrize("name", ["fedrep", "pfedfda", "fedavg_ft", "fedpac"])
def test_the_personal_models_stay_with_the_clients_and_equal_those_of_a_simulation(name, tmp_path):
    own = terms(name, FULL)
    network = Network(own, tmp_path)
    clients = network.clients()
    simulated = SequentialClients(own.algorithm, own.task, own.params, data(), FULL, SEED)
    (one,), over = rounds(network, clients), federation(own, simulated)
    two = next(over.rounds())
    assert toy.gap(one.server, two.server) <= 1e-6
    network.wire.received.clear()
    network.wire.offline = {"key 1"}
    down = over.down(one.server, range(4))
    assert clients.finish(1, range(4), *down) == ({1: "it was offline"}, {})
    models = simulated.personal(1, range(4), *down)
    assert network.finished.keys() == {0, 2, 3}  # the last one is new
    assert all(toy.gap(network.finished[client], models[client]) <= 1e-6 for client in network.finished)
    assert all(len(sent) < 1000 for sent in network.wire.received)


# --- what an upload may be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if method_class(name).claims])
def test_every_method_keeps_its_claims_in_single_precision(name, tmp_path):
    own = terms(name, FULL, task(torch.float32))
    network = Network(own, tmp_path)
    done = rounds(network, network.clients(), 2)
    assert not any(round.refused or round.trained.missing for round in done)
    assert {claimed for claimed, _ in own.algorithm.claims} <= done[0].uploads.tree.keys()


@pytest.mark.parametrize(
    ("name", "part", "wrong", "why"),
    [
        ("pfedfda", "cov", -1.0, "is not positive semi-definite"),
        ("fedlda", "cov", -1.0, "is not positive semi-definite"),
        ("pfedvmp", "precision", -1.0, "is not positive semi-definite"),
        ("pfedvmp", "count", 12.0, "is not between 0 and the client's number of rows"),
        ("fedproto", "rows", -0.5, "is not between 0 and the client's number of rows"),
        ("pfedgp", "learned", 1.5, "is not between 0 and 1"),
        ("self_fl", "sigma", -1e-9, "is negative"),
        ("fedpac", "variance", -1e-9, "is negative"),
        ("fedavg", "model", torch.inf, "its upload holds NaN or inf"),
    ],
)
def test_an_upload_that_breaks_a_claim_is_refused(name, part, wrong, why):
    own = terms(name)
    up = {
        n: torch.zeros(leaf.shape, dtype=leaf.dtype)
        for n, leaf in dry_run(own, made_up(task(), data().inputs)).up.items()
    }
    check_upload(own.algorithm, tree.unflatten(up), 11)
    bad = next(n for n in up if n.split("/")[0] == part)
    up[bad] = torch.full_like(up[bad], wrong)
    with pytest.raises(MessageError, match=why):
        check_upload(own.algorithm, tree.unflatten(up), 11)


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        ("odd", "claims that its 'model' is 'odd': use one of spd, rows"),
        ("spd", r"packed matrices, but its shape is \(5, 4\)"),
    ],
)
def test_a_claim_that_cannot_be_is_refused_before_the_first_round(claim, why, tmp_path):
    class Claims(Fails):
        claims = (("model", claim),)

    with pytest.raises(UserError, match=why):
        Network(terms(Claims()), tmp_path).clients()


def test_a_matrix_off_the_diagonal_is_seen_and_rounding_is_not():
    method = ALGORITHMS["fedlda"]()
    for cov, sound in {(1.0, 1.0, 1.0): True, (1.0, 1.000001, 1.0): True, (1.0, 1.1, 1.0): False}.items():
        up = {"body": {}, "mean": torch.zeros(1), "cov": torch.tensor(cov)}  # the lower triangle of a 2 x 2 matrix
        if sound:
            check_upload(method, up, 1)
        else:
            with pytest.raises(MessageError):
                check_upload(method, up, 1)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"kind": "evaluated"}, "it did not do what it was asked for: it answered 'evaluated'"),
        ({"kind": "failed", "why": "no\nroom"}, r"no\nroom"),
        ({"kind": "lost"}, "it did not do what it was asked for: it answered 'lost'"),  # it never had a state
        ({"kind": "unsound", "why": "mood"}, "it did not do what it was asked for: mood"),
        ({"version": "../../x"}, "its answer names no state"),
        ({"experiment": "f" * 16}, "its answer is of another experiment or run"),
        ({"federation": "f" * 16}, "its answer is of another experiment or run"),
        ({"client": 2}, "its answer is of another client or round"),
        ({"round": 0}, "its answer is of another client or round"),
        ({"logged": {}}, "it logs other values than its method does"),
        ({"logged": {"loss": 0.5, "bytes_up": "1"}}, "it logs other values than its method does"),
        ({"logged": {"loss": 0.5, "bytes_up": -1.0}}, "it logs -1.0 as 'bytes_up'"),
        ({"logged": {"loss": 0.5, "bytes_up": float("nan")}}, "it logs nan as 'bytes_up'"),
        ({"logged": {"loss": 0.5, "bytes_up": 1e300}}, "it logs 1e+300 as 'bytes_up'"),
    ],
)
def test_an_answer_that_was_not_asked_for_is_refused(told, why, tmp_path):
    network = Network(terms("fedproto", FULL), tmp_path)

    def change(request, reply):
        return reply._replace(head=json.dumps(json.loads(reply.head) | told)) if request["client"] == 1 else reply

    network.wire.change = change
    (done,) = rounds(network, network.clients())
    assert done.refused == {1: why} and done.uploads.clients.tolist() == [0, 2]


def test_a_loss_that_is_not_finite_is_recorded_as_in_a_simulation(tmp_path):
    network = Network(terms("fedavg", FULL), tmp_path)

    def change(request, reply):
        return reply._replace(head=json.dumps(json.loads(reply.head) | {"logged": {"loss": float("nan")}}))

    network.wire.change = change
    (done,) = rounds(network, network.clients())
    assert not done.refused and all(loss != loss for loss in done.trained.logged["loss"])


# --- what a message tells -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ditto", "fedpce"])
def test_rounds_and_adaptation_are_as_the_server_says(name, tmp_path):
    """A run may be lengthened, and new clients may adapt for longer, without a word to the clients before."""
    here = replace(FULL, rounds=8, schedule="cosine", schedule_rounds=0)
    network = Network(terms(name, replace(here, rounds=4)), tmp_path)
    own, adaptation = terms(name, here), {"adapt_rounds": 3, "adapt_epochs": 2}
    clients = network.clients(terms=own, **adaptation)
    simulated = SequentialClients(own.algorithm, own.task, own.params, data(), here, SEED, **adaptation)
    found = []
    for each in (clients, simulated):
        over = federation(own, each)
        first = next(over.rounds())
        second = next(over.rounds(first.server, 2))
        found.append((second.server, over.evaluate_with(2, second.server)))
    assert toy.gap(found[0][0], found[1][0]) <= 1e-6
    assert [row[:4] for row in found[0][1]] == [row[:4] for row in found[1][1]]
    for one, two in zip(found[0][1], found[1][1], strict=True):
        assert one.metrics["loss"] == pytest.approx(two.metrics["loss"], abs=1e-6)


def test_local_evaluation_sends_what_was_just_trained(tmp_path):
    own = terms("fedavg", FULL)
    network = Network(own, tmp_path)
    found = []
    for clients in (network.clients(), SequentialClients(own.algorithm, own.task, own.params, data(), FULL, SEED)):
        over = replace(federation(own, clients), evaluation=Evaluation(every=1, when="local"))
        found.append(over.evaluate(next(over.rounds())))
    assert [row.client for row in found[0]] == [0, 1, 2, 3]
    assert found[0] == found[1]


# --- who leaves while the server waits -----------------------------------------------------------------------------


def test_a_client_that_leaves_is_not_waited_for_but_its_last_answer_counts(network, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("bespoke.network.roster.time", clock)
    clients, held = network.clients(FederationSettings(600.0, interval=0.5)), {}
    comes, pull = {2: 3.5, 0: 9.0}, network.wire.pull  # when an answer comes; one does after a look at which it is gone

    def late():
        network.wire.offline = {"key 1", "key 2"} if clock.now >= 1.0 else set()
        for client in [client for client, when in comes.items() if clock.now >= when]:
            del comes[client]
            network.wire.waiting.append((f"key {client}", held[client]))
        return pull()

    network.wire.change = lambda request, reply: held.update({request["client"]: reply})
    network.wire.pull = late
    (done,) = rounds(network, clients)
    assert done.trained.missing == {1: "it went offline during its work"}
    assert done.uploads.clients.tolist() == [0, 2] and clock.now == 9.0


def test_a_round_waits_for_a_quorum_and_ends_the_run_if_none_comes(network, monkeypatch):
    clock, said = Clock(), []
    monkeypatch.setattr("bespoke.network.roster.time", clock)
    clients = network.clients(FederationSettings(600.0, 2, 0.5), wait=20.0, told=said.append)
    (first,) = rounds(network, clients)
    assert said[-1].endswith(": here") and clock.now == 0.0
    online = network.wire.online
    network.wire.offline = {"key 0", "key 1", "key 3"}
    network.wire.online = lambda: set(network.keys) if clock.now >= 5.0 else online()
    (second,) = rounds(network, clients, 1, first.server, 2)
    assert said[-1] == "round 2 waits for a quorum of 2 clients: 1 are there"
    assert clock.now == 5.0 and len(second.uploads.clients) == 3
    network.wire.online = online
    with pytest.raises(UserError, match=r"^round 3 cannot begin: 1 of 4 clients are there after 20 s, and the quorum"):
        rounds(network, clients, 1, second.server, 3)
    assert clock.now == 25.0


@pytest.mark.parametrize("name", ["adapt_rounds", "adapt_epochs"])
def test_a_client_adapts_no_longer_than_any_experiment(name, network):
    request = dict.fromkeys(("kind", "id", "experiment", "federation", "version"), "") | dict.fromkeys(
        ("client", "round", "accepted", "oldest", "rounds", "adapt_rounds", "adapt_epochs"), 0
    )
    known = {"kind": "evaluate", "experiment": HASH, "federation": "0" * 16, "new": False, "round": 1, name: 10**6}
    answer = network.wire.node(network.keys[0]).answer(Message(json.dumps(request | known)))
    assert "more adaptation than any experiment" in json.loads(answer.head)["why"]
