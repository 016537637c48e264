"""pFedFDA, FedLDA, pFedVMP, FedPCE and Self-FL once more, in NumPy and SciPy alone, gradients derived by hand.

Model, optimiser and twists are those of ``reference``; FedPCE's model has a layer norm between body and tanh. Random
draws (the server's first state, folds) are given. A covariance is sent as its lower triangle.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

from golden.reference import BODY, HEAD, descend, gradient, logits, mean, some

ALL = BODY + HEAD


@dataclass
class Outcome:
    """By round: the server, and by client uploads, states, logged numbers, and logits of its test rows by view."""

    server: list
    uploads: list
    states: list
    logged: list
    views: list


def features(p, x):
    return np.tanh(x @ p["body.weight"].T + p["body.bias"])


def body_gradient(p, x, dz):
    """From the gradient with respect to the features to that of the body."""
    back = dz * (1.0 - features(p, x) ** 2)
    return {"body.weight": back.T @ x, "body.bias": back.sum(axis=0)}


def error(out, y):
    """Gradient of the mean cross entropy with respect to logits."""
    e = softmax(out, axis=1)
    e[np.arange(len(y)), y] -= 1.0
    return e / len(y)


# --- Gaussians ------------------------------------------------------------------------------------------------


def pack(cov):
    return np.concatenate([cov[i, : i + 1] for i in range(len(cov))])


def unpack(flat, d):
    low = np.zeros((d, d))
    low[np.tril_indices(d)] = flat
    return low + np.tril(low, -1).T


def log_prior(y, classes, smooth):
    share = np.array([np.mean(y == c) for c in range(classes)]) + smooth
    return np.log(share / share.sum())


def class_means(z, y, fallback):
    return np.stack([z[y == c].mean(axis=0) if (y == c).any() else row for c, row in enumerate(fallback)])


def covariance(z, y, centre, ridge, less=1):
    total = sum((np.outer(row - centre[c], row - centre[c]) for row, c in zip(z, y, strict=True)), np.zeros([1, 1]))
    return total / max(len(y) - less, 1) + ridge * np.eye(z.shape[1])


def shrink(cov, amount):
    return (1.0 - amount) * cov + amount * np.trace(cov) / len(cov) * np.eye(len(cov))


def lda(mu, cov, prior, amount):
    """Weights and bias of the classifier that Gaussians imply."""
    weight = mu @ np.linalg.inv(shrink(cov, amount))
    return weight, prior - 0.5 * np.einsum("cd,cd->c", mu, weight)


def repaired(cov, floor=1e-15):
    """Clip the eigenvalues of the correlation matrix, make its diagonal 1 again, give back the variances."""
    std = np.sqrt(np.clip(np.diag(cov), 0, None))
    safe = np.where(std > 0, std, 1.0)
    values, vectors = np.linalg.eigh(cov / np.outer(safe, safe))
    if (values > floor).all():
        return cov
    corr = vectors @ np.diag(np.maximum(values, floor)) @ vectors.T
    scale = np.sqrt(np.diag(corr))
    return corr / np.outer(scale, scale) * np.outer(std, std)


# --- the search for beta --------------------------------------------------------------------------------------


def validation_loss(folds, shared, z, y, prior, amount):
    """beta (means), beta (covariance) -> summed mean cross entropy of the folds; also for complex betas.

    ``folds`` are (means, covariance, held-out rows) each.
    """

    def at(by_mean, by_cov):
        total = 0.0
        for mu, cov, out in folds:
            if not out.any():
                continue
            mixed = by_mean * mu + (1.0 - by_mean) * shared[0]
            weight, bias = lda(mixed, by_cov * cov + (1.0 - by_cov) * shared[1], prior, amount)
            scores = z[out] @ weight.T + bias
            top = scores.real.max(axis=1, keepdims=True)
            lse = np.log(np.exp(scores - top).sum(axis=1)) + top[:, 0]
            total = total + (lse - scores[np.arange(out.sum()), y[out]]).mean()
        return total

    return at


def complex_slope(loss, beta, along, h=1e-30):
    """The derivative of an analytic function along a direction, exact to rounding."""
    return loss(beta[0] + 1j * h * along[0], beta[1] + 1j * h * along[1]).imag / h


def search(loss, two):
    """A grid, then bisection of the derivative within one step of the best point, and at last the line's zero.

    For two betas the best covariance beta for each mean beta of the grid; from the best pair four sweeps: along one,
    along the other, and up to 32 times on the way that both made together.
    """
    axis = np.linspace(0.0, 1.0, 11 if two else 21)

    def first_best(points):
        values = np.array([loss(*p) for p in points])
        return np.array(points[np.flatnonzero(values <= values.min() + 1e-12)[0]])

    def along(beta, way, back, ahead):
        for b, u in zip(beta, way, strict=True):
            if u:
                back, ahead = max(back, min(-b / u, (1 - b) / u)), min(ahead, max(-b / u, (1 - b) / u))
        left, right = (complex_slope(loss, beta + end * way, way) for end in (back, ahead))
        for _ in range(8):
            middle = (back + ahead) / 2
            slope = complex_slope(loss, beta + middle * way, way)
            if slope < 0:
                back, left = middle, slope
            else:
                ahead, right = middle, slope
        share = 0.0 if left >= 0 else 1.0 if right < 0 else left / (left - right)
        found = beta + (back + share * (ahead - back)) * way
        found = np.where(found < 1e-6, 0.0, np.where(found > 1 - 1e-6, 1.0, found))
        return found if loss(*found) < loss(*beta) - 1e-12 else beta

    if not two:
        return along(first_best([(a, a) for a in axis]), np.ones(2), -axis[1], axis[1])
    by_mean, by_cov = np.eye(2)
    beta = first_best([along(first_best([(a, b) for b in axis]), by_cov, -axis[1], axis[1]) for a in axis])
    for _ in range(4):
        before = beta
        for way in (by_mean, by_cov):
            beta = along(beta, way, -axis[1], axis[1])
        beta = along(beta, beta - before, 0.0, 32.0)
    return beta


# --- pFedFDA --------------------------------------------------------------------------------------------------


def pfedfda(problem, start, folds, betas="one", ridge=1.0, smooth=1e-4, amount=1e-4, few_rows=2, twist=""):
    """``start`` is the server's first state; ``folds(purpose, round, client)`` the rows held out, (k, n)."""
    out, server, d = Outcome([], [], [], [], []), start, start["mean"].shape[1]
    classes = len(start["mean"])
    smooth = 1e-9 if twist == "prior not smoothed" else smooth
    amount = 1e-12 if twist == "head not shrunk" else amount

    def statistics(body, k, shared, few, masks):
        z, y = features(body, problem.x[k]), problem.y[k]
        less = 0 if twist == "covariance over n" else 1
        here = 1e-4 if twist == "other ridge" else ridge
        own = class_means(z, y, shared[0])
        cov = covariance(z, y, own, here, less)
        if betas == "none":
            beta = np.ones(2)
        else:
            counts = np.bincount(y, minlength=classes)
            used = counts[y] > (0 if twist == "single rows are folded too" else 1)
            parts = []
            for mask in masks:
                rest = used & ~mask
                mu = class_means(z[rest], y[rest], shared[0])
                parts.append((mu, covariance(z[rest], y[rest], mu, here, less), used & mask))
            if all(held.any() for *_, held in parts):
                prior = log_prior(y, classes, smooth)
                beta = search(validation_loss(parts, shared, z, y, prior, amount), betas == "two")
            else:
                beta = np.zeros(2)
        own = np.where(np.bincount(y, minlength=classes)[:, None] > few, own, shared[0]) if few else own
        mix = 1.0 - beta if twist == "interpolates the other way" else beta
        mixed = mix[0] * own + (1 - mix[0]) * shared[0], mix[1] * cov + (1 - mix[1]) * shared[1]
        return mixed, {"beta_mean": beta[0], "beta_cov": beta[1]}

    def head(k, mu, cov):
        prior = np.zeros(classes) if twist == "no prior" else log_prior(problem.y[k], classes, smooth)
        return lda(mu, cov, prior, amount)

    for round, cohort in enumerate(problem.cohorts, 1):
        shared, ups, logged = (server["mean"], unpack(server["cov"], d)), {}, {}
        for k in cohort:
            x, y = problem.x[k], problem.y[k]
            weight, bias = head(k, *shared)

            def slope(p, x=x, y=y, weight=weight, bias=bias):
                return body_gradient(p, x, error(features(p, x) @ weight.T + bias, y) @ weight)

            body = descend(problem, slope, server["body"], problem.epochs, BODY)
            seen = server["body"] if twist == "statistics of the received body" else body
            few = few_rows if twist == "few rows in training" else 0
            (mu, cov), logged[k] = statistics(seen, k, shared, few, folds("train", round, k))
            ups[k] = {"body": body, "mean": mu, "cov": pack(cov)}
        server = averaged(problem, cohort, ups, twist)
        shared, views = (server["mean"], unpack(server["cov"], d)), []
        for k, x in enumerate(problem.x_test):
            few = 0 if twist == "every class its own mean at prediction" else few_rows
            (mu, cov), _ = statistics(server["body"], k, shared, few, folds("eval", round, k))
            weight, bias = head(k, *(shared if twist == "predicts with shared statistics" else (mu, cov)))
            views.append({"personal": features(server["body"], x) @ weight.T + bias})
        keep(out, server, ups, {k: {} for k in {*cohort, *(out.states[-1] if out.states else ())}}, logged, views)
    return out


