"""FedPAC, FedProto, MOON, FedCP and GPFL once more, in NumPy alone.

Model, optimiser and twists are those of ``reference``. Gradients are complex-step derivatives of the losses as they are
written in the papers: exact to rounding, and derived by nobody. Random draws (the server's first state, the noise of
FedCP's gate) are given.
"""

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from golden.reference import BODY, HEAD, descend, mean, some, train

ALL = BODY + HEAD
TINY = 1e-30
UNKNOWN = -1e30


@dataclass
class Outcome:
    """After every round: the server, the states of those who took part, and everyone's test logits by view."""

    server: list
    states: list
    views: list


# --- functions that also take complex numbers, which carry a derivative, and leaves with a leading axis ---------


def slope(loss, p, names):
    """The gradient of ``loss(p)`` with respect to some leaves: each entry of a leaf is moved in a copy of its own."""
    out = {}
    for name in names:
        steps = TINY * 1j * np.eye(p[name].size).reshape(-1, *p[name].shape)
        moved = np.broadcast_to(loss(p | {name: p[name] + steps}), len(steps))
        out[name] = moved.imag.reshape(p[name].shape) / TINY
    return out


def fit(problem, loss, p, names, steps, twist=""):
    """Steps on ``loss(p, t)``, t counting them."""
    velocity = {}
    for t in range(steps):
        p = descend(problem, lambda p, t=t: slope(lambda q: loss(q, t), p, names), p, 1, names, velocity, twist)
    return p


def relu(x):
    return np.where(x.real > 0, x, 0.0)


def turned(matrix):
    return np.swapaxes(matrix, -1, -2)


def features(p, x):
    return np.tanh(x @ turned(p["body.weight"]) + p["body.bias"][..., None, :])


def classify(p, z):
    return z @ turned(p["head.weight"]) + p["head.bias"][..., None, :]


def cross_entropy(logits, y):
    shifted = logits - logits.real.max(axis=-1, keepdims=True)
    return np.mean(np.log(np.exp(shifted).sum(axis=-1)) - shifted[..., np.arange(len(y)), y], axis=-1)


def unit(v):
    """Vectors of length one along the last axis; 0 stays 0."""
    square = (v * v).sum(axis=-1, keepdims=True)
    return v / np.sqrt(np.where(square.real > 1e-24, square, 1e-24))


def layer_norm(x, p, name):
    rest = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt((rest * rest).mean(axis=-1, keepdims=True) + 1e-5)
    return rest / spread * p[f"{name}/scale"][..., None, :] + p[f"{name}/shift"][..., None, :]


def class_means(z, y, classes):
    """Means (0 for an absent class) and rows of each class."""
    count = np.array([np.sum(y == c) for c in range(classes)], dtype=float)
    zero = np.zeros(z.shape[1])
    return np.stack([z[y == c].mean(axis=0) if count[c] else zero for c in range(classes)]), count


def nested(p, name):
    """The leaves below ``name/`` as the library nests them."""
    below = {n.partition("/")[2]: v for n, v in p.items() if n.startswith(name + "/")}
    tops = {n.partition("/")[0] for n in below}
    return {n: below[n] if n in below else nested(below, n) for n in tops}


def flat(nest, name):
    """The inverse."""
    out = {}
    for key, value in nest.items():
        out |= flat(value, f"{name}/{key}") if isinstance(value, dict) else {f"{name}/{key}": value}
    return out


# --- FedPAC ---------------------------------------------------------------------------------------------------


def simplex_minimum(q):
    """argmin a' q a over the simplex: the best of the stationary points of all faces."""
    best, value = None, np.inf
    for size in range(1, len(q) + 1):
        for face in map(list, combinations(range(len(q)), size)):
            part = np.linalg.solve(q[np.ix_(face, face)], np.ones(size))
            a = np.zeros(len(q))
            a[face] = part / part.sum()
            if (a >= 0).all() and a @ q @ a < value:
                best, value = a, a @ q @ a
    return best


