"""Convolutions of all clients at once, as Triton kernels: each client has its own weights.

Maps are stored with channels last, (K, B, H, W, C); K clients, B images each. Every kernel is a matrix product whose
operands are gathered on the way ("implicit"): sums are float32, operands bfloat16 or float32 (multiplied as TF32).

A stage is a convolution (stride 1), bias, leaky ReLU and 2x2 max-pool in one. The four pixels of a pool window read
patches that overlap, together one patch with one more row and column and stride 2. So the patch is loaded once and
multiplied by four shifted copies of the weights, and only the largest result is stored, with a code that says where
it was: bits 0 and 1 number the pixel of the window, bit 2 says that it was positive. Backward, the code alone turns
the gradient of the pooled map into that of the convolution. A plain convolution runs through the same kernels
with ``POOL`` off.

Weights are first packed, (K, kernel rows, kernel columns, C padded, outputs padded), in the operands' type.
"""

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bespoke.gpu.fast_layers import Conv, Pool
from bespoke.gpu.launching import launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run on the CPU, slowly
_MOST_PARTS = 20  # of a weight gradient
_PROGRAMS = 528  # to keep 132 multiprocessors busy with a few each
_POOLED = 1024  # numbers of a map that a program of a max-pool computes
_LARGEST_NORM = 1 << 15  # numbers that a program of a norm may hold for the sake of longer loads


class Blocks(NamedTuple):
    """How a kernel cuts its matrix product: rows, columns and depth of a block, and how Triton runs it."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3


def _power(n: int, low: int = 16, high: int = 1 << 30) -> int:
    return max(low, min(high, 1 << (n - 1).bit_length()))


def choose_blocks(
    kind: str, conv: Conv, rows: int, columns: int, depth: int, channels: int, clients: int = 32
) -> Blocks:
    """Return block sizes by shape, from measurements; ``kind`` is forward, weight or input.

    ``rows``, ``columns`` and ``depth`` are those of the matrix product; ``channels`` are the input's.
    """
    if kind == "forward" and conv.pooled:
        if columns >= 64:
            chosen = Blocks(64, 64, 32)
        elif rows >= 4096:
            chosen = Blocks(128, _power(columns, high=32), 32, 4, 2)
        else:
            chosen = Blocks(128, _power(columns, high=32), 64, 8)
    elif kind == "weight" and conv.pooled:
        if columns >= 64:
            few = Blocks(64, 64, 64) if clients <= 16 else Blocks(128, 64, 128, 8)
            chosen = few if rows <= 512 else Blocks(128, 32, 64)
        else:
            chosen = Blocks(64, _power(columns, high=32), 64)
    elif kind == "input" and conv.pooled:
        chosen = Blocks(64, 128, 32, 4, 2) if columns >= 128 else Blocks(128, _power(columns, high=64), 32)
    elif kind == "weight":
        if columns > channels >= 64:
            chosen = Blocks(64, _power(columns, high=128), 64)
        elif channels >= 128:
            chosen = Blocks(128, _power(columns, high=128), 32, 4, 3 if channels >= 512 else 4)
        else:
            chosen = Blocks(64, _power(columns, high=128), 64, 4, 4)
    elif kind == "input":
        if channels >= 512:
            chosen = Blocks(64, 128, _power(depth, high=64))
        else:  # a program's columns should all belong to one pixel
            wide = _power(columns, high=128) if channels < 64 else _power(channels, high=128)
            chosen = Blocks(128 if rows >= 256 else 64, wide, _power(depth, high=64), 8 if wide == 128 else 4)
    elif columns >= 256:
        chosen = Blocks(64, 256, 32, 4, 4 if channels >= 512 else 3)
    else:  # a block's depth should lie at one place of the patch
        deep = _power(depth if channels < 16 else channels, high=64)
        warps = 8 if rows >= 256 and columns >= 128 else 4
        chosen = Blocks(128 if rows >= 256 else 64, _power(columns, high=128), deep, warps, 4 if deep <= 32 else 3)
    if conv.operands == torch.float32:  # twice the shared memory
        chosen = chosen._replace(depth=max(16, chosen.depth // 2))
    return chosen


# --- the kernels --------------------------------------------------------------------------------------------


@triton.jit
def _pack_weight(
    source, packed, client_stride, C: tl.constexpr, OUT: tl.constexpr, TAPS: tl.constexpr,
    CP: tl.constexpr, OUTP: tl.constexpr, BJ: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Pack (OUT, C * TAPS) float32 into (TAPS, CP, OUTP); the padding is zero."""
    client = tl.program_id(2).to(tl.int64)
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)  # channel-major, as in memory
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (n < OUT)[:, None] & (j < C * TAPS)[None, :]
    value = tl.load(source + client * client_stride + n[:, None] * (C * TAPS) + j[None, :], mask=inside, other=0.0)
    row = (j % TAPS) * CP + j // TAPS
    value = tl.trans(value).to(packed.dtype.element_ty)
    place = packed + client * (TAPS * CP * OUTP) + row[:, None] * OUTP + n[None, :]
    tl.store(place, value, mask=(j < CP * TAPS)[:, None] & (n < OUTP)[None, :])


