"""FedPCE against its equations in NumPy, on the paper's network, and with awkward clients."""

import functools

import numpy as np
import pytest
import torch
from golden import five
from method_runs import (
    BACKENDS,
    COHORTS,
    PRECISIONS,
    differences,
    everything_finite,
    golden_problem,
    healthy_gap,
    numpy,
    play,
)
from scipy.optimize import approx_fprime
from test_golden import CLASSES, HIDDEN, INPUTS, Net, pool, start, task
from torch import nn

from bespoke.algorithms.fedpce import FedPCE, generate
from bespoke.contract import CHECKS, Subject
from bespoke.core import rng, tree
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.errors import UserError
from bespoke.models import ModelSettings, build_task

SIZE = 3


class NormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(INPUTS, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x))))


@functools.cache
def norm_task():
    return Task(NormNet, "head", CLASSES, dtype=torch.float64)


@functools.cache
def norm_start():
    """The golden weights, and norm leaves that are not 1 and 0."""
    draw = torch.Generator().manual_seed(0)
    leaves = {n: torch.randn(HIDDEN, generator=draw, dtype=torch.float64) for n in five.NORM}
    both = start() | {"norm.weight": 1.0 + 0.3 * leaves["norm.weight"], "norm.bias": 0.3 * leaves["norm.bias"]}
    return {n: both[n] for n in norm_task().body_names + norm_task().head_names}


RATES = {"mlp": (0.3, 0.01), "embedding": (0.5, 0.02), "new": (0.4, 0.1)}
FIELDS = {"mlp_lr": 0.3, "mlp_lr_final": 0.01, "embedding_lr": 0.5, "embedding_lr_final": 0.02}
METHOD = FedPCE(size=SIZE, hidden=4, **FIELDS, new_lr=0.4, new_lr_final=0.1)
ADAM = {"optimizer": "adam", "keep_optimizer": True, "beta1": 0.5, "beta2": 0.9}
CASES = {  # settings of training, and rounds of adaptation
    "plain": ({}, 1),
    "momentum": ({}, 2),
    "adam": (ADAM, 3),
}
VARIANT = {"plain": "plain", "momentum": "momentum", "adam": "momentum"}


def settings(case):
    changes, rounds = CASES[case]
    given, training = golden_problem(VARIANT[case], COHORTS, lr=0.2, schedule="cosine", lr_final=0.05, **changes)
    return given, training, rounds


@functools.cache
def library(case, backend):
    _, training, rounds = settings(case)
    return play(METHOD, norm_task(), norm_start(), pool(), training, COHORTS, backend, adapt_rounds=rounds)


