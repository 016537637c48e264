"""The training loop: who takes part, when everybody is evaluated, what is recorded, and when it ends."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from small_runs import experiment

import bespoke
from bespoke.core import rng, tree
from bespoke.data import Partition
from bespoke.errors import UserError
from bespoke.records import COLUMNS
from bespoke.runs import recording
from bespoke.runs.api import run as run_experiment
from bespoke.runs.experiment import Experiment

M = 6  # clients of the small experiment


@dataclass(frozen=True)
class Toy(bespoke.Algorithm):
    """A method without training: every message and number is known in advance."""

    spoilt: tuple[int, ...] = ()  # clients whose upload is NaN
    bad_state: tuple[int, ...] = ()  # clients whose state is NaN
    own_bytes: int = 0  # what a client says it sent
    adapts: bool = True

    def server_init(self, task, params, num_clients, key):
        return {"sum": torch.zeros(3), "rounds": torch.zeros(()), "met": torch.zeros(num_clients)}

    def broadcast(self, server):
        return {"sum": server["sum"]}

    def tailor(self, server, clients):
        return {"me": clients.clone(), "half": server["met"][clients.clamp(min=0)].to(torch.float64)}

    def aggregate(self, task, server, uploads, key):
        met = server["met"].clone()
        met[uploads.clients] += 1
        return {
            "sum": server["sum"] + uploads.tree["sum"].mean(dim=0),
            "rounds": server["rounds"] + 1,
            "met": met,
        }

    def client_init(self, task, params, client):
        return {"id": client.clone(), "updates": torch.zeros(()), "adapted": torch.zeros(())}

    def client_update(self, local, state, down):
        me = down["me"]
        spoilt = sum(((me == c).float() for c in self.spoilt), torch.zeros(()))
        bad = sum(((me == c).float() for c in self.bad_state), torch.zeros(()))
        if self.own_bytes:
            local.log(bytes_up=self.own_bytes + me, bytes_down=2 * self.own_bytes + me)
        local.log(mine=me, loss=1.0 + me)
        new = state | {"updates": state["updates"] + 1 + torch.where(bad > 0, float("nan"), 0.0)}
        return new, {"sum": torch.ones(3) + torch.where(spoilt > 0, float("nan"), 0.0)}

    def adapt(self, local, state, down):
        return state | {"adapted": state["adapted"] + 1}

    def personalize(self, local, state, down):
        local.log(id=state["id"], me=down["me"], updates=state["updates"], adapted=state["adapted"], sum=down["sum"][0])
        return {"bias": down["sum"][:1]}

    def predict(self, task, personal, x):
        first = torch.zeros(task.num_classes)
        first[0] = 1.0
        return (first + 0.0 * personal["bias"]).expand(len(x), -1) + 0.0 * x.sum()


def ran(method=None, *, backend="loop", callbacks=(), stop=lambda: False, folder=None, **settings):
    return run_experiment(
        experiment(method or Toy(), **settings), folder, backend=backend, callbacks=callbacks, stop=stop
    )


def evaluated(run, **wanted):
    return [row for row in run.folder.clients() if all(row[k] == v for k, v in wanted.items())]


# --- who takes part -----------------------------------------------------------------------------------------------


def first_of_shuffled(seed, number, size):
    """The cohort by its definition: clients in the order of their own 32-bit numbers."""
    key = rng.stream(rng.key(seed), rng.COHORT, number)
    values = [int(rng.bits(key, torch.tensor(c))) for c in range(M)]
    return sorted(sorted(range(M), key=lambda c: (values[c], c))[:size])


@pytest.mark.parametrize(("rate", "size"), [(1.0, 6), (0.5, 3), (0.34, 2), (0.01, 1), (0.99, 5)])
def test_a_fixed_cohort_has_the_first_clients_of_a_shuffle(rate, size):
    done = ran(rate=rate, rounds=4, seed=3)
    assert [row["cohort"] for row in done.folder.rounds()] == [first_of_shuffled(3, r, size) for r in range(1, 5)]


def test_a_bernoulli_cohort_draws_each_client_for_itself():
    done = ran(rate=0.4, rounds=30, sampling="bernoulli")
    cohorts = [row["cohort"] for row in done.folder.rounds()]
    draws = [rng.uniform(rng.stream(rng.key(0), rng.COHORT, r), (M,), torch.float64) for r in range(1, 31)]
    expected = [(draw < 0.4).nonzero().flatten().tolist() for draw in draws]
    assert [c for c, e in zip(cohorts, expected, strict=True) if e] == [e for e in expected if e]
    assert [] in expected and all(cohorts)  # an empty draw is repeated
    assert len({len(c) for c in cohorts}) > 2


def test_the_cohort_depends_on_seed_and_round_alone():
    short, long = ran(rounds=2), ran(bespoke.FedAvg(), rounds=5, lr=0.3)
    assert [r["cohort"] for r in short.folder.rounds()] == [r["cohort"] for r in long.folder.rounds()][:2]
    other = ran(rounds=5, seed=1)
    assert [r["cohort"] for r in other.folder.rounds()] != [r["cohort"] for r in long.folder.rounds()]


def test_a_rate_at_which_nobody_is_ever_drawn_is_told():
    with pytest.raises(UserError, match=r"no client was drawn in 10,000 attempts at rate 1e-12: raise training.rate"):
        ran(rate=1e-12, sampling="bernoulli")


def test_full_last_calls_everybody_once_and_at_the_end():
    with_all, without = ran(full_last=True), ran()
    cohorts = [row["cohort"] for row in with_all.folder.rounds()]
    assert cohorts[:2] == [row["cohort"] for row in without.folder.rounds()][:2]
    assert cohorts[2] == list(range(M)) != without.folder.rounds()[2]["cohort"]


def test_new_clients_never_train():
    done = ran(data={"new_clients": 2}, rate=1.0, full_last=True)
    assert all(row["cohort"] == [0, 1, 2, 3] for row in done.folder.rounds())


# --- when and whom to evaluate ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "rounds"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_rounds_that_are_evaluated(every, rounds):
    done = ran(rounds=5, evaluation={"every": every})
    assert sorted({row["round"] for row in evaluated(done)}) == rounds
    for number in rounds:
        assert [row["client"] for row in evaluated(done, round=number)] == list(range(M))


@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_groups_and_who_is_adapted(backend):
    done = ran(data={"new_clients": 1}, rounds=2, rate=0.4, evaluation={"every": 1, "adapt_rounds": 3}, backend=backend)
    seen = set()
    for number, row in enumerate(done.folder.rounds(), 1):
        seen |= set(row["cohort"])
        for found in evaluated(done, round=number):
            client, logged = found["client"], found["logged"]
            group = "new" if client == 5 else "train" if client in seen else "unseen"
            assert found["group"] == group
            assert logged["adapted"] == (0 if group == "train" else 3)
            assert (logged["updates"] > 0) == (group == "train")
            # A client that the server never met has no id, in what it receives and in its first state.
            assert logged["me"] == logged["id"] == (-1 if group == "new" else client)
    groups = {row["group"] for row in evaluated(done)}
    assert groups == {"train", "unseen", "new"}


def test_adaptation_is_used_and_dropped():
    done = ran(rate=0.2, rounds=3, evaluation={"every": 1})
    for row in evaluated(done):
        assert row["logged"]["adapted"] == (row["group"] == "unseen")


def test_adaptation_can_be_switched_off():
    done = ran(rate=0.2, rounds=1, evaluation={"adapt_rounds": 0})
    assert {row["logged"]["adapted"] for row in evaluated(done)} == {0.0}


def test_adapt_epochs_reach_the_adaptation_and_nothing_else():
    @dataclass(frozen=True)
    class Asks(bespoke.Algorithm):
        def client_update(self, local, state, down):
            local.log(epochs=local.epochs)
            return state, {"model": down["model"]}

        def client_init(self, task, params, client):
            return {"epochs": torch.zeros(())}

        def adapt(self, local, state, down):
            return {"epochs": torch.tensor(float(local.epochs))}

        def personalize(self, local, state, down):
            local.log(adapted=state["epochs"], own=local.epochs)
            return down["model"]

    done = ran(Asks(), rate=0.5, rounds=1, epochs=2, evaluation={"adapt_epochs": 7})
    assert set(done.folder.rounds()[0]["logged"]["epochs"]) == {2.0}
    assert {(row["group"], row["logged"]["adapted"], row["logged"]["own"]) for row in evaluated(done)} == {
        ("train", 0.0, 2.0),
        ("unseen", 7.0, 2.0),
    }


def test_evaluation_comes_after_aggregation():
    done = ran(rounds=3, evaluation={"every": 1})
    for number in (1, 2, 3):
        assert {row["logged"]["sum"] for row in evaluated(done, round=number)} == {float(number)}


def test_local_evaluation_asks_the_participants_before_aggregation():
    done = ran(rounds=3, evaluation={"every": 1, "when": "local"})
    for number, row in enumerate(done.folder.rounds(), 1):
        found = evaluated(done, round=number)
        assert [r["client"] for r in found] == row["cohort"]
        # What a client just sent (ones), not the sum that the server would have made of it; and its own new state.
        assert {r["logged"]["sum"] for r in found} == {1.0}
        assert all(r["logged"]["me"] == r["client"] and r["logged"]["updates"] > 0 for r in found)
        assert {r["group"] for r in found} == {"train"}


def test_local_evaluation_leaves_out_whom_the_server_refused():
    done = ran(Toy(spoilt=(1, 2)), rounds=1, rate=1.0, evaluation={"when": "local"})
    assert [row["client"] for row in evaluated(done)] == [0, 3, 4, 5]


def test_local_evaluation_with_nobody_sound_has_no_rows():
    done = ran(Toy(spoilt=tuple(range(M))), evaluation={"when": "local"})
    assert not evaluated(done)
    assert done.summary["headline"] is None
    with pytest.raises(UserError, match="there is no accuracy: no client was evaluated"):
        _ = done.accuracy


def test_local_evaluation_equals_the_clients_own_models():
    """With every row full batch and one client a round, FedAvg's aggregate IS the client's model."""
    local = ran(bespoke.FedAvg(), rate=0.01, evaluation={"every": 1, "when": "local"})
    after = ran(bespoke.FedAvg(), rate=0.01, evaluation={"every": 1})
    for row in evaluated(local):
        assert row in evaluated(after)
    assert len(evaluated(local)) == 3


@dataclass(frozen=True)
class SendsOther(Toy):
    def server_init(self, task, params, num_clients, key):
        return {
            "sum": torch.zeros(3),
            "scale": torch.ones(()),
            "met": torch.zeros(num_clients),
            "rounds": torch.ones(()),
        }

    def broadcast(self, server):
        return {"sum": server["sum"], "scale": server["scale"]}


def test_local_evaluation_is_refused_where_uploads_do_not_replace_the_broadcast():
    rounds = []
    with pytest.raises(UserError) as caught:
        ran(SendsOther(), rounds=50, evaluation={"when": "local"}, callbacks=[rounds.append])
    assert '[evaluation] when = "local"' in str(caught.value)
    assert "SendsOther sends no scale" in str(caught.value) and 'use "aggregated"' in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not rounds  # it is told before the first round is over, not after the last


@pytest.mark.parametrize("name", ["local", "fedavg_ft", "fedprox", "fedper", "fedrep", "lg_fedavg", "ditto"])
def test_local_evaluation_works_with_the_methods(name):
    done = ran(name, rounds=1, evaluation={"when": "local"}, model={"name": "mlp", "hidden": 4})
    assert [row["client"] for row in evaluated(done, view="personal")] == done.folder.rounds()[0]["cohort"]


# --- new clients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_local_evaluation_asks_new_clients_with_the_aggregated_broadcast(backend):
    done = ran(backend=backend, rounds=3, data={"new_clients": 2}, evaluation={"every": 1, "when": "local"})
    for number, row in enumerate(done.folder.rounds(), 1):
        lines = evaluated(done, round=number)
        assert [line["client"] for line in lines] == [*row["cohort"], 4, 5]
        assert {line["group"]: line["logged"]["sum"] for line in lines} == {"train": 1.0, "new": number}
        assert [line["logged"]["adapted"] for line in lines if line["group"] == "new"] == [1.0, 1.0]
    assert done.summary["views"]["personal"]["last"]["all"]["clients"] == len(row["cohort"])
    assert done.summary["views"]["personal"]["last"]["new"]["clients"] == 2


LATE = "new clients adapt for 6 rounds, so they are evaluated after the last round only"


@pytest.mark.parametrize("when", ["aggregated", "local"])
@pytest.mark.parametrize(
    ("settings", "rounds", "noted"),
    [
        ({"adapt_rounds": 5}, [2, 4, 5], False),
        ({"adapt_rounds": 6}, [5], True),
        ({"adapt_rounds": 6, "adapt_every": 1}, [2, 4, 5], False),
        ({"adapt_rounds": 0, "adapt_every": 0}, [5], False),
        ({"adapt_every": 4}, [4, 5], False),
        ({"adapt_every": 3}, [5], False),  # round 3 is not evaluated
    ],
)
def test_new_clients_are_evaluated_where_that_is_no_burden_or_asked_for(when, settings, rounds, noted):
    done = ran(rounds=5, data={"new_clients": 1}, evaluation={"every": 2, "when": when} | settings)
    assert [row["round"] for row in evaluated(done, group="new")] == rounds
    assert sorted({row["round"] for row in evaluated(done) if row["group"] != "new"}) == [2, 4, 5]
    assert any(note.startswith(LATE) for note in done.notes) == noted
    for row in evaluated(done, group="new"):
        assert row["logged"]["adapted"] == settings.get("adapt_rounds", 1)


def test_every_evaluation_of_the_population_is_of_the_same_clients():
    """Best rounds compare them, so clients that were not drawn yet are adapted in each, however long that takes."""
    done = ran(rounds=4, rate=0.3, data={"new_clients": 1}, evaluation={"every": 1, "adapt_rounds": 6})
    for number in range(1, 5):
        assert [row["client"] for row in evaluated(done, round=number) if row["group"] != "new"] == list(range(M - 1))


@pytest.mark.parametrize("when", ["aggregated", "local"])
@pytest.mark.parametrize(("whom", "groups"), [("all", {"train", "new"}), ("train", {"train"}), ("new", {"new"})])
def test_whom_to_evaluate_may_be_chosen(when, whom, groups):
    done = ran(rounds=2, rate=1.0, data={"new_clients": 2}, evaluation={"every": 1, "when": when, "clients": whom})
    for number in (1, 2):
        lines = evaluated(done, round=number)
        assert {row["group"] for row in lines} == groups and len(lines) == 4 * ("train" in groups) + 2 * (
            "new" in groups
        )
    if whom == "new":
        assert "all 2 new clients with test rows: accuracy" in str(done)


def test_new_clients_that_are_not_there_cannot_be_the_only_ones():
    with pytest.raises(UserError, match=r'clients = "new", but there are no new clients: set \[data\] new_clients'):
        ran(evaluation={"clients": "new"})
    with pytest.raises(UserError, match="patience judges the training population"):
        ran(data={"new_clients": 1, "validation": 0.2}, evaluation={"clients": "new", "patience": 1, "every": 1})


# --- unsound uploads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_an_unsound_upload_is_left_out_and_named(backend):
    done = ran(Toy(spoilt=(1,), bad_state=(4,)), rounds=2, rate=1.0, backend=backend)
    for number, row in enumerate(done.folder.rounds(), 1):
        assert row["refused"] == {"1": "its upload holds NaN or inf", "4": "its state holds NaN or inf"}
        assert row["logged"]["mine"] == [0.0, None, 2.0, 3.0, None, 5.0]
        assert "note" not in row
        assert number == row["round"]
    assert done.server["sum"].tolist() == [2.0, 2.0, 2.0]
    assert done.server["met"].tolist() == [2.0, 0.0, 2.0, 2.0, 0.0, 2.0]
    assert {row["client"]: row["logged"]["updates"] for row in evaluated(done)} == {
        0: 2.0,
        1: 0.0,
        2: 2.0,
        3: 2.0,
        4: 0.0,
        5: 2.0,
    }
    assert {row["client"] for row in evaluated(done, group="unseen")} == {1, 4}
    assert done.summary["refused"] == 4


def test_a_round_in_which_nobody_is_sound_leaves_the_server_unchanged_and_says_so():
    done = ran(Toy(spoilt=tuple(range(M))), rounds=2)
    for row in done.folder.rounds():
        assert row["note"] == "no upload was accepted: the server's state is unchanged"
        assert list(row["refused"]) == [str(c) for c in row["cohort"]]
        assert row["train_loss"] is None
    assert done.server["rounds"] == 0 and done.server["sum"].tolist() == [0.0] * 3
    assert {row["group"] for row in evaluated(done)} == {"unseen"}
    assert done.summary["notes"] == ["no upload was accepted: the server's state is unchanged"]


def test_a_diverging_run_ends_with_the_weights_it_had():
    done = ran(bespoke.FedAvg(), lr=1e30, rate=1.0, rounds=3, model={"name": "mlp", "hidden": 4}, steps=20)
    assert all(row["refused"] for row in done.folder.rounds())
    assert all(torch.isfinite(leaf).all() for leaf in tree.leaves(done.server))


# --- what a round's line says -------------------------------------------------------------------------------------


def test_a_line_has_the_documented_columns():
    done = ran(rounds=2, evaluation={"every": 1})
    for name, rows in (
        ("rounds.jsonl", done.folder.rounds()),
        ("clients.jsonl", evaluated(done)),
        ("timing.jsonl", done.folder.timing()),
    ):
        for row in rows:
            assert list(row) == [c for c in COLUMNS[name] if c not in ("note", "missing")]


def test_train_loss_is_weighted_as_the_clients_are():
    one = ran(rounds=1, rate=1.0, weighting="samples")
    sizes = np.array(one.folder.read_json("federation.json")["train"])
    losses = 1.0 + np.arange(M)
    assert one.folder.rounds()[0]["train_loss"] == pytest.approx((sizes * losses).sum() / sizes.sum())
    assert ran(rounds=1, rate=1.0, weighting="uniform").folder.rounds()[0]["train_loss"] == pytest.approx(losses.mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_are_counted_by_what_crosses(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        done = ran(Toy(spoilt=(1,)), rounds=1, rate=1.0)
    finally:
        torch.set_default_dtype(before)
    row = done.folder.rounds()[0]
    shared, own, up = 3 * 4, 8 + 4, 3 * 4  # an id is an int64; floats count four bytes whatever their precision
    assert row["bytes_down"] == M * (shared + own)
    assert row["bytes_up"] == M * up  # client 1 has answered too


def test_a_client_may_say_how_much_it_sent_and_received():
    row = ran(Toy(own_bytes=100), rounds=1, rate=1.0).folder.rounds()[0]
    assert row["bytes_up"] == sum(100 + c for c in range(M))
    assert row["bytes_down"] == sum(200 + c for c in range(M))
    assert not {"bytes_up", "bytes_down"} & row["logged"].keys()
    row = ran(Toy(own_bytes=100, spoilt=(1,)), rounds=1, rate=1.0).folder.rounds()[0]  # what it said is lost with it
    assert row["bytes_up"] == sum(100 + c for c in range(M) if c != 1) + 3 * 4
    assert row["bytes_down"] == sum(200 + c for c in range(M) if c != 1) + 3 * 4 + 8 + 4


@pytest.mark.parametrize(
    ("name", "down", "up"),
    [
        ("local", 0, 0),
        ("fedavg", 15, 15),
        ("fedavg_ft", 15, 15),
        ("fedper", 0, 0),
        ("lg_fedavg", 15, 15),
        ("ditto", 15, 15),
    ],
)
def test_bytes_of_the_methods(name, down, up):
    """The linear model has 4 * 3 weights and 3 biases, all of them its head."""
    row = ran(name, rounds=1).folder.rounds()[0]
    assert (row["bytes_down"], row["bytes_up"]) == (3 * 4 * down, 3 * 4 * up)


def test_evaluation_costs_no_bytes():
    often, once = ran(rounds=3, evaluation={"every": 1}), ran(rounds=3)
    assert [r["bytes_down"] for r in often.folder.rounds()] == [r["bytes_down"] for r in once.folder.rounds()]


def test_counts_are_of_the_clients_own_rows():
    done = ran(rounds=1, data={"validation": 0.25})
    told = done.folder.read_json("federation.json")
    pool = done.pool
    for split, rows in (("test", pool.test), ("val", pool.val)):
        found = evaluated(done, split=split)
        assert [row["total"] for row in found] == told[split] == list(rows.sizes)
        assert [row["metrics"]["accuracy"][0] for row in found] == [
            int((pool.y[rows.client(c)] == 0).sum()) for c in range(M)
        ]
        loss = [
            (math.log(math.e + 2) * n) - k for n, k in ((row["total"], row["metrics"]["accuracy"][0]) for row in found)
        ]
        assert [row["metrics"]["loss"][0] for row in found] == pytest.approx(loss, abs=1e-4)


def test_callbacks_are_told_of_every_round():
    events = []
    done = ran(rounds=3, evaluation={"every": 2}, callbacks=[events.append])
    assert [(e.round, e.rounds) for e in events] == [(1, 3), (2, 3), (3, 3)]
    assert [e.row for e in events] == done.folder.rounds()
    assert [row for e in events for row in e.evaluated] == evaluated(done)
    assert [bool(e.evaluated) for e in events] == [False, True, True]
    assert {"train", "aggregate", "evaluate"} <= events[0].seconds.keys()


def test_timing_has_a_line_for_every_round():
    done = ran(rounds=3)
    assert [row["round"] for row in done.folder.timing()] == [1, 2, 3]
    assert all(
        row[phase] >= 0 for row in done.folder.timing() for phase in ("train", "aggregate", "evaluate", "checkpoint")
    )


# --- when it ends -------------------------------------------------------------------------------------------------


def test_stop_finishes_the_round():
    calls = []
    done = ran(rounds=9, stop=lambda: calls.append(0) or len(calls) == 4)
    assert done.summary["rounds"] == 4


@dataclass(frozen=True)
class Scripted(Toy):
    """Right on validation and test rows as often as a script says, round by round."""

    script: tuple[float, ...] = ()

    def predict(self, task, personal, x):
        share = torch.tensor([1.0, *self.script])[(personal["bias"]).long().clamp(max=len(self.script))]
        # The rows' own first number orders them; the share of them with the lowest gets class 0.
        wrong = (x[:, 0].argsort().argsort() >= share * len(x)).long()
        return torch.nn.functional.one_hot(wrong, task.num_classes).to(x.dtype) + 0.0 * x.sum()


def one_class(*script, rounds=12, **evaluation):
    """All labels are 0, so the accuracy of a round is the script's."""
    x = np.linspace(0, 1, 400, dtype=np.float32).reshape(4, 100, 1)
    y = np.zeros(100, dtype=np.int64)
    clients = [(part, y) for part in x]
    pool = bespoke.data.from_arrays(clients, validation=0.5, num_classes=2)
    spec = Experiment(
        data=bespoke.DataSettings(validation=0.5),
        algorithm=Scripted(script=tuple(script)),
        training=bespoke.Training(rounds=rounds),
        evaluation=bespoke.Evaluation(**({"every": 1} | evaluation)),
    )
    return spec, pool


