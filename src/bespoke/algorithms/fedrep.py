"""FedRep: a shared body and a personal head, trained one after the other."""

from dataclasses import dataclass
from typing import final

from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob


@final
@dataclass(frozen=True)
class FedRep(Algorithm):
    """First the head on the received body, then the body under the fixed head.

    Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML
    2021, Algorithm 1.

    | paper | here |
    |---|---|
    | phi, the representation | ``down["body"]`` |
    | h_i, the head | ``state["head"]`` |
    | tau_h, tau_phi | ``head_epochs``, ``body_epochs`` |

    Each phase has its own optimiser, so no momentum leaks from the head into the body. Clients are
    weighted by their rows; the paper's uniform mean is ``[training] weighting = "uniform"``. A
    client that never took part fits its head from the common start, as the paper does for new
    clients; the public code would start it from an average of heads that were never sent. With
    ``refit_epochs`` every client first fits a copy of its head to the averaged body, as the public
    code does before its last test.
    Bytes per client and round: the body up, the body down.
    """

    head_epochs: int = knob(10, "epochs of the head phase", low=1)
    body_epochs: int = knob(1, "epochs of the body phase", low=1)
    refit_epochs: int = knob(0, "epochs every client refits its head for before prediction", low=0)
    private = ("head",)

    @property
    def ignores(self):
        return dict.fromkeys(("epochs", "steps"), "head_epochs and body_epochs set its phases")

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
        """Train the head, then the body; keep the head, send the body."""
        loss = local.task.loss
        head = self.adapt(local, state, down)["head"]
        body = local.sgd(
            lambda w, batch, head: loss(w | head, batch),
            down["body"],
            head,
            epochs=self.body_epochs,
            tag=1,
        )
        return {"head": head}, {"body": body}

    def adapt(self, local, state, down):
        """Train the head alone."""
        params = local.finetune(down["body"] | state["head"], self.head_epochs, part="head")
        return {"head": local.task.head(params)}

    def personalize(self, local, state, down):
        """Return the shared body with the client's own head, refitted if asked."""
        return local.finetune(down["body"] | state["head"], self.refit_epochs, part="head")
