"""FedPA, FedEP, QLSD, pFedGP and pFedBreD against their equations in NumPy (golden/baselines3.py), and properties."""

import ast
import dataclasses
import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from golden import baselines3 as equations
from golden import reference
from scipy.integrate import quad
from scipy.special import expit, log_softmax
from scipy.stats import norm
from test_golden import (
    BACKENDS,
    CLASSES,
    POPULATION,
    ROUNDS,
    SEED,
    TRAIN_ROWS,
    federation,
    gap,
    one_round,
    pool,
    problem,
    run,
    same_bits,
    start,
    task,
    training,
)

from bespoke.algorithms import ALGORITHMS, method_class
from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedep import FedEP
from bespoke.algorithms.fedpa import FedPA
from bespoke.algorithms.pfedbred import PFedBreD
from bespoke.algorithms.pfedgp import PFedGP
from bespoke.algorithms.qlsd import QLSD
from bespoke.core import rng, tree
from bespoke.core.algorithm import Uploads
from bespoke.core.data import Data
from bespoke.core.local import Local
from bespoke.maths import gp, langevin, polya_gamma, posterior
from bespoke.runs.experiment import experiments_folder, load

# --- random draws, as arrays for the equations ------------------------------------------------------------------


def pass_key(round, client):
    return rng.fold_in(rng.stream(rng.key(SEED), rng.TRAIN, round, client), 0)


def by_leaf(draw, key):
    """One draw for each leaf, in the order of their names."""
    return {
        n: draw(rng.fold_in(key, i), start()[n].shape, torch.float64).numpy() for i, n in enumerate(sorted(start()))
    }


def langevin_draws(cohorts, epochs):
    uniforms = [
        {k: by_leaf(rng.uniform, rng.fold_in(pass_key(r, k), 1)) for k in cohort} for r, cohort in enumerate(cohorts, 1)
    ]
    normals = [by_leaf(rng.normal, rng.stream(rng.key(SEED), rng.SERVER, r)) for r in range(1, len(cohorts) + 1)]
    return {"uniforms": uniforms, "normals": normals}


def split_draws(cohorts, epochs):
    """For each round, client and step a number for each node and row; a batch shuffles its rows, and so these."""
    nodes = torch.arange(CLASSES - 1)

    def one(round, client, step):
        n, key = TRAIN_ROWS[client], pass_key(round, client)
        order = rng.shuffle(rng.fold_in(key, 2 * step), n, n).numpy()
        split = rng.fold_in(rng.fold_in(rng.fold_in(key, 2 * step + 1), 0), nodes)
        placed = rng.bits(split[:, None, :], torch.arange(n)).numpy()
        values = np.empty_like(placed)
        values[:, order] = placed
        return values

    draws = [{k: [one(r, k, s) for s in range(epochs)] for k in cohort} for r, cohort in enumerate(cohorts, start=1)]
    return {"draws": draws, "classes": CLASSES}


def no_draws(cohorts, epochs):
    return {}


# --- the comparison ---------------------------------------------------------------------------------------------

PA = {"samples": 3, "burn_in": 1, "rho": 0.8, "server_lr": 0.7, "server_momentum": 0.6}
EP = {"precision": 0.3, "server_lr": 0.8}
LD = {"step": 0.4, "levels": 6, "temperature": 0.5, "prior": 0.9}
BRED = {"eta": 0.3, "lam": 1.5, "prox_steps": 3, "prox_lr": 0.2, "meta_lr": 0.15}

# name -> the method's fields, its equations, its random draws, and epochs (= steps) of a round
CASES = {
    "fedpa": (PA, equations.fedpa, no_draws, 7),
    "fedpa/warm": (PA | {"warm_rounds": 2}, functools.partial(equations.fedpa, warm=2), no_draws, 4),
    "fedpa/few": (PA | {"samples": 5}, equations.fedpa, no_draws, 3),  # steps for two samples
    "fedpa_ft": (PA | {"finetune_epochs": 5}, equations.fedpa, no_draws, 4),
    "fedep": (EP, equations.fedep, no_draws, 3),
    "fedep/sep": (EP | {"variant": "sep"}, equations.fedep, no_draws, 3),
    "fedep_ft": (EP | {"finetune_epochs": 5}, equations.fedep, no_draws, 3),
    "qlsd": (LD, equations.qlsd, langevin_draws, 3),
    "qlsd/mean": (LD | {"average_from": 2, "thin": 1, "use_memory": False}, equations.qlsd, langevin_draws, 3),
    "qlsd/exact": (LD | {"levels": 0}, equations.qlsd, langevin_draws, 3),
    "qlsd_ft": (LD | {"finetune_epochs": 5}, equations.qlsd, langevin_draws, 3),
    "pfedgp": ({}, equations.pfedgp, split_draws, 2),
    "pfedgp/exp_log": ({"link": "exp_log", "variance": 3.0}, equations.pfedgp, split_draws, 2),
    "pfedbred": (BRED | {"prior": "mh"}, equations.pfedbred, no_draws, 5),
    "pfedbred/meg": (BRED | {"prior": "meg"}, equations.pfedbred, no_draws, 3),
    "pfedbred/lg": (BRED | {"prior": "lg"}, equations.pfedbred, no_draws, 3),
}
RENAMED = {"warm_rounds": "warm"}
# The personal model of pFedGP is a function of its rows through inverses of kernel matrices, of condition 1e4.
TOLERANCE = {"pfedgp": 1e-8}


