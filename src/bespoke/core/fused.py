"""One Triton kernel for what a step of SGD does to a leaf of all clients: imported only where CUDA is."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["size", "decay", "momentum"])
def _sgd(
    param, grad, moment, rate, active, size, decay, momentum,
    MOMENT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g = grad + decay * param; m = momentum * m + g; param -= rate * m: in the lanes that are active."""
    lane = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    if MASKED:
        inside = inside & tl.load(active + lane)
    place += lane * size
    value = tl.load(param + place, mask=inside)
    step = tl.load(grad + place, mask=inside) + decay * value
    if MOMENT:
        step += momentum * tl.load(moment + place, mask=inside)
        tl.store(moment + place, step, mask=inside)
    tl.store(param + place, value - tl.load(rate) * step, mask=inside)


def sgd_in_place(
    param: Tensor, grad: Tensor, moment: Tensor | None, rate: Tensor, active: Tensor | None, decay: float, mu: float
) -> None:
    """Update ``param`` and ``moment`` (K, ...) float32 in place along ``grad``; ``rate`` 0-d, ``active`` (K,) bool."""
    lanes, size = len(param), param[0].numel()
    grid = (triton.cdiv(size, _BLOCK), lanes)
    _sgd[grid](
        param, grad.contiguous(), moment, rate, active, size, decay, mu,
        MOMENT=moment is not None, MASKED=active is not None, BLOCK=_BLOCK,
    )  # fmt: skip
