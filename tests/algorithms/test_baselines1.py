"""APFL, pFedMe, Per-FedAvg, FedRoD, FedBABU and FedBN against their equations, and what only each of them has."""

import ast
import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import pytest
import test_golden as base
import torch
from golden import baselines1 as golden
from golden import reference
from scipy.optimize import approx_fprime
from scipy.special import log_softmax
from torch import nn

from bespoke.algorithms import ALGORITHMS, APFL, FedBABU, FedBN, FedRoD, PerFedAvg, PFedMe
from bespoke.contract import CHECKS, Subject
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.errors import UserError
from bespoke.runs.federation import Evaluation, Federation

CLASSES, POPULATION, ROUNDS = base.CLASSES, base.POPULATION, base.ROUNDS
EVERYONE = range(len(base.TRAIN_ROWS))
WIDTH = 6  # of the net with a norm: two groups of three


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = (
            nn.Linear(base.INPUTS, WIDTH),
            nn.GroupNorm(2, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x))))


@functools.cache
def task(normed=False):
    return Task(Normed, "head", CLASSES, dtype=torch.float64) if normed else base.task()


@functools.cache
def start(normed=False):
    """Initial weights as arrays; scales and shifts that are not 1 and 0."""
    if not normed:
        return base.arrays()[2]
    draw = np.random.default_rng(8)
    return {name: 0.7 * draw.normal(size=leaf.shape) for name, leaf in task(True).init(rng.key(0)).items()}


def clients_of(method, training, backend, task, initial):
    return base.BACKENDS[backend](method, task, initial, base.pool(), training, base.SEED)


# --- the comparison -------------------------------------------------------------------------------------------

# The transcription of each method, and the settings to compare: the two take the same ones.
EQUATIONS = {
    "apfl": golden.apfl,
    "pfedme": golden.pfedme,
    "per_fedavg": golden.per_fedavg,
    "fedrod": golden.fedrod,
    "fedbabu": golden.fedbabu,
    "fedbn": golden.fedbn,
}
CASES = {
    "apfl": {"alpha": 0.3},
    "apfl/adaptive": {"alpha": 0.9, "adaptive": True},
    "apfl/end": {"alpha": 0.02, "adaptive": True},
    "apfl/logits": {"alpha": 0.4, "adaptive": True, "mix": "logits"},
    "pfedme": {"lam": 1.5, "inner_steps": 3, "inner_lr": 0.3},
    "pfedme/w": {"lam": 1.2, "inner_steps": 2, "inner_lr": 0.25, "beta": 1.4, "inner_start": "w"},
    "per_fedavg": {"alpha": 0.3},
    "per_fedavg/hf": {"alpha": 0.3, "variant": "hessian-free"},
    "per_fedavg/absolute": {
        "alpha": 0.3,
        "variant": "hessian-free",
        "delta": 0.2,
        "delta_scale": "absolute",
        "finetune_epochs": 2,
    },
    "per_fedavg/exact": {"alpha": 0.3, "variant": "exact"},
    "fedrod": {},
    "fedrod/hyper": {"heads": "hyper", "head_start": "copy"},
    "fedrod/refit": {"gamma": 0.6, "refit_epochs": 2, "new_head_epochs": 3},
    "fedbabu": {},
    "fedbabu/head": {"finetune_epochs": 2, "finetune_part": "head", "finetune_lr": 0.1},
    "fedbn": {},
}


def method(case):
    return ALGORITHMS[case.partition("/")[0]](**CASES[case])


def is_normed(case):
    return case.startswith("fedbn")


def settings(variant, size):
    """Full batches, or minibatches of two rows, all of that size."""
    return base.training(variant, **({"batch": 2, "last_batch": "drop"} if size == "small" else {}))


@dataclass
class Ran:
    server: list
    states: list
    personal: list  # after the last round
    records: base.MemoryRecords


