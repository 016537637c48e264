"""APFL: FedAvg for w; for each client alpha v + (1 - alpha) w, in which v is trained."""

import numpy as np

from golden.common import BOTH, CROSSED, Case, Outcome, mean, mistakes
from golden.minibatch import backward, blend, error, gradient, logits, sgd, step


def mixture_slope(how, a, v, w, x, y, twist="", full=False):
    """Of the mixture's loss: gradients with respect to v (or over alpha, if ``full``), w and alpha."""
    a = 1.0 - a if twist == "alpha on the global model" else a
    if twist == "the own model trains alone":
        return gradient(v, x, y), {name: 0.0 for name in w}, 0.0
    if (how == "logits") != (twist == "mixes the other thing"):
        one, two = logits(v, x), logits(w, x)
        e = error(a * one + (1.0 - a) * two, y)
        gv, gw, ga = backward(v, x, a * e), backward(w, x, (1.0 - a) * e), np.sum(e * (one - two))
    else:
        g = gradient(blend(a, v, w), x, y)
        gv, gw = ({name: s * g[name] for name in g} for s in (a, 1.0 - a))
        ga = sum(np.sum(g[name] * (v[name] - (0.0 if twist == "slope of v alone" else w[name]))) for name in g)
    if full != (twist == "the other own step"):
        gv = {name: leaf / a for name, leaf in gv.items()}
    return gv, gw, ga


def apfl_round(problem, k, lists, w, v, a, adaptive, how, full, twist):
    speed_w, speed_v, used, moved = {}, {}, a, a
    for t, rows in enumerate(lists):
        x, y = problem.x[k][rows], problem.y[k][rows]
        gw = gradient(w, x, y)
        if t == 0 and adaptive and twist != "alpha stays":
            moved = a - problem.lr * mixture_slope(how, a, v, w, x, y, twist)[2]
            moved = moved if twist == "alpha not projected" else min(max(moved, 0.0), 1.0)
        used = moved if t > 0 or twist == "alpha counts at once" else a
        before, after = w, sgd(problem, w, gw, speed_w)
        other = after if twist == "mixes with the new w" else w
        gv, leak, _ = mixture_slope(how, used, v, other, x, y, twist, full)
        if twist == "the mixture trains w too":
            speed_w = {name: s + leak[name] for name, s in speed_w.items()}
            after = step(before, speed_w, problem.lr)
        w, v = after, sgd(problem, v, gv, speed_v)
        if twist == "alpha at every step" and adaptive and t + 1 < len(lists):
            moved = min(max(moved - problem.lr * mixture_slope(how, moved, v, w, x, y)[2], 0.0), 1.0)
    return w, v, moved


def apfl(problem, batches, alpha=0.5, adaptive=False, mix="params", own_step="alpha", twist=""):
    out, own, w = Outcome(), {}, problem.start
    how = adaptive, mix, own_step == "full"
    for round, (now, cohort) in enumerate(problem.rounds(), 1):
        parts = []
        for k in cohort:
            v, a = own.get(k, (problem.start, alpha))
            v = w if twist == "v starts at the received model" else v
            a = alpha if twist == "alpha not kept" else a
            new, v, a = apfl_round(now, k, batches(round, k, 1), w, v, a, *how, twist)
            own[k] = v, a
            parts.append(v if twist == "sends the own model" else new)
        w, views = mean(problem, cohort, parts, twist), []
        for k, x in enumerate(problem.x_test):
            v, a, there = *own.get(k, (w, alpha)), w
            if k not in own and twist != "unseen unfitted":
                start = problem.start if twist == "unseen starts at the first model" else w
                trained, v, a = apfl_round(problem, k, batches(None, k, 1), w, start, alpha, *how, "")
                there = trained if twist == "unseen mixes with what it trained" else w
            if twist == "predicts with its own w" and k in cohort:
                there = parts[cohort.index(k)]
            mixed = (
                a * logits(v, x) + (1.0 - a) * logits(there, x) if mix == "logits" else logits(blend(a, v, there), x)
            )
            views.append({"personal": logits(v, x) if twist == "predicts with v alone" else mixed})
        out.keep({"model": w}, {k: {"personal": v, "alpha": np.float64(a)} for k, (v, a) in own.items()}, views)
    return out


CASES = {
    "apfl": Case({"alpha": 0.3}),
    "apfl/adaptive": Case({"alpha": 0.9, "adaptive": True}, CROSSED),
    "apfl/end": Case({"alpha": 0.02, "adaptive": True}, CROSSED),
    "apfl/logits": Case({"alpha": 0.4, "adaptive": True, "mix": "logits"}, CROSSED),
    "apfl/full": Case({"alpha": 0.3, "own_step": "full"}, CROSSED),
    "apfl/full logits": Case({"alpha": 0.3, "mix": "logits", "own_step": "full"}, CROSSED),
}

MISTAKES = [
    *mistakes(
        "apfl",
        "other weighting",
        "the other own step",
        "alpha on the global model",
        "mixes with the new w",
        "mixes the other thing",
        "the own model trains alone",
        "the mixture trains w too",
        "v starts at the received model",
        "sends the own model",
        variants=BOTH,
    ),
    *mistakes(
        "apfl",
        "predicts with its own w",
        "predicts with v alone",
        "unseen unfitted",
        "unseen starts at the first model",
        "unseen mixes with what it trained",
        variants=BOTH,
        late=True,
    ),
    *mistakes(
        "apfl/adaptive",
        "alpha stays",
        "alpha not kept",
        "alpha counts at once",
        "alpha at every step",
        "slope of v alone",
        variants=("momentum",),
    ),
    *mistakes("apfl/end", "alpha not projected", variants=("momentum",)),
    *mistakes("apfl/logits", "mixes the other thing", "the other own step", "alpha stays", variants=("momentum",)),
    *mistakes(["apfl/full", "apfl/full logits"], "the other own step", variants=("momentum",)),
    *mistakes("apfl/adaptive", "alpha at every step", variants=("momentum",), batches="small"),
]