def averaged(problem, cohort, ups, twist):
    """Body, means and packed covariance, weighted alike."""
    parts = [ups[k]["body"] | {"mean": ups[k]["mean"], "cov": ups[k]["cov"]} for k in cohort]
    total = mean(problem, cohort, parts, twist)
    return {"body": some(total, BODY), "mean": total["mean"], "cov": total["cov"]}


def keep(out, *values):
    for name, value in zip(("server", "uploads", "states", "logged", "views"), values, strict=True):
        getattr(out, name).append(value)


# --- FedLDA ---------------------------------------------------------------------------------------------------


def penalty(z, y, mu, centre, twist=""):
    """Sum of absolute off-diagonal entries of the rows' covariance over d, and its gradient."""
    n, d = z.shape
    if n < 2:
        return 0.0, np.zeros_like(z)
    if centre == "batch":
        rest = z - z.mean(axis=0)
    else:
        rest = z - (class_means(z, y, mu) if centre == "class" else mu)[y]
    over = n if twist == "batch covariance over n" else n - 1
    cov = rest.T @ rest / over
    sign = np.sign(cov)
    if twist != "diagonal penalised":
        np.fill_diagonal(sign, 0.0)
    scale = {"one triangle": 0.5, "over d squared": 1.0 / d}.get(twist, 1.0) / d
    # The centre moves with the rows where it is their mean, but the rest sums to 0 there: no further term.
    return scale * np.sum(sign * cov), scale * 2.0 * rest @ sign / over


