"""The bound on uploads: what is refused, what is remembered, and what a poisoned round leaves unchanged."""

from dataclasses import dataclass, replace
from typing import final

import numpy as np
import pytest
import torch
from small_runs import command, experiment, write
from toy import same_bits

import bespoke
from bespoke.clients import SequentialClients
from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.runs import api
from bespoke.runs.bounds import RECENT, Bound, norms_sent, sizes


def upload(values, name="model"):
    """One number for each client, as an upload."""
    return {name: {"w": torch.tensor(values, dtype=torch.float32)[:, None]}}


def judged(bound, values, sent=0.0, name="model"):
    """Judge uploads, accept what is left, and return who was refused."""
    refused, found = bound.judge(upload(values, name), range(len(values)), {"model": {"w": torch.tensor([sent])}}, {})
    bound.accept([client not in refused for client in range(len(values))], found)
    return list(refused)


def test_sizes_are_distances_to_what_was_sent_or_else_norms():
    draw = np.random.default_rng(0)
    up = {name: torch.from_numpy(draw.normal(size=(4, 2, 3))) for name in ("all", "each", "new", "other")}
    up["all"] = {"a": up["all"], "b": torch.from_numpy(draw.normal(size=(4,)))}
    shared = {"all": {"a": torch.ones(2, 3), "b": torch.tensor(2.0)}, "other": torch.ones(7)}
    own = {"each": torch.from_numpy(draw.normal(size=(4, 2, 3)))}
    up |= {"count": torch.tensor([3, 4, 0, 1]), "nothing": {}}
    found = sizes(up, shared, own)
    floors = {name: norms_sent(name, up, shared, own) for name in found}
    flat = np.concatenate([up["all"]["a"].numpy().reshape(4, -1) - 1.0, up["all"]["b"].numpy()[:, None] - 2.0], axis=1)
    np.testing.assert_allclose(found["all"], np.linalg.norm(flat, axis=1), rtol=1e-6)
    np.testing.assert_allclose(floors["all"], np.full(4, np.sqrt(6 + 4)), rtol=1e-6)
    np.testing.assert_allclose(found["each"], np.linalg.norm((up["each"] - own["each"]).reshape(4, -1), axis=1))
    np.testing.assert_allclose(floors["each"], np.linalg.norm(own["each"].reshape(4, -1), axis=1))
    for name in ("new", "other"):
        np.testing.assert_allclose(found[name], np.linalg.norm(up[name].reshape(4, -1), axis=1))
        assert floors[name] == [0.0] * 4
    assert found["count"] == [3.0, 4.0, 0.0, 1.0]
    assert "nothing" not in found


@pytest.mark.parametrize("bad", [1e38, -1e38, 3e38, 1001.0])
def test_a_huge_upload_is_refused_and_named(bad):
    bound = Bound(100.0, {})
    refused, _ = bound.judge(upload([1.0, 2.0, bad, 0.5, 1.0]), range(5), {}, {})
    assert (
        list(refused) == [2] and "the size of its 'model' is" in refused[2] and "[training] bound = 100" in refused[2]
    )
    assert "\n" not in refused[2]


def test_the_bound_is_a_factor_of_the_median():
    assert judged(Bound(100.0, {}), [1.0, 1.0, 1.0, 99.0, 101.0]) == [4]
    assert judged(Bound(0.0, {}), [1.0, 1.0, 1.0, 1.0, 1e38]) == []
    assert judged(Bound(100.0, {"model": "says nothing"}), [1.0, 1.0, 1.0, 1.0, 1e38]) == []


def test_there_is_no_bound_where_the_median_is_zero():
    assert judged(Bound(10.0, {}), [0.0, 0.0, 0.0, 5.0, 1e9]) == []


def test_a_move_within_what_was_sent_is_never_refused():
    assert judged(Bound(10.0, {}), [7.0001, 7.0, 7.0001, 7.0001, 13.0], sent=7.0) == []
    assert judged(Bound(10.0, {}), [7.0001, 7.0, 7.0001, 7.0001, 15.0], sent=7.0) == [4]


