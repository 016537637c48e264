"""FedCP: a gate, learned by all, splits each feature between a personal and a global head."""

from dataclasses import dataclass
from typing import final

from torch.nn import functional as F

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths import gates
from bespoke.maths.gates import gate
from bespoke.maths.mmd import mmd


@final
@dataclass(frozen=True)
class FedCP(Algorithm):
    """Logits = h_i(r z) + h_g((1 - r) z) with the gate r in [0, 1] for each example and feature.

    Zhang et al., "FedCP: Separating Feature Information for Personalized Federated Learning via
    Conditional Policy", KDD 2023, Algorithm 1.

    | paper | here |
    |---|---|
    | W^fe: trained copy, frozen copy | ``down["body"]``, once trained and once a constant |
    | W^hd global; W_i^hd | ``down["head"]``; ``state["personal"]`` |
    | CPN | ``down["gate"]``: Linear(d, 2d), LayerNorm, ReLU; halves a, b give r = sigmoid(a - b) |
    | v_i | the normalised sum of the rows of the personal head's weight, fixed for a round |
    | lambda | ``lam``: times the squared MMD between features of the two copies |

    Body, personal head and gate take every step together. The upload's head is the mean of both
    heads. The gate has Gumbel noise in training but not in prediction, where the released code
    draws too, so its accuracies are random. v_i starts from the common head, not from noise. Body,
    global head and gate go to everyone; the released code gives absent clients the body alone. A
    client that never took part starts its head at the global one and fits it with the rest fixed.
    Bytes per client and round: body, head and gate (2 d^2 + 6 d numbers), up and down.
    """

    lam: float = knob(
        5.0, "strength of the tie between features of the trained and received body", low=0
    )
    new_head_epochs: int = knob(5, "epochs a new client fits its head for", low=0)
    private = ("personal",)

    def server_init(self, task, params, num_clients, key):
        block = gates.init(key, task.feature_dim, 2 * task.feature_dim, task.dtype)
        return {"body": task.body(params), "head": task.head(params), "gate": block}

    def broadcast(self, server):
        return server

    def client_init(self, task, params, client):
        return {"personal": task.head(params)}

    def client_update(self, local, state, down):
        """Train body, personal head and gate; keep the head, send the rest and the mean head."""
        task, lam, context = local.task, self.lam, direction(local.task, state["personal"])

        def loss(p, batch, received, head, context):
            z, before = (task.features(body, batch.x, batch.key) for body in (p["body"], received))
            logits = gated(
                task, z, p["personal"], head, gate(p["gate"], z, context, batch.key), batch.key
            )
            return task.error(logits, batch) + lam * mmd(z, before, batch.mask)

        start = {"body": down["body"], "personal": state["personal"], "gate": down["gate"]}
        p = local.sgd(loss, start, down["body"], down["head"], context)
        head = tree.map(lambda own, shared: 0.5 * (own + shared), p["personal"], down["head"])
        return {"personal": p["personal"]}, {"body": p["body"], "head": head, "gate": p["gate"]}

    def adapt(self, local, state, down):
        """Fit the personal head from the global one."""
        task, start = local.task, tree.where(local.round == 1, down["head"], state["personal"])

        def loss(own, batch, body, head, block, context):
            z = task.features(body, batch.x, batch.key)
            return task.error(
                gated(task, z, own, head, gate(block, z, context, batch.key), batch.key), batch
            )

        consts = down["body"], down["head"], down["gate"], direction(task, start)
        return {"personal": local.sgd(loss, start, *consts, epochs=self.new_head_epochs)}

    def personalize(self, local, state, down):
        """Return everything shared, the personal head, and v_i."""
        return {**down, **state, "context": direction(local.task, state["personal"])}

    def predict(self, task, personal, x):
        z = task.features(personal["body"], x)
        return gated(
            task,
            z,
            personal["personal"],
            personal["head"],
            gate(personal["gate"], z, personal["context"]),
        )


def direction(task, head):
    """Return v_i (d,), the sum of the rows of a linear head's weight, scaled to unit length."""
    return F.normalize(head[task.head_names[0]].sum(dim=0), dim=0)


def gated(task, z, own, shared, r, key=None):
    """Return logits (B, C), the sum over both heads of their shares of the features."""
    return task.classify(own, r * z, key) + task.classify(shared, (1.0 - r) * z, key)
