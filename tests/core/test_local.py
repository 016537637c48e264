"""A client's desk: the one loop, the optimisers on it, statistics, and what a step may read."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, final

import pytest
import torch
import toy
from torch import nn
from torch.func import grad_and_value
from torch.nn import functional as F
from toy import BACKENDS, train

from bespoke.algorithms.local import LocalOnly
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.local import Features, Local
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.engine import rows as engine_rows
from bespoke.engine.alone import Alone
from bespoke.engine.rows import ClientRows

SIZES = (1, 13, 4, 7, 4)
INPUTS, CLASSES = 3, 4
GLOBAL_TENSOR = torch.ones(3)


@functools.cache
def task():
    return Task(functools.partial(toy.Net, INPUTS, 5, CLASSES), "head", CLASSES, dtype=torch.float64)


def params():
    return task().init(rng.key(8))


@functools.cache
def pool(sizes=SIZES, numbered=False):
    """Clients one after another from pool row 1 on; with ``numbered``, x is the pool row's number."""
    total = sum(sizes) + 1
    x = rng.normal(rng.key(1), (total, INPUTS), torch.float64)
    if numbered:
        x = torch.arange(total, dtype=torch.float64)[:, None].expand(total, INPUTS).contiguous()
    y = (rng.uniform(rng.key(2), (total,)) * CLASSES).long()
    ends = [1, *(torch.tensor(sizes).cumsum(0) + 1).tolist()]
    lists = [list(range(a, b))[::-1] for a, b in pairwise(ends)]
    return toy.data_of(x, y, lists, classes=CLASSES)


@final
@dataclass(frozen=True)
class Emit(Algorithm):
    """Uploads whatever ``work(local, down)`` gives."""

    work: Callable[[Local, Any], Any] = None

    def client_update(self, local, state, down):
        return state, self.work(local, down)

    def personalize(self, local, state, down):
        return {}


def emit(work, backend, training, *, sizes=SIZES, numbered=False, padding=0, chunk=64, round=1, down=None):
    clients = BACKENDS[backend](Emit(work), task(), params(), pool(sizes, numbered), training, seed=5)
    clients.padding, clients.chunk = padding, chunk
    trained = train(clients, round, list(range(len(sizes))), {} if down is None else down, {})
    assert not trained.refused
    assert not clients.notes
    return trained


def desk(n=6, width=None, transform=None, **training):
    """A desk outside any federation."""
    width = width or n
    data = ClientRows(pool().x, pool().y, torch.arange(width) % n, torch.tensor(n), {}, transform, torch.float64)
    settings = Training(**training)
    lr = torch.tensor(settings.lr, dtype=torch.float64)
    return Local(task(), rng.key(3), torch.tensor(1), torch.tensor(1), lr, settings, Alone(data, n))


# --- which rows a step sees -----------------------------------------------------------------------------------


def visits(total):
    """A step that counts, by pool row, how often a row was seen, and the calls."""

    def step(carry, batches):
        seen = carry["seen"]
        for batch in batches if type(batches) is tuple else (batches,):
            hit = batch.x[:, :1] == torch.arange(total, dtype=torch.float64)
            seen = seen + (hit * batch.mask[:, None]).sum(0)
        return {"seen": seen, "calls": carry["calls"] + 1.0}

    return step


def count(total, **options):
    def work(local, down):
        start = {"seen": torch.zeros(total, dtype=torch.float64), "calls": torch.zeros((), dtype=torch.float64)}
        return local.scan(visits(total), start, **options)

    return work


def own_rows(sizes, client):
    first = 1 + sum(sizes[:client])
    return slice(first, first + sizes[client])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("padding", [0, 3])
def test_an_epoch_shows_each_row_once(backend, batch, padding):
    total = sum(SIZES) + 1
    training = Training(batch=batch, epochs=2)
    up = emit(count(total), backend, training, numbered=True, padding=padding).uploads.tree
    for client, n in enumerate(SIZES):
        want = torch.zeros(total, dtype=torch.float64)
        want[own_rows(SIZES, client)] = 2
        assert torch.equal(up["seen"][client], want)
        assert up["calls"][client] == 2 * math.ceil(n / min(batch, n))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 64])
