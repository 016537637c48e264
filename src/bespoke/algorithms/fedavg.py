"""FedAvg, and FedAvg-FT as the same class with fine-tuning switched on."""

from dataclasses import dataclass
from typing import final

from bespoke.core.algorithm import Algorithm, finetuned
from bespoke.core.settings import knob


@final
@dataclass(frozen=True)
class FedAvg(Algorithm):
    """One model for all: average what the clients train.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    AISTATS 2017.

    | paper | here |
    |---|---|
    | w, the global model | ``down["model"]`` |
    | E, B, eta | ``[training] epochs, batch, lr`` |
    | n_k / n | ``Uploads.weights`` |

    The personal model is the global one, or with ``finetune_epochs`` a copy of it that each client
    trains a little further and discards (FedAvg-FT): the strongest simple baseline. Then there are
    two views: after fine-tuning, and before it, which is FedAvg. Nothing is kept on a client, so an
    unseen client is treated like any other.
    Bytes per client and round: the model up, the model down.
    """

    finetune_epochs: int = knob(0, "epochs of local training before prediction", low=0)
    finetune_part: str = knob("all", "what fine-tuning trains", choices=("all", "head"))
    finetune_lr: float = knob(0.0, "learning rate of fine-tuning; 0 = as in training", low=0)

    def client_update(self, local, state, down):
        """Train the received model and send it back."""
        return state, {"model": local.sgd(local.task.loss, down["model"])}

    def personalize(self, local, state, down):
        """Return the global model, if asked after fine-tuning and before it."""
        lr = self.finetune_lr or None
        return finetuned(local, down["model"], self.finetune_epochs, self.finetune_part, lr)
