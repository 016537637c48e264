"""FedPAC: features pulled to shared prototypes; heads mixed by the statistics of their clients."""

from dataclasses import replace
from itertools import combinations

import numpy as np

from golden.common import ALL, BODY, CROSSED, HEAD, LATE_CLASS, Case, Outcome, mean, mistakes, some, train
from golden.complex_step import class_means, classify, cross_entropy, features, fit


def simplex_minimum(q):
    """argmin a' q a over the simplex: the best of the stationary points of all faces."""
    best, value = None, np.inf
    for size in range(1, len(q) + 1):
        for face in map(list, combinations(range(len(q)), size)):
            part = np.linalg.solve(q[np.ix_(face, face)], np.ones(size))
            a = np.zeros(len(q))
            a[face] = part / part.sum()
            if (a >= 0).all() and a @ q @ a < value:
                best, value = a, a @ q @ a
    return best


def mixing_weights(variance, h, smallest, twist=""):
    """Row i: argmin sum_j a_j^2 V_j + |h_i - sum_j a_j h_j|^2; small weights dropped."""
    m = len(variance)
    if twist == "all heads mixed alike":
        return np.full((m, m), 1.0 / m)
    if twist == "heads not mixed":
        return np.eye(m)
    centre = h.mean(axis=0)
    ridge = 1e-8 * np.mean([v + np.sum((one - centre) ** 2) for v, one in zip(variance, h, strict=True)])
    rows = []
    for i in range(m):
        bias = np.array([[np.sum((h[i] - h[j]) * (h[i] - h[k])) for k in range(m)] for j in range(m)])
        weight = 0.0 if twist == "no variance" else 1.0
        a = simplex_minimum(bias + np.diag(weight * variance) + ridge * np.eye(m))
        if twist != "small weights stay":
            a = np.where(a > smallest, a, 0.0)
        rows.append(a if twist == "not normalised again" else a / a.sum())
    return np.stack(rows)


def fedpac(problem, lam, head_epochs, head_lr, smallest, new_epochs, new_part="head", refit_epochs=0, twist=""):
    out, population = Outcome(), problem.population
    body, classes = some(problem.start, BODY), len(problem.start["head.bias"])
    heads = {k: some(problem.start, HEAD) for k in range(population)}
    weight = np.zeros(population)
    prototype, rows = np.zeros((classes, len(body["body.bias"]))), np.zeros(classes)
    for now, cohort in problem.rounds():
        sent = []
        for k in cohort:
            x, y = problem.x[k], problem.y[k]
            z = features(body, x)
            own, count = class_means(z, y, classes)
            rate = head_lr * now.lr / problem.lr
            head_problem = now if twist == "head at the body's rate" else replace(now, lr=rate)
            fitted = train(head_problem, k, body | heads[k], head_epochs, HEAD)
            head = heads[k] if twist == "body under the old head" else some(fitted, HEAD)
            target = np.where(rows[:, None] > 0, prototype, own)
            pulled = np.ones(classes) if rows.sum() > 0 or twist == "pulled in the first round" else np.zeros(classes)
            if twist == "no pull to own prototypes":
                pulled = (rows > 0).astype(float)

            def loss(p, t, x=x, y=y, head=head, target=target, pulled=pulled):
                z = features(p, x)
                pull = np.mean((z - target[y]) ** 2 * pulled[y][:, None], axis=(-2, -1))
                pull = {"no pull": 0.0, "pull summed over features": pull * z.shape[-1]}.get(twist, pull)
                return cross_entropy(classify(head, z), y) + lam * pull

            new = some(fit(now, loss, body, BODY, problem.epochs), BODY)
            if twist == "statistics after training":
                z = features(new, x)
                own, count = class_means(z, y, classes)
            share, n = count / count.sum(), len(y)
            squares = [np.mean(np.sum(z[y == c] ** 2, axis=1)) if count[c] else 0.0 for c in range(classes)]
            v = sum(p * s for p, s in zip(share, squares, strict=True)) - np.sum(share**2 * np.sum(own**2, axis=1))
            v = v if twist == "variance of a row" else v / n
            h = own if twist == "h without class shares" else share[:, None] * own
            after = own if twist == "prototypes before training" else class_means(features(new, x), y, classes)[0]
            sent.append((new, some(fitted, HEAD), after, count, v, h.ravel()))
        bodies, fitted, after, counts, v, h = (list(part) for part in zip(*sent, strict=True))
        body = mean(problem, cohort, bodies, twist)
        alpha = mixing_weights(np.array(v), np.stack(h), smallest, twist)
        for i, k in enumerate(cohort):
            heads[k] = {name: sum(a * f[name] for a, f in zip(alpha[i], fitted, strict=True)) for name in HEAD}
            weight[k] = len(problem.y[k]) if problem.weighting == "samples" else 1.0
        votes = np.stack(counts) > 0 if twist == "owners alike" else np.stack(counts)
        for c in np.flatnonzero(votes.sum(axis=0)):
            prototype[c] = sum(w * p[c] for w, p in zip(votes[:, c], after, strict=True)) / votes[:, c].sum()
            rows[c] = np.stack(counts)[:, c].sum()
        average = {n: sum(w * heads[k][n] for k, w in enumerate(weight)) / weight.sum() for n in HEAD}
        views = []
        for k in range(len(problem.x)):
            head = heads[k] if k < population else average
            if twist == "new client starts at the first head" and k >= population:
                head = some(problem.start, HEAD)
            p = body | head
            if not (k < population and weight[k]) and twist != "unseen unfitted":
                names = HEAD if (new_part == "head") != (twist == "unseen fits the other part") else ALL
                p = train(problem, k, p, new_epochs, names)
            if refit_epochs and twist != "no refit":
                rate = problem.lr if twist == "refitted at the body's rate" else head_lr
                p = train(replace(problem, lr=rate), k, p, refit_epochs, HEAD)
            views.append({"personal": classify(p, features(p, problem.x_test[k]))})
        stacked = {n: np.stack([heads[k][n] for k in range(population)]) for n in HEAD}
        server = {"body": body, "prototype": prototype.copy(), "rows": rows.copy()}
        server |= {"heads": stacked, "weight": weight.copy()}
        out.keep(server, {k: {} for k in np.flatnonzero(weight)}, views)
    return out


CASES = {
    "fedpac": Case({"lam": 0.8, "head_epochs": 2, "head_lr": 0.3, "smallest": 0.1, "new_epochs": 4}, seed=LATE_CLASS),
    "fedpac/all": Case(
        {"lam": 3.0, "head_epochs": 1, "head_lr": 0.1, "smallest": 0.0, "new_epochs": 2, "new_part": "all"},
        seed=LATE_CLASS,
    ),
    "fedpac/refit": Case(
        {"lam": 0.8, "head_epochs": 2, "head_lr": 0.3, "smallest": 0.1, "new_epochs": 4, "refit_epochs": 2},
        CROSSED,
        seed=LATE_CLASS,
    ),
}

MISTAKES = [
    *mistakes(
        "fedpac",
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
    ),
    *mistakes(
        "fedpac",
        "new client starts at the first head",
        "unseen unfitted",
        "unseen fits the other part",
        late=True,
    ),
    *mistakes("fedpac/refit", "no refit", "refitted at the body's rate", late=True),
]
