"""pFedFDA: a classifier from Gaussians of the features; each client interpolates between its own and the shared."""

import numpy as np

from golden.common import (
    BODY,
    COHORTS,
    CROSSED,
    PLAIN,
    Case,
    Outcome,
    body_gradient,
    descend,
    error,
    features,
    mistakes,
)
from golden.gaussians import averaged, class_means, covariance, lda, log_prior, pack, unpack

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


# --- the method -----------------------------------------------------------------------------------------------


def pfedfda(
    problem,
    first,
    held_out,
    betas="one",
    ridge=1.0,
    smooth=1e-4,
    shrink=1e-4,
    few_rows=2,
    folds=2,
    train_statistics="pass",
    test_statistics="searched",
    twist="",
):
    """``held_out(purpose, round, client, folds)`` are the rows of each fold, (k, n); with epochs, (k, epochs n)."""
    out, server, d, sent = Outcome(), first, first["mean"].shape[1], {}
    classes = len(first["mean"])
    smooth = 1e-9 if twist == "prior not smoothed" else smooth
    shrink = 1e-12 if twist == "head not shrunk" else shrink

    def statistics(bodies, k, shared, few, masks):
        """Of the features that each of the bodies gives of all rows, one after another."""
        z = np.concatenate([features(body, problem.x[k]) for body in bodies])
        y = np.tile(problem.y[k], len(bodies))
        less = 0 if twist == "covariance over n" else 1
        here = 1e-4 if twist == "other ridge" else ridge
        own = class_means(z, y, shared[0])
        cov = covariance(z, y, own, here, less)
        if betas == "none":
            beta = np.ones(2)
        else:
            counts = np.bincount(y, minlength=classes)
            counts = counts // len(bodies) if twist == "a class of one image is left out" else counts
            used = counts[y] > (0 if twist == "single rows are folded too" else 1)
            parts = []
            for mask in masks:
                rest = used & ~mask
                mu = class_means(z[rest], y[rest], shared[0])
                parts.append((mu, covariance(z[rest], y[rest], mu, here, less), used & mask))
            if all(held.any() for *_, held in parts):
                prior = log_prior(problem.y[k], classes, smooth)
                beta = search(validation_loss(parts, shared, z, y, prior, shrink), betas == "two")
            else:
                beta = np.zeros(2)
        own = np.where(np.bincount(y, minlength=classes)[:, None] > few, own, shared[0]) if few else own
        mix = 1.0 - beta if twist == "interpolates the other way" else beta
        mixed = mix[0] * own + (1 - mix[0]) * shared[0], mix[1] * cov + (1 - mix[1]) * shared[1]
        return mixed, {"beta_mean": beta[0], "beta_cov": beta[1]}

    def head(k, mu, cov):
        prior = np.zeros(classes) if twist == "no prior" else log_prior(problem.y[k], classes, smooth)
        return lda(mu, cov, prior, shrink)

    for round, (now, cohort) in enumerate(problem.rounds(), 1):
        shared, ups, logged = (server["mean"], unpack(server["cov"], d)), {}, {}
        for k in cohort:
            x, y = problem.x[k], problem.y[k]
            weight, bias = head(k, *shared)

            def slope(p, x=x, y=y, weight=weight, bias=bias):
                return body_gradient(p, x, error(features(p, x) @ weight.T + bias, y) @ weight)

            steps, velocity = [server["body"]], {}
            for _ in range(problem.epochs):
                steps.append(descend(now, slope, steps[-1], 1, BODY, velocity))
            body = steps[-1]
            if train_statistics == "pass":
                seen = steps[:1] if twist == "statistics of the received body" else [body]
                masks = held_out("train", round, k, folds)
            else:
                seen = steps[1:] if twist == "features after the update" else steps[:-1]
                masks = held_out("train", round, k, folds, problem.epochs)
                if twist == "only the last epoch":
                    seen, masks = seen[-1:], masks[:, -len(y) :]
                if twist == "an image in one fold":
                    masks = np.tile(masks[:, : len(y)], len(seen))
            few = few_rows if twist == "few rows in training" else 0
            (mu, cov), logged[k] = statistics(seen, k, shared, few, masks)
            ups[k] = {"body": body, "mean": mu, "cov": pack(cov)}
        server, sent = averaged(problem, cohort, ups, twist), sent | ups
        shared, views = (server["mean"], unpack(server["cov"], d)), []
        as_trained = test_statistics == "trained"
        for k, x in enumerate(problem.x_test):
            few = 0 if twist == "every class its own mean at prediction" else few_rows
            masks = held_out("adapt" if as_trained else "eval", round, k, folds)
            (mu, cov), _ = statistics([server["body"]], k, shared, few, masks)
            body = server["body"]
            if as_trained and k in sent and twist != "searches again":
                mu, cov = sent[k]["mean"], unpack(sent[k]["cov"], d)
                body = body if twist == "own statistics under the aggregated body" else sent[k]["body"]
            weight, bias = head(k, *(shared if twist == "predicts with shared statistics" else (mu, cov)))
            views.append({"personal": features(body, x) @ weight.T + bias})
        states = {k: up if as_trained else {} for k, up in sent.items()}
        out.keep(server, states, views, ups, logged)
    return out


CASES = {
    "pfedfda": Case(cohorts=COHORTS, tolerance=1e-8),
    "pfedfda/none": Case({"betas": "none"}, cohorts=COHORTS, tolerance=1e-8, noticed=1e-5),
    "pfedfda/two": Case({"betas": "two"}, PLAIN, cohorts=COHORTS[:1], tolerance=1e-8),
    "pfedfda/text": Case({"ridge": 1e-4, "few_rows": 0}, PLAIN, cohorts=COHORTS[:2], tolerance=1e-8),
    "pfedfda/three folds": Case(
        {"folds": 3, "smooth": 0.01, "shrink": 0.05}, PLAIN, cohorts=COHORTS[:2], tolerance=1e-8
    ),
    "pfedfda/epochs": Case({"train_statistics": "epochs"}, CROSSED, cohorts=COHORTS, tolerance=1e-8),
    "pfedfda/trained": Case({"test_statistics": "trained"}, PLAIN, cohorts=COHORTS[:2], tolerance=1e-8),
}

MISTAKES = [
    *mistakes(
        "pfedfda/none",
        "no prior",
        "prior not smoothed",
        "head not shrunk",
        "other ridge",
        "covariance over n",
        "statistics of the received body",
        "few rows in training",
        "other weighting",
        variants=("momentum",),
    ),
    *mistakes(
        "pfedfda/none",
        "every class its own mean at prediction",
        "predicts with shared statistics",
        variants=("momentum",),
        late=True,
    ),
    *mistakes("pfedfda", "interpolates the other way", "single rows are folded too", variants=("momentum",)),
    *mistakes(
        "pfedfda/epochs",
        "features after the update",
        "only the last epoch",
        "an image in one fold",
        "a class of one image is left out",
        variants=("momentum",),
    ),
    *mistakes("pfedfda/trained", "searches again", "own statistics under the aggregated body", late=True),
]
