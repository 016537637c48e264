"""pFedVMP: FedPer with features pulled to centroids, which are means weighted by the clients' precisions."""

import numpy as np

from golden.common import (
    BODY,
    COHORTS,
    HEAD,
    Case,
    Outcome,
    body_gradient,
    descend,
    features,
    gradient,
    logits,
    mean,
    mistakes,
    some,
)
from golden.gaussians import class_means, pack, unpack


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


def pfedvmp(problem, first, xi=50.0, alpha=1.0, cut=1e-4, aggregation="precision", new_head_epochs=5, twist=""):
    out, server, heads = Outcome(), first, {}
    classes, d = first["centroid"].shape
    head = some(problem.start, HEAD)
    for now, cohort in problem.rounds():
        ups, logged = {}, {}
        for k in cohort:
            x, y = problem.x[k], problem.y[k]

            def slope(p, x=x, y=y, server=server):
                drawn = pull(features(p, x), y, server["centroid"], server["known"], twist)[1]
                toward = body_gradient(p, x, (0.0 if twist == "no pull" else xi) * drawn)
                g = gradient(p, x, y)
                return g | {name: g[name] + toward[name] for name in BODY}

            p = descend(now, slope, server["body"] | heads.get(k, head), problem.epochs)
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
            p = server["body"] | heads.get(k, head)
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
        out.keep(server, {k: {"head": h} for k, h in heads.items()}, views, ups, logged)
    return out


CASES = {
    "pfedvmp": Case({"xi": 2.0}, cohorts=COHORTS, tolerance=1e-8),
    "pfedvmp/mean": Case({"xi": 2.0, "aggregation": "mean", "new_head_epochs": 2}, cohorts=COHORTS, tolerance=1e-8),
    "pfedvmp/sharp": Case({"xi": 0.5, "alpha": 0.2, "cut": 0.05}, cohorts=COHORTS, tolerance=1e-8),
}

MISTAKES = [
    *mistakes(
        "pfedvmp",
        "no pull",
        "sum over features",
        "half the square",
        "pull from the first round",
        "no cut",
        "covariance over n - 1",
        "other alpha",
        "absent class counts",
        "statistics of the received body",
        "plain mean",
        "centroids are forgotten",
        "other weighting",
    ),
    *mistakes("pfedvmp", "unseen unfitted", late=True),
    *mistakes("pfedvmp/mean", "statistics of the received body", "no pull"),
]