def scripted(monkeypatch, *script, **settings):
    spec, pool = one_class(*script, **settings)
    monkeypatch.setattr("bespoke.runs.api.partitioned", lambda *args, **kwargs: (pool, Partition([np.arange(1)])))
    monkeypatch.setattr("bespoke.runs.api._fitting", lambda pool, objective: pool)  # which refuses one class
    spec = dataclasses.replace(spec, model=bespoke.ModelSettings(name="linear"))
    return run_experiment(spec, backend="loop")


def test_patience_stops_after_so_many_evaluations_without_a_better_one(monkeypatch):
    curve = (0.5, 0.6, 0.6, 0.55, 0.9, 0.9, 0.9, 0.9)
    done = scripted(monkeypatch, *curve, patience=2)
    assert done.summary["rounds"] == 4  # 0.6 and 0.55 are no better than 0.6
    assert scripted(monkeypatch, *curve, patience=3).summary["rounds"] == 8
    assert scripted(monkeypatch, *curve, patience=0, rounds=10).summary["rounds"] == 10
    assert scripted(monkeypatch, *curve, patience=2, every=2).summary["rounds"] == 10  # 0.6, 0.55, 0.9, 0.9, 0.9


def test_new_clients_are_evaluated_where_patience_ends_a_run():
    settings = {"every": 1, "patience": 2, "adapt_rounds": 6}
    done = ran(rounds=9, data={"new_clients": 1, "validation": 0.2}, evaluation=settings)  # which learns nothing
    assert done.summary["rounds"] == 3
    assert {row["round"] for row in evaluated(done, group="new")} == {3}
    assert not evaluated(
        ran(rounds=9, data={"new_clients": 1, "validation": 0.2}, evaluation=settings | {"clients": "train"}),
        group="new",
    )