def mixing_weights(variance, h, smallest, twist=""):
    """Row i: argmin sum_j a_j^2 V_j + |h_i - sum_j a_j h_j|^2; small weights dropped."""
    m = len(variance)
    if twist == "all heads mixed alike":
        return np.full((m, m), 1.0 / m)
    if twist == "heads not mixed":
        return np.eye(m)
    centre = h.mean(axis=0)
    ridge = 1e-8 * np.mean([v + np.sum((one - centre) ** 2) for v, one in zip(variance, h, strict=True)])
    rows = []
    for i in range(m):
        bias = np.array([[np.sum((h[i] - h[j]) * (h[i] - h[k])) for k in range(m)] for j in range(m)])
        weight = 0.0 if twist == "no variance" else 1.0
        a = simplex_minimum(bias + np.diag(weight * variance) + ridge * np.eye(m))
        if twist != "small weights stay":
            a = np.where(a > smallest, a, 0.0)
        rows.append(a if twist == "not normalised again" else a / a.sum())
    return np.stack(rows)


def fedpac(problem, given, lam, head_epochs, head_lr, smallest, new_epochs, new_part="head", twist=""):
    out, population = Outcome([], [], []), problem.population
    body, classes = some(problem.start, BODY), len(problem.start["head.bias"])
    heads = {k: some(problem.start, HEAD) for k in range(population)}
    weight = np.zeros(population)
    prototype, rows = np.zeros((classes, len(body["body.bias"]))), np.zeros(classes)
    for cohort in problem.cohorts:
        sent = []
        for k in cohort:
            x, y = problem.x[k], problem.y[k]
            z = features(body, x)
            own, count = class_means(z, y, classes)
            head_problem = problem if twist == "head at the body's rate" else replace(problem, lr=head_lr)
            fitted = train(head_problem, k, body | heads[k], head_epochs, HEAD)
            head = heads[k] if twist == "body under the old head" else some(fitted, HEAD)
            target = np.where(rows[:, None] > 0, prototype, own)
            pulled = np.ones(classes) if rows.sum() > 0 or twist == "pulled in the first round" else np.zeros(classes)
            if twist == "no pull to own prototypes":
                pulled = (rows > 0).astype(float)

            def loss(p, t, x=x, y=y, head=head, target=target, pulled=pulled):
                z = features(p, x)
                pull = np.mean((z - target[y]) ** 2 * pulled[y][:, None], axis=(-2, -1))
                pull = {"no pull": 0.0, "pull summed over features": pull * z.shape[-1]}.get(twist, pull)
                return cross_entropy(classify(head, z), y) + lam * pull

            new = some(fit(problem, loss, body, BODY, problem.epochs), BODY)
            if twist == "statistics after training":
                z = features(new, x)
                own, count = class_means(z, y, classes)
            share, n = count / count.sum(), len(y)
            squares = [np.mean(np.sum(z[y == c] ** 2, axis=1)) if count[c] else 0.0 for c in range(classes)]
            v = sum(p * s for p, s in zip(share, squares, strict=True)) - np.sum(share**2 * np.sum(own**2, axis=1))
            v = v if twist == "variance of a row" else v / n
            h = own if twist == "h without class shares" else share[:, None] * own
            after = own if twist == "prototypes before training" else class_means(features(new, x), y, classes)[0]
            sent.append((new, some(fitted, HEAD), after, count, v, h.ravel()))
        bodies, fitted, after, counts, v, h = (list(part) for part in zip(*sent, strict=True))
        body = mean(problem, cohort, bodies, twist)
        alpha = mixing_weights(np.array(v), np.stack(h), smallest, twist)
        for i, k in enumerate(cohort):
            heads[k] = {name: sum(a * f[name] for a, f in zip(alpha[i], fitted, strict=True)) for name in HEAD}
            weight[k] = len(problem.y[k]) if problem.weighting == "samples" else 1.0
        votes = np.stack(counts) > 0 if twist == "owners alike" else np.stack(counts)
        for c in np.flatnonzero(votes.sum(axis=0)):
            prototype[c] = sum(w * p[c] for w, p in zip(votes[:, c], after, strict=True)) / votes[:, c].sum()
            rows[c] = np.stack(counts)[:, c].sum()
        average = {n: sum(w * heads[k][n] for k, w in enumerate(weight)) / weight.sum() for n in HEAD}
        views = []
        for k in range(len(problem.x)):
            head = heads[k] if k < population else average
            if twist == "new client starts at the first head" and k >= population:
                head = some(problem.start, HEAD)
            p = body | head
            if not (k < population and weight[k]) and twist != "unseen unfitted":
                names = HEAD if (new_part == "head") != (twist == "unseen fits the other part") else ALL
                p = train(problem, k, p, new_epochs, names)
            views.append({"personal": classify(p, features(p, problem.x_test[k]))})
        stacked = {n: np.stack([heads[k][n] for k in range(population)]) for n in HEAD}
        server = {"body": body, "prototype": prototype.copy(), "rows": rows.copy()}
        out.server.append(server | {"heads": stacked, "weight": weight.copy()})
        out.states.append({k: {} for k in np.flatnonzero(weight)})
        out.views.append(views)
    return out


