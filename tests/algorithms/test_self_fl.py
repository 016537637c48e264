"""Self-FL: the steps it sets, a world where its closed forms hold, adaptation, and awkward clients."""

import numpy as np
import pytest
import torch
from awkward_runs import PRECISIONS, everything_finite, healthy_gap
from golden_runs import federation, library, method_of, run, training
from toy import BACKENDS, POPULATION, data_of, same_bits, start, task, train

from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.self_fl import SelfFL
from bespoke.contract import CHECKS, Subject
from bespoke.core import tree
from bespoke.core.settings import Training
from bespoke.core.task import Task

pytestmark = pytest.mark.xdist_group("self_fl")
METHOD = method_of("self_fl")


def test_the_rules_set_steps_of_many_lengths():
    def steps(case):
        return [row["steps"] for round in library(case, "momentum", "loop").logged for row in round.values()]

    plain = steps("self_fl")
    assert len(set(plain)) > 5 and max(plain) == 12 and min(plain) < 5
    assert {1, 2} <= set(steps("self_fl/sum"))
    assert set(steps("self_fl/start alone")) == {5}
    assert steps("self_fl/warm")[:5] == [5] * 5  # the two warm rounds


@pytest.mark.parametrize("backend", BACKENDS)
def test_warm_rounds_are_fedavg_to_the_bit(backend):
    """Half of the clients in a round, minibatches, momentum; what comes after the warm rounds differs."""
    cohorts, settings = [[0, 2], [1, 3], [2, 1], [0, 1]], {"batch": 2, "rounds": 4}
    warm = run(
        SelfFL(warm_rounds=3, default_steps=4),
        training("momentum", **settings),
        backend,
        cohorts=cohorts,
        inspect=False,
    )
    plain = run(FedAvg(), training("momentum", steps=4, **settings), backend, cohorts=cohorts, inspect=False)
    same = [same_bits(a["model"], b["model"]) for a, b in zip(warm.server, plain.server, strict=True)]
    assert same == [True, True, True, False]


# --- the leave-one-out start ----------------------------------------------------------------------------------


class Still(Task):
    """A loss without slope: whatever a client starts from, it sends back."""

    def loss(self, params, batch):
        return 0.0 * sum(p.sum() for p in params.values())


def test_with_everyone_there_the_start_is_the_mean_of_the_others():
    """Three rounds of training for a history; then a round that goes nowhere shows where each client starts."""
    everyone = list(range(POPULATION))
    settings = training("plain", lr=0.1)
    ran = run(METHOD, settings, "loop", cohorts=[everyone] * 3, inspect=False)
    server = ran.server[-1]
    fed = federation(METHOD, settings, "loop", task=task(Still))
    for client, state in ran.states[-1].items():
        fed.clients.store.put([client], tree.stack([{"state": state, "moments": {}}]))
    begun = train(fed.clients, 4, everyone, *fed.down(server, everyone)).uploads.tree["theta"]
    weights = 1.0 / (server["sigma0"] + server["sigma"])
    for k in everyone:
        others = [m for m in everyone if m != k]
        rest = tree.stack([ran.states[-1][m]["theta"] for m in others])
        want = tree.mean(rest, weights[others])
        for name, value in begun.items():
            assert (value[k] - want[name]).abs().max() < 1e-12
            assert (value[k] - server["model"][name]).abs().max() > 1e-6


# --- the two-level Gaussian world -----------------------------------------------------------------------------


