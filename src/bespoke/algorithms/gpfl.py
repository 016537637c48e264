"""GPFL: class embeddings guide the features; a valve conditions them on the client's classes."""

from dataclasses import dataclass
from typing import final

from torch.nn import functional as F

from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.objective import cross_entropy, masked_mean
from bespoke.core.settings import knob
from bespoke.maths import gates, gaussian, prototypes
from bespoke.maths.gates import valve


@final
@dataclass(frozen=True)
class GPFL(Algorithm):
    """Features pass a valve twice: conditioned on the client for its head, on all for guidance.

    Zhang et al., "GPFL: Simultaneously Learning Global and Personalized Feature Information for
    Personalized Federated Learning", ICCV 2023, Algorithm 1.

    | paper | here |
    |---|---|
    | W^fe; W_i^hd | ``down["body"]``; ``state["head"]`` |
    | GCE; CoV | ``down["embedding"]`` (C, d); ``down["valve"]`` |
    | g: mean of the embeddings; p_i: their mean by the client's class shares | ``_contexts`` |
    | f = ReLU(z (gamma(context) + 1) + beta(context)) | ``valve`` |
    | gamma, beta | Linear, ReLU, LayerNorm |
    | lambda, mu | ``lam``; ``decay``: weight decay of embeddings and valve alone |

    The loss is cross entropy of the head on f(p_i), cross entropy of the cosines of f(g) to the
    trained embeddings, and lambda times the distance of f(g) to the received embedding of the
    class: one norm per batch, as in the released code, or with ``magnitude = "mean"`` a mean over
    rows, as in the paper. ``context = "lagged"`` matches the released code at full participation:
    contexts from the embeddings that the client trained last, 0 in its first round. A client that
    never took part uses the received ones and fits its head from the common start.
    Bytes per client and round: body, C d embeddings, 2 d^2 + 6 d of the valve, up and down.
    """

    lam: float = knob(0.01, "strength of the pull to the embeddings", low=0)
    decay: float = knob(0.1, "weight decay of embeddings and valve", low=0)
    magnitude: str = knob(
        "batch", "norm of the pull: over a batch, or the mean over rows", choices=("batch", "mean")
    )
    context: str = knob(
        "received", "embeddings that contexts are made of", choices=("received", "lagged")
    )
    new_head_epochs: int = knob(5, "epochs a new client fits its head for", low=0)
    private = ("head",)
    needs_classes = True

    def server_init(self, task, params, num_clients, key):
        embedding = rng.normal(
            rng.fold_in(key, 1), (task.num_classes, task.feature_dim), task.dtype
        )
        opened = gates.valve_init(rng.fold_in(key, 0), task.feature_dim, task.dtype)
        return {"body": task.body(params), "embedding": embedding, "valve": opened}

    def broadcast(self, server):
        return server

    def client_init(self, task, params, client):
        return {"head": task.head(params), "trained": prototypes.none(task)["prototype"]}

    def _contexts(self, local, state, down):
        """Return g and p_i (d,), constant within a round."""
        source = state["trained"] if self.context == "lagged" else down["embedding"]
        return source.mean(dim=0), gaussian.prior(*local.labels(), len(source), 0.0) @ source

    def client_update(self, local, state, down):
        """Train everything together; keep the head, send the rest."""
        task, lam, decay, by_row = local.task, self.lam, self.decay, self.magnitude == "mean"

        def loss(p, batch, for_all, for_own, anchor):
            z = task.features(p["body"], batch.x, batch.key)
            f, own = valve(p["valve"], z, for_all), valve(p["valve"], z, for_own)
            cosines = F.normalize(f, dim=1) @ F.normalize(p["embedding"], dim=1).T
            away = f - anchor[batch.y]
            if by_row:
                pull = masked_mean(away.norm(dim=1), batch.mask)
            else:
                pull = (away * batch.mask[:, None]).norm()
            ridge = 0.5 * decay * tree.sq_norm({"embedding": p["embedding"], "valve": p["valve"]})
            plain = task.error(task.classify(p["head"], own, batch.key), batch)
            return plain + cross_entropy(cosines, batch) + lam * pull + ridge

        p = local.sgd(
            loss,
            down | {"head": state["head"]},
            *self._contexts(local, state, down),
            down["embedding"],
        )
        return {"head": p["head"], "trained": p["embedding"]}, {name: p[name] for name in down}

    def adapt(self, local, state, down):
        """Fit the head, with contexts from the received embeddings."""
        task, state = local.task, state | {"trained": down["embedding"]}

        def loss(head, batch, body, opened, context):
            own = valve(opened, task.features(body, batch.x, batch.key), context)
            return task.error(task.classify(head, own, batch.key), batch)

        consts = down["body"], down["valve"], self._contexts(local, state, down)[1]
        return state | {
            "head": local.sgd(loss, state["head"], *consts, epochs=self.new_head_epochs)
        }

    def personalize(self, local, state, down):
        """Return body and valve, the client's head, and p_i."""
        context = self._contexts(local, state, down)[1]
        return {
            "body": down["body"],
            "valve": down["valve"],
            "head": state["head"],
            "context": context,
        }

    def predict(self, task, personal, x):
        z = task.features(personal["body"], x)
        return task.classify(personal["head"], valve(personal["valve"], z, personal["context"]))
