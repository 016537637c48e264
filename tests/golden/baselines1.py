"""APFL, pFedMe, Per-FedAvg, FedRoD, FedBABU and FedBN once more, in NumPy alone, gradients derived by hand.

The model is ``reference``'s, ``W2 tanh(W1 x + b1) + b2``; FedBN's has a group norm before the tanh. ``batches(round, k,
group)`` gives the rows of each minibatch of client k's main pass, in order, their number a multiple of ``group``; a
round of None is a pass before prediction. A ``twist`` replaces one term by a plausible mistake.
"""

from dataclasses import dataclass, replace

import numpy as np

from golden.reference import BODY, HEAD, mean, some

ALL = BODY + HEAD
NORM = ("norm.weight", "norm.bias")


@dataclass
class Outcome:
    """By round: the server, the states of those who took part, and by client logits of its test rows by view."""

    server: list
    states: list
    views: list

    def keep(self, server, states, views):
        self.server.append(server)
        self.states.append(dict(states))
        self.views.append(views)


# --- the model, for complex parameters too --------------------------------------------------------------------


def features(p, x):
    return np.tanh(x @ p["body.weight"].T + p["body.bias"])


def classify(p, z):
    return z @ p["head.weight"].T + p["head.bias"]


def logits(p, x):
    return classify(p, features(p, x))


