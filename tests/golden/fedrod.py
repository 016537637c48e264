"""FedRoD: a generic head under balanced softmax; a personal head on fixed features and generic logits."""

import numpy as np

from golden.common import ALL, BODY, BOTH, CROSSED, HEAD, Case, Outcome, features, mean, mistakes, some
from golden.minibatch import backward, classify, error, head_gradient, logits, sgd


def personal_gradient(p, head, x, y, prior=0.0):
    """Of the cross entropy of both heads' logits with respect to the personal head; and the logits' error."""
    z = features(p, x)
    e = error(classify(p, z) + classify(head, z) + prior, y)
    return head_gradient(z, e), e


def fedrod(problem, batches, heads="linear", gamma=1.0, head_start="zero", new_head_epochs=5, refit_epochs=0, twist=""):
    out, classes = Outcome(), len(problem.start["head.bias"])
    copied = (head_start == "copy") != (twist == "other start")
    first = {name: problem.start[name] * float(copied) for name in HEAD}
    hyper = {name: np.stack([leaf] * classes, axis=-1) for name, leaf in first.items()}
    model, own = problem.start, {}
    gamma = 1.0 if twist == "gamma ignored" else gamma

    def shares(k):
        counts = np.bincount(problem.y[k], minlength=classes).astype(float)
        return counts if twist == "counts instead of shares" else counts / counts.sum()

    def generated(maps, k):
        return {name: np.einsum("...c,c->...", leaf, shares(k)) for name, leaf in maps.items()}

    def prior(k):
        counts = np.bincount(problem.y[k], minlength=classes) + (1e-3 if twist == "absent classes count" else 0.0)
        with np.errstate(divide="ignore"):
            return np.zeros(classes) if twist == "no prior" else gamma * np.log(counts)

    def fit(k, p, head, steps):
        speed = {}
        for _ in range(steps):
            head = sgd(problem, head, personal_gradient(p, head, problem.x[k], problem.y[k])[0], speed)
        return head

    for round, (now, cohort) in enumerate(problem.rounds(), 1):
        parts = []
        for k in cohort:
            p, head, maps = model, first if twist == "own head not kept" else own.get(k, first), hyper
            speed, head_speed, hyper_speed = {}, {}, {}
            for rows in batches(round, k, 1):
                x, y = problem.x[k][rows], problem.y[k][rows]
                mine = head if heads == "linear" else generated(maps, k)
                g = backward(p, x, error(logits(p, x) + prior(k), y))
                own_g, e = personal_gradient(p, mine, x, y, prior(k) if twist == "prior in both losses" else 0.0)
                if twist == "personal loss reaches the generic head":
                    g |= {name: g[name] + own_g[name] for name in HEAD}
                if twist == "personal loss reaches the body":
                    reached = some(backward(p | mine, x, e), BODY)
                    g |= {name: g[name] + reached[name] for name in BODY}
                after = sgd(now, p, g, speed)
                if twist == "personal step after the generic one":
                    own_g = personal_gradient(after, mine, x, y)[0]
                if twist == "personal head learns alone":
                    own_g = head_gradient(features(p, x), error(classify(mine, features(p, x)), y))
                if heads == "linear":
                    head = sgd(now, head, own_g, head_speed)
                else:
                    outer = {name: own_g[name][..., None] * shares(k) for name in HEAD}
                    maps = sgd(now, maps, outer, hyper_speed)
                p = after
            own[k] = head
            parts.append(p | {f"hyper/{name}": leaf for name, leaf in maps.items()})
        total = mean(problem, cohort, parts, twist)
        model, hyper = some(total, ALL), {name: total[f"hyper/{name}"] for name in HEAD}
        if twist == "own head averaged":
            own |= dict.fromkeys(cohort, mean(problem, cohort, [own[k] for k in cohort]))
        views = []
        for k, x in enumerate(problem.x_test):
            if heads == "hyper":
                head = generated(hyper, k)
            elif k in own:
                head = own[k]
            else:
                head = fit(k, model, first, 0 if twist == "unseen unfitted" else new_head_epochs)
            head = fit(k, model, head, 0 if twist == "not refitted" else refit_epochs)
            z = features(model, x)
            both = classify(head, z) + (0.0 if twist == "predicts with one head" else classify(model, z))
            both = both + np.maximum(prior(k), -1e9) if twist == "prior at prediction" else both
            views.append({"personal": both, "global": classify(model, z)})
        server = {"model": model} if heads == "linear" else {"model": model, "hyper": hyper}
        out.keep(server, {k: {"head": head if heads == "linear" else {}} for k, head in own.items()}, views)
    return out


CASES = {
    "fedrod": Case(),
    "fedrod/hyper": Case({"heads": "hyper", "head_start": "copy"}, CROSSED),
    "fedrod/refit": Case({"gamma": 0.6, "refit_epochs": 2, "new_head_epochs": 3}, CROSSED),
}

MISTAKES = [
    *mistakes(
        "fedrod",
        "other weighting",
        "no prior",
        "prior in both losses",
        "absent classes count",
        "personal loss reaches the generic head",
        "personal loss reaches the body",
        "personal step after the generic one",
        "personal head learns alone",
        "other start",
        "own head not kept",
        "own head averaged",
        variants=BOTH,
    ),
    *mistakes("fedrod", "predicts with one head", "prior at prediction", "unseen unfitted", variants=BOTH, late=True),
    *mistakes(
        "fedrod/hyper",
        "other start",
        "counts instead of shares",
        "personal step after the generic one",
        "no prior",
        variants=("momentum",),
    ),
    *mistakes("fedrod/refit", "gamma ignored", variants=("momentum",)),
    *mistakes("fedrod/refit", "not refitted", "unseen unfitted", variants=("momentum",), late=True),
]