def test_patience_looks_at_the_training_populations_validation_rows_and_the_headline_alone():
    def row(correct, split="val", group="train", view="personal"):
        metrics = {"accuracy": [correct, 10], "loss": [0.0, 10]}
        line = {"round": 1, "client": 0, "split": split, "group": group, "view": view, "total": 10}
        return line | {"metrics": metrics, "logged": {}}

    def shown(metric="accuracy", higher=True):
        return {"evaluated": {"view": "personal", "metric": metric, "higher": {metric: higher}}}

    rows = [row(3), row(5, group="unseen"), row(10, group="new"), row(10, view="global"), row(10, split="test")]
    assert recording._validation(shown(), rows) == 0.4
    assert recording._validation(shown(higher=False), rows) == -0.4  # an error that falls is better
    assert recording._validation(shown(), [row(3, split="test")]) is None


def test_three_numbers_that_are_never_mixed(monkeypatch):
    done = scripted(monkeypatch, 0.5, 0.9, 0.7, 0.9, 0.6, rounds=5)
    view = done.summary["views"]["personal"]
    assert [view[s]["round"] for s in ("last", "best_val", "best_test")] == [5, 2, 2]  # the first of equals
    assert [view[s]["all"]["pooled"] for s in ("last", "best_val", "best_test")] == pytest.approx([0.6, 0.9, 0.9])
    assert done.accuracy == pytest.approx(0.6)


