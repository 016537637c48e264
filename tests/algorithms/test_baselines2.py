"""FedPAC, FedProto, MOON, FedCP and GPFL against their equations (golden/baselines2.py), and what only each has."""

import ast
import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from golden import baselines2
from golden.reference import gradient as by_hand
from scipy.optimize import minimize
from scipy.special import logsumexp
from scipy.stats import kstest
from test_golden import (
    BACKENDS,
    CLASSES,
    HIDDEN,
    TRAIN_ROWS,
    MemoryRecords,
    federation,
    gap,
    pool,
    problem,
    run,
    same_bits,
    start,
    task,
    training,
)

from bespoke.algorithms import ALGORITHMS
from bespoke.core import rng, tree
from bespoke.core.algorithm import Uploads
from bespoke.core.data import Batch
from bespoke.core.local import Features
from bespoke.maths import gates, mmd, prototypes, simplex

# Clients 2 and 3 come first, and lack a class that client 1 brings; client 0 never comes, client 4 is new.
SEED, COHORTS = 1055, [[2, 3], [1, 3], [1, 2, 3]]

CASES = {
    "fedpac": {"lam": 0.8, "head_epochs": 2, "head_lr": 0.3, "smallest": 0.1, "new_epochs": 4},
    "fedpac/all": {"lam": 3.0, "head_epochs": 1, "head_lr": 0.1, "smallest": 0.0, "new_epochs": 2, "new_part": "all"},
    "fedproto": {"lam": 1.5},
    "fedproto/paper": {"lam": 1.0, "pull": "means", "average": "rows"},
    "moon": {"mu": 2.0, "tau": 0.5},
    "moon/ft": {"mu": 0.7, "tau": 1.3, "finetune_epochs": 2},
    "fedcp": {"lam": 5.0, "new_head_epochs": 4},
    "gpfl": {"lam": 0.3, "decay": 0.1, "new_head_epochs": 4},
    "gpfl/lagged": {"lam": 0.3, "decay": 0.0, "new_head_epochs": 2, "magnitude": "mean", "context": "lagged"},
}


def method(case):
    return ALGORITHMS[case.partition("/")[0]](**CASES[case])


@functools.cache
def library(case, variant, backend):
    return run(method(case), training(variant), backend, SEED)


# --- the comparison -------------------------------------------------------------------------------------------


@functools.cache
def noise(purpose, round, client, step):
    """The logistic noise of FedCP's gate in one step, (n, d), in the order of the client's rows."""
    streams = {"train": rng.TRAIN, "adapt": rng.EVAL}
    key, n = rng.stream(rng.key(SEED), streams[purpose], round, client), TRAIN_ROWS[client]
    if purpose == "adapt":
        key = rng.fold_in(rng.fold_in(key, rng.ADAPT), 0)
    key = rng.fold_in(key, 0)  # the tag of the main pass; then even numbers shuffle, odd ones are steps
    draws = rng.logistic(rng.fold_in(key, 2 * step + 1), (n, HIDDEN), torch.float64).numpy()
    by_row = np.empty_like(draws)
    by_row[rng.shuffle(rng.fold_in(key, 2 * step), n, n).numpy()] = draws
    return by_row


@functools.cache
def reference(case, variant, twist):
    name = case.partition("/")[0]
    first = federation(method(case), training(variant), "loop", SEED).start()
    given = {"server": arrays(first), "noise": noise}
    return getattr(baselines2, name)(problem(variant, COHORTS), given, twist=twist, **CASES[case])


def arrays(nest):
    return {name: arrays(v) if isinstance(v, dict) else v.numpy() for name, v in nest.items()}


def loss_sum(logits, y):
    return float(np.sum(logsumexp(logits, axis=1) - logits[np.arange(len(y)), y]))


