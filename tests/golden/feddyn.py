"""FedDyn: L_i(w) - <g_i, w> + a/2 |w - w_t|^2; g_i and h follow the clients' moves; the mean model minus h / a."""

import numpy as np

from golden.common import ALL, BOTH, CROSSED, Case, Outcome, combine, descend, finetuned, gradient, mistakes


def feddyn(problem, alpha, finetune_epochs=0, twist=""):
    out, w, own = Outcome(), problem.start, {}
    zero = combine(np.zeros_like, w)
    h, everyone = zero, problem.population
    for round, (now, cohort) in enumerate(problem.rounds(), 1):
        models = []
        for k in cohort:
            g = zero if twist == "gradients forgotten" else own.get(k, zero)
            strength = {"no pull": 0.0, "alpha instead of alpha/2": 2.0 * alpha}.get(twist, alpha)
            if twist == "no pull in the first round" and round == 1:
                strength = 0.0
            sign = {"linear term added": -1.0, "no linear term": 0.0}.get(twist, 1.0)

            def slope(p, k=k, g=g, strength=strength, sign=sign, received=w):
                d = gradient(p, problem.x[k], problem.y[k])
                away = combine(np.subtract, p, received)
                if twist == "norm instead of its square":
                    size = np.sqrt(sum(np.sum(away[a] ** 2) for a in ALL))
                    away = combine(lambda a, size=size: a / size if size else a, away)
                return {a: d[a] - sign * g[a] + strength * away[a] for a in ALL}

            model = descend(now, slope, w, problem.epochs, twist=twist)
            models.append(model)
            own[k] = combine(lambda g, new, old: g - alpha * (new - old), g, model, w)
        n = np.array([len(problem.y[k]) if twist == "weighted by rows" else 1.0 for k in cohort])
        mean = {a: sum(s * m[a] for s, m in zip(n / n.sum(), models, strict=True)) for a in ALL}
        over = len(cohort) if twist == "h over the senders" else everyone
        moved = {a: sum(m[a] - w[a] for m in models) / over for a in ALL}
        before = h
        h = combine(lambda h, d: h - alpha * d, h, moved)
        used = {"no h": zero, "the h before": before}.get(twist, h)
        w = combine(lambda m, u: m - u / (1.0 if twist == "h not over alpha" else alpha), mean, used)
        views = finetuned(problem, w, finetune_epochs, twist=twist)
        server = {"model": w, "h": h, "clients": np.array(float(everyone))}
        out.keep(server, {k: {"slope": g} for k, g in own.items()}, views)
    return out


CASES = {
    "feddyn": Case({"alpha": 0.6}),
    "feddyn/ft": Case({"alpha": 0.9, "finetune_epochs": 2}, CROSSED),
}

MISTAKES = [
    *mistakes(
        "feddyn",
        "one step less",
        "gradients forgotten",
        "no pull",
        "alpha instead of alpha/2",
        "norm instead of its square",
        "no pull in the first round",
        "linear term added",
        "no linear term",
        "weighted by rows",
        "h over the senders",
        "no h",
        "the h before",
        "h not over alpha",
        variants=BOTH,
    ),
    *mistakes("feddyn/ft", "no fine-tuning", variants=("momentum",), late=True),
    *mistakes(CASES, "no momentum", "no weight decay", variants=("momentum",)),
]