def fedlda(
    problem,
    start,
    momentum=0.5,
    lam=0.1,
    ridge=0.1,
    smooth=1e-4,
    amount=1e-4,
    centre="batch",
    local_centre="interpolated",
    twist="",
):
    out, server, d, classes = Outcome([], [], [], [], []), start, start["mean"].shape[1], len(start["mean"])
    share = 1.0 - momentum if twist == "momentum is the own share" else momentum

    def head(k, mu, cov):
        prior = np.zeros(classes) if twist == "no prior" else log_prior(problem.y[k], classes, smooth)
        return lda(mu, cov, prior, amount)

    for cohort in problem.cohorts:
        shared, ups = (server["mean"], unpack(server["cov"], d)), {}
        for k in cohort:
            x, y = problem.x[k], problem.y[k]
            weight, bias = head(k, *shared)

            def slope(p, x=x, y=y, weight=weight, bias=bias, mu=shared[0]):
                z = features(p, x)
                kind = {"other centre": "class" if centre == "batch" else "batch"}.get(twist, centre)
                pull = penalty(z, y, mu, kind, twist)[1]
                strength = 0.0 if twist == "no penalty" else lam
                return body_gradient(p, x, error(z @ weight.T + bias, y) @ weight + strength * pull)

            body = descend(problem, slope, server["body"], problem.epochs, BODY)
            z = features(server["body"] if twist == "statistics of the received body" else body, x)
            own = class_means(z, y, np.zeros_like(shared[0]) if twist == "absent class at zero" else shared[0])
            mu = share * shared[0] + (1.0 - share) * own
            inside = (local_centre == "interpolated") != (twist == "other local centre")
            cov = covariance(z, y, mu if inside else own, 0.0 if twist == "no ridge" else ridge)
            ups[k] = {"body": body, "mean": mu, "cov": pack(share * shared[1] + (1.0 - share) * cov)}
        server = averaged(problem, cohort, ups, twist)
        views = []
        for k, x in enumerate(problem.x_test):
            mu, cov = server["mean"], unpack(server["cov"], d)
            if twist == "own statistics at prediction" and k in ups:
                mu, cov = ups[k]["mean"], unpack(ups[k]["cov"], d)
            weight, bias = head(k, mu, cov)
            views.append({"personal": features(server["body"], x) @ weight.T + bias})
        keep(out, server, ups, {k: {} for k in {*cohort, *(out.states[-1] if out.states else ())}}, {}, views)
    return out


