"""One client's work without a pool: what a node on its own machine does, beside the same client of a simulation."""

import functools
from dataclasses import dataclass, replace
from typing import final

import pytest
import torch
import toy
from torch import nn

from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.fedavg import FedAvg
from bespoke.clients import SequentialClients
from bespoke.clients.work import Work, clock, desk_alone
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import Rows
from bespoke.core.objective import CLASSIFICATION, Metric
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.engine.rows import ClientRows

TRAINING = Training(rounds=2, epochs=2, batch=4, lr=0.1, momentum=0.5, keep_optimizer=True)
CLIENT, SEED = 1, 5


def node_rows(rows):
    """Rows that the node itself holds: there is nobody else's row to reach."""
    data = toy.data()
    x, y = data.x[rows].clone(), data.y[rows].clone()
    return ClientRows(x, y, torch.arange(len(rows)), torch.tensor(len(rows)), dtype=torch.float64)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "ditto", "pfedfda", "fedproto", "self_fl"])
def test_a_node_of_its_own_does_what_the_simulated_client_does(name):
    method, task, data = ALGORITHMS[name](), toy.task(), toy.data()
    clients = SequentialClients(method, task, toy.start(), data, TRAINING, SEED)
    server = method.server_init(task, toy.start(), data.num_clients, rng.stream(rng.key(SEED), rng.SERVER))
    shared, own = method.broadcast(server), method.tailor(server, torch.tensor([CLIENT]))
    down = shared | tree.map(lambda leaf: leaf[0], own)
    work, rows = Work(method, task), node_rows(data.train.client(CLIENT))
    state, moments = method.client_init(task, toy.start(), torch.tensor(CLIENT)), {}
    for number in (1, 2):
        trained = toy.train(clients, number, [CLIENT], shared, own)
        key = rng.stream(rng.key(SEED), rng.TRAIN, number, CLIENT)
        local = desk_alone(task, TRAINING, rows, len(rows.rows), key, clock(task, TRAINING, number), moments)
        with torch.no_grad():
            out = work.update(local, {}, state, down)
        state, moments = out["state"], out["moments"]
        assert toy.same_bits(tree.map(lambda leaf: leaf[0], trained.uploads.tree), out["up"])
        assert toy.same_bits(clients.states()[CLIENT], {"state": state, "moments": moments})
        assert {name: values[0] for name, values in trained.logged.items()} == {
            name: value.item() for name, value in out["logged"].items()
        }
    held_out = {"test": node_rows(data.test.client(CLIENT))}
    key = rng.stream(rng.key(SEED), rng.EVAL, 2, CLIENT)
    local = desk_alone(task, TRAINING, rows, len(rows.rows), key, clock(task, TRAINING, 2), {})
    with torch.no_grad():
        found = work.evaluate(local, held_out, state, down)["scores"]["test"]
    for row in clients.evaluate(2, [CLIENT], shared, own):
        pairs = {name: [pair["sum"].item(), pair["weight"].item()] for name, pair in found[row.view].items()}
        assert row.metrics == pairs


@pytest.mark.parametrize("name", ["fedpce", "ditto", "fedrep"])
def test_a_new_node_adapts_as_the_simulated_client_does(name):
    method, data, new, rounds = ALGORITHMS[name](), toy.data(), toy.EVERYONE[-1], 3
    task = Task(functools.partial(toy.Net, norm=nn.LayerNorm), "head", toy.CLASSES, dtype=torch.float64)
    training = replace(TRAINING, schedule="cosine")
    clients = SequentialClients(method, task, task.init(rng.key(1)), data, training, SEED, adapt_rounds=rounds)
    server = method.server_init(task, clients.params, data.num_clients, rng.stream(rng.key(SEED), rng.SERVER))
    work, rows, down = Work(method, task), node_rows(data.train.client(new)), method.broadcast(server)
    key = rng.stream(rng.key(SEED), rng.EVAL, 2, new)

    def node(time, moments):
        return desk_alone(task, training, rows, len(rows.rows), key, time, moments)

    state, moments = work.first(clients.params, torch.tensor(-1)), {}
    with torch.no_grad():
        for number in range(1, rounds + 1):
            out = work.adapt(node(clock(task, training, number, rounds), moments), {}, state, down)
            state, moments = out["state"], out["moments"]
        personal = work.personalize(node(clock(task, training, 2), {}), {}, state, down)
    assert toy.same_bits(clients.personal(2, [new], down, {})[0], personal)


@pytest.mark.parametrize("backend", toy.BACKENDS)
def test_states_change_when_they_are_accepted_and_not_before(backend):
    clients = toy.BACKENDS[backend](ALGORITHMS["ditto"](), toy.task(), toy.start(), toy.data(), TRAINING, SEED)
    clients.train(1, [0, 1, 2], {"model": toy.start()}, {})
    assert clients.states() == {} and not clients.took_part(1)
    clients.accept([2, 0])  # the server leaves client 1 out, and may name them in any order
    assert list(clients.states()) == [0, 2] and not clients.took_part(1)
    first = clients.states()[0]
    clients.train(2, [0], {"model": toy.start()}, {})
    clients.accept([])
    assert toy.same_bits(first, clients.states()[0])
    with pytest.raises(ValueError, match=r"clients \[0\] cannot be accepted: they did not answer"):
        clients.accept([0])


