"""FedBN: the normalisation layers' scales and shifts stay at home."""

from dataclasses import dataclass
from typing import final

from bespoke.core.algorithm import Algorithm


@final
@dataclass(frozen=True)
class FedBN(Algorithm):
    """FedAvg of everything but the normalisation layers, of which each client has its own.

    Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR
    2021, Algorithm 1.

    | paper | here |
    |---|---|
    | the parameters of norm layers | ``state["norm"]``: scales and shifts, found by layer type |
    | all others | ``down["model"]`` |

    The paper's layers are batch norms, whose running statistics also stay local; here they are
    group, instance and layer norms, which have none. A model without norm layers is refused. All
    parameters train together. Clients are weighted by their rows; the paper's uniform mean is
    ``[training] weighting = "uniform"``. The personal model is the averaged part with the client's
    own norms, however long ago it trained them. A client that never took part fits the norms alone,
    from the common start, ``[evaluation] adapt_rounds`` times; starting at the others' mean would
    require sending norms.
    Bytes per client and round: the model without norms up, the model without norms down.
    """

    private = ("norm",)

    def server_init(self, task, params, num_clients, key):
        """Return the model without norms."""
        return {"model": shared(task, params)}

    def client_init(self, task, params, client):
        """Start at the common initial norms."""
        return {"norm": task.norm(params)}

    def client_update(self, local, state, down):
        """Train everything; keep the norms, send the rest."""
        task = local.task
        params = local.sgd(task.loss, down["model"] | state["norm"])
        return {"norm": task.norm(params)}, {"model": shared(task, params)}

    def adapt(self, local, state, down):
        """Fit the norms with the rest fixed."""
        loss = local.task.loss
        norm = local.sgd(
            lambda norm, batch, rest: loss(rest | norm, batch), state["norm"], down["model"], tag=1
        )
        return {"norm": norm}

    def personalize(self, local, state, down):
        """Return the shared part with the client's own norms."""
        return down["model"] | state["norm"]


def shared(task, params):
    """Return all parameters but those of the normalisation layers."""
    norm = task.norm(params)
    return {name: leaf for name, leaf in params.items() if name not in norm}
