"""pFedMe: theta by K steps on f + lam/2 |theta - w_i|^2 for each minibatch; w_i towards theta; w towards their mean."""

from golden.common import ALL, BOTH, CROSSED, Case, Outcome, mean, mistakes
from golden.minibatch import blend, gradient, logits, step, train


def pfedme_round(problem, k, lists, w, lam, inner_steps, inner_lr, inner_momentum, inner_start, twist, theta=None):
    received, theta, speed = w, w if theta is None else theta, {}
    momentum = {"momentum": problem.momentum, "no inner momentum": 0.0}.get(twist, inner_momentum)
    for t, rows in enumerate(lists):
        if (inner_start == "w") != (twist == "other start"):
            theta, speed = w, speed if twist == "momentum outlives theta" else {}
        speed = {} if twist == "momentum forgotten" else speed
        for s in range(inner_steps - (twist == "one inner step less")):
            if twist == "a new batch for each inner step":
                rows = lists[(t + s) % len(lists)]
            g = gradient(theta, problem.x[k][rows], problem.y[k][rows])
            anchor = {"tied to the received model": received, "tied to itself": theta}.get(twist, w)
            strength = lam / 2 if twist == "lambda over two" else lam
            decay = 0.0 if twist == "no weight decay" else problem.decay
            pull = {name: g[name] + strength * (theta[name] - anchor[name]) + decay * theta[name] for name in g}
            speed = {name: momentum * speed.get(name, 0.0) + pull[name] for name in g}
            theta = step(theta, speed, problem.lr if twist == "inner steps at the outer rate" else inner_lr)
        share = problem.lr * (1.0 if twist == "no lambda in the outer step" else lam)
        w = blend(share, theta, w)
        if twist == "weight decay of w":
            w = {name: leaf * (1.0 - problem.lr * problem.decay) for name, leaf in w.items()}
    return w, theta


def whole_round(problem, k, lists, w, lam, inner_lr, twist):
    """theta by the configured optimiser on f + lam/2 |theta - w|^2, then one step of w_i."""

    def tied(theta, x, y):
        g = gradient(theta, x, y)
        return {name: g[name] + (0.0 if twist == "not tied" else lam) * (theta[name] - w[name]) for name in g}

    theta = train(problem, k, lists, w, ALL, tied, rate=problem.lr if twist == "theta at eta" else inner_lr)
    return blend(1.0 if twist == "w_i is theta" else problem.lr * lam, theta, w), theta


def pfedme(
    problem,
    batches,
    lam=15.0,
    inner_steps=5,
    inner_lr=0.05,
    inner_momentum=0.0,
    inner_over="minibatch",
    personal="theta",
    beta=1.0,
    inner_start="theta",
    twist="",
):
    out, own, w = Outcome(), {}, problem.start

    def one(problem, k, lists, w, rate, twist, old=None):
        if inner_over == "round":
            new, theta = whole_round(problem, k, lists, w, lam, rate, twist)
        else:
            settings = lam, inner_steps, rate, inner_momentum, inner_start
            new, theta = pfedme_round(problem, k, lists, w, *settings, twist, old)
        return new, new if (personal == "w") != (twist == "the other personal model") else theta

    for round, (now, cohort) in enumerate(problem.rounds(), 1):
        parts, received, inner_now = [], w, inner_lr * now.lr / problem.lr
        for k in cohort:
            old = own.get(k) if twist == "theta lives on" else None
            new, own[k] = one(now, k, batches(round, k, 1), w, inner_now, twist, old)
            parts.append(own[k] if twist == "sends theta" else new)
        w = blend(1.0 if twist == "no beta" else beta, mean(problem, cohort, parts, twist), received)
        views = []
        for k, x in enumerate(problem.x_test):
            theta = own.get(k, w)
            if k not in own and twist != "unseen unfitted":
                start = problem.start if twist == "unseen starts at the first model" else w
                theta = one(problem, k, batches(None, k, 1), start, inner_lr, "")[1]
            shown = {"w_i is shown as global": parts[cohort.index(k)] if k in cohort else w}.get(twist, w)
            views.append({"personal": logits(theta, x), "global": logits(shown, x)})
        out.keep({"model": w}, {k: {"personal": theta} for k, theta in own.items()}, views)
    return out


CASES = {
    "pfedme": Case({"lam": 1.5, "inner_steps": 3, "inner_lr": 0.3}),
    "pfedme/w": Case({"lam": 1.2, "inner_steps": 2, "inner_lr": 0.25, "beta": 1.4, "inner_start": "w"}, CROSSED),
    "pfedme/round": Case({"lam": 1.5, "inner_lr": 0.35, "inner_over": "round"}, CROSSED),
    "pfedme/keeps w": Case({"lam": 1.5, "inner_steps": 2, "inner_lr": 0.3, "personal": "w"}, CROSSED),
    "pfedme/heavy": Case({"lam": 1.5, "inner_steps": 3, "inner_lr": 0.2, "inner_momentum": 0.6}, CROSSED),
    "pfedme/heavy w": Case(
        {"lam": 1.2, "inner_steps": 3, "inner_lr": 0.2, "inner_momentum": 0.6, "inner_start": "w"}, CROSSED
    ),
}

MISTAKES = [
    *mistakes(
        "pfedme",
        "other weighting",
        "other start",
        "one inner step less",
        "tied to the received model",
        "tied to itself",
        "lambda over two",
        "inner steps at the outer rate",
        "no lambda in the outer step",
        "theta lives on",
        "the other personal model",
        "sends theta",
        variants=BOTH,
    ),
    *mistakes("pfedme", "unseen unfitted", "unseen starts at the first model", variants=BOTH, late=True),
    *mistakes("pfedme/w", "other start", "no beta", variants=("momentum",)),
    *mistakes("pfedme", "w_i is shown as global", variants=BOTH, late=True),
    *mistakes("pfedme/heavy", "no inner momentum", "momentum forgotten", "momentum", variants=("momentum",)),
    *mistakes("pfedme/round", "not tied", "theta at eta", "w_i is theta", variants=("momentum",)),
    *mistakes("pfedme/keeps w", "the other personal model", variants=("momentum",)),
    *mistakes("pfedme/heavy w", "momentum outlives theta", variants=("momentum",)),
    *mistakes("pfedme", "momentum", "no weight decay", "weight decay of w", variants=("momentum",)),
    *mistakes("pfedme", "a new batch for each inner step", variants=("momentum",), batches="small"),
]
