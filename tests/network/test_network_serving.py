"""A whole federation: server and clients from the same experiment, rows with the clients alone, messages as bytes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from network_runs import Clock, Wire
from sklearn.datasets import load_digits
from small_runs import command, records, same_tensors

import bespoke
from bespoke.core import tree
from bespoke.errors import UserError
from bespoke.network.ledger import fingerprint
from bespoke.network.messages import Message
from bespoke.network.settings import FederationSettings
from bespoke.runs import joining
from bespoke.runs.agreement import agreement
from bespoke.runs.checkpoint import load_newest
from bespoke.runs.experiment import load
from bespoke.runs.joining import member
from bespoke.runs.serving import serve

SCALED = ("normalise(mean=[0.03137255], deviation=[0.03137255])",)
EXAMPLE = Path(bespoke.__file__).parent / "flower" / "federation.toml"
KEYS = ("key a", "key b", "key c")
QUICK = FederationSettings(round_timeout=0.01, interval=0.001)


def experiment(algorithm="pfedfda", data=None, **changes):
    """Digits over three clients, as a contract or, with the clients' files, as its simulation."""
    contract = bespoke.DataSettings(
        name="contract",
        shape=(1, 8, 8),
        dtype="uint8",
        class_names=tuple("0123456789"),
        clients=3,
        transform=SCALED,
    )
    made = bespoke.Experiment(
        data=data or contract,
        model=bespoke.ModelSettings(name="mlp", hidden=8),
        algorithm=algorithm,
        training=bespoke.Training(rounds=3, rate=0.7, batch=32),
        evaluation=bespoke.Evaluation(every=1),
        federation=QUICK,
    )
    return replace(made, **changes)


def files(folder, clients=3):
    """Unequal shares of the digits, with test rows: one archive for each client."""
    found = load_digits()
    x, y = found.images.astype(np.uint8)[:, None], found.target
    folder.mkdir(exist_ok=True)
    paths = []
    for client, rows in enumerate(np.split(np.arange(400), [80, 220])[:clients]):
        cut = len(rows) * 4 // 5
        paths.append(folder / f"{client}.npz")
        parts = {"x": x[rows[:cut]], "y": y[rows[:cut]], "x_test": x[rows[cut:]], "y_test": y[rows[cut:]]}
        np.savez(paths[-1], **parts)
    return paths


class Members(Wire):
    """A wire to members with these files, each with a home of its own; they are made anew for each message."""

    def __init__(self, experiment, paths, homes, keys=KEYS):
        super().__init__(keys, self.member)
        self.experiment, self.paths, self.homes, self.said = experiment, paths, homes, []

    def member(self, key):
        place = self.keys.index(key)
        return member(self.experiment, self.paths[place], self.homes / key, told=self.said.append)


class Died(Exception):
    """The server's process ended."""


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["pfedfda", "fedavg", "fedrep"])
def test_a_federation_equals_its_simulation(algorithm, tmp_path):
    paths = files(tmp_path / "data")
    own, said = experiment(algorithm), []
    run = serve(own, Members(own, paths, tmp_path), tmp_path / "out", progress=False, told=said.append)
    same = bespoke.DataSettings(name="files", path=str(tmp_path / "data" / "*.npz"), num_classes=10, transform=SCALED)
    there = bespoke.run(experiment(algorithm, same), tmp_path / "loop", backend="loop", device="cpu", progress=False)
    assert same_tensors(tree.flatten(agreement(own).terms.params), tree.flatten(there.federation.params))
    last = [load_newest(folder / "checkpoints")[0].server for folder in (tmp_path / "out", tmp_path / "loop")]
    one, two = map(tree.flatten, last)
    assert one.keys() == two.keys() and all(float((one[n] - two[n]).abs().max()) <= 1e-6 for n in one)
    ours, theirs = lines(tmp_path / "out", "clients.jsonl"), lines(tmp_path / "loop", "clients.jsonl")
    assert len(ours) == len(theirs) == 9
    for row, other in zip(ours, theirs, strict=True):
        assert row["client"] == other["client"] and row["metrics"]["accuracy"] == other["metrics"]["accuracy"]
    for client, (name, model) in enumerate(there.models.items()):
        mine = bespoke.load_model(tmp_path / KEYS[client] / joining.MODEL)
        x = np.load(paths[client])["x_test"]
        assert float((mine.logits(x) - model.logits(x)).abs().max()) <= 1e-5, name
    assert run.notes == [] and said[-1] == "3 of 3 clients have their models"


