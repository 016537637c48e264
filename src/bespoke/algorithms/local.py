"""Local: every client for itself, the reference that federation has to beat."""

from dataclasses import dataclass
from typing import final

from bespoke.core.algorithm import Algorithm


@final
@dataclass(frozen=True)
class LocalOnly(Algorithm):
    """Training without communication, from common initial weights.

    A client trains in the rounds it is drawn for, as in the pFedFDA paper's comparison: at rate q
    it gets q times the epochs of a client that trains in every round. A client that was never drawn
    makes one pass of local training from the common start before it predicts.
    Bytes per client and round: none.
    """

    private = ("model",)

    def server_init(self, task, params, num_clients, key):
        """Return nothing: the server holds no state."""
        return {}

    def broadcast(self, server):
        """Send nothing."""
        return {}

    @property
    def ignores(self):
        return {"weighting": "nothing is averaged"}

    def client_init(self, task, params, client):
        """Start at the common initial weights."""
        return {"model": params}

    def client_update(self, local, state, down):
        """Train further; upload nothing."""
        return self.adapt(local, state, down), {}

    def adapt(self, local, state, down):
        """Make one pass of local training."""
        return {"model": local.sgd(local.task.loss, state["model"])}

    def personalize(self, local, state, down):
        """Return the client's own model."""
        return state["model"]
