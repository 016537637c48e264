"""FedOpt: the clients' mean change as a gradient for the server's momentum, Adam, Yogi or Adagrad."""

import numpy as np

from golden.common import BOTH, CROSSED, PLAIN, Case, Outcome, combine, finetuned, mean, mistakes, train


def second_moment(rule, v, d, b2, twist):
    """v after a change d, coordinate by coordinate."""
    if twist == "the other rule":
        rule = {"adam": "yogi", "yogi": "adam", "adagrad": "adam"}[rule]
    if rule == "adagrad":
        return v + d**2
    if rule == "adam":
        return b2 * v + (1.0 - b2) * d**2
    larger = v > (np.abs(d) if twist == "compared with the change" else d**2)
    return np.where(larger, v - (1.0 - b2) * d**2, v + (1.0 - b2) * d**2)


def quotient(m, v, b1, b2, tau, r, twist):
    """The direction of an adaptive rule."""
    if twist == "bias corrected":
        return m / (1.0 - b1**r) / (np.sqrt(v / (1.0 - b2**r)) + tau)
    return m / (np.sqrt(v + tau**2) if twist == "tau under the root" else np.sqrt(v) + tau)


def fedopt(problem, rule, server_lr, beta1, beta2=0.99, tau=1e-3, finetune_epochs=0, twist=""):
    out, w, seen = Outcome(), problem.start, set()
    b1 = 0.0 if twist == "no momentum on the server" else beta1
    root = tau if twist == "v starts at tau" else tau**2
    m = combine(np.zeros_like, w)
    v = combine(lambda p: np.full_like(p, 0.0 if twist == "v starts at 0" else root), w)
    for r, (now, cohort) in enumerate(problem.rounds(), 1):
        change = mean(problem, cohort, [train(now, k, w, twist=twist) for k in cohort], twist)
        change = combine(np.subtract, change, w)
        damped = (rule == "momentum") == (twist == "the other damping")
        m = combine(lambda m, d, damped=damped: b1 * m + (1.0 - b1 if damped else 1.0) * d, m, change)
        if rule == "momentum":
            step = m
        else:
            v = combine(lambda v, d: second_moment(rule, v, d, beta2, twist), v, change)
            step = combine(lambda m, v, r=r: quotient(m, v, b1, beta2, tau, r, twist), m, v)
        w = combine(lambda w, s: w + (1.0 if twist == "no rate" else server_lr) * s, w, step)
        if twist == "moments forgotten":
            m = combine(np.zeros_like, w)
        seen |= set(cohort)
        server = {"model": w, "m": m} | ({} if rule == "momentum" else {"v": v})
        out.keep(server, {k: {} for k in seen}, finetuned(problem, w, finetune_epochs, twist=twist))
    return out


ADAPTIVE = {"server_lr": 0.2, "beta1": 0.7, "beta2": 0.8, "tau": 0.05}
CASES = {
    "fedavgm": Case({"rule": "momentum", "server_lr": 0.6, "beta1": 0.7}),
    "fedavgm/ft": Case({"rule": "momentum", "server_lr": 1.0, "beta1": 0.5, "finetune_epochs": 2}, CROSSED),
    "fedadam": Case({"rule": "adam"} | ADAPTIVE),
    "fedadam/adagrad": Case({"rule": "adagrad"} | ADAPTIVE, PLAIN),
    "fedyogi": Case({"rule": "yogi"} | ADAPTIVE),
}

MISTAKES = [
    *mistakes(
        "fedavgm",
        "one step less",
        "other weighting",
        "no momentum on the server",
        "moments forgotten",
        "no rate",
        "the other damping",
        variants=BOTH,
    ),
    *mistakes(
        ("fedadam", "fedyogi"),
        "other weighting",
        "no momentum on the server",
        "moments forgotten",
        "the other damping",
        "the other rule",
        "v starts at 0",
        "v starts at tau",
        "tau under the root",
        "bias corrected",
        "no rate",
    ),
    *mistakes("fedyogi", "compared with the change"),
    *mistakes("fedadam/adagrad", "the other rule", "v starts at 0"),
    *mistakes("fedavgm/ft", "no fine-tuning", variants=("momentum",), late=True),
    *mistakes(("fedavgm", "fedadam", "fedyogi"), "no momentum", "no weight decay", variants=("momentum",)),
]
