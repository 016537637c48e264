"""FedLDA: a classifier from shared Gaussians of the features, whose correlation is penalised."""

import numpy as np

from golden.common import BODY, COHORTS, Case, Outcome, body_gradient, descend, error, features, mistakes
from golden.gaussians import averaged, class_means, covariance, lda, log_prior, pack, unpack


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
    first,
    momentum=0.5,
    lam=0.1,
    ridge=0.1,
    smooth=1e-4,
    shrink=1e-4,
    centre="batch",
    local_centre="interpolated",
    twist="",
):
    out, server, d, classes = Outcome(), first, first["mean"].shape[1], len(first["mean"])
    share = 1.0 - momentum if twist == "momentum is the own share" else momentum

    def head(k, mu, cov):
        prior = np.zeros(classes) if twist == "no prior" else log_prior(problem.y[k], classes, smooth)
        return lda(mu, cov, prior, shrink)

    for now, cohort in problem.rounds():
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

            body = descend(now, slope, server["body"], problem.epochs, BODY)
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
        out.keep(server, {k: {} for k in {*cohort, *(out.states[-1] if out.states else ())}}, views, ups)
    return out


CASES = {
    "fedlda": Case({"momentum": 0.3, "lam": 0.5}, cohorts=COHORTS, tolerance=1e-8),
    "fedlda/class": Case(
        {"momentum": 0.3, "lam": 0.5, "centre": "class", "ridge": 0.0}, cohorts=COHORTS, tolerance=1e-8
    ),
    "fedlda/global": Case(
        {"momentum": 0.7, "lam": 0.5, "centre": "global", "local_centre": "local"}, cohorts=COHORTS, tolerance=1e-8
    ),
    "fedlda/loose": Case(
        {"momentum": 0.3, "lam": 0.0, "smooth": 0.02, "shrink": 0.03}, cohorts=COHORTS, tolerance=1e-8
    ),
}

MISTAKES = [
    *mistakes(
        "fedlda",
        "no prior",
        "no penalty",
        "one triangle",
        "over d squared",
        "diagonal penalised",
        "batch covariance over n",
        "other centre",
        "other local centre",
        "momentum is the own share",
        "statistics of the received body",
        "absent class at zero",
        "no ridge",
        "other weighting",
    ),
    *mistakes("fedlda", "own statistics at prediction", late=True),
    *mistakes("fedlda/class", "other centre"),
    *mistakes("fedlda/global", "other centre", "other local centre"),
]
