"""APFL: each client mixes the global model with one of its own."""

from dataclasses import dataclass
from typing import final

import torch
from torch.func import grad

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob


@final
@dataclass(frozen=True)
class APFL(Algorithm):
    """FedAvg for w, and per client a model v trained for its part in alpha v + (1 - alpha) w.

    Deng et al., "Adaptive Personalized Federated Learning", 2020 (arXiv 2003.13461), Algorithm 1.

    | paper | here |
    |---|---|
    | w_i, the client's copy of the global model | ``down["model"]``, then ``up["model"]`` |
    | v_i, the local model | ``state["personal"]`` |
    | alpha_i, the weight of v_i | ``state["alpha"]``, initially ``alpha``; ``adaptive`` moves it |

    Both models take each step together from the values before it, so v moves by alpha times the
    gradient at the mixture, and w exactly as in FedAvg (unless ``clip`` is set: it measures both
    gradients together). An adaptive alpha moves once per round, along the first batch's gradient,
    and is used from the second step on. ``mix = "logits"`` mixes the two models' logits instead of
    their parameters, as the authors' code does. With ``own_step = "full"`` v moves by the whole
    gradient at the mixture. Clients are weighted by their rows (the paper:
    uniformly). The personal model mixes v with the averaged w. A client that never took part starts
    v at the received w and makes one pass; its changes to w are dropped.
    Bytes per client and round: the model up, the model down.
    """

    alpha: float = knob(
        0.5, "initial weight of the client's own model in the mixture", low=0, high=1
    )
    adaptive: bool = knob(False, "each client moves its alpha once per round")
    mix: str = knob("params", "what is mixed", choices=("params", "logits"))
    own_step: str = knob(
        "alpha",
        "how far the own model moves: alpha times the mixture's gradient, or all of it",
        choices=("alpha", "full"),
    )
    private = ("personal", "alpha")

    def client_init(self, task, params, client):
        """Start the client's own model at the common initial weights."""
        return {
            "personal": params,
            "alpha": torch.full((), self.alpha, dtype=task.dtype, device=task.device),
        }

    def client_update(self, local, state, down):
        """Train w and v side by side; keep v, send w."""
        task, mix, full, first = local.task, self.mix, self.own_step == "full", state["alpha"]
        alpha = self._move(local, state, down["model"]) if self.adaptive else first

        def loss(params, batch, first, alpha):
            w, alpha = params["model"], torch.where(batch.step == 0, first, alpha)
            v = params["personal"]
            if full:  # the value of v, with a slope of 1 / alpha
                slope = 1.0 / alpha.clamp(min=1e-12)
                v = tree.map(lambda v: v.detach() + slope * (v - v.detach()), v)
            mixed = mixed_logits(task, mix, alpha, v, tree.detach(w), batch.x, batch.key)
            return task.loss(w, batch) + task.error(mixed, batch)

        params = local.sgd(
            loss, {"model": down["model"], "personal": state["personal"]}, first, alpha
        )
        local.log(alpha=alpha)
        return {"personal": params["personal"], "alpha": alpha}, {"model": params["model"]}

    def _move(self, local, state, w):
        """Move alpha by one step on the first batch, kept within [0, 1]."""
        task, mix = local.task, self.mix

        def step(carry, batch, v, w, rate):
            def mixed_loss(alpha):
                return task.error(mixed_logits(task, mix, alpha, v, w, batch.x, batch.key), batch)

            alpha = carry["alpha"]
            return {"alpha": (alpha - rate * grad(mixed_loss)(alpha)).clamp(0.0, 1.0)}

        start = {"alpha": state["alpha"]}
        return local.scan(step, start, state["personal"], w, local.lr, steps=1)["alpha"]

    def adapt(self, local, state, down):
        """Make a round and keep v and alpha; the first starts from the current global model."""
        start = tree.where(local.round == 1, down["model"], state["personal"])
        return self.client_update(local, state | {"personal": start}, down)[0]

    def personalize(self, local, state, down):
        """Return both models and the mixing weight."""
        return state | {"model": down["model"]}

    def predict(self, task, personal, x):
        """Return the mixture's logits."""
        return mixed_logits(
            task, self.mix, personal["alpha"], personal["personal"], personal["model"], x
        )


def mixed_logits(task, mix, alpha, v, w, x, key=None):
    """Return logits (B, C) of alpha v + (1 - alpha) w, or mix both models' logits likewise."""
    if mix == "logits":
        return alpha * task.logits(v, x, key) + (1.0 - alpha) * task.logits(w, x, key)
    return task.logits(tree.map(lambda a, b: alpha * a + (1.0 - alpha) * b, v, w), x, key)