def method(case):
    return ALGORITHMS[case.partition("/")[0]](**CASES[case][0])


@functools.cache
def library(case, variant, backend):
    return run(method(case), training(variant, epochs=CASES[case][3]), backend)


@functools.cache
def wanted(case, variant, twist=""):
    fields, fn, draws, epochs = CASES[case]
    cohorts = [row["cohort"] for row in library(case, variant, "loop").records.rows["rounds.jsonl"]]
    given = dataclasses.replace(problem(variant, cohorts), epochs=epochs)
    named = {RENAMED.get(key, key): value for key, value in fields.items()}
    return fn(given, **({**named, **draws(cohorts, epochs)} | getattr(fn, "keywords", {})), twist=twist)


def arrays(found):
    return {n: arrays(v) if isinstance(v, dict) else np.asarray(v) for n, v in found.items()}


def differences(case, variant, backend, twist=""):
    """What the library did against what the equations say: the largest difference, by kind."""
    ran, want, given = library(case, variant, backend), wanted(case, variant, twist), problem(variant, [])
    evaluated = iter(ran.records.rows["clients.jsonl"])
    worst = dict.fromkeys(("server", "states", "counts", "logits"), 0.0)
    for r in range(ROUNDS):
        worst["server"] = max(worst["server"], gap(ran.server[r], arrays(want.server[r])))
        assert ran.states[r].keys() == want.states[r].keys()
        for client, state in ran.states[r].items():
            worst["states"] = max(worst["states"], gap(state, arrays(want.states[r][client])))
        for client, out in enumerate(want.logits[r]):
            row, y = next(evaluated), given.y_test[client]
            assert (row["round"], row["client"], row["total"], row["view"]) == (r + 1, client, len(y), "personal")
            loss = -log_softmax(out, axis=1)[np.arange(len(y)), y].sum()
            worst["counts"] = max(worst["counts"], abs(row["loss_sum"] - loss))
            if not twist:
                assert row["correct"] == (out.argmax(axis=1) == y).sum()
    assert next(evaluated, None) is None
    for client, personal in enumerate(ran.personal):
        with torch.no_grad():
            out = method(case).predict(task(), personal, torch.from_numpy(given.x_test[client])).numpy()
        worst["logits"] = max(worst["logits"], float(np.abs(out - want.logits[-1][client]).max()))
    return worst


VARIANTS = ("plain", "momentum")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_the_library_follows_the_equations(case, variant, backend):
    found = differences(case, variant, backend)
    assert max(found.values()) < TOLERANCE.get(case.partition("/")[0], 1e-10), found


# --- the comparison has teeth -----------------------------------------------------------------------------------

# Mistakes in one term of the method, each of which the comparison must see.
TWISTS = {
    "fedpa": [
        "other weighting",
        "biased covariance",
        "no covariance",
        "burn-in is sampled",
        "last iterate of a window",
        "last sample for the mean",
        "no server momentum",
    ],
    "fedpa/warm": ["no warm rounds"],
    "fedpa/few": ["burn-in is sampled", "no covariance"],
    "fedpa_ft": ["no fine-tuning"],
    "fedep": [
        "other precision",
        "sites forget",
        "sites start at the initial weights",
        "cavity is q",
        "sum of the loss, mean of the prior",
        "last iterate",
        "sites are not damped",
    ],
    "fedep/sep": ["other precision", "cavity is q"],
    "fedep_ft": ["no fine-tuning"],
    "qlsd": [
        "mean gradient",
        "quantised twice",
        "memory takes all",
        "memory is not added",
        "absent clients do not count",
        "no prior",
        "half the noise",
    ],
    "qlsd/mean": ["last sample predicts"],
    "qlsd_ft": ["no fine-tuning"],
    "pfedgp": [
        "other weighting",
        "one class against the rest",
        "two mean-field steps",
        "labels for targets",
        "no jitter",
        "sum over rows",
    ],
    "pfedbred": [
        "other weighting",
        "one batch each",
        "no meta step",
        "gradient at the old point",
        "meta step from ahead",
        "meta step for the prior alone",
        "away from the current model",
        "other sign",
        "starts at the other point",
        "tied to the global model",
        "envelope at the global model",
        "personal model is not kept",
        "sends the personal model",
        "unseen starts at the first model",
        "unseen untrained",
    ],
    "pfedbred/lg": ["starts at the other point", "tied to the global model"],
    "pfedbred/meg": ["away from the current model", "other sign"],
}


@pytest.mark.parametrize(("case", "twist"), [(case, twist) for case, twists in TWISTS.items() for twist in twists])
def test_a_mistake_in_one_term_is_seen(case, twist):
    found = differences(case, "plain", "batched", twist)
    assert max(found.values()) > 1e-4, found
    if twist.startswith(("unseen", "no fine-tuning", "last sample predicts")):  # the mistake stays where it was made
        assert max(found["server"], found["states"]) < 1e-10
        assert min(found["counts"], found["logits"]) > 1e-4


