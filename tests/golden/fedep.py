"""FedEP in natural parameters throughout: q = (eta, n c), a site (n_k c mu_0 + moved, n_k c)."""

import numpy as np

from golden.common import CROSSED, Case, Outcome, combine, finetuned, gradient, mistakes, own_slope, path


def fedep(problem, precision, server_lr=1.0, warm_rounds=1, variant="ep", finetune_epochs=0, twist=""):
    c, out = (2.0 * precision if twist == "other precision" else precision), Outcome()
    mu = first = problem.start
    clients = problem.population
    rows, damping = np.zeros(clients), np.zeros(clients)
    moved, pending = {}, {}  # by client, over n c: what its site gained, and what it gained last, before damping
    for r, (now, cohort) in enumerate(problem.rounds()):
        heard = rows[rows > 0]
        n = heard.mean() * clients if len(heard) else 0.0
        deltas = []
        for k in cohort:
            size = len(problem.y[k])
            zero = combine(np.zeros_like, mu)
            site = combine(lambda a, b, k=k: a + damping[k] * b, moved.get(k, zero), pending.get(k, zero))
            if twist == "sites forget":
                site = zero
            if r < warm_rounds:
                delta = combine(np.subtract, path(now, own_slope(problem, k), mu)[-1], mu)
                pending[k] = zero
            else:
                total = max(n, size)
                eta_q, lambda_q = combine(lambda m, t=total: t * c * m, mu), total * c
                start = first if variant == "ep" else mu
                if twist == "sites start at the initial weights":
                    start = problem.start
                eta_k = combine(lambda m, a, s=size, t=total: s * c * m + t * c * a, start, site)
                eta_c, lambda_c = combine(np.subtract, eta_q, eta_k), lambda_q - size * c
                if twist == "cavity is q":
                    eta_c, lambda_c = eta_q, lambda_q
                over = 1.0 if twist == "sum of the loss, mean of the prior" else size
                scale = min(1.0, size / (total * c * now.lr)) / over

                def slope(p, k=k, eta_c=eta_c, lambda_c=lambda_c, scale=scale):
                    g = gradient(p, problem.x[k], problem.y[k])
                    return {name: g[name] + scale * (lambda_c * p[name] - eta_c[name]) for name in g}

                iterates = path(now, slope, mu)
                ends = iterates[-1:] if twist == "last iterate" else iterates
                delta = combine(lambda *ps: sum(ps[1:]) / (len(ps) - 1) - ps[0], mu, *ends)
                pending[k] = delta if variant == "ep" else zero
            moved[k] = site
            deltas.append(delta)
            rows[k] = size
        step = 1.0 if r < warm_rounds else server_lr
        by_rows = [float(len(problem.y[k])) if problem.weighting == "samples" else 1.0 for k in cohort]
        weights = by_rows if r < warm_rounds or twist == "weighted by rows" else [1.0] * len(cohort)
        change = combine(lambda *ds, w=weights: sum(a * d for a, d in zip(w, ds, strict=True)) / sum(w), *deltas)
        mu = combine(lambda m, d, s=step: m + s * d, mu, change)
        first = mu if r < warm_rounds else first
        for k in cohort:
            damping[k] = step / (1.0 if twist == "sites are not damped" else len(cohort))
        server = {"model": mu, "first": first, "rows": rows.copy(), "damping": damping.copy(), "round": r + 1.0}
        states = {k: {"site": moved[k], "pending": pending[k]} for k in moved}
        out.keep(server, states, finetuned(problem, mu, finetune_epochs, twist=twist))
    return out


FIELDS = {"precision": 0.3, "server_lr": 0.8}
CASES = {
    "fedep": Case(FIELDS),
    "fedep/strong": Case(FIELDS | {"precision": 3.0}, CROSSED),  # the pull is at its bound
    "fedep/sep": Case(FIELDS | {"variant": "sep"}),
    "fedep_ft": Case(FIELDS | {"finetune_epochs": 5, "warm_rounds": 2}),
}

MISTAKES = [
    *mistakes(
        "fedep",
        "other precision",
        "sites forget",
        "sites start at the initial weights",
        "cavity is q",
        "sum of the loss, mean of the prior",
        "last iterate",
        "sites are not damped",
        "weighted by rows",  # the mean is plain whatever the weighting
    ),
    *mistakes("fedep/sep", "other precision", "cavity is q"),
    *mistakes("fedep_ft", "no fine-tuning", late=True),
]