# --- who takes part ------------------------------------------------------------------------------------------------


def served(own, link, out, **options):
    """The run and the lines that were told."""
    said = []
    run = serve(own, link, out, **({"progress": False, "told": said.append, "wait": 0.0} | options))
    return run, said


def one_round(**changes):
    """A short federation of all clients."""
    return experiment("fedavg", training=bespoke.Training(rounds=1, batch=64), **changes)


def test_places_go_by_the_order_of_keys_and_a_late_joiner_is_a_new_client(tmp_path):
    own, keys = one_round(), ["z", "b", "a", "m"]
    paths = files(tmp_path / "data")
    link = Members(own, [*paths, paths[0]], tmp_path, keys)
    link.offline = {"z"}  # until the others have begun

    def comes(request, reply):
        link.offline -= {"z"} if request["kind"] == "evaluate" else set()
        return reply

    link.change = comes
    run, said = served(own, link, tmp_path / "out")
    assert run.folder.federation()["roster"] == [fingerprint(key) for key in "abm"]
    assert run.folder.federation()["train"] == [144, 112, 64]
    assert said[-1] == "4 of 4 clients have their models"
    guest = bespoke.load_model(tmp_path / "z" / joining.MODEL)
    assert guest.about["client"] == "new"
    with np.load(paths[0]) as found:  # as a client that comes after the run, to the bit
        after = bespoke.open_run(tmp_path / "out").personalize(found["x"], found["y"])
        assert torch.equal(after.logits(found["x_test"]), guest.logits(found["x_test"]))


def test_with_a_quorum_the_run_begins_and_a_free_place_is_taken_later(tmp_path):
    own = experiment("fedrep", federation=replace(QUICK, quorum=2), training=bespoke.Training(rounds=2, batch=64))
    link = Members(own, files(tmp_path / "data"), tmp_path)
    link.offline = {KEYS[1]}

    def comes(request, reply):
        link.offline -= set() if request["kind"] in ("enrol", "train") else {KEYS[1]}
        return reply

    link.change = comes
    run, said = served(own, link, tmp_path / "out")
    assert said[0] == "waiting for 1 of 3 clients"
    assert "client 2: it has not joined yet" in said
    rounds = run.folder.rounds()
    assert [row.get("missing") for row in rounds] == [{"2": "it has not joined yet"}, None]
    assert rounds[0]["evaluated"]["missing"] == {"2": "it has not joined yet"}
    late = f"client 2, {fingerprint(KEYS[1])[:16]}, joined late"
    assert late in said and late in run.notes and said[-1] == "3 of 3 clients have their models"
    longer = replace(own, training=bespoke.Training(rounds=3, batch=64))

    def lies(request, reply):
        if (request["kind"], request["client"]) != ("evaluate", 2):
            return reply
        told = json.loads(reply.head)
        told["scores"] = [[split, view, rows - 1, *rest] for split, view, rows, *rest in told["scores"]]
        return Message(json.dumps(told), reply.leaves)

    link.change = lies
    again, _ = served(longer, link, tmp_path / "out", resume=True)  # its place and its rows are in the checkpoint
    assert "missing" not in again.folder.rounds()[2]
    assert again.notes == ["scores of client 2 were refused: it scores 27 test rows, and declared 28"]
    link.change = lambda request, reply: reply
    own, _ = served(own, link, tmp_path / "other", resume=True)  # where there is nothing yet: all by their keys
    assert own.folder.federation()["roster"] == [fingerprint(key) for key in KEYS]


