"""The discrepancy of two samples against all pairs in NumPy."""

import numpy as np
import torch
from golden.fedcp import discrepancy

from bespoke.core import rng
from bespoke.maths import mmd


def test_discrepancy_of_real_rows():
    x, y = (rng.normal(rng.fold_in(rng.key(6), i), (9, 4), torch.float64) for i in range(2))
    mask = torch.tensor([1.0] * 6 + [0.0] * 3, dtype=torch.float64)
    want = discrepancy(x[:6].numpy(), y[:6].numpy())
    assert abs(mmd.mmd(x, y, mask).item() - want) < 1e-13 and want > 1e-2
    assert mmd.mmd(x, x, mask).abs() < 1e-14
    for far in (0.0, 100.0):  # a common offset does not matter, even to float32
        assert abs(mmd.mmd(*((v + far).float() for v in (x, y)), mask.float()).item() - want) < 1e-4
    apart = mmd.mmd(x, x + 1e3, mask).item()  # nothing in common: twice the mean kernel within a sample
    assert abs(apart - 2.0 * within(x[:6].numpy())) < 1e-9


def within(x):
    square = ((x[:, None] - x) ** 2).sum(axis=-1)
    return np.mean(sum(np.exp(-square / (2.0 * w)) for w in (10, 15, 20, 50)))