def test_few_uploads_are_compared_with_recently_accepted_ones():
    assert judged(Bound(100.0, {}), [1e9]) == []  # nothing was sent, and nothing is known yet
    bound = Bound(100.0, {})
    assert judged(bound, [1.0, 2.0]) == []
    assert judged(bound, [1e9, 1.0]) == [0]
    assert judged(bound, [1e9]) == [0]
    assert bound.recent == {"model": [1.0, 2.0, 1.0]}  # what is refused is not remembered
    assert judged(Bound(100.0, {}), [1.0, 1e9, 2.0]) == [1]  # three withstand one, even in a first round
    assert judged(bound, [1e9] * 4) == [0, 1, 2, 3]


def test_a_first_upload_is_compared_with_what_was_sent():
    assert judged(Bound(100.0, {}), [1e9], sent=2.0) == [0]
    assert judged(Bound(100.0, {}), [190.0, 1e9], sent=2.0) == [1]
    assert judged(Bound(100.0, {}), [1e9], sent=2.0, name="other") == []


def test_only_recent_and_finite_sizes_are_remembered():
    bound = Bound(100.0, {})
    for value in range(1, RECENT + 10):
        judged(bound, [float(value)])
    assert bound.recent["model"] == [float(v) for v in range(10, RECENT + 10)]
    judged(fresh := Bound(100.0, {}), [float("inf")])
    assert fresh.recent["model"] == []


# --- in a run -------------------------------------------------------------------------------------------------------


class Tampered(SequentialClients):
    """Clients of which one sends a changed upload from round 2 on."""

    bad = 3

    def train(self, round, *args):
        done = super().train(round, *args)
        clients = done.uploads.clients.tolist()
        if round == 1 or self.bad not in clients:
            return done
        place = clients.index(self.bad)

        def leaf(x):
            x = x.clone()
            x[place] = self.change(x[place])
            return x

        return replace(done, uploads=done.uploads._replace(tree=tree.map(leaf, done.uploads.tree)))


def tampered(monkeypatch, change):
    kind = type("Changed", (Tampered,), {"change": staticmethod(change)})
    monkeypatch.setitem(api.BACKENDS, "loop", kind)


def scaled(x):
    return x * 1e20


def filled(x):
    return torch.full_like(x, 1e38)


@pytest.mark.parametrize(
    ("name", "change"),
    [("fedavg", scaled), ("fedrep", scaled), ("pfedvmp", filled), ("self_fl", scaled), ("qlsd", filled)],
)
def test_a_poisoned_upload_is_left_out_and_its_sender_keeps_its_state(name, change, monkeypatch):
    model = {"name": "mlp", "hidden": 4}
    one = bespoke.run(experiment(name, rounds=1, rate=1.0, model=model), backend="loop")
    tampered(monkeypatch, change)
    done = bespoke.run(experiment(name, rounds=3, rate=1.0, model=model), backend="loop")
    assert [list(row["refused"]) for row in done.folder.rounds()] == [[], ["3"], ["3"]]
    before, after = (run.federation.clients.store.get([3]) for run in (one, done))
    assert same_bits(before["state"], after["state"])
    assert all(leaf.abs().max() < 1e6 for leaf in tree.leaves(done.server) if leaf.numel())


def test_clean_runs_are_equal_with_and_without_the_bound():
    on, off = (bespoke.run(experiment("fedrep", rounds=4, bound=bound), backend="loop") for bound in (2000.0, 0.0))
    assert same_bits(on.server, off.server)