def test_drop_leaves_out_the_last_partial_batch(backend, batch):
    total = sum(SIZES) + 1
    training = Training(batch=batch, epochs=3, last_batch="drop")
    up = emit(count(total), backend, training, numbered=True).uploads.tree
    for client, n in enumerate(SIZES):
        size = min(batch, n)
        rows = up["seen"][client][own_rows(SIZES, client)]
        assert up["seen"][client].sum() == rows.sum() == 3 * (n // size) * size
        assert rows.max() <= 3
        assert up["calls"][client] == 3 * (n // size)


def test_drop_leaves_out_other_rows_in_other_epochs():
    up = emit(count(40, epochs=40), "loop", Training(batch=5, last_batch="drop"), numbered=True).uploads.tree
    rows = up["seen"][1][own_rows(SIZES, 1)]  # 10 of 13 in each of 40 epochs
    assert rows.min() > 20
    assert rows.max() < 40


# --- the exact order, against the rule written out ------------------------------------------------------------


def expected(key, n, batch, last_batch, count, tag):
    """Rows of ``count`` minibatches: pass after pass, each in the order of its own key."""
    size, batches = min(batch, n), []
    key = rng.fold_in(key, tag)
    for epoch in range(count):
        order = rng.shuffle(rng.fold_in(key, 2 * epoch), n, n).tolist()
        parts = [order[i : i + size] for i in range(0, n, size)]
        batches += [p for p in parts if len(p) == size or last_batch == "keep"]
    return batches[:count]


def diary(length, batch):
    """A step that writes down the positions, step numbers and keys it was given."""

    def step(carry, batches):
        batches = batches if type(batches) is tuple else (batches,)
        per_step = len(batches)
        out = dict(carry)
        for i, b in enumerate(batches):
            here = torch.arange(length) == carry["calls"] * per_step + i
            rows = F.pad(torch.where(b.mask > 0, b.positions, -1), (0, batch - len(b.positions)), value=-1)
            out["rows"] = torch.where(here[:, None], rows, out["rows"])
            out["steps"] = torch.where(here, b.step, out["steps"])
            out["keys"] = torch.where(here[:, None], b.key, out["keys"])
        out["calls"] = carry["calls"] + 1
        return out

    return step


def write_diary(length, batch, **options):
    def work(local, down):
        start = {
            "rows": torch.full((length, batch), -2),
            "steps": torch.full((length,), -2),
            "keys": torch.full((length, 2), -2),
            "calls": torch.tensor(0),
        }
        extra = {"limit": local.n.clamp(max=options["limit"])} if "limit" in options else {}
        asked = {k: v for k, v in options.items() if k in ("epochs", "steps")}
        taken = local.num_steps(options.get("epochs"), options.get("per_step", 1))
        if "steps" in options:
            taken = torch.full_like(taken, options["steps"])
        carry = local.scan(
            diary(length, batch),
            start,
            **asked,
            **extra,
            per_step=options.get("per_step", 1),
            tag=options.get("tag", 0),
        )
        return carry | {"told": taken}

    return work


PLANS = {
    "training's epochs": {},
    "own epochs": {"epochs": 3},
    "steps": {"steps": 9},
    "limit": {"epochs": 3, "limit": 2},
    "limit on steps": {"steps": 9, "limit": 5},
    "pairs": {"epochs": 3, "per_step": 2},
    "triples": {"epochs": 2, "per_step": 3},
    "triples by steps": {"steps": 4, "per_step": 3},
    "another pass": {"tag": 1},
}


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
@pytest.mark.parametrize("batch", [1, 3, 5, 20])
@pytest.mark.parametrize("plan", PLANS)
def test_batches_follow_the_rule_in_loop_and_batched(plan, batch, last_batch):
    options = PLANS[plan]
    training = Training(batch=batch, epochs=2, last_batch=last_batch)
    length = 48
    work = write_diary(length, batch, **options)
    found = {
        "loop": emit(work, "loop", training).uploads.tree,
        "batched": emit(work, "batched", training).uploads.tree,
        "padded": emit(work, "batched", training, padding=3, chunk=3).uploads.tree,
    }
    per_step = options.get("per_step", 1)
    for client, n in enumerate(SIZES):
        size = min(batch, n)
        per_epoch = n // size if last_batch == "drop" else math.ceil(n / size)
        calls = options.get("steps") or math.ceil(options.get("epochs", 2) * per_epoch / per_step)
        assert found["loop"]["told"][client] == calls
        if "limit" in options:
            calls = min(calls, options["limit"], n)
        key = rng.stream(rng.key(5), rng.TRAIN, 1, client)
        batches = expected(key, n, batch, last_batch, calls * per_step, options.get("tag", 0))
        for kind, up in found.items():
            assert up["calls"][client] == calls, kind
            rows = [[r for r in line if r != -1] for line in up["rows"][client][: len(batches)].tolist()]
            assert rows == batches, kind
            assert (up["rows"][client][len(batches) :] == -2).all(), kind
            assert up["steps"][client][: len(batches)].tolist() == [t // per_step for t in range(len(batches))], kind
            keys = [rng.fold_in(rng.fold_in(key, options.get("tag", 0)), 2 * t + 1) for t in range(len(batches))]
            assert up["keys"][client][: len(batches)].tolist() == [k.tolist() for k in keys], kind


def test_a_client_alone_takes_no_step_past_its_limit():
    taken = []

    def step(carry, batch):
        taken.append(int(batch.step))
        return carry

    def work(local, down):
        return local.scan(step, {"x": torch.zeros(1)}, epochs=3, limit=local.n - 2)

    emit(work, "loop", Training(batch=3))
    steps = [min(3 * math.ceil(n / min(3, n)), max(0, n - 2)) for n in SIZES]
    assert 0 in steps and taken == [t for count in steps for t in range(count)]


def test_the_training_settings_may_count_steps():
    training = Training(batch=3, epochs=2, steps=7)
    for backend in BACKENDS:
        up = emit(write_diary(48, 3), backend, training).uploads.tree
        assert up["calls"].tolist() == up["told"].tolist() == [7] * len(SIZES)
        up = emit(write_diary(48, 3, epochs=1), backend, training).uploads.tree  # asked for, epochs win
        assert up["calls"].tolist() == up["told"].tolist() == [1, 5, 2, 3, 2]


def test_epochs_and_steps_at_once_are_refused():
    with pytest.raises(ValueError, match="give epochs or steps, not both"):
        desk().scan(lambda carry, batch: carry, {"a": torch.zeros(1)}, epochs=1, steps=1)


def test_a_pass_without_epochs_changes_nothing():
    start = params()
    assert desk().sgd(task().loss, start, epochs=0) == start
    assert desk().finetune(start, 0) is start


def test_the_main_pass_sees_the_same_batches_whatever_runs_before_it():
    def rows(local, **options):
        start = {"rows": torch.zeros(6)}

        def step(carry, batch, at):
            return {"rows": carry["rows"] + (batch.step == at) * batch.positions.sum()}

        return [local.scan(step, start, torch.tensor(t), **options)["rows"][0].item() for t in range(3)]

    local = desk(9, batch=3)
    first = rows(local)
    local.sgd(task().loss, params(), tag=2)
    local.features(params())
    local.folds(3)
    assert rows(local) == first
    assert rows(local, tag=1) != first
    assert rows(replace(local, key=rng.key(4))) != first


def test_two_methods_train_on_the_same_batches():
    def record(local, down):
        return local.sgd(task().loss, down["model"])

    def record_after_others(local, down):
        local.sgd(task().loss, down["model"], epochs=2, tag=3)
        local.scan(lambda carry, batch: carry, {"a": torch.zeros(1)}, tag=1)
        return local.sgd(task().loss, down["model"])

    for backend in BACKENDS:
        training, down = Training(batch=3, lr=0.5), {"model": params()}
        one = emit(record, backend, training, down=down).uploads.tree
        two = emit(record_after_others, backend, training, down=down).uploads.tree
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_values_that_change_are_tensors():
    def work(local, down):
        assert all(isinstance(v, torch.Tensor) for v in (local.n, local.round, local.rounds, local.lr))
        assert (local.epochs, local.batch) == (3, 8)
        scalars = {"n": local.n, "round": local.round, "rounds": local.rounds, "lr": local.lr}
        return {name: value * torch.ones((), dtype=torch.float64) for name, value in scalars.items()}

    training = Training(rounds=12, lr=0.2, epochs=3, batch=8)
    for backend in BACKENDS:
        up = emit(work, backend, training, round=4).uploads.tree
        assert up["n"].tolist() == list(SIZES)
        assert up["round"].tolist() == [4] * len(SIZES)
        assert up["rounds"].tolist() == [12] * len(SIZES)
        assert up["lr"].tolist() == [0.2] * len(SIZES)


# --- padding --------------------------------------------------------------------------------------------------


def train_model(local, down):
    return local.sgd(task().loss, down["model"])


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "clip": 0.5}, {"optimizer": "adam", "weight_decay": 0.1}])
@pytest.mark.parametrize("batch", [2, 5, 64])
def test_padding_changes_nothing(batch, settings):
    training = Training(batch=batch, epochs=3, lr=0.1, **settings)
    down = {"model": params()}
    alone = emit(train_model, "loop", training, down=down)
    for padding, chunk in ((0, 64), (3, 64), (17, 2)):
        block = emit(train_model, "batched", training, down=down, padding=padding, chunk=chunk)
        for name, leaf in alone.uploads.tree.items():
            assert (block.uploads.tree[name] - leaf).abs().max() < 1e-12
        assert block.logged["loss"] == pytest.approx(alone.logged["loss"], abs=1e-12)
        assert 0 < block.padding_waste < 1
    assert alone.padding_waste == 0.0


