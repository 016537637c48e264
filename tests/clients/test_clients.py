"""Ways to reach clients: who is accepted, what cannot be mapped, what adapts, and that both ways agree."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import pytest
import torch
import toy
from torch import nn
from torch.nn import functional as F
from toy import BACKENDS, gap, train

from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.ditto import Ditto
from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedper import FedPer
from bespoke.algorithms.local import LocalOnly
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm, Uploads
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.runs.federation import Evaluation, Federation
from bespoke.runs.recording import recorded

INPUTS, CLASSES = 3, 3
SIZES = (1, 9, 4, 20, 6)


Net = functools.partial(toy.Net, INPUTS, 4, CLASSES)
NormedNet = functools.partial(Net, norm=nn.LayerNorm)  # for methods that need a normalisation layer


@functools.cache
def task():
    return Task(Net, "head", CLASSES, dtype=torch.float64)


def params():
    return task().init(rng.key(2))


@functools.cache
def pool(sizes=SIZES, test=(3, 0, 2, 5, 4), population=None):
    total = sum(sizes) + sum(test)
    x = rng.normal(rng.key(1), (total, INPUTS), torch.float64)
    y = (rng.uniform(rng.key(2), (total,)) * CLASSES).long()
    parts = torch.arange(total).split([*sizes, *test])
    train, test = parts[: len(sizes)], parts[len(sizes) :]
    return toy.data_of(x, y, train, test, classes=CLASSES, population=population)


def make(backend, method, training=None, pool=pool, **options):
    return BACKENDS[backend](method, task(), params(), pool(), training or Training(lr=0.2, batch=4), 7, **options)


EVERYONE = list(range(len(SIZES)))


@final
@dataclass(frozen=True)
class Toy(Algorithm):
    """Does what its functions say."""

    update: Callable[..., Any] = lambda local, state, down: (state, {})
    views: Callable[..., Any] = lambda task, personal, x: task.logits(personal, x)
    private: ClassVar[tuple[str, ...]] = ("secret",)

    def client_init(self, task, params, client):
        return {"count": torch.zeros((), dtype=torch.float64), "client": client.double()}

    def client_update(self, local, state, down):
        return self.update(local, state, down)

    def personalize(self, local, state, down):
        return down["model"]

    def predict(self, task, personal, x):
        return self.views(task, personal, x)


# --- unsound answers ------------------------------------------------------------------------------------------


def spoil(name, value, victims=(9.0,)):
    """A method that counts its rounds and puts ``value`` into one part of the answer of some clients, by rows."""

    def update(local, state, down):
        bad = functools.reduce(torch.logical_or, [local.n == v for v in victims])
        one = torch.ones((), dtype=torch.float64)
        wrong = torch.where(bad, value * one, one)
        count = state["count"] + 1
        new = {"count": count, "client": state["client"]}
        if name == "state":
            new["count"] = count * wrong
        local.log(rows=local.n)
        up = {"model": {"w": one * local.n * (wrong if name == "upload" else 1.0), "v": torch.stack([one, one])}}
        return new, up

    return Toy(update)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["upload", "state"])
def test_an_unsound_answer_is_refused_and_the_state_kept(name, value, backend):
    clients = make(backend, spoil("none", value))
    train(clients, 1, EVERYONE, {}, {})
    clients.work = replace(clients.work, algorithm=spoil(name, value))
    trained = train(clients, 2, [3, 1, 0], {}, {})
    assert trained.refused == {1: f"its {name} holds NaN or inf"}
    assert trained.uploads.clients.tolist() == [3, 0]
    assert trained.uploads.weights.tolist() == [20.0, 1.0]
    assert trained.uploads.tree["model"]["w"].tolist() == [20.0, 1.0]
    assert trained.logged == {"rows": [20.0, 1.0]}
    counts = [clients.states()[c]["state"]["count"].item() for c in EVERYONE]
    assert counts == [2, 1, 1, 2, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_client_refused_at_first_never_took_part(backend):
    clients = make(backend, spoil("upload", torch.nan))
    train(clients, 1, [0, 1], {}, {})
    assert [clients.took_part(c) for c in (0, 1, 2)] == [True, False, False]
    assert clients.states().keys() == {0}
    everybody = make(backend, spoil("upload", torch.nan, victims=SIZES))
    trained = train(everybody, 1, EVERYONE, {}, {})
    assert list(trained.refused) == EVERYONE
    assert len(trained.uploads.clients) == len(trained.uploads.weights) == 0
    assert trained.uploads.tree["model"]["v"].shape == (0, 2)
    assert everybody.states() == {}


class Memory:
    def __init__(self):
        self.rows = {"rounds.jsonl": [], "clients.jsonl": [], "timing.jsonl": []}

    def append(self, name, rows):
        self.rows[name] += rows

    def clients(self):
        return self.rows["clients.jsonl"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_round_goes_on_without_the_refused(backend):
    """The server averages the sound ones; where there is none, it stays and the record says so."""
    training = Training(rounds=1, weighting="uniform")
    records = {}
    for victims in ((9.0,), SIZES):
        method = spoil("upload", torch.inf, victims)
        clients = make(backend, method, training)
        fed = Federation(method, task(), params(), clients, 5, 5, training, Evaluation(), 7)
        memory = Memory()
        start = {"model": {"w": torch.tensor(-1.0).double(), "v": torch.zeros(2).double()}}
        clients.evaluate = lambda *args: []
        server = recorded(fed, memory, server=start)
        records[victims] = server, memory.rows["rounds.jsonl"][0]
    server, row = records[(9.0,)]
    assert server["model"]["w"].item() == pytest.approx((1 + 4 + 20 + 6) / 4)
    assert row["refused"] == {"1": "its upload holds NaN or inf"}
    assert row["logged"]["rows"] == [1.0, None, 4.0, 20.0, 6.0]
    assert row["bytes_up"] == 5 * 12  # what was refused was sent all the same
    assert "note" not in row
    server, row = records[SIZES]
    assert server["model"]["w"].item() == -1.0
    assert row["refused"].keys() == set("01234")
    assert "no upload was accepted: the server's state is unchanged" in row["note"]


# --- what cannot be mapped ------------------------------------------------------------------------------------


def by_item(local, state, down):
    factor = 2.0 if local.n.item() > 5 else 1.0
    return state, {"model": tree.map(lambda p: p * factor, down["model"])}


def by_branch(local, state, down):
    if local.n > 5:
        return state, {"model": tree.map(lambda p: p * 2.0, down["model"])}
    return state, {"model": down["model"]}


def by_boolean_index(local, state, down):
    y, mask = local.labels()
    rows = y[mask > 0]
    return state, {"model": tree.map(lambda p: p * (2.0 if len(rows) > 5 else 1.0), down["model"])}


@pytest.mark.parametrize("update", [by_item, by_branch, by_boolean_index])
def test_what_cannot_be_mapped_runs_in_the_loop_with_a_note(update):
    shared = {"model": params()}
    loop, batched = make("loop", Toy(update)), make("batched", Toy(update))
    batched.chunk = 2
    want, found = train(loop, 1, EVERYONE, shared, {}), train(batched, 1, EVERYONE, shared, {})
    assert gap(found.uploads.tree, want.uploads.tree) == 0
    assert found.uploads.clients.tolist() == EVERYONE
    assert (want.uploads.tree["model"]["head.bias"][1] / want.uploads.tree["model"]["head.bias"][0]).mean() == 2
    assert len(batched.notes) == 1
    assert "clients ran one after another, because mapping them failed: " in batched.notes[0]
    assert "\n" not in batched.notes[0]
    train(batched, 2, EVERYONE, shared, {})
    assert len(batched.notes) == 1  # tried once
    assert loop.notes == []


def test_only_the_part_that_cannot_be_mapped_is_blamed():
    clients = make("batched", FedAvg())
    train(clients, 1, EVERYONE, {"model": params()}, {})
    assert clients.notes == []
    clients.work = replace(clients.work, algorithm=Toy(by_item))
    train(clients, 2, EVERYONE, {"model": params()}, {})
    assert len(clients.notes) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, ValueError, KeyError, ZeroDivisionError])
def test_a_methods_own_error_surfaces_as_itself(error, backend):
    def update(local, state, down):
        raise error("the method's own words")

    clients = make(backend, Toy(update))
    with pytest.raises(error, match="the method's own words"):
        train(clients, 1, EVERYONE, {}, {})
    assert clients.notes == []
    assert clients.states() == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_shape_surfaces_in_plain_words(backend):
    def update(local, state, down):
        return state, {"model": down["model"]["head.weight"] @ torch.ones(99, dtype=torch.float64)}

    clients = make(backend, Toy(update))
    with pytest.raises(RuntimeError, match=r"(size|shape).*99"):
        train(clients, 1, EVERYONE, {"model": params()}, {})
    assert clients.notes == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_that_are_missing_are_named(backend):
    @final
    @dataclass(frozen=True)
    class Empty(Algorithm):
        pass

    clients = make(backend, Empty())
    with pytest.raises(NotImplementedError, match=r"Empty needs client_update\(local, state, down\)"):
        train(clients, 1, EVERYONE, {}, {})
    with pytest.raises(NotImplementedError, match=r"Empty needs personalize\(local, state, down\)"):
        clients.evaluate(1, EVERYONE, {}, {})


# --- what may be uploaded -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_private_part_is_never_uploaded(backend):
    clients = make(backend, Toy(lambda local, state, down: (state, {"secret": local.lr, "fine": local.lr})))
    with pytest.raises(ValueError, match=r"Toy uploads \['secret'\], which it declares private"):
        train(clients, 1, EVERYONE, {}, {})
    assert clients.states() == {}


def test_uploads_that_the_server_cannot_average():
    ones, ids = torch.ones(2), torch.arange(2)
    server = {"model": {"w": torch.zeros(3)}}
    method = FedAvg()
    unknown = Uploads({"model": {"w": torch.ones(2, 3)}, "extra": torch.ones(2)}, ones, ids)
    with pytest.raises(KeyError, match=r"FedAvg uploads \['extra'\], which the server does not hold: .*`aggregate`"):
        method.aggregate(task(), server, unknown, rng.key(0))
    counts = Uploads({"model": {"w": torch.ones(2, 3, dtype=torch.int64)}}, ones, ids)
    with pytest.raises(TypeError, match="integer leaves has no mean: aggregate those names"):
        method.aggregate(task(), server, counts, rng.key(0))


def test_names_that_are_not_uploaded_stay_on_the_server():
    server = {"model": {"w": torch.zeros(3)}, "momentum": torch.full((3,), 5.0)}
    up = Uploads({"model": {"w": torch.tensor([[1.0, 1, 1], [4.0, 4, 4]])}}, torch.tensor([2.0, 1.0]), torch.arange(2))
    after = FedAvg().aggregate(task(), server, up, rng.key(0))
    assert after["model"]["w"].tolist() == [2.0, 2.0, 2.0]
    assert after["momentum"].tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("weighting", "want"), [("samples", [20.0, 4.0, 1.0]), ("uniform", [1.0, 1.0, 1.0])])
def test_weights_and_order_of_the_answer(backend, weighting, want):
    def update(local, state, down):
        return state, {"rows": local.n.double(), "own": down["own"], "shared": down["shared"]}

    clients = make(backend, Toy(update), Training(weighting=weighting))
    clients.chunk = 2
    own = {"own": torch.tensor([[3.0, 3.0], [2.0, 2.0], [0.0, 0.0]], dtype=torch.float64)}
    trained = train(clients, 1, [3, 2, 0], {"shared": torch.ones(2, dtype=torch.float64)}, own)
    assert trained.uploads.weights.tolist() == want
    assert trained.uploads.clients.tolist() == [3, 2, 0]
    assert trained.uploads.tree["rows"].tolist() == [20.0, 4.0, 1.0]
    assert torch.equal(trained.uploads.tree["own"], own["own"])
    assert trained.uploads.tree["shared"].shape == (3, 2)


# --- states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_state_is_made_for_the_client_and_kept(backend):
    def update(local, state, down):
        return {"count": state["count"] + 1, "client": state["client"]}, {"client": state["client"]}

    clients = make(backend, Toy(update), pool=functools.partial(pool, population=4))
    trained = train(clients, 1, EVERYONE, {}, {})
    assert trained.uploads.tree["client"].tolist() == [0, 1, 2, 3, -1]  # the last is not of the population
    train(clients, 2, [1, 3], {}, {})
    assert [clients.states()[c]["state"]["count"].item() for c in EVERYONE] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("branches", [False, True])
def test_first_states_of_a_block_are_made_at_once_where_they_can_be(branches):
    calls = []

    class Counts(Toy):
        def client_init(self, task, params, client):
            calls.append(client)
            known = client if not branches or client >= 0 else torch.full_like(client, -1)
            return super().client_init(task, params, known)

    def update(local, state, down):
        return state, {"client": state["client"]}

    clients = make("batched", Counts(update), pool=functools.partial(pool, population=4))
    train(clients, 1, [1], {}, {})
    calls.clear()
    trained = train(clients, 2, EVERYONE, {}, {})  # one of them has a state already
    assert trained.uploads.tree["client"].tolist() == [0, 1, 2, 3, -1]
    assert not clients.notes
    assert len(calls) == (2 + 4 if branches else 2)  # two blocks, then one after another for the four without a state


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("settings", [{}, {"keep_optimizer": True, "momentum": 0.9, "clip": 0.5}])
def test_restored_clients_go_on_as_if_nothing_had_happened(backend, settings):
    """Whatever the order of the names in what was stored."""
    training = Training(lr=0.2, batch=4, **settings)
    first = make(backend, Ditto(), training)
    shared = {"model": params()}
    train(first, 1, [0, 1, 3], shared, {})
    second = make(backend, Ditto(), training)
    second.store.put([0, 1, 3], turned(first.store.get([0, 1, 3])))
    for clients in (first, second):
        train(clients, 2, EVERYONE, shared, {})
    for c in EVERYONE:
        assert gap(first.states()[c], second.states()[c]) < 1e-14


def turned(value):
    """The same tree with its names in the other order."""
    if not isinstance(value, dict):
        return value.clone()
    return {name: turned(value[name]) for name in reversed(value)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_changes_no_state(backend):
    for method, down in ((ALGORITHMS["fedavg_ft"](), {"model": params()}), (LocalOnly(), {})):
        clients = make(backend, method)
        train(clients, 1, [0, 3], down, {})
        before = {c: turned(s) for c, s in clients.states().items()}
        one = clients.evaluate(1, EVERYONE, down, {})
        clients.personal(1, EVERYONE, down, {})
        clients.probe(lambda local, state, down: {"n": local.n}, EVERYONE, down, {})
        assert clients.states().keys() == before.keys()
        assert all(gap(clients.states()[c], before[c]) == 0 for c in before)
        assert clients.evaluate(1, EVERYONE, down, {}) == one


# --- evaluation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_are_those_of_the_personal_models(backend):
    clients = make(backend, LocalOnly())
    clients.chunk, clients.padding = 2, 3
    train(clients, 1, [1, 3], {}, {})
    found = clients.evaluate(1, [4, 3, 1, 0], {}, {})
    models = clients.personal(1, [4, 3, 1, 0], {}, {})
    assert [(e.client, e.split, e.view) for e in found] == [(c, "test", "personal") for c in (4, 3, 1, 0)]
    for e, model in zip(found, models, strict=True):
        rows = pool().test.client(e.client)
        logits = task().logits(model, pool().x[rows])
        assert e.total == len(rows)
        assert e.metrics["accuracy"][0] == (logits.argmax(1) == pool().y[rows]).sum()
        assert e.metrics["loss"][0] == pytest.approx(
            F.cross_entropy(logits, pool().y[rows], reduction="sum").item(), abs=1e-12
        )
    assert (
        found[2].total == found[2].metrics["accuracy"][0] == found[2].metrics["loss"][0] == 0
    )  # client 1 has no test rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_splits_and_unsound_predictions(backend):
    def views(task, personal, x):
        good = task.logits(personal, x)
        return {"good": good, "broken": good * torch.nan, "bad": -good}

    both = replace(pool(), val=pool().test, test=pool().train)
    clients = make(backend, Toy(views=views), pool=lambda: both)
    clients.padding = 2
    found = clients.evaluate(1, EVERYONE, {"model": params()}, {})
    assert [(e.split, e.view) for e in found[:6]] == [
        (split, view) for split in ("test", "val") for view in ("good", "broken", "bad")
    ]
    for e in found:
        rows = (both.test if e.split == "test" else both.val).client(e.client)
        logits = task().logits(params(), both.x[rows]) * (-1 if e.view == "bad" else 1)
        right = (logits.argmax(1) == both.y[rows]).sum().item()
        assert e.total == len(rows)
        assert e.metrics["accuracy"][0] == (0 if e.view == "broken" else right)
        if e.view == "broken" and len(rows):
            assert e.metrics["loss"][0] != e.metrics["loss"][0]
        else:
            want = F.cross_entropy(logits, both.y[rows], reduction="sum").item()
            assert e.metrics["loss"][0] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_test_rows_are_scored_in_chunks(backend, monkeypatch):
    from bespoke.engine import rows as engine_rows

    whole = make(backend, Toy()).evaluate(1, EVERYONE, {"model": params()}, {})
    monkeypatch.setattr(engine_rows, "CHUNK", 2)
    pieces = make(backend, Toy()).evaluate(1, EVERYONE, {"model": params()}, {})
    assert [(*e[:4], e.metrics["accuracy"]) for e in pieces] == [(*e[:4], e.metrics["accuracy"]) for e in whole]
    assert [e.metrics["loss"][0] for e in pieces] == pytest.approx([e.metrics["loss"][0] for e in whole], abs=1e-12)


# --- clients that never took part -----------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Counting(Algorithm):
    """Its state counts the passes of adaptation and their steps."""

    def client_init(self, task, params, client):
        return {"log": torch.zeros(4, dtype=torch.float64)}

    def client_update(self, local, state, down):
        return state, {}

    def adapt(self, local, state, down):
        steps = local.scan(lambda c, b: {"t": c["t"] + 1.0}, {"t": torch.zeros((), dtype=torch.float64)})["t"]
        log = [state["log"][0] + 1, state["log"][1] + steps, local.round.double(), local.rounds.double()]
        return {"log": torch.stack(log)}

    def personalize(self, local, state, down):
        return {"log": state["log"]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize(
    ("training", "adapt_epochs", "steps"),
    [
        ({"epochs": 2}, 0, [2, 6, 2, 10, 4]),
        ({"epochs": 2}, 5, [5, 15, 5, 25, 10]),
        ({"steps": 7}, 0, [7] * 5),
        ({"steps": 7}, 1, [1, 3, 1, 5, 2]),
    ],
)
def test_adaptation_is_for_those_who_never_took_part(backend, rounds, training, adapt_epochs, steps):
    settings = Training(batch=4, **training)
    clients = make(backend, Counting(), settings, adapt_rounds=rounds, adapt_epochs=adapt_epochs)
    train(clients, 1, [3], {}, {})
    logs = [p["log"].tolist() for p in clients.personal(1, EVERYONE, {}, {})]
    for client, (passes, taken, *last) in enumerate(logs):
        if client == 3 or not rounds:
            assert (passes, taken) == (0, 0)
        else:
            assert (passes, taken) == (rounds, rounds * steps[client])
            assert last == [rounds, rounds]  # the schedule of the adaptation is its own


@final
@dataclass(frozen=True)
class Listening(Algorithm):
    """Its state is the key and the learning rate of every pass of adaptation."""

    def client_init(self, task, params, client):
        return {"keys": torch.zeros(3, 2, dtype=torch.int64), "rates": torch.zeros(3, dtype=torch.float64)}

    def client_update(self, local, state, down):
        return state, {}

    def adapt(self, local, state, down):
        here = torch.arange(3) == local.round - 1
        keys = torch.where(here[:, None], local.key, state["keys"])
        return {"keys": keys, "rates": torch.where(here, local.lr, state["rates"])}

    def personalize(self, local, state, down):
        return state | {"main": local.key, "rate": local.lr * torch.ones((), dtype=torch.float64)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_pass_of_adaptation_has_its_own_draws_and_rate(backend):
    training = Training(rounds=8, lr=0.4, schedule="cosine", lr_final=0.1)
    clients = make(backend, Listening(), training, adapt_rounds=3)
    for client, found in enumerate(clients.personal(5, EVERYONE, {}, {})):
        main = rng.stream(rng.key(7), rng.EVAL, 5, client)
        assert torch.equal(found["main"], main)
        passes = [rng.fold_in(rng.fold_in(main, rng.ADAPT), r) for r in range(3)]
        assert torch.equal(found["keys"], torch.stack(passes))
        # The schedule starts again and runs over the rounds of adaptation: cos 0, 60 and 120 degrees.
        assert found["rates"].tolist() == pytest.approx([0.4, 0.1 + 0.3 * 0.75, 0.1 + 0.3 * 0.25])
        assert found["rate"].item() == pytest.approx(0.4)  # personalize is no part of the schedule


@pytest.mark.parametrize("backend", BACKENDS)
def test_adaptation_depends_on_the_client_and_not_on_the_company(backend):
    clients = make(backend, FedPer(new_head_epochs=3))
    shared = {"body": task().body(params())}
    together = clients.personal(2, EVERYONE, shared, {})
    alone = clients.personal(2, [4], shared, {})[0]
    assert gap(together[4], alone) == 0
    assert gap(task().body(alone), task().body(params())) == 0
    assert gap(task().head(alone), task().head(params())) > 1e-3
    one, two = (make(backend, FedPer(new_head_epochs=3)).evaluate(2, who, shared, {}) for who in (EVERYONE, [4]))
    assert one[4].metrics["loss"][0] == pytest.approx(two[0].metrics["loss"][0], abs=1e-12)


# --- both ways agree ------------------------------------------------------------------------------------------


def test_probes_agree():
    def look(local, state, down):
        z, _, mask = local.features(down["model"])
        count = local.scan(lambda c, b: {"s": c["s"] + b.mask.sum()}, {"s": torch.zeros((), dtype=torch.float64)})
        fit = local.sgd(local.task.loss, down["model"], epochs=2)
        return {"mean": (z * mask[:, None]).sum(0) / local.n, "z": z * mask[:, None], "count": count, "fit": fit}

    who, found = [3, 0, 4, 1], {}
    for backend in BACKENDS:
        clients = make(backend, FedAvg())
        clients.chunk = 3
        found[backend] = clients.probe(look, who, {"model": params()}, {})
        assert clients.notes == []
    assert found["loop"]["z"].shape == (4, 20, 4)
    assert found["loop"]["count"]["s"].tolist() == [20.0, 1.0, 6.0, 9.0]
    assert gap(found["batched"], found["loop"]) < 1e-12


@pytest.mark.parametrize("name", ALGORITHMS)
def test_clients_of_one_to_sixty_four_rows(name):
    """Every size at once, several rounds, all blocks, a new client: the two ways give the same numbers."""
    sizes = (1, 2, 3, 5, 8, 13, 21, 33, 50, 63, 64, 9)
    here = pool(sizes, (2,) * len(sizes), len(sizes) - 1)
    method, training = ALGORITHMS[name](), Training(rounds=2, lr=0.1, batch=16, momentum=0.5)
    made = Task(NormedNet, "head", CLASSES, dtype=torch.float64)
    params, found = made.init(rng.key(2)), {}
    for backend in BACKENDS:
        clients = BACKENDS[backend](method, made, params, here, training, 7)
        federation = Federation.simulated(clients, 7)
        for done in federation.rounds(cohort={1: [0, 2, 10, 5, 6], 2: [9, 8, 7, 1, 0, 10]}.get):
            assert not done.refused
        rows = federation.evaluate(done)
        assert clients.notes == []
        found[backend] = {"server": done.server, "states": {str(c): s for c, s in clients.states().items()}}, rows
    assert gap(found["loop"][0], found["batched"][0]) < 1e-11
    for a, b in zip(found["loop"][1], found["batched"][1], strict=True):
        assert (a[:4], a.metrics["accuracy"]) == (b[:4], b.metrics["accuracy"])
        assert a.metrics["loss"][0] == pytest.approx(b.metrics["loss"][0], abs=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kept_moments_belong_to_training_and_not_to_personalisation(backend):
    models = []
    for keep in (False, True):
        training = Training(lr=0.2, batch=4, momentum=0.9, keep_optimizer=keep)
        clients = make(backend, FedAvg(finetune_epochs=2), training)
        train(clients, 1, EVERYONE, {"model": params()}, {})
        models.append(clients.personal(1, EVERYONE, {"model": params()}, {}))
    assert max(gap(a, b) for a, b in zip(*models, strict=True)) == 0.0
    assert "0" in clients.store.layout["moments"]  # there was something to keep


@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_that_are_not_finite_are_refused(backend):
    def update(local, state, down):
        local._moments = {"0": {"m": down["model"]["head.bias"] / 0.0}}
        return state, {"model": down["model"]}

    clients = make(backend, Toy(update=update), Training(keep_optimizer=True))
    trained = train(clients, 1, [1, 2], {"model": params()}, {})
    assert trained.refused == {1: "its state holds NaN or inf", 2: "its state holds NaN or inf"}
    assert clients.states() == {}


def test_ditto_adapts_further_with_more_rounds():
    def personal(rounds):
        clients = make("loop", Ditto(lam=0.1), adapt_rounds=rounds)
        return clients.personal(1, [3], {"model": params()}, {})[0]

    assert gap(personal(1), personal(6)) > 1e-3


def test_a_step_must_return_what_it_was_given():
    def update(local, state, down):
        local.scan(lambda carry, batch: {"other": carry["sum"]}, {"sum": torch.zeros(())})
        return state, {}

    with pytest.raises(ValueError, match="must return the same names"):
        make("loop", Toy(update=update)).train(1, [1], {}, {})


def test_a_part_of_a_name_cannot_replace_the_whole():
    part = {"model": {"head.bias": torch.zeros(1, CLASSES, dtype=torch.float64)}}
    uploads = Uploads(part, torch.ones(1), torch.tensor([0]))
    with pytest.raises(ValueError, match="different names"):
        FedAvg().aggregate(task(), {"model": params()}, uploads, rng.key(0))


def test_a_model_with_missing_tensors_does_not_predict():
    some = {name: value for name, value in params().items() if name != "body.bias"}
    with pytest.raises(KeyError, match="4 tensors, not 3"):
        task().logits(some, torch.zeros(1, INPUTS, dtype=torch.float64))
