"""FedALA: each client learns, weight by weight, how much of the global head to take over."""

from dataclasses import dataclass
from typing import final

import torch
from torch.func import grad

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob


@final
@dataclass(frozen=True)
class FedALA(Algorithm):
    """FedAvg whose clients start at own + W (received - own), with W learnt on their own rows.

    Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI
    2023, Algorithm 1.

    | paper | here |
    |---|---|
    | Theta^t, the received model | ``down["model"]`` |
    | Theta_i^{t-1}, the client's own | ``state["own"]``, what it trained last |
    | W_i^p in [0, 1] | ``state["mix"]``, initially 1, of the shape of the top layers |
    | p, the top layers | ``part``: the head, or all layers |
    | s %; eta | ``share`` of the minibatches of a pass; ``mix_lr`` |
    | until W_i^p converges | ``first_passes`` |

    Layers below the top are the received ones. W takes plain steps along the gradient with respect
    to W, each clipped to [0, 1]: ``first_passes`` the first time that own and received model
    differ, then one pass a round. The whole model is trained from the mixture and sent; the mean is
    weighted by rows. The personal model is the mixture with the newest model, for which W takes one
    more pass, or its first ones; that is not kept. A client that never took part trains the
    received model for a round, keeps the result as its own, and mixes.
    Bytes per client and round: the model up, the model down.
    """

    part: str = knob("head", "the layers that are mixed", choices=("head", "all"))
    mix_lr: float = knob(1.0, "learning rate of the mixing weights", low=0)
    share: float = knob(0.8, "share of a pass's minibatches that W is learnt on", above=0, high=1)
    first_passes: int = knob(10, "passes in which W is learnt the first time", low=1, high=1000)
    private = ("own", "mix", "learnt")

    def client_init(self, task, params, client):
        """Start with the common initial model, and take over all of what comes."""
        mix = tree.map(torch.ones_like, self._top(task, params))
        learnt = torch.zeros((), dtype=task.dtype, device=task.device)
        return {"own": params, "mix": mix, "learnt": learnt}

    def _top(self, task, params):
        return task.head(params) if self.part == "head" else params

    def _aggregated(self, local, state, down):
        """Learn W; return the local mixture, W, and whether it was ever learnt."""
        task, received, rate = local.task, down["model"], self.mix_lr
        own, new = self._top(task, state["own"]), self._top(task, received)
        differ = tree.sq_dist(own, new) > 0.0
        per_pass = (self.share * local.num_steps(epochs=1).double() - 1e-9).ceil().long()
        passes = torch.where(state["learnt"] > 0.0, 1, self.first_passes)

        def step(carry, batch, own, new, received):
            def loss(mix):
                return task.loss(received | mixed(own, new, mix), batch)

            slope = grad(loss)(carry["mix"])
            return {
                "mix": tree.map(lambda w, g: (w - rate * g).clamp(0.0, 1.0), carry["mix"], slope)
            }

        mix = local.scan(
            step,
            {"mix": state["mix"]},
            own,
            new,
            received,
            epochs=self.first_passes,
            limit=torch.where(differ, passes * per_pass, 0),
            tag=1,
        )["mix"]
        learnt = torch.where(differ, 1.0, state["learnt"])
        return received | mixed(own, new, mix), mix, learnt

    def client_update(self, local, state, down):
        """Mix, then train the whole model; keep it and send it."""
        start, mix, learnt = self._aggregated(local, state, down)
        model = local.sgd(local.task.loss, start)
        return {"own": model, "mix": mix, "learnt": learnt}, {"model": model}

    def adapt(self, local, state, down):
        """Make a round and send nothing; the first starts from the received model."""
        own = tree.where(local.round == 1, down["model"], state["own"])
        return self.client_update(local, state | {"own": own}, down)[0]

    def personalize(self, local, state, down):
        """Return the local mixture with the newest model."""
        return self._aggregated(local, state, down)[0]


def mixed(own, new, mix):
    """Return own + mix (new - own), leaf by leaf."""
    return tree.map(lambda a, b, w: a + (b - a) * w, own, new, mix)
