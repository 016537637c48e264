"""FedPCE, on a net with a layer norm before the tanh: MLPs make the norm's leaves from each client's own embedding."""

import numpy as np

from golden.common import COHORTS, MOMENTUM, NORM, PLAIN, Case, Outcome, error, mean, mistakes, some


def nets(mlp):
    """Each leaf's own net: this net's scale and shift have one width, so their nets are stacked."""
    ((_, stack),) = mlp.items()
    return {name: {part: value[i] for part, value in stack.items()} for i, name in enumerate(sorted(NORM))}


def generated(mlp, v, start):
    """The norm leaves for an embedding, and what their gradients need."""
    leaves, hidden = {}, {}
    for name, net in nets(mlp).items():
        hidden[name] = net["w1"] @ v + net["b1"]
        leaves[name] = start[name] + net["w2"] @ np.maximum(hidden[name], 0.0) + net["b2"]
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
    for name, net in nets(mlp).items():
        inner = (net["w2"].T @ leaf[name]) * (hidden[name] > 0)
        mlps[name] = {
            "w1": np.outer(inner, v),
            "b1": inner,
            "w2": np.outer(leaf[name], np.maximum(hidden[name], 0.0)),
            "b2": leaf[name],
        }
        dv += net["w1"].T @ inner
    ((width, stack),) = mlp.items()
    stacked = {width: {part: np.stack([mlps[name][part] for name in sorted(NORM)]) for part in stack}}
    return {"model": model, "mlp": stacked, "embedding": dv}


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


def fedpce(
    problem,
    first,
    training,
    adapt_rounds,
    size,
    hidden,
    mlp_lr,
    mlp_lr_final,
    embedding_lr,
    embedding_lr_final,
    new_lr,
    new_lr_final,
    twist="",
):
    """Four cosines: of the model, the MLPs (with ``hidden`` units, as in ``first``), embeddings and a new embedding.

    With Adam the moments stay on the client.
    """
    out, server, own, memory = Outcome(), first, {}, {}
    norm, rounds = some(problem.start, NORM), len(problem.cohorts)
    rates = {
        "model": (problem.lr, training["lr_final"]),
        "mlp": (mlp_lr, mlp_lr_final),
        "embedding": (embedding_lr, embedding_lr_final),
        "new": (new_lr, new_lr_final),
    }
    adam = (training["beta1"], training["beta2"]) if training["optimizer"] == "adam" else None

    def unit_vector(k):
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
            before = flat(server | {"embedding": own.get(k, unit_vector(k))})
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
            v = own.get(k, unit_vector(k))
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
        out.keep(server, {k: {"embedding": v, "start": norm} for k, v in own.items()}, views, ups)
    return out


FIELDS = {
    "size": 3,
    "hidden": 4,
    "mlp_lr": 0.3,
    "mlp_lr_final": 0.01,
    "embedding_lr": 0.5,
    "embedding_lr_final": 0.02,
    "new_lr": 0.4,
    "new_lr_final": 0.1,
}
COSINE = {"schedule": "cosine", "lr_final": 0.05}
ADAM = {"optimizer": "adam", "keep_optimizer": True, "beta1": 0.5, "beta2": 0.9}


def case(runs, adapt_rounds, **training):
    return Case(FIELDS, runs, 3, 0.2, COSINE | training, adapt_rounds, "layer", cohorts=COHORTS, tolerance=1e-8)


CASES = {
    "fedpce": case(PLAIN, 1),
    "fedpce/momentum": case(MOMENTUM, 2),
    "fedpce/adam": case(MOMENTUM, 3, **ADAM),
}

MISTAKES = [
    *mistakes(
        "fedpce",
        "one rate for all",
        "no schedule",
        "embeddings averaged",
        "embeddings start at zero",
        "embedding frozen",
        "leaves without their start",
        "other weighting",
    ),
    *mistakes("fedpce", "unseen unfitted", late=True),
    *mistakes("fedpce/adam", "moments start afresh", "no schedule", variants=("momentum",)),
]