@functools.cache
def equations(case, twist=""):
    given, _, rounds = settings(case)
    leaves = {n: norm_start()[n].numpy() for n in five.NORM}
    return five.fedpce(
        given,
        numpy(library(case, "loop").first),
        leaves,
        SIZE,
        {"model": (0.2, 0.05), **RATES},
        len(COHORTS),
        adam=(0.5, 0.9) if case == "adam" else None,
        adapt_rounds=rounds,
        twist=twist,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_the_library_follows_the_equations(case, backend):
    found = differences(library(case, backend), equations(case), settings(case)[0].y_test)
    assert max(found.values()) < 1e-8, found


TWISTS = [
    ("plain", "one rate for all"),
    ("plain", "no schedule"),
    ("plain", "embeddings averaged"),
    ("plain", "embeddings start at zero"),
    ("plain", "embedding frozen"),
    ("plain", "leaves without their start"),
    ("plain", "other weighting"),
    ("plain", "unseen unfitted"),
    ("adam", "moments start afresh"),
    ("adam", "no schedule"),
]


@pytest.mark.parametrize(("case", "twist"), TWISTS)
def test_a_mistake_in_one_term_is_seen(case, twist):
    found = differences(library(case, "batched"), equations(case, twist), settings(case)[0].y_test)
    assert max(found["server"], found["states"], found["views"]) > 1e-5, found
    if twist.startswith("unseen"):
        assert max(found["server"], found["states"]) < 1e-8


def test_the_gradient_derived_by_hand():
    given, _, _ = settings("plain")
    first = numpy(library("plain", "loop").first)
    leaves = {n: norm_start()[n].numpy() for n in five.NORM}
    v, x, y = np.array([0.4, -0.3, 0.9]), given.x[1], given.y[1]
    parts = five.flat(first | {"embedding": v})
    parts = {n: p + 0.3 * np.random.default_rng(0).normal(size=p.shape) for n, p in parts.items()}

    def loss(flat):
        pieces = np.split(flat, np.cumsum([p.size for p in parts.values()])[:-1])
        now = five.nested({n: a.reshape(p.shape) for (n, p), a in zip(parts.items(), pieces, strict=True)})
        out = five.normed(now["model"], five.generated(now["mlp"], now["embedding"], leaves)[0], x)[0]
        top = out.max(axis=1)
        return (np.log(np.exp(out - top[:, None]).sum(axis=1)) + top - out[np.arange(len(y)), y]).mean()

    now = five.nested(parts)
    mine = five.flat(five.fedpce_gradient(now["model"], now["mlp"], now["embedding"], leaves, x, y))
    slope = approx_fprime(np.concatenate([p.ravel() for p in parts.values()]), loss, 1e-7)
    assert np.abs(np.concatenate([mine[n].ravel() for n in parts]) - slope).max() < 1e-5
    assert np.abs(mine["embedding"]).max() > 1e-3


# --- the paper's network --------------------------------------------------------------------------------------


@functools.cache
def resnet(width):
    made = build_task(ModelSettings("fedpce_resnet18", width=width), (3, 32, 32), 10)
    params = made.init(rng.key(0))
    return made, params, FedPCE().server_init(made, params, 30, rng.key(1))


def numbers(value):
    return sum(leaf.numel() for leaf in tree.leaves(value))


@pytest.mark.parametrize(("width", "shared", "whole"), [(64, 11_943_626, 11_943_658), (62, 11_235_384, 11_235_416)])
def test_the_papers_counts(width, shared, whole):
    made, params, server = resnet(width)
    assert numbers(server) == numbers(FedPCE().broadcast(server)) == shared
    state = FedPCE().client_init(made, params, torch.tensor(0))
    assert numbers(server) + state["embedding"].numel() == whole
    if width == 64:
        assert numbers(made.norm(params)) == 10_624
        assert len(server["mlp"]) == 42 and numbers(server["mlp"]) == 779_264


def test_with_a_last_layer_of_zeros_it_is_the_plain_network():
    made, params, server = resnet(64)
    state = FedPCE().client_init(made, params, torch.tensor(7))
    zero = {n: m | {"w2": torch.zeros_like(m["w2"])} for n, m in server["mlp"].items()}
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = made.logits(params, x)
        same = made.logits(FedPCE().personalize(None, state, {"model": server["model"], "mlp": zero}), x)
        other = made.logits(FedPCE().personalize(None, state, server), x)
    assert (plain - same).abs().max() < 1e-6
    assert (plain - other).abs().max() > 1e-4


def test_an_embedding_reaches_every_norm_layer():
    made, params, server = resnet(64)
    first, second = (FedPCE().client_init(made, params, torch.tensor(k)) for k in (0, 1))
    leaves = [generate(server["mlp"], s["embedding"], s["start"]) for s in (first, second)]
    assert leaves[0].keys() == made.norm(params).keys()
    for name, leaf in leaves[0].items():
        assert leaf.shape == params[name].shape
        assert ((leaf - leaves[1][name]).abs() > 0).float().mean() > 0.9, name
        assert (leaf - params[name]).abs().max() < 0.1  # the last layer starts small
    again = generate(server["mlp"], first["embedding"].clone(), second["start"])
    assert all(torch.equal(leaves[0][name], again[name]) for name in again)  # equal embeddings, equal networks


def test_embeddings_start_at_unit_vectors():
    made, params = norm_task(), norm_start()
    for client in (0, 2, 31, 32, 500, -1):
        found = FedPCE().client_init(made, params, torch.tensor(client))["embedding"]
        want = torch.zeros(32, dtype=torch.float64)
        if 0 <= client < 32:
            want[client] = 1.0
        assert torch.equal(found, want)


# --- what trains, and what travels ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_client_trains_its_embedding_alone(backend):
    played = library("momentum", backend)
    clients, down = played.clients, METHOD.broadcast(played.server[-1])
    before = tree.flatten(tree.map(torch.clone, down))
    personal = clients.personal(3, [4], down, {})[0]
    assert all(torch.equal(before[n], v) for n, v in tree.flatten(down).items())
    assert all(torch.equal(personal[n], v) for n, v in down["model"].items())  # bit for bit
    seen = []

    def watch(local, state, down):
        made = METHOD.adapt(local, state, down)
        seen.append(made.keys())
        return {"embedding": made["embedding"], "start": made["start"]}

    out = clients.probe(watch, [4], down, {})
    assert seen[0] == {"embedding", "start"}
    assert all(torch.equal(out["start"][n][0], norm_start()[n]) for n in five.NORM)
    assert out["embedding"].shape == (1, SIZE) and out["embedding"].abs().max() > 1e-4
    changed = {n for n in five.NORM if not torch.equal(personal[n], norm_start()[n])}
    assert changed == set(five.NORM)


def test_embeddings_stay_where_they_are():
    for backend in BACKENDS:
        for round in library("plain", backend).uploads:
            for up in round.values():
                assert up.keys() == {"model", "mlp"}
                assert not any("embedding" in name or "start" in name for name in tree.flatten(up))
    states = library("plain", "loop").states[-1]
    assert len({tuple(s["embedding"].tolist()) for s in states.values()}) == len(states)


def test_a_model_without_norm_layers_is_refused():
    with pytest.raises(UserError, match="normalisation layers, and the model has none") as refusal:
        FedPCE().server_init(task(), start(), 3, rng.key(0))
    assert "\n" not in str(refusal.value)
    assert isinstance(task(), Task) and Net is not NormNet


# --- three cosines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_each_group_follows_its_own_cosine(schedule):
    """With a slope of 1 everywhere and one step, a parameter moves by its rate."""
    rounds, rates = 7, {"model": (1e-4, 1e-6), "mlp": (1e-2, 1e-6), "embedding": (0.1, 1e-4)}
    training = Training(rounds=rounds, steps=1, batch=64, lr=1e-4, lr_final=1e-6, schedule=schedule)
    params = {name: {"p": torch.zeros(2, dtype=torch.float64)} for name in rates}

    def loss(params, batch):
        return sum(branch["p"].sum() for branch in params.values())

    for backend in BACKENDS:
        clients = BACKENDS[backend](METHOD, norm_task(), norm_start(), pool(), training, 0)
        for round in range(1, rounds + 1):

            def work(local, state, down, round=round):
                factor = training.lr_factor(round)
                local.lr = torch.full_like(local.lr, training.lr * factor)
                return local.sgd(loss, params, lr=rates)

            moved = clients.probe(work, [0, 1], {}, {})
            for name, (first, last) in rates.items():
                want = five.cosine(first, last, round, rounds) if schedule == "cosine" else first
                assert (moved[name]["p"] + want).abs().max() < 1e-12 * first, (name, round)


def test_the_first_and_the_last_round_of_the_schedule():
    training = Training(rounds=1000, lr=1e-4, lr_final=1e-6, schedule="cosine")
    clients = BACKENDS["loop"](METHOD, norm_task(), norm_start(), pool(), training, 0)
    data = clients.data(pool().train.client(0), torch.tensor(5), {})
    for round, want in ((1, (1e-4, 1e-2, 0.1)), (501, (5.05e-5, 5.0005e-3, 0.05005)), (1001, (1e-6, 1e-6, 1e-4))):
        desk = clients.desk(clients.clock(round), data, rng.key(0), {}, 5, 5)
        found = [desk._rates({}, pair) for pair in ((1e-4, 1e-6), (1e-2, 1e-6), (0.1, 1e-4))]
        assert found == pytest.approx(want, rel=1e-9)


# --- edge cases and switches ----------------------------------------------------------------------------------

AWKWARD = FedPCE(size=4, hidden=6)


@pytest.mark.parametrize(("backend", "dtype"), PRECISIONS)
def test_awkward_clients_give_finite_numbers(backend, dtype):
    everything_finite(AWKWARD, backend, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_healthy_clients_do_not_notice_odd_ones(backend):
    assert healthy_gap(AWKWARD, backend) < 1e-9


@pytest.mark.parametrize("fields", [{"size": 2}, {"hidden": 3, "mlp_lr": 0.1, "embedding_lr": 1.0}], ids=str)
def test_loop_equals_batched_with_every_switch(fields):
    CHECKS["loop_equals_batched"](Subject(FedPCE(**fields), tolerance=1e-8))
