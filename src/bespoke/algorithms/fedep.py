"""FedEP: expectation propagation between clients and server; FedEP-FT fine-tunes the mean."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm, finetuned
from bespoke.core.settings import knob
from bespoke.maths import posterior


@final
@dataclass(frozen=True)
class FedEP(Algorithm):
    """Each client refines its own factor of a global Gaussian, given the product of the others.

    Guo et al., "Federated Learning as Variational Inference: A Scalable Expectation Propagation
    Approach", ICLR 2023, with the scaled identity as covariance.

    | paper | here |
    |---|---|
    | q, global; its mean mu | precision n c I; ``down["model"]`` |
    | w_k | n_k / n |
    | q_k, client k's factor | precision n_k c I, natural mean n c (w_k mu_0 + site) |
    | c, precision of a row | ``precision`` |
    | q_{-k} = q / q_k, cavity | precision n c (1 - w_k), natural mean n c (mu - w_k mu_0 - site) |
    | mu_k, mean of q_{-k} exp(-loss) | the mean of SGD's iterates at the ends of epochs |
    | learning rate | ``server_lr`` |
    | damping 1 / K | ``server["damping"]``: of a client's last round, times the learning rate |

    With this covariance no precision ever changes, so only means are sent, and the server's step is
    the plain mean of mu_k - mu. mu_0 is the mean after ``warm_rounds`` of FedAvg, in which the
    server learns n (a client it has not heard from counts as the average). A client learns how its
    last change was damped when it takes part again, so the product of all factors is q, whoever
    takes part or drops out. The pull is at most 1 / lr. With ``variant = "sep"`` all factors are
    alike and the cavity is q^(1 - w_k). The server's steps are plain: with momentum q would not be
    the product of its factors. An unseen client uses q's mean; with ``finetune_epochs`` (FedEP-FT)
    every client trains a copy of it before prediction.
    Bytes per client and round: up the model and one number; down mu, mu_0 ("ep" only) and two
    numbers.
    """

    variant: str = knob(
        "ep", "clients keep their factors, or all factors are alike", choices=("ep", "sep")
    )
    precision: float = knob(0.05, "precision that one train row adds to a client's factor", above=0)
    server_lr: float = knob(1.0, "the server's learning rate", above=0)
    warm_rounds: int = knob(1, "initial rounds of plain FedAvg", low=1)
    finetune_epochs: int = knob(0, "epochs of local training before prediction", low=0)
    private = ("site", "pending")
    claims = (("rows", "rows"),)

    def server_init(self, task, params, num_clients, key):
        zeros = torch.zeros(num_clients + 1, dtype=torch.float64, device=task.device)
        return {
            "model": params,
            "first": params,
            "rows": zeros[1:],
            "damping": zeros[1:],
            "round": zeros[0],
        }

    def broadcast(self, server):
        """Send mu, mu_0, and n, which is 0 in the warm rounds."""
        total = posterior.total_rows(server["rows"]) * (server["round"] >= self.warm_rounds)
        sent = {"model": server["model"], "total": total}
        return sent | ({"first": server["first"]} if self.variant == "ep" else {})

    def tailor(self, server, clients):
        return {"damping": server["damping"][clients]}  # a new client has nothing to damp

    def client_init(self, task, params, client):
        return {"site": tree.zeros_like(params), "pending": tree.zeros_like(params)}

    def client_update(self, local, state, down):
        """Tilt the cavity by the client's own loss; send how far that moves the mean."""
        mu, loss, rows = down["model"], local.task.loss, local.n.to(local.task.dtype)
        ready, total = down["total"] > 0, down["total"].to(rows.dtype)
        share = rows / torch.maximum(total, rows)
        pull = torch.where(ready, (self.precision / share).clamp(max=1.0 / local.lr), 0.0)
        site = tree.add(state["site"], state["pending"], down["damping"].to(rows.dtype))
        cavity = tree.map(
            lambda m, first, a: m - share * first - a, mu, down.get("first", mu), site
        )

        # The pull is (1 - w)/2 |theta|^2 - theta'cavity + constant.
        def tilted(params, batch, pull, share, cavity):
            return loss(params, batch) + 0.5 * pull * (
                tree.sq_dist(params, cavity) - share * tree.sq_norm(params)
            )

        def note(seen, params, batch):
            place = (batch.step + 1) % seen["epoch"]  # 0 at an epoch's end
            return seen | {"ends": posterior.add_to_window(seen["ends"], params, place)}

        seen = {"ends": posterior.window_sums(mu, 1), "epoch": local.num_steps(epochs=1)}
        last, seen = local.trace(tilted, mu, note, seen, pull, share, cavity)
        mean = tree.map(lambda x: x[0], posterior.window_means(seen["ends"]))
        delta = tree.sub(tree.where(ready & (seen["ends"]["count"][0] > 0), mean, last), mu)
        pending = tree.where(ready & (self.variant == "ep"), delta, tree.zeros_like(delta))
        return {"site": site, "pending": pending}, {"delta": delta, "rows": rows}

    def aggregate(self, task, server, uploads, key):
        """Add the plain mean of the changes; in warm rounds FedAvg's, weighted by rows."""
        up, clients, rounds = uploads.tree, uploads.clients, server["round"] + 1.0
        warm = bool(rounds <= self.warm_rounds)
        step = 1.0 if warm else self.server_lr
        equal = torch.ones_like(uploads.weights)
        change = uploads.mean("delta", uploads.weights if warm else equal)
        model = tree.add(server["model"], change, step)
        damping = torch.full_like(uploads.weights, step / len(clients))
        new = {"rows": up["rows"].double(), "damping": damping}
        new = {name: server[name].index_copy(0, clients, value) for name, value in new.items()}
        return new | {"model": model, "first": model if warm else server["first"], "round": rounds}

    def personalize(self, local, state, down):
        """Return the mean of q, if asked after fine-tuning and before it."""
        return finetuned(local, down["model"], self.finetune_epochs)
