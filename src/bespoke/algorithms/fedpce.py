"""FedPCE: shared weights; 32 numbers per client scale and shift its normalisation layers."""

from dataclasses import dataclass
from typing import final

import torch

from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import knob


@final
@dataclass(frozen=True)
class FedPCE(Algorithm):
    """Scale and shift of every normalisation layer are generated from the client's embedding.

    "FedPCE: Federated Personalized Client Embeddings", anonymous, under review.

    | paper | here |
    |---|---|
    | v_n, the client's embedding | ``state["embedding"]``, of ``size`` numbers |
    | the MLPs, one for each scale and shift | ``down["mlp"]``, those of one width stacked |
    | everything else | ``down["model"]``: the parameters without the norm leaves |

    A leaf is its initial value (1 or 0) plus its MLP's output, whose last layer starts small.
    Embeddings start at the n-th unit vector, at 0 beyond ``size`` and for new clients. All three
    groups take their steps together, each with its own learning rate; the model's are ``[training]
    lr`` and ``lr_final``. The paper's training also needs Adam with ``keep_optimizer`` and
    ``weighting = "uniform"``. A client that never took part fits only its embedding, ``[evaluation]
    adapt_rounds`` times (the paper: 200).
    Bytes per client and round: model and MLPs up, model and MLPs down.
    """

    size: int = knob(32, "numbers in an embedding", low=1, high=10_000)
    hidden: int = knob(64, "hidden units of an MLP", low=1, high=10_000)
    mlp_lr: float = knob(1e-2, "learning rate of the MLPs", above=0)
    mlp_lr_final: float = knob(1e-6, "its final value under a cosine schedule", low=0)
    embedding_lr: float = knob(0.1, "learning rate of the embedding", above=0)
    embedding_lr_final: float = knob(1e-4, "its final value under a cosine schedule", low=0)
    new_lr: float = knob(1e-2, "learning rate of a new client's embedding", above=0)
    new_lr_final: float = knob(1e-4, "its final value under a cosine schedule", low=0)
    private = ("embedding", "start")

    def server_init(self, task, params, num_clients, key):
        norm = task.norm(params)
        mlp = {
            name: self._mlp(rng.fold_in(key, i), leaf)
            for i, (name, leaf) in enumerate(norm.items())
        }
        stacked = {
            width: tree.stack([mlp[name] for name in names])
            for width, names in by_width(norm).items()
        }
        return {"model": {n: p for n, p in params.items() if n not in norm}, "mlp": stacked}

    def _mlp(self, key, leaf):
        """Draw the weights of Linear-ReLU-Linear, the first as torch does, the last small."""

        def uniform(i, *shape):
            return (
                2.0 * rng.uniform(rng.fold_in(key, i), shape, leaf.dtype) - 1.0
            ) * self.size**-0.5

        last = (
            rng.normal(rng.fold_in(key, 2), (leaf.numel(), self.hidden), leaf.dtype)
            * 0.01
            * self.hidden**-0.5
        )
        first = {"w1": uniform(0, self.hidden, self.size), "b1": uniform(1, self.hidden)}
        return first | {"w2": last, "b2": torch.zeros_like(leaf)}

    def broadcast(self, server):
        return server

    def client_init(self, task, params, client):
        embedding = (torch.arange(self.size, device=task.device) == client).to(task.dtype)
        return {"embedding": embedding, "start": task.norm(params)}

    def client_update(self, local, state, down):
        """Train model, MLPs and embedding together; keep the embedding."""
        task = local.task

        def loss(params, batch, start):
            return task.loss(
                params["model"] | generate(params["mlp"], params["embedding"], start), batch
            )

        rates = {
            "model": (local.training.lr, local.training.lr_final),
            "mlp": (self.mlp_lr, self.mlp_lr_final),
            "embedding": (self.embedding_lr, self.embedding_lr_final),
        }
        params = local.sgd(
            loss, {**down, "embedding": state["embedding"]}, state["start"], lr=rates
        )
        return state | {"embedding": params["embedding"]}, {
            "model": params["model"],
            "mlp": params["mlp"],
        }

    def adapt(self, local, state, down):
        """Fit the embedding with everything else fixed."""
        task, rate = local.task, (self.new_lr, self.new_lr_final)
        own = {"embedding": state["embedding"]}

        def loss(own, batch, model, mlp, start):
            return task.loss(model | generate(mlp, own["embedding"], start), batch)

        return state | local.sgd(
            loss, own, down["model"], down["mlp"], state["start"], lr=rate, tag=1
        )

    def personalize(self, local, state, down):
        return down["model"] | generate(down["mlp"], state["embedding"], state["start"])


def by_width(norm):
    """Return the names of the norm leaves by their width; their MLPs run side by side."""
    widths = {}
    for name in sorted(norm):  # whatever order the tree came in
        widths.setdefault(str(norm[name].numel()), []).append(name)
    return widths


def generate(mlp, embedding, start):
    """Return the norm leaves: each its start plus its MLP's output for the embedding."""
    leaves = {}
    for width, names in by_width(start).items():
        net = mlp[width]
        hidden = torch.relu(net["w1"] @ embedding + net["b1"])
        out = (net["w2"] @ hidden[..., None]).squeeze(-1) + net["b2"]
        leaves |= {name: start[name] + row for name, row in zip(names, out, strict=True)}
    return {name: leaves[name] for name in start}
