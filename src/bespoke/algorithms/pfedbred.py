"""pFedBreD: a personal model tied to its own prior mean, which differs from the global model."""

from dataclasses import dataclass
from typing import final

import torch
from torch.func import grad, grad_and_value

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths.proximal import PLAIN_STEPS


@final
@dataclass(frozen=True)
class PFedBreD(Algorithm):
    """Personal prior: theta near argmin f_i(theta) + lambda/2 |theta - s_i|^2, with s_i = Phi_i(w).

    Shi et al., "PRIOR: Personalized Prior for Reactivating the Information Overlooked in Federated
    Learning", NeurIPS 2023, Algorithm 1 with the squared norm (a spherical Gaussian prior).

    | paper | here |
    |---|---|
    | w, the local copy of the global model | ``down["model"]``, then w inside ``_round`` |
    | theta_i; w_i at the end of its last round | ``state["personal"]``; ``state["last"]`` |
    | Phi: lg | ``prior``: s = w - eta grad f(w) |
    | Phi: meg; mh | s = w - eta (w_last - theta); the same after a meta step on w |
    | eta; lambda; K | ``eta``; ``lam``; ``prox_steps`` of rate ``prox_lr`` |
    | R, local iterations | one for each minibatch of ``[training]``, for each two with "mh" |

    The meta step of "mh" is first-order: the gradient on the second batch, at w - meta_lr grad f(w)
    on the first, moves w itself. As in the public code, w moves by lr lambda (s - theta), with the
    identity for the derivative of Phi, and theta starts at w ("lg": at s). The server's mean is
    weighted by rows, its beta is 1. All steps are plain SGD: of ``[training]``'s optimiser only the
    lr is used, for w; with ``optimizer = "training"`` w follows lambda (s - theta), plus the meta
    step's gradient in units of lr, by that optimiser. A client that never took part starts both
    models at the current global one, makes one local round and uploads nothing.
    Bytes per client and round: the model up, the model down.
    """

    prior: str = knob(
        "mh", "how the prior's mean follows from the global model", choices=("mh", "meg", "lg")
    )
    eta: float = knob(0.05, "how far the prior's mean moves from the global model", low=0)
    lam: float = knob(15.0, "strength of the tie to the prior's mean", low=0)
    prox_steps: int = knob(5, "steps towards the personal model in each local iteration", low=1)
    prox_lr: float = knob(0.01, "learning rate of these steps", above=0)
    meta_lr: float = knob(0.01, "learning rate of both meta steps", above=0)
    optimizer: str = knob(
        "published", "what moves w: plain steps, or [training]'s", choices=("published", "training")
    )
    private = ("personal", "last")

    @property
    def ignores(self):
        return (
            {**PLAIN_STEPS, "weight_decay": PLAIN_STEPS["clip"]}
            if self.optimizer == "published"
            else {}
        )

    def client_init(self, task, params, client):
        """Start both models at the common initial weights."""
        return {"personal": params, "last": params}

    def client_update(self, local, state, down):
        """Run a local round; send w, keep theta and a copy of w."""
        state = self._round(local, state, down["model"])
        return state, {"model": state["last"]}

    def _round(self, local, state, w):
        loss, prior, eta, lam = local.task.loss, self.prior, self.eta, self.lam
        slope, plain = grad(loss), self.optimizer == "published"
        prox_steps, prox_lr, meta_lr = self.prox_steps, self.prox_lr, self.meta_lr

        def envelope(w, batches, seen, last, meta_share):
            batch, move = batches, tree.zeros_like(w)
            if prior == "mh":
                first, batch = batches
                move = slope(tree.add(w, slope(w, first), -meta_lr), batch)
                w = tree.add(w, move, -meta_lr)
            away = slope(w, batch) if prior == "lg" else tree.sub(last, seen["personal"])
            mean = tree.add(w, away, -eta)
            theta = mean if prior == "lg" else w
            for _ in range(prox_steps):
                gradient, value = grad_and_value(loss)(theta, batch)
                theta = tree.add(theta, tree.add(gradient, tree.sub(theta, mean), lam), -prox_lr)
            gradient = tree.map(lambda s, t, m: lam * (s - t) + meta_share * m, mean, theta, move)
            return value, gradient, {"personal": theta}

        # The published meta step has its own rate; the optimiser's rate and schedule move both.
        rate = local.lr.clamp(min=1e-8) if plain else torch.full_like(local.lr, local.training.lr)
        how = {"gradient": envelope, "plain": plain, "per_step": 2 if prior == "mh" else 1}
        start, consts = {"personal": state["personal"]}, (state["last"], meta_lr / rate)
        w, seen = local.trace(None, w, None, start, *consts, **how)
        return {"personal": seen["personal"], "last": w}

    def adapt(self, local, state, down):
        """Run a local round; the first starts both models at the current global one."""
        fresh = {"personal": down["model"], "last": down["model"]}
        return self._round(local, tree.where(local.round == 1, fresh, state), down["model"])

    def personalize(self, local, state, down):
        """Return the personal model."""
        return state["personal"]
