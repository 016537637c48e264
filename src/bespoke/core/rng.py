"""Randomness is data: counter-based keys (Threefry-2x32, 20 rounds) on int64 tensors.

A *key* is an int64 tensor [..., 2] of two 32-bit words. A draw depends on its key and its counter
alone, so it is the same in a loop, under vmap, on every device, and with any padding. Integers and
uniforms are equal everywhere to the bit; normals to 1e-6 across devices.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bespoke.gpu import step

Array = np.ndarray[Any, Any]

# The root key of a run is split once, by purpose, so that no purpose can disturb another.
DATA, INIT, COHORT, TRAIN, EVAL, ADAPT, SERVER = range(7)

# A client's key is split once more. Passes over its minibatches have tags from 0 on; other uses have a name here.
# ADAPT is used twice: as a purpose, and inside a client's evaluation for its rounds of adaptation.
FOLDS, ALL_ROWS, SCORED, SUBSET, AUGMENTED = -1, -2, -3, -4, -5

_MASK = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_LARGE = 2048  # numbers
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def threefry(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the Threefry-2x32-20 block function to int64 tensors that hold 32-bit words (they broadcast)."""
    words = k0, k1, x0, x1
    if k0.device.type == "cpu":
        # Small NumPy arrays cost a fifth of torch's, large ones of unsigned words too; inside vmap there is no array.
        try:
            arrays = [word.numpy() for word in words]
        except RuntimeError:
            return _threefry(*words)
        if all(array.ndim == 0 for array in arrays):  # a key of the run's own: Python's integers are faster still
            y0, y1 = _threefry(*(array.item() for array in arrays))
        else:
            y0, y1 = (_threefry_words if x0.numel() >= _LARGE else _threefry)(*arrays)
        return torch.as_tensor(y0), torch.as_tensor(y1)
    return _threefry(*words)


def _threefry_words(k0: Array, k1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """Do the same for int64 arrays, with 32-bit words that wrap by themselves, in place."""
    shape = np.broadcast_shapes(k0.shape, x0.shape)
    k0, k1, x0, x1 = (np.atleast_1d(word).astype(np.uint32) for word in (k0, k1, x0, x1))
    ks = k0, k1, k0 ^ k1 ^ np.uint32(_PARITY)
    x0, x1 = x0 + k0, x1 + k1
    low = np.empty_like(x1)
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            x0 += x1
            np.right_shift(x1, 32 - r, out=low)
            x1 <<= r
            x1 |= low
            x1 ^= x0
        x0 += ks[(group + 1) % 3]
        x1 += ks[(group + 2) % 3]
        x1 += group + 1
    return x0.astype(np.int64).reshape(shape), x1.astype(np.int64).reshape(shape)


def _threefry(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    """Do the same for anything with 64-bit integer arithmetic; sums may exceed 32 bits until they are masked."""
    ks = k0, k1, k0 ^ k1 ^ _PARITY
    x0, x1 = x0 + k0, (x1 + k1) & _MASK
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (((x1 << r) | (x1 >> (32 - r))) ^ x0) & _MASK
        x0 = x0 + ks[(group + 1) % 3]
        x1 = (x1 + ks[(group + 2) % 3] + (group + 1)) & _MASK
    return x0 & _MASK, x1


def key(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the root key [2] of a seed (any integer; its lowest 64 bits count)."""
    return torch.tensor([(seed >> 32) & _MASK, seed & _MASK], dtype=torch.int64, device=device)


def _draw(key: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    """Return two 32-bit words for a key [..., 2] and a counter, which broadcast."""
    first, second = key[..., 0], key[..., 1]
    if step.usable(key, torch.int64):
        a, b = step.threefry(first, second, counter).unbind(-1)
        return a, b
    return threefry(first, second, (counter >> 32) & _MASK, counter & _MASK)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """Return a new key [..., 2] for each ``data`` (an int, or an int64 tensor that broadcasts with ``key[..., 0]``)."""
    if not isinstance(data, Tensor):
        data = torch.full((), data, dtype=torch.int64, device=key.device)
    return torch.stack(_draw(key, data), dim=-1)


def bits(key: Tensor, counter: Tensor) -> Tensor:
    """Draw a 32-bit integer for each counter: int64 in [0, 2**32), of the broadcast shape."""
    return _draw(key, counter)[0]


def _counters(key: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.arange(math.prod(shape), device=key.device).reshape(tuple(shape))


def uniform(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw uniform numbers in [0, 1) on a grid of 2**-24, from one key [2]."""
    return (bits(key, _counters(key, shape)) >> 8).to(dtype) * 2.0**-24


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw standard normal numbers by the Box-Muller transform, from one key [2]."""
    a, b = _draw(key, _counters(key, shape))
    radius = torch.sqrt(-2.0 * torch.log(((a >> 8) + 1).double() * 2.0**-24))
    return (radius * torch.cos((2.0 * math.pi * 2.0**-24) * (b >> 8).double())).to(dtype)


def logistic(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw standard logistic numbers (differences of two Gumbel numbers) from one key [2]; at most 17.4 in size."""
    u = ((bits(key, _counters(key, shape)) >> 8).double() + 0.5) * 2.0**-24
    return (torch.log(u) - torch.log1p(-u)).to(dtype)


def shuffle(key: Tensor, rows: int, n: int | Tensor) -> Tensor:
    """Return a permutation of 0..n-1 followed by the padding n..rows-1: int64 [..., rows] for keys [..., 2].

    A row's sort value depends on the key and the row alone, and sorting is stable: more padding
    changes nothing.
    """
    row = torch.arange(rows, device=key.device)
    value = bits(key[..., None, :], row)
    return torch.where(row < n, value, 2**32).argsort(dim=-1, stable=True)


def stream(root: Tensor, purpose: int, round: int | Tensor = 0, client: int | Tensor = 0) -> Tensor:
    """Return the key [..., 2] of one purpose, round and client."""
    return fold_in(fold_in(fold_in(root, purpose), round), client)


def cohort_size(num_clients: int, rate: float) -> int:
    """Return the number of clients in a round of fixed size."""
    return max(1, math.floor(rate * num_clients + 1e-9))  # 0.29 * 100 is 28.999..., and means 29


def cohort(root: Tensor, round: int, num_clients: int, rate: float, sampling: str) -> list[int]:
    """Draw the clients of a round, in ascending order; they depend on the seed and the round alone.

    ``fixed``: the first max(1, floor(rate * M)) of the shuffled clients. ``bernoulli``: each client
    with probability ``rate``; an empty draw is repeated with the number of the attempt folded in.
    """
    draw = stream(root, COHORT, round)
    if sampling == "fixed":
        return sorted(shuffle(draw, num_clients, num_clients)[: cohort_size(num_clients, rate)].tolist())
    for attempt in range(10_000):
        key = fold_in(draw, attempt) if attempt else draw
        chosen = (uniform(key, (num_clients,), torch.float64) < rate).nonzero().flatten().tolist()
        if chosen:
            return list(chosen)
    raise ValueError(f"no client was drawn in 10,000 attempts at rate {rate}: raise training.rate")
