"""FedRoD: a generic head for all classes alike, and a personal one on top of it."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths import gaussian


@final
@dataclass(frozen=True)
class FedRoD(Algorithm):
    """Two heads on one body: a generic one under balanced softmax, a personal one that corrects it.

    Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image
    Classification", ICLR 2022.

    | paper | here |
    |---|---|
    | theta and psi, body and generic head | ``down["model"]`` |
    | phi_m, the personal head | ``state["head"]``, as large as the generic one |
    | H_nu, the hyper-network, from class shares a_m to phi_m | ``down["hyper"]``: a linear map |
    | gamma, the exponent of the class counts in the balanced loss | ``gamma`` |

    Balanced softmax adds gamma log(share) of each class to the generic logits; a class without rows
    drops out of the softmax. The personal head takes features and generic logits as constants, so
    its loss trains nothing else; each step is on the sum of both losses (``clip`` measures both
    gradients together). Started at zero, a personal head first predicts like the generic one;
    public code starts at a copy of it. A client that never took part fits a head on the fixed rest;
    a generated one needs no fitting. Views: both heads together, and the generic one alone.
    Bytes per client and round: the model up, the model down; with ``heads = "hyper"`` also the
    hyper-network.
    """

    heads: str = knob("linear", "source of the personal head", choices=("linear", "hyper"))
    gamma: float = knob(
        1.0, "exponent of the class counts in the balanced loss; 0 = plain loss", low=0
    )
    head_start: str = knob("zero", "initial personal head", choices=("zero", "copy"))
    new_head_epochs: int = knob(5, "epochs a new client fits its head for", low=0)
    refit_epochs: int = knob(0, "epochs every client refits its head for before prediction", low=0)
    private = ("head",)
    needs_classes = True

    def server_init(self, task, params, num_clients, key):
        """Return the model, and the hyper-network: one head per class, which class shares mix."""
        first = self._start(task, params)
        hyper = {
            name: torch.stack([leaf] * task.num_classes, dim=-1) for name, leaf in first.items()
        }
        return {"model": params} | ({"hyper": hyper} if self.heads == "hyper" else {})

    def _start(self, task, params):
        return {
            name: float(self.head_start == "copy") * leaf
            for name, leaf in task.head(params).items()
        }

    def broadcast(self, server):
        return server

    def client_init(self, task, params, client):
        """Return the first personal head, or none if it is generated."""
        return {"head": self._start(task, params) if self.heads == "linear" else {}}

    def client_update(self, local, state, down):
        """Train on both losses together; keep the personal head, send the rest."""
        task, share = local.task, gaussian.own_prior(local, 0.0)
        prior = self.gamma * share.log().clamp(min=-1e9)  # finite, but as good as infinite

        def loss(params, batch, share, prior):
            z = task.features(params["model"], batch.x, batch.key)
            generic = task.classify(params["model"], z, batch.key)
            personal = generic.detach() + task.classify(
                own_head(params, share), z.detach(), batch.key
            )
            return task.error(generic + prior, batch) + task.error(personal, batch)

        params = local.sgd(loss, down | state, share, prior)
        return {"head": params["head"]}, {name: params[name] for name in down}

    def _fit(self, local, model, head, epochs):
        task = local.task

        def loss(head, batch, model):
            z = task.features(model, batch.x, batch.key)
            return task.error(
                task.classify(model, z, batch.key) + task.classify(head, z, batch.key), batch
            )

        return local.sgd(loss, head, model, epochs=epochs, tag=1) if epochs else head

    def adapt(self, local, state, down):
        """Fit the client's own head, if it has one."""
        return {"head": self._fit(local, down["model"], state["head"], self.new_head_epochs)}

    def personalize(self, local, state, down):
        head = own_head(down | state, gaussian.own_prior(local, 0.0))
        return {
            "model": down["model"],
            "head": self._fit(local, down["model"], head, self.refit_epochs),
        }

    def predict(self, task, personal, x):
        """Return the sum of both heads' logits, and the generic ones alone."""
        z = task.features(personal["model"], x)
        generic = task.classify(personal["model"], z)
        return {"personal": generic + task.classify(personal["head"], z), "global": generic}


def own_head(params, share):
    """Return the client's own head, or the one generated from its class shares (C,)."""
    return params["head"] or {name: leaf @ share for name, leaf in params["hyper"].items()}
