"""SGD and Adam as pure updates of lists of tensors, with torch.optim's formulas.

The rule is written once; outside vmap its list operations are torch's fused ``foreach`` calls.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bespoke.core.settings import Training
from bespoke.core.tree import Tree, zeros_like

Rate = float | Tensor


def init(training: Training, params: Tree) -> Tree:
    """The optimiser's moments before the first step: an empty tree for plain SGD."""
    if training.optimizer == "adam":
        first = next(iter(_leaves(params)))
        return {"m": zeros_like(params), "v": zeros_like(params), "t": first.new_zeros(())}
    return {"m": zeros_like(params)} if training.momentum else {}


def _leaves(tree: Tree) -> list[Tensor]:
    return [leaf for v in tree.values() for leaf in (_leaves(v) if isinstance(v, dict) else [v])]


def _scaled(xs: list[Tensor], s: Rate, mapped: bool) -> list[Tensor]:
    if mapped or isinstance(s, Tensor):
        return [x * s for x in xs]
    return list(torch._foreach_mul(xs, s))


def _add(xs: list[Tensor], ys: list[Tensor], s: Rate | Sequence[Rate], mapped: bool) -> list[Tensor]:
    """xs + s * ys, with one s for all or one for each."""
    if isinstance(s, Sequence):
        return [x + r * y for x, y, r in zip(xs, ys, s, strict=True)]
    if mapped or isinstance(s, Tensor):
        return [x + s * y for x, y in zip(xs, ys, strict=True)]
    return list(torch._foreach_add(xs, ys, alpha=s))


def update(
    training: Training,
    params: list[Tensor],
    grads: list[Tensor],
    moments: dict[str, list[Tensor]],
    rate: Rate | Sequence[Rate],
    mapped: bool,
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """One step from ``params`` along ``grads``; ``moments`` holds the lists of :func:`init`'s branches.

    Order as in torch.optim: clip, add weight decay, then momentum or Adam's moments.
    """
    if training.clip:
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        grads = _scaled(grads, (training.clip / (norm + 1e-6)).clamp(max=1.0), mapped)
    if training.weight_decay:
        grads = _add(grads, params, training.weight_decay, mapped)
    descent = [-r for r in rate] if isinstance(rate, Sequence) else -rate
    if training.optimizer == "adam":
        b1, b2 = training.beta1, training.beta2
        t = moments["t"][0] + 1.0
        m = _add(_scaled(moments["m"], b1, mapped), grads, 1.0 - b1, mapped)
        v = _add(_scaled(moments["v"], b2, mapped), [g * g for g in grads], 1.0 - b2, mapped)
        fix1, fix2 = 1.0 - b1**t, (1.0 - b2**t).sqrt()
        direction = [(x / fix1) / (y.sqrt() / fix2 + 1e-8) for x, y in zip(m, v, strict=True)]
        return _add(params, direction, descent, mapped), {"m": m, "v": v, "t": [t]}
    if training.momentum:
        m = _add(grads, moments["m"], training.momentum, mapped)
        return _add(params, m, descent, mapped), {"m": m}
    return _add(params, grads, descent, mapped), {}