# --- pFedVMP --------------------------------------------------------------------------------------------------


def precisions(z, y, classes, alpha, cut, twist=""):
    """For each class pinv(covariance) + alpha I, its variances w becoming w / (w + eps)^2; 0 for an absent class."""
    n, d = z.shape
    mu = class_means(z, y, np.zeros((classes, d)))
    within = ((z - mu[y]) ** 2).sum() / (n * d)
    eps = (0.0 if twist == "no cut" else cut * within) + 1e-12 * (z**2).mean() + 1e-30
    found = np.zeros((classes, d, d))
    for c in range(classes):
        rows = z[y == c]
        if len(rows):
            over = max(len(rows) - (twist == "covariance over n - 1"), 1)
            _, values, vectors = np.linalg.svd((rows - rows.mean(axis=0)) / np.sqrt(over), full_matrices=False)
            inverse = vectors.T @ np.diag(values**2 / (values**2 + eps) ** 2) @ vectors
            found[c] = inverse + (0.1 if twist == "other alpha" else alpha) * np.eye(d)
        elif twist == "absent class counts":
            found[c] = alpha * np.eye(d)
    return found


def pull(z, y, centroid, known, twist=""):
    """Mean over rows and features of the squared distance to the centroid of a row's class, and its gradient."""
    n, d = z.shape
    known = np.ones_like(known) if twist == "pull from the first round" else known
    rest = (z - centroid[y]) * known[y][:, None]
    scale = {"sum over features": 1.0, "half the square": 0.5 / d}.get(twist, 1.0 / d) / n
    return scale * (rest**2).sum(), scale * 2.0 * rest