def differences(case, variant, backend, twist=""):
    """What the library did against what the equations say: the largest difference, by kind."""
    ran = library(case, variant, backend)
    cohorts = [row["cohort"] for row in ran.records.rows["rounds.jsonl"]]
    assert cohorts == COHORTS
    want, given = reference(case, variant, twist), problem(variant, cohorts)
    evaluated = iter(ran.records.rows["clients.jsonl"])
    worst = dict.fromkeys(("server", "states", "losses", "logits"), 0.0)
    for r in range(len(cohorts)):
        worst["server"] = max(worst["server"], gap(ran.server[r], want.server[r]))
        assert ran.states[r].keys() == want.states[r].keys()
        for client, state in ran.states[r].items():
            worst["states"] = max(worst["states"], gap(state, want.states[r][client]))
        for client, views in enumerate(want.views[r]):
            for view, logits in views.items():
                row, y = next(evaluated), given.y_test[client]
                assert (row["round"], row["client"], row["total"], row["view"]) == (r + 1, client, len(y), view)
                loss = loss_sum(logits, y)
                worst["losses"] = max(worst["losses"], abs(row["loss_sum"] - loss) / max(1.0, abs(loss)))
                if not twist:
                    assert row["correct"] == (logits.argmax(axis=1) == y).sum()
    assert next(evaluated, None) is None
    for client, personal in enumerate(ran.personal):
        with torch.no_grad():
            found = method(case).predict(task(), personal, torch.from_numpy(given.x_test[client]))
        found = found if isinstance(found, dict) else {"personal": found}
        worst["logits"] = max(worst["logits"], gap(found, want.views[-1][client]))
    return worst


