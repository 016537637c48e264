"""FedProx: FedAvg whose clients are held near the model they received."""

from dataclasses import dataclass
from typing import final

from bespoke.core.algorithm import Algorithm, finetuned
from bespoke.core.settings import knob
from bespoke.maths.proximal import near


@final
@dataclass(frozen=True)
class FedProx(Algorithm):
    """Local training with a proximal term: h(w) = F_k(w) + mu/2 |w - w_t|^2.

    Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

    | paper | here |
    |---|---|
    | w_t, the received model (fixed for the round) | ``down["model"]`` |
    | mu | ``mu`` |

    The term is part of the loss, so momentum, weight decay and Adam treat it like the gradient of
    F_k; mu = 0 is FedAvg. Clients are drawn as configured and weighted by their rows (the paper's
    experiments), not drawn in proportion to their rows (its Algorithm 2). Every client does the
    full local work: there are no simulated stragglers. Nothing is kept on a client: an unseen one
    is treated like any other.
    Bytes per client and round: the model up, the model down.
    """

    mu: float = knob(0.01, "strength of the proximal term", low=0)
    finetune_epochs: int = knob(0, "epochs of local training before prediction", low=0)
    finetune_part: str = knob("all", "what fine-tuning trains", choices=("all", "head"))

    def client_update(self, local, state, down):
        """Train near the received model and send the result back."""
        return state, {
            "model": local.sgd(near(local.task.loss, self.mu), down["model"], down["model"])
        }

    def personalize(self, local, state, down):
        """Return the global model, if asked after fine-tuning without the term and before it."""
        return finetuned(local, down["model"], self.finetune_epochs, self.finetune_part)
