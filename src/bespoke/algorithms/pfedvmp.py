"""pFedVMP: FedPer with features drawn to class centroids, averaged by clients' precisions."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths import gaussian, prototypes


@final
@dataclass(frozen=True)
class PFedVMP(Algorithm):
    """Variational message passing for a shared body, personal heads and global class centroids.

    "Personalized Federated Learning via Variational Message Passing", anonymous, under review;
    Algorithm 1.

    | paper | here |
    |---|---|
    | theta^b; theta_n^h | ``down["body"]``; ``state["head"]`` |
    | mu_k | ``down["centroid"]``; ``down["known"]`` is 1 once a class has one |
    | Lambda_{k,n} = pinv(Sigma_{k,n}) + alpha I | ``up["precision"]``, each packed; ``alpha`` |
    | xi_1 | ``xi``: times the mean over rows and features (the text's sum diverges at its values) |

    The pseudo-inverse comes from the Gram matrix of a client's rows and a Cholesky solve, with a
    smooth cut-off ``cut`` relative to the mean within-class variance, so that near-duplicate rows
    do not dominate. A class that a client lacks contributes nothing; the penalty waits until a
    centroid exists. ``aggregation = "mean"`` is the paper's ablation, weighted by rows.
    Predictions: body and head; the nearest centroid. A client that never took part fits its head on
    the fixed body for ``new_head_epochs``, without the penalty.
    Bytes per client and round: down body and centroids; up body and, per present class, its mean
    and the smaller of the packed precision and its low-rank factor.
    """

    xi: float = knob(50.0, "strength of the pull to the centroids", low=0)
    alpha: float = knob(1.0, "added to the diagonal of every precision", above=0)
    cut: float = knob(
        1e-4, "variances below this share of the mean within-class variance do not count", above=0
    )
    aggregation: str = knob(
        "precision", "how centroids are averaged", choices=("precision", "mean")
    )
    new_head_epochs: int = knob(5, "epochs a new client fits its head for", low=0)
    private = ("head",)
    needs_classes = True
    claims = (("precision", "spd"), ("count", "rows"))
    holds = "class means of all clients' features: of a class with one row, that row's features"

    @property
    def unbounded(self):
        return {"precision": "the inverse of a variance near 0 is huge on clean data too"}

    def server_init(self, task, params, num_clients, key):
        centroid = torch.zeros(
            task.num_classes, task.feature_dim, dtype=task.dtype, device=task.device
        )
        return {"body": task.body(params), "centroid": centroid, "known": centroid[:, 0]}

    def broadcast(self, server):
        return server

    def client_init(self, task, params, client):
        return {"head": task.head(params)}

    def client_update(self, local, state, down):
        """Train body and head under the pull; send the body and class means and precisions."""
        task, xi = local.task, self.xi

        def loss(params, batch, centroid, known):
            z = task.features(params, batch.x, batch.key)
            plain = task.error(task.classify(params, z, batch.key), batch)
            return plain + xi * prototypes.pull(z, batch, centroid, known)

        params = local.sgd(loss, down["body"] | state["head"], down["centroid"], down["known"])
        z, y, mask = local.features(params)
        member = gaussian.one_hot(y, mask, task.num_classes)
        mean = gaussian.class_means(z, member, torch.zeros_like(down["centroid"]))
        up = {"body": task.body(params), "mean": mean, "count": member.sum(dim=0)}
        if self.aggregation == "precision":
            own = gaussian.class_precisions(z, member, self.alpha, self.cut)
            up["precision"] = gaussian.pack(own)
            there = (up["count"] > 0).to(own.dtype)
            size = own.diagonal(dim1=-2, dim2=-1).mean(dim=-1)  # over features, (C,)
            local.log(precision=(size * there).sum() / there.sum().clamp(min=1.0))
            floats = gaussian.message_floats(up["count"], task.feature_dim)
            local.log(bytes_up=tree.nbytes(up["body"]) + 4.0 * floats)
        return {"head": task.head(params)}, up

    def aggregate(self, task, server, uploads, key):
        """Average the body as in FedAvg, and each centroid by precisions."""
        up = uploads.tree
        body = uploads.mean("body")
        mean, count = up["mean"].double(), up["count"].double()  # (K, C, d), (K, C)
        if self.aggregation == "precision":
            precision = gaussian.unpack(up["precision"].double(), task.feature_dim)
        else:
            precision = count[..., None, None] * torch.eye(
                task.feature_dim, device=mean.device, dtype=mean.dtype
            )
        centroid = gaussian.precision_mean(mean, precision, count, server["centroid"]).to(
            task.dtype
        )
        known = torch.maximum(server["known"], (count.sum(dim=0) > 0).to(task.dtype))
        return {"body": body, "centroid": centroid, "known": known}

    def adapt(self, local, state, down):
        """Fit the head on the fixed body."""
        params = local.finetune(down["body"] | state["head"], self.new_head_epochs, part="head")
        return {"head": local.task.head(params)}

    def personalize(self, local, state, down):
        """Return the shared body with the client's own head, and the centroids."""
        return {
            "model": down["body"] | state["head"],
            "centroid": down["centroid"],
            "known": down["known"],
        }

    def predict(self, task, personal, x):
        """Return the head's logits, and minus the squared distance to each known centroid."""
        z = task.features(personal["model"], x)
        near = prototypes.nearest(z, personal["centroid"], personal["known"])
        return {"personal": task.classify(personal["model"], z), "centroid": near}
