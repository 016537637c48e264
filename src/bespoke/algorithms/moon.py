"""MOON: FedAvg with features kept near the global model's and away from the client's last ones."""

from dataclasses import dataclass
from typing import final

import torch
from torch.nn import functional as F

from bespoke.core.algorithm import Algorithm, finetuned
from bespoke.core.objective import masked_mean
from bespoke.core.settings import knob


@final
@dataclass(frozen=True)
class MOON(Algorithm):
    """Local training with a contrastive term between the features of three models.

    Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1.

    | paper | here |
    |---|---|
    | w^t, the received model: z_glob | ``down["model"]`` |
    | w_i^{t-1}, the last local model: z_prev | ``state["previous"]`` if ``state["seen"]`` is 1 |
    | mu, tau | ``mu``, ``tau`` |

    The term is -log of a softmax over cos(z, z_glob) / tau and cos(z, z_prev) / tau, mean over
    rows; mu = 0 is FedAvg. z are the model's features: a projection head, which the paper puts
    between features and classifier, belongs to the model. In a client's first round there is no
    previous model, and the term is 0 (the released code gives a late joiner a random model
    instead). Only the last model is kept, the paper's buffer of one. The method makes one model for
    all: ``[evaluation] when = "local"`` tests what a client trained, before averaging;
    ``finetune_epochs`` trains the global model further by cross entropy alone, and that serves a
    client that never took part as well.
    Bytes per client and round: the model up, the model down.
    """

    mu: float = knob(1.0, "strength of the contrastive term", low=0)
    tau: float = knob(0.5, "temperature of the contrastive term", above=0)
    finetune_epochs: int = knob(0, "epochs of local training before prediction", low=0)
    finetune_part: str = knob("all", "what fine-tuning trains", choices=("all", "head"))
    private = ("previous", "seen")

    def client_init(self, task, params, client):
        return {"previous": params, "seen": torch.zeros((), dtype=task.dtype, device=task.device)}

    def client_update(self, local, state, down):
        """Train the received model under the term; keep a copy, send it back."""
        task, mu, tau = local.task, self.mu, self.tau

        def loss(w, batch, received, previous, seen):
            z = task.features(w, batch.x, batch.key)
            near = F.cosine_similarity(z, task.features(received, batch.x, batch.key))
            far = F.cosine_similarity(z, task.features(previous, batch.x, batch.key))
            contrast = F.softplus((far - near) / tau)  # -log of the softmax of two
            plain = task.error(task.classify(w, z, batch.key), batch)
            return plain + mu * seen * masked_mean(contrast, batch.mask)

        model = local.sgd(loss, down["model"], down["model"], state["previous"], state["seen"])
        return {"previous": model, "seen": torch.ones_like(state["seen"])}, {"model": model}

    def personalize(self, local, state, down):
        """Return the global model, if asked after fine-tuning without the term and before it."""
        return finetuned(local, down["model"], self.finetune_epochs, self.finetune_part)
