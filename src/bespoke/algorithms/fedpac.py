"""FedPAC: features aligned to shared class prototypes, and heads the server mixes per client."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob
from bespoke.maths import prototypes, simplex


@final
@dataclass(frozen=True)
class FedPAC(Algorithm):
    """Head, then body under a pull to global prototypes; the server mixes each client's next head.

    Xu et al., "Personalized Federated Learning with Feature Alignment and Classifier
    Collaboration", ICLR 2023.

    | paper | here |
    |---|---|
    | phi; the client's head | ``down["body"]``; ``down["head"]`` |
    | c_k | ``down["prototype"]``, known where ``down["rows"]`` > 0 |
    | V_i; h_i | ``up["variance"]``; ``up["moment"]`` (C, d): each class's share times its mean |
    | alpha_i: min sum_j a_j^2 V_j + norm(h_i - sum_j a_j h_j)^2, a simplex | rows of ``mixture`` |
    | lambda; learning rate of the head | ``lam``, times a mean over rows, features; ``head_lr`` |

    The released code is followed: statistics before training, prototypes after it; no pull until
    global prototypes exist; a class without one is pulled to the client's own; mixing weights up to
    ``smallest`` become 0. With ``mixing = "none"`` every client gets its own head back, and h_i and
    V_i are not sent. Heads stay on the server: an absent client's is kept, and every client
    starts from the common head. A class that no client in a round has keeps its prototype. A new
    client starts at the mean of the last heads, weighted by rows; like one that was never drawn, it
    fits the head by cross entropy, or the body too (``new_part``). With ``refit_epochs`` a copy of
    the head is fitted to the averaged body before prediction, as in the head phase.
    Bytes per client and round: body, head, C d + C numbers down; up body, head, 2 d per present
    class, C + 1.
    """

    lam: float = knob(1.0, "strength of the pull to the prototypes", low=0)
    head_epochs: int = knob(1, "epochs of the head phase", low=1)
    head_lr: float = knob(0.1, "learning rate of the head phase; 0 = the body's", low=0)
    mixing: str = knob(
        "solved", "weights of the heads: solved for, or 1 for one's own", choices=("solved", "none")
    )
    smallest: float = knob(1e-3, "mixing weights up to this become 0", low=0, high=1)
    refit_epochs: int = knob(0, "epochs every client refits its head for before prediction", low=0)
    new_epochs: int = knob(5, "epochs a new client fits its model for", low=0)
    new_part: str = knob("head", "what a new client fits", choices=("head", "all"))
    needs_classes = True
    claims = (("rows", "rows"), ("variance", "positive"))

    def server_init(self, task, params, num_clients, key):
        heads = tree.map(lambda p: p.expand(num_clients, *p.shape).clone(), task.head(params))
        weight = torch.zeros(num_clients, dtype=torch.float64, device=task.device)
        return {
            "body": task.body(params),
            **prototypes.none(task),
            "heads": heads,
            "weight": weight,
        }

    def broadcast(self, server):
        return {name: server[name] for name in ("body", "prototype", "rows")}

    def tailor(self, server, clients):
        met = server["weight"]
        mean = tree.mean(server["heads"], torch.where(met.sum() > 0, met, torch.ones_like(met)))
        known = tree.map(lambda h, m: torch.cat([h, m[None]]), server["heads"], mean)
        return {"head": tree.take(known, torch.where(clients < 0, len(met), clients))}

    def client_update(self, local, state, down):
        """Take statistics of the received body; train head, then body; take the new prototypes."""
        task, lam, before = local.task, self.lam, local.features(down["body"])
        mine = prototypes.own(before, task.num_classes)
        moment, variance = prototypes.first_moment(before, task.num_classes)
        about = {"moment": moment, "variance": variance} if self.mixing == "solved" else {}

        def fit(head, batch, body):
            return task.loss(body | head, batch)

        def aligned(body, batch, head, target, known):
            z = task.features(body, batch.x, batch.key)
            plain = task.error(task.classify(head, z, batch.key), batch)
            return plain + lam * prototypes.pull(z, batch, target, known)

        rate = self.head_lr or None
        head = local.sgd(fit, down["head"], down["body"], epochs=self.head_epochs, lr=rate, tag=1)
        target = torch.where(down["rows"][:, None] > 0, down["prototype"], mine["prototype"])
        # No prototype is known before the first aggregation, then all are.
        known = down["rows"].sum().expand(task.num_classes)
        body = local.sgd(aligned, down["body"], head, target, known)
        up = {"body": body, "head": head, **prototypes.own(local.features(body), task.num_classes)}
        vectors = prototypes.nbytes(mine["rows"], task.feature_dim, 2 if about else 1)
        local.log(bytes_up=tree.nbytes(body | head) + vectors + (4.0 if about else 0.0))
        return state, up | about

    def aggregate(self, task, server, uploads, key):
        """Average the body and, by class rows, the prototypes; mix a head for each sender."""
        up = uploads.tree
        mixture = torch.eye(len(uploads.clients), dtype=torch.float64, device=task.device)
        if self.mixing == "solved":
            vectors = up["moment"].flatten(start_dim=1)
            mixture = simplex.mixtures(up["variance"], vectors, self.smallest)
        mixed = tree.map(
            lambda h: torch.tensordot(mixture, h.double(), dims=1).to(h.dtype), up["head"]
        )
        heads = tree.map(
            lambda old, new: old.index_copy(0, uploads.clients, new), server["heads"], mixed
        )
        weight = server["weight"].index_copy(0, uploads.clients, uploads.weights)
        common = {
            "body": uploads.mean("body"),
            **prototypes.combine(up, up["rows"], server),
        }
        return {**common, "heads": heads, "weight": weight}

    def adapt(self, local, state, down):
        """Fit the received head, or the whole model; fitted parts replace received ones."""
        have, task = down | state, local.task
        params = local.finetune(have["body"] | have["head"], self.new_epochs, self.new_part)
        body = {"body": task.body(params)} if self.new_part == "all" else {}
        return body | {"head": task.head(params)}

    def personalize(self, local, state, down):
        """Return the shared body with the head mixed for this client, refitted if asked."""
        have = down | state  # only an adapted client has a state
        rate = self.head_lr or None
        return local.finetune(have["body"] | have["head"], self.refit_epochs, "head", lr=rate)