def test_padding_waste_is_the_share_of_computed_rows_that_are_padding():
    def waste(sizes, **options):
        return emit(train_model, "batched", Training(batch=4), sizes=sizes, down={"model": params()}, **options)

    # In batches of 4, both clients take two steps; the second of 6 rows has two rows of padding.
    assert waste((8, 6)).padding_waste == pytest.approx(2 / 16)
    # A third takes one step of two rows; then its lane is dropped.
    assert waste((8, 6, 2)).padding_waste == pytest.approx((0 + 2 + 2) / 20)
    # More padding than that is not computed.
    assert waste((6, 6)).padding_waste == waste((6, 6), padding=1).padding_waste == pytest.approx(4 / 16)


def test_another_clients_wild_row_does_no_harm():
    """Padding is computed and then masked, so it must not be some other client's row."""
    wild = replace(pool(), x=pool().x.index_fill(0, torch.tensor([0, 1]), 1e308))
    results = {}
    for backend, kind in BACKENDS.items():
        clients = kind(Emit(train_model), task(), params(), wild, Training(batch=5), seed=5)
        trained = train(clients, 1, [1, 2, 3, 4], {"model": {n: 50 * p for n, p in params().items()}}, {})
        assert trained.refused == {}
        results[backend] = trained.uploads.tree
    for name, leaf in results["loop"].items():
        assert (results["batched"][name] - leaf).abs().max() < 1e-9


# --- optimisers -----------------------------------------------------------------------------------------------

OPTIMISERS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.1},
    "clip": {"clip": 0.05},
    "loose clip": {"clip": 50.0},
    "all of SGD": {"momentum": 0.7, "weight_decay": 0.1, "clip": 0.05},
    "adam": {"optimizer": "adam"},
    "all of adam": {"optimizer": "adam", "beta1": 0.5, "beta2": 0.9, "weight_decay": 0.1, "clip": 0.05},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.5},
}


def torch_training(client, start, training, epochs, rates=None, sizes=SIZES):
    """The same full-batch steps with torch's own modules and optimisers."""
    model = toy.Net(INPUTS, 5, CLASSES).double()
    model.load_state_dict(start)
    named = dict(model.named_parameters())
    groups = [{"params": [p], "lr": rates[n] if rates else training.lr} for n, p in named.items()]
    if training.optimizer != "sgd":
        kind, betas = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}, (training.beta1, training.beta2)
        optimiser = kind[training.optimizer](groups, betas=betas, weight_decay=training.weight_decay)
    else:
        optimiser = torch.optim.SGD(groups, momentum=training.momentum, weight_decay=training.weight_decay)
    rows = pool(sizes).train.client(client)
    for _ in range(epochs):
        optimiser.zero_grad()
        F.cross_entropy(model(pool(sizes).x[rows]), pool(sizes).y[rows]).backward()
        if training.clip:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimiser.step()
    return {n: p.detach() for n, p in named.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_training_equals_torchs_own_optimisers(name, backend):
    training = Training(batch=64, epochs=5, lr=0.05, **OPTIMISERS[name])
    up = emit(train_model, backend, training, down={"model": params()}).uploads.tree
    for client in range(len(SIZES)):
        for leaf, want in torch_training(client, params(), training, 5).items():
            assert (up[leaf][client] - want).abs().max() < 1e-12
            assert (want - params()[leaf]).abs().max() > 1e-4


RATES = {"head.bias": 0.3, "body.weight": 0.02, "head.weight": 0.1, "body.bias": 0.0}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["plain", "all of SGD", "all of adam", "adamw"])
def test_rates_by_name(name, backend):
    """In any order: the names count."""
    training = Training(batch=64, epochs=4, lr=0.05, **OPTIMISERS[name])
    one_rate, by_name = (
        emit(
            lambda local, down, lr=lr: local.sgd(task().loss, down["model"], lr=lr),
            backend,
            training,
            down={"model": params()},
        ).uploads.tree
        for lr in (0.2, RATES)
    )
    for client in range(len(SIZES)):
        want = torch_training(client, params(), training, 4, RATES)
        assert all((by_name[leaf][client] - value).abs().max() < 1e-12 for leaf, value in want.items())
        assert torch.equal(by_name["body.bias"][client], params()["body.bias"])
        want = torch_training(client, params(), replace(training, lr=0.2), 4)
        assert all((one_rate[leaf][client] - value).abs().max() < 1e-12 for leaf, value in want.items())


