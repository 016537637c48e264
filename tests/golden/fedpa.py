"""FedPA: samples along the local pass; the client sends Sigma^-1 (theta - mean) under a shrunk covariance."""

import numpy as np

from golden.common import ALL, Case, Outcome, combine, finetuned, mean, mistakes, own_slope, path, vector


def shaped(vector, like):
    parts = np.split(vector, np.cumsum([like[name].size for name in ALL])[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(ALL, parts, strict=True)}


def shrunk_covariance(samples, rho, twist=""):
    """rho_L I + (1 - rho_L) S for samples (L, d), d x d."""
    count, d = samples.shape
    r = 1.0 / (1.0 + (count - 1) * rho)
    centred = samples - samples.mean(axis=0)
    over = count if twist == "biased covariance" else count - 1
    return r * np.eye(d) + (1.0 - r) * centred.T @ centred / over


def recursion(theta, samples, rho):
    """The paper's dynamic programme for Sigma^-1 (theta - mean), without any d x d matrix."""
    m, delta, kept = samples[0], theta - samples[0], []
    for t in range(2, len(samples) + 1):
        u = samples[t - 1] - m
        v = u.copy()
        for k, (vk, uvk) in enumerate(kept, start=2):
            g = rho * (k - 1) / k
            v = v - g * (vk @ u) / (1.0 + g * uvk) * vk
        uv, ud, g = u @ v, u @ delta, rho * (t - 1) / t
        delta = delta - (1.0 + g * (t * ud - uv) / (1.0 + g * uv)) * v / t
        kept.append((v, uv))
        m = ((t - 1) * m + samples[t - 1]) / t
    return delta * (1.0 + (len(samples) - 1) * rho)


def fedpa(
    problem,
    samples,
    burn_in,
    rho,
    server_lr=1.0,
    server_momentum=0.0,
    warm_rounds=0,
    finetune_epochs=0,
    twist="",
):
    out, theta, seen = Outcome(), problem.start, set()
    velocity = combine(np.zeros_like, theta)
    for r, (now, cohort) in enumerate(problem.rounds()):
        deltas = []
        for k in cohort:
            iterates = path(now, own_slope(problem, k), theta)
            steps = len(iterates)
            count = min(samples, steps - burn_in)
            if count < 2 or (r < warm_rounds and twist != "no warm rounds"):
                deltas.append(combine(np.subtract, theta, iterates[-1]))
                continue
            windows = [[] for _ in range(burn_in + count)]
            for t, p in enumerate(iterates):
                windows[t * (burn_in + count) // steps].append(vector(p))
            if twist != "burn-in is sampled":
                windows = windows[burn_in:]
            drawn = np.stack([w[-1] if twist == "last iterate of a window" else np.mean(w, axis=0) for w in windows])
            sigma = shrunk_covariance(drawn, 0.0 if twist == "no covariance" else rho, twist)
            away = vector(theta) - (drawn[-1] if twist == "last sample for the mean" else drawn.mean(axis=0))
            deltas.append(shaped(np.linalg.solve(sigma, away), theta))
        step = mean(problem, cohort, deltas, twist)
        m = 0.0 if twist == "no server momentum" else server_momentum
        velocity = combine(lambda d, v, m=m: d + m * v, step, velocity)
        theta = combine(lambda w, v: w - server_lr * v, theta, velocity)
        seen |= set(cohort)
        views = finetuned(problem, theta, finetune_epochs, twist=twist)
        out.keep({"model": theta, "velocity": velocity}, {k: {} for k in seen}, views)
    return out


FIELDS = {"samples": 3, "burn_in": 1, "rho": 0.8, "server_lr": 0.7, "server_momentum": 0.6}
CASES = {
    "fedpa": Case(FIELDS, epochs=7),
    "fedpa/warm": Case(FIELDS | {"warm_rounds": 2}, epochs=4),
    "fedpa/few": Case(FIELDS | {"samples": 5}, epochs=3),  # steps for two samples
    "fedpa_ft": Case(FIELDS | {"finetune_epochs": 5}, epochs=4),
}

MISTAKES = [
    *mistakes(
        "fedpa",
        "other weighting",
        "biased covariance",
        "no covariance",
        "burn-in is sampled",
        "last iterate of a window",
        "last sample for the mean",
        "no server momentum",
    ),
    *mistakes("fedpa/warm", "no warm rounds"),
    *mistakes("fedpa/few", "burn-in is sampled", "no covariance"),
    *mistakes("fedpa_ft", "no fine-tuning", late=True),
]
