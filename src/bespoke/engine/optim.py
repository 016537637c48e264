"""SGD, Adam and AdamW as pure updates of lists of tensors, with torch.optim's formulas.

The rule is written once, for one client and for lanes of clients, with torch's fused ``foreach`` calls.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bespoke.core.settings import Training
from bespoke.core.tree import Tree, leaves, zeros_like
from bespoke.gpu import step

Rate = float | Tensor


def init(training: Training, params: Tree) -> Tree:
    """Return the optimiser's moments before the first step: an empty tree for plain SGD."""
    if training.optimizer != "sgd":
        first = next(leaves(params))
        return {"m": zeros_like(params), "v": zeros_like(params), "t": first.new_zeros(())}
    return {"m": zeros_like(params)} if training.momentum else {}


def _scaled(xs: list[Tensor], s: Rate) -> list[Tensor]:
    return list(torch._foreach_mul(xs, s))


def _add(xs: list[Tensor], ys: list[Tensor], s: Rate | Sequence[Rate]) -> list[Tensor]:
    """Return xs + s * ys, with one s for all or one for each."""
    if isinstance(s, Sequence):
        return [x + r * y for x, y, r in zip(xs, ys, s, strict=True)]
    if isinstance(s, Tensor):
        return list(torch._foreach_add(xs, torch._foreach_mul(ys, s)))
    return list(torch._foreach_add(xs, ys, alpha=s))


def _clipped(grads: list[Tensor], most: float, lanes: bool) -> list[Tensor]:
    """Clip gradients so that their common norm is at most ``most``, for each lane separately."""
    squares = [g.square().flatten(1).sum(dim=1) if lanes else g.square().sum() for g in grads]
    share = (most / (torch.stack(squares).sum(dim=0).sqrt() + 1e-6)).clamp(max=1.0)  # () or (K,)
    return [g * share.reshape(share.shape + (1,) * (g.ndim - share.ndim)) for g in grads]


def update(
    training: Training,
    params: list[Tensor],
    grads: list[Tensor],
    moments: dict[str, list[Tensor]],
    rate: Rate | Sequence[Rate],
    lanes: bool,
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Take one step from ``params`` along ``grads``; ``moments`` holds the lists of :func:`init`'s branches.

    With ``lanes``, every leaf has a leading axis of clients. Order as in torch.optim: clip, add weight decay (AdamW
    takes it from the parameters instead), then momentum or Adam's moments.
    """
    if training.clip:
        grads = _clipped(grads, training.clip, lanes)
    descent = [-r for r in rate] if isinstance(rate, Sequence) else -rate
    if training.weight_decay and training.optimizer == "adamw":
        params = _add(params, _scaled(params, training.weight_decay), descent)
    elif training.weight_decay:
        grads = _add(grads, params, training.weight_decay)
    if training.optimizer != "sgd":
        b1, b2 = training.beta1, training.beta2
        t = moments["t"][0] + 1.0  # () or (K,)
        m = _add(_scaled(moments["m"], b1), grads, 1.0 - b1)
        v = _add(_scaled(moments["v"], b2), [g * g for g in grads], 1.0 - b2)
        fix1, fix2 = 1.0 - b1**t, (1.0 - b2**t).sqrt()

        def wide(s: Tensor, like: Tensor) -> Tensor:
            return s.reshape(s.shape + (1,) * (like.ndim - s.ndim))

        direction = [(x / wide(fix1, x)) / (y.sqrt() / wide(fix2, y) + 1e-8) for x, y in zip(m, v, strict=True)]
        return _add(params, direction, descent), {"m": m, "v": v, "t": [t]}
    if training.momentum:
        m = _add(grads, moments["m"], training.momentum)
        return _add(params, m, descent), {"m": m}
    return _add(params, grads, descent), {}


def update_in_place(
    training: Training,
    params: list[Tensor],
    grads: list[Tensor],
    moments: dict[str, list[Tensor]],
    rate: Rate | Sequence[Rate],
    active: Tensor | None,
) -> bool:
    """Do the same for lanes on CUDA where ``active`` (K,), as one kernel; if that is impossible, return False.

    ``params`` and ``moments`` (K, ...) are overwritten.
    """
    if training.clip or isinstance(rate, float) or not step.usable(params[0]):
        return False
    if training.optimizer == "sgd":
        kept = moments["m"] if training.momentum else None
        step.kernels().sgd_update(params, grads, kept, rate, active, training.weight_decay, training.momentum)
    else:
        betas, apart = (training.beta1, training.beta2), training.optimizer == "adamw"
        step.kernels().adam_update(params, grads, moments, rate, active, training.weight_decay, betas, apart)
    return True