@functools.cache
def library(case, variant, backend, size="full"):
    """A run through the real loop, with everything looked at after every round."""
    made, training, tools = method(case), settings(variant, size), task(is_normed(case))
    initial = tree.map(torch.from_numpy, start(is_normed(case)))
    clients = clients_of(made, training, backend, tools, initial)
    fed = Federation(made, tools, initial, clients, POPULATION, len(EVERYONE), training, Evaluation(every=1), base.SEED)
    server, states, records = [], [], base.MemoryRecords()

    def look(round, now):
        server.append(now)
        states.append({c: s["state"] for c, s in clients.states().items()})

    last = fed.run(records, checkpoint=look, checkpoint_every=1)
    return Ran(server, states, clients.personal(ROUNDS, EVERYONE, *fed.down(last, EVERYONE)), records)


@final
@dataclass(frozen=True)
class Recorder(Algorithm):
    """Sends the rows of the main pass's minibatches of two, in order."""

    group: int = 1

    def server_init(self, task, params, num_clients, key):
        return {}

    def broadcast(self, server):
        return {}

    def client_update(self, local, state, down):
        group, most = self.group, 64

        def step(carry, batches):
            rows = carry["rows"]
            for j, batch in enumerate(batches if group > 1 else (batches,)):
                here = torch.arange(most)[:, None] == batch.step * group + j
                rows = torch.where(here, batch.positions.double(), rows)
            return {"rows": rows}

        return {}, local.scan(step, {"rows": torch.full((most, 2), -1.0, dtype=torch.float64)}, per_step=group)

    def personalize(self, local, state, down):
        return {}


@functools.cache
def recorded(group):
    """(round, client) -> the rows of each minibatch."""
    clients = clients_of(Recorder(group), settings("plain", "small"), "loop", task(), {})
    found = {}
    for round in range(1, ROUNDS + 1):
        rows = clients.train(round, list(range(POPULATION)), {}, {}).uploads.tree["rows"].numpy().astype(int)
        found |= {(round, k): [pair for pair in rows[k] if pair[0] >= 0] for k in range(POPULATION)}
    return found


def wanted(case, variant, cohorts, size, twist=""):
    given = base.problem(variant, cohorts)
    given = dataclasses.replace(given, start=start(is_normed(case)))
    whole = golden.full(given)

    def batches(round, k, group):
        return whole(round, k, group) if size == "full" or round is None else recorded(group)[round, k]

    return given, EQUATIONS[case.partition("/")[0]](given, batches, **CASES[case], twist=twist)


def differences(case, variant, backend, size="full", twist=""):
    """What the library did against what the equations say: the largest difference, by kind."""
    ran = library(case, variant, backend, size)
    given, want = wanted(case, variant, [row["cohort"] for row in ran.records.rows["rounds.jsonl"]], size, twist)
    evaluated = iter(ran.records.rows["clients.jsonl"])
    worst = dict.fromkeys(("server", "states", "counts", "logits"), 0.0)
    for r in range(ROUNDS):
        worst["server"] = max(worst["server"], base.gap(ran.server[r], want.server[r]))
        assert ran.states[r].keys() == want.states[r].keys()
        for client, state in ran.states[r].items():
            worst["states"] = max(worst["states"], base.gap(state, want.states[r][client]))
        if size == "small":  # minibatches before prediction are not given
            continue
        for client, views in enumerate(want.views[r]):
            y = given.y_test[client]
            for view, logits in views.items():
                row = next(evaluated)
                assert (row["round"], row["client"], row["total"], row["view"]) == (r + 1, client, len(y), view)
                loss = -log_softmax(logits, axis=1)[np.arange(len(y)), y].sum()
                worst["counts"] = max(worst["counts"], abs(row["loss_sum"] - loss))
                assert twist or row["correct"] == (logits.argmax(axis=1) == y).sum()
    if size == "full":
        assert next(evaluated, None) is None
        for client, personal in enumerate(ran.personal):
            views = predictions(method(case), task(is_normed(case)), personal, given.x_test[client])
            assert views.keys() == want.views[-1][client].keys()
            for view, logits in views.items():
                off = np.abs(logits - want.views[-1][client][view]).max()
                worst["logits"] = max(worst["logits"], float(off))
    return worst


