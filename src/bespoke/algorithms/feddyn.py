"""FedDyn: a regulariser that follows each client's gradient, so that all agree on a minimum."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm, finetuned
from bespoke.core.settings import knob
from bespoke.maths.proximal import near


@final
@dataclass(frozen=True)
class FedDyn(Algorithm):
    """Each client minimises L_i(w) - <g_i, w> + alpha/2 |w - w_t|^2, with g_i its last gradient.

    Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1.

    | paper | here |
    |---|---|
    | theta^t, the received model | ``down["model"]`` |
    | theta_k, the minimum | ``up["model"]``: ``[training] epochs`` of SGD from theta^t |
    | gradient of L_k at theta_k | ``state["slope"]``: 0, minus alpha (theta_k - theta^t) a round |
    | h | ``server["h"]``: the mean of the gradients of all clients, absent ones included |
    | m, alpha | ``server["clients"]``, ``alpha`` |

    At a minimum of the client's loss the update of g_i makes it the gradient there; SGD comes near
    it if alpha times the rate times the number of steps is not small. Then the mean of the models
    minus h / alpha is stationary only where the plain mean of all L_i is, so means are plain,
    whatever ``[training] weighting``. The terms are part of the loss, so momentum, weight decay and
    Adam treat them like the gradient of L_i; they act from the first round on. An absent client
    keeps its g_i. A new client uses the global model, with ``finetune_epochs`` after training a
    copy of it, as all do.
    Bytes per client and round: the model up, the model down.
    """

    alpha: float = knob(0.01, "strength of the regulariser", above=0)
    finetune_epochs: int = knob(0, "epochs of local training before prediction", low=0)
    private = ("slope",)

    @property
    def ignores(self):
        return {"weighting": "its fixed point needs plain means"}

    def server_init(self, task, params, num_clients, key):
        """Start with h = 0, and remember the number of clients."""
        clients = torch.full((), num_clients, dtype=torch.float64, device=task.device)
        return {"model": params, "h": tree.zeros_like(params), "clients": clients}

    def client_init(self, task, params, client):
        """Start with a gradient of 0."""
        return {"slope": tree.zeros_like(params)}

    def client_update(self, local, state, down):
        """Minimise the regularised loss; keep the gradient that its minimum implies."""
        w, tied = down["model"], near(local.task.loss, self.alpha)

        def regularised(params, batch, anchor, slope):
            return tied(params, batch, anchor) - tree.dot(slope, params)

        model = local.sgd(regularised, w, w, state["slope"])
        slope = tree.add(state["slope"], tree.sub(model, w), -self.alpha)
        return {"slope": slope}, {"model": model}

    def aggregate(self, task, server, uploads, key):
        """Update h by the senders' share of all clients; take the mean model minus h / alpha."""
        mean = uploads.mean("model", torch.ones_like(uploads.weights))
        share = (len(uploads.clients) / server["clients"]).to(task.dtype)
        h = tree.add(server["h"], tree.sub(mean, server["model"]), -self.alpha * share)
        return server | {"model": tree.add(mean, h, -1.0 / self.alpha), "h": h}

    def personalize(self, local, state, down):
        """Return the global model, if asked after fine-tuning and before it."""
        return finetuned(local, down["model"], self.finetune_epochs)