def test_rates_for_nested_names_and_wrong_names():
    nested = {"one": {"a": torch.ones(2), "b": torch.ones(1)}, "two": torch.ones(3)}
    nested = tree.to(nested, torch.float64)

    def loss(p, batch):
        return p["one"]["a"].sum() + p["one"]["b"].sum() + p["two"].sum()

    local = desk(4, batch=4, lr=1.0)
    found = local.sgd(loss, nested, lr={"two": 0.5, "one": 0.25})
    assert found["one"]["a"].tolist() == [0.75, 0.75]
    assert found["one"]["b"].tolist() == [0.75]
    assert found["two"].tolist() == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match=r"lr names \['one', 'three'\], but the parameters are \['one', 'two'\]"):
        local.sgd(loss, nested, lr={"one": 1.0, "three": 1.0})


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_schedule_applies_to_a_rate_of_ones_own(backend):
    training = Training(batch=64, epochs=1, lr=0.4, rounds=10, schedule="step", decay=0.5, schedule_rounds=2)

    def work(local, down):
        return local.sgd(task().loss, down["model"], lr=0.1)

    up = emit(work, backend, training, down={"model": params()}, round=5).uploads.tree
    for client in range(len(SIZES)):
        want = torch_training(client, params(), replace(training, lr=0.1 * 0.25), 1)
        assert all((up[leaf][client] - value).abs().max() < 1e-12 for leaf, value in want.items())


