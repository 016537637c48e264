"""pFedFDA: a shared representation under a generative head that each client interpolates."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core import rng
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths import gaussian
from bespoke.maths.gathering import trained_with_features
from bespoke.maths.gaussian import Head
from bespoke.maths.interpolation import Fold, cross_validated_beta


@final
@dataclass(frozen=True)
class PFedFDA(Algorithm):
    """Class-wise Gaussian features with one covariance; clients mix own and global estimates.

    McLaughlin and Su, "Personalized Federated Learning via Feature Distribution Adaptation",
    Algorithm 1.

    | paper | here |
    |---|---|
    | phi; mu_g, Sigma_g | ``down["body"]``; ``down["mean"]``, ``down["cov"]`` (a packed triangle) |
    | pi_i, local class prior | computed where needed, smoothed by ``smooth`` |
    | beta_i | ``betas``: "one" (the paper's), "two" (means, covariance), "none" (1: own only) |
    | k | ``folds`` |
    | epsilon in Sigma + epsilon I | ``ridge``: 1.0 (public code) or 1e-4 (text); see ``repair`` |

    The head is fixed while the representation trains. Statistics come from one pass over the train
    rows with the trained body; with ``train_statistics = "epochs"`` from features of all epochs,
    gathered in training, as in the public code, which puts each image into both folds. Means start
    uniform on [0, 1) as in the public code, Sigma at I. beta is found by a deterministic search of
    the exact objective, not by L-BFGS. Prediction uses the aggregated body and statistics
    interpolated anew, so trained, unseen and new clients are treated alike and none takes a
    gradient step; a class with at most ``few_rows`` rows then keeps its global mean. With
    ``test_statistics = "trained"`` a client that took part keeps body and statistics as it last
    sent them and predicts with those, as section 4.3 has it.
    Bytes per client and round: body, C d means and d(d+1)/2 of the covariance, up and down.
    """

    betas: str = knob(
        "one", "number of coefficients that a client searches for", choices=("one", "two", "none")
    )
    folds: int = knob(2, "folds of the search", low=2, high=1000)
    ridge: float = knob(1.0, "added to the diagonal of every estimated covariance", above=0)
    repair: bool = knob(
        False, "clip eigenvalues of the client's correlations; no effect with a ridge"
    )
    smooth: float = knob(1e-4, "added to every class prior", above=0)
    shrink: float = knob(1e-4, "share of a spherical covariance in the head", above=0, high=1)
    few_rows: int = knob(
        2, "in prediction, classes with at most this many rows keep the global mean", low=0
    )
    train_statistics: str = knob(
        "pass",
        "in training, from one pass with the trained body, or from every epoch as the body trains",
        choices=("pass", "epochs"),
    )
    test_statistics: str = knob(
        "searched",
        "predict with aggregated statistics, mixed anew, or with one's own as last trained",
        choices=("searched", "trained"),
    )
    needs_classes = True
    claims = (("cov", "spd"),)

    def server_init(self, task, params, num_clients, key):
        means = rng.uniform(key, (task.num_classes, task.feature_dim), task.dtype)
        return {"body": task.body(params), "mean": means, "cov": gaussian.identity(task)}

    def broadcast(self, server):
        return server

    def client_init(self, task, params, client):
        """Return nothing, or room for what is sent."""
        kept = self.test_statistics == "trained"
        return self.server_init(task, params, 1, rng.key(0, task.device)) if kept else {}

    def client_update(self, local, state, down):
        """Train the body under the global head; send it with the interpolated statistics."""
        task, shared = local.task, gaussian.received(local.task, down)
        head = gaussian.lda_head(shared, gaussian.log_prior(local, self.smooth), self.shrink)

        def loss(body, batch, weight, bias):
            z = task.features(body, batch.x, batch.key)
            return task.error(Head(weight, bias)(z), batch), z

        if self.train_statistics == "epochs":
            body, features = trained_with_features(local, loss, down["body"], *head)
        else:
            body = local.sgd(lambda *given: loss(*given)[0], down["body"], *head)
            features = local.features(body)
        stats = self._interpolated(local, features, down, few_rows=0)
        up = {"body": body, "mean": stats.mean, "cov": gaussian.pack(stats.cov)}
        return up if state else state, up

    def adapt(self, local, state, down):
        """Estimate statistics with the received body, for want of any that were trained."""
        if not state:
            return state
        stats = self._interpolated(local, local.features(down["body"]), down, self.few_rows)
        return {"body": down["body"], "mean": stats.mean, "cov": gaussian.pack(stats.cov)}

    def personalize(self, local, state, down):
        """Return a body and the head of its interpolated statistics."""
        known = gaussian.received(local.task, state) if state else None
        body = (state or down)["body"]
        own = known or self._interpolated(local, local.features(body), down, self.few_rows)
        head = gaussian.lda_head(own, gaussian.log_prior(local, self.smooth), self.shrink)
        return {"body": body, "weight": head.weight, "bias": head.bias}

    def predict(self, task, personal, x):
        return Head(personal["weight"], personal["bias"])(task.features(personal["body"], x))

    def _interpolated(self, local, features, down, few_rows):
        """Estimate statistics of a client's features and mix them with the received ones."""
        shared = gaussian.received(local.task, down)
        member = gaussian.one_hot(features.y, features.mask, local.task.num_classes)
        own = gaussian.estimate(features.z, member, shared.mean, self.ridge)
        if self.repair:
            own = own._replace(cov=local.host(lambda cov: (gaussian.repair(cov),), own.cov)[0])
        beta = self._beta(local, features, member, shared)
        local.log(beta_mean=beta[0], beta_cov=beta[1])
        if few_rows:
            counts = member.sum(dim=0)[:, None]
            own = own._replace(mean=torch.where(counts > few_rows, own.mean, shared.mean))
        return gaussian.interpolate(own, shared, beta[0], beta[1])

    def _beta(self, local, features, member, shared):
        """Search for the shares of the client's own means and covariance."""
        if self.betas == "none":
            return shared.mean.new_ones(2)
        two, (z, y, mask) = self.betas == "two", features
        # A class with a single row tells nothing across folds.
        repeated = mask * (member @ (member.sum(dim=0) > 1).to(z.dtype))
        parts = local.folds(self.folds, rows=features).to(z.dtype) * repeated
        rests = [member * (repeated - part)[:, None] for part in parts]
        stats = [gaussian.estimate(z, rest, shared.mean, self.ridge) for rest in rests]
        folds, prior = list(map(Fold, stats, parts)), gaussian.log_prior(local, self.smooth)
        return cross_validated_beta(folds, shared, z, y, prior, two=two, amount=self.shrink)
