"""Per-FedAvg: steps along (I - alpha H) grad f(w - alpha grad f(w)); one plain step of rate alpha before prediction."""

import numpy as np

from golden.common import BOTH, CROSSED, Case, Outcome, mean, mistakes
from golden.minibatch import gradient, logits, step


def hessian_product(p, v, x, y, h=1e-30):
    """H v by a complex step: exact to rounding."""
    g = gradient({name: p[name] + 1j * h * v[name] for name in p}, x, y)
    return {name: g[name].imag / h for name in g}


def per_fedavg(
    problem,
    batches,
    variant="first-order",
    alpha=0.01,
    delta=0.01,
    delta_scale="relative",
    finetune_epochs=0,
    twist="",
):
    out, w, seen = Outcome(), problem.start, set()
    group = 2 if variant == "first-order" else 3
    inner = problem.lr if twist == "inner steps at the outer rate" else alpha

    def slope(k, p, rows):
        return gradient(p, problem.x[k][rows], problem.y[k][rows])

    def product(k, p, v, rows):
        if variant == "exact":
            return hessian_product(p, v, problem.x[k][rows], problem.y[k][rows])
        norm = np.sqrt(sum(np.sum(leaf**2) for leaf in v.values()))
        by = delta / norm if (delta_scale == "relative") != (twist == "other scale of delta") else delta
        ahead, behind = (slope(k, {n: p[n] + s * by * v[n] for n in p}, rows) for s in (1.0, -1.0))
        back = p if twist == "one-sided difference" else None
        behind = slope(k, back, rows) if back else behind
        return {n: (ahead[n] - behind[n]) / ((1.0 if back else 2.0) * by) for n in p}

    for round, (now, cohort) in enumerate(problem.rounds(), 1):
        parts = []
        for k in cohort:
            p, lists = w, batches(round, k, group)
            calls = len(lists) // group if twist != "as many steps as batches" else len(batches(round, k, 1))
            for t in range(calls):
                given = (lists * group)[t * group : (t + 1) * group]
                given = given[:1] * 3 if twist == "the same batch twice" else given
                adapted = p if twist == "no inner step" else step(p, slope(k, p, given[0]), inner)
                v = slope(k, adapted, given[1])
                if variant != "first-order" and twist != "no Hessian":
                    at = adapted if twist == "Hessian at the adapted model" else p
                    rows = given[1] if twist == "Hessian on the second batch" else given[2]
                    scale = {"no alpha before the Hessian": 1.0, "other sign": -inner}.get(twist, inner)
                    bend = product(k, at, v, rows)
                    v = {n: v[n] - scale * bend[n] for n in v}
                base = adapted if twist == "steps from the adapted model" else p
                decay = 0.0 if twist == "no weight decay" else problem.decay
                p = step(base, {n: v[n] + decay * p[n] for n in v}, now.lr)
            parts.append(p)
        w = mean(problem, cohort, parts, twist)
        seen |= set(cohort)
        views = []
        for k, x in enumerate(problem.x_test):
            rate = problem.lr if twist == "adapts at the outer rate" else alpha
            p = w
            for _ in range((finetune_epochs or 1) * (twist != "not adapted")):
                g = slope(k, p, np.arange(len(problem.y[k])))
                g = gradient(p, x, problem.y_test[k]) if twist == "adapts on test rows" else g
                p = step(p, g, rate)
            views.append({"personal": logits(p, x), "global": logits(w, x)})
        out.keep({"model": w}, {k: {} for k in seen}, views)
    return out


CASES = {
    "per_fedavg": Case({"alpha": 0.3}),
    "per_fedavg/hf": Case({"alpha": 0.3, "variant": "hessian-free"}, CROSSED),
    "per_fedavg/absolute": Case(
        {"alpha": 0.3, "variant": "hessian-free", "delta": 0.2, "delta_scale": "absolute", "finetune_epochs": 2},
        CROSSED,
    ),
    "per_fedavg/exact": Case({"alpha": 0.3, "variant": "exact"}, CROSSED),
}

MISTAKES = [
    *mistakes(
        "per_fedavg",
        "other weighting",
        "no inner step",
        "inner steps at the outer rate",
        "steps from the adapted model",
        "as many steps as batches",
        variants=BOTH,
    ),
    *mistakes("per_fedavg", "not adapted", "adapts at the outer rate", "adapts on test rows", variants=BOTH, late=True),
    *mistakes("per_fedavg", "no weight decay", variants=("momentum",)),
    *mistakes("per_fedavg/hf", "one-sided difference", variants=("momentum",)),
    *mistakes(
        ("per_fedavg/hf", "per_fedavg/exact"),
        "no Hessian",
        "Hessian at the adapted model",
        "no alpha before the Hessian",
        "other sign",
        variants=("momentum",),
    ),
    *mistakes("per_fedavg/absolute", "other scale of delta", variants=("momentum",)),
    *mistakes("per_fedavg/absolute", "not adapted", variants=("momentum",), late=True),
    *mistakes("per_fedavg", "the same batch twice", variants=("momentum",), batches="small"),
    *mistakes("per_fedavg/hf", "Hessian on the second batch", variants=("momentum",), batches="small"),
]
