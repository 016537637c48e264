"""The features that a body gives of its minibatches while it trains."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from bespoke.core.data import Batch
from bespoke.core.local import Features, Local
from bespoke.core.tree import Tree


def trained_with_features(
    local: Local, loss: Callable[..., tuple[Tensor, Tensor]], params: Tree, *consts: Any
) -> tuple[Tree, Features]:
    """Run ``local.sgd``, and return also the features (width, d) of every minibatch, each before its step's update.

    ``loss(params, batch, *consts)`` returns the loss, 0-d, and the features (B, d) from which it was computed. Rows are
    in the order in which they were seen, padding last: a train row is there once for each epoch that has seen it.
    """
    if not params:  # no step is taken
        return params, local.features(params)
    task, training, rows = local.task, local.training, len(local.labels()[1])
    batch = min(training.batch, rows)
    width = (training.steps * batch or training.epochs * rows) + batch  # the last batch's padding has room
    start: Tree = {
        "z": torch.zeros(width, task.feature_dim, dtype=task.dtype, device=task.device),
        "y": torch.zeros(width, dtype=torch.int64, device=task.device),
        "count": torch.zeros((), dtype=torch.int64, device=task.device),
    }

    def gradient(params: Tree, batch: Batch, seen: Tree, *consts: Any) -> tuple[Tensor, Tree, Tree]:
        grads, (value, z) = grad_and_value(loss, has_aux=True)(params, batch, *consts)
        # The next batch overwrites this one's padding.
        place = seen["count"] + torch.arange(len(z), device=z.device)
        return (
            value,
            grads,
            {
                "z": seen["z"].index_copy(0, place, z),
                "y": seen["y"].index_copy(0, place, batch.y),
                "count": seen["count"] + batch.mask.sum().long(),
            },
        )

    params, seen = local.trace(None, params, None, start, *consts, gradient=gradient)
    mask = (torch.arange(width, device=task.device) < seen["count"]).to(task.dtype)
    return params, Features(seen["z"], seen["y"], mask)