def pfedvmp(problem, start, xi=50.0, alpha=1.0, cut=1e-4, aggregation="precision", new_head_epochs=5, twist=""):
    out, server, heads = Outcome([], [], [], [], []), start, {}
    classes, d = start["centroid"].shape
    first = some(problem.start, HEAD)
    for cohort in problem.cohorts:
        ups, logged = {}, {}
        for k in cohort:
            x, y = problem.x[k], problem.y[k]

            def slope(p, x=x, y=y, server=server):
                drawn = pull(features(p, x), y, server["centroid"], server["known"], twist)[1]
                toward = body_gradient(p, x, (0.0 if twist == "no pull" else xi) * drawn)
                g = gradient(p, x, y)
                return g | {name: g[name] + toward[name] for name in BODY}

            p = descend(problem, slope, server["body"] | heads.get(k, first), problem.epochs)
            heads[k] = some(p, HEAD)
            z = features(server["body"] if twist == "statistics of the received body" else p, x)
            count = np.bincount(y, minlength=classes).astype(float)
            ups[k] = {"body": some(p, BODY), "mean": class_means(z, y, np.zeros((classes, d))), "count": count}
            if aggregation == "mean":
                continue
            ups[k]["precision"] = np.stack([pack(m) for m in precisions(z, y, classes, alpha, cut, twist)])
            floats = sum(d + min((rows - 1) * (d + 1), d * (d + 1) // 2) for rows in np.bincount(y) if rows)
            logged[k] = {"bytes_up": 4.0 * (floats + sum(v.size for v in some(p, BODY).values()))}
        centroid = (
            np.zeros_like(server["centroid"]) if twist == "centroids are forgotten" else server["centroid"].copy()
        )
        by_precision = aggregation == "precision" and twist != "plain mean"
        for c in range(classes):
            if not any(ups[k]["count"][c] for k in cohort):
                continue
            total, right = np.zeros((d, d)), np.zeros(d)
            for k in cohort:
                weight = unpack(ups[k]["precision"][c], d) if by_precision else ups[k]["count"][c] * np.eye(d)
                total, right = total + weight, right + weight @ ups[k]["mean"][c]
            centroid[c] = np.linalg.solve(total, right)
        counts = sum(ups[k]["count"] for k in cohort)
        server = {
            "body": mean(problem, cohort, [ups[k]["body"] for k in cohort], twist),
            "centroid": centroid,
            "known": np.maximum(server["known"], (counts > 0).astype(float)),
        }
        views = []
        for k, x in enumerate(problem.x_test):
            p = server["body"] | heads.get(k, first)
            if k not in heads and twist != "unseen unfitted":
                p = descend(
                    problem,
                    lambda p, k=k: some(gradient(p, problem.x[k], problem.y[k]), HEAD),
                    p,
                    new_head_epochs,
                    HEAD,
                )
            z = features(p, x)
            near = np.stack([-((z - mu) ** 2).sum(axis=1) for mu in centroid], axis=1)
            views.append({"personal": logits(p, x), "centroid": np.where(server["known"] > 0, near, -1e30)})
        keep(out, server, ups, {k: {"head": h} for k, h in heads.items()}, logged, views)
    return out


# --- FedPCE ---------------------------------------------------------------------------------------------------

NORM = ("norm.weight", "norm.bias")


def generated(mlp, v, start):
    """The norm leaves for an embedding, and what their gradients need."""
    leaves, hidden = {}, {}
    for name in NORM:
        hidden[name] = mlp[name]["w1"] @ v + mlp[name]["b1"]
        leaves[name] = start[name] + mlp[name]["w2"] @ np.maximum(hidden[name], 0.0) + mlp[name]["b2"]
    return leaves, hidden


def normed(p, leaves, x):
    """Logits of head(tanh(layer norm(body x))), and what their gradients need."""
    u = x @ p["body.weight"].T + p["body.bias"]
    std = np.sqrt(u.var(axis=1, keepdims=True) + 1e-5)
    unit = (u - u.mean(axis=1, keepdims=True)) / std
    h = np.tanh(unit * leaves["norm.weight"] + leaves["norm.bias"])
    return h @ p["head.weight"].T + p["head.bias"], h, unit, std


def fedpce_gradient(p, mlp, v, start, x, y):
    """Of the mean cross entropy, with respect to the model, the MLPs and the embedding."""
    leaves, hidden = generated(mlp, v, start)
    out, h, unit, std = normed(p, leaves, x)
    e = error(out, y)
    back = (e @ p["head.weight"]) * (1.0 - h * h)
    leaf = {"norm.weight": (back * unit).sum(axis=0), "norm.bias": back.sum(axis=0)}
    d_unit = back * leaves["norm.weight"]
    middle = d_unit.mean(axis=1, keepdims=True) + unit * (d_unit * unit).mean(axis=1, keepdims=True)
    du = (d_unit - middle) / std
    model = {"body.weight": du.T @ x, "body.bias": du.sum(axis=0), "head.weight": e.T @ h, "head.bias": e.sum(axis=0)}
    mlps, dv = {}, np.zeros_like(v)
    for name in NORM:
        inner = (mlp[name]["w2"].T @ leaf[name]) * (hidden[name] > 0)
        mlps[name] = {
            "w1": np.outer(inner, v),
            "b1": inner,
            "w2": np.outer(leaf[name], np.maximum(hidden[name], 0.0)),
            "b2": leaf[name],
        }
        dv += mlp[name]["w1"].T @ inner
    return {"model": model, "mlp": mlps, "embedding": dv}


def flat(tree, prefix=""):
    """Nested dicts of arrays as one dict with names joined by a slash."""
    parts = {}
    for name, value in tree.items():
        parts |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return parts


def nested(parts):
    tree = {}
    for path, value in parts.items():
        *above, name = path.split("/")
        branch = tree
        for key in above:
            branch = branch.setdefault(key, {})
        branch[name] = value
    return tree


def cosine(first, last, round, rounds):
    return last + (first - last) * (1.0 + np.cos(np.pi * (round - 1) / rounds)) / 2.0


def steps_of(problem, p, slope, rate, steps, memory, adam=None):
    """SGD with momentum, or Adam with rates ``adam = (b1, b2)``, on a flat dict; ``memory`` is kept by the caller."""
    for _ in range(steps):
        g = {name: value + problem.decay * p[name] for name, value in slope(p).items()}
        if adam:
            memory["t"] = memory.get("t", 0) + 1
            m, v = memory.setdefault("m", {}), memory.setdefault("v", {})
            for name in g:
                m[name] = adam[0] * m.get(name, 0.0) + (1 - adam[0]) * g[name]
                v[name] = adam[1] * v.get(name, 0.0) + (1 - adam[1]) * g[name] ** 2
            unbias = [1 - b ** memory["t"] for b in adam]
            g = {name: (m[name] / unbias[0]) / (np.sqrt(v[name] / unbias[1]) + 1e-8) for name in g}
        else:
            v = memory.setdefault("v", {})
            for name in g:
                v[name] = g[name] = problem.momentum * v.get(name, 0.0) + g[name]
        p = p | {name: p[name] - rate(name) * g[name] for name in g}
    return p


def fedpce(problem, start, norm, size, rates, rounds, adam=None, adapt_rounds=1, twist=""):
    """``norm`` are the leaves' first values; ``rates`` (first, last) for model, mlp, embedding and a new embedding.

    With ``adam`` the moments stay on the client.
    """
    out, server, own, memory = Outcome([], [], [], [], []), start, {}, {}

    def first(k):
        v = np.zeros(size)
        if k < min(size, problem.population) and twist != "embeddings start at zero":
            v[k] = 1.0
        return v

    def schedule(group, round, rounds):
        if twist == "no schedule":
            return rates[group][0]
        return cosine(*rates["model" if twist == "one rate for all" else group], round, rounds)

    base = {name: np.zeros_like(v) for name, v in norm.items()} if twist == "leaves without their start" else norm
    for round, cohort in enumerate(problem.cohorts, 1):
        ups = {}
        for k in cohort:

            def slope(p, k=k):
                now = nested(p)
                g = fedpce_gradient(now["model"], now["mlp"], now["embedding"], base, problem.x[k], problem.y[k])
                if twist == "embedding frozen":
                    g["embedding"] = np.zeros(size) - problem.decay * now["embedding"]
                return flat(g)

            moments = memory.setdefault(k, {}) if adam and twist != "moments start afresh" else {}
            before = flat(server | {"embedding": own.get(k, first(k))})
            after = nested(
                steps_of(
                    problem,
                    before,
                    slope,
                    lambda name, round=round: schedule(name.partition("/")[0], round, rounds),
                    problem.epochs,
                    moments,
                    adam,
                )
            )
            own[k] = after["embedding"]
            ups[k] = {"model": after["model"], "mlp": after["mlp"]}
        server = nested(mean(problem, cohort, [flat(ups[k]) for k in cohort], twist))
        if twist == "embeddings averaged":
            blend = mean(problem, cohort, [{"v": own[k]} for k in cohort])["v"]
            own |= dict.fromkeys(cohort, blend)
        views = []
        for k, x in enumerate(problem.x_test):
            p, mlp = server["model"], server["mlp"]
            v = own.get(k, first(k))
            if k not in own and twist != "unseen unfitted":
                moments = {}
                for r in range(1, adapt_rounds + 1):

                    def slope(own, k=k, p=p, mlp=mlp):
                        g = fedpce_gradient(p, mlp, own["v"], base, problem.x[k], problem.y[k])
                        return {"v": g["embedding"]}

                    kept = moments if adam else {}
                    rate = schedule("new", r, adapt_rounds)
                    v = steps_of(problem, {"v": v}, slope, lambda _, r=rate: r, problem.epochs, kept, adam)["v"]
            views.append({"personal": normed(p, generated(mlp, v, base)[0], x)[0]})
        keep(out, server, ups, {k: {"embedding": v, "start": norm} for k, v in own.items()}, {}, views)
    return out


# --- Self-FL --------------------------------------------------------------------------------------------------


def vector(p):
    return np.concatenate([p[name].ravel() for name in ALL])


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
    """Variances by two passes over all that a client ever sent, where the library goes through it once."""
    population = problem.population
    zero = np.zeros(population)
    server = {"model": problem.start, "sigma": zero, "known": zero, "sigma0": np.zeros(()), "round": np.zeros(())}
    out, theta, past = Outcome([], [], [], [], []), {}, {k: [] for k in range(population)}

    def scatter(values):
        rows = np.stack([vector(p) for p in values])
        total = ((rows - rows.mean(axis=0)) ** 2).sum()
        other = twist == "other variance"
        return total / max(len(rows) - 1, 1) if (variance == "n-1") != other else total

    def sigma_of(k):
        last = vector(theta.get(k, problem.start))
        least = 1e-12 * (1.0 + last @ last / len(last))
        return max(scatter(past[k]) if past[k] else 0.0, least)

    for round, cohort in enumerate(problem.cohorts, 1):
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
                    h = problem.lr / (rows * s)
                    a = others / (1.0 / s + others)
                    wanted = np.log(a) / np.log(1.0 - h) if a > 0 and h < 1 else (1 if h >= 1 else max_steps)
                    steps = int(np.round(np.clip(wanted, 1, max_steps)))
            before = sigma_of(k)
            theta[k] = descend(problem, lambda p, k=k: gradient(p, problem.x[k], problem.y[k]), start, steps)
            if not warm or twist == "warm rounds count":
                past[k] = [*past[k], theta[k]]
            now = before if twist == "reports the variance from before" else sigma_of(k)
            ups[k] = {"theta": theta[k], "sigma": np.array(now), "known": np.array(float(len(past[k]) >= 2))}
            logged[k] = {"steps": steps, "sigma": now}
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
        share = 1.0 if twist == "no smoothing" else len(cohort) / population
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
                own = descend(problem, lambda p, k=k: gradient(p, problem.x[k], problem.y[k]), server["model"], fit)
            views.append({"personal": logits(own, x), "global": logits(server["model"], x)})
        for k in theta:
            nothing = {n: np.zeros_like(v) for n, v in problem.start.items()}
            centre = {n: np.mean([p[n] for p in past[k]], axis=0) for n in ALL} if past[k] else nothing
            m2 = sum(((vector(p) - vector(centre)) ** 2).sum() for p in past[k]) if past[k] else 0.0
            history = {"mean": centre, "m2": np.array(m2), "count": np.array(float(len(past[k])))}
            states[k] = {"theta": theta[k], "history": history}
        keep(out, server, ups, states, logged, views)
    return out