def test_without_validation_rows_there_is_no_best_val():
    done = ran(rounds=2, evaluation={"every": 1})
    view = done.summary["views"]["personal"]
    assert view["best_val"] is None
    assert view["best_test"] is not None and view["last"]["round"] == 2


def test_several_views_are_counted_and_the_first_is_the_headline():
    @dataclass(frozen=True)
    class Two(Toy):
        def predict(self, task, personal, x):
            one = super().predict(task, personal, x)
            return {"mine": one, "theirs": one.flip(-1)}

    done = ran(Two(), rounds=1)
    assert done.summary["headline"] == "mine"
    assert [row["view"] for row in evaluated(done, client=0)] == ["mine", "theirs"]
    y = done.pool.y[done.pool.test.client(0)]
    assert [row["metrics"]["accuracy"][0] for row in evaluated(done, client=0)] == [
        int((y == 0).sum()),
        int((y == 2).sum()),
    ]


# --- the parts together -------------------------------------------------------------------------------------------


def test_the_server_starts_from_the_common_parameters():
    done = ran(bespoke.FedAvg(), rounds=1)
    federation = done.federation
    assert federation.num_clients == federation.total_clients == M
    assert tree.flatten(federation.start()["model"]).keys() == tree.flatten(federation.params).keys()
    assert all(
        torch.equal(a, b)
        for a, b in zip(tree.leaves(federation.start()["model"]), tree.leaves(federation.params), strict=True)
    )


def test_one_round_of_fedavg_is_the_weighted_mean_of_the_clients_models():
    one = ran(bespoke.FedAvg(), rounds=1, rate=1.0)
    sizes = torch.tensor(one.folder.read_json("federation.json")["train"], dtype=torch.float64)
    federation = ran(bespoke.LocalOnly(), rounds=1, rate=1.0).federation
    states = [federation.clients.states()[c]["state"]["model"] for c in range(M)]
    for name, leaf in one.server["model"].items():
        stacked = torch.stack([state[name].double() for state in states])
        mean = (sizes[:, None] * stacked.reshape(M, -1)).sum(0) / sizes.sum()
        assert torch.allclose(leaf.double().flatten(), mean, atol=1e-6)
