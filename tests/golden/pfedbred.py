"""pFedBreD: personal models by proximal steps towards the mean of a prior, which each kind of prior sets in its way.

With full batches both batches of a meta step are the same rows.
"""

import numpy as np

from golden.common import Case, Outcome, combine, gradient, mean, mistakes, own_slope, predictions


def pfedbred(problem, prior, eta, lam, prox_steps, prox_lr, meta_lr, twist=""):
    out, w, own = Outcome(), problem.start, {}
    repetitions = -(-problem.epochs // 2) if prior == "mh" and twist != "one batch each" else problem.epochs
    move = lambda a, b, s: combine(lambda x, y: x + s * y, a, b)  # noqa: E731

    def round_of(problem, k, w, theta, last):
        slope = own_slope(problem, k)
        for _ in range(repetitions):
            if prior == "mh" and twist != "no meta step":
                ahead = w if twist == "gradient at the old point" else move(w, slope(w), -meta_lr)
                new = move(ahead if twist == "meta step from ahead" else w, slope(ahead), -meta_lr)
                w_prior = w if twist == "meta step for the prior alone" else new
                w, shown = w_prior, new
            else:
                shown = w
            away = slope(shown) if prior == "lg" else combine(np.subtract, last, theta)
            if twist == "away from the current model":
                away = combine(np.subtract, w, theta)
            s = move(shown, away, eta if twist == "other sign" else -eta)
            starts_at_mean = (prior == "lg") != (twist == "starts at the other point")
            theta = s if starts_at_mean else w
            for _ in range(prox_steps):
                anchor = w if twist == "tied to the global model" else s
                pull = combine(lambda g, t, a: g + lam * (t - a), slope(theta), theta, anchor)
                theta = move(theta, pull, -prox_lr)
            centre = w if twist == "envelope at the global model" else s
            w = combine(lambda x, m, t: x - problem.lr * lam * (m - t), w, centre, theta)
        return w, theta

    for now, cohort in problem.rounds():
        parts = []
        for k in cohort:
            theta, last = own.get(k, (problem.start, problem.start))
            if twist == "personal model is not kept":
                theta = last = w
            sent, theta = round_of(now, k, w, theta, last)
            own[k] = (theta, sent)
            parts.append(theta if twist == "sends the personal model" else sent)
        w = mean(problem, cohort, parts, twist)
        everyone = []
        for k in range(len(problem.x)):
            if k in own:
                personal = own[k][0]
            else:
                base = problem.start if twist == "unseen starts at the first model" else w
                personal = w if twist == "unseen untrained" else round_of(problem, k, w, base, w)[1]
            everyone.append(personal)
        states = {k: {"personal": t, "last": s} for k, (t, s) in own.items()}
        out.keep({"model": w}, states, predictions(problem, everyone))
    return out


def pfedme(problem, lam, prox_steps, prox_lr):
    """pFedMe with prox steps that start at w, no weight decay, means by rows: what pFedBreD is with eta = 0."""
    w, server, own = problem.start, [], {}
    for cohort in problem.cohorts:
        parts = []
        for k in cohort:
            mine = w
            for _ in range(problem.epochs):
                theta = mine
                for _ in range(prox_steps):
                    g = gradient(theta, problem.x[k], problem.y[k])
                    theta = {n: theta[n] - prox_lr * (g[n] + lam * (theta[n] - mine[n])) for n in theta}
                mine = {n: mine[n] - problem.lr * lam * (mine[n] - theta[n]) for n in mine}
            own[k] = theta
            parts.append(mine)
        w = mean(problem, cohort, parts)
        server.append(w)
    return server, own


FIELDS = {"eta": 0.3, "lam": 1.5, "prox_steps": 3, "prox_lr": 0.2, "meta_lr": 0.15}
CASES = {
    "pfedbred": Case(FIELDS | {"prior": "mh"}, epochs=5),
    "pfedbred/meg": Case(FIELDS | {"prior": "meg"}),
    "pfedbred/lg": Case(FIELDS | {"prior": "lg"}),
}

MISTAKES = [
    *mistakes(
        "pfedbred",
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
    ),
    *mistakes("pfedbred", "unseen starts at the first model", "unseen untrained", late=True),
    *mistakes("pfedbred/lg", "starts at the other point", "tied to the global model"),
    *mistakes("pfedbred/meg", "away from the current model", "other sign"),
]
