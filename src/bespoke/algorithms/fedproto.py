"""FedProto: every client has a whole model of its own, and only class prototypes are shared."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths import gaussian, prototypes


@final
@dataclass(frozen=True)
class FedProto(Algorithm):
    """Local training with features drawn to the mean class prototypes; no weight is ever sent.

    Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022,
    Algorithm 1.

    | paper | here |
    |---|---|
    | omega_i = (phi_i, nu_i), the local model | ``state["model"]`` |
    | C_i^(j), local prototypes | ``up["prototype"]`` (C, d), each from ``up["rows"]`` rows |
    | C-bar^(j), global prototypes | ``down["prototype"]``, known where ``down["rows"]`` > 0 |
    | lambda | ``lam``: times the term set by ``pull`` |

    ``pull = "rows"`` is the released code, the squared distance of each row's feature to its
    prototype, mean over rows and features; ``"means"`` is the paper, the distance of a batch's
    class means, summed over classes. Local prototypes come from one pass with the trained model
    (the released code: from the last epoch, each row before its own step). ``average``: all owners
    of a class count equally, as in the released code, or by their rows of the class, as in the
    paper, without the paper's further 1 / (number of owners). ``[training] weighting`` has no
    effect. A class that no client in a round has keeps its prototype. All clients start from the
    common weights. Predictions: the client's head; the nearest global prototype, among all classes
    and among the client's own. A client that never took part trains a model from the common start
    in one pass under the pull.
    Bytes per client and round: C d + C numbers down; up d per present class, and C.
    """

    lam: float = knob(1.0, "strength of the pull to the prototypes", low=0)
    pull: str = knob(
        "rows", "what is pulled: each row, or a batch's class means", choices=("rows", "means")
    )
    average: str = knob(
        "uniform", "how the owners of a class are weighted", choices=("uniform", "rows")
    )
    private = ("model",)
    needs_classes = True
    claims = (("rows", "rows"),)
    holds = (
        "class means of all clients' features (of a class with one row, that row's features), and "
        "numbers of rows by class"
    )

    @property
    def ignores(self):
        return {
            "weighting": "`average` weighs the owners of a class",
            "robust": "prototypes are averaged by class",
        }

    def server_init(self, task, params, num_clients, key):
        return prototypes.none(task)

    def broadcast(self, server):
        return server

    def client_init(self, task, params, client):
        return {"model": params}

    def client_update(self, local, state, down):
        """Train under the pull; keep the model, send its prototypes."""
        state, task = self.adapt(local, state, down), local.task
        up = prototypes.own(local.features(state["model"]), task.num_classes)
        local.log(bytes_up=prototypes.nbytes(up["rows"], task.feature_dim))
        return state, up

    def adapt(self, local, state, down):
        """Train the client's model in one pass under the pull."""
        task, lam = local.task, self.lam
        pull = prototypes.pull if self.pull == "rows" else prototypes.pull_means

        def loss(model, batch, prototype, rows):
            z = task.features(model, batch.x, batch.key)
            plain = task.error(task.classify(model, z, batch.key), batch)
            return plain + lam * pull(z, batch, prototype, rows)

        return {"model": local.sgd(loss, state["model"], down["prototype"], down["rows"])}

    def aggregate(self, task, server, uploads, key):
        """Average each class's prototypes over its owners."""
        rows = uploads.tree["rows"]
        return prototypes.combine(
            uploads.tree, rows if self.average == "rows" else torch.ones_like(rows), server
        )

    def personalize(self, local, state, down):
        """Return the client's model, the prototypes, and which classes it has."""
        own = gaussian.one_hot(*local.labels(), local.task.num_classes).sum(dim=0)
        return {
            "model": state["model"],
            "prototype": down["prototype"],
            "rows": down["rows"],
            "own": own,
        }

    def predict(self, task, personal, x):
        z, c, known = (
            task.features(personal["model"], x),
            personal["prototype"],
            personal["rows"] > 0,
        )
        return {
            "personal": task.classify(personal["model"], z),
            "prototype": prototypes.nearest(z, c, known),
            "own_prototype": prototypes.nearest(z, c, known & (personal["own"] > 0)),
        }
