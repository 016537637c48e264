"""FedPCE: the paper's network, what trains and what travels, its three cosines, and awkward clients."""

import functools
from dataclasses import dataclass
from typing import final

import numpy as np
import pytest
import torch
from awkward_runs import PRECISIONS, everything_finite, healthy_gap
from golden import fedpce
from golden.common import NORM, loss_sum
from golden_runs import first, library, method_of, problem
from golden_runs import start as golden_start
from golden_runs import task as golden_task
from scipy.optimize import approx_fprime
from toy import BACKENDS, data, start, task, train

from bespoke.algorithms.fedpce import FedPCE, generate
from bespoke.contract import CHECKS, Subject
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import Training
from bespoke.errors import UserError
from bespoke.models import ModelSettings, build_task

pytestmark = pytest.mark.xdist_group("fedpce")
METHOD = method_of("fedpce")


def norm_start():
    """The golden weights of the net with a layer norm."""
    return tree.map(torch.from_numpy, golden_start("layer"))


def test_the_gradient_derived_by_hand():
    given, leaves = problem("plain"), {n: golden_start("layer")[n] for n in NORM}
    v, x, y = np.array([0.4, -0.3, 0.9]), given.x[1], given.y[1]
    parts = fedpce.flat(first("fedpce", "plain", "full") | {"embedding": v})
    parts = {n: p + 0.3 * np.random.default_rng(0).normal(size=p.shape) for n, p in parts.items()}

    def loss(flat):
        pieces = np.split(flat, np.cumsum([p.size for p in parts.values()])[:-1])
        now = fedpce.nested({n: a.reshape(p.shape) for (n, p), a in zip(parts.items(), pieces, strict=True)})
        out = fedpce.normed(now["model"], fedpce.generated(now["mlp"], now["embedding"], leaves)[0], x)[0]
        return loss_sum(out, y) / len(y)

    now = fedpce.nested(parts)
    mine = fedpce.flat(fedpce.fedpce_gradient(now["model"], now["mlp"], now["embedding"], leaves, x, y))
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
        assert sum(len(net["b1"]) for net in server["mlp"].values()) == 42 and numbers(server["mlp"]) == 779_264


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


def test_a_leafs_net_does_not_depend_on_the_trees_order():
    """A tree from a file may come in another order."""
    made, params, server = resnet(64)
    state = FedPCE().client_init(made, params, torch.tensor(0))
    other = dict(reversed(state["start"].items()))
    one, same = (generate(server["mlp"], state["embedding"], start) for start in (state["start"], other))
    assert list(same) == list(other) and all(torch.equal(one[name], same[name]) for name in one)


def test_the_nets_start_at_weights_of_their_own():
    """The first layer is uniform within one over the root of its inputs, as torch's, and no two draws are the same."""
    made = FedPCE(size=4, hidden=900)
    (stack,) = made.server_init(golden_task("layer"), norm_start(), 3, rng.key(0))["mlp"].values()
    scale, shift = ({part: value[i] for part, value in stack.items()} for i in range(2))
    for net in (scale, shift):
        for leaf in (net["w1"], net["b1"]):
            assert 0.49 < leaf.max() <= 0.5 and -0.5 <= leaf.min() < -0.49
            assert abs(leaf.std().item() * 12**0.5 - 1.0) < 0.05
        assert abs(net["w2"].std().item() * 900**0.5 / 0.01 - 1.0) < 0.05 and abs(net["w2"].mean()) < 1e-4
        assert not net["b2"].any()
        assert not torch.equal(net["w1"].flatten()[:900], net["b1"])
    assert all(not torch.equal(scale[name], shift[name]) for name in ("w1", "b1", "w2"))


def test_embeddings_start_at_unit_vectors():
    made, params = golden_task("layer"), norm_start()
    for client in (0, 2, 31, 32, 500, -1):
        found = FedPCE().client_init(made, params, torch.tensor(client))["embedding"]
        want = torch.zeros(32, dtype=torch.float64)
        if 0 <= client < 32:
            want[client] = 1.0
        assert torch.equal(found, want)


# --- what trains, and what travels ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_client_trains_its_embedding_alone(backend):
    ran = library("fedpce/momentum", "momentum", backend)
    clients, down = ran.federation.clients, METHOD.broadcast(ran.server[-1])
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
    assert all(torch.equal(out["start"][n][0], norm_start()[n]) for n in NORM)
    assert out["embedding"].shape == (1, METHOD.size) and out["embedding"].abs().max() > 1e-4
    changed = {n for n in NORM if not torch.equal(personal[n], norm_start()[n])}
    assert changed == set(NORM)


def test_embeddings_stay_where_they_are():
    for backend in BACKENDS:
        for round in library("fedpce", "plain", backend).uploads:
            for up in round.values():
                assert up.keys() == {"model", "mlp"}
                assert not any("embedding" in name or "start" in name for name in tree.flatten(up))
    states = library("fedpce", "plain", "loop").states[-1]
    assert len({tuple(s["embedding"].tolist()) for s in states.values()}) == len(states)


def test_a_model_without_norm_layers_is_refused():
    with pytest.raises(UserError, match="normalisation layers, and the model has none") as refusal:
        FedPCE().server_init(task(), start(), 3, rng.key(0))
    assert "\n" not in str(refusal.value)


# --- three cosines --------------------------------------------------------------------------------------------

RATES = {"model": (1e-4, 1e-6), "mlp": (1e-2, 1e-6), "embedding": (0.1, 1e-4)}


def slope_of_one(params, batch):
    return sum(branch["p"].sum() for branch in params.values())


@final
@dataclass(frozen=True)
class OneStep(Algorithm):
    """Sends how far a parameter of each group moves in one step with a slope of 1 everywhere: by its rate."""

    def client_update(self, local, state, down):
        params = {name: {"p": torch.zeros(2, dtype=torch.float64)} for name in RATES}
        return state, local.sgd(slope_of_one, params, lr=RATES)

    def personalize(self, local, state, down):
        return {}


def rates(backend, round, **settings):
    """The rates of a round, by group."""
    training = Training(steps=1, batch=64, lr=1e-4, lr_final=1e-6, **settings)
    clients = BACKENDS[backend](OneStep(), golden_task("layer"), norm_start(), data(), training, 0)
    moved = train(clients, round, [0, 1], {}, {}).uploads.tree
    assert all((moved[name]["p"] == moved[name]["p"][0, 0]).all() for name in RATES)
    return {name: -moved[name]["p"][0, 0].item() for name in RATES}


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_each_group_follows_its_own_cosine(schedule):
    for backend in BACKENDS:
        for round in range(1, 8):
            found = rates(backend, round, rounds=7, schedule=schedule)
            for name, (begin, end) in RATES.items():
                want = fedpce.cosine(begin, end, round, 7) if schedule == "cosine" else begin
                assert abs(found[name] - want) < 1e-12 * begin, (name, round)


def test_the_first_and_the_last_round_of_the_schedule():
    for round, want in ((1, (1e-4, 1e-2, 0.1)), (501, (5.05e-5, 5.0005e-3, 0.05005)), (1001, (1e-6, 1e-6, 1e-4))):
        found = rates("loop", round, rounds=1000, schedule="cosine")
        assert list(found.values()) == pytest.approx(want, rel=1e-9)


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