# --- FedProto -------------------------------------------------------------------------------------------------


def fedproto(problem, given, lam, pull="rows", average="uniform", twist=""):
    out, models = Outcome([], [], []), {}
    classes, d = problem.start["head.weight"].shape
    prototype, rows = np.zeros((classes, d)), np.zeros(classes)

    def local_pass(k):
        x, y = problem.x[k], problem.y[k]

        def loss(p, t):
            z = features(p, x)
            far = np.sum((z - prototype[y]) ** 2, axis=-1) * (rows[y] > 0 if twist != "pulled to nothing" else 1.0)
            term = np.mean(far, axis=-1) / (1.0 if twist == "pull summed over features" else d)
            if twist == "mean over known rows alone":
                term = term / max(np.mean(rows[y] > 0), 1e-9)
            if (pull == "means") != (twist == "other pull"):
                away = [z[..., y == c, :].mean(axis=-2) - prototype[c] for c in set(y) if rows[c] > 0]
                term = sum(np.sqrt(np.sum(a * a, axis=-1) + 1e-8) for a in away)
                term = term / max(len(away), 1) if twist == "mean over classes" else term
            term = 0.0 if twist == "no pull" else term
            return cross_entropy(classify(p, z), y) + lam * term

        start = problem.start if twist == "starts afresh each round" else models.get(k, problem.start)
        return fit(problem, loss, start, ALL, problem.epochs, twist)

    for cohort in problem.cohorts:
        trained, sent = {k: local_pass(k) for k in cohort}, []
        for k in cohort:
            p = models.get(k, problem.start) if twist == "prototypes before training" else trained[k]
            sent.append(class_means(features(p, problem.x[k]), problem.y[k], classes))
        models |= trained
        means, counts = (np.stack(part) for part in zip(*sent, strict=True))
        votes = counts if (average == "rows") != (twist == "other average") else (counts > 0).astype(float)
        votes = np.ones_like(votes) if twist == "absent classes vote" else votes
        for c in np.flatnonzero(counts.sum(axis=0)):
            prototype[c] = votes[:, c] @ means[:, c] / votes[:, c].sum()
            rows[c] = counts[:, c].sum()
        views = []
        for k in range(len(problem.x)):
            if k in models:
                p = models[k]
            else:
                p = problem.start if twist == "unseen unfitted" else local_pass(k)
            z = features(p, problem.x_test[k])
            near = -np.sum((z[:, None] - prototype) ** 2, axis=2)
            mine = np.array([c in problem.y[k] or twist == "own classes unheeded" for c in range(classes)])
            views.append(
                {
                    "personal": classify(p, z),
                    "prototype": np.where(rows > 0, near, UNKNOWN),
                    "own_prototype": np.where((rows > 0) & mine, near, UNKNOWN),
                }
            )
        out.server.append({"prototype": prototype.copy(), "rows": rows.copy()})
        out.states.append({k: {"model": p} for k, p in models.items()})
        out.views.append(views)
    return out


# --- MOON -----------------------------------------------------------------------------------------------------


