"""Per-FedAvg: a global model from which one gradient step makes a good personal one."""

from dataclasses import dataclass
from typing import final

from torch.func import grad, grad_and_value

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths.proximal import PLAIN_STEPS, descend


@final
@dataclass(frozen=True)
class PerFedAvg(Algorithm):
    """FedAvg on the loss after adaptation, as in MAML: F_i(w) = f_i(w - alpha grad f_i(w)).

    Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
    Meta-Learning Approach", NeurIPS 2020, Algorithm 1.

    | paper | here |
    |---|---|
    | w | ``down["model"]`` |
    | alpha; beta | ``alpha``; ``[training] lr`` |
    | tau steps, on D, D', D'' | ``[training] epochs`` or ``steps``, two or three batches per step |
    | FO; HF with its delta | ``variant``, ``delta`` |

    The gradient of F_i is (I - alpha H) v: v is the gradient at the adapted model on D', H the
    Hessian at w on D''. "first-order" leaves H out; "hessian-free" takes Hv from two gradients;
    "exact" differentiates twice. ``delta`` is the distance of these two from w (``delta_scale =
    "absolute"``: times |v|, as in the paper; in float32 that drowns in rounding where v is small).
    Epochs count rows read, so there are a half or a third as many steps as in FedAvg. Steps are
    plain: of the optimiser's settings only ``lr``, its schedule and ``weight_decay`` (in the outer
    step) count; with ``optimizer = "training"`` the outer step is the optimiser's. Clients are
    weighted by their rows (the paper: uniformly). In prediction every client, including an unseen
    one, takes one step of rate alpha on all its train rows, or ``finetune_epochs`` epochs of such
    steps on minibatches.
    Bytes per client and round: the model up, the model down.
    """

    variant: str = knob(
        "first-order", "treatment of the Hessian", choices=("first-order", "hessian-free", "exact")
    )
    alpha: float = knob(0.01, "learning rate of the adaptation, in training and prediction", low=0)
    delta: float = knob(
        0.01, "distance from w of the two gradients that give the Hessian product", above=0
    )
    delta_scale: str = knob("relative", "what delta measures", choices=("relative", "absolute"))
    finetune_epochs: int = knob(
        0, "epochs of adaptation before prediction; 0 = one step on all rows", low=0
    )
    optimizer: str = knob(
        "published", "the outer steps: plain, or [training]'s", choices=("published", "training")
    )

    @property
    def ignores(self):
        return PLAIN_STEPS if self.optimizer == "published" else {}

    def client_update(self, local, state, down):
        """Take meta-gradient steps, each on fresh batches."""
        loss, alpha, product = local.task.loss, self.alpha, self._hessian_product
        plain = self.optimizer == "published"
        decay = local.training.weight_decay if plain else 0.0

        def meta_gradient(w, batches):
            adapted = descend(w, grad(loss)(w, batches[0]), alpha)
            v, value = grad_and_value(loss)(adapted, batches[1])
            if len(batches) == 3:
                v = tree.add(v, product(loss, w, v, batches[2]), -alpha)
            return value, tree.add(v, w, decay)

        batches = 2 if self.variant == "first-order" else 3
        how = {"gradient": meta_gradient, "plain": plain, "per_step": batches}
        return state, {"model": local.sgd(None, down["model"], **how)}

    def _hessian_product(self, loss, w, v, batch):
        """Return H v, with H the Hessian of the loss at w."""
        if self.variant == "exact":
            return grad(lambda w: tree.dot(grad(loss)(w, batch), v))(w)
        length = tree.sq_norm(v).sqrt().clamp(min=1e-12) if self.delta_scale == "relative" else 1.0
        ahead, behind = (
            grad(loss)(tree.add(w, v, s * self.delta / length), batch) for s in (1.0, -1.0)
        )
        return tree.map(lambda a, b: (a - b) * (length / (2.0 * self.delta)), ahead, behind)

    def personalize(self, local, state, down):
        """Return the adapted model, and the one it came from."""
        w, loss, alpha = down["model"], local.task.loss, self.alpha
        if self.finetune_epochs == 0:
            return {"personal": descend(w, local.gradient(loss, w), alpha), "global": w}

        def step(w, batch):
            return descend(w, grad(loss)(w, batch), alpha)

        return {"personal": local.scan(step, w, epochs=self.finetune_epochs), "global": w}
