"""FedPA: clients send steps towards the global posterior's mode; FedPA-FT fine-tunes the result."""

from dataclasses import dataclass
from typing import final

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm, finetuned
from bespoke.core.settings import knob
from bespoke.maths import posterior


@final
@dataclass(frozen=True)
class FedPA(Algorithm):
    """Posterior averaging: each client's change is divided by the covariance of its own weights.

    Al-Shedivat et al., "Federated Learning via Posterior Averaging", ICLR 2021, Algorithms 1 to 4.

    | paper | here |
    |---|---|
    | theta, the server's state | ``down["model"]`` |
    | theta_1 ... theta_L, samples (IASG) | means of the iterates in ``samples`` windows of steps |
    | B, burn-in | ``burn_in`` windows before them |
    | Sigma_L = rho_L I + (1 - rho_L) S_L | ``rho``: rho_L = 1 / (1 + (L - 1) rho) |
    | Delta = Sigma^-1 (theta - mu) | ``up["delta"]`` |
    | server's optimiser | SGD with ``server_lr``, ``server_momentum`` |
    | FedAvg regime before posterior averaging | ``warm_rounds`` |

    A round's T steps are cut into ``burn_in + samples`` equal windows: with that many epochs this
    is the paper's one sample per epoch. A client with fewer steps draws fewer samples, and with
    fewer than two it has no covariance and sends FedAvg's delta, theta minus the last iterate; so
    ``samples = 1`` is FedAvg with that optimiser on the server, whose settings are the authors'.
    The delta comes from one L x L solve, which equals the paper's recursion. Nothing is kept on a
    client: an unseen one is treated like any other, and with ``finetune_epochs`` (FedPA-FT) each
    trains a copy of the model before prediction.
    Bytes per client and round: the model up, the model down.
    """

    samples: int = knob(4, "posterior samples per round", low=1, high=1000)
    burn_in: int = knob(1, "windows of local steps before the first sample", low=0)
    rho: float = knob(0.01, "weight of the samples' covariance; 0 = ignored", low=0)
    server_lr: float = knob(0.5, "the server's learning rate", above=0)
    server_momentum: float = knob(0.9, "the server's momentum", low=0, high=1)
    warm_rounds: int = knob(0, "initial rounds of plain FedAvg", low=0)
    finetune_epochs: int = knob(0, "epochs of local training before prediction", low=0)

    def server_init(self, task, params, num_clients, key):
        return {"model": params, "velocity": tree.zeros_like(params)}

    def client_update(self, local, state, down):
        """Sample weights while training; send the direction they give to the mode."""
        theta, steps, burn_in = down["model"], local.num_steps(), self.burn_in
        count = (steps - burn_in).clamp(0, self.samples)

        def sample(seen, params, batch):
            place = batch.step * (seen["count"] + burn_in) // seen["steps"] - burn_in
            return seen | {"windows": posterior.add_to_window(seen["windows"], params, place)}

        seen = {
            "windows": posterior.window_sums(theta, self.samples),
            "steps": steps,
            "count": count,
        }
        last, seen = local.trace(local.task.loss, theta, sample, seen)
        delta = posterior.shrunk_delta(
            theta, posterior.window_means(seen["windows"]), count, self.rho
        )
        able = (count > 1) & (local.round > self.warm_rounds)
        return state, {"delta": tree.where(able, delta, tree.sub(theta, last))}

    def aggregate(self, task, server, uploads, key):
        """Take a step of SGD along the mean delta, weighted by rows."""
        delta = uploads.mean("delta")
        velocity = tree.add(delta, server["velocity"], self.server_momentum)
        return {"model": tree.add(server["model"], velocity, -self.server_lr), "velocity": velocity}

    def personalize(self, local, state, down):
        """Return the global model, if asked after fine-tuning and before it."""
        return finetuned(local, down["model"], self.finetune_epochs)