@pytest.mark.parametrize("backend", toy.BACKENDS)
@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyError])
def test_an_error_inside_a_method_names_method_client_and_round(backend, error):
    class Breaks(type(ALGORITHMS["fedavg"]())):
        def client_update(self, local, state, down):
            raise error("broken")

    clients = toy.BACKENDS[backend](Breaks(), toy.task(), toy.start(), toy.data(), TRAINING, SEED)
    with pytest.raises(error, match="broken") as found:
        clients.train(7, [2, 1], {"model": toy.start()}, {})
    assert any(
        note.startswith("This happened in Breaks, client") and "round 7" in note for note in found.value.__notes__
    )


@pytest.mark.parametrize("backend", toy.BACKENDS)
@pytest.mark.parametrize("took_part", [True, False], ids=["took part", "new"])
@pytest.mark.parametrize("lr", [None, 0.2, (0.3, 0.001)], ids=["base rate", "own rate", "pair"])
def test_personalize_trains_at_the_base_rate_whatever_the_round(backend, took_part, lr):
    class Tuned(FedAvg):
        def personalize(self, local, state, down):
            return local.finetune(down["model"], 2, lr=lr)

    def personal(schedule, round):
        training = replace(TRAINING, rounds=4, schedule=schedule, schedule_rounds=2)
        clients = toy.BACKENDS[backend](Tuned(), toy.task(), toy.start(), toy.data(), training, SEED)
        if took_part:
            toy.train(clients, 1, [0, 1, 2, 3], {"model": toy.start()}, {})
        return clients.personal(round, [0, 3], {"model": toy.start()}, {})

    constant = personal("constant", 4)
    for schedule in ("cosine", "step"):  # in round 4 the rate is 0, or a tenth
        for one, two in zip(personal(schedule, 4), constant, strict=True):
            assert toy.gap(one, two) < 1e-12
    assert toy.gap(constant[0], toy.start()) > 1e-2


def picky(outputs, y, mask):
    """A metric that looks at values."""
    best = max(outputs[int(i)].max().item() for i in range(len(y)) if mask[i] > 0) if mask.sum() > 0 else 0.0
    return torch.tensor(best, dtype=torch.float64), mask.sum()


def fussy(outputs, y, mask):
    """A metric that fails under vmap with an error of its own."""
    if torch._C._functorch.is_batchedtensor(outputs):
        raise ValueError
    return picky(outputs, y, mask)


@final
@dataclass(frozen=True)
class Unmapped(Algorithm):
    """Personalises with a value that cannot be read under vmap, and fails there with an error of its own."""

    def client_update(self, local, state, down):
        return state, {"model": local.sgd(local.task.loss, down["model"])}

    def personalize(self, local, state, down):
        if torch._C._functorch.is_batchedtensor(local.n):
            raise LookupError("not here")
        return down["model"]


@pytest.mark.parametrize("similar", [0.0, 0.9], ids=["one block", "several blocks"])
@pytest.mark.parametrize("method", [ALGORITHMS["fedavg"](), Unmapped()], ids=["mapped", "unmapped"])
@pytest.mark.parametrize("metric", [picky, fussy])
def test_a_metric_that_cannot_be_mapped_runs_on_gathered_outputs_and_switches_nothing_off(metric, method, similar):
    found, data = {}, replace(toy.data(), test=Rows.of([*map(toy.data().test.client, range(4)), []]))
    objective = replace(CLASSIFICATION, metrics={"picky": Metric(metric), **CLASSIFICATION.metrics})
    task = Task(toy.Net, "head", toy.CLASSES, dtype=torch.float64, objective=objective)
    for backend, kind in toy.BACKENDS.items():
        clients = kind(method, task, toy.start(), data, TRAINING, SEED)
        clients.similar = similar
        toy.train(clients, 1, [0, 1, 2, 3], {"model": toy.start()}, {})
        found[backend] = clients.evaluate(1, toy.EVERYONE, {"model": toy.start()}, {})
        wanted = ["the metric picky runs on gathered outputs"] * (backend == "batched")
        wanted += ["clients ran one after another"] * (backend == "batched" and isinstance(method, Unmapped))
        assert [note.partition(",")[0] for note in clients.notes] == wanted
    for one, two in zip(*found.values(), strict=True):
        assert one[:4] == two[:4] and list(one.metrics) == list(two.metrics) == ["picky", "accuracy", "loss"]
        for name in one.metrics:
            assert one.metrics[name] == pytest.approx(two.metrics[name], abs=1e-12)
    assert found["loop"][-1].total == 0 and found["loop"][-1].metrics["picky"] == [0.0, 0.0]