def test_a_plain_mean_of_changes_is_not_one_by_rows():
    """FedEP's mean is plain whatever the weighting; the variant weighted by rows shows the difference."""
    assert max(differences("fedep", "plain", "batched", "weighted by rows").values()) > 1e-4


def test_the_equations_stand_alone():
    imported = set()
    for node in ast.walk(ast.parse(Path(equations.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported == {"dataclasses", "numpy", "golden"}


# --- FedPA ------------------------------------------------------------------------------------------------------


def vectors(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def as_trees(theta, samples):
    """Vectors of 7 as a tree of a (2, 2) and a (3,) leaf."""
    split = lambda v: {"a": torch.tensor(v[..., :4]).reshape(*v.shape[:-1], 2, 2), "b": torch.tensor(v[..., 4:])}  # noqa: E731
    return split(theta), split(samples)


def as_vector(found):
    return np.concatenate([found["a"].numpy().ravel(), found["b"].numpy()])


@pytest.mark.parametrize("rho", [0.0, 0.01, 1.0, 10.0])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_the_delta_is_the_dense_solve_and_the_papers_recursion(count, rho):
    theta, samples = vectors(count, 7), vectors(count + 10, 6, 7)
    first, stacked = as_trees(theta, samples)
    found = as_vector(posterior.shrunk_delta(first, stacked, torch.tensor(count), rho))
    used = samples[:count]
    sigma = equations.shrunk_covariance(used, rho) if count > 1 else np.eye(7)
    dense = np.linalg.solve(sigma, theta - used.mean(axis=0))
    assert np.abs(found - dense).max() < 1e-10
    assert np.abs(found - equations.recursion(theta, used, rho)).max() < 1e-10
    if rho == 0.0:
        assert np.abs(found - (theta - used.mean(axis=0))).max() < 1e-12
    if rho > 0 and count > 1:  # neither the mean's nor the covariance's part is idle
        assert np.abs(found - (theta - used.mean(axis=0))).max() > 1e-4


def test_the_delta_does_not_depend_on_the_origin():
    theta, samples = vectors(1, 7), vectors(2, 5, 7)
    shift = vectors(3, 7)
    one = posterior.shrunk_delta(*as_trees(theta, samples), torch.tensor(5), 0.7)
    two = posterior.shrunk_delta(*as_trees(theta + shift, samples + shift), torch.tensor(5), 0.7)
    assert np.abs(as_vector(one) - as_vector(two)).max() < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedpa_with_one_sample_is_fedavg(backend):
    settings = training("momentum", batch=4, epochs=2)
    plain = run(FedAvg(), settings, backend)
    one = run(FedPA(samples=1), settings, backend)
    assert (
        max(
            gap(a["model"], tree.map(torch.Tensor.numpy, b["model"]))
            for a, b in zip(one.server, plain.server, strict=True)
        )
        < 1e-14
    )
    warm = run(FedPA(warm_rounds=ROUNDS), settings, backend)
    assert same_bits(warm.server[-1]["model"], one.server[-1]["model"])
    assert (
        gap(
            run(FedPA(), settings, backend).server[-1]["model"], tree.map(torch.Tensor.numpy, plain.server[-1]["model"])
        )
        > 1e-3
    )


def test_posterior_averaging_finds_the_mode_of_the_product_and_fedavg_does_not():
    """Two quadratic clients with other Hessians; samples with exactly their posteriors' means and covariances."""
    h = [np.diag([4.0, 0.5]), np.array([[1.0, 0.4], [0.4, 3.0]])]
    m = [np.array([1.0, -1.0]), np.array([-1.0, 2.0])]
    basis, _ = np.linalg.qr(np.column_stack([np.ones(12), vectors(0, 12, 2)]))
    white = basis[:, 1:] * np.sqrt(11.0)  # mean 0, covariance I
    samples = [a + white @ np.linalg.cholesky(np.linalg.inv(b)).T for a, b in zip(m, h, strict=True)]
    theta = np.zeros(2)
    for _ in range(60):
        deltas = [
            posterior.shrunk_delta({"w": torch.tensor(theta)}, {"w": torch.tensor(s)}, torch.tensor(12), 1e6)["w"]
            for s in samples
        ]
        theta = theta - 0.3 * (deltas[0] + deltas[1]).numpy() / 2.0
    mode = np.linalg.solve(h[0] + h[1], h[0] @ m[0] + h[1] @ m[1])
    assert np.abs(theta - mode).max() < 1e-4
    assert np.abs(np.mean(m, axis=0) - mode).max() > 0.5


# --- FedEP ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_product_of_all_factors_is_q_whoever_takes_part(backend):
    ran = library("fedep", "plain", backend)
    everyone = range(POPULATION)
    assert any(len(row["cohort"]) < POPULATION for row in ran.records.rows["rounds.jsonl"])
    for server, states in zip(ran.server, ran.states, strict=True):
        product = server["first"]  # the factors start as powers of q, which multiply to q
        for k in everyone:
            if k in states:
                gained = tree.add(states[k]["site"], states[k]["pending"], server["damping"][k])
                product = tree.add(product, gained)
        assert gap(product, tree.map(torch.Tensor.numpy, server["model"])) < 1e-12
    assert gap(ran.server[-1]["first"], tree.map(torch.Tensor.numpy, ran.server[-1]["model"])) > 1e-2


class Quadratic(type(task())):
    """A client's loss is 1/2 (w - c)' H (w - c) for the head's bias w; H and c come from the client's own rows."""

    def loss(self, params, batch):
        weight = batch.mask[:, None] / batch.mask.sum()
        centre = (batch.x * weight).sum(0)[:CLASSES]
        curvature = 0.3 + (batch.x.square() * weight).sum(0)[:CLASSES]
        return 0.5 * (curvature * (params["head.bias"] - centre).square()).sum()


def minimiser(by_rows):
    """Of the sum of the clients' quadratic losses, by rows or each client alike."""
    top = bottom = 0.0
    for x in problem("plain", []).x[:POPULATION]:
        weight = len(x) if by_rows else 1.0
        curvature = 0.3 + (x[:, :CLASSES] ** 2).mean(axis=0)
        top, bottom = top + weight * curvature * x[:, :CLASSES].mean(axis=0), bottom + weight * curvature
    return top / bottom


def settled(method, rounds):
    """Where the mean of q ends with everyone taking part."""
    quadratic = Quadratic(type(task()._module), "head", CLASSES, dtype=torch.float64)
    settings = training("plain", epochs=4, lr=0.2)
    clients = BACKENDS["loop"](method, quadratic, start(), pool(), settings, SEED)
    server, everyone = method.server_init(quadratic, start(), POPULATION, rng.key(0)), list(range(POPULATION))
    for r in range(1, rounds + 1):
        trained = clients.train(r, everyone, method.broadcast(server), method.tailor(server, torch.tensor(everyone)))
        server = method.aggregate(quadratic, server, trained.uploads, rng.key(0))
    return server["model"]["head.bias"].numpy()


def test_factors_lead_to_the_minimiser_of_the_sum_of_losses_and_powers_do_not():
    """The fixed point of EP is exact; the shared pull of SEP, like FedProx's, leaves a bias."""
    want = minimiser(by_rows=True)
    assert np.abs(settled(FedEP(precision=0.3), 120) - want).max() < 1e-4
    assert np.abs(settled(FedEP(precision=0.3, variant="sep"), 40) - want).max() > 1e-2
    assert np.abs(minimiser(by_rows=False) - want).max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedep_whose_rows_have_no_precision_is_an_unweighted_fedavg(backend):
    settings = training("plain", epochs=1, weighting="uniform")
    plain, loose = run(FedAvg(), settings, backend), run(FedEP(precision=1e-12), settings, backend)
    assert gap(loose.server[-1]["model"], tree.map(torch.Tensor.numpy, plain.server[-1]["model"])) < 1e-10
    tight = run(FedEP(precision=0.5), settings, backend)
    assert gap(tight.server[-1]["model"], tree.map(torch.Tensor.numpy, plain.server[-1]["model"])) > 1e-3


# --- QLSD -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 4, 64])
def test_the_quantiser_is_unbiased_and_its_variance_is_bounded(levels):
    draws, v = 10_000, torch.tensor(vectors(5, 40)) * torch.tensor([1e-3, 0.1, 1.0, 3.0]).repeat(10)
    keys = rng.fold_in(rng.key(8), torch.arange(draws))
    found = torch.func.vmap(lambda key: langevin.quantise({"v": v}, levels, key)["v"])(keys)
    size = v.square().sum().sqrt()
    share = (levels * v.abs() / size) % 1.0
    variance = size**2 * share * (1.0 - share) / levels**2  # exact, entry by entry
    assert ((found.mean(dim=0) - v).abs() <= 5.0 * (variance / draws).sqrt() + 1e-6).all()
    assert (found.var(dim=0).sum() / variance.sum() - 1.0).abs() < 0.05
    assert variance.sum() <= langevin.excess(v.numel(), levels) * size**2
    steps = found * levels / size
    assert (steps - steps.round()).abs().max() < 1e-9
    # Rounding down alone would be seen.
    assert not (
        (torch.floor(levels * v.abs() / size) * v.sign() * size / levels - v).abs()
        <= 5.0 * (variance / draws).sqrt() + 1e-6
    ).all()


def test_the_quantiser_leaves_zero_and_no_levels_alone_and_many_levels_change_little():
    v = {"v": torch.tensor(vectors(6, 3, 4)), "zero": torch.zeros(5, dtype=torch.float64)}
    assert same_bits(langevin.quantise(v, 0, rng.key(1)), v)
    fine = langevin.quantise(v, 2**40, rng.key(1))
    assert gap(fine, tree.map(torch.Tensor.numpy, v)) < 1e-10
    assert fine["zero"].abs().max() == 0.0
    turned = dict(reversed(v.items()))  # the order of a tree's names is no part of the draw
    assert same_bits(langevin.quantise(turned, 3, rng.key(1)), langevin.quantise(v, 3, rng.key(1)))


@pytest.mark.parametrize("levels", [0, 1, 6, 255, 256])
def test_bytes_are_those_of_a_packed_message(levels):
    v = {"a": torch.tensor(vectors(6, 3, 7)), "b": torch.tensor(vectors(7, 5))}
    sent, bits, width = langevin.quantise(v, levels, rng.key(2)), "", len(f"{levels:b}")
    float_bits = lambda x: np.binary_repr(np.float32(x).view(np.int32).item() % 2**32, 32)  # noqa: E731
    for name, leaf in sent.items():
        size = float(v[name].square().sum().sqrt())
        bits += float_bits(size) if levels else ""
        for x in leaf.flatten().tolist():
            whole = round(abs(x) / size * levels)  # what a receiver needs: sign and level
            bits += ("1" if x < 0 else "0") + f"{whole:0{width}b}" if levels else float_bits(x)
            assert not levels or math.copysign(whole * size / levels, x) == pytest.approx(x, abs=1e-12)
    assert len(bits) <= 8 * langevin.quantised_bytes(v, levels) < len(bits) + 8


@pytest.mark.parametrize("backend", BACKENDS)
def test_qlsd_without_noise_and_quantisation_is_gradient_descent_on_the_sum_of_losses(backend):
    method = QLSD(step=0.3, levels=0, temperature=0.0, prior=2.0)
    ran = run(method, training("plain", rate=1.0, sampling="fixed"), backend)
    given, w = problem("plain", []), start()
    rows = sum(TRAIN_ROWS[:POPULATION])
    w = {n: v.numpy() for n, v in w.items()}
    for server in ran.server:
        slopes = [reference.gradient(w, given.x[k], given.y[k]) for k in range(POPULATION)]
        total = {n: sum(TRAIN_ROWS[k] * slopes[k][n] for k in range(POPULATION)) + 2.0 * w[n] for n in w}
        w = {n: w[n] - 0.3 / rows * total[n] for n in w}
        assert gap(server["model"], w) < 1e-13
    noisy = run(dataclasses.replace(method, temperature=1.0), training("plain", rate=1.0, sampling="fixed"), backend)
    assert gap(noisy.server[-1]["model"], w) > 1e-2


def test_the_chain_samples_the_posterior():
    """On quadratic losses with exact gradients the chain is Gaussian: mean and variance have closed forms."""
    method, rounds, skip = QLSD(step=0.6, levels=0, prior=2.0, use_memory=False), 2000, 50
    rows = torch.tensor(TRAIN_ROWS[:POPULATION], dtype=torch.float64)
    centre, curvature = torch.tensor(vectors(1, POPULATION, 3)), 0.5 + torch.tensor(vectors(2, POPULATION, 3)) ** 2
    server = method.server_init(task(), {"w": torch.zeros(3, dtype=torch.float64)}, POPULATION, rng.key(0))
    seen = []
    for r in range(rounds):
        slope = rows[:, None] * curvature * (server["model"]["w"] - centre)
        uploads = Uploads({"sent": {"w": slope}, "rows": rows}, rows, torch.arange(POPULATION))
        server = method.aggregate(task(), server, uploads, rng.stream(rng.key(3), rng.SERVER, r))
        seen.append(server["model"]["w"].numpy())
    seen = np.stack(seen[skip:])
    precision = (rows[:, None] * curvature).sum(dim=0).numpy() + 2.0
    mode = (rows[:, None] * curvature * centre).sum(dim=0).numpy() / precision
    gamma = 0.6 / float(rows.sum())
    variance = 1.0 / (precision * (1.0 - gamma * precision / 2.0))
    effective = len(seen) * gamma * precision / 2.0  # of the chain's correlated samples
    assert (np.abs(seen.mean(axis=0) - mode) < 5.0 * np.sqrt(variance / effective)).all()
    assert np.abs(seen.var(axis=0) / variance - 1.0).max() < 0.2


# --- pFedGP -----------------------------------------------------------------------------------------------------


def test_polya_gamma_draws_have_the_mean_and_variance_of_the_closed_form():
    c = torch.tensor([0.01, 0.5, 2.0, 5.0, 10.0], dtype=torch.float64)
    draws = 10_000
    found = polya_gamma.draw(c[:, None].expand(-1, draws), rng.key(4))
    mean = torch.tanh(c / 2.0) / (2.0 * c)
    variance = (torch.sinh(c) - c) / (4.0 * c**3 * torch.cosh(c / 2.0) ** 2)
    assert ((found.mean(dim=1) - mean).abs() < 5.0 * (variance / draws).sqrt()).all()
    assert (found.var(dim=1) / variance - 1.0).abs().max() < 0.1
    assert (found > 0).all()
    assert torch.allclose(polya_gamma.mean(c), mean, rtol=1e-14)
    assert polya_gamma.mean(torch.zeros(1, dtype=torch.float64)).item() == pytest.approx(0.25, abs=1e-12)
    short = polya_gamma.draw(c[:, None].expand(-1, 7), rng.key(4))
    assert torch.allclose(short, found[:, :7], rtol=1e-13)  # more entries change no draw


def toy_node(seed=0, n=9, m=5):
    """Kernel matrices of n train and m new rows, two nodes on some of the rows, and omega."""
    draw = np.random.default_rng(seed)
    z, new = equations.unit(draw.normal(size=(n, 3))), equations.unit(draw.normal(size=(m, 3)))
    side = np.stack([np.sign(draw.normal(size=n)), np.sign(draw.normal(size=n)) * (np.arange(n) % 3 > 0)])
    k = equations.rbf(z, z, 8.0) + equations.JITTER * np.eye(n)
    return k, equations.rbf(new, z, 8.0), side, draw.uniform(0.05, 0.25, size=(2, n)) * np.abs(side)


def test_the_predictive_is_a_dense_gaussian_process_on_the_rows_of_each_node():
    k, cross, side, omega = toy_node()
    mean, variance = gp.predictive(
        *(torch.tensor(a) for a in (k, cross)), 8.0, *(torch.tensor(a) for a in (side, omega))
    )
    for t in range(2):
        rows = side[t] != 0
        assert rows.all() == (t == 0)  # the second node leaves rows out
        inner = np.linalg.inv(k[np.ix_(rows, rows)] + np.diag(1.0 / omega[t, rows]))
        away = cross[:, rows]
        assert np.abs(mean[t].numpy() - away @ inner @ (side[t, rows] / 2.0 / omega[t, rows])).max() < 1e-10
        assert np.abs(variance[t].numpy() - (8.0 - np.diag(away @ inner @ away.T))).max() < 1e-10


def exact_left(k, cross, own, side):
    """P(left) of one new row under the exact posterior of a logistic GP on two rows, on a grid."""
    grid = np.linspace(-14.0, 14.0, 281)
    f = np.stack(np.meshgrid(grid, grid, indexing="ij"), axis=-1).reshape(-1, 2)
    prior = np.exp(-0.5 * ((f @ np.linalg.inv(k)) * f).sum(axis=1))
    weight = prior * expit(side[0] * f[:, 0]) * expit(side[1] * f[:, 1])
    gain = np.linalg.solve(k, cross)
    variance = own - cross @ gain
    x, w = np.polynomial.hermite.hermgauss(40)
    inner = expit((f @ gain)[:, None] + np.sqrt(2.0 * variance) * x) @ w / np.sqrt(np.pi)
    return (weight * inner).sum() / weight.sum()


def test_gibbs_chains_sample_the_exact_posterior():
    k = np.array([[4.0, 1.5], [1.5, 4.0]])
    cross, side = np.array([[2.5, 0.3]]), np.array([[1.0, -1.0]])
    matrix, towards, sides = (torch.tensor(a) for a in (k, cross, side))

    def one(key):
        omega = gp.gibbs(matrix, sides, key, steps=12)
        return gp.left_probability(*gp.predictive(matrix, towards, 4.0, sides, omega), "expected_sigmoid")[0, 0]

    found = torch.func.vmap(one)(rng.fold_in(rng.key(9), torch.arange(3000)))
    want = exact_left(k, cross[0], 4.0, side[0])
    assert abs(found.mean().item() - want) < 5.0 * found.std().item() / math.sqrt(len(found))
    assert abs(want - 0.5) > 0.1
    omega = gp.mean_field(matrix, sides)
    near = gp.left_probability(*gp.predictive(matrix, towards, 4.0, sides, omega), "expected_sigmoid")[0, 0]
    assert abs(near.item() - want) < 0.05


@pytest.mark.parametrize("mean", [-3.0, 0.0, 1.7])
@pytest.mark.parametrize("variance", [0.01, 1.0, 8.0])
def test_the_links_by_quadrature(mean, variance):
    average = lambda fn: quad(lambda f: fn(f) * norm.pdf(f, mean, math.sqrt(variance)), -25, 25, points=[mean])[0]  # noqa: E731
    m, v = torch.tensor([mean], dtype=torch.float64), torch.tensor([variance], dtype=torch.float64)
    assert gp.left_probability(m, v, "expected_sigmoid").item() == pytest.approx(average(expit), abs=2e-4)
    want = math.exp(average(lambda f: -np.logaddexp(0.0, -f)))
    assert gp.left_probability(m, v, "exp_log").item() == pytest.approx(want, abs=1e-3)
    if mean == 0.0:  # far from all rows: an even guess, or not
        assert gp.left_probability(m, v, "expected_sigmoid").item() == pytest.approx(0.5, abs=1e-12)
        if variance == 8.0:
            assert gp.left_probability(m, v, "exp_log").item() == pytest.approx(0.263, abs=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_the_tree_is_that_of_the_equations(seed):
    draw = np.random.default_rng(seed)
    present = np.sort(draw.choice(8, size=draw.integers(1, 9), replace=False))
    z = draw.normal(size=(8, 3)) * [3.0, 1.0, 1.0]
    if seed % 3 == 0:
        z[:] = z[0]  # nothing tells the classes apart
    found = gp.class_tree(torch.tensor(z), torch.isin(torch.arange(8), torch.tensor(present))).numpy()
    nodes = equations.class_tree(z[present], present)
    assert found.shape == (7, 8) and len(nodes) == len(present) - 1
    want = np.zeros((7, 8))
    for row, (left, right) in zip(want, nodes, strict=False):
        row[left], row[right] = 1.0, -1.0
    assert np.array_equal(found, want)


def gp_client(x, y, classes, method, body, max_width=None):
    """The personal model of a client with these rows, by hand of the method itself."""
    width = max_width or len(y)
    index = np.arange(width) % len(y)
    data = Data(torch.tensor(x), torch.tensor(y), torch.tensor(index), torch.tensor(len(y)), dtype=torch.float64)
    local = Local(
        task=classes,
        data=data,
        key=rng.key(5),
        round=torch.tensor(1),
        rounds=torch.tensor(1),
        lr=torch.tensor(0.1),
        training=training("plain"),
        smallest=len(y),
        largest=width,
    )
    return method.personalize(local, {}, {"body": body})


def blobs(n, seed=0, labels=(0, 1, 2)):
    draw = np.random.default_rng(seed)
    y = np.array(labels)[np.arange(n) % len(labels)]
    return 4.0 * np.eye(4)[y] + 0.3 * draw.normal(size=(n, 4)), y


def test_a_separable_toy_is_solved_and_probabilities_sum_to_one():
    x, y = blobs(30)
    new, truth = blobs(21, seed=1)
    body = task().body(start())
    for method in (PFedGP(), PFedGP(link="exp_log"), PFedGP(inference="gibbs", chains=8)):
        out = method.predict(task(), gp_client(x, y, task(), method, body), torch.tensor(new))
        assert (out.argmax(dim=1).numpy() == truth).all()
        assert (out.exp().sum(dim=1) - 1.0).abs().max() < 1e-9


def test_mean_field_and_gibbs_agree():
    draw = np.random.default_rng(2)
    x, y = blobs(24)
    x = x + 2.0 * draw.normal(size=x.shape)  # classes overlap
    body, new = task().body(start()), torch.tensor(blobs(15, seed=3)[0])
    outs = [
        method.predict(task(), gp_client(x, y, task(), method, body), new).exp()
        for method in (PFedGP(), PFedGP(inference="gibbs", chains=60))
    ]
    assert (outs[0] - outs[1]).abs().max() < 0.05
    assert outs[0].max() - outs[0].min() > 0.3


def test_neither_the_order_of_the_rows_nor_padding_changes_a_prediction():
    x, y = blobs(20)
    x = x + np.random.default_rng(2).normal(size=x.shape)
    turn = np.random.default_rng(3).permutation(20)
    body, new = task().body(start()), torch.tensor(blobs(9, seed=1)[0])
    method = PFedGP()
    plain = method.predict(task(), gp_client(x, y, task(), method, body), new)
    turned = method.predict(task(), gp_client(x[turn], y[turn], task(), method, body), new)
    padded = method.predict(task(), gp_client(x, y, task(), method, body, max_width=33), new)
    assert (plain - turned).abs().max() < 1e-9 and (plain - padded).abs().max() < 1e-9
    drawn = PFedGP(inference="gibbs", chains=2)
    one, two = (drawn.predict(task(), gp_client(x, y, task(), drawn, body, max_width=w), new) for w in (20, 33))
    assert (one - two).abs().max() < 1e-9


def test_a_client_with_one_class_predicts_it_and_is_left_out_of_the_mean():
    x, y = blobs(6, labels=(2,))
    method, body = PFedGP(), task().body(start())
    out = method.predict(task(), gp_client(x, y, task(), method, body), torch.tensor(blobs(5)[0]))
    assert (out.argmax(dim=1) == 2).all() and out[:, :2].max() == gp.LOG_FLOOR
    ups = {"body": tree.stack([body, tree.map(lambda p: p + 1.0, body)]), "learned": torch.tensor([0.0, 1.0])}
    rows = torch.tensor([5.0, 5.0], dtype=torch.float64)
    new = method.aggregate(task(), {"body": body}, Uploads(ups, rows, torch.arange(2)), rng.key(0))
    assert gap(new["body"], tree.map(lambda p: p.numpy() + 1.0, body)) < 1e-14
    ups["learned"] = torch.zeros(2)
    new = method.aggregate(task(), {"body": body}, Uploads(ups, rows, torch.arange(2)), rng.key(0))
    assert same_bits(new["body"], body)


def test_a_large_client_predicts_with_as_many_rows_of_each_class_as_their_share():
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 10 + [0] * 20)  # the last 20 are padding
    rows, mask = gp.subset(y, torch.tensor(100), 50, rng.key(3))
    assert mask.all() and len(rows) == 50 == len(set(rows.tolist())) and rows.max() < 100
    assert torch.bincount(y[rows]).tolist() == [30, 15, 5]
    few, real = gp.subset(y, torch.tensor(40), 50, rng.key(3))
    assert few[:40].tolist() == list(range(40)) and real.sum() == 40
    x, labels = blobs(40)
    method = PFedGP(max_rows=12)
    personal = gp_client(x, labels, task(), method, task().body(start()))
    assert personal["z"].shape == (12, 5) and personal["omega"].shape == (1, CLASSES - 1, 12)
    new, truth = blobs(12, seed=4)
    assert (method.predict(task(), personal, torch.tensor(new)).argmax(dim=1).numpy() == truth).all()


# --- pFedBreD ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_pfedbred_with_the_global_model_for_prior_is_pfedme(backend):
    method = PFedBreD(**BRED | {"prior": "meg", "eta": 0.0})
    ran = run(method, training("plain", epochs=3), backend)
    cohorts = [row["cohort"] for row in ran.records.rows["rounds.jsonl"]]
    server, own = equations.pfedme(problem("plain", cohorts), BRED["lam"], BRED["prox_steps"], BRED["prox_lr"])
    assert max(gap(a["model"], b) for a, b in zip(ran.server, server, strict=True)) < 1e-12
    assert max(gap(ran.states[-1][k]["personal"], own[k]) for k in own) < 1e-12
    moved = library("pfedbred/meg", "plain", backend).server[-1]["model"]
    assert gap(moved, server[-1]) > 1e-3


@pytest.mark.parametrize("prior", ["meg", "lg"])
def test_the_personal_model_is_the_proximal_point_of_its_prior(prior):
    """On a quadratic: (H + lambda)^-1 (H z + lambda s), with s = w in a first round, or w - eta H (w - z)."""
    quadratic = Quadratic(type(task()._module), "head", CLASSES, dtype=torch.float64)
    method = PFedBreD(prior=prior, eta=0.2, lam=3.0, prox_steps=200, prox_lr=0.1)
    clients = BACKENDS["batched"](method, quadratic, start(), pool(), training("plain", epochs=1), SEED)
    clients.train(1, list(range(POPULATION)), {"model": start()}, {})
    w = start()["head.bias"].numpy()
    for k, x in enumerate(problem("plain", []).x[:POPULATION]):
        z, h = x[:, :CLASSES].mean(axis=0), 0.3 + (x[:, :CLASSES] ** 2).mean(axis=0)
        s = w - 0.2 * h * (w - z) if prior == "lg" else w
        found = clients.states()[k]["state"]["personal"]["head.bias"].numpy()
        assert np.abs(found - (h * z + 3.0 * s) / (h + 3.0)).max() < 1e-10
        assert np.abs(found - w).max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_before_anything_is_remembered_the_priors_mean_is_the_global_model(backend):
    settings = training("plain", epochs=1)
    near, far = (
        one_round(PFedBreD(**BRED | {"prior": "meg", "eta": eta}), settings, backend)[0].tree for eta in (0.0, 0.9)
    )
    assert same_bits(near, far)
    again = training("plain", epochs=2)  # the second repetition remembers the first
    near, far = (
        one_round(PFedBreD(**BRED | {"prior": "meg", "eta": eta}), again, backend)[0].tree for eta in (0.0, 0.9)
    )
    assert not same_bits(near, far)


# --- what crosses the wire --------------------------------------------------------------------------------------

BODY_NUMBERS = 5 * 4 + 5
NUMBERS = BODY_NUMBERS + 3 * 5 + 3
SENT = {  # floats up, floats down
    "fedpa": (NUMBERS, NUMBERS),
    "fedep": (NUMBERS + 1, 2 * NUMBERS + 2),
    "fedep/sep": (NUMBERS + 1, NUMBERS + 2),
    "qlsd/exact": (NUMBERS + 1, NUMBERS),
    "qlsd/mean": (None, 2 * NUMBERS),
    "pfedgp": (BODY_NUMBERS + 1, BODY_NUMBERS),
    "pfedbred": (NUMBERS, NUMBERS),
}


@pytest.mark.parametrize("case", SENT)
def test_bytes_are_those_of_the_docstring(case):
    up, down = SENT[case]
    quantised = langevin.quantised_bytes(start(), LD["levels"]) + 4
    for row in library(case, "plain", "batched").records.rows["rounds.jsonl"]:
        clients = len(row["cohort"])
        assert row["bytes_down"] == 4 * down * clients
        assert row["bytes_up"] == (quantised if up is None else 4 * up) * clients


def test_the_fine_tuned_names_are_the_plain_ones_with_five_epochs():
    for name, kind in {"fedpa": FedPA, "fedep": FedEP, "qlsd": QLSD}.items():
        assert ALGORITHMS[name]() == kind() == kind(finetune_epochs=0)
        assert ALGORITHMS[f"{name}_ft"]() == kind(finetune_epochs=5)


@pytest.mark.parametrize("name", ["fedpa", "fedep", "qlsd", "pfedgp"])
def test_a_client_never_seen_is_treated_like_any_other(name):
    """What prediction needs is the broadcast and the client's own rows: a state makes no difference."""
    fed = federation(method(name), training("plain"), "loop")
    server = fed.start()
    down = fed.down(server, [1])
    before = fed.clients.personal(1, [1], *down)[0]
    fed.clients.train(1, [1], *down)
    assert fed.clients.took_part(1)
    assert same_bits(before, fed.clients.personal(1, [1], *down)[0])


@pytest.mark.parametrize("name", ["fedpa_ft", "fedep_ft", "qlsd_ft", "pfedgp", "pfedbred"])
def test_the_settings_of_pfedvmps_comparison_load(name, tmp_path):
    folder = experiments_folder() / "pfedvmp" / "algorithms"
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms" / f"{name}.toml").write_text((folder / f"{name}.toml").read_text())
    (tmp_path / "some.toml").write_text("[training]\nrounds = 1000\nlr = 0.01\nbatch = 10\n")
    loaded, source = load(tmp_path / "some.toml", name)
    assert source == str(tmp_path / "algorithms" / f"{name}.toml")
    assert (loaded.algorithm_name, type(loaded.method)) == (name, method_class(name))
    assert loaded.training.lr == (0.05 if name == "pfedgp" else 0.01)  # its own optimiser, or the paper's for all
