"""GPFL: embeddings of classes guide the body by two routes, a generic and a personal one; heads are kept."""

import numpy as np

from golden.common import ALL, BODY, HEAD, LATE_CLASS, Case, Outcome, mean, mistakes, some
from golden.complex_step import (
    classify,
    cross_entropy,
    features,
    fit,
    flat,
    layer_norm,
    nested,
    relu,
    turned,
    unit,
)


def valve(p, z, context, twist=""):
    def block(name):  # the context is a matrix of one row
        out = context[None] @ turned(p[f"{name}/weight"]) + p[f"{name}/bias"][..., None, :]
        return layer_norm(relu(out), p, name)

    gamma, beta = block("valve/gamma"), block("valve/beta")
    out = z * (gamma + (0.0 if twist == "scale without the one" else 1.0)) + (0.0 if twist == "no shift" else beta)
    return out if twist == "no rectifier" else relu(out)


def gpfl(problem, first, lam, decay, new_head_epochs, magnitude="batch", context="received", twist=""):
    out, heads, trained = Outcome(), {}, {}
    p = some(problem.start, BODY) | {"embedding": first["embedding"]}
    p |= flat(first["valve"], "valve")
    added = {n: tuple(range(-v.ndim, 0)) for n, v in p.items() if n not in BODY}  # with the axes of each leaf
    classes = len(p["embedding"])
    per_row = (magnitude == "mean") != (twist == "other magnitude")

    def contexts(k, e):
        share = np.array([np.mean(problem.y[k] == c) for c in range(classes)])
        generic, own = np.mean(e, axis=0), share @ e
        return {"contexts swapped": (own, generic), "one context": (generic, generic)}.get(twist, (generic, own))

    def source(k, e):
        lagged = (context == "lagged") != (twist == "contexts of the other time")
        return trained.get(k, np.zeros_like(e)) if lagged else e

    for now, cohort in problem.rounds():
        parts, anchor = [], p["embedding"]
        for k in cohort:
            x, y = problem.x[k], problem.y[k]
            generic, own = contexts(k, source(k, anchor))

            def loss(q, t, x=x, y=y, generic=generic, own=own, anchor=anchor):
                z = features(q, x)
                f = valve(q, z, generic, twist)
                to = anchor if twist == "guided by fixed embeddings" else q["embedding"]
                cosine = unit(f) @ turned(unit(to)) if twist != "inner products" else f @ turned(to)
                away = f - (q["embedding"] if twist == "pulled to trained embeddings" else anchor)[..., y, :]
                square = np.sum(away * away, axis=-1)
                size = np.mean(np.sqrt(square), axis=-1) if per_row else np.sqrt(np.sum(square, axis=-1))
                guide = 0.0 if twist == "no guidance" else cross_entropy(cosine, y)
                size = 0.0 if twist == "no pull" else size
                ridge = 0.5 * decay * sum(np.sum(q[n] * q[n], axis=axes) for n, axes in added.items())
                ridge = 0.0 if twist == "no decay" else ridge
                return cross_entropy(classify(q, valve(q, z, own, twist)), y) + guide + lam * size + ridge

            q = fit(now, loss, p | heads.get(k, some(problem.start, HEAD)), (*ALL, *added), problem.epochs, twist)
            heads[k], trained[k] = some(q, HEAD), q["embedding"]
            parts.append(some(q, (*BODY, *added)))
        p = mean(problem, cohort, parts, twist)
        if twist == "heads averaged":
            heads |= dict.fromkeys(cohort, mean(problem, cohort, [heads[k] for k in cohort]))
        views = []
        for k in range(len(problem.x)):
            seen = k in heads
            own = contexts(k, source(k, p["embedding"]) if seen else p["embedding"])[1]
            head = heads.get(k, some(problem.start, HEAD))
            if not seen and twist != "unseen unfitted":
                f, y = valve(p, features(p, problem.x[k]), own), problem.y[k]
                head = fit(
                    problem, lambda q, t, f=f, y=y: cross_entropy(classify(q, f), y), head, HEAD, new_head_epochs
                )
            views.append({"personal": classify(head, valve(p, features(p, problem.x_test[k]), own, twist))})
        server = {"body": some(p, BODY), "embedding": p["embedding"], "valve": nested(p, "valve")}
        out.keep(server, {k: {"head": h, "trained": trained[k]} for k, h in heads.items()}, views)
    return out


CASES = {
    "gpfl": Case({"lam": 0.3, "decay": 0.1, "new_head_epochs": 4}, seed=LATE_CLASS),
    "gpfl/lagged": Case(
        {"lam": 0.3, "decay": 0.0, "new_head_epochs": 2, "magnitude": "mean", "context": "lagged"}, seed=LATE_CLASS
    ),
}

MISTAKES = [
    *mistakes(
        "gpfl",
        "other weighting",
        "scale without the one",
        "no shift",
        "no rectifier",
        "contexts swapped",
        "one context",
        "contexts of the other time",
        "guided by fixed embeddings",
        "pulled to trained embeddings",
        "inner products",
        "no guidance",
        "no pull",
        "no decay",
        "other magnitude",
        "heads averaged",
    ),
    *mistakes("gpfl", "unseen unfitted", late=True),
    *mistakes("gpfl/lagged", "contexts of the other time", "other magnitude"),
    *mistakes("gpfl", "no momentum", "no weight decay", variants=("momentum",)),
]
