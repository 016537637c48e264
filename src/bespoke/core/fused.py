"""The optimiser's step of all clients at once, as a Triton kernel that changes its tensors in place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["size"])
def _sgd(
    param, grad, moment, rate, active, param_stride, grad_stride, moment_stride, rate_stride, size, decay, momentum,
    DECAY: tl.constexpr, MOMENTUM: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    if MASKED:
        live = live & (tl.load(active + client) != 0)
    param += client * param_stride + at
    value = tl.load(param, mask=live)
    step = tl.load(grad + client * grad_stride + at, mask=live)
    if DECAY:
        step += decay * value
    if MOMENTUM:
        moment += client * moment_stride + at
        step += momentum * tl.load(moment, mask=live)
        tl.store(moment, step, mask=live)
    tl.store(param, value - tl.load(rate + client * rate_stride) * step, mask=live)


def sgd_update(
    param: Tensor,
    grad: Tensor,
    moment: Tensor | None,
    rate: Tensor,
    active: Tensor | None,
    weight_decay: float,
    momentum: float,
) -> None:
    """One step of SGD on a leaf (K, ...) of K clients, in place: the parameter and its moment.

    As torch.optim.SGD: weight decay is added to the gradient, then ``momentum`` times the moment. ``moment`` is
    None without momentum and starts at zero; ``rate`` is 0-d or (K,). Clients that are not ``active`` (K,) stay as
    they are, whatever their gradient. All are float32; each client's part lies in one piece, at any distance.
    """
    clients = len(param)
    tensors = [param, grad] if moment is None else [param, grad, moment]
    strides = [t.stride(0) for t in tensors] + [0] * (moment is None)
    if any(t.dtype != torch.float32 or not t[0].is_contiguous() for t in tensors):
        raise ValueError("parameter, gradient and moment must be float32, each client's part in one piece")
    size = param[0].numel()
    _sgd[triton.cdiv(size, _BLOCK), clients](
        param, grad, moment, rate, active, *strides, rate.stride(0) if rate.dim() else 0, size, weight_decay, momentum,
        DECAY=weight_decay != 0, MOMENTUM=moment is not None, MASKED=active is not None, BLOCK=_BLOCK,
    )  # fmt: skip
