"""Triton kernels for all clients, besides the model: random draws and the optimiser."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bespoke.gpu.launching import launch

_BLOCK = 1024
_LEAVES = 16  # updated by one launch


# --- randomness ---------------------------------------------------------------------------------------------


@triton.jit
def _mix(x0, x1, r: tl.constexpr):
    x0 += x1
    return x0, ((x1 << r) | (x1 >> (32 - r))) ^ x0


@triton.jit
def _four(x0, x1, a, b, n: tl.constexpr, r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr):
    """Four rounds, then the key's words a and b."""
    x0, x1 = _mix(x0, x1, r0)
    x0, x1 = _mix(x0, x1, r1)
    x0, x1 = _mix(x0, x1, r2)
    x0, x1 = _mix(x0, x1, r3)
    return x0 + a, x1 + b + n


@triton.jit(  # one variant for all: keys and counters are views that begin anywhere
    do_not_specialize=["total", "n1", "n2", "n3", "s0", "s1", "s2", "s3", "t0", "t1", "t2", "t3"],
    do_not_specialize_on_alignment=["first", "second", "counter", "out"],
)
def _threefry(first, second, counter, out, total, n1, n2, n3, s0, s1, s2, s3, t0, t1, t2, t3, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < total
    i3, rest = at % n3, at // n3
    i2, rest = rest % n2, rest // n2
    i1, i0 = rest % n1, rest // n1
    key = i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3
    count = tl.load(counter + i0 * t0 + i1 * t1 + i2 * t2 + i3 * t3, mask=live, other=0)
    a = tl.load(first + key, mask=live, other=0).to(tl.uint32)
    b = tl.load(second + key, mask=live, other=0).to(tl.uint32)
    c = a ^ b ^ 0x1BD11BDA
    x0, x1 = (count >> 32).to(tl.uint32) + a, count.to(tl.uint32) + b
    x0, x1 = _four(x0, x1, b, c, 1, 13, 15, 26, 6)
    x0, x1 = _four(x0, x1, c, a, 2, 17, 29, 16, 24)
    x0, x1 = _four(x0, x1, a, b, 3, 13, 15, 26, 6)
    x0, x1 = _four(x0, x1, b, c, 4, 17, 29, 16, 24)
    x0, x1 = _four(x0, x1, c, a, 5, 13, 15, 26, 6)
    tl.store(out + 2 * at, x0.to(tl.int64), mask=live)
    tl.store(out + 2 * at + 1, x1.to(tl.int64), mask=live)


def threefry(first: Tensor, second: Tensor, counter: Tensor) -> Tensor:
    """Compute Threefry-2x32-20 of keys' words and counters, int64 that broadcast: (..., 2) words of 32 bits."""
    shape = np.broadcast_shapes(first.shape, counter.shape)  # torch's own imports sympy, which takes half a second
    out = first.new_empty((*shape, 2))
    words = [t.expand(shape) for t in (first, second, counter)]
    if len(shape) > 4:
        shape, words = (out.numel() // 2,), [t.flatten() for t in words]
    if words[0].stride() != words[1].stride():
        words[:2] = [t.contiguous() for t in words[:2]]
    missing = 4 - len(shape)
    sizes = (1,) * missing + tuple(shape)
    strides = [(0,) * missing + t.stride() for t in words[1:]]
    total = out.numel() // 2
    grid = (triton.cdiv(total, _BLOCK),)
    launch(_threefry, grid, [out], *words, out, total, *sizes[1:], *strides[0], *strides[1], _BLOCK)
    return out


# --- the optimiser's step -----------------------------------------------------------------------------------


@triton.jit  # which keeps the name `params` for itself
def _sgd(
    values, slopes, kept, sizes, rates, strides, active, decay, momentum,
    LEAVES: tl.constexpr, DECAY: tl.constexpr, MOMENTUM: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    for i in tl.static_range(LEAVES):  # the blocks of one leaf after those of another
        size = sizes[i]
        if (block >= 0) & (block * BLOCK < size):
            step_size = tl.load(rates[i] + client * strides[i])
            at = block * BLOCK + tl.arange(0, BLOCK)
            live = at < size
            if MASKED:
                live = live & (tl.load(active + client) != 0)
            param = values[i] + client * size + at
            value = tl.load(param, mask=live)
            step = tl.load(slopes[i] + client * size + at, mask=live)
            if DECAY:
                step += decay * value
            if MOMENTUM:
                moment = kept[i] + client * size + at
                step += momentum * tl.load(moment, mask=live)
                tl.store(moment, step, mask=live)
            tl.store(param, value - step_size * step, mask=live)
        block -= tl.cdiv(size, BLOCK)


def sgd_update(
    params: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor] | None,
    rate: Tensor | Sequence[Tensor],
    active: Tensor | None,
    weight_decay: float,
    momentum: float,
) -> None:
    """Do one step of SGD on the leaves (K, ...) of K clients, in place: the parameters and their moments.

    As torch.optim.SGD: weight decay is added to the gradient, then ``momentum`` times the moment. ``moments`` is
    None without momentum and starts at zeros; ``rate`` is 0-d or (K,), one for all leaves or one per leaf. Clients that
    are not ``active`` (K,) stay as they are, whatever their gradient. All are float32, each leaf in one piece.
    """
    rates = _by_leaf(rate, len(params))
    for first in range(0, len(params), _LEAVES):
        part = slice(first, first + _LEAVES)
        leaves, slopes, kept = params[part], [g.contiguous() for g in grads[part]], (moments or params)[part]
        _check_pieces(*leaves, *slopes, *kept)
        sizes = [p[0].numel() for p in leaves]
        grid = (sum(triton.cdiv(size, _BLOCK) for size in sizes), len(leaves[0]))
        launch(
            _sgd, grid, [],
            tuple(leaves), tuple(slopes), tuple(kept), tuple(sizes), *_pointers(rates[part]), active,
            weight_decay, momentum, LEAVES=len(leaves), DECAY=weight_decay != 0, MOMENTUM=moments is not None,
            MASKED=active is not None, BLOCK=_BLOCK,
        )  # fmt: skip


@triton.jit
def _adam(
    values, slopes, means, squares, sizes, rates, strides, steps, active,
    decay, beta1, rest1, log1, beta2, rest2, log2,
    LEAVES: tl.constexpr, DECAY: tl.constexpr, APART: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    count = tl.load(steps + client) + 1.0
    fix1, fix2 = 1.0 - tl.exp(count * log1), tl.sqrt_rn(1.0 - tl.exp(count * log2))
    block = tl.program_id(0)
    for i in tl.static_range(LEAVES):  # the blocks of one leaf after those of another
        size = sizes[i]
        if (block >= 0) & (block * BLOCK < size):
            step_size = tl.load(rates[i] + client * strides[i])
            at = block * BLOCK + tl.arange(0, BLOCK)
            live = at < size
            if MASKED:
                live = live & (tl.load(active + client) != 0)
            at += client * size
            value = tl.load(values[i] + at, mask=live, other=0.0)
            slope = tl.load(slopes[i] + at, mask=live, other=0.0)
            if DECAY:
                if APART:
                    value -= step_size * decay * value
                else:
                    slope += decay * value
            mean = beta1 * tl.load(means[i] + at, mask=live, other=0.0) + rest1 * slope
            square = beta2 * tl.load(squares[i] + at, mask=live, other=0.0) + rest2 * slope * slope
            tl.store(means[i] + at, mean, mask=live)
            tl.store(squares[i] + at, square, mask=live)
            step = tl.div_rn(tl.div_rn(mean, fix1), tl.div_rn(tl.sqrt_rn(square), fix2) + 1e-8)
            tl.store(values[i] + at, value - step_size * step, mask=live)
        block -= tl.cdiv(size, BLOCK)


def adam_update(
    params: list[Tensor],
    grads: list[Tensor],
    moments: dict[str, list[Tensor]],
    rate: Tensor | Sequence[Tensor],
    active: Tensor | None,
    weight_decay: float,
    betas: tuple[float, float],
    decay_apart: bool,
) -> None:
    """Do one step of Adam on the leaves (K, ...) of K clients, in place: the parameters and their moments.

    ``moments`` has the lists m and v, and the steps t (K,). Weight decay is added to the gradient, as in
    torch.optim.Adam, or with ``decay_apart`` taken from the parameters, as in torch.optim.AdamW. Else as
    :func:`sgd_update`.
    """
    (steps,) = moments["t"]
    rates, decays = _by_leaf(rate, len(params)), [(b, 1.0 - b, math.log(b) if b else -math.inf) for b in betas]
    for first in range(0, len(params), _LEAVES):
        part = slice(first, first + _LEAVES)
        leaves, slopes = params[part], [g.contiguous() for g in grads[part]]
        means, squares = moments["m"][part], moments["v"][part]
        _check_pieces(*leaves, *slopes, *means, *squares, steps)
        sizes = [p[0].numel() for p in leaves]
        grid = (sum(triton.cdiv(size, _BLOCK) for size in sizes), len(leaves[0]))
        launch(
            _adam, grid, [],
            tuple(leaves), tuple(slopes), tuple(means), tuple(squares), tuple(sizes),
            *_pointers(rates[part]), steps, active, weight_decay, *decays[0], *decays[1], LEAVES=len(leaves),
            DECAY=weight_decay != 0, APART=decay_apart, MASKED=active is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    steps.add_(1.0 if active is None else active.to(steps.dtype))


def _by_leaf(rate: Tensor | Sequence[Tensor], leaves: int) -> list[Tensor]:
    return [rate] * leaves if isinstance(rate, Tensor) else list(rate)


def _pointers(rates: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the rates and their steps from client to client."""
    return tuple(rates), tuple(rate.stride(0) if rate.dim() else 0 for rate in rates)


def _check_pieces(*tensors: Tensor) -> None:
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in tensors):
        raise ValueError("parameters, gradients and moments must be float32, each leaf in one piece")