def predictions(made, task, personal, x):
    with torch.no_grad():
        found = made.predict(task, personal, torch.from_numpy(x))
    return {view: t.numpy() for view, t in (found if isinstance(found, dict) else {"personal": found}).items()}


MAIN = [case for case in CASES if "/" not in case]
OTHERS = [case for case in CASES if "/" in case]  # further settings: one variant a backend is enough


@pytest.mark.parametrize(
    ("case", "variant", "backend"),
    [(case, variant, backend) for case in MAIN for variant in base.VARIANTS for backend in base.BACKENDS]
    + [(case, *pair) for case in OTHERS for pair in (("plain", "loop"), ("momentum", "batched"))],
)
def test_the_library_follows_the_equations(case, variant, backend):
    found = differences(case, variant, backend)
    assert max(found.values()) < 1e-10, found


@pytest.mark.parametrize("case", CASES)
def test_the_library_follows_the_equations_on_minibatches(case):
    found = differences(case, "momentum", "batched", "small")
    assert max(found.values()) < 1e-10, found


def test_the_recorded_minibatches_are_pairs_of_a_clients_own_rows():
    for k in range(POPULATION):
        assert len(recorded(1)[1, k]) == base.EPOCHS * (base.TRAIN_ROWS[k] // 2)
        assert all(0 <= row < base.TRAIN_ROWS[k] for pair in recorded(3)[2, k] for row in pair)
        assert len(recorded(3)[1, k]) == 3 * math.ceil(len(recorded(1)[1, k]) / 3)


# Mistakes in one term of the method, each of which the comparison must see.
TWISTS = {
    "apfl": [
        "other weighting",
        "no factor alpha",
        "alpha on the global model",
        "mixes with the new w",
        "mixes the other thing",
        "the own model trains alone",
        "the mixture trains w too",
        "v starts at the received model",
        "sends the own model",
        "predicts with its own w",
        "predicts with v alone",
        "unseen unfitted",
        "unseen starts at the first model",
        "unseen mixes with what it trained",
    ],
    "apfl/adaptive": [
        "alpha stays",
        "alpha not kept",
        "alpha counts at once",
        "alpha at every step",
        "slope of v alone",
    ],
    "apfl/end": ["alpha not projected"],
    "apfl/logits": ["mixes the other thing", "no factor alpha", "alpha stays"],
    "pfedme": [
        "other weighting",
        "other start",
        "one inner step less",
        "tied to the received model",
        "tied to itself",
        "lambda over two",
        "inner steps at the outer rate",
        "no lambda in the outer step",
        "theta lives on",
        "the personal model is w_i",
        "sends theta",
        "unseen unfitted",
        "unseen starts at the first model",
    ],
    "pfedme/w": ["other start", "no beta"],
    "per_fedavg": [
        "other weighting",
        "no inner step",
        "inner steps at the outer rate",
        "steps from the adapted model",
        "as many steps as batches",
        "not adapted",
        "adapts at the outer rate",
        "adapts on test rows",
    ],
    "per_fedavg/hf": [
        "no Hessian",
        "Hessian at the adapted model",
        "no alpha before the Hessian",
        "other sign",
        "one-sided difference",
    ],
    "per_fedavg/absolute": ["other scale of delta", "not adapted"],
    "per_fedavg/exact": ["no Hessian", "Hessian at the adapted model", "no alpha before the Hessian", "other sign"],
    "fedrod": [
        "other weighting",
        "no prior",
        "prior in both losses",
        "absent classes count",
        "personal loss reaches the generic head",
        "personal loss reaches the body",
        "personal step after the generic one",
        "personal head learns alone",
        "other start",
        "own head not kept",
        "own head averaged",
        "predicts with one head",
        "prior at prediction",
        "unseen unfitted",
    ],
    "fedrod/hyper": ["other start", "counts instead of shares", "personal step after the generic one", "no prior"],
    "fedrod/refit": ["gamma ignored", "not refitted", "unseen unfitted"],
    "fedbabu": [
        "other weighting",
        "head trained",
        "no fine-tuning",
        "fine-tunes the other part",
        "fine-tunes its own body",
        "unseen not fine-tuned",
        "the fine-tuned body is sent",
    ],
    "fedbabu/head": ["fine-tunes at the training rate", "fine-tunes the other part"],
    "fedbn": [
        "other weighting",
        "norms not kept",
        "norms stand still",
        "norms averaged",
        "shifts averaged",
        "predicts before averaging",
        "unseen unfitted",
        "unseen trains everything",
    ],
}
MOMENTUM_TWISTS = {
    "pfedme": ["momentum", "no weight decay", "weight decay of w"],
    "per_fedavg": ["no weight decay"],
    "fedbabu": ["weight decay of the head"],
}
SMALL_TWISTS = {
    "pfedme": ["a new batch for each inner step"],
    "per_fedavg": ["the same batch twice"],
    "per_fedavg/hf": ["Hessian on the second batch"],
    "apfl/adaptive": ["alpha at every step"],
}


@pytest.mark.parametrize(
    ("case", "variant", "size", "twist"),
    [(case, "momentum", "full", t) for case, twists in TWISTS.items() for t in twists]
    + [(case, "plain", "full", t) for case in MAIN for t in TWISTS[case]]
    + [(case, "momentum", "full", t) for case, twists in MOMENTUM_TWISTS.items() for t in twists]
    + [(case, "momentum", "small", t) for case, twists in SMALL_TWISTS.items() for t in twists],
)
def test_a_mistake_in_one_term_is_seen(case, variant, size, twist):
    found = differences(case, variant, "batched", size, twist)
    assert max(found.values()) > 1e-4, found
    if twist.startswith(("unseen", "predicts", "no fine-tuning", "fine-tunes", "not ", "adapts", "prior at")):
        assert max(found["server"], found["states"]) < 1e-10  # the mistake stays where it was made
        assert min(found["counts"], found["logits"]) > 1e-4


def test_the_transcription_stands_alone():
    nodes = list(ast.walk(ast.parse(Path(golden.__file__).read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported == {"dataclasses", "numpy", "golden.reference"}


def test_the_gradients_derived_by_hand():
    given = base.problem("plain", [])
    x, y = given.x[1], given.y[1]
    shapes = {name: leaf.shape for name, leaf in start(True).items()}

    def unpack(flat):
        parts = np.split(flat, np.cumsum([math.prod(s) for s in shapes.values()])[:-1])
        return {name: part.reshape(s) for part, (name, s) in zip(parts, shapes.items(), strict=True)}

    flat = np.concatenate([leaf.ravel() for leaf in start(True).values()])
    loss = lambda f: -log_softmax(golden.normed(unpack(f), x)[0], axis=1)[np.arange(len(y)), y].mean()  # noqa: E731
    mine = golden.normed_gradient(start(True), x, y)
    mine = np.concatenate([mine[name].ravel() for name in shapes])
    assert np.abs(mine - approx_fprime(flat, loss, 1e-7)).max() < 1e-5 and np.abs(mine).max() > 0.1
    plain, known = golden.gradient(start(), x, y), reference.gradient(start(), x, y)
    assert max(np.abs(plain[name] - known[name]).max() for name in known) < 1e-15


# --- what only this method has ----------------------------------------------------------------------------------

MINI = Training(rounds=ROUNDS, epochs=2, batch=4, lr=0.2, momentum=0.8, sampling="bernoulli", rate=0.5)


@functools.cache
def mini(made, backend):
    return base.run(made, MINI, backend)


def headline(ran):
    rows = ran.records.rows["clients.jsonl"]
    return [(r["round"], r["client"], r["correct"], r["loss_sum"]) for r in rows if r["view"] == "personal"]


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_apfl_with_alpha_zero_is_fedavg_to_the_bit(backend):
    none, plain = mini(APFL(alpha=0.0), backend), mini(ALGORITHMS["fedavg"](), backend)
    assert all(base.same_bits(a, b) for a, b in zip(none.server, plain.server, strict=True))
    for found, want in zip(headline(none), headline(plain), strict=True):
        assert found[:3] == want[:3] and found[3] == pytest.approx(want[3], abs=1e-12)
    assert all(base.same_bits(s["personal"], base.start()) for s in none.states[-1].values())  # v never moves
    assert headline(mini(APFL(alpha=0.1), backend)) != headline(plain)


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_apfl_with_alpha_one_is_local_training_to_the_bit(backend):
    alone, local = mini(APFL(alpha=1.0), backend), mini(ALGORITHMS["local"](), backend)
    for client, state in alone.states[-1].items():
        assert base.same_bits(state["personal"], local.states[-1][client]["model"])
    seen = {client for client in alone.states[-1]}
    assert [r for r in headline(alone) if r[0] == ROUNDS and r[1] in seen] == [
        r for r in headline(local) if r[0] == ROUNDS and r[1] in seen
    ]


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_apfls_alpha_stays_in_its_interval_and_w_moves_as_in_fedavg(backend):
    plain = mini(ALGORITHMS["fedavg"](), backend)
    for alpha in (0.02, 0.5, 0.98):
        ran = mini(APFL(alpha=alpha, adaptive=True), backend)
        assert all(base.same_bits(a, b) for a, b in zip(ran.server, plain.server, strict=True))
        found = [float(s["alpha"]) for s in ran.states[-1].values()]
        assert all(0.0 <= a <= 1.0 for a in found) and any(a != alpha for a in found)


class Quadratic(base.Quadratic):
    """1/2 (w - c)' H (w - c) in the head's bias; c is the mean of the batch's rows."""

    curvature = torch.tensor([[1.09, 0.24, 0.2], [0.24, 0.8, -0.24], [0.2, -0.24, 0.4]], dtype=torch.float64)


def quadratic_round(made, training, backend, shift=0.5):
    """One round of everyone from a model away from the start: uploads' and states' head biases, and the centres."""
    quadratic = Quadratic(base.Net, "head", CLASSES, dtype=torch.float64)
    clients = clients_of(made, training, backend, quadratic, base.start())
    received = {n: v + shift for n, v in base.start().items()}
    up = clients.train(1, list(range(POPULATION)), {"model": received}, {}).uploads.tree["model"]["head.bias"]
    centres = [x.mean(axis=0)[:CLASSES] for x in base.problem("plain", []).x[:POPULATION]]
    states = [clients.states()[k]["state"] for k in range(POPULATION)]
    return received["head.bias"].numpy(), up.numpy(), states, centres, clients


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_pfedme_finds_the_proximal_point_of_a_quadratic(backend):
    h, lam, rate = Quadratic.curvature.numpy(), 0.7, 0.3
    made = PFedMe(lam=lam, inner_steps=120, inner_lr=0.5)
    w, up, states, centres, _ = quadratic_round(made, Training(epochs=1, batch=64, lr=rate), backend)
    for k in range(POPULATION):
        prox = np.linalg.solve(h + lam * np.eye(CLASSES), h @ centres[k] + lam * w)
        assert np.abs(states[k]["personal"]["head.bias"].numpy() - prox).max() < 1e-10
        # The outer step is the envelope's gradient.
        assert np.abs(up[k] - (w - rate * lam * (w - prox))).max() < 1e-10
        assert np.abs(prox - w).max() > 1e-2


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_pfedme_with_a_strong_tie_stays_at_w(backend):
    """And with none, w does not move however far theta goes."""
    far = {}
    for lam in (1.0, 100.0, 10_000.0):
        made = PFedMe(lam=lam, inner_steps=10, inner_lr=0.5 / lam)
        trained, states = base.one_round(made, Training(epochs=1, batch=64, lr=1e-9), backend)
        for k in range(POPULATION):
            gap = math.sqrt(tree.sq_dist(states[k]["personal"], base.start()))
            far.setdefault(lam, []).append(gap)
    for weak, middle, strong in zip(*far.values(), strict=True):
        assert weak > 20 * middle > 400 * strong > 0
    trained, states = base.one_round(PFedMe(lam=0.0), Training(epochs=3, batch=4, lr=0.1), backend)
    for k in range(POPULATION):
        sent = tree.map(lambda leaf, k=k: leaf[k], trained.tree["model"])
        assert base.same_bits(sent, base.start())
        assert tree.sq_dist(states[k]["personal"], base.start()) > 1e-3


@pytest.mark.parametrize("backend", base.BACKENDS)
@pytest.mark.parametrize("scale", ["relative", "absolute"])
def test_per_fedavgs_hessian_free_step_is_exact_on_a_quadratic(backend, scale):
    """There a central difference has no error, and the meta gradient a closed form."""
    h, alpha, beta, eye = Quadratic.curvature.numpy(), 0.4, 0.3, np.eye(CLASSES)
    steps = {}
    for variant in ("first-order", "hessian-free", "exact"):
        made = PerFedAvg(variant=variant, alpha=alpha, delta_scale=scale)
        training = Training(epochs=2 if variant == "first-order" else 3, batch=64, lr=beta)  # one step's batches
        w, up, _, centres, clients = quadratic_round(made, training, backend)
        steps[variant] = up
        for k in range(POPULATION):
            v = h @ ((eye - alpha * h) @ w + alpha * h @ centres[k] - centres[k])
            meta = v if variant == "first-order" else (eye - alpha * h) @ v
            assert np.abs(up[k] - (w - beta * meta)).max() < 1e-12
        personal = clients.personal(1, range(POPULATION), {"model": base.start()}, {})
        for k in range(POPULATION):  # before prediction: one step of rate alpha on all rows
            first = base.start()["head.bias"].numpy()
            step = first - alpha * h @ (first - centres[k])
            assert np.abs(personal[k]["personal"]["head.bias"].numpy() - step).max() < 1e-12
            assert base.same_bits(personal[k]["global"], base.start())
    assert np.abs(steps["exact"] - steps["first-order"]).max() > 1e-3


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_per_fedavg_without_an_inner_step_is_fedavg_on_its_second_batches(backend):
    settings = Training(steps=3, batch=64, lr=0.3, weight_decay=0.05)  # all rows: all batches alike
    plain, _ = base.one_round(ALGORITHMS["fedavg"](), settings, backend)
    for variant in ("first-order", "hessian-free", "exact"):
        meta, _ = base.one_round(PerFedAvg(variant=variant, alpha=0.0), settings, backend)
        assert base.gap(meta.tree, tree.map(torch.Tensor.numpy, plain.tree)) < 1e-14


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_the_hessian_free_product_is_sound_where_the_gradient_vanishes(backend):
    """At the minimum of every client's loss v is 0, and so is the step."""

    class Flat(Quadratic):
        def loss(self, params, batch):
            return 0.0 * super().loss(params, batch)

    flat = Flat(base.Net, "head", CLASSES, dtype=torch.float64)
    for scale in ("relative", "absolute"):
        made = PerFedAvg(variant="hessian-free", delta_scale=scale)
        clients = clients_of(made, Training(lr=0.1), backend, flat, base.start())
        trained = clients.train(1, list(range(POPULATION)), {"model": base.start()}, {})
        assert not trained.refused
        for k in range(POPULATION):
            assert base.same_bits(tree.map(lambda leaf, k=k: leaf[k], trained.uploads.tree["model"]), base.start())


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_fedrods_generic_branch_knows_nothing_of_the_personal_head(backend):
    """With a personal head at zero both predict alike; and the generic model moves the same whatever the head."""
    zero, copy = mini(FedRoD(new_head_epochs=0), backend), mini(FedRoD(head_start="copy"), backend)
    assert all(base.same_bits(a, b) for a, b in zip(zero.server, copy.server, strict=True))
    rows = zero.records.rows["clients.jsonl"]
    views = {(r["round"], r["client"], r["view"]): r["loss_sum"] for r in rows}
    unseen = {(r["round"], r["client"]) for r in rows if r["group"] != "train"}
    seen = {(r["round"], r["client"]) for r in rows if r["group"] == "train"}
    assert unseen and all(views[*who, "personal"] == views[*who, "global"] for who in unseen)
    assert seen and all(views[*who, "personal"] != views[*who, "global"] for who in seen)
    # Without balancing (gamma = 0) the generic model is FedAvg's.
    plain = mini(ALGORITHMS["fedavg"](), backend)
    for a, b in zip(mini(FedRoD(gamma=0.0), backend).server, plain.server, strict=True):
        assert base.gap(a, tree.map(torch.Tensor.numpy, b)) < 1e-12
    assert base.gap(zero.server[-1], tree.map(torch.Tensor.numpy, plain.server[-1])) > 1e-3


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_fedrods_heads_of_a_client_with_one_class(backend):
    """Its balanced loss is exactly 0 and trains nothing shared; its personal head trains."""
    pool = base.pool()
    single = type(pool)(
        **vars(pool) | {"y": torch.where(torch.isin(torch.arange(len(pool.y)), pool.train.client(1)), 2, pool.y)}
    )
    clients = base.BACKENDS[backend](FedRoD(), task(), base.start(), single, Training(lr=0.2, batch=4), base.SEED)
    trained = clients.train(1, [1, 3], {"model": base.start()}, {})
    sent = [tree.map(lambda leaf, i=i: leaf[i], trained.uploads.tree["model"]) for i in (0, 1)]
    assert base.same_bits(sent[0], base.start()) and not base.same_bits(sent[1], base.start())
    head = clients.states()[1]["state"]["head"]
    assert head["head.bias"][2] > 0.1 and (head["head.bias"][:2] < 0).all()


def test_fedrods_hyper_network_gives_a_client_that_never_took_part_a_head():
    """Nothing is fitted: clients with the same class shares get the same head, and the shares decide."""
    made = FedRoD(heads="hyper")
    fed = base.federation(made, MINI, "batched")
    server = fed.run(base.MemoryRecords())
    assert tree.sq_norm(server["hyper"]) > 1e-3
    heads = [p["head"] for p in fed.clients.personal(ROUNDS, EVERYONE, *fed.down(server, EVERYONE))]
    for k in EVERYONE:
        share = np.bincount(base.problem("plain", []).y[k], minlength=CLASSES) / base.TRAIN_ROWS[k]
        for name, leaf in heads[k].items():
            assert np.abs(leaf.numpy() - server["hyper"][name].numpy() @ share).max() < 1e-14
    assert not base.same_bits(heads[0], heads[1])


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_fedbabus_head_never_moves_in_training(backend):
    first = task().head(base.start())
    made = Training(rounds=ROUNDS, epochs=2, batch=4, lr=0.2, momentum=0.8, weight_decay=0.1)
    ran = base.run(FedBABU(), made, backend)
    assert all(base.same_bits(s["head"], first) for states in ran.states for s in states.values())
    assert all(server.keys() == {"body"} for server in ran.server)
    assert not base.same_bits(ran.server[-1]["body"], ran.server[0]["body"])
    for personal in ran.personal:  # what is common to all, and a head of each client's own
        assert base.same_bits(task().head(personal["global"]), first)
        assert not base.same_bits(task().head(personal["personal"]), first)


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_fedbns_norms_never_leave(backend):
    ran, tools = library("fedbn", "plain", backend), task(True)
    assert tools.norm_names == golden.NORM
    shared = {"body.weight", "body.bias", "head.weight", "head.bias"}
    assert all(server["model"].keys() == shared for server in ran.server)
    norms = [state["norm"] for state in ran.states[-1].values()]
    assert all(norm.keys() == set(golden.NORM) for norm in norms)
    assert not any(base.same_bits(a, b) for i, a in enumerate(norms) for b in norms[:i])
    for personal in ran.personal:
        assert base.same_bits({n: personal[n] for n in shared}, ran.server[-1]["model"])
    numbers = sum(start(True)[name].size for name in shared)
    for row in ran.records.rows["rounds.jsonl"]:
        assert row["bytes_up"] == row["bytes_down"] == 4 * numbers * len(row["cohort"])


@pytest.mark.parametrize("backend", base.BACKENDS)
def test_fedbn_with_no_norm_to_keep_is_fedavg_to_the_bit(backend):
    class NoNorms(Task):
        def norm(self, params):
            return {}

    bare = NoNorms(base.Net, "head", CLASSES, dtype=torch.float64)
    sent = []
    for made in (FedBN(), ALGORITHMS["fedavg"]()):
        clients = clients_of(made, MINI, backend, bare, base.start())
        sent.append(clients.train(1, list(range(POPULATION)), {"model": base.start()}, {}).uploads.tree)
    assert base.same_bits(*sent)


def test_fedbn_refuses_a_model_without_norms():
    with pytest.raises(UserError, match="the model has none"):
        FedBN().server_init(task(), base.start(), POPULATION, rng.key(0))


# --- all of them ------------------------------------------------------------------------------------------------

SENT = {"apfl": {"model"}, "pfedme": {"model"}, "per_fedavg": {"model"}, "fedrod": {"model"}, "fedbabu": {"body"}}


@pytest.mark.parametrize("name", SENT)
def test_uploads_hold_what_is_shared_and_bytes_are_those_of_the_docstring(name):
    uploads, states = base.one_round(method(name), base.training("plain", epochs=1), "batched")
    assert uploads.tree.keys() == SENT[name]
    assert set(method(name).private) == {key for state in states.values() for key in state}
    (thing,) = SENT[name]
    numbers = sum(start()[n].size for n in (golden.BODY if thing == "body" else golden.ALL))
    for row in library(name, "plain", "batched").records.rows["rounds.jsonl"]:
        assert row["bytes_up"] == row["bytes_down"] == 4 * numbers * len(row["cohort"])
    assert f"Bytes per client and round: the {thing} up, the {thing} down" in type(method(name)).__doc__


VARIANTS = [
    APFL(adaptive=True, mix="logits"),
    PFedMe(inner_start="w", beta=1.5, inner_steps=2),
    PerFedAvg(variant="hessian-free", finetune_epochs=2),
    PerFedAvg(variant="exact"),
    FedRoD(heads="hyper", refit_epochs=1),
    FedBABU(finetune_part="head"),
]


@pytest.mark.parametrize("made", VARIANTS, ids=lambda made: type(made).__name__)
@pytest.mark.parametrize(
    "check", ["loop_equals_batched", "shapes_stay", "awkward_clients_work", "private_stays_private"]
)
def test_the_contract_holds_for_the_variants_too(made, check):
    CHECKS[check](Subject(made))


@pytest.mark.parametrize(
    "made", [APFL(), PFedMe(lam=2.0), FedRoD(), FedBABU(), FedBN()], ids=lambda made: type(made).__name__
)
def test_a_client_that_never_took_part_gets_a_model_that_fits_it(made):
    """Its own training loss falls when it adapts."""
    normed = isinstance(made, FedBN)
    initial = tree.map(torch.from_numpy, start(normed))
    training = Training(rounds=2, epochs=5, batch=4, lr=0.1)
    clients = clients_of(made, training, "loop", task(normed), initial)
    server = made.server_init(task(normed), initial, POPULATION, rng.key(0))
    new = len(EVERYONE) - 1
    x, y = base.problem("plain", []).x[new], base.problem("plain", []).y[new]

    def loss(personal):
        scores = predictions(made, task(normed), personal, x)["personal"]
        return -log_softmax(scores, axis=1)[np.arange(len(y)), y].mean()

    (adapted,) = clients.personal(1, [new], made.broadcast(server), {})
    clients.adapt_rounds = 0
    if isinstance(made, FedBABU):  # it adapts in `personalize`, as everyone does
        clients.algorithm = FedBABU(finetune_epochs=0)
    (before,) = clients.personal(1, [new], made.broadcast(server), {})
    assert loss(adapted) < 0.9 * loss(before)
