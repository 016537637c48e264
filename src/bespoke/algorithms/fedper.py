"""FedPer: a shared body and a personal head, trained together."""

from dataclasses import dataclass
from typing import final

from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob


@final
@dataclass(frozen=True)
class FedPer(Algorithm):
    """Body and head take every step together; only the body is averaged.

    Arivazhagan et al., "Federated Learning with Personalization Layers", 2019 (arXiv 1912.00818).

    | paper | here |
    |---|---|
    | W_B, the base layers | ``down["body"]`` |
    | W_P, the personal layers | ``state["head"]``: the last layer (K_P = 1) |

    The personal model is the averaged body with the client's own head. A client that never took
    part has the common initial head, which only guesses: ``adapt`` fits it on the fixed body first.
    Bytes per client and round: the body up, the body down.
    """

    new_head_epochs: int = knob(
        5, "epochs a new client fits its head for; 0 = as in training", low=0
    )
    private = ("head",)

    def server_init(self, task, params, num_clients, key):
        """Return the body, which is all the server holds."""
        return {"body": task.body(params)}

    def broadcast(self, server):
        """Send the body to everyone."""
        return {"body": server["body"]}

    def client_init(self, task, params, client):
        """Start at the common initial head."""
        return {"head": task.head(params)}

    def client_update(self, local, state, down):
        """Train body and head jointly; keep the head, send the body."""
        task = local.task
        params = local.sgd(task.loss, down["body"] | state["head"])
        return {"head": task.head(params)}, {"body": task.body(params)}

    def adapt(self, local, state, down):
        """Fit the head on the fixed body."""
        params = local.finetune(
            down["body"] | state["head"], self.new_head_epochs or None, part="head"
        )
        return {"head": local.task.head(params)}

    def personalize(self, local, state, down):
        """Return the shared body with the client's own head."""
        return down["body"] | state["head"]