def test_schedules_against_their_formulas():
    cosine = Training(rounds=8, lr=0.5, lr_final=0.1, schedule="cosine")
    for r in range(1, 9):
        want = 0.1 + (0.5 - 0.1) * (1 + math.cos(math.pi * (r - 1) / 8)) / 2
        assert cosine.lr * cosine.lr_factor(r) == pytest.approx(want, abs=1e-15)
    assert cosine.lr_factor(1) == 1.0
    assert cosine.lr * cosine.lr_factor(99) == pytest.approx(0.1)  # it stays where it ends
    assert cosine.lr * cosine.lr_factor(9) == pytest.approx(0.1)
    assert replace(cosine, schedule_rounds=4).lr_factor(3) == cosine.lr_factor(5)
    step = Training(rounds=9, schedule="step", schedule_rounds=3, decay=0.2)
    factors = [step.lr_factor(r) for r in range(1, 10)]
    assert factors == pytest.approx([1, 1, 1, 0.2, 0.2, 0.2, 0.04, 0.04, 0.04])
    assert [replace(step, schedule="constant").lr_factor(r) for r in (1, 9)] == [1.0, 1.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_desk_has_the_rounds_rate(backend):
    training = Training(rounds=6, lr=0.5, lr_final=0.02, schedule="cosine")

    def work(local, down):
        return {"lr": local.lr * torch.ones((), dtype=torch.float64)}

    for r in (1, 3, 6):
        up = emit(work, backend, training, round=r).uploads.tree
        assert up["lr"][0].item() == pytest.approx(0.5 * training.lr_factor(r), abs=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["momentum", "all of SGD", "all of adam"])
def test_kept_moments_make_two_rounds_one_run(name, backend):
    training = Training(batch=64, epochs=3, lr=0.05, keep_optimizer=True, **OPTIMISERS[name])
    everyone = list(range(len(SIZES)))

    def after_two_rounds(training):
        clients = BACKENDS[backend](LocalOnly(), task(), params(), pool(), training, seed=5)
        train(clients, 1, everyone[:-1], {}, {})
        train(clients, 2, everyone, {}, {})  # the last client comes late: its moments start at zero
        return [clients.states()[c]["state"]["model"] for c in everyone]

    kept, fresh = after_two_rounds(training), after_two_rounds(replace(training, keep_optimizer=False))
    for client in everyone:
        want = torch_training(client, params(), training, 3 if client == everyone[-1] else 6)
        gaps = [
            max((found[client][leaf] - value).abs().max().item() for leaf, value in want.items())
            for found in (kept, fresh)
        ]
        assert gaps[0] < 1e-12
        assert (gaps[1] > 1e-4) == (client != everyone[-1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_moments_are_kept_by_tag(backend):
    """Two passes a round, each with moments of its own."""

    @final
    @dataclass(frozen=True)
    class TwoPasses(Algorithm):
        def client_init(self, task, params, client):
            return {"a": params, "b": params}

        def client_update(self, local, state, down):
            a = local.sgd(local.task.loss, state["a"])
            b = local.sgd(local.task.loss, state["b"], epochs=2, tag=1)
            return {"a": a, "b": b}, {}

        def personalize(self, local, state, down):
            return state["a"]

    training = Training(batch=64, epochs=3, lr=0.05, keep_optimizer=True, optimizer="adam")
    clients = BACKENDS[backend](TwoPasses(), task(), params(), pool(), training, seed=5)
    for r in (1, 2, 3):
        trained = train(clients, r, list(range(len(SIZES))), {}, {})
    assert trained.logged.keys() == {"loss", "loss_1"}
    for client in range(len(SIZES)):
        state = clients.states()[client]["state"]
        for name, epochs in (("a", 9), ("b", 6)):
            want = torch_training(client, params(), training, epochs)
            assert all((state[name][leaf] - value).abs().max() < 1e-12 for leaf, value in want.items())


def test_kept_moments_go_by_name():
    """Trees that come back from a file may have their names in another order."""
    training = {"batch": 64, "epochs": 2, "lr": 0.1, "keep_optimizer": True, "momentum": 0.9, "clip": 1.0}
    straight, turned = desk(**training), desk(**training)
    first = straight.sgd(task().loss, params())
    turned._moments = {"0": {"m": dict(reversed(straight._moments["0"]["m"].items()))}}
    one = straight.sgd(task().loss, first)
    two = turned.sgd(task().loss, first)
    for name, leaf in one.items():
        assert (two[name] - leaf).abs().max() < 1e-14


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_loss_does_not_read_stays(backend):
    def work(local, down):
        return local.sgd(lambda p, batch: task().loss(p["model"], batch), down)

    idle = torch.tensor([1.0, 2.0], dtype=torch.float64)
    up = emit(work, backend, Training(momentum=0.5), down={"model": params(), "idle": idle}).uploads.tree
    assert torch.equal(up["idle"], idle.expand(len(SIZES), 2))
    assert not torch.equal(up["model"]["head.bias"][1], params()["head.bias"])
    assert desk().sgd(task().loss, {}) == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_logged_loss_is_the_mean_over_the_rows_seen(backend):
    """With batches of 4 and two epochs: each step's own loss, weighted by its rows."""
    training = Training(batch=4, epochs=2, lr=0.3)
    found = emit(train_model, backend, training, down={"model": params()}).logged["loss"]
    for client, n in enumerate(SIZES):
        key = rng.stream(rng.key(5), rng.TRAIN, 1, client)
        steps = 2 * math.ceil(n / min(4, n))
        p, total, rows = params(), 0.0, 0
        for batch in expected(key, n, 4, "keep", steps, 0):
            at = pool().train.client(client)[batch]
            leaves = {name: value.clone().requires_grad_() for name, value in p.items()}
            loss = F.cross_entropy(task().logits(leaves, pool().x[at]), pool().y[at])
            grads = torch.autograd.grad(loss, list(leaves.values()))
            p = {name: (leaves[name] - 0.3 * g).detach() for name, g in zip(leaves, grads, strict=True)}
            total, rows = total + loss.item() * len(batch), rows + len(batch)
        assert found[client] == pytest.approx(total / rows, abs=1e-12)


def note_iterates(seen, params, batch):
    """The sum of all iterates, and the last one with its step's number."""
    return {"sum": tree.add(seen["sum"], params), "last": params, "step": batch.step}


def trace_model(local, down):
    start = down["model"]
    seen = {"sum": tree.zeros_like(start), "last": start, "step": torch.zeros_like(local.n)}
    params, seen = local.trace(local.task.loss, start, note_iterates, seen)
    return {"params": params, **seen, "step": seen["step"].double()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_traced_pass_is_sgd_and_sees_every_iterate_of_a_clients_own_steps(backend):
    training = Training(batch=4, epochs=2, lr=0.3, momentum=0.5)
    down = {"model": params()}
    traced = emit(trace_model, backend, training, down=down).uploads.tree
    plain = emit(train_model, backend, training, down=down).uploads.tree
    assert all(torch.equal(traced["params"][name], value) for name, value in plain.items())
    for client, n in enumerate(SIZES):
        steps = 2 * math.ceil(n / min(4, n))
        assert traced["step"][client] == steps - 1  # other clients of the block may take more
        iterates = [
            emit(
                lambda local, down, s=s: {"model": local.sgd(local.task.loss, down["model"], steps=s)},
                "loop",
                training,
                down=down,
            )
            for s in range(1, steps + 1)
        ]
        for name in plain:
            total = sum(each.uploads.tree["model"][name][client] for each in iterates)
            assert (traced["sum"][name][client] - total).abs().max() < 1e-12
            assert torch.equal(traced["last"][name][client], plain[name][client])


def test_a_watch_that_closes_over_a_tensor_is_refused():
    local, anchor = desk(), torch.ones(2)
    with pytest.raises(TypeError, match="the watch closes over the tensor 'anchor'"):
        local.trace(local.task.loss, params(), lambda seen, p, batch: {"s": seen["s"] + anchor}, {"s": anchor})


# --- a gradient of the method's own ---------------------------------------------------------------------------


def slope_of_loss(p, batch):
    slope, value = grad_and_value(task().loss)(p, batch)
    return value, dict(reversed(slope.items()))  # in any order: the names count


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["all of SGD", "all of adam"])
@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
def test_the_library_steps_along_a_methods_own_gradient(name, keep, backend):
    """Given the loss's own gradient it is the same training, whatever the optimiser."""
    training, loss = Training(batch=4, epochs=2, lr=0.05, keep_optimizer=keep, **OPTIMISERS[name]), task().loss

    def by_gradient(local, down):
        half = local.sgd(None, down["model"], gradient=slope_of_loss)
        return local.sgd(None, half, gradient=slope_of_loss)

    def by_loss(local, down):
        return local.sgd(loss, local.sgd(loss, down["model"]))

    own, want = (emit(work, backend, training, down={"model": params()}) for work in (by_gradient, by_loss))
    assert toy.gap(own.uploads.tree, want.uploads.tree) < 1e-12
    assert own.logged["loss"] == pytest.approx(want.logged["loss"], abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["all of SGD", "all of adam"])
def test_plain_steps_are_the_rate_times_the_gradient(name, backend):
    training, bare = Training(batch=4, epochs=2, lr=0.05, **OPTIMISERS[name]), Training(batch=4, epochs=2, lr=0.05)

    def work(local, down):
        return local.sgd(None, down["model"], gradient=slope_of_loss, plain=True)

    found = emit(work, backend, training, down={"model": params()}).uploads.tree
    assert toy.gap(found, emit(train_model, backend, bare, down={"model": params()}).uploads.tree) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_reads_several_batches_and_what_was_seen_before(backend):
    """Steps of 1 along the number of rows seen so far: 1 + 2 + ... in groups of two batches."""
    training = Training(batch=4, epochs=2, lr=1.0)

    def gradient(p, batches, seen, by):
        first, second = batches
        rows = seen["rows"] + first.mask.sum() + second.mask.sum()
        return rows * 2.0, {"w": by * rows}, {"rows": rows, "watched": seen["watched"]}

    def watch(seen, p, batches):
        return {"rows": seen["rows"], "watched": seen["watched"] + p["w"] * len(batches)}

    def work(local, down):
        zero = torch.zeros((), dtype=torch.float64)
        start = {"rows": zero, "watched": zero}
        p, seen = local.trace(None, {"w": zero}, watch, start, down["by"], gradient=gradient, per_step=2)
        return p | seen

    trained = emit(work, backend, training, down={"by": torch.tensor(0.5, dtype=torch.float64)})
    for client, n in enumerate(SIZES):
        in_pass = [min(n, 4)] * (n // min(n, 4)) + ([n % 4] if n > 4 and n % 4 else [])
        sizes = in_pass * 3  # a last, odd batch is completed from the next pass
        w = rows = watched = loss = 0.0
        for t in range(len(in_pass)):
            rows += sum(sizes[2 * t : 2 * t + 2])
            w, loss = w - 0.5 * rows, loss + 2.0 * rows * sum(sizes[2 * t : 2 * t + 2])
            watched += 2 * w
        up = trained.uploads.tree
        assert [up[name][client].item() for name in ("w", "rows", "watched")] == [w, rows, watched]
        assert trained.logged["loss"][client] == pytest.approx(loss / rows)


def test_a_gradient_of_the_wrong_form_is_refused():
    local, anchor = desk(), {n: torch.ones_like(v) for n, v in params().items()}
    with pytest.raises(TypeError, match="the gradient closes over the tensor 'anchor'"):
        local.sgd(None, params(), gradient=lambda p, batch: (0.0, anchor))
    with pytest.raises(TypeError, match=r"a gradient must return \(loss, grads\)"):
        local.sgd(None, params(), gradient=lambda p, batch: p)
    with pytest.raises(TypeError, match=r"a gradient must return \(loss, grads, seen\)"):
        local.trace(None, params(), None, {"s": GLOBAL_TENSOR}, gradient=lambda p, batch, seen: (p, p))
    with pytest.raises(ValueError, match="different names"):
        local.sgd(None, params(), gradient=lambda p, batch: (batch.mask.sum(), {"other": p["head.bias"]}))
    for loss, gradient in ((None, None), (local.task.loss, slope_of_loss)):
        with pytest.raises(ValueError, match="give a loss, or None and a gradient"):
            local.sgd(loss, params(), gradient=gradient)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lr", [None, 0.1])
def test_finetune_trains_all_or_the_head(backend, lr):
    training = Training(batch=64, epochs=1, lr=0.3)
    for part in ("all", "head"):

        def work(local, down, part=part):
            return local.finetune(down["model"], 3, part, lr=lr)

        up = emit(work, backend, training, down={"model": params()}).uploads.tree
        rates = {} if part == "all" else dict.fromkeys(task().body_names, 0.0)
        for client in range(len(SIZES)):
            full = {n: rates.get(n, lr or 0.3) for n in params()}
            want = torch_training(client, params(), training, 3, full)
            assert all((up[leaf][client] - value).abs().max() < 1e-12 for leaf, value in want.items())


# --- statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [4, 256])
def test_features_are_those_of_all_rows_in_order(backend, chunk, monkeypatch):
    monkeypatch.setattr(engine_rows, "CHUNK", chunk)
    clients = BACKENDS[backend](Emit(), task(), params(), pool(), Training(), seed=5)
    everyone = list(range(len(SIZES)))

    def look(local, state, down):
        z, y, mask = local.features(down["model"])
        return {"z": z, "y": y, "mask": mask}

    found = clients.probe(look, everyone, {"model": params()}, {})
    assert found["mask"].shape == (len(SIZES), max(SIZES))
    for client, n in enumerate(SIZES):
        rows = pool().train.client(client)
        assert (found["z"][client][:n] - task().features(params(), pool().x[rows])).abs().max() < 1e-12
        assert torch.equal(found["y"][client][:n], pool().y[rows])
        assert found["mask"][client].tolist() == [1.0] * n + [0.0] * (max(SIZES) - n)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [4, 256])
def test_the_gradient_of_all_rows(backend, chunk, monkeypatch):
    """It is that of the mean over a client's own rows, however they are cut and padded."""
    monkeypatch.setattr(engine_rows, "CHUNK", chunk)
    clients = BACKENDS[backend](Emit(), task(), params(), pool(), Training(batch=2), seed=5)
    loss = lambda p, batch, scale: scale * task().loss(p, batch)  # noqa: E731

    def look(local, state, down):
        return local.gradient(loss, down["model"], down["scale"])

    found = clients.probe(look, range(len(SIZES)), {"model": params(), "scale": torch.tensor(2.0).double()}, {})
    for client in range(len(SIZES)):
        rows = pool().train.client(client)
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in params().items()}
        value = 2.0 * F.cross_entropy(task().logits(leaves, pool().x[rows]), pool().y[rows])
        for (name, leaf), want in zip(found.items(), torch.autograd.grad(value, list(leaves.values())), strict=True):
            assert (leaf[client] - want).abs().max() < 1e-12, name
            assert want.abs().max() > 1e-3


def test_features_are_taken_without_augmentation():
    seen = []

    def transform(key, x, extra, train):
        seen.append((train, key.tolist()))
        return x

    local = desk(6, batch=3, transform=transform)
    local.features(params())
    key = rng.fold_in(rng.fold_in(rng.key(3), -2), 0)  # a key for each chunk of rows, and none that a pass uses
    assert seen == [(False, key.tolist())]
    seen.clear()
    local.sgd(task().loss, params())
    tagged = rng.fold_in(rng.key(3), 0)
    assert seen == [(True, rng.fold_in(tagged, 1).tolist()), (True, rng.fold_in(tagged, 3).tolist())]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [2, 3, 5])
def test_folds_are_stratified(backend, k):
    sizes = (1, 30, 8, 19)
    clients = BACKENDS[backend](Emit(), task(), params(), pool(sizes), Training(), seed=5)
    found = clients.probe(lambda local, state, down: {"folds": local.folds(k)}, range(4), {}, {})["folds"]
    assert found.dtype == torch.bool
    assert found.shape == (4, k, max(sizes))
    for client, n in enumerate(sizes):
        own = found[client]
        assert own[:, :n].sum(0).tolist() == [1] * n
        assert not own[:, n:].any()
        labels = pool(sizes).y[pool(sizes).train.client(client)]
        for c in range(CLASSES):
            counts = (own[:, :n] & (labels == c)).sum(1)
            assert counts.max() - counts.min() <= 1
        assert own.sum(1).max() - own.sum(1).min() <= 1


def test_folds_are_the_same_mapped_and_differ_by_tag():
    sizes = (1, 30, 8, 19)
    found = []
    for kind in BACKENDS.values():
        clients = kind(Emit(), task(), params(), pool(sizes), Training(), seed=5)
        for tag in (0, 1):
            found.append(clients.probe(lambda local, _, __, tag=tag: {"f": local.folds(3, tag)}, range(4), {}, {})["f"])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_folds_of_other_rows_are_stratified_too(backend):
    """Rows that are there three times, with holes among them."""
    sizes, k = (1, 30, 8, 19), 3

    def work(local, state, down):
        y, mask = local.labels()
        y, mask = y.repeat(3), mask.repeat(3)
        mask = mask * (torch.arange(len(mask)) % 5 > 0)
        return {"folds": local.folds(k, rows=Features(mask[:, None], y, mask)), "y": y, "real": mask > 0}

    clients = BACKENDS[backend](Emit(), task(), params(), pool(sizes), Training(), seed=5)
    found = clients.probe(work, range(4), {}, {})
    assert found["folds"].shape == (4, k, 3 * max(sizes))
    for folds, y, real in zip(*found.values(), strict=True):
        assert torch.equal(folds.sum(0), real.long())
        counts = torch.stack([(folds & (y == c)).sum(1) for c in range(CLASSES)])
        assert (counts.amax(1) - counts.amin(1)).max() <= 1
    twice = found["folds"][1].unflatten(1, (3, max(sizes)))
    assert (twice.any(1).sum(0) > 1).any()  # the same row, in several folds


# --- leaving the mapped computation ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_host_sees_the_clients_of_a_block_at_once(backend):
    shapes = []

    def decompose(scatter, shift):
        shapes.append((tuple(scatter.shape), tuple(shift.shape)))
        values, vectors = torch.linalg.eigh(scatter + shift[:, None, None] * torch.eye(INPUTS, dtype=scatter.dtype))
        return values, vectors.abs()

    def work(local, down):
        def add(carry, batch):
            x = batch.x * batch.mask[:, None]
            return {"scatter": carry["scatter"] + x.T @ x}

        zeros = torch.zeros(INPUTS, INPUTS, dtype=torch.float64)
        values, vectors = local.host(decompose, local.scan(add, {"scatter": zeros}, epochs=1)["scatter"], local.lr)
        (again,) = local.host(lambda v: (v + 1.0,), values)
        return {"values": values, "vectors": vectors, "again": again}

    trained = emit(work, backend, Training(lr=0.5), chunk=3)
    up = trained.uploads.tree
    for client in range(len(SIZES)):
        x = pool().x[pool().train.client(client)]
        values, vectors = torch.linalg.eigh(x.T @ x + 0.5 * torch.eye(INPUTS, dtype=x.dtype))
        assert (up["values"][client] - values).abs().max() < 1e-12
        assert (up["again"][client] - values - 1).abs().max() < 1e-12
        rebuilt = up["vectors"][client].square() @ torch.ones(INPUTS, dtype=x.dtype)
        assert (rebuilt - 1).abs().max() < 1e-12
        if len(x) >= INPUTS:
            assert (up["vectors"][client] - vectors.abs()).abs().max() < 1e-9
    if backend == "loop":
        assert shapes == [((1, INPUTS, INPUTS), (1,))] * len(SIZES)
        assert trained.host_breaks == 2 * len(SIZES)
    else:
        # The clients of 13, 7 and 4 rows make a block, those of 4 and 1 another.
        assert shapes == [((3, INPUTS, INPUTS), (3,)), ((2, INPUTS, INPUTS), (2,))]
        assert trained.host_breaks == 2 * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_logged_values_arrive_with_their_clients(backend):
    def work(local, down):
        local.log(rows=local.n, half=0.5, twice=local.n * 2.0)
        local.log(half=0.25)
        return {"n": local.n * torch.ones((), dtype=torch.float64)}

    trained = emit(work, backend, Training(), chunk=2)
    assert trained.logged == {
        "rows": [float(n) for n in SIZES],
        "half": [0.25] * len(SIZES),
        "twice": [2.0 * n for n in SIZES],
    }
    assert trained.uploads.clients.tolist() == list(range(len(SIZES)))


# --- what a step may read -------------------------------------------------------------------------------------


def reads_a_global(p, *rest):
    return p["w"].sum() * GLOBAL_TENSOR.sum()


def reads_a_global_in_a_comprehension(p, *rest):
    return sum(p["w"].sum() * t for t in [GLOBAL_TENSOR[i] for i in range(2)])


def calls_one_that_reads_a_global(p, *rest):
    return reads_a_global(p)


def takes_it_as_a_keyword(p, *rest, scale=None):
    return p["w"].sum() * scale


def with_default(p, batch=None, scale=GLOBAL_TENSOR):
    return p["w"].sum() * scale.sum()


def with_keyword_default(p, batch=None, *, scale=GLOBAL_TENSOR):
    return p["w"].sum() * scale.sum()


def offenders():
    """Functions that read a tensor beside their arguments, and the name that should be blamed."""
    anchor = torch.ones(3)
    anchors = {"deep": {"w": torch.ones(3)}}
    several = [1.0, (torch.ones(3),)]
    local = desk()

    def helper(p):
        return (p["w"] * anchor).sum()

    class Holder:
        @staticmethod
        def inner(p, *rest):
            return (p["w"] * anchor).sum()

    return {
        "a tensor": (lambda p, *rest: (p["w"] * anchor).sum(), "anchor"),
        "a tree of tensors": (lambda p, *rest: (p["w"] * anchors["deep"]["w"]).sum(), "anchors"),
        "a list of tensors": (lambda p, *rest: (p["w"] * several[1][0]).sum(), "several"),
        "the desk": (lambda p, *rest: p["w"].sum() * local.n, "local"),
        "a bound argument": (functools.partial(takes_it_as_a_keyword, scale=anchor), "scale"),
        "a bound position": (functools.partial(lambda a, p, *rest: (p["w"] * a).sum(), anchor), "argument 0"),
        "through a bound function": (functools.partial(lambda p, *rest: (p["w"] * anchor).sum()), "anchor"),
        "an inner helper": (lambda p, *rest: helper(p), "anchor"),
        "a static method": (Holder.inner, "anchor"),
        "a global": (reads_a_global, "GLOBAL_TENSOR"),
        "a global, one call deeper": (calls_one_that_reads_a_global, "GLOBAL_TENSOR"),
        "a global, in a comprehension": (reads_a_global_in_a_comprehension, "GLOBAL_TENSOR"),
        "a default": (with_default, "scale"),
        "a keyword's default": (with_keyword_default, "scale"),
    }


@pytest.mark.parametrize("kind", offenders())
def test_reading_a_tensor_beside_the_arguments_is_refused(kind):
    fn, blamed = offenders()[kind]
    start = {"w": torch.ones(3, dtype=torch.float64)}
    for call, what in ((desk().sgd, "loss"), (desk().scan, "step")):
        with pytest.raises(TypeError, match=f"the {what} closes over") as caught:
            call(fn, start)
        sentence = str(caught.value)
        assert blamed in sentence or "default" in sentence
        assert "extra argument" in sentence
        assert "\n" not in sentence
    if kind == "the desk":
        assert "task = local.task" in sentence


@pytest.mark.parametrize("backend", BACKENDS)
def test_refusal_reaches_the_caller(backend):
    def work(local, down):
        anchor = down["model"]
        return local.sgd(lambda p, batch: local_task.loss(p, batch) + tree.sq_dist(p, anchor), anchor)

    local_task = task()
    with pytest.raises(
        TypeError, match=r"the loss closes over the tensor 'anchor'.*local\.sgd\(loss, params, anchor\)"
    ):
        emit(work, backend, Training(), down={"model": params()})


@final
@dataclass(frozen=True)
class Polite(Algorithm):
    """Closes over the task, numbers and itself, and hands tensors in."""

    strength: float = 0.5

    def penalty(self, p, anchor):
        return self.strength * tree.sq_dist(p, anchor)

    def client_update(self, local, state, down):
        task, power, names = local.task, 2.0, ["head.bias"]

        def loss(p, batch, anchor, n):
            extra = sum(p[name].abs().sum() for name in names) * n**0.0
            return task.loss(p, batch) * power + self.penalty(p, anchor) + 0.0 * extra

        def step(carry, batch, anchor):
            return {"far": carry["far"] + self.penalty(anchor, anchor) + 1.0}

        far = local.scan(step, {"far": torch.zeros((), dtype=torch.float64)}, down["model"], steps=2)
        local.log(**far)
        return state, {"model": local.sgd(loss, down["model"], down["model"], local.n)}

    def personalize(self, local, state, down):
        return down["model"]


def test_closing_over_task_numbers_and_self_is_fine():
    ends = []
    for kind in BACKENDS.values():
        clients = kind(Polite(), task(), params(), pool(), Training(batch=64, lr=0.1), seed=5)
        trained = train(clients, 1, list(range(len(SIZES))), {"model": params()}, {})
        assert not clients.notes
        assert trained.logged["far"] == [2.0] * len(SIZES)
        ends.append(trained.uploads.tree["model"])
    for name, leaf in ends[0].items():
        assert (ends[1][name] - leaf).abs().max() < 1e-12
        for client in range(len(SIZES)):  # one full step, with twice the gradient and no penalty yet
            want = torch_training(client, params(), Training(lr=0.2), 1)
            assert (leaf[client] - want[name]).abs().max() < 1e-12


def test_an_unknown_keyword_of_sgd_is_refused_by_name():
    with pytest.raises(TypeError, match=r"sgd and trace take epochs, .*, not epoch$"):
        Local.trace(None, lambda p, b: p["w"].sum(), {"w": torch.ones(1)}, None, {}, epoch=3)
