"""The training loop as a generator: what a round holds, what is kept, and who may look at it."""

import gc
import weakref

import pytest
import torch
import toy
from small_runs import experiment

import bespoke
from bespoke.algorithms import ALGORITHMS
from bespoke.core import rng, tree
from bespoke.core.settings import Training
from bespoke.errors import UserError
from bespoke.runs import recording
from bespoke.runs.federation import Federation

TRAINING = Training(rounds=4, batch=4, lr=0.1, rate=0.5)


def federation(name="fedavg", backend="loop"):
    clients = toy.BACKENDS[backend](ALGORITHMS[name](), toy.task(), toy.start(), toy.data(), TRAINING, seed=5)
    return Federation.simulated(clients, seed=5)


@pytest.mark.parametrize("backend", toy.BACKENDS)
def test_a_round_holds_what_was_sent_what_came_back_and_the_new_server(backend):
    fed = federation(backend=backend)
    server = fed.start()
    for number, done in enumerate(fed.rounds(server), 1):
        assert done.number == number and done.cohort == rng.cohort(rng.key(5), number, 4, 0.5, "fixed")
        assert toy.same_bits(done.shared["model"], server["model"]) and done.own == {}
        assert done.uploads.clients.tolist() == done.cohort and done.refused == {}
        mean = tree.mean(done.uploads.tree, done.uploads.weights)
        assert toy.same_bits(done.server["model"], mean["model"])
        assert done.seconds.keys() == {"train", "aggregate"} and min(done.seconds.values()) >= 0
        server = done.server
    assert number == 4


def test_nothing_of_a_round_is_kept_but_the_servers_state():
    rounds = federation().rounds()
    done = next(rounds)
    watched = [weakref.ref(leaf) for leaf in (*tree.leaves(done.uploads.tree), done.uploads.weights)]
    server = done.server
    del done
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    assert toy.same_bits(next(rounds).shared["model"], server["model"])


def test_cohorts_may_be_given_and_a_run_may_start_later():
    fed = federation()
    assert [list(done.cohort) for done in fed.rounds(cohort=lambda number: [number - 1])] == [[0], [1], [2], [3]]
    whole = [done.server for done in federation().rounds()]
    fed, rounds = federation(), []
    for done in fed.rounds():
        rounds.append(done)
        if done.number == 2:
            break
    later = [done.server for done in fed.rounds(rounds[-1].server, first=3)]
    assert len(later) == 2 and toy.same_bits(later[-1], whole[-1])


def test_callbacks_see_the_round_and_the_servers_state():
    seen = []
    run = bespoke.run(experiment(rounds=3), callbacks=[seen.append])
    assert [event.round for event in seen] == [1, 2, 3] and seen[0].rounds == 3
    assert toy.same_bits(seen[-1].server, run.server) and not toy.same_bits(seen[0].server, run.server)
    assert seen[-1].row["round"] == 3 and seen[-1].evaluated and not seen[0].evaluated
    assert isinstance(next(tree.leaves(seen[0].server)), torch.Tensor)


def test_only_a_simulation_can_be_looked_into():
    fed = federation()
    assert fed.inspect() is fed.clients
    fed.inside = None
    with pytest.raises(UserError, match="only a simulation has personal models and probes"):
        fed.inspect()


def test_if_the_servers_step_fails_nobodys_state_has_changed_and_the_error_names_the_round():
    fed = federation("ditto")

    class Breaks(type(fed.algorithm)):
        def aggregate(self, task, server, uploads, key):
            raise ArithmeticError("cannot add")

    fed.algorithm = Breaks()
    with pytest.raises(ArithmeticError, match="cannot add") as found:
        next(fed.rounds())
    assert found.value.__notes__ == ["This happened in Breaks, on the server, round 1."]
    assert fed.clients.states() == {}


def test_patience_counts_only_rounds_that_were_judged_by_the_same_metric():
    def line(round, **metrics):
        shown = {"round": round, "client": 0, "group": "train", "split": "val", "view": "v", "total": 4, "logged": {}}
        return shown | {"metrics": metrics}

    records = toy.MemoryRecords()
    higher = {"r2": True, "mae": False}
    for number, metric in ((1, "r2"), (2, "mae"), (3, "mae")):
        shown = {"round": number, "evaluated": {"view": "v", "metric": metric, "higher": higher}}
        records.append("rounds.jsonl", [shown])
        records.append("clients.jsonl", [line(number, r2=[2.0, 4.0], mae=[4.0 * number, 4.0])])
    assert recording.validation_curve(records, "r2") == [0.5]
    assert recording.validation_curve(records, "mae") == [-2.0, -3.0]