def moon(problem, given, mu, tau, finetune_epochs=0, twist=""):
    out, w, previous = Outcome([], [], []), problem.start, {}
    for cohort in problem.cohorts:
        parts = []
        for k in cohort:
            x, y, received = problem.x[k], problem.y[k], w
            last = previous.get(k)
            if twist == "random model before the first":
                last = last or {n: np.cos(7.0 * v + 1.0) for n, v in problem.start.items()}
            last = problem.start if twist == "negative is the first model" and last else last

            def loss(p, t, x=x, y=y, received=received, last=last):
                z = features(p, x)
                plain = cross_entropy(classify(p, z), y)
                if last is None or twist == "no contrast":
                    return plain
                near = np.sum(unit(z) * unit(features(received, x)), axis=-1) / tau
                far = np.sum(unit(z) * unit(features(last, x)), axis=-1) / tau
                near, far = (far, near) if twist == "attracted to the past" else (near, far)
                both = np.exp(near) + np.exp(far) + (1.0 if twist == "one pair more" else 0.0)
                return plain - mu * np.mean(np.log(np.exp(near) / both), axis=-1)

            parts.append(fit(problem, loss, w, ALL, problem.epochs, twist))
        if twist != "keeps its first model":
            previous |= dict(zip(cohort, parts, strict=True))
        else:
            previous |= {k: p for k, p in zip(cohort, parts, strict=True) if k not in previous}
        w = mean(problem, cohort, parts, twist)
        if twist == "keeps the average":
            previous |= dict.fromkeys(cohort, w)
        everyone = range(len(problem.x))
        epochs = 0 if twist == "no fine-tuning" else finetune_epochs
        personal = [train(problem, k, w, epochs) if epochs else w for k in everyone]
        out.server.append({"model": w})
        out.states.append({k: {"previous": p, "seen": np.ones(())} for k, p in previous.items()})
        out.views.append([{"personal": classify(p, features(p, problem.x_test[k]))} for k, p in enumerate(personal)])
    return out


# --- FedCP ----------------------------------------------------------------------------------------------------


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


def fedcp(problem, given, lam, new_head_epochs, twist=""):
    """``given``: the server's first state, and ``noise(purpose, round, client, step)`` of the gate, (n, d)."""
    out, own = Outcome([], [], []), {}
    p = some(problem.start, BODY) | flat(given["server"]["gate"], "gate")
    shared = some(problem.start, HEAD)
    names = tuple(n for n in p if n.startswith("gate/"))

    def context(head):
        v = head["head.weight"].sum(axis=0)
        return v if twist == "context not normalised" else unit(v)

    for r, cohort in enumerate(problem.cohorts, 1):
        parts, received, last = [], p, shared
        for k in cohort:
            x, y, head = problem.x[k], problem.y[k], own.get(k, some(problem.start, HEAD))
            v, frozen = context(head), features(received, x)

            def loss(q, t, x=x, y=y, v=v, frozen=frozen, last=last, k=k, r=r):
                z = features(q, x)
                noise = 0.0 if twist == "no noise" else given["noise"]("train", r, k, t)
                other = q if twist == "no global head" else last
                tie = 0.0 if twist == "no tie" else discrepancy(z, frozen)
                tie = np.sqrt(tie + 1e-12) if twist == "root of the tie" else tie
                return cross_entropy(gated(q, q, other, z, v, noise, twist), y) + lam * tie

            trained = {"gate frozen": ALL}.get(twist, ALL + names)
            q = fit(problem, loss, p | head, trained, problem.epochs, twist)
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
                    return cross_entropy(gated(p, q, shared, z, v, given["noise"]("adapt", r, k, t)), y)

                head = fit(problem, loss, head, HEAD, new_head_epochs)
            z = features(p, problem.x_test[k])
            views.append({"personal": gated(p, head, shared, z, context(head), 0.0, twist)})
        out.server.append({"body": some(p, BODY), "head": shared, "gate": nested(p, "gate")})
        out.states.append({k: {"personal": h} for k, h in own.items()})
        out.views.append(views)
    return out


# --- GPFL -----------------------------------------------------------------------------------------------------


def valve(p, z, context, twist=""):
    def block(name):  # the context is a matrix of one row
        out = context[None] @ turned(p[f"{name}/weight"]) + p[f"{name}/bias"][..., None, :]
        return layer_norm(relu(out), p, name)

    gamma, beta = block("valve/gamma"), block("valve/beta")
    out = z * (gamma + (0.0 if twist == "scale without the one" else 1.0)) + (0.0 if twist == "no shift" else beta)
    return out if twist == "no rectifier" else relu(out)


def gpfl(problem, given, lam, decay, new_head_epochs, magnitude="batch", context="received", twist=""):
    out, heads, trained = Outcome([], [], []), {}, {}
    p = some(problem.start, BODY) | {"embedding": given["server"]["embedding"]}
    p |= flat(given["server"]["valve"], "valve")
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

    for cohort in problem.cohorts:
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

            q = fit(problem, loss, p | heads.get(k, some(problem.start, HEAD)), (*ALL, *added), problem.epochs, twist)
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
        out.server.append({"body": some(p, BODY), "embedding": p["embedding"], "valve": nested(p, "valve")})
        out.states.append({k: {"head": h, "trained": trained[k]} for k, h in heads.items()})
        out.views.append(views)
    return out
