"""Self-FL: a client's uncertainty decides where it starts, how long it trains and its weight."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths import uncertainty


@final
@dataclass(frozen=True)
class SelfFL(Algorithm):
    """A two-level Gaussian model balances what a client knows itself against what the others know.

    Chen et al., "Self-Aware Personalized Federated Learning", NeurIPS 2022, Algorithm 1.

    | paper | here |
    |---|---|
    | theta, theta_m | ``down["model"]``, ``state["theta"]`` |
    | l_m, l_max | ``steps_rule``, ``max_steps`` |
    | sigma_m^2: trace of the scatter of theta_m^1, theta_m^2, ... | from ``state["history"]`` |
    | sigma_0^2: the same over a round's clients | ``down["sigma0"]`` |
    | W: the sum of all w_m = 1 / (sigma_0^2 + sigma_m^2) | ``down["total"]`` |

    A client uses the sigma_m^2 it last reported, so its start is exactly the mean of the others. W
    sums over all registered clients; those not heard from count as the average. ``steps_rule``:
    "mean" is equation (8) for a mean loss (curvature 1 / (n sigma_m^2)), "sum" is as printed.
    ``variance``: the scatter (as printed), or divided by n - 1. A client with fewer than two
    results starts at the global model, takes ``default_steps`` and weighs as much as the median
    one; an unseen client adapts this way. The global model moves by the share of clients present.
    Warm rounds are FedAvg's, of ``default_steps``: the mean by rows replaces the global model.
    Bytes per client and round: the model and two numbers, up and down.
    """

    max_steps: int = knob(40, "maximum number of local steps", low=1)
    default_steps: int = knob(20, "local steps where the rule does not apply", low=1)
    steps_rule: str = knob(
        "mean", "how the number of steps follows from uncertainty", choices=("mean", "sum", "fixed")
    )
    own_start: bool = knob(True, "start from the others' mean instead of the global model")
    own_weight: bool = knob(True, "weigh clients by their uncertainty instead of their rows")
    variance: str = knob("scatter", "how a scatter becomes a variance", choices=("scatter", "n-1"))
    warm_rounds: int = knob(0, "initial rounds of plain FedAvg, of default_steps", low=0)
    private = ("history",)
    claims = (("known", "share"), ("sigma", "positive"))

    @property
    def ignores(self):
        own = dict.fromkeys(("epochs", "steps"), "it decides each client's number of steps itself")
        weights = {"weighting": "uncertainty weighs its clients"}
        return own if self.warm_rounds or not self.own_weight else own | weights

    @property
    def unbounded(self):
        return {"sigma": "a variance is almost 0 until a client has a history"}

    def server_init(self, task, params, num_clients, key):
        zeros = torch.zeros(num_clients + 2, dtype=torch.float64, device=task.device)
        return {
            "model": params,
            "sigma": zeros[2:],
            "known": zeros[2:],
            "sigma0": zeros[0],
            "round": zeros[1],
        }

    def broadcast(self, server):
        known = server["known"]
        weights = known / (server["sigma0"] + server["sigma"]).clamp(min=1e-300)
        total = weights.sum() * (len(known) / known.sum().clamp(min=1.0))
        return {"model": server["model"], "sigma0": server["sigma0"], "total": total}

    def client_init(self, task, params, client):
        return {"theta": params, "history": uncertainty.no_history(params)}

    def client_update(self, local, state, down):
        able = (state["history"]["count"] >= 2) & (local.round > self.warm_rounds)
        sigma = self._variance(state)
        weight = 1.0 / (down["sigma0"] + sigma)
        others, start = (down["total"] - weight).clamp(min=0.0), down["model"]
        steps = torch.full_like(local.n, self.default_steps)
        if self.own_start:
            start = tree.where(
                able, uncertainty.others_mean(start, state["theta"], weight, others), start
            )
        if self.steps_rule != "fixed":
            curvature = 1.0 / (sigma * (local.n if self.steps_rule == "mean" else 1.0))
            wanted = uncertainty.balanced_steps(sigma, others, local.lr.double(), curvature)
            steps = torch.where(able, wanted.clamp(1.0, self.max_steps).round().long(), steps)
        theta = local.sgd(
            local.task.loss, start, steps=max(self.max_steps, self.default_steps), limit=steps
        )
        old, noted = state["history"], uncertainty.note(state["history"], theta)
        state = {"theta": theta, "history": tree.where(local.round > self.warm_rounds, noted, old)}
        up = {
            "theta": theta,
            "sigma": self._variance(state),
            "known": (state["history"]["count"] >= 2).double(),
        }
        local.log(steps=steps, sigma=up["sigma"])
        return state, up

    def _variance(self, state):
        over = (state["history"]["count"] - 1.0).clamp(min=1.0) if self.variance == "n-1" else 1.0
        return torch.maximum(state["history"]["m2"] / over, uncertainty.floor(state["theta"]))

    def aggregate(self, task, server, uploads, key):
        up, active, rounds = uploads.tree, len(uploads.clients), server["round"] + 1.0
        warm = bool(rounds <= self.warm_rounds)
        centre = uploads.mean("theta", torch.ones_like(uploads.weights))
        scatter = tree.sq_norm(tree.map(lambda x, c: x.double() - c, up["theta"], centre))
        over = active - 1.0 if self.variance == "n-1" else 1.0
        sigma0 = scatter / over if active > 1 else server["sigma0"]
        sigma, known = (
            server[name].index_copy(0, uploads.clients, up[name]) for name in ("sigma", "known")
        )
        typical = sigma[known > 0].median() if known.any() else torch.ones_like(sigma0)
        weights = 1.0 / (sigma0 + torch.where(up["known"] > 0, up["sigma"], typical))
        by_rows, share = warm or not self.own_weight, 1.0 if warm else active / len(sigma)
        theta = uploads.mean("theta", uploads.weights if by_rows else weights)
        model = tree.map(lambda old, new: (1.0 - share) * old + share * new, server["model"], theta)
        return {"model": model, "sigma": sigma, "known": known, "sigma0": sigma0, "round": rounds}

    def adapt(self, local, state, down):
        # Further passes continue.
        start = tree.where(local.round == 1, down["model"], state["theta"])
        return state | {"theta": local.sgd(local.task.loss, start, steps=self.default_steps)}

    def personalize(self, local, state, down):
        return {"personal": state["theta"], "global": down["model"]}
