"""The two-level Gaussian with known variances: what a client can know of its own mean, in closed form.

Client m's mean theta_m is N(theta_0, s0), its result z_m is N(theta_m, s_m), and nothing is known of theta_0. With
w_k = 1 / (s0 + s_k), the others tell client m their weighted mean, of variance 1 / W with W their sum of w.
"""

import numpy as np

from bespoke.core.data import FederatedData

Estimates = dict[str, np.ndarray]  # one number per client (M,), by the name of the estimate


def estimates(z: np.ndarray, within: np.ndarray, between: float) -> Estimates:
    """Return the estimates of all theta_m from results z (M,) of variances s_m = ``within`` (M,) and s0 = ``between``.

    ``local`` is z itself; ``paper`` Self-FL's equation (3), best if theta_m were theta_0; ``bayes`` the posterior mean.
    """
    w = 1.0 / (between + within)
    return {
        name: (z / within + trust * (np.sum(w * z) - w * z)) / (1.0 / within + trust * (np.sum(w) - w))
        for name, trust in _trust(within, between).items()
    }


def expected_errors(within: np.ndarray, between: float) -> Estimates:
    """Return the mean squared error of each client's estimates, (M,), over all worlds with these variances."""
    w = 1.0 / (between + within)
    others = np.sum(w) - w
    found = {}
    for name, trust in _trust(within, between).items():
        own = 1.0 / (1.0 + within * trust * others)  # the weight of z_m; the rest is that of the others' mean
        found[name] = own**2 * within + (1.0 - own) ** 2 * (between + 1.0 / others)
    return found


def _trust(within: np.ndarray, between: float) -> Estimates:
    """Return the factor by which each estimate multiplies the others' weights: none, as printed, or as it should be."""
    w = 1.0 / (between + within)
    ones = np.ones_like(within)
    return {"local": 0.0 * ones, "paper": ones, "bayes": 1.0 / (1.0 + between * (np.sum(w) - w))}


def references(pool: FederatedData, between: float) -> dict[str, float]:
    """Return the mean squared error of each of the :func:`estimates` to the true means of a synthetic federation.

    The pool is that of ``[data] name = "synthetic_hierarchy"``, ``between`` its setting of this name. The variances are
    the true ones; the results are the means of train rows, and a client's test row holds its theta_m.
    """
    clients = range(pool.num_clients)
    z = np.array([pool.y[pool.train.client(m)].double().mean().item() for m in clients])
    truth = np.array([pool.y[pool.test.client(m)].double().mean().item() for m in clients])
    within = 1.0 / np.array(pool.train.sizes[: pool.num_clients], dtype=float)
    return {name: float(np.mean((found - truth) ** 2)) for name, found in estimates(z, within, between).items()}
