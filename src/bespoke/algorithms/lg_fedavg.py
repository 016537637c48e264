"""LG-FedAvg: a personal body under a shared head, the reverse of FedPer."""

from dataclasses import dataclass
from typing import final

from bespoke.core.algorithm import Algorithm


@final
@dataclass(frozen=True)
class LGFedAvg(Algorithm):
    """Each client learns its own representation; only the last layer is averaged.

    Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
    Representations", 2020 (arXiv 2001.01523).

    | paper | here |
    |---|---|
    | l_m, the local representation | ``state["body"]`` |
    | g, the global model | ``down["head"]``: the last layer |

    All clients start from one common body: heads over differently rotated features have no
    meaningful mean. Training starts from scratch, whereas the published code starts from a model
    that FedAvg has trained. Clients are weighted by their rows (the paper: uniformly). A client
    that never took part makes one pass over everything from the common body and keeps the body.
    Bytes per client and round: the head up, the head down.
    """

    private = ("body",)

    def server_init(self, task, params, num_clients, key):
        """Return the head, which is all the server holds."""
        return {"head": task.head(params)}

    def broadcast(self, server):
        """Send the head to everyone."""
        return {"head": server["head"]}

    def client_init(self, task, params, client):
        """Start at the common initial body."""
        return {"body": task.body(params)}

    def client_update(self, local, state, down):
        """Train body and head jointly; keep the body, send the head."""
        task = local.task
        params = local.sgd(task.loss, state["body"] | down["head"])
        return {"body": task.body(params)}, {"head": task.head(params)}

    def adapt(self, local, state, down):
        """Make one joint pass and keep only the body."""
        return self.client_update(local, state, down)[0]

    def personalize(self, local, state, down):
        """Return the client's own body under the shared head."""
        return state["body"] | down["head"]