class Quadratic(Task):
    """A client's loss is |b - z|^2 / (2 s) in the head's bias b, with z in the first columns of x and s in the last."""

    def loss(self, params, batch):
        z = (batch.x[:, :3] * batch.mask[:, None]).sum(0) / batch.mask.sum()
        s = (batch.x[:, 3] * batch.mask).sum() / batch.mask.sum()
        return (params["head.bias"] - z).square().sum() / (2.0 * s)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_round_of_the_method_in_the_gaussian_world(backend):
    """Given known variances, a client's round ends at (1 - a) z + a start with a = W_others / (1 / s + W_others).

    The rate is chosen so that whole steps are right for every client.
    """
    draw, count, s, sigma0, wanted = np.random.default_rng(1), 4, 0.5, 0.8, 3
    z = draw.normal(size=(count, 3))
    x = torch.from_numpy(np.repeat(np.concatenate([z, np.full((count, 1), s)], axis=1), 2, axis=0))
    data = data_of(x, torch.zeros(8, dtype=torch.int64), [[2 * k, 2 * k + 1] for k in range(count)])
    weight = 1.0 / (sigma0 + s)
    others = (count - 1) * weight
    a = others / (1.0 / s + others)
    settings = Training(rounds=1, batch=8, lr=s * (1.0 - a ** (1.0 / wanted)))
    clients = BACKENDS[backend](SelfFL(steps_rule="sum"), task(Quadratic), start(), data, settings, 0)
    zero = {n: torch.zeros_like(v) for n, v in start().items()}
    one = torch.tensor(1.0, dtype=torch.float64)
    for k in range(count):  # each client has seen its z with the variance s
        theta = zero | {"head.bias": torch.from_numpy(z[k])}
        history = {"mean": tree.to(theta, torch.float64), "m2": s * one, "count": 3.0 * one}
        clients.store.put([k], tree.stack([{"state": {"theta": theta, "history": history}, "moments": {}}]))
    common = zero | {"head.bias": torch.from_numpy(z.mean(axis=0))}
    down = {"model": common, "sigma0": sigma0 * one, "total": count * weight * one}
    trained = train(clients, 1, list(range(count)), down, {})
    assert trained.logged["steps"] == [wanted] * count
    found = trained.uploads.tree["theta"]["head.bias"].numpy()
    begin = np.stack([np.delete(z, k, axis=0).mean(axis=0) for k in range(count)])
    assert np.abs(found - ((1.0 - a) * z + a * begin)).max() < 1e-12  # the optimum of the two-level model
    assert np.abs(begin - z.mean(axis=0)).max() > 0.1


# --- clients that never took part, bytes, switches ------------------------------------------------------------


def test_adaptation_goes_on_from_round_to_round():
    """Two rounds of five steps are ten steps from the global model (full batches: order does not matter)."""
    server = library("self_fl", "plain", "loop").server[-1]

    def personal(steps, rounds):
        made = SelfFL(max_steps=12, default_steps=steps)
        fed = federation(made, training("plain", lr=0.1), "loop", adapt_rounds=rounds)
        return fed.clients.personal(1, [4], *fed.down(server, [4]))[0]

    twice, long, once = personal(5, 2), personal(10, 1), personal(5, 1)
    for name in start():
        assert (twice["personal"][name] - long["personal"][name]).abs().max() < 1e-12
        assert torch.equal(twice["global"][name], server["model"][name])
    assert max((twice["personal"][n] - once["personal"][n]).abs().max() for n in start()) > 1e-3


def test_the_bytes_of_a_round():
    ran = library("self_fl", "plain", "loop")
    model = tree.nbytes(start())
    assert all(tree.nbytes(up) == model + 8 for round in ran.uploads for up in round.values())
    assert tree.nbytes(SelfFL().broadcast(ran.server[-1])) == model + 8
    assert all(up.keys() == {"theta", "sigma", "known"} for round in ran.uploads for up in round.values())


AWKWARD = {
    "plain": SelfFL(max_steps=6, default_steps=3),
    "sum": SelfFL(max_steps=6, default_steps=3, steps_rule="sum", variance="n-1"),
}


@pytest.mark.parametrize(("backend", "dtype"), PRECISIONS)
@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_clients_give_finite_numbers(case, backend, dtype):
    everything_finite(AWKWARD[case], backend, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", AWKWARD)
def test_healthy_clients_do_not_notice_odd_ones(case, backend):
    assert healthy_gap(AWKWARD[case], backend) < 1e-9


def test_equal_results_do_not_make_a_client_certain():
    """A client whose model never moves has the least variance to speak of, and finite weights."""
    settings = Training(rounds=4, epochs=1, batch=8, lr=0.1)
    ran = run(METHOD, settings, "batched", task=task(Still), cohorts=[[0, 1]] * 4, inspect=False)
    size = sum(v.numel() for v in start().values())
    least = 1e-12 * (1.0 + float(tree.sq_norm(start())) / size)
    assert ran.uploads[-1][0]["sigma"].item() == pytest.approx(least, rel=1e-9)
    for name, value in ran.server[-1]["model"].items():
        assert (value - start()[name]).abs().max() < 1e-12
    assert ran.server[-1]["sigma0"] < 1e-20


SWITCHES = [
    {"steps_rule": "sum", "variance": "n-1"},
    {"steps_rule": "fixed", "own_weight": False},
    {"own_start": False, "warm_rounds": 2},
]


@pytest.mark.parametrize("fields", SWITCHES, ids=str)
def test_loop_equals_batched_with_every_switch(fields):
    CHECKS["loop_equals_batched"](Subject(SelfFL(max_steps=8, default_steps=4, **fields), tolerance=1e-8))
