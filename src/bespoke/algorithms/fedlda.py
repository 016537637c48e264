"""FedLDA: one representation under a generative head whose prior alone is the client's own."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core import rng
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths import gaussian
from bespoke.maths.gaussian import Head


@final
@dataclass(frozen=True)
class FedLDA(Algorithm):
    """Linear discriminant analysis on shared features, with a penalty on their correlations.

    McLaughlin and Su, "FedLDA: Personalized Federated Learning Through Collaborative Linear
    Discriminant Analysis", a workshop paper; Algorithm 1.

    | paper | here |
    |---|---|
    | phi; mu, Sigma | ``down["body"]``; ``down["mean"]``, ``down["cov"]`` (a packed triangle) |
    | pi_i, local class prior | computed where needed, smoothed by ``smooth`` (the paper: not) |
    | beta, share of the global statistics | ``momentum`` |
    | lambda | ``lam``: times the batch covariance's absolute off-diagonal entries, summed, over d |

    Where the paper leaves a choice: the batch covariance is centred on the batch's mean
    (``centre``), the local one on the interpolated means as printed (``local_centre``), divisors
    are n - 1, an absent class keeps its global mean. A ridge is added to every estimated
    covariance: without one the head grew without bound in our runs. Prediction uses the aggregated
    body and statistics; a client owns only its prior, so unseen and new clients need only count
    their labels.
    Bytes per client and round: body, C d means and d(d+1)/2 of the covariance, up and down.
    """

    momentum: float = knob(
        0.5, "share of the global statistics in what a client sends", low=0, high=1
    )
    lam: float = knob(0.1, "strength of the penalty on correlated features", low=0)
    ridge: float = knob(0.1, "added to the diagonal of every estimated covariance", low=0)
    smooth: float = knob(1e-4, "added to every class prior", above=0)
    shrink: float = knob(1e-4, "share of a spherical covariance in the head", above=0, high=1)
    centre: str = knob(
        "batch", "centre of the penalised batch covariance", choices=("batch", "class", "global")
    )
    local_centre: str = knob(
        "interpolated", "centre of the local covariance", choices=("interpolated", "local")
    )
    needs_classes = True
    claims = (("cov", "spd"),)

    def server_init(self, task, params, num_clients, key):
        """Return the body, means uniform on [-0.1, 0.1), and the identity covariance."""
        means = 0.2 * rng.uniform(key, (task.num_classes, task.feature_dim), task.dtype) - 0.1
        return {"body": task.body(params), "mean": means, "cov": gaussian.identity(task)}

    def broadcast(self, server):
        """Send body and statistics to everyone."""
        return server

    def client_update(self, local, state, down):
        """Train the body under the fixed head; send it with the interpolated statistics."""
        task, lam, centre, classes = local.task, self.lam, self.centre, local.task.num_classes
        shared = gaussian.received(task, down)
        head = self._head(local, shared)

        def loss(body, batch, weight, bias, mean):
            z = task.features(body, batch.x, batch.key)
            member = gaussian.one_hot(batch.y, batch.mask, classes)
            return task.error(Head(weight, bias)(z), batch) + lam * _correlation(
                z, member, mean, centre
            )

        body = local.sgd(loss, down["body"], head.weight, head.bias, shared.mean)
        z, y, mask = local.features(body)
        member = gaussian.one_hot(y, mask, classes)
        own = gaussian.class_means(z, member, shared.mean)
        mean = self.momentum * shared.mean + (1.0 - self.momentum) * own
        around = mean if self.local_centre == "interpolated" else own
        cov = gaussian.tied_covariance(z, member, around, self.ridge)
        cov = self.momentum * shared.cov + (1.0 - self.momentum) * cov
        return state, {"body": body, "mean": mean, "cov": gaussian.pack(cov)}

    def personalize(self, local, state, down):
        """Return the body and the global head with the client's own prior."""
        head = self._head(local, gaussian.received(local.task, down))
        return {"body": down["body"], "weight": head.weight, "bias": head.bias}

    def predict(self, task, personal, x):
        """Return the generative head's logits."""
        return Head(personal["weight"], personal["bias"])(task.features(personal["body"], x))

    def _head(self, local, shared):
        return gaussian.lda_head(shared, gaussian.log_prior(local, self.smooth), self.shrink)


def _correlation(z, member, mean, centre):
    """Sum absolute off-diagonal entries of a batch's covariance, over d; 0 below two rows."""
    weight = member.sum(dim=1)
    if centre == "batch":
        member, mean = weight[:, None], (weight @ z / weight.sum().clamp(min=1.0))[None]
    elif centre == "class":
        mean = gaussian.class_means(z, member, mean)
    cov = gaussian.tied_covariance(z, member, mean, ridge=0.0)
    off = cov.abs().sum() - torch.diagonal(cov).abs().sum()
    return torch.where(weight.sum() > 1.5, off / z.shape[1], torch.zeros_like(off))
