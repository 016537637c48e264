"""FedOpt: the clients' mean change is a gradient, and the server an optimiser that follows it."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm, finetuned
from bespoke.core.settings import knob


@final
@dataclass(frozen=True)
class FedOpt(Algorithm):
    """FedAvg with momentum (FedAvgM), Adam, Yogi or Adagrad on the server.

    Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2; FedAvgM: Hsu, Qi and
    Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019 (arXiv 1909.06335).

    | paper | here |
    |---|---|
    | x_t, the global model | ``down["model"]`` |
    | Delta_t, the pseudo-gradient | mean of ``up["model"]``, minus x_t |
    | m_t; v_t | ``server["m"]``; ``server["v"]``, initially tau^2 |
    | beta_1, beta_2, tau, eta | ``beta1``, ``beta2``, ``tau``, ``server_lr`` |

    With ``rule = "momentum"`` m is beta1 m + Delta and the model moves by eta m, so beta1 = 0 and
    eta = 1 are FedAvg. The adaptive rules take m = beta1 m + (1 - beta1) Delta, a second moment v,
    and move by eta m / (sqrt(v) + tau), without a correction of the first rounds' bias. Clients
    train as in FedAvg and are weighted by their rows. Nothing is kept on a client: an unseen one is
    treated like any other, and with ``finetune_epochs`` each trains a copy before prediction.
    Bytes per client and round: the model up, the model down.
    """

    rule: str = knob(
        "momentum", "the server's optimiser", choices=("momentum", "adam", "yogi", "adagrad")
    )
    server_lr: float = knob(1.0, "the server's learning rate", above=0)
    beta1: float = knob(0.9, "the server's momentum", low=0, high=1)
    beta2: float = knob(0.99, "decay of the second moment (Adam, Yogi)", low=0, high=1)
    tau: float = knob(1e-3, "what is added to the second moment's root; its first value", above=0)
    finetune_epochs: int = knob(0, "epochs of local training before prediction", low=0)

    def server_init(self, task, params, num_clients, key):
        """Start at the initial model, with m = 0 and v = tau^2."""
        first = {"model": params, "m": tree.zeros_like(params)}
        if self.rule == "momentum":
            return first
        return first | {"v": tree.map(lambda p: torch.full_like(p, self.tau**2), params)}

    def client_update(self, local, state, down):
        """Train the received model and send it back."""
        return state, {"model": local.sgd(local.task.loss, down["model"])}

    def aggregate(self, task, server, uploads, key):
        """Take one step of the optimiser along the mean change."""
        w, rate, b1 = server["model"], self.server_lr, self.beta1
        delta = tree.sub(uploads.mean("model"), w)
        if self.rule == "momentum":
            m = tree.add(delta, server["m"], b1)
            return {"model": tree.add(w, m, rate), "m": m}
        m = tree.map(lambda m, d: b1 * m + (1.0 - b1) * d, server["m"], delta)
        v = tree.map(lambda v, d: self._second_moment(v, d.square()), server["v"], delta)
        w = tree.map(lambda w, m, v: w + rate * m / (v.sqrt() + self.tau), w, m, v)
        return {"model": w, "m": m, "v": v}

    def _second_moment(self, v, square):
        new = 1.0 - self.beta2
        if self.rule == "adagrad":
            return v + square
        if self.rule == "adam":
            return self.beta2 * v + new * square
        return v - new * square * torch.sign(v - square)  # Yogi

    def personalize(self, local, state, down):
        """Return the global model, if asked after fine-tuning and before it."""
        return finetuned(local, down["model"], self.finetune_epochs)
