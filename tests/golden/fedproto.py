"""FedProto: everyone trains its own model, pulled to shared prototypes, which are all that is sent."""

import numpy as np

from golden.common import ALL, LATE_CLASS, Case, Outcome, mistakes
from golden.complex_step import class_means, classify, cross_entropy, features, fit

UNKNOWN = -1e30


def fedproto(problem, lam, pull="rows", average="uniform", twist=""):
    out, models = Outcome(), {}
    classes, d = problem.start["head.weight"].shape
    prototype, rows = np.zeros((classes, d)), np.zeros(classes)

    def local_pass(problem, k):
        x, y = problem.x[k], problem.y[k]

        def loss(p, t):
            z = features(p, x)
            far = np.sum((z - prototype[y]) ** 2, axis=-1) * (rows[y] > 0 if twist != "pulled to nothing" else 1.0)
            term = np.mean(far, axis=-1) / (1.0 if twist == "pull summed over features" else d)
            if twist == "mean over known rows alone":
                term = term / max(np.mean(rows[y] > 0), 1e-9)
            if (pull == "means") != (twist == "other pull"):
                away = [z[..., y == c, :].mean(axis=-2) - prototype[c] for c in set(y) if rows[c] > 0]
                term = sum(np.sqrt(np.sum(a * a, axis=-1) + 1e-8) for a in away)
                term = term / max(len(away), 1) if twist == "mean over classes" else term
            term = 0.0 if twist == "no pull" else term
            return cross_entropy(classify(p, z), y) + lam * term

        start = problem.start if twist == "starts afresh each round" else models.get(k, problem.start)
        return fit(problem, loss, start, ALL, problem.epochs, twist)

    for now, cohort in problem.rounds():
        trained, sent = {k: local_pass(now, k) for k in cohort}, []
        for k in cohort:
            p = models.get(k, problem.start) if twist == "prototypes before training" else trained[k]
            sent.append(class_means(features(p, problem.x[k]), problem.y[k], classes))
        models |= trained
        means, counts = (np.stack(part) for part in zip(*sent, strict=True))
        votes = counts if (average == "rows") != (twist == "other average") else (counts > 0).astype(float)
        votes = np.ones_like(votes) if twist == "absent classes vote" else votes
        for c in np.flatnonzero(counts.sum(axis=0)):
            prototype[c] = votes[:, c] @ means[:, c] / votes[:, c].sum()
            rows[c] = counts[:, c].sum()
        views = []
        for k in range(len(problem.x)):
            if k in models:
                p = models[k]
            else:
                p = problem.start if twist == "unseen unfitted" else local_pass(problem, k)
            z = features(p, problem.x_test[k])
            near = -np.sum((z[:, None] - prototype) ** 2, axis=2)
            mine = np.array([c in problem.y[k] or twist == "own classes unheeded" for c in range(classes)])
            views.append(
                {
                    "personal": classify(p, z),
                    "prototype": np.where(rows > 0, near, UNKNOWN),
                    "own_prototype": np.where((rows > 0) & mine, near, UNKNOWN),
                }
            )
        server = {"prototype": prototype.copy(), "rows": rows.copy()}
        out.keep(server, {k: {"model": p} for k, p in models.items()}, views)
    return out


CASES = {
    "fedproto": Case({"lam": 1.5}, seed=LATE_CLASS),
    "fedproto/paper": Case({"lam": 1.0, "pull": "means", "average": "rows"}, seed=LATE_CLASS),
}

MISTAKES = [
    *mistakes(
        "fedproto",
        "no pull",
        "other pull",
        "pull summed over features",
        "pulled to nothing",
        "mean over known rows alone",
        "starts afresh each round",
        "prototypes before training",
        "other average",
        "absent classes vote",
    ),
    *mistakes("fedproto", "own classes unheeded", "unseen unfitted", late=True),
    *mistakes("fedproto/paper", "other average", "other pull", "mean over classes"),
    *mistakes("fedproto", "no momentum", "no weight decay", variants=("momentum",)),
]
