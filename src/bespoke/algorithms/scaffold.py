"""SCAFFOLD: control variates take the clients' own directions out of their steps."""

from dataclasses import dataclass
from typing import final

import torch
from torch.func import grad_and_value

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm, finetuned
from bespoke.core.settings import knob


@final
@dataclass(frozen=True)
class Scaffold(Algorithm):
    """Local steps along g(y) - c_i + c: a client's own mean gradient is replaced by everyone's.

    Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
    2020, Algorithm 1.

    | paper | here |
    |---|---|
    | x, c | ``down["model"]``, ``down["control"]`` |
    | y_i; c_i+ - c_i | ``up["model"]``; ``up["change"]`` |
    | c_i | ``state["own"]``, initially 0 |
    | option II, I for c_i+ | ``control = "steps"``, ``"start"`` |
    | eta_g; N | ``server_lr``; ``server["clients"]`` |

    Option II, c_i - c + (x - y_i) / (K eta_l), is the mean of the K gradients g only if steps are
    plain. Here that mean is taken itself, so momentum, Adam, clipping and weight decay may be used,
    and decay is no part of it. Option I is the gradient at x on all rows. Means are plain, whatever
    ``[training] weighting``: c is everyone's plain mean, absent clients included, so x and c move
    by the shares eta_g and |S| / N towards the senders'. An absent client keeps its c_i. A new
    client uses x, with ``finetune_epochs`` after training a copy, as all do.
    Bytes per client and round: the model and a control up, the model and a control down.
    """

    control: str = knob(
        "steps",
        "a client's control: the mean gradient of its steps, or the gradient at the start",
        choices=("steps", "start"),
    )
    server_lr: float = knob(1.0, "share of the way the model moves to the clients' mean", above=0)
    finetune_epochs: int = knob(0, "epochs of local training before prediction", low=0)
    private = ("own",)

    @property
    def ignores(self):
        return {"weighting": "its control is a plain mean over all clients"}

    def server_init(self, task, params, num_clients, key):
        """Start with c = 0, and remember N."""
        clients = torch.full((), num_clients, dtype=torch.float64, device=task.device)
        return {"model": params, "control": tree.zeros_like(params), "clients": clients}

    def broadcast(self, server):
        """Send x and c."""
        return {"model": server["model"], "control": server["control"]}

    def client_init(self, task, params, client):
        """Start with c_i = 0."""
        return {"own": tree.zeros_like(params)}

    def client_update(self, local, state, down):
        """Take corrected steps; send y and how c_i changed."""
        x, loss = down["model"], local.task.loss

        def corrected(y, batch, seen, correction):
            g, value = grad_and_value(loss)(y, batch)
            seen = {"sum": tree.add(seen["sum"], g), "steps": seen["steps"] + 1.0}
            return value, tree.add(g, correction), seen

        correction = tree.sub(down["control"], state["own"])
        start = {"sum": tree.zeros_like(x), "steps": torch.zeros_like(local.lr)}
        y, seen = local.trace(None, x, None, start, correction, gradient=corrected)
        own = tree.map(lambda total: total / seen["steps"], seen["sum"])
        if self.control == "start":
            own = local.gradient(loss, x)
        return {"own": own}, {"model": y, "change": tree.sub(own, state["own"])}

    def aggregate(self, task, server, uploads, key):
        """Move x towards the mean of y, and c by the mean change over all N clients."""
        equal, rate = torch.ones_like(uploads.weights), self.server_lr
        share = (len(uploads.clients) / server["clients"]).to(task.dtype)
        mean, change = uploads.mean("model", equal), uploads.mean("change", equal)
        model = tree.map(lambda x, y: (1.0 - rate) * x + rate * y, server["model"], mean)
        return server | {"model": model, "control": tree.add(server["control"], change, share)}

    def personalize(self, local, state, down):
        """Return the global model, if asked after fine-tuning and before it."""
        return finetuned(local, down["model"], self.finetune_epochs)
