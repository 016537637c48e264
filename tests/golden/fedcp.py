"""FedCP: a gate splits each feature between a personal head and a fixed global one; features tied to the received."""

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


def discrepancy(z, y):
    """Squared MMD with four Gaussian kernels, all pairs."""

    def kernel(p, q):
        square = np.sum((p[..., :, None, :] - q[..., None, :, :]) ** 2, axis=-1)
        return sum(np.exp(-square / (2.0 * a)) for a in (10, 15, 20, 50))

    return np.mean(kernel(z, z) + kernel(y, y) - 2.0 * kernel(z, y), axis=(-2, -1))


def gated(p, own, shared, z, v, noise, twist=""):
    """Logits of the two heads on the two parts of each feature."""
    d = z.shape[-1]
    hidden = relu(layer_norm((z * v) @ turned(p["gate/weight"]) + p["gate/bias"][..., None, :], p, "gate"))
    top = np.exp(hidden[..., :d] + noise)
    r = top / (top + np.exp(hidden[..., d:]))
    r = {"gates swapped": 1.0 - r, "gates halved": 0.5 * r}.get(twist, r)
    second = z if twist == "global head sees all" else (1.0 - r) * z
    return classify(own, r * z) + classify(shared, second)


def fedcp(problem, first, noise, lam, new_head_epochs, twist=""):
    """``noise(purpose, round, client, step)`` (n, d) enters the gate."""
    out, own = Outcome(), {}
    p = some(problem.start, BODY) | flat(first["gate"], "gate")
    shared = some(problem.start, HEAD)
    names = tuple(n for n in p if n.startswith("gate/"))

    def context(head):
        v = head["head.weight"].sum(axis=0)
        return v if twist == "context not normalised" else unit(v)

    for r, (now, cohort) in enumerate(problem.rounds(), 1):
        parts, received, last = [], p, shared
        for k in cohort:
            x, y, head = problem.x[k], problem.y[k], own.get(k, some(problem.start, HEAD))
            v, frozen = context(head), features(received, x)

            def loss(q, t, x=x, y=y, v=v, frozen=frozen, last=last, k=k, r=r):
                z = features(q, x)
                drawn = 0.0 if twist == "no noise" else noise("train", r, k, t)
                other = q if twist == "no global head" else last
                tie = 0.0 if twist == "no tie" else discrepancy(z, frozen)
                tie = np.sqrt(tie + 1e-12) if twist == "root of the tie" else tie
                return cross_entropy(gated(q, q, other, z, v, drawn, twist), y) + lam * tie

            trained = {"gate frozen": ALL}.get(twist, ALL + names)
            q = fit(now, loss, p | head, trained, problem.epochs, twist)
            own[k] = some(q, HEAD)
            half = 1.0 if twist == "sends its own head" else 0.5
            parts.append(q | {n: half * q[n] + (1.0 - half) * last[n] for n in HEAD})
        p = mean(problem, cohort, parts, twist)
        p, shared = {n: v for n, v in p.items() if n not in HEAD}, some(p, HEAD)
        views = []
        for k in range(len(problem.x)):
            x, y = problem.x[k], problem.y[k]
            head = own.get(k, some(problem.start, HEAD) if twist == "unseen starts at the first head" else shared)
            if k not in own and twist != "unseen unfitted":
                v, z = context(head), features(p, x)

                def loss(q, t, y=y, v=v, z=z, k=k, r=r, p=p, shared=shared):
                    return cross_entropy(gated(p, q, shared, z, v, noise("adapt", r, k, t)), y)

                head = fit(problem, loss, head, HEAD, new_head_epochs)
            z = features(p, problem.x_test[k])
            views.append({"personal": gated(p, head, shared, z, context(head), 0.0, twist)})
        server = {"body": some(p, BODY), "head": shared, "gate": nested(p, "gate")}
        out.keep(server, {k: {"personal": h} for k, h in own.items()}, views)
    return out


CASES = {"fedcp": Case({"lam": 5.0, "new_head_epochs": 4}, seed=LATE_CLASS)}

MISTAKES = [
    *mistakes(
        "fedcp",
        "other weighting",
        "gates swapped",
        "gates halved",
        "global head sees all",
        "context not normalised",
        "no noise",
        "no global head",
        "no tie",
        "root of the tie",
        "gate frozen",
        "sends its own head",
    ),
    *mistakes("fedcp", "unseen starts at the first head", "unseen unfitted", late=True),
    *mistakes("fedcp", "no momentum", "no weight decay", variants=("momentum",)),
]
