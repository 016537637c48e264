"""pFedBreD: a personal model tied to its own prior mean, which differs from the global model."""

from dataclasses import dataclass
from typing import final

from torch.func import grad

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob


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
    lr is used, for w. A client that never took part starts both models at the current global one,
    makes one local round and uploads nothing.
    Bytes per client and round: the model up, the model down.
    """

    prior: str = knob(
        "mh", "how the prior's mean follows from the global model", choices=("mh", "meg", "lg")
    )
    eta: float = knob(0.05, "how far the prior's mean moves from the global model", low=0)
    lam: float = knob(15.0, "strength of the tie to the prior's mean", low=0)
    prox_steps: int = knob(
        5, "steps towards the personal model in each local iteration", low=1, high=10_000
    )
    prox_lr: float = knob(0.01, "learning rate of these steps", above=0)
    meta_lr: float = knob(0.01, "learning rate of both meta steps", above=0)
    private = ("personal", "last")

    def client_init(self, task, params, client):
        """Start both models at the common initial weights."""
        return {"personal": params, "last": params}

    def client_update(self, local, state, down):
        """Run a local round; send w, keep theta and a copy of w."""
        state = self._round(local, state, down["model"])
        return state, {"model": state["last"]}

    def _round(self, local, state, w):
        slope, prior, eta, lam = grad(local.task.loss), self.prior, self.eta, self.lam
        prox_steps, prox_lr, meta_lr = self.prox_steps, self.prox_lr, self.meta_lr

        def iterate(carry, batches, last, lr):
            w, batch = carry["w"], batches
            if prior == "mh":
                first, batch = batches
                ahead = tree.add(w, slope(w, first), -meta_lr)
                w = tree.add(w, slope(ahead, batch), -meta_lr)
            away = slope(w, batch) if prior == "lg" else tree.sub(last, carry["theta"])
            mean = tree.add(w, away, -eta)
            theta = mean if prior == "lg" else w
            for _ in range(prox_steps):
                pull = tree.add(slope(theta, batch), tree.sub(theta, mean), lam)
                theta = tree.add(theta, pull, -prox_lr)
            return {"w": tree.add(w, tree.sub(mean, theta), -lr * lam), "theta": theta}

        start = {"w": w, "theta": state["personal"]}
        end = local.scan(
            iterate, start, state["last"], local.lr, per_step=2 if prior == "mh" else 1
        )
        return {"personal": end["theta"], "last": end["w"]}

    def adapt(self, local, state, down):
        """Run a local round; the first starts both models at the current global one."""
        fresh = {"personal": down["model"], "last": down["model"]}
        return self._round(local, tree.where(local.round == 1, fresh, state), down["model"])

    def personalize(self, local, state, down):
        """Return the personal model."""
        return state["personal"]