def test_without_a_quorum_nothing_begins(tmp_path):
    own = one_round(federation=replace(QUICK, quorum=3))
    link = Members(own, files(tmp_path / "data"), tmp_path)
    link.offline = {KEYS[1]}
    with pytest.raises(UserError, match=r"^2 of 3 clients came within 0 s, and the quorum is 3: start them"):
        served(own, link, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    link.offline = set()
    assert served(own, link, tmp_path / "out")[0].last_round == 1


def test_those_who_do_not_answer_are_asked_three_times_while_they_stay(tmp_path):
    own = one_round(federation=replace(QUICK, quorum=2))
    link, asked, looks = Members(own, files(tmp_path / "data"), tmp_path), [], []
    link.change = lambda request, reply: asked.append(request["kind"]) or "its app ended"

    def online():
        looks.append(0)
        if len(looks) == 6:
            raise Died
        return set(KEYS)

    link.online = online
    said = []
    with pytest.raises(Died):
        served(own, link, tmp_path / "out", wait=600.0, told=said.append)
    assert asked == ["enrol"] * 9
    first = f"client {fingerprint(KEYS[0])[:16]} could not enrol: its app ended"
    assert [line for line in said if line.startswith(first)] == [f"{first} (try {n} of 3)" for n in (1, 2, 3)]


def test_a_silent_client_holds_the_others_up_for_a_minute_at_most(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("bespoke.network.roster.time", clock)
    own = one_round(federation=replace(QUICK, quorum=2, round_timeout=600.0, interval=0.5))
    link, said = Members(own, files(tmp_path / "data"), tmp_path), []
    link.change = lambda request, reply: None if request["kind"] == "enrol" and len(said) < 2 else reply
    served(own, link, tmp_path / "out", wait=600.0, told=said.append)
    silent = [line for line in said if line.endswith("could not enrol: it did not answer within 60 s (try 1 of 3)")]
    assert len(silent) == 3 and clock.now < 62


REFUSED = {
    "columns": (dict(x=np.zeros((4, 63), np.uint8)), r"x has the shape \(4, 63\), but this model takes uint8"),
    "type": (dict(x=np.zeros((4, 1, 8, 8), np.float32)), "x is float32, but this model takes uint8"),
    "labels": (dict(y=np.array([0, 1, 2, 10])), r"y has the label 10, outside 0\.\.9"),
    "targets": (dict(y=np.array([0.5, 1, 2, 3])), "y of these rows holds float64 values"),
    "lengths": (dict(y=np.arange(3)), "there are 4 rows in x and 3 in y"),
    "test rows": (
        dict(x_test=np.zeros((2, 1, 8, 9), np.uint8), y_test=np.arange(2)),
        r"x has the shape \(2, 1, 8, 9\)",
    ),
    "half": (dict(x_test=np.zeros((2, 1, 8, 8), np.uint8)), "only one of x_test and y_test"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_break_the_contract_are_refused_by_the_client(case, tmp_path):
    parts, why = REFUSED[case]
    path = tmp_path / "mine.npz"
    np.savez(path, **({"x": np.zeros((4, 1, 8, 8), np.uint8), "y": np.arange(4)} | parts))
    with pytest.raises(UserError, match=f"^{re.escape(str(path))} breaks the contract of the federation: .*{why}"):
        member(one_round(), path, tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_a_home_is_of_one_experiment(tmp_path):
    paths, home = files(tmp_path / "data"), tmp_path / KEYS[0]
    first, second = one_round(), replace(one_round(), seed=7)
    member(second, paths[0], home)  # nothing has been done there yet
    served(first, Members(first, paths, tmp_path), tmp_path / "out")
    held = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    assert home / "model.safetensors" in held and any(path.suffix == ".state" for path in held)
    with pytest.raises(UserError, match=f"^{re.escape(str(home))} is the home of another experiment, .*: give each"):
        member(second, paths[0], home)
    assert held == {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    member(first, paths[0], home)


def test_the_server_says_why_it_refuses_a_client_and_goes_on_without(tmp_path):
    own = one_round(federation=replace(QUICK, quorum=2, most_rows=120))
    link = Members(own, files(tmp_path / "data"), tmp_path)  # the last one has 144 train rows
    run, said = served(own, link, tmp_path / "out")
    bound = "it declares {'train': 144, 'test': 36} rows, and [federation] most_rows is 120"
    assert f"client {fingerprint(KEYS[2])[:16]} is refused: {bound}" in said
    assert run.folder.federation()["train"] == [64, 112, 0]
    why = f"{tmp_path}/x breaks the contract"
    link = Members(own, files(tmp_path / "data"), tmp_path / "again")
    link.change = lambda _, reply: Message(json.dumps(json.loads(reply.head) | {"kind": "failed", "why": why}))
    with pytest.raises(UserError, match=r"^0 of 3 clients came"):
        said = []
        serve(own, link, tmp_path / "other", wait=0.0, told=said.append)
    assert said.count(f"client {fingerprint(KEYS[0])[:16]} is refused: {why}") == 1


def test_another_experiment_is_refused_on_both_sides(tmp_path):
    own, other = one_round(), one_round(seed=1)
    link, said = Members(other, files(tmp_path / "data"), tmp_path), []
    with pytest.raises(UserError, match=r"^0 of 3 clients came"):
        serve(own, link, tmp_path / "out", wait=0.0, told=said.append)
    assert f"is refused: the message is of another experiment, {own.hash()!r}" in said[-2]
    link = Members(own, files(tmp_path / "data"), tmp_path)
    link.change = lambda request, reply: Message(reply.head.replace(own.hash(), other.hash()), reply.leaves)
    with pytest.raises(UserError, match=r"^0 of 3 clients came"):
        serve(own, link, tmp_path / "out", wait=0.0, told=said.append)
    assert said[-2].endswith("is refused: its answer is of another experiment")


def test_rows_that_changed_since_enrolment_are_refused(tmp_path):
    own = experiment("fedavg", training=bespoke.Training(rounds=2, batch=64))
    link, paths = Members(own, files(tmp_path / "data"), tmp_path), files(tmp_path / "others")
    with np.load(paths[1]) as found:
        np.savez(paths[1], x=found["x"][:-2], y=found["y"][:-2], x_test=found["x_test"][1:], y_test=found["y_test"][1:])

    def changed(request, reply):
        link.paths[1] = paths[1] if request["kind"] == "evaluate" else link.paths[1]
        return reply

    link.change = changed
    run, _ = served(own, link, tmp_path / "out")
    assert run.folder.rounds()[1]["refused"] == {"1": "it has 110 train rows, and declared 112"}
    assert "scores of client 1 were refused: it scores 27 test rows, and declared 28" in run.notes


@pytest.mark.parametrize("lie", [[1e300, 1e300], [29.0, 28.0], [-5.0, 28.0], [float("inf"), 28.0]])
def test_scores_that_no_rows_can_have_are_refused(lie, tmp_path):
    own = experiment("fedavg", training=bespoke.Training(rounds=1, batch=64))
    link = Members(own, files(tmp_path / "data"), tmp_path)

    def lying(request, reply):
        told = json.loads(reply.head)
        if request["kind"] != "evaluate" or request["client"] != 1:
            return reply
        for score in told["scores"]:
            score[3]["accuracy"] = lie
        return Message(json.dumps(told), reply.leaves)

    link.change = lying
    run, _ = served(own, link, tmp_path / "out")
    assert "scores of client 1 were refused: its scores are none of its method and objective" in run.notes


# --- what survives, and what stays ---------------------------------------------------------------------------------


def test_a_server_that_died_goes_on_with_the_roster_of_its_checkpoint(tmp_path):
    own = experiment("ditto")
    paths = files(tmp_path / "data")
    whole, _ = served(own, Members(own, paths, tmp_path / "whole"), tmp_path / "out")
    link = Members(own, paths, tmp_path / "parts")

    def dies(request, reply):
        if request["kind"] == "train" and request["round"] == 2:
            raise Died
        return reply

    link.change = dies
    with pytest.raises(Died):
        served(own, link, tmp_path / "again")
    with pytest.raises(UserError, match="already holds a run"):
        served(own, Members(own, paths, tmp_path / "parts"), tmp_path / "again")
    link = Members(own, paths, tmp_path / "parts")
    link.offline = {KEYS[0]}
    with pytest.raises(UserError, match=r"^2 of 3 clients came within 0 s, and the quorum is 3"):
        served(replace(own, federation=replace(QUICK, quorum=3)), link, tmp_path / "again", resume=True)
    link.offline = set()
    again, said = served(own, link, tmp_path / "again", resume=True)
    assert [line.rpartition(": ")[2] for line in said[:3]] == ["here"] * 3 and again.last_round == 3
    assert records(tmp_path / "again") == records(tmp_path / "out")
    for key in KEYS:
        one, two = (tree.flatten(bespoke.load_model(tmp_path / part / key / joining.MODEL).personal) for part in PARTS)
        assert same_tensors(one, two)
    assert whole.notes == again.notes == []


PARTS = ("whole", "parts")


def test_every_client_keeps_its_own_model_and_report(tmp_path):
    own = experiment("fedavg", training=bespoke.Training(rounds=1, epochs=5, batch=8, lr=0.2))
    paths = files(tmp_path / "data")
    link = Members(own, paths, tmp_path)
    run, _ = served(own, link, tmp_path / "out")
    for client, key in enumerate(KEYS):
        report = json.loads((tmp_path / key / joining.REPORT).read_text())
        scored = next(row for row in run.folder.clients() if row["client"] == client)["metrics"]["accuracy"]
        assert report["after"] == pytest.approx(scored[0] / scored[1], abs=1e-6)
        model = bespoke.load_model(tmp_path / key / joining.MODEL)
        with np.load(paths[client]) as found:
            assert report["after"] == model.score(found["x_test"], found["y_test"]) == model.about["score"]["value"]
            before = replace(
                model, personal=agreement(own).terms.params
            )  # of FedAvg: the common initial weights as they are
            assert report["before"] == before.score(found["x_test"], found["y_test"]) < report["after"]
            assert report["rows"] == {"train": len(found["y"]), "val": 0, "test": len(found["y_test"])}
        assert (report["client"], report["round"], report["experiment"]) == (str(client), 1, own.hash())
        done = command("predict", tmp_path / key / joining.MODEL, "--data", paths[client], "-o", tmp_path / "p.csv")
        assert done.code == 0 and f"{len(np.load(paths[client])['x'])} predictions" in done.out
    assert [line.partition(":")[0] for line in link.said] == ["finished after round 1"] * 3
    with pytest.raises(UserError, match="cannot be inspected"):
        _ = run.models


def test_a_finished_federation_removes_the_states_of_earlier_ones_alone(tmp_path):
    own = experiment("fedrep", training=bespoke.Training(rounds=1, batch=64))
    paths = files(tmp_path / "data")
    served(own, Members(own, paths, tmp_path), tmp_path / "first")
    states = tmp_path / KEYS[0] / joining.STATES
    (old,) = states.iterdir()
    (states / "mine").mkdir()
    (old / "0" / "note.txt").touch()
    link = Members(own, paths, tmp_path)
    link.change = lambda request, reply: reply if request["kind"] != "finish" else None
    served(own, link, tmp_path / "second")  # whose last answers are lost
    assert [path.name for path in (old / "0").iterdir()] == ["note.txt"]
    (new,) = (path for path in states.iterdir() if path not in (old, states / "mine"))
    assert list((new / "0").glob("*.state"))  # the run may be lengthened
    longer = replace(own, training=replace(own.training, rounds=2))
    again, _ = served(longer, Members(longer, paths, tmp_path), tmp_path / "second", resume=True)
    assert again.last_round == 2 and again.notes == []


def test_members_that_are_away_at_the_end_are_waited_for_and_then_named(tmp_path):
    own = one_round(federation=replace(QUICK, round_timeout=0.3))
    link, asked, looks = Members(own, files(tmp_path / "data"), tmp_path), [], []
    link.change = lambda request, reply: asked.append(request["kind"]) or reply
    online = link.online

    def some_are_away():
        looks.extend(["at the end"] * ("evaluate" in asked))
        link.offline = {KEYS[2]} if len(looks) > 2 else set(KEYS[1:]) if looks else set()  # one comes back
        return online()

    link.online = some_are_away
    run, said = served(own, link, tmp_path / "out")
    note = "client 2 has made no personal model: it was offline"
    assert run.notes[-1] == said[-1] == note and said[-2] == "2 of 3 clients have their models"
    assert json.loads((tmp_path / "out" / "environment.json").read_text())["notes"][-1] == note
    _, said = served(own, Members(own, link.paths, tmp_path), tmp_path / "out", resume=True)
    assert said == ["3 of 3 clients have their models"]


def test_the_shipped_example_is_a_federation(tmp_path):
    own, _ = load(EXAMPLE)
    own = replace(own, federation=QUICK, training=replace(own.training, rounds=1))
    run, said = served(own, Members(own, files(tmp_path / "data"), tmp_path), tmp_path / "out")
    assert run.accuracy > 0.5 and said[-1] == "3 of 3 clients have their models"
    assert own.hash() == load(EXAMPLE)[0].hash()
    done = command("run", EXAMPLE)
    assert done.sentence.startswith('[data] name = "contract" has no rows')


@pytest.mark.parametrize(
    "rows", [{}, {"train": 0}, {"train": -1}, {"train": True}, {"train": 1.5}, {"train": 2**60}, {"train": 5, "x": 1}]
)
def test_rows_that_nobody_can_have_are_refused(rows, tmp_path):
    own, said = one_round(), []
    link = Members(own, files(tmp_path / "data"), tmp_path)
    link.change = lambda request, reply: Message(json.dumps(json.loads(reply.head) | {"rows": rows}), reply.leaves)
    with pytest.raises(UserError, match=r"^0 of 3 clients came"):
        serve(own, link, tmp_path / "out", wait=0.0, told=said.append)
    assert said[0].startswith(f"client {fingerprint(KEYS[0])[:16]} is refused: it declares ")
