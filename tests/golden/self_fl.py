"""Self-FL: starts, steps and weights from the variances of what clients sent, here by two passes over all of it."""

import numpy as np

from golden.common import ALL, CROSSED, Case, Outcome, descend, logits, mean, mistakes, own_slope, vector

COHORTS = [[0, 1, 2], [0, 1], [1, 2, 0], [0], [2, 1, 0], [1, 0]]  # client 3 never takes part, and client 4 is new


def self_fl(
    problem,
    max_steps,
    default_steps,
    steps_rule="mean",
    own_start=True,
    own_weight=True,
    variance="scatter",
    warm_rounds=0,
    twist="",
):
    population = problem.population
    zero = np.zeros(population)
    server = {"model": problem.start, "sigma": zero, "known": zero, "sigma0": np.zeros(()), "round": np.zeros(())}
    out, theta, past = Outcome(), {}, {k: [] for k in range(population)}

    def scatter(values):
        rows = np.stack([vector(p) for p in values])
        total = ((rows - rows.mean(axis=0)) ** 2).sum()
        other = twist == "other variance"
        return total / max(len(rows) - 1, 1) if (variance == "n-1") != other else total

    def sigma_of(k):
        last = vector(theta.get(k, problem.start))
        least = 1e-12 * (1.0 + last @ last / len(last))
        return max(scatter(past[k]) if past[k] else 0.0, least)

    for round, (now, cohort) in enumerate(problem.rounds(), 1):
        warm, ups, logged = round <= warm_rounds, {}, {}
        sigma0, sigma, known = server["sigma0"], server["sigma"], server["known"] > 0
        everyone = [1.0 / (sigma0 + sigma[k]) if known[k] else None for k in range(population)]
        heard = [w for w in everyone if w is not None]
        if twist == "only those heard of" or not heard:
            total = sum(heard)
        else:
            total = sum(np.mean(heard) if w is None else w for w in everyone)
        for k in cohort:
            start, steps = server["model"], default_steps
            if len(past[k]) >= 2 and not warm:
                s = sigma_of(k)
                w = 1.0 / (sigma0 + s)
                others = max(total - w, 0.0)
                if own_start and twist != "own part stays":
                    factor = min(w / others, 1.0) if others > 0 else 0.0
                    start = {n: g - factor * (theta[k][n] - g) for n, g in start.items()}
                if steps_rule != "fixed":
                    rows = len(problem.y[k]) if (steps_rule == "mean") != (twist == "other steps rule") else 1
                    h = now.lr / (rows * s)
                    a = others / (1.0 / s + others)
                    wanted = np.log(a) / np.log(1.0 - h) if a > 0 and h < 1 else (1 if h >= 1 else max_steps)
                    steps = int(np.round(np.clip(wanted, 1, max_steps)))
            before = sigma_of(k)
            theta[k] = descend(now, own_slope(problem, k), start, steps)
            if not warm or twist == "warm rounds count":
                past[k] = [*past[k], theta[k]]
            after = before if twist == "reports the variance from before" else sigma_of(k)
            ups[k] = {"theta": theta[k], "sigma": np.array(after), "known": np.array(float(len(past[k]) >= 2))}
            logged[k] = {"steps": steps, "sigma": after}
        new0 = np.array(scatter([theta[k] for k in cohort])) if len(cohort) > 1 else sigma0
        sigma, known = sigma.copy(), server["known"].copy()
        for k in cohort:
            sigma[k], known[k] = ups[k]["sigma"], ups[k]["known"]
        heard = np.sort(sigma[known > 0])
        typical = heard[(len(heard) - 1) // 2] if len(heard) else 1.0
        with_old = sigma0 if twist == "old variance between clients" else new0
        weights = [1.0 / (with_old + (ups[k]["sigma"] if ups[k]["known"] else typical)) for k in cohort]
        if not own_weight or warm or twist == "rows for weights":
            hat = mean(problem, cohort, [theta[k] for k in cohort])
        else:
            hat = {n: sum(w * theta[k][n] for w, k in zip(weights, cohort, strict=True)) / sum(weights) for n in ALL}
        whole = twist == "no smoothing" or (warm and twist != "smooths in warm rounds")
        share = 1.0 if whole else len(cohort) / population
        server = {
            "model": {n: (1.0 - share) * server["model"][n] + share * hat[n] for n in ALL},
            "sigma": sigma,
            "known": known,
            "sigma0": new0,
            "round": np.array(float(round)),
        }
        views, states = [], {}
        for k, x in enumerate(problem.x_test):
            if k in theta:
                own = theta[k]
            else:
                fit = 0 if twist == "unseen untrained" else default_steps
                own = descend(problem, own_slope(problem, k), server["model"], fit)
            views.append({"personal": logits(own, x), "global": logits(server["model"], x)})
        for k in theta:
            nothing = {n: np.zeros_like(v) for n, v in problem.start.items()}
            centre = {n: np.mean([p[n] for p in past[k]], axis=0) for n in ALL} if past[k] else nothing
            m2 = sum(((vector(p) - vector(centre)) ** 2).sum() for p in past[k]) if past[k] else 0.0
            history = {"mean": centre, "m2": np.array(m2), "count": np.array(float(len(past[k])))}
            states[k] = {"theta": theta[k], "history": history}
        out.keep(server, states, views, ups, logged)
    return out


def case(lr=0.1, **fields):
    steps = {"max_steps": 12, "default_steps": 5}
    return Case(steps | fields, lr=lr, cohorts=COHORTS, tolerance=1e-8)


CASES = {
    "self_fl": case(),
    "self_fl/sum": case(0.4, steps_rule="sum"),
    "self_fl/n-1": case(variance="n-1"),
    "self_fl/start alone": case(steps_rule="fixed", own_weight=False),
    "self_fl/steps alone": case(own_start=False, own_weight=False),
    "self_fl/weights alone": case(own_start=False, steps_rule="fixed"),
    "self_fl/warm": case(warm_rounds=2),
    # Client 3 comes when the others have a variance, of which it weighs the median; it takes more steps than they may.
    "self_fl/late": Case(
        {"max_steps": 4, "default_steps": 6}, CROSSED, lr=0.1, cohorts=[[0, 1, 2], [2, 1, 0], [0, 3, 1]], tolerance=1e-8
    ),
}

VARIANTS = ("momentum",)
MISTAKES = [
    *mistakes(
        "self_fl",
        "only those heard of",
        "own part stays",
        "other steps rule",
        "reports the variance from before",
        "other variance",
        "old variance between clients",
        "rows for weights",
        "no smoothing",
        variants=VARIANTS,
    ),
    *mistakes("self_fl", "unseen untrained", variants=VARIANTS, late=True),
    *mistakes("self_fl/start alone", "own part stays", variants=VARIANTS),
    *mistakes("self_fl/steps alone", "other steps rule", variants=VARIANTS),
    *mistakes("self_fl/n-1", "other variance", variants=VARIANTS),
    *mistakes("self_fl/weights alone", "old variance between clients", "rows for weights", variants=VARIANTS),
    *mistakes("self_fl/warm", "warm rounds count", "smooths in warm rounds", variants=VARIANTS),
]
