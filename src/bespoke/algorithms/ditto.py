"""Ditto: a personal model beside the global one, tied to it by a proximal term."""

from dataclasses import dataclass
from typing import final

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths.proximal import near


@final
@dataclass(frozen=True)
class Ditto(Algorithm):
    """FedAvg for all, and for each client v: min F_k(v) + lambda/2 |v - w_t|^2.

    Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
    Algorithm 1.

    | paper | here |
    |---|---|
    | w_t, the received model | ``down["model"]`` |
    | v_k, the personal model | ``state["personal"]`` |
    | lambda | ``lam`` |
    | r, s (local steps for w and v) | ``[training] epochs``, ``personal_epochs`` |

    The anchor is the model received at the start of the round. The personal pass has its own
    batches and a fresh optimiser, so the global model moves exactly as in FedAvg. Clients are
    weighted by their rows. A client that never took part starts v from the current global model and
    makes one personal pass.
    Bytes per client and round: the model up, the model down.
    """

    lam: float = knob(1.0, "strength of the tie to the global model", low=0)
    personal_epochs: int = knob(0, "epochs of the personal pass; 0 = as in the global pass", low=0)
    private = ("personal",)

    def client_init(self, task, params, client):
        """Start the personal model at the common initial weights."""
        return {"personal": params}

    def client_update(self, local, state, down):
        """Make the global pass and send its result; then the personal pass, which stays."""
        model = local.sgd(local.task.loss, down["model"])
        return {"personal": self._personal_pass(local, state["personal"], down["model"])}, {
            "model": model
        }

    def _personal_pass(self, local, v, anchor):
        tied = near(local.task.loss, self.lam)
        return local.sgd(tied, v, anchor, epochs=self.personal_epochs or None, tag=1)

    def adapt(self, local, state, down):
        """Make a personal pass; the first starts from the current global model."""
        start = tree.where(local.round == 1, down["model"], state["personal"])
        return {"personal": self._personal_pass(local, start, down["model"])}

    def personalize(self, local, state, down):
        """Return the personal model."""
        return state["personal"]
