"""QLSD: a Markov chain of weights, driven by quantised gradients; QLSD-FT fine-tunes them."""

from dataclasses import dataclass
from typing import final

import torch
from torch.func import grad_and_value

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm, finetuned
from bespoke.core.settings import knob
from bespoke.maths import langevin, posterior


@final
@dataclass(frozen=True)
class QLSD(Algorithm):
    """Langevin dynamics on one model's posterior: one quantised gradient per client and round.

    Vono et al., "QLSD: Quantised Langevin Stochastic Dynamics for Bayesian Federated Learning",
    AISTATS 2022.

    | paper | here |
    |---|---|
    | theta_k; gamma | ``down["model"]``; ``step`` over the train rows of all clients |
    | H_i, n_i / n times a minibatch loss's gradient | the gradient inside ``client_update`` |
    | C; omega | stochastic quantisation of each tensor to ``levels`` levels; ``langevin.excess`` |
    | eta_i; eta = sum of all eta_i | ``state["memory"]``; ``server["memory"]`` |
    | alpha | 1 / (1 + omega), for each tensor |
    | prior N(0, I / lambda) | ``prior`` = lambda |
    | Z_k | the server's noise, variance times ``temperature`` (1: exact; 0: gradient descent) |

    The server adds the prior's gradient itself, exactly, instead of putting a share into every
    message. Clients not yet heard from count with the average rows. ``[training]`` sets the batch;
    its optimiser is used only for fine-tuning. With ``average_from``, the mean of every ``thin``-th
    theta from that round on predicts, not the last one. Clients keep nothing that prediction needs:
    an unseen one is treated like any other.
    Bytes per client and round: up the quantised model and one number, down the model (twice with
    ``average_from``).
    """

    step: float = knob(
        0.05, "gamma times the train rows of all clients: the step on their mean loss", above=0
    )
    levels: int = knob(256, "quantisation levels; 0 = no quantisation", low=0)
    temperature: float = knob(1.0, "variance of the noise relative to the posterior's", low=0)
    prior: float = knob(1.0, "precision of the weights' prior", low=0)
    use_memory: bool = knob(True, "quantise differences to a memory of earlier gradients")
    average_from: int = knob(
        0, "first round whose sample enters the predicting mean; 0 = last sample only", low=0
    )
    thin: int = knob(10, "rounds between samples that enter the mean", low=1)
    finetune_epochs: int = knob(0, "epochs of local training before prediction", low=0)
    private = ("memory",)
    claims = (("rows", "rows"),)

    @property
    def ignores(self):
        chain = ("epochs", "steps", "schedule", "keep_optimizer", "weighting")
        tuning = ("lr", "optimizer", "momentum", "weight_decay", "clip")
        keys = chain if self.finetune_epochs else chain + tuning
        return dict.fromkeys(keys, "a round is one step of a Langevin chain of its own")

    def server_init(self, task, params, num_clients, key):
        zeros = torch.zeros(num_clients + 2, dtype=torch.float64, device=task.device)
        chain = {
            "model": params,
            "memory": tree.zeros_like(params),
            "rows": zeros[2:],
            "round": zeros[0],
        }
        return chain | ({"mean": params, "kept": zeros[1]} if self.average_from else {})

    def broadcast(self, server):
        return {name: server[name] for name in ("model", "mean") if name in server}

    def client_init(self, task, params, client):
        return {"memory": tree.zeros_like(params)}

    def client_update(self, local, state, down):
        """Send the quantised difference between one gradient, summed over rows, and the memory."""
        task, levels, rows = local.task, self.levels, local.n.to(local.task.dtype)

        def send(carry, batch, theta, memory, rows):
            slope, loss = grad_and_value(task.loss)(theta, batch)
            news = tree.map(lambda g, m: rows * g - m, slope, memory)
            return {"sent": langevin.quantise(news, levels, batch.key), "loss": loss}

        nothing = {"sent": state["memory"], "loss": torch.zeros_like(rows)}
        found = local.scan(send, nothing, down["model"], state["memory"], rows, steps=1)
        local.log(loss=found["loss"], bytes_up=langevin.quantised_bytes(found["sent"], levels) + 4)
        return {"memory": self._moved(state["memory"], found["sent"])}, {
            "sent": found["sent"],
            "rows": rows,
        }

    def _moved(self, memory, sent):
        share = 1.0 if self.use_memory else 0.0
        return tree.map(
            lambda m, c: m + share / (1.0 + langevin.excess(m.numel(), self.levels)) * c,
            memory,
            sent,
        )

    def aggregate(self, task, server, uploads, key):
        """Take one step of the chain."""
        up, active, theta = uploads.tree, float(len(uploads.clients)), server["model"]
        known = server["rows"].index_copy(0, uploads.clients, up["rows"].double())
        gamma = self.step / float(posterior.total_rows(known))
        mean = uploads.mean("sent", torch.ones_like(uploads.weights))
        sent = tree.map(lambda c: active * c, mean)
        slope = tree.map(lambda m, c: m + len(known) / active * c, server["memory"], sent)
        slope = tree.add(slope, theta, self.prior)
        spread = (2.0 * gamma * self.temperature) ** 0.5
        model = tree.add(tree.add(theta, slope, -gamma), langevin.noise(theta, key), spread)
        memory = self._moved(server["memory"], sent)
        new = {"model": model, "memory": memory, "rows": known, "round": server["round"] + 1}
        if self.average_from:
            late = new["round"] - self.average_from
            kept = server["kept"] + ((late >= 0) & (late % self.thin == 0))
            weight = torch.where(kept > server["kept"], 1.0 / kept, (kept == 0).double())
            new |= {
                "mean": tree.map(lambda m, x: m + weight * (x - m), server["mean"], model),
                "kept": kept,
            }
        return new

    def personalize(self, local, state, down):
        """Return the chain's mean or its last sample, if asked after fine-tuning and before it."""
        sample = down["mean" if self.average_from else "model"]
        return finetuned(local, sample, self.finetune_epochs)
