"""pFedGP: on a shared representation, each client's rows make a Gaussian-process classifier."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core import rng
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths import gp


@final
@dataclass(frozen=True)
class PFedGP(Algorithm):
    """A deep kernel learned by all; a client's train rows are its classifier, without training.

    Achituve et al., "Personalized Federated Learning with Gaussian Processes", NeurIPS 2021,
    without inducing points.

    | paper | here |
    |---|---|
    | theta, the deep kernel's network | ``down["body"]``; the model's head is not used |
    | k(z, z') | ``variance`` exp(-abs(z - z')^2 / 2), unit-length features; diagonal plus 1e-3 |
    | GP-Tree | ``gp.class_tree``: 2-means on the class means, a binary GP at each node |
    | omega, Polya-Gamma | ``inference``: mean-field mean, or ``chains`` of ``gibbs_steps`` steps |
    | predictive loss | half of each side's rows predict the other half; summed over nodes |

    A step sees a minibatch of ``[training]``: with a batch of all rows and as many epochs as inner
    steps it matches the public code. The tree is built once, at the round's start. omega is a
    constant of the gradient. ``link`` is E[sigmoid(f)], or with "exp_log" the code's exp(E[log
    sigmoid(f)]), which is not an even guess far from the rows. A client with one class learns
    nothing and is left out of the mean, which is weighted by rows; the code's plain mean is
    ``[training] weighting = "uniform"``. Prediction uses at most ``max_rows`` rows, with classes in
    proportion. A class without rows gets almost no probability. An unseen client needs no training.
    Bytes per client and round: up the body and one number, down the body.
    """

    inference: str = knob("mean_field", "how omega is estimated", choices=("mean_field", "gibbs"))
    link: str = knob(
        "expected_sigmoid", "how f becomes a probability", choices=("expected_sigmoid", "exp_log")
    )
    variance: float = knob(8.0, "the kernel's variance", above=0)
    chains: int = knob(20, "Gibbs chains", low=1, high=1000)
    gibbs_steps: int = knob(5, "steps of a Gibbs chain", low=0, high=10_000)
    max_rows: int = knob(500, "maximum number of train rows that a client predicts with", low=2)
    needs_classes = True
    claims = (("learned", "share"),)
    holds = "features of the client's own train rows, by which this method predicts"

    def server_init(self, task, params, num_clients, key):
        return {"body": task.body(params)}

    def broadcast(self, server):
        return {"body": server["body"]}

    def client_update(self, local, state, down):
        """Train the body so that half of the rows predict the other half at each tree node."""
        task, variance, omega_of, left_of = local.task, self.variance, self._omega, self._left
        nodes, present = gp.tree_of(local.features(down["body"]), task.num_classes)

        def loss(body, batch, nodes):
            z = gp.normalised(task.features(body, batch.x, batch.key))
            side = gp.sides(nodes, batch.y, batch.mask)
            target = gp.halve(side, rng.fold_in(batch.key, 0))
            context, k = torch.where(target, 0.0, side), gp.train_kernel(z, variance)
            left = left_of(
                k, gp.kernel(z, z, variance), context, omega_of(k.detach(), context, batch.key)
            )
            return gp.side_error(left, side, target).to(task.dtype)

        body = local.sgd(loss, down["body"], nodes)
        return state, {"body": body, "learned": (present.sum() > 1).to(task.dtype)}

    def aggregate(self, task, server, uploads, key):
        """Average the bodies of clients that had something to learn from."""
        weights = uploads.weights * uploads.tree["learned"].double()
        return {"body": uploads.mean("body", weights)} if weights.any() else server

    def personalize(self, local, state, down):
        """Return the body, and what prediction needs of the client's rows."""
        features = local.features(down["body"])
        nodes, present = gp.tree_of(features, local.task.num_classes)
        rows, mask = gp.subset(
            features.y, local.n, self.max_rows, rng.fold_in(local.key, rng.SUBSET)
        )
        z, side = gp.normalised(features.z[rows]), gp.sides(nodes, features.y[rows], mask)
        omega = self._omega(
            gp.train_kernel(z, self.variance), side, rng.fold_in(local.key, rng.AUGMENTED)
        )
        return {
            "body": down["body"],
            "z": z,
            "side": side,
            "omega": omega,
            "tree": nodes,
            "present": present,
        }

    def predict(self, task, personal, x):
        """Return the classes' log-probabilities."""
        z, new = personal["z"], gp.normalised(task.features(personal["body"], x))
        k, cross = gp.train_kernel(z, self.variance), gp.kernel(new, z, self.variance)
        left = self._left(k, cross, personal["side"], personal["omega"])
        return gp.class_logits(left, personal["tree"], personal["present"]).to(task.dtype)

    def _omega(self, k, side, key):
        """Return Polya-Gamma variables (chains, T, n)."""
        if self.inference == "mean_field":
            return gp.mean_field(k, side)[None]
        return torch.stack(
            [
                gp.gibbs(k, side, rng.fold_in(key, i + 1), self.gibbs_steps)
                for i in range(self.chains)
            ]
        )

    def _left(self, k, cross, side, omegas):
        own = self.variance + gp.JITTER
        chains = [
            gp.left_probability(*gp.predictive(k, cross, own, side, omega), self.link)
            for omega in omegas
        ]
        return torch.stack(chains).mean(dim=0)
