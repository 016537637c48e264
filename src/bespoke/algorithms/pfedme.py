"""pFedMe: personal models by proximal steps, and a global model that follows them."""

from dataclasses import dataclass
from typing import final

from torch.func import grad_and_value

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths.proximal import PLAIN_STEPS, descend, near


@final
@dataclass(frozen=True)
class PFedMe(Algorithm):
    """FedAvg on Moreau envelopes: F_i(w) = min over theta of f_i(theta) + lambda/2 |theta - w|^2.

    T. Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
    Algorithm 1.

    | paper | here |
    |---|---|
    | w; w_i | ``down["model"]``; ``up["model"]`` |
    | theta_i, the personal model | ``state["personal"]``; with ``personal = "w"`` it is w_i |
    | lambda, beta | ``lam``, ``beta`` |
    | K inner steps, at the rate eta_p | ``inner_steps``, ``inner_lr``, ``inner_momentum`` |
    | R local rounds, at the rate eta | minibatches of ``[training] epochs`` or ``steps``; ``lr`` |

    For each minibatch theta takes K steps on it towards the envelope's minimum, then w_i moves to
    theta by the share eta lambda, which should stay below 1. Both steps are plain gradient steps:
    of the optimiser's settings only ``lr``, its schedule (for both rates) and ``weight_decay`` (on
    theta alone) count. With ``optimizer = "training"`` w_i follows lambda (w_i - theta), the
    envelope's gradient, by the optimiser of ``[training]``, decay included. theta starts a round at
    w, and each minibatch where the last one left it (``inner_start = "w"``: at w_i; the paper does
    not say). With ``inner_over = "round"`` a round is one local round: the optimiser of
    ``[training]`` trains theta at ``inner_lr`` on all its minibatches, tied to w; then w_i makes
    its one step. Only drawn clients compute, not all; they are weighted by their rows (the paper:
    uniformly). A client that never took part works through one round from w and sends nothing.
    Views: the personal model, and the global one.
    Bytes per client and round: the model up, the model down.
    """

    lam: float = knob(15.0, "strength of the tie between personal and global model", low=0)
    inner_steps: int = knob(5, "steps of the personal model on each minibatch", low=1, high=10_000)
    inner_lr: float = knob(0.05, "learning rate of these steps", above=0)
    inner_momentum: float = knob(0.0, "momentum of these steps", low=0, high=1)
    inner_over: str = knob(
        "minibatch",
        "what theta is found on: each minibatch, by these steps, or the whole round, by SGD",
        choices=("minibatch", "round"),
    )
    personal: str = knob("theta", "the model a client keeps", choices=("theta", "w"))
    beta: float = knob(
        1.0,
        "share of the way the global model moves to the clients' mean; above 1 it overshoots",
        above=0,
    )
    inner_start: str = knob("theta", "where the steps on a minibatch start", choices=("theta", "w"))
    optimizer: str = knob(
        "published",
        "what moves w_i: plain steps, or [training]'s",
        choices=("published", "training"),
    )
    private = ("personal",)

    @property
    def ignores(self):
        plain = self.optimizer == "published" and self.inner_over == "minibatch"
        return PLAIN_STEPS if plain else {}

    def client_init(self, task, params, client):
        """Start the personal model at the common initial weights."""
        return {"personal": params}

    def client_update(self, local, state, down):
        """Move, per minibatch, theta towards its proximal point, then w_i towards theta."""
        lam, inner_steps, afresh = self.lam, self.inner_steps, self.inner_start == "w"
        loss, plain = near(local.task.loss, lam), self.optimizer == "published"
        decay, momentum = local.training.weight_decay if plain else 0.0, self.inner_momentum

        def envelope(w, batch, seen, inner_rate):
            theta, before = (w, w) if afresh else (seen["personal"], seen["before"])
            for _ in range(inner_steps):
                slope, value = grad_and_value(loss)(theta, batch, w)
                ahead = descend(theta, slope, inner_rate, decay)
                if momentum:  # the heavy ball, by where theta came from
                    ahead = tree.add(ahead, tree.sub(theta, before), momentum)
                theta, before = ahead, theta
            gradient = tree.map(lambda w, theta: lam * (w - theta), w, theta)
            return value, gradient, {"personal": theta, "before": before}

        w, inner_rate = down["model"], local.lr * (self.inner_lr / local.training.lr)
        if self.inner_over == "round":
            theta = local.sgd(loss, w, w, lr=self.inner_lr)
            w = tree.add(w, tree.sub(theta, w), lam * local.lr)
        else:
            start = {"personal": w, "before": w}
            w, seen = local.trace(None, w, None, start, inner_rate, gradient=envelope, plain=plain)
            theta = seen["personal"]
        return {"personal": w if self.personal == "w" else theta}, {"model": w}

    def aggregate(self, task, server, uploads, key):
        """Move from w to the clients' mean, by the share beta."""
        mean = uploads.mean("model")
        return {
            "model": tree.map(
                lambda w, m: (1.0 - self.beta) * w + self.beta * m, server["model"], mean
            )
        }

    def adapt(self, local, state, down):
        """Make a round and send nothing."""
        return self.client_update(local, state, down)[0]

    def personalize(self, local, state, down):
        """Return the personal model, and the global one."""
        return {"personal": state["personal"], "global": down["model"]}

    def predict(self, task, personal, x):
        """Return logits of both models."""
        return {view: task.logits(model, x) for view, model in personal.items()}