def grouped(*values):
    """Arguments of a test that shares its runs with others of the same method."""
    return pytest.param(*values, marks=pytest.mark.xdist_group(values[0].partition("/")[0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["plain", "momentum"])
@pytest.mark.parametrize("case", [grouped(case) for case in CASES])
def test_the_library_follows_the_equations(case, variant, backend):
    found = differences(case, variant, backend)
    assert max(found.values()) < 1e-10, found


# --- the comparison has teeth ---------------------------------------------------------------------------------

# Mistakes in one term of a method, each of which the comparison must see.
TWISTS = {
    "fedpac": [
        "other weighting",
        "no pull",
        "pull summed over features",
        "pulled in the first round",
        "no pull to own prototypes",
        "head at the body's rate",
        "body under the old head",
        "statistics after training",
        "h without class shares",
        "variance of a row",
        "no variance",
        "all heads mixed alike",
        "heads not mixed",
        "small weights stay",
        "not normalised again",
        "prototypes before training",
        "owners alike",
        "new client starts at the first head",
        "unseen unfitted",
        "unseen fits the other part",
    ],
    "fedproto": [
        "no pull",
        "other pull",
        "pull summed over features",
        "pulled to nothing",
        "mean over known rows alone",
        "starts afresh each round",
        "prototypes before training",
        "other average",
        "absent classes vote",
        "own classes unheeded",
        "unseen unfitted",
    ],
    "fedproto/paper": ["other average", "other pull", "mean over classes"],
    "moon": [
        "other weighting",
        "no contrast",
        "attracted to the past",
        "one pair more",
        "random model before the first",
        "negative is the first model",
        "keeps its first model",
        "keeps the average",
    ],
    "moon/ft": ["no fine-tuning"],
    "fedcp": [
        "other weighting",
        "gates swapped",
        "gates halved",
        "global head sees all",
        "context not normalised",
        "no noise",
        "no global head",
        "no tie",
        "root of the tie",
        "gate frozen",
        "sends its own head",
        "unseen starts at the first head",
        "unseen unfitted",
    ],
    "gpfl": [
        "other weighting",
        "scale without the one",
        "no shift",
        "no rectifier",
        "contexts swapped",
        "one context",
        "contexts of the other time",
        "guided by fixed embeddings",
        "pulled to trained embeddings",
        "inner products",
        "no guidance",
        "no pull",
        "no decay",
        "other magnitude",
        "heads averaged",
        "unseen unfitted",
    ],
    "gpfl/lagged": ["contexts of the other time", "other magnitude"],
}
MISTAKES = [grouped(case, "plain", twist) for case, twists in TWISTS.items() for twist in twists]
MISTAKES += [grouped(case, "momentum", "no momentum") for case in ("fedproto", "moon", "fedcp", "gpfl")]
MISTAKES += [grouped(case, "momentum", "no weight decay") for case in ("fedproto", "moon", "fedcp", "gpfl")]


@pytest.mark.parametrize(("case", "variant", "twist"), MISTAKES)
def test_a_mistake_in_one_term_is_seen(case, variant, twist):
    found = differences(case, variant, "batched", twist)
    assert max(found.values()) > 1e-4, found
    if twist.startswith(("unseen", "new client", "own classes", "no fine-tuning")):  # it stays where it was made
        assert max(found["server"], found["states"]) < 1e-10
        assert max(found["losses"], found["logits"]) > 1e-4


def test_the_equations_use_numpy_alone():
    nodes = list(ast.walk(ast.parse(Path(baselines2.__file__).read_text(encoding="utf-8"))))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported == {"dataclasses", "itertools", "numpy", "golden.reference"}


def test_complex_steps_give_the_gradient_derived_by_hand():
    given = problem("plain", [])
    x, y = given.x[1], given.y[1]

    def loss(p):
        return baselines2.cross_entropy(baselines2.classify(p, baselines2.features(p, x)), y)

    found = baselines2.slope(loss, given.start, baselines2.ALL)
    want = by_hand(given.start, x, y)
    assert max(np.abs(found[n] - want[n]).max() for n in want) < 1e-14
    assert min(np.abs(want[n]).max() for n in want) > 1e-2


# --- one property that only this method has -------------------------------------------------------------------


@functools.cache
def minibatches(name, backend, **fields):
    return run(ALGORITHMS[name](**fields), training("momentum", batch=4, epochs=2, clip=1.0), backend, SEED)


@pytest.mark.parametrize("backend", BACKENDS)
def test_moon_without_its_term_is_fedavg_to_the_bit(backend):
    plain, moon = minibatches("fedavg", backend), minibatches("moon", backend, mu=0.0)
    assert all(same_bits(a, b) for a, b in zip(plain.server, moon.server, strict=True))
    assert plain.records.rows["clients.jsonl"] == moon.records.rows["clients.jsonl"]
    contrast = minibatches("moon", backend, mu=5.0).server
    assert same_bits(plain.server[0], contrast[0])  # nobody has a model before the first round
    assert not same_bits(plain.server[1], contrast[1])


def test_moon_tested_before_averaging_is_what_each_client_trained():
    fed = federation(ALGORITHMS["moon"](), training("plain"), "batched", SEED)
    fed.evaluation = replace(fed.evaluation, when="local")
    records = MemoryRecords()
    fed.run(records)
    rows = [row for row in records.rows["clients.jsonl"] if row["round"] == 3]
    assert [row["client"] for row in rows] == COHORTS[-1]
    given, states = problem("plain", []), fed.clients.states()
    for row in rows:
        model = arrays(states[row["client"]]["state"]["previous"])
        x, y = given.x_test[row["client"]], given.y_test[row["client"]]
        want = loss_sum(baselines2.classify(model, baselines2.features(model, x)), y)
        assert row["loss_sum"] == pytest.approx(want, abs=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedproto_without_its_pull_is_local_training_to_the_bit(backend):
    alone, proto = minibatches("local", backend), minibatches("fedproto", backend, lam=0.0)
    for a, b in zip(alone.states, proto.states, strict=True):
        assert a.keys() == b.keys()
        assert all(same_bits(a[c]["model"], b[c]["model"]) for c in a)
    pulled = minibatches("fedproto", backend, lam=5.0)
    assert not same_bits(alone.states[-1][3]["model"], pulled.states[-1][3]["model"])


def test_fedproto_shares_no_weights():
    fed = federation(ALGORITHMS["fedproto"](), training("plain"), "batched", SEED)
    shared, own = fed.down(fed.start(), [0, 1])
    trained = fed.clients.train(1, [0, 1], shared, own)
    for message in (shared, tree.map(lambda leaf: leaf[0], trained.uploads.tree)):
        assert {name: tuple(leaf.shape) for name, leaf in message.items()} == {
            "prototype": (CLASSES, HIDDEN),
            "rows": (3,),
        }
    assert own == {}


def test_fedpac_recovers_a_copied_client():
    """Equal statistics and strangers far away: the two copies mix their heads half and half, and nobody else's."""
    method, draw = ALGORITHMS["fedpac"](), torch.Generator().manual_seed(0)
    names = {name: leaf.shape for name, leaf in task().head(start()).items()}
    up = {
        "body": tree.map(lambda p: p.expand(4, *p.shape), task().body(start())),
        "head": {n: torch.randn(4, *shape, dtype=torch.float64, generator=draw) for n, shape in names.items()},
        "prototype": torch.zeros(4, CLASSES, HIDDEN, dtype=torch.float64),
        "rows": torch.ones(4, CLASSES, dtype=torch.float64),
        "moment": 9.0 * torch.randn(4, CLASSES, HIDDEN, dtype=torch.float64, generator=draw),
        "variance": torch.full((4,), 0.01, dtype=torch.float64),
    }
    up["moment"][2] = up["moment"][0]
    server = method.server_init(task(), start(), 6, rng.key(0))
    who, weights = torch.tensor([1, 2, 4, 5]), torch.tensor([3.0, 5.0, 7.0, 9.0], dtype=torch.float64)
    new = method.aggregate(task(), server, Uploads(up, weights, who), rng.key(0))
    for name, heads in new["heads"].items():
        sent = up["head"][name]
        assert torch.allclose(heads[1], (sent[0] + sent[2]) / 2, atol=1e-12) and torch.equal(heads[1], heads[4])
        assert torch.allclose(heads[2], sent[1], atol=1e-12) and torch.allclose(heads[5], sent[3], atol=1e-12)
        assert torch.equal(heads[0], start()[name]) and torch.equal(heads[3], start()[name])
    down = method.tailor(new, torch.tensor([4, -1, 3]))["head"]
    for name, heads in new["heads"].items():
        mean = (3.0 * heads[1] + 5.0 * heads[2] + 7.0 * heads[4] + 9.0 * heads[5]) / 24.0
        assert torch.equal(down[name][0], heads[4]) and torch.equal(down[name][2], start()[name])
        assert torch.allclose(down[name][1], mean, atol=1e-14)
        assert torch.allclose(method.tailor(server, torch.tensor([-1]))["head"][name][0], start()[name], atol=1e-14)


def test_fedcps_gate_is_a_share():
    key, d = rng.key(5), 6
    block = gates.init(rng.fold_in(key, 0), d, 2 * d, torch.float64)
    for scale in (0.0, 1.0, 1e6):
        z = scale * rng.normal(rng.fold_in(key, 1), (50, d), torch.float64)
        context = rng.normal(rng.fold_in(key, 2), (d,), torch.float64)
        quiet, noisy = gates.gate(block, z, context), gates.gate(block, z, context, key)
        for r in (quiet, noisy):
            assert r.shape == z.shape and r.min() >= 0.0 and r.max() <= 1.0
        assert not torch.equal(quiet, noisy)
    low = block | {"shift": torch.full((2 * d,), -50.0, dtype=torch.float64)}
    assert torch.equal(gates.gate(low, z, context), torch.full_like(z, 0.5))  # both halves clipped


@pytest.mark.parametrize("variant", ["plain", "momentum"])
def test_fedcps_context_never_turns_under_sgd(variant):
    """Cross entropy moves the rows of a linear head by amounts that sum to 0; decay only scales them."""
    first = start()["head.weight"].sum(dim=0)
    for state in library("fedcp", variant, "batched").states[-1].values():
        last = state["personal"]["head.weight"].sum(dim=0)
        assert (last / last.norm() - first / first.norm()).abs().max() < 1e-12
        assert (state["personal"]["head.weight"] - start()["head.weight"]).abs().max() > 1e-2


def test_fedcps_gate_is_idle_while_both_heads_agree():
    fed = federation(ALGORITHMS["fedcp"](new_head_epochs=0), training("plain"), "batched", SEED)
    x = pool().x[:7]
    for personal in fed.clients.personal(0, [0, 4], *fed.down(fed.start(), [0, 4])):
        want = task().logits(start(), x) + start()["head.bias"]
        assert torch.allclose(fed.algorithm.predict(task(), personal, x), want, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpfls_two_contexts_are_means_of_embeddings(backend):
    """The mean over all classes, and the mean by the client's shares: a client of one class has that class's own."""
    fed = federation(ALGORITHMS["gpfl"](), training("plain"), backend, SEED)
    server, everyone = fed.start(), list(range(len(TRAIN_ROWS)))
    look = lambda local, state, down: dict(zip("gp", fed.algorithm._contexts(local, state, down), strict=True))  # noqa: E731
    found = fed.clients.probe(look, everyone, *fed.down(server, everyone))
    e = server["embedding"]
    for k, y in enumerate(problem("plain", []).y):
        assert torch.allclose(found["g"][k], e.mean(dim=0), atol=1e-14)
        assert torch.allclose(found["p"][k], torch.stack([e[c] for c in y]).mean(dim=0), atol=1e-14)
    assert set(problem("plain", []).y[4]) == {2} and torch.allclose(found["p"][4], e[2], atol=1e-14)


def test_gpfls_routes_are_one_for_a_balanced_client_and_guidance_is_bounded():
    opened = gates.valve_init(rng.key(1), HIDDEN, torch.float64)
    e = rng.normal(rng.key(2), (CLASSES, HIDDEN), torch.float64)
    z = rng.normal(rng.key(3), (20, HIDDEN), torch.float64)
    share = torch.full((CLASSES,), 1.0 / CLASSES, dtype=torch.float64)
    even, skewed = gates.valve(opened, z, share @ e), gates.valve(opened, z, e[0])
    assert torch.allclose(even, gates.valve(opened, z, e.mean(dim=0)), atol=1e-13)
    assert even.min() >= 0.0 and (even - skewed).abs().max() > 1e-2
    closed = tree.map(torch.zeros_like, opened)  # gamma = beta = 0: what is left is the rectified feature
    assert torch.equal(gates.valve(closed, z, e[0]), torch.relu(z))
    records = library("gpfl", "plain", "loop").records.rows["rounds.jsonl"]
    assert all(row["train_loss"] > np.log(1.0 + (CLASSES - 1) * np.exp(-2.0)) for row in records)


# --- awkward inputs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["fedpac", "fedproto", "moon", "fedcp", "gpfl"])
def test_features_of_zero_give_finite_steps(name, backend):
    """Cosines, norms and square roots meet their worst point."""
    fed = federation(ALGORITHMS[name](), training("plain"), backend, SEED)
    fed.params = fed.clients.params = start() | tree.zeros_like(task().body(start()))
    server = fed.start()
    for round in (1, 2):
        trained = fed.clients.train(round, [0, 1, 2], *fed.down(server, [0, 1, 2]))
        assert trained.refused == {}
        server = fed.algorithm.aggregate(task(), server, trained.uploads, rng.key(0))
    assert all(torch.isfinite(leaf).all() for leaf in tree.leaves(server))


def test_further_rounds_of_adaptation_go_on():
    for name in ("fedpac", "fedproto", "fedcp", "gpfl"):
        heads = []
        for rounds in (0, 1, 2):
            fed = federation(ALGORITHMS[name](), training("plain"), "loop", SEED)
            fed.clients.adapt_rounds = rounds
            personal = fed.clients.personal(1, [4], *fed.down(fed.start(), [4]))[0]
            x, y = pool().x[pool().train.client(4)], pool().y[pool().train.client(4)]
            logits = fed.algorithm.predict(task(), personal, x)
            logits = logits["personal"] if isinstance(logits, dict) else logits
            heads.append(torch.nn.functional.cross_entropy(logits, y).item())
        assert heads[0] > heads[1] > heads[2], (name, heads)


# --- what crosses the wire ------------------------------------------------------------------------------------

BODY, HEAD, D = sum(start()[n].numel() for n in baselines2.BODY), CLASSES * (HIDDEN + 1), HIDDEN
SENT = {  # numbers down; up, for so many present classes
    "fedpac": (BODY + HEAD + CLASSES * D + CLASSES, lambda present: BODY + HEAD + 2 * D * present + CLASSES + 1),
    "fedproto": (CLASSES * D + CLASSES, lambda present: D * present + CLASSES),
    "moon": (BODY + HEAD, lambda present: BODY + HEAD),
    "fedcp": (BODY + HEAD + 2 * D * D + 6 * D, lambda present: BODY + HEAD + 2 * D * D + 6 * D),
    "gpfl": (BODY + CLASSES * D + 2 * D * D + 6 * D, lambda present: BODY + CLASSES * D + 2 * D * D + 6 * D),
}


@pytest.mark.parametrize("name", SENT)
def test_bytes_are_those_of_the_docstring(name):
    down, up = SENT[name]
    present = [len(set(y)) for y in problem("plain", []).y]
    for row in library(name, "plain", "batched").records.rows["rounds.jsonl"]:
        assert row["bytes_down"] == 4 * down * len(row["cohort"])
        assert row["bytes_up"] == sum(4 * up(present[k]) for k in row["cohort"])


@pytest.mark.parametrize("name", ["fedpac", "fedproto"])
def test_a_message_packed_by_present_classes_has_the_counted_size(name):
    fed = federation(ALGORITHMS[name](), training("plain"), "loop", SEED)
    trained = fed.clients.train(1, [1, 2], *fed.down(fed.start(), [1, 2]))
    for i, counted in enumerate(trained.logged["bytes_up"]):
        up = tree.map(lambda leaf, i=i: leaf[i], trained.uploads.tree)
        by_class = {n: up.pop(n)[up["rows"] > 0] for n in ("prototype", "moment") if n in up}
        packed = [leaf.float().numpy().tobytes() for leaf in tree.leaves({**up, **by_class})]
        assert counted == len(b"".join(packed)) < tree.nbytes(trained.uploads.tree, stacked=True)


# --- the mathematics in core ----------------------------------------------------------------------------------


def test_projection_is_the_nearest_point_of_the_simplex():
    v = 2.0 * rng.normal(rng.key(0), (200, 7), torch.float64)
    a = simplex.project(v)
    assert a.min() >= 0.0 and (a.sum(dim=1) - 1.0).abs().max() < 1e-14
    # nearest: v - a has no component towards any corner
    assert ((v - a)[:, None, :] * (torch.eye(7, dtype=torch.float64) - a[:, None, :])).sum(dim=-1).max() < 1e-13
    assert torch.equal(simplex.project(torch.eye(3)), torch.eye(3))
    assert torch.allclose(simplex.project(torch.zeros(5)), torch.full((5,), 0.2))
    assert (a > 0).double().mean() < 0.9


@pytest.mark.parametrize("m", [2, 5, 12])
def test_programmes_against_scipy(m):
    factor, b = rng.normal(rng.key(1), (m, m), torch.float64), rng.normal(rng.key(2), (4, m), torch.float64)
    q = factor @ factor.T + 0.01 * torch.eye(m, dtype=torch.float64)
    found = simplex.minimise(q, b).numpy()
    for a, row in zip(found, b.numpy(), strict=True):
        want = minimize(
            lambda x, row=row: 0.5 * x @ q.numpy() @ x - row @ x,
            np.full(m, 1.0 / m),
            jac=lambda x, row=row: q.numpy() @ x - row,
            method="SLSQP",
            bounds=[(0.0, 1.0)] * m,
            constraints={"type": "eq", "fun": lambda x: x.sum() - 1.0, "jac": np.ones_like},
            options={"ftol": 1e-15, "maxiter": 1000},
        )
        assert np.abs(a - want.x).max() < 1e-6
        slope = q.numpy() @ a - row  # optimal to rounding: equal where a > 0, no smaller elsewhere
        assert slope[a > 1e-9].max() - slope.min() < 1e-10
    assert (found == 0).any() or m == 2


def test_mixtures_sum_to_one_and_follow_the_closed_form_of_two():
    h, v = rng.normal(rng.key(3), (2, 6), torch.float64), torch.tensor([0.7, 0.2], dtype=torch.float64)
    a, far = simplex.mixtures(v, h, 0.0), (h[0] - h[1]).square().sum()
    assert (a[0, 0] - (v[1] + far) / (v.sum() + far)).abs() < 1e-7  # up to the ridge of 1e-8
    assert (a[1, 1] - (v[0] + far) / (v.sum() + far)).abs() < 1e-7
    h, v = rng.normal(rng.key(4), (9, 6), torch.float64), rng.uniform(rng.key(5), (9,), torch.float64)
    for smallest in (0.0, 1e-3, 0.2, 1.0):
        a = simplex.mixtures(v, h, smallest)
        assert a.min() >= 0.0 and (a.sum(dim=1) - 1.0).abs().max() < 1e-14
        assert ((a == 0) | (a > smallest) | (a == a.amax(dim=1, keepdim=True))).all()
    assert torch.equal(simplex.mixtures(v[:1], h[:1], 1e-3), torch.ones(1, 1, dtype=torch.float64))
    nothing = simplex.mixtures(torch.zeros(3), torch.zeros(3, 4), 1e-3)
    assert torch.allclose(nothing, torch.full((3, 3), 1 / 3, dtype=torch.float64))


def test_discrepancy_of_real_rows():
    x, y = (rng.normal(rng.fold_in(rng.key(6), i), (9, 4), torch.float64) for i in range(2))
    mask = torch.tensor([1.0] * 6 + [0.0] * 3, dtype=torch.float64)
    want = baselines2.discrepancy(x[:6].numpy(), y[:6].numpy())
    assert abs(mmd.mmd(x, y, mask).item() - want) < 1e-13 and want > 1e-2
    assert mmd.mmd(x, x, mask).abs() < 1e-14
    for far in (0.0, 100.0):  # a common offset does not matter, even to float32
        assert abs(mmd.mmd(*((v + far).float() for v in (x, y)), mask.float()).item() - want) < 1e-4
    apart = mmd.mmd(x, x + 1e3, mask).item()  # nothing in common: twice the mean kernel within a sample
    assert abs(apart - 2.0 * _within(x[:6].numpy())) < 1e-9


def _within(x):
    square = ((x[:, None] - x) ** 2).sum(axis=-1)
    return np.mean(sum(np.exp(-square / (2.0 * w)) for w in (10, 15, 20, 50)))


def test_logistic_numbers():
    draws = rng.logistic(rng.key(7), (20_000,), torch.float64)
    assert kstest(draws.numpy(), "logistic").pvalue > 0.01
    assert torch.equal(rng.logistic(rng.key(7), (3,), torch.float64), draws[:3])  # a longer draw begins the same
    assert draws.abs().max() <= 17.4 and torch.isfinite(rng.logistic(rng.key(7), (20_000,))).all()


def test_blocks_are_torchs_layers():
    block = gates.init(rng.key(8), 5, 10, torch.float64)
    layer, norm = torch.nn.Linear(5, 10, dtype=torch.float64), torch.nn.LayerNorm(10, dtype=torch.float64)
    layer.load_state_dict({"weight": block["weight"], "bias": block["bias"]})
    x = rng.normal(rng.key(9), (7, 5), torch.float64)
    assert torch.equal(gates.linear(block, x), layer(x))
    assert torch.allclose(gates.norm(block, gates.linear(block, x)), norm(layer(x)), atol=1e-14)
    for leaf in (block["weight"], block["bias"]):
        assert 0.8 * 5**-0.5 < leaf.abs().max() <= 5**-0.5 and abs(leaf.mean()) < 0.2


def test_prototypes_of_absent_classes():
    z, y = rng.normal(rng.key(10), (5, 2), torch.float64), torch.tensor([0, 2, 2, 0, 1])
    mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)  # the only row of class 1 is padding
    mine = prototypes.own(Features(z, y, mask), 4)
    assert mine["rows"].tolist() == [2.0, 0.0, 2.0, 0.0]
    assert torch.allclose(mine["prototype"], torch.stack([(z[0] + z[3]) / 2, 0 * z[0], (z[1] + z[2]) / 2, 0 * z[0]]))
    moment, variance = prototypes.first_moment(Features(z, y, mask), 4)
    assert torch.allclose(moment, mine["prototype"] * mine["rows"][:, None] / 4)
    slots = torch.zeros(4, 4, 2, dtype=torch.float64)
    slots[torch.arange(4), y[:4]] = z[:4]
    assert torch.allclose(variance, slots.flatten(1).var(dim=0, correction=0).sum() / 4)
    before = {
        "prototype": torch.full((4, 2), 7.0, dtype=torch.float64),
        "rows": torch.tensor([1.0, 5.0, 0.0, 0.0]).double(),
    }
    other = {"prototype": torch.ones(4, 2, dtype=torch.float64), "rows": torch.tensor([6.0, 0.0, 0.0, 0.0]).double()}
    both = tree.stack([mine, other])
    now = prototypes.combine(both, both["rows"], before)
    assert now["rows"].tolist() == [8.0, 5.0, 2.0, 0.0]
    assert torch.allclose(now["prototype"][0], (2 * mine["prototype"][0] + 6.0) / 8)
    assert torch.equal(now["prototype"][1], before["prototype"][1])
    assert torch.allclose(now["prototype"][2], mine["prototype"][2])
    batch = Batch(z, y, mask, y, y[0], rng.key(0))
    far = ((z[0] - now["prototype"][0]).square() + (z[3] - now["prototype"][0]).square()).sum() / (4 * 2)
    known = torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert torch.allclose(prototypes.pull(z, batch, now["prototype"], known), far)
    means = (mine["prototype"][0] - now["prototype"][0]).norm()
    assert torch.allclose(prototypes.pull_means(z, batch, now["prototype"], known), means, atol=1e-7)
    assert prototypes.nearest(z, now["prototype"], known).argmax(dim=1).max() <= 1