@final
@dataclass(frozen=True)
class Divides(Algorithm):
    """A server that divides by zero from round 2 on."""

    def server_init(self, task, params, num_clients, key):
        return {"model": params, "left": torch.ones(())}

    def client_init(self, task, params, client):
        return {"rounds": torch.zeros(())}

    def client_update(self, local, state, down):
        return {"rounds": state["rounds"] + 1}, {"model": down["model"]}

    def aggregate(self, task, server, uploads, key):
        model = tree.map(lambda x: x + server["left"] / server["left"] - 1.0, uploads.mean("model"))
        return {"model": model, "left": server["left"] - 1.0}

    def personalize(self, local, state, down):
        return down["model"]


def test_a_server_state_that_is_not_finite_does_not_replace_the_old_one(tmp_path):
    done = bespoke.run(experiment(Divides(), rounds=3, rate=1.0), tmp_path / "run")
    rows = done.folder.rounds()
    assert not rows[0]["refused"] and len(rows[1]["refused"]) == len(rows[2]["refused"]) == 6
    assert "the server's state would hold NaN or inf" in rows[1]["refused"]["0"]
    assert "no upload was accepted" in rows[1]["note"]
    assert done.server["left"] == 0.0 and all(torch.isfinite(leaf).all() for leaf in tree.leaves(done.server))
    assert {float(state["state"]["rounds"]) for state in done.federation.inspect().states().values()} == {1.0}


def test_a_run_that_learned_nothing_says_so_in_its_last_line_its_notes_and_its_exit_status(tmp_path):
    file = write(tmp_path / "diverges.toml", training={"lr": 1e30, "steps": 20}, model={"name": "mlp", "hidden": 4})
    ended = command("run", file, "--out", str(tmp_path / "run"), "--quiet")
    told = "every upload was refused in 3 of 3 rounds, which taught nothing"
    assert ended.code == 3 and told in ended.out and told in ended.err
    assert bespoke.summarise(tmp_path / "run")["rounds_refused"] == 3
    done = bespoke.run(bespoke.runs.experiment.load(file)[0])
    assert told in "".join(done.notes) and told in repr(done)


def test_a_run_in_which_most_uploads_were_refused_says_so(monkeypatch, tmp_path):
    def spoilt(self, round, clients, shared, own):
        done = SequentialClients.train(self, round, clients, shared, own)
        bad = {client: "spoilt" for client in clients[1:]}
        return bespoke.runs.bounds.without(done, bad)

    monkeypatch.setitem(api.BACKENDS, "loop", type("Mostly", (SequentialClients,), {"train": spoilt}))
    done = bespoke.run(experiment(rounds=2), backend="loop")
    assert any("4 of 6 uploads were refused" in note for note in done.notes)


@pytest.mark.parametrize("name", ["qlsd", "fedep"])
def test_a_negative_count_of_rows_does_no_harm(name, monkeypatch):
    tampered(monkeypatch, torch.neg)
    done = bespoke.run(experiment(name, rounds=3, rate=1.0, model={"name": "mlp", "hidden": 4}), backend="loop")
    assert all(torch.isfinite(leaf).all() for leaf in tree.leaves(done.server))


def test_a_resumed_run_remembers_what_is_usual(monkeypatch, tmp_path):
    """Two clients take part in a round, too few for a median of their own: the rounds before the stop decide."""
    settings = experiment(rounds=9, rate=0.34)
    tampered(monkeypatch, scaled)
    whole = bespoke.run(settings, tmp_path / "whole", backend="loop", checkpoint_every=1)
    assert [list(row["refused"]) for row in whole.folder.rounds()].count(["3"]) >= 1
    rounds = []
    stopped = bespoke.run(
        settings, tmp_path / "parts", backend="loop", callbacks=[rounds.append], stop=lambda: len(rounds) >= 1
    )
    assert len(stopped.folder.rounds()) < 4
    resumed = bespoke.run(settings, tmp_path / "parts", backend="loop", resume=True)
    assert same_bits(whole.server, resumed.server)
    assert whole.folder.rounds() == resumed.folder.rounds()
    assert whole.federation.bound.recent == resumed.federation.bound.recent != {}