@triton.jit(do_not_specialize=["pixels", "H", "W"])
def _pack_maps(
    source, packed, client_stride, b_stride, c_stride, h_stride, w_stride, pixels, H, W,
    C: tl.constexpr, CP: tl.constexpr, CB: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Pack (B, C, H, W) of any strides into (B, H, W, CP); the padding is zero."""
    client = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, CB)
    start = (m // (H * W)) * b_stride + (m // W % H) * h_stride + (m % W) * w_stride
    inside = (c < C)[:, None] & (m < pixels)[None, :]
    value = tl.load(source + client * client_stride + c[:, None] * c_stride + start[None, :], mask=inside, other=0.0)
    place = packed + client * pixels * CP + m[:, None] * CP + c[None, :]
    tl.store(place, tl.trans(value).to(packed.dtype.element_ty), mask=(m < pixels)[:, None] & (c < CP)[None, :])


@triton.jit
def _patches(
    x, b, y0, x0, live, k0, H: tl.constexpr, W: tl.constexpr, PAD: tl.constexpr, WIDTH: tl.constexpr,
    C: tl.constexpr, DEPTH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Patches as rows: pixel (b, y0, x0) is the upper left corner, k numbers (row, column, channel) in the patch.

    Return the columns from k0 on. Where they all lie at one place of the patch, a row of them lies in one piece, and
    it is inside or outside as a whole.
    """
    if C % BK == 0:
        tap, c = k0 // C, tl.multiple_of(k0 % C, BK) + tl.arange(0, BK)
        rows, columns = y0 + tap // WIDTH, x0 + tap % WIDTH
        inside = live
        if PAD > 0:
            inside = inside & (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
        return tl.load(x + (((b * H + rows) * W + columns) * C)[:, None] + c[None, :], mask=inside[:, None], other=0.0)
    k = k0 + tl.arange(0, BK)
    start = ((b * H + y0) * W + x0) * C
    inside = live[:, None] & (k < DEPTH)[None, :]
    if PAD > 0:
        row, column = k // C // WIDTH, k // C % WIDTH
        offset = start[:, None] + ((row * W + column) * C + k % C)[None, :]
        rows, columns = y0[:, None] + row[None, :], x0[:, None] + column[None, :]
        inside = inside & (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
    else:  # a row of a patch lies in one piece: longer loads where there are few channels
        offset = start[:, None] + (k // (WIDTH * C) * (W * C) + k % (WIDTH * C))[None, :]
    return tl.load(x + offset, mask=inside, other=0.0)


@triton.jit
def _shifted(
    w, k, n, QY: tl.constexpr, QX: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, C: tl.constexpr,
    OUTP: tl.constexpr,
):  # fmt: skip
    """Packed weights (k, n) for pixel (QY, QX) of a pool window, where k numbers the larger patch."""
    row, rest = k // ((KW + 1) * C), k % ((KW + 1) * C)
    u, v = row - QY, rest // C - QX
    inside = (u >= 0) & (u < KH) & (v >= 0) & (v < KW)
    return tl.load(w + ((u * KW + v) * C + rest % C)[:, None] * OUTP + n[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _better(best, where, value, q: tl.constexpr):
    """Keep the first of the largest values, or the last NaN, like torch's max-pool."""
    larger = (value > best) | (value != value)
    return tl.where(larger, value, best), tl.where(larger, q, where)


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x, w, bias, y, code, x_stride, bias_stride, slope, rows,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    C: tl.constexpr, OUT: tl.constexpr, OUTP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, POOL: tl.constexpr, TYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute y (rows, OUT) of one client; rows are the output pixels (b, oy, ox), pooled where POOL."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    live = m < rows
    HEIGHT: tl.constexpr = KH + 1 if POOL else KH
    WIDTH: tl.constexpr = KW + 1 if POOL else KW
    STEP: tl.constexpr = 2 if POOL else STRIDE
    DEPTH: tl.constexpr = HEIGHT * WIDTH * C
    b, y0, x0 = m // (OH * OW), (m // OW % OH) * STEP - PAD, (m % OW) * STEP - PAD
    x += client * x_stride
    w += client * (KH * KW * C * OUTP)
    acc0 = tl.zeros((BM, BN), tl.float32)
    if POOL:
        acc1, acc2, acc3 = acc0, acc0, acc0
    for k0 in range(0, DEPTH, BK):
        k = k0 + tl.arange(0, BK)
        a = _patches(x, b, y0, x0, live, k0, H, W, PAD, WIDTH, C, DEPTH, BK)
        if POOL:
            acc0 = tl.dot(a, _shifted(w, k, n, 0, 0, KH, KW, C, OUTP), acc0, input_precision=TYPE)
            acc1 = tl.dot(a, _shifted(w, k, n, 0, 1, KH, KW, C, OUTP), acc1, input_precision=TYPE)
            acc2 = tl.dot(a, _shifted(w, k, n, 1, 0, KH, KW, C, OUTP), acc2, input_precision=TYPE)
            acc3 = tl.dot(a, _shifted(w, k, n, 1, 1, KH, KW, C, OUTP), acc3, input_precision=TYPE)
        else:
            place = w + k[:, None] * OUTP + n[None, :]
            weight = tl.load(place) if DEPTH % BK == 0 else tl.load(place, mask=(k < DEPTH)[:, None], other=0.0)
            acc0 = tl.dot(a, weight, acc0, input_precision=TYPE)
    inside = live[:, None] & (n < OUT)[None, :]
    place = client * rows * OUT + m[:, None] * OUT + n[None, :]
    if POOL:
        best, where = _better(acc0, tl.zeros((BM, BN), tl.int32), acc1, 1)
        best, where = _better(best, where, acc2, 2)
        best, where = _better(best, where, acc3, 3)
        best += tl.load(bias + client * bias_stride + n, mask=n < OUT, other=0.0)[None, :]
        positive = best > 0
        tl.store(y + place, tl.where(positive, best, best * slope).to(y.dtype.element_ty), mask=inside)
        tl.store(code + place, tl.where(positive, where + 4, where).to(tl.uint8), mask=inside)
    else:
        tl.store(y + place, acc0.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _chosen(gradient, code, slope):
    """Return the gradient before the leaky ReLU, float32, from that of the pooled map."""
    value = gradient.to(tl.float32)
    return tl.where((code & 4) > 0, value, value * slope)


@triton.jit(do_not_specialize=["splits", "rows", "rows_each"])
def _weight_gradient(
    x, dy, code, parts, bias_parts, x_stride, slope, splits, rows, rows_each,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    C: tl.constexpr, OUT: tl.constexpr, OUTP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, PAD: tl.constexpr, POOL: tl.constexpr, TYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Parts of the gradient (place in the patch and channel, output), each over ``rows_each`` output pixels.

    Where POOL there are four, one for each pixel of the window, still to be shifted and summed.
    """
    client, split = tl.program_id(2).to(tl.int64), tl.program_id(1)
    HEIGHT: tl.constexpr = KH + 1 if POOL else KH
    WIDTH: tl.constexpr = KW + 1 if POOL else KW
    STEP: tl.constexpr = 2 if POOL else STRIDE
    DEPTH: tl.constexpr = HEIGHT * WIDTH * C
    COLUMNS: tl.constexpr = OUTP // BN
    k0 = tl.program_id(0) // COLUMNS * BM
    n = tl.program_id(0) % COLUMNS * BN + tl.arange(0, BN)
    x += client * x_stride
    dy += client * rows * OUT
    acc0 = tl.zeros((BM, BN), tl.float32)
    if POOL:
        code += client * rows * OUT
        acc1, acc2, acc3 = acc0, acc0, acc0
        bias = tl.zeros((BK, BN), tl.float32)
    for m0 in range(split * rows_each, tl.minimum(split * rows_each + rows_each, rows), BK):
        m = m0 + tl.arange(0, BK)
        live = m < rows
        b, y0, x0 = m // (OH * OW), (m // OW % OH) * STEP - PAD, (m % OW) * STEP - PAD
        a = tl.trans(_patches(x, b, y0, x0, live, k0, H, W, PAD, WIDTH, C, DEPTH, BM))
        place = m[:, None] * OUT + n[None, :]
        inside = live[:, None] & (n < OUT)[None, :]
        g = tl.load(dy + place, mask=inside, other=0.0)
        if POOL:
            q = tl.load(code + place, mask=inside, other=0).to(tl.int32)
            g32 = _chosen(g, q, slope)
            bias += g32
            g = g32.to(x.dtype.element_ty)
            q = q & 3
            zero = tl.zeros_like(g)
            acc0 = tl.dot(a, tl.where(q == 0, g, zero), acc0, input_precision=TYPE)
            acc1 = tl.dot(a, tl.where(q == 1, g, zero), acc1, input_precision=TYPE)
            acc2 = tl.dot(a, tl.where(q == 2, g, zero), acc2, input_precision=TYPE)
            acc3 = tl.dot(a, tl.where(q == 3, g, zero), acc3, input_precision=TYPE)
        else:
            acc0 = tl.dot(a, g, acc0, input_precision=TYPE)
    WINDOW: tl.constexpr = 4 if POOL else 1
    k = k0 + tl.arange(0, BM)
    place = parts + (client * splits + split) * (WINDOW * DEPTH * OUTP) + k[:, None] * OUTP + n[None, :]
    inside = (k < DEPTH)[:, None]
    tl.store(place, acc0, mask=inside)
    if POOL:
        tl.store(place + DEPTH * OUTP, acc1, mask=inside)
        tl.store(place + 2 * DEPTH * OUTP, acc2, mask=inside)
        tl.store(place + 3 * DEPTH * OUTP, acc3, mask=inside)
        if tl.program_id(0) // COLUMNS == 0:
            tl.store(bias_parts + (client * splits + split) * OUTP + n, tl.sum(bias, 0))


@triton.jit(do_not_specialize=["splits"])
def _sum_parts(
    parts, bias_parts, dw, db, splits, C: tl.constexpr, CP: tl.constexpr, OUT: tl.constexpr, OUTP: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, POOL: tl.constexpr, BJ: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a weight gradient: -> dw (OUT, C, KH, KW) and, where POOL, db (OUT,)."""
    client = tl.program_id(2).to(tl.int64)
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    c, u, v = j // (KH * KW), j // KW % KH, j % KW
    HEIGHT: tl.constexpr = KH + 1 if POOL else KH
    WIDTH: tl.constexpr = KW + 1 if POOL else KW
    WINDOW: tl.constexpr = 4 if POOL else 1
    SIZE: tl.constexpr = HEIGHT * WIDTH * CP * OUTP
    inside = (j < C * KH * KW)[:, None] & (n < OUTP)[None, :]
    total = tl.zeros((BJ, BN), tl.float32)
    parts += client * splits * (WINDOW * SIZE)
    for split in range(splits):
        for q in tl.static_range(WINDOW):
            row = ((u + q // 2) * WIDTH + v + q % 2) * CP + c
            place = (split * WINDOW + q) * SIZE + row[:, None] * OUTP + n[None, :]
            total += tl.load(parts + place, mask=inside, other=0.0)
    place = dw + client * (OUT * C * KH * KW) + n[:, None] * (C * KH * KW) + j[None, :]
    tl.store(place, tl.trans(total), mask=(n < OUT)[:, None] & (j < C * KH * KW)[None, :])
    if POOL:  # noqa: SIM102 - decided when compiling
        if tl.program_id(0) == 0:
            bias = tl.zeros((BN,), tl.float32)
            for split in range(splits):
                bias += tl.load(bias_parts + (client * splits + split) * OUTP + n, mask=n < OUTP, other=0.0)
            tl.store(db + client * OUT + n, bias, mask=n < OUT)


@triton.jit
def _turned(w, u, v, ci, co, KH: tl.constexpr, KW: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, OUTP: tl.constexpr):
    """Packed weights (co, column) at kernel place (u, v) and channel ci of each column; zero outside the kernel."""
    inside = (u >= 0) & (u < KH) & (v >= 0) & (v < KW) & (ci < C)
    place = w + (((u * KW + v) * CP + ci) * OUTP)[None, :] + co[:, None]
    return tl.load(place, mask=inside[None, :] & (co < OUTP)[:, None], other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _input_gradient(
    dy, code, w, dx, slope, rows,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
    C: tl.constexpr, CP: tl.constexpr, CB: tl.constexpr, OUT: tl.constexpr, OUTP: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, POOL: tl.constexpr,
    TYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute dx (B, H, W, C) of one client.

    A row is a block of STEP x STEP pixels of the padded input, whose pixels all read the same outputs; a column is
    a pixel of the block and a channel. Pixel ``STEP * j + r`` reads output ``j - d`` at patch place ``STEP * d + r``.
    """
    client = tl.program_id(2).to(tl.int64)
    STEP: tl.constexpr = 2 if POOL else STRIDE
    EXTRA: tl.constexpr = 1 if POOL else 0
    DEPTHS: tl.constexpr = (OUT + BK - 1) // BK
    # Where a program's columns all belong to one pixel, it takes the places that this pixel reads, and no others.
    ONE: tl.constexpr = CB % BN == 0 and CB == C and not POOL
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    b, jy, jx = m // (JH * JW), m // JW % JH + PAD // STEP, m % JW + PAD // STEP
    n0 = tl.program_id(1) * BN
    if ONE:
        pixel = 0 if STEP == 1 else n0 // CB
        ry, rx, ci = pixel // STEP, pixel % STEP, tl.multiple_of(n0 % CB, BN) + tl.arange(0, BN)
        dys, dxs = (KH - ry + STEP - 1) // STEP, (KW - rx + STEP - 1) // STEP
    else:
        n = n0 + tl.arange(0, BN)
        ci, ry, rx = n % CB, n // CB // STEP, n // CB % STEP
        dys, dxs = (KH + EXTRA + STEP - 1) // STEP, (KW + EXTRA + STEP - 1) // STEP
    w += client * (KH * KW * CP * OUTP)
    base = client * (rows // (JH * JW)) * (OH * OW * OUT)
    dy += base
    if POOL:
        code += base
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(dys * dxs * DEPTHS):
        ey, ex = step // DEPTHS // dxs, step // DEPTHS % dxs
        co = step % DEPTHS * BK + tl.arange(0, BK)
        oy, ox = jy - ey, jx - ex
        live = (m < rows) & (oy >= 0) & (oy < OH) & (ox >= 0) & (ox < OW)
        place = (((b * OH + oy) * OW + ox) * OUT)[:, None] + co[None, :]
        inside = live[:, None] if OUT % BK == 0 else live[:, None] & (co < OUT)[None, :]
        g = tl.load(dy + place, mask=inside, other=0.0)
        u, v = STEP * ey + ry, STEP * ex + rx
        if POOL:
            q = tl.load(code + place, mask=inside, other=0).to(tl.int32)
            g = _chosen(g, q, slope).to(w.dtype.element_ty)
            q = q & 3
            zero = tl.zeros_like(g)
            for i in tl.static_range(4):
                weight = _turned(w, u - i // 2, v - i % 2, ci, co, KH, KW, C, CP, OUTP)
                acc = tl.dot(tl.where(q == i, g, zero), weight, acc, input_precision=TYPE)
        elif ONE and OUT % BK == 0:
            weight = tl.load(w + (((u * KW + v) * CP + ci) * OUTP)[None, :] + co[:, None])
            acc = tl.dot(g, weight, acc, input_precision=TYPE)
        else:
            acc = tl.dot(g, _turned(w, u, v, ci, co, KH, KW, C, CP, OUTP), acc, input_precision=TYPE)
    iy, ix = STEP * jy - PAD, STEP * jx - PAD
    if ONE:
        iy, ix = (iy + ry)[:, None], (ix + rx)[:, None]
    else:
        iy, ix = iy[:, None] + ry[None, :], ix[:, None] + rx[None, :]
    column = (ci < C) & (n0 + tl.arange(0, BN) < STEP * STEP * CB)
    inside = (m < rows)[:, None] & column[None, :] & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
    place = client * (rows // (JH * JW)) * (H * W * C) + ((b[:, None] * H + iy) * W + ix) * C + ci[None, :]
    tl.store(dx + place, acc.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _total(per_channel, GROUP: tl.constexpr, BC: tl.constexpr):
    """Sum over groups: (BC,) -> (BC,), each channel with its group's sum."""
    if GROUP == 1:
        total = per_channel
    elif GROUP >= BC or BC % GROUP != 0:  # one group, perhaps padded
        total = tl.zeros_like(per_channel) + tl.sum(per_channel, 0)
    else:
        sums = tl.sum(tl.reshape(per_channel, (BC // GROUP, GROUP)), 1)
        total = tl.reshape(tl.broadcast_to(sums[:, None], (BC // GROUP, GROUP)), (BC,))
    return total


@triton.jit(do_not_specialize=["batch", "pixels"])
def _norm(
    x, residual, scale, shift, y, means, rates, scale_stride, shift_stride, eps, batch, pixels,
    C: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalise, [add,] [ReLU] WIDTH channels, which are one or more groups, of one image (pixels, C)."""
    image = tl.program_id(0).to(tl.int64)
    client = image // batch
    p, own = tl.arange(0, BP), tl.arange(0, BC)
    c = tl.program_id(1) * WIDTH + own
    channel = (c < C) & (own < WIDTH)
    inside = (p < pixels)[:, None] & channel[None, :]
    place = image * pixels * C + p[:, None] * C + c[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    mean = _total(tl.sum(value, 0), GROUP, BC) / (pixels * GROUP)
    value = tl.where(inside, value - mean[None, :], 0.0)
    rate = tl.rsqrt(_total(tl.sum(value * value, 0), GROUP, BC) / (pixels * GROUP) + eps)
    tl.store(means + image * C + c, mean, mask=channel)
    tl.store(rates + image * C + c, rate, mask=channel)
    value = value * (rate * tl.load(scale + client * scale_stride + c, mask=channel, other=0.0))[None, :]
    value += tl.load(shift + client * shift_stride + c, mask=channel, other=0.0)[None, :]
    if ADD:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        value = tl.where(value < 0, 0.0, value)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _before(dy, x, y, place, inside, mean, rate, factor, offset, RELU: tl.constexpr, ADD: tl.constexpr):
    """Return the gradient before the ReLU, which is 0 outside, and the standardised input there."""
    g = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    standard = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * rate[None, :]
    if RELU:
        if ADD:
            out = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        else:
            out = standard * factor[None, :] + offset[None, :]
        g = tl.where(out > 0, g, 0.0)
    return g, standard


@triton.jit(do_not_specialize=["batch", "pixels"])
def _norm_gradient(
    dy, x, y, scale, shift, means, rates, dx, dresidual, dscale, dshift, scale_stride, shift_stride, batch, pixels,
    C: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, RELU: tl.constexpr, ADD: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of ``_norm``; those of scale and shift per image, still to be summed.

    A map is held at once if it has PART pixels, else it is read twice, PART pixels at a time.
    """
    image = tl.program_id(0).to(tl.int64)
    client = image // batch
    p, own = tl.arange(0, PART), tl.arange(0, BC)
    c = tl.program_id(1) * WIDTH + own
    channel = (c < C) & (own < WIDTH)
    first = image * pixels * C + c[None, :]
    mean = tl.load(means + image * C + c, mask=channel, other=0.0)
    rate = tl.load(rates + image * C + c, mask=channel, other=0.0)
    factor = tl.load(scale + client * scale_stride + c, mask=channel, other=0.0)
    offset = tl.load(shift + client * shift_stride + c, mask=channel, other=0.0)
    if PART == BP:
        inside = (p < pixels)[:, None] & channel[None, :]
        place = first + p[:, None] * C
        g, standard = _before(dy, x, y, place, inside, mean, rate, factor, offset, RELU, ADD)
        if ADD:
            tl.store(dresidual + place, g.to(dresidual.dtype.element_ty), mask=inside)
        by_shift, by_scale = tl.sum(g, 0), tl.sum(g * standard, 0)
    else:
        shifts, scales = tl.zeros((PART, BC), tl.float32), tl.zeros((PART, BC), tl.float32)
        for p0 in range(0, pixels, PART):
            inside = (p0 + p < pixels)[:, None] & channel[None, :]
            place = first + (p0 + p)[:, None] * C
            g, standard = _before(dy, x, y, place, inside, mean, rate, factor, offset, RELU, ADD)
            if ADD:
                tl.store(dresidual + place, g.to(dresidual.dtype.element_ty), mask=inside)
            shifts += g
            scales += g * standard
        by_shift, by_scale = tl.sum(shifts, 0), tl.sum(scales, 0)
    tl.store(dshift + image * C + c, by_shift, mask=channel)
    tl.store(dscale + image * C + c, by_scale, mask=channel)
    centre = _total(factor * by_shift, GROUP, BC) / (pixels * GROUP)
    slope = _total(factor * by_scale, GROUP, BC) / (pixels * GROUP)
    if PART == BP:
        g = rate[None, :] * (g * factor[None, :] - centre[None, :] - standard * slope[None, :])
        tl.store(dx + place, g.to(dx.dtype.element_ty), mask=inside)
    else:
        for p0 in range(0, pixels, PART):
            inside = (p0 + p < pixels)[:, None] & channel[None, :]
            place = first + (p0 + p)[:, None] * C
            g, standard = _before(dy, x, y, place, inside, mean, rate, factor, offset, RELU, ADD)
            g = rate[None, :] * (g * factor[None, :] - centre[None, :] - standard * slope[None, :])
            tl.store(dx + place, g.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pixels"])
def _max_pool(
    x, y, code, pixels, in_size, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    C: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Take the largest of each window, and its place there, of the maps of one client."""
    client = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    image, y0, x0 = p // (OH * OW), p // OW % OH * STRIDE - PAD, p % OW * STRIDE - PAD
    x += client * in_size
    best, where = tl.full((BP, BC), float("-inf"), tl.float32), tl.zeros((BP, BC), tl.int32)
    for i in tl.static_range(KERNEL * KERNEL):
        row, column = y0 + i // KERNEL, x0 + i % KERNEL
        inside = (p < pixels) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        place = (((image * H + row) * W + column) * C)[:, None] + c[None, :]
        value = tl.load(x + place, mask=inside[:, None] & (c < C)[None, :], other=float("-inf"))
        best, where = _better(best, where, value.to(tl.float32), i)
    place = (client * pixels + p)[:, None] * C + c[None, :]
    live = (p < pixels)[:, None] & (c < C)[None, :]
    tl.store(y + place, best.to(y.dtype.element_ty), mask=live)
    tl.store(code + place, where.to(tl.uint8), mask=live)


@triton.jit(do_not_specialize=["pixels"])
def _max_pool_gradient(
    dy, code, dx, pixels, out_size, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    C: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum over the windows whose largest value a pixel was."""
    client = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    image, row, column = p // (H * W), p // W % H + PAD, p % W + PAD
    dy += client * out_size
    code += client * out_size
    total = tl.zeros((BP, BC), tl.float32)
    WINDOWS: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE  # in each direction
    for i in tl.static_range(WINDOWS * WINDOWS):
        oy, ox = row // STRIDE - i // WINDOWS, column // STRIDE - i % WINDOWS
        u, v = row - oy * STRIDE, column - ox * STRIDE
        inside = (p < pixels) & (oy >= 0) & (oy < OH) & (ox >= 0) & (ox < OW) & (u < KERNEL) & (v < KERNEL)
        place = (((image * OH + oy) * OW + ox) * C)[:, None] + c[None, :]
        live = inside[:, None] & (c < C)[None, :]
        chosen = tl.load(code + place, mask=live, other=255).to(tl.int32) == (u * KERNEL + v)[:, None]
        total += tl.where(chosen, tl.load(dy + place, mask=live, other=0.0).to(tl.float32), 0.0)
    live = (p < pixels)[:, None] & (c < C)[None, :]
    tl.store(dx + (client * pixels + p)[:, None] * C + c[None, :], total.to(dx.dtype.element_ty), mask=live)


# --- from torch ---------------------------------------------------------------------------------------------


Weight = tuple[int, int, int, int]  # (outputs, C, kh, kw): shape of one client's weights


def _depth(weight: Weight, conv: Conv) -> int:
    """Return the places in a patch times the channels in memory."""
    _, channels, kh, kw = weight
    return (kh + conv.pooled) * (kw + conv.pooled) * _padded(channels)


def _constants(weight: Weight, conv: Conv) -> dict[str, Any]:
    """Return the convolution as constants of a kernel."""
    outputs, _, kh, kw = weight
    return {
        "OUT": outputs,
        "OUTP": _power(outputs),
        "KH": kh,
        "KW": kw,
        "STRIDE": conv.stride,
        "PAD": conv.padding,
        "POOL": conv.pooled,
        "TYPE": "tf32" if conv.operands == torch.float32 and not INTERPRETED else "ieee",
    }


def _padded(channels: int) -> int:
    """Return the channels in memory: few enough to waste nothing, aligned to 8 or 16 bytes."""
    return 4 if channels <= 4 else -(-channels // 8) * 8


def _cut(blocks: Blocks) -> dict[str, int]:
    return {
        "BM": blocks.rows,
        "BN": blocks.columns,
        "BK": blocks.depth,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def pack_weight(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack w (K, outputs, C, kh, kw) to (K, kh * kw, C padded, outputs padded) of type ``dtype``."""
    clients, outputs, channels, kh, kw = w.shape
    w = w if w[0].is_contiguous() else w.contiguous()
    taps, cp, outp = kh * kw, _padded(channels), _power(outputs)
    packed = w.new_empty((clients, taps, cp, outp), dtype=dtype)
    bj, bn = _power(taps * cp, high=64), _power(outp, high=64)
    grid = (triton.cdiv(taps * cp, bj), triton.cdiv(outp, bn), clients)
    launch(_pack_weight, grid, [packed], w, packed, w.stride(0), channels, outputs, taps, cp, outp, bj, bn)
    return packed


def pack_maps(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Pack x (K, B, C, H, W) of any strides to (K, B, H, W, C padded) of type ``dtype``; None if x already is."""
    clients, batch, channels, height, width = x.shape
    cp = _padded(channels)
    if x.dtype == dtype and cp == channels and x[0].permute(0, 2, 3, 1).is_contiguous():
        return None
    packed = x.new_empty((clients, batch, height, width, cp), dtype=dtype)
    pixels, cb = batch * height * width, _power(cp, low=4)
    bm = max(16, 2048 // cb)
    grid = (triton.cdiv(pixels, bm), clients)
    launch(_pack_maps, grid, [packed], x, packed, *x.stride(), pixels, height, width, channels, cp, cb, bm)
    return packed


def forward(
    maps: Tensor, packed: Tensor, bias: Tensor | None, weight: Weight, conv: Conv, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor | None]:
    """Map packed maps and weights to y (K, B, H', W', outputs) and, for a stage, its code (uint8)."""
    clients, batch, height, width, cp = maps.shape
    outputs, _, *kernel = weight
    sides = ((n + 2 * conv.padding - k) // conv.stride + 1 for n, k in zip((height, width), kernel, strict=True))
    oh, ow = (side // 2 if conv.pooled else side for side in sides)
    rows = batch * oh * ow
    y = maps.new_empty((clients, batch, oh, ow, outputs), dtype=conv.result)
    code = torch.empty_like(y, dtype=torch.uint8) if conv.pooled else None
    blocks = blocks or choose_blocks("forward", conv, rows, outputs, _depth(weight, conv), cp)
    grid = (triton.cdiv(rows, blocks.rows), triton.cdiv(_power(outputs), blocks.columns), clients)
    launch(
        _forward, grid, [y, code],
        maps, packed, bias, y, code, maps.stride(0), 0 if bias is None else bias.stride(0), conv.slope, rows,
        H=height, W=width, OH=oh, OW=ow, C=cp, **_constants(weight, conv), **_cut(blocks),
    )  # fmt: skip
    return y, code


def weight_gradient(
    maps: Tensor, dy: Tensor, code: Tensor | None, weight: Weight, conv: Conv, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor | None]:
    """Map packed maps, dy (K, B, H', W', outputs) to dw (K, outputs, C, kh, kw) and, for a stage, db (K, outputs)."""
    clients, batch, height, width, cp = maps.shape
    oh, ow = dy.shape[2:4]
    outputs, channels, kh, kw = weight
    rows, outp, depth = batch * oh * ow, _power(outputs), _depth(weight, conv)
    blocks = blocks or choose_blocks("weight", conv, depth, outputs, rows, cp, clients)
    tiles = triton.cdiv(depth, blocks.rows) * (outp // blocks.columns)
    # The sum over pixels is split into parts where there are too few blocks to keep the device busy.
    splits = min(triton.cdiv(_PROGRAMS, tiles * clients), triton.cdiv(rows, 4 * blocks.depth), _MOST_PARTS)
    rows_each = triton.cdiv(triton.cdiv(rows, splits), blocks.depth) * blocks.depth
    splits = triton.cdiv(rows, rows_each)
    parts = maps.new_empty((clients, splits, 4 if conv.pooled else 1, depth, outp), dtype=torch.float32)
    bias_parts = maps.new_empty((clients, splits, outp), dtype=torch.float32) if conv.pooled else None
    launch(
        _weight_gradient, (tiles, splits, clients), [],
        maps, dy, code, parts, bias_parts, maps.stride(0), conv.slope, splits, rows, rows_each,
        H=height, W=width, OH=oh, OW=ow, C=cp, **_constants(weight, conv), **_cut(blocks),
    )  # fmt: skip
    dw = parts.new_empty((clients, *weight))
    db = parts.new_empty((clients, outputs)) if conv.pooled else None
    places = channels * kh * kw
    bn = _power(outp, high=32)
    bj = _power(places, high=(512 if conv.pooled else 2048) // bn)  # numbers of a program, from measurements
    grid = (triton.cdiv(places, bj), triton.cdiv(outp, bn), clients)
    launch(
        _sum_parts, grid, [dw, db],
        parts, bias_parts, dw, db, splits, channels, cp, outputs, outp, kh, kw, conv.pooled, BJ=bj, BN=bn,
    )  # fmt: skip
    return dw, db


def input_gradient(
    dy: Tensor,
    code: Tensor | None,
    packed: Tensor,
    weight: Weight,
    conv: Conv,
    sides: tuple[int, int],
    dtype: torch.dtype,
    blocks: Blocks | None = None,
) -> Tensor:
    """Map dy (K, B, H', W', outputs) and packed weights to dx (K, B, H, W, C) for maps of H x W = ``sides``."""
    clients, batch, oh, ow, outputs = dy.shape
    (height, width), channels, pad = sides, weight[1], conv.padding
    step = 2 if conv.pooled else conv.stride
    jh, jw = ((side - 1 + pad) // step - pad // step + 1 for side in sides)
    rows, cb = batch * jh * jw, _power(channels, low=16 if step == 1 else 4)
    dx = dy.new_empty((clients, batch, height, width, channels), dtype=dtype)
    columns = step * step * cb
    blocks = blocks or choose_blocks("input", conv, rows, columns, outputs, channels)
    grid = (triton.cdiv(rows, blocks.rows), triton.cdiv(columns, blocks.columns), clients)
    launch(
        _input_gradient, grid, [dx],
        dy, code, packed, dx, conv.slope, rows, H=height, W=width, OH=oh, OW=ow, JH=jh, JW=jw,
        C=channels, CP=packed.shape[2], CB=cb, **_constants(weight, conv), **_cut(blocks),
    )  # fmt: skip
    return dx


def _norm_cut(maps: Tensor, groups: int, most: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return grid and constants of a norm's kernels for maps (K, B, H, W, C); ``most``: numbers of a program."""
    clients, batch, height, width, channels = maps.shape
    group = channels // groups
    bp = _power(height * width, low=1)
    # Channels of a program: whole groups, if possible 64 bytes of a pixel, and more where that is not much.
    wide, even = group, group & (group - 1) == 0
    while even and wide < channels and 2 * wide * bp <= (_LARGEST_NORM if wide < 32 else most):
        wide *= 2
    bc = _power(wide, low=8)
    constants = {"C": channels, "GROUP": group, "WIDTH": wide, "BP": bp, "BC": bc}
    return (clients * batch, triton.cdiv(channels, wide)), constants


def norm(
    maps: Tensor, residual: Tensor | None, scale: Tensor, shift: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return [ReLU of] the normalised maps (K, B, H, W, C) with scale and shift (K, C) [plus ``residual``].

    Also return each group's mean and 1 / standard deviation, for each of its channels (K, B, C).
    """
    y = torch.empty_like(maps)
    mean, rate = maps.new_empty((2, *maps.shape[:2], maps.shape[4]), dtype=torch.float32)
    grid, constants = _norm_cut(maps, groups, 4096)
    warps = min(8, max(2, constants["BP"] * constants["BC"] // 4096))
    launch(
        _norm, grid, [y, mean, rate],
        maps, residual, scale, shift, y, mean, rate, scale.stride(0), shift.stride(0), eps, maps.shape[1],
        maps.shape[2] * maps.shape[3], RELU=relu, ADD=residual is not None, num_warps=warps, **constants,
    )  # fmt: skip
    return y, mean, rate


def norm_gradient(
    dy: Tensor,
    maps: Tensor,
    y: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    mean: Tensor,
    rate: Tensor,
    groups: int,
    relu: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return dx, dresidual (if the result ``y`` is given: a residual was added), dscale, dshift (K, C)."""
    dx = torch.empty_like(maps)
    dresidual = None if y is None else torch.empty_like(maps)
    sums = maps.new_empty((2, *maps.shape[:2], maps.shape[4]), dtype=torch.float32)  # by image
    mean, rate = mean.contiguous(), rate.contiguous()
    grid, constants = _norm_cut(maps, groups, 2048)
    part = constants["BP"] if constants["BP"] * constants["BC"] <= 8192 else 8192 // constants["BC"]
    warps = min(8, max(2, part * constants["BC"] // 1024))
    launch(
        _norm_gradient, grid, [dx, dresidual, sums],
        dy, maps, y, scale, shift, mean, rate, dx, dresidual, sums[0], sums[1], scale.stride(0), shift.stride(0),
        maps.shape[1], maps.shape[2] * maps.shape[3], RELU=relu, ADD=y is not None, PART=part, num_warps=warps,
        **constants,
    )  # fmt: skip
    dscale, dshift = sums.sum(2)
    return dx, dresidual, dscale, dshift


def max_pool(maps: Tensor, pool: Pool) -> tuple[Tensor, Tensor]:
    """Return the largest value of each window of maps (K, B, H, W, C), and its place in the window, uint8."""
    clients, batch, height, width, channels = maps.shape
    oh, ow = ((side + 2 * pool.padding - pool.kernel) // pool.stride + 1 for side in (height, width))
    y = maps.new_empty((clients, batch, oh, ow, channels))
    code = torch.empty_like(y, dtype=torch.uint8)
    grid, constants = _pool_cut(batch * oh * ow, channels, clients, pool)
    launch(
        _max_pool, grid, [y, code],
        maps, y, code, batch * oh * ow, maps[0].numel(), H=height, W=width, OH=oh, OW=ow, **constants,
    )  # fmt: skip
    return y, code


def max_pool_gradient(dy: Tensor, code: Tensor, pool: Pool, sides: tuple[int, int]) -> Tensor:
    """Return dx (K, B, H, W, C) for maps of H x W = ``sides``."""
    clients, batch, oh, ow, channels = dy.shape
    (height, width), code = sides, code.contiguous()
    dx = dy.new_empty((clients, batch, height, width, channels))
    pixels = batch * height * width
    grid, constants = _pool_cut(pixels, channels, clients, pool)
    launch(
        _max_pool_gradient, grid, [dx],
        dy, code, dx, pixels, dy[0].numel(), H=height, W=width, OH=oh, OW=ow, **constants,
    )  # fmt: skip
    return dx


def _pool_cut(pixels: int, channels: int, clients: int, pool: Pool) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Return grid and constants of a max-pool's kernels."""
    bc = _power(channels, low=8, high=64)
    bp = _POOLED // bc
    windows = {"C": channels, "KERNEL": pool.kernel, "STRIDE": pool.stride, "PAD": pool.padding}
    return (triton.cdiv(pixels, bp), triton.cdiv(channels, bc), clients), windows | {"BP": bp, "BC": bc}
