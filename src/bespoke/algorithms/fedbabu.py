"""FedBABU: the body trains under a fixed head; heads become personal by fine-tuning at the end."""

from dataclasses import dataclass
from typing import final

from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob


@final
@dataclass(frozen=True)
class FedBABU(Algorithm):
    """Body Aggregation and Body Update under a common random head; fine-tuning before prediction.

    Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR
    2022, Algorithm 1.

    | paper | here |
    |---|---|
    | theta_ext, the body | ``down["body"]`` |
    | theta_cls, the head, the same on all clients | ``state["head"]``: the common initial head |
    | tau_f, epochs of fine-tuning | ``finetune_epochs`` |

    The head is not a parameter of the optimiser, so neither momentum nor weight decay moves it.
    Fine-tuning trains body and head (``finetune_part = "head"``: the head alone), at every
    evaluation, on a copy; it starts from the averaged body. Clients are weighted by their rows. A
    client that never took part is treated like any other. Views: after fine-tuning, and before it.
    Bytes per client and round: the body up, the body down.
    """

    finetune_epochs: int = knob(5, "epochs of local training before prediction", low=0)
    finetune_part: str = knob("all", "what fine-tuning trains", choices=("all", "head"))
    finetune_lr: float = knob(0.0, "learning rate of fine-tuning; 0 = as in training", low=0)
    private = ("head",)

    def client_init(self, task, params, client):
        """Return the common initial head, which never changes."""
        return {"head": task.head(params)}

    def server_init(self, task, params, num_clients, key):
        return {"body": task.body(params)}

    def broadcast(self, server):
        return server

    def client_update(self, local, state, down):
        """Train the body under the fixed head."""
        loss = local.task.loss
        body = local.sgd(
            lambda body, batch, head: loss(body | head, batch), down["body"], state["head"]
        )
        return state, {"body": body}

    def personalize(self, local, state, down):
        """Return a fine-tuned copy of the model, and the model."""
        model = down["body"] | state["head"]
        tuned = local.finetune(
            model, self.finetune_epochs, self.finetune_part, lr=self.finetune_lr or None
        )
        return {"personal": tuned, "global": model}

    def predict(self, task, personal, x):
        """Return logits after and before fine-tuning."""
        return {view: task.logits(model, x) for view, model in personal.items()}
