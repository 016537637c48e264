"""FedBN, on a net with a group norm before the tanh: all leaves are trained, and all but the norm's averaged."""

import numpy as np

from golden.common import ALL, BOTH, NORM, Case, Outcome, mean, mistakes, some
from golden.minibatch import classify, error, head_gradient, train


def normed(p, x, groups=2):
    """Logits of head(tanh(group norm(body x))), and what their gradients need."""
    u = (x @ p["body.weight"].T + p["body.bias"]).reshape(len(x), groups, -1)
    std = np.sqrt(u.var(axis=2, keepdims=True) + 1e-5)
    unit = (u - u.mean(axis=2, keepdims=True)) / std
    h = np.tanh(unit.reshape(len(x), -1) * p["norm.weight"] + p["norm.bias"])
    return classify(p, h), h, unit, std


def normed_gradient(p, x, y):
    out, h, unit, std = normed(p, x)
    e = error(out, y)
    back = (e @ p["head.weight"]) * (1.0 - h * h)
    flat = unit.reshape(len(x), -1)
    d = (back * p["norm.weight"]).reshape(unit.shape)
    du = (d - d.mean(axis=2, keepdims=True) - unit * (d * unit).mean(axis=2, keepdims=True)) / std
    du = du.reshape(len(x), -1)
    leaves = {"norm.weight": (back * flat).sum(axis=0), "norm.bias": back.sum(axis=0)}
    return {"body.weight": du.T @ x, "body.bias": du.sum(axis=0)} | leaves | head_gradient(h, e)


def fedbn(problem, batches, twist=""):
    out, own, model = Outcome(), {}, some(problem.start, ALL)
    first = some(problem.start, NORM)
    for round, (now, cohort) in enumerate(problem.rounds(), 1):
        parts = []
        for k in cohort:
            mine = first if twist == "norms not kept" else own.get(k, first)
            trained = ALL if twist == "norms stand still" else ALL + NORM
            p = train(now, k, batches(round, k, 1), model | mine, trained, normed_gradient)
            own[k] = some(p, NORM)
            parts.append(p)
        total = mean(problem, cohort, parts, twist)
        model = some(total, ALL)
        if twist in ("norms averaged", "shifts averaged"):
            sent = NORM if twist == "norms averaged" else NORM[1:]
            own |= {k: own[k] | some(total, sent) for k in cohort}
        views = []
        for k, x in enumerate(problem.x_test):
            p = model | own.get(k, first)
            if k not in own and twist != "unseen unfitted":
                trained = ALL + NORM if twist == "unseen trains everything" else NORM
                p = train(problem, k, batches(None, k, 1), p, trained, normed_gradient)
            if twist == "predicts before averaging" and k in cohort:
                p = parts[cohort.index(k)]
            views.append({"personal": normed(p, x)[0]})
        out.keep({"model": model}, {k: {"norm": leaves} for k, leaves in own.items()}, views)
    return out


CASES = {"fedbn": Case(net="group")}

MISTAKES = [
    *mistakes(
        "fedbn",
        "other weighting",
        "norms not kept",
        "norms stand still",
        "norms averaged",
        "shifts averaged",
        variants=BOTH,
    ),
    *mistakes(
        "fedbn",
        "predicts before averaging",
        "unseen unfitted",
        "unseen trains everything",
        variants=BOTH,
        late=True,
    ),
]