def softmax(scores):
    scores = np.exp(scores - scores.real.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def error(scores, y):
    """Gradient of the mean cross entropy with respect to the logits."""
    return (softmax(scores) - np.eye(scores.shape[1])[y]) / len(y)


def head_gradient(z, e):
    return {"head.weight": e.T @ z, "head.bias": e.sum(axis=0)}


def backward(p, x, e):
    """From the gradient with respect to the logits to that of all four leaves."""
    z = features(p, x)
    back = (e @ p["head.weight"]) * (1.0 - z * z)
    return {"body.weight": back.T @ x, "body.bias": back.sum(axis=0)} | head_gradient(z, e)


def gradient(p, x, y):
    return backward(p, x, error(logits(p, x), y))


def blend(share, a, b):
    """share a + (1 - share) b."""
    return {name: share * a[name] + (1.0 - share) * b[name] for name in a}


def step(p, g, rate):
    return p | {name: p[name] - rate * g[name] for name in g}


def sgd(problem, p, g, velocity):
    """One step of the configured optimiser on the leaves in ``g``; ``velocity`` is updated in place."""
    for name in g:
        velocity[name] = problem.momentum * velocity.get(name, 0.0) + g[name] + problem.decay * p[name]
    return step(p, {name: velocity[name] for name in g}, problem.lr)


def full(problem):
    """Minibatches that hold all rows."""
    return lambda round, k, group: [np.arange(len(problem.y[k]))] * (-(-problem.epochs // group) * group)


# --- APFL -----------------------------------------------------------------------------------------------------


def mixture_slope(how, a, v, w, x, y, twist=""):
    """Of the mixture's loss: gradients with respect to v, w and alpha."""
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
    if twist == "no factor alpha":
        gv = {name: leaf / a for name, leaf in gv.items()}
    return gv, gw, ga


def apfl_round(problem, k, lists, w, v, a, adaptive, how, twist):
    speed_w, speed_v, used, moved = {}, {}, a, a
    for t, rows in enumerate(lists):
        x, y = problem.x[k][rows], problem.y[k][rows]
        gw = gradient(w, x, y)
        if t == 0 and adaptive and twist != "alpha stays":
            moved = a - problem.lr * mixture_slope(how, a, v, w, x, y, twist)[2]
            moved = moved if twist == "alpha not projected" else min(max(moved, 0.0), 1.0)
        used = moved if t > 0 or twist == "alpha counts at once" else a
        before, after = w, sgd(problem, w, gw, speed_w)
        gv, leak, _ = mixture_slope(how, used, v, after if twist == "mixes with the new w" else w, x, y, twist)
        if twist == "the mixture trains w too":
            speed_w = {name: s + leak[name] for name, s in speed_w.items()}
            after = step(before, speed_w, problem.lr)
        w, v = after, sgd(problem, v, gv, speed_v)
        if twist == "alpha at every step" and adaptive and t + 1 < len(lists):
            moved = min(max(moved - problem.lr * mixture_slope(how, moved, v, w, x, y)[2], 0.0), 1.0)
    return w, v, moved


def apfl(problem, batches, alpha=0.5, adaptive=False, mix="params", twist=""):
    """FedAvg for w; for each client alpha v + (1 - alpha) w, in which v is trained."""
    out, own, w = Outcome([], [], []), {}, problem.start
    for round, cohort in enumerate(problem.cohorts, 1):
        parts = []
        for k in cohort:
            v, a = own.get(k, (problem.start, alpha))
            v = w if twist == "v starts at the received model" else v
            a = alpha if twist == "alpha not kept" else a
            new, v, a = apfl_round(problem, k, batches(round, k, 1), w, v, a, adaptive, mix, twist)
            own[k] = v, a
            parts.append(v if twist == "sends the own model" else new)
        w, views = mean(problem, cohort, parts, twist), []
        for k, x in enumerate(problem.x_test):
            v, a, there = *own.get(k, (w, alpha)), w
            if k not in own and twist != "unseen unfitted":
                start = problem.start if twist == "unseen starts at the first model" else w
                trained, v, a = apfl_round(problem, k, batches(None, k, 1), w, start, alpha, adaptive, mix, "")
                there = trained if twist == "unseen mixes with what it trained" else w
            if twist == "predicts with its own w" and k in cohort:
                there = parts[cohort.index(k)]
            mixed = (
                a * logits(v, x) + (1.0 - a) * logits(there, x) if mix == "logits" else logits(blend(a, v, there), x)
            )
            views.append({"personal": logits(v, x) if twist == "predicts with v alone" else mixed})
        out.keep({"model": w}, {k: {"personal": v, "alpha": np.float64(a)} for k, (v, a) in own.items()}, views)
    return out


# --- pFedMe ---------------------------------------------------------------------------------------------------


def pfedme_round(problem, k, lists, w, lam, inner_steps, inner_lr, inner_start, twist, theta=None):
    received, theta, speed = w, w if theta is None else theta, {}
    for t, rows in enumerate(lists):
        theta = w if (inner_start == "w") != (twist == "other start") else theta
        for s in range(inner_steps - (twist == "one inner step less")):
            if twist == "a new batch for each inner step":
                rows = lists[(t + s) % len(lists)]
            g = gradient(theta, problem.x[k][rows], problem.y[k][rows])
            anchor = {"tied to the received model": received, "tied to itself": theta}.get(twist, w)
            strength = lam / 2 if twist == "lambda over two" else lam
            decay = 0.0 if twist == "no weight decay" else problem.decay
            pull = {name: g[name] + strength * (theta[name] - anchor[name]) + decay * theta[name] for name in g}
            if twist == "momentum":
                speed = {name: problem.momentum * speed.get(name, 0.0) + pull[name] for name in g}
                pull = speed
            theta = step(theta, pull, problem.lr if twist == "inner steps at the outer rate" else inner_lr)
        share = problem.lr * (1.0 if twist == "no lambda in the outer step" else lam)
        w = blend(share, theta, w)
        if twist == "weight decay of w":
            w = {name: leaf * (1.0 - problem.lr * problem.decay) for name, leaf in w.items()}
    return w, theta


def pfedme(problem, batches, lam=15.0, inner_steps=5, inner_lr=0.05, beta=1.0, inner_start="theta", twist=""):
    """theta: K steps on f + lam/2 |theta - w_i|^2 a minibatch; w_i towards theta; w towards the mean of w_i."""
    out, own, w = Outcome([], [], []), {}, problem.start
    settings = lam, inner_steps, inner_lr, inner_start
    for round, cohort in enumerate(problem.cohorts, 1):
        parts, received = [], w
        for k in cohort:
            old = own.get(k) if twist == "theta lives on" else None
            new, own[k] = pfedme_round(problem, k, batches(round, k, 1), w, *settings, twist, old)
            own[k] = new if twist == "the personal model is w_i" else own[k]
            parts.append(own[k] if twist == "sends theta" else new)
        w = blend(1.0 if twist == "no beta" else beta, mean(problem, cohort, parts, twist), received)
        views = []
        for k, x in enumerate(problem.x_test):
            theta = own.get(k, w)
            if k not in own and twist != "unseen unfitted":
                start = problem.start if twist == "unseen starts at the first model" else w
                theta = pfedme_round(problem, k, batches(None, k, 1), start, *settings, "")[1]
            views.append({"personal": logits(theta, x)})
        out.keep({"model": w}, {k: {"personal": theta} for k, theta in own.items()}, views)
    return out


# --- Per-FedAvg -----------------------------------------------------------------------------------------------


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
    """Steps along (I - alpha H) grad f(w - alpha grad f(w)); one plain step of rate alpha before prediction."""
    out, w, seen = Outcome([], [], []), problem.start, set()
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

    for round, cohort in enumerate(problem.cohorts, 1):
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
                p = step(base, {n: v[n] + decay * p[n] for n in v}, problem.lr)
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


# --- FedRoD ---------------------------------------------------------------------------------------------------


def personal_gradient(p, head, x, y, prior=0.0):
    """Of the cross entropy of both heads' logits with respect to the personal head; and the logits' error."""
    z = features(p, x)
    e = error(classify(p, z) + classify(head, z) + prior, y)
    return head_gradient(z, e), e


def fedrod(problem, batches, heads="linear", gamma=1.0, head_start="zero", new_head_epochs=5, refit_epochs=0, twist=""):
    """Generic head under balanced softmax; personal head on fixed features and generic logits."""
    out, classes = Outcome([], [], []), len(problem.start["head.bias"])
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

    for round, cohort in enumerate(problem.cohorts, 1):
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
                after = sgd(problem, p, g, speed)
                if twist == "personal step after the generic one":
                    own_g = personal_gradient(after, mine, x, y)[0]
                if twist == "personal head learns alone":
                    own_g = head_gradient(features(p, x), error(classify(mine, features(p, x)), y))
                if heads == "linear":
                    head = sgd(problem, head, own_g, head_speed)
                else:
                    outer = {name: own_g[name][..., None] * shares(k) for name in HEAD}
                    maps = sgd(problem, maps, outer, hyper_speed)
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


# --- FedBABU --------------------------------------------------------------------------------------------------


def train(problem, k, lists, p, trained, slope=gradient, rate=None):
    """Minibatch SGD on the leaves ``trained``."""
    speed, problem = {}, problem if rate is None else replace(problem, lr=rate)
    for rows in lists:
        p = sgd(problem, p, some(slope(p, problem.x[k][rows], problem.y[k][rows]), trained), speed)
    return p


def fedbabu(problem, batches, finetune_epochs=5, finetune_part="all", finetune_lr=0.0, twist=""):
    """The body under a fixed head; copies are fine-tuned before prediction."""
    out, body, head, seen = Outcome([], [], []), some(problem.start, BODY), some(problem.start, HEAD), set()
    for round, cohort in enumerate(problem.cohorts, 1):
        parts = []
        for k in cohort:
            lists = batches(round, k, 1)
            p = train(problem, k, lists, body | head, ALL if twist == "head trained" else BODY)
            parts.append(p)
            if twist == "weight decay of the head":
                shrunk = (1.0 - problem.lr * problem.decay) ** len(lists)
                parts[-1] = p | {name: p[name] * shrunk for name in HEAD}
        total = mean(problem, cohort, parts, twist)
        body, head = some(total, BODY), some(total, HEAD)
        seen |= set(cohort)
        views, tuned = [], {}
        for k, x in enumerate(problem.x_test):
            p = body | head
            if twist == "fine-tunes its own body" and k in cohort:
                p = parts[cohort.index(k)]
            part = HEAD if (finetune_part == "head") != (twist == "fine-tunes the other part") else ALL
            rate = problem.lr if twist == "fine-tunes at the training rate" or not finetune_lr else finetune_lr
            lists = [np.arange(len(problem.y[k]))] * (0 if twist == "no fine-tuning" else finetune_epochs)
            lists = [] if twist == "unseen not fine-tuned" and k not in seen else lists
            tuned[k] = train(problem, k, lists, p, part, rate=rate)
            views.append({"personal": logits(tuned[k], x), "global": logits(body | head, x)})
        if twist == "the fine-tuned body is sent":
            body = mean(problem, cohort, [some(tuned[k], BODY) for k in cohort])
        out.keep({"body": body}, {k: {"head": head} for k in seen}, views)
    return out


# --- FedBN ----------------------------------------------------------------------------------------------------


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
    """All leaves are trained; the norm's stay, the others are averaged."""
    out, own, model = Outcome([], [], []), {}, some(problem.start, ALL)
    first = some(problem.start, NORM)
    for round, cohort in enumerate(problem.cohorts, 1):
        parts = []
        for k in cohort:
            mine = first if twist == "norms not kept" else own.get(k, first)
            trained = ALL if twist == "norms stand still" else ALL + NORM
            p = train(problem, k, batches(round, k, 1), model | mine, trained, normed_gradient)
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
