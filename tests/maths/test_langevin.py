"""The quantiser: unbiased, of bounded variance, and as small as a packed message."""

import math

import numpy as np
import pytest
import torch
from toy import gap, same_bits

from bespoke.core import rng
from bespoke.maths import langevin


def vectors(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("levels", [1, 4, 64])
def test_the_quantiser_is_unbiased_and_its_variance_is_bounded(levels):
    draws, v = 10_000, torch.tensor(vectors(5, 40)) * torch.tensor([1e-3, 0.1, 1.0, 3.0]).repeat(10)
    keys = rng.fold_in(rng.key(8), torch.arange(draws))
    found = torch.func.vmap(lambda key: langevin.quantise({"v": v}, levels, key)["v"])(keys)
    size = v.square().sum().sqrt()
    share = (levels * v.abs() / size) % 1.0
    variance = size**2 * share * (1.0 - share) / levels**2  # exact, entry by entry
    assert ((found.mean(dim=0) - v).abs() <= 5.0 * (variance / draws).sqrt() + 1e-6).all()
    assert (found.var(dim=0).sum() / variance.sum() - 1.0).abs() < 0.05
    assert variance.sum() <= langevin.excess(v.numel(), levels) * size**2
    steps = found * levels / size
    assert (steps - steps.round()).abs().max() < 1e-9
    # Rounding down alone would be seen.
    assert not (
        (torch.floor(levels * v.abs() / size) * v.sign() * size / levels - v).abs()
        <= 5.0 * (variance / draws).sqrt() + 1e-6
    ).all()


def test_the_quantiser_leaves_zero_and_no_levels_alone_and_many_levels_change_little():
    v = {"v": torch.tensor(vectors(6, 3, 4)), "zero": torch.zeros(5, dtype=torch.float64)}
    assert same_bits(langevin.quantise(v, 0, rng.key(1)), v)
    fine = langevin.quantise(v, 2**40, rng.key(1))
    assert gap(fine, v) < 1e-10
    assert fine["zero"].abs().max() == 0.0
    turned = dict(reversed(v.items()))  # the order of a tree's names is no part of the draw
    assert same_bits(langevin.quantise(turned, 3, rng.key(1)), langevin.quantise(v, 3, rng.key(1)))


@pytest.mark.parametrize("levels", [0, 1, 6, 255, 256])
def test_bytes_are_those_of_a_packed_message(levels):
    v = {"a": torch.tensor(vectors(6, 3, 7)), "b": torch.tensor(vectors(7, 5))}
    sent, bits, width = langevin.quantise(v, levels, rng.key(2)), "", len(f"{levels:b}")
    float_bits = lambda x: np.binary_repr(np.float32(x).view(np.int32).item() % 2**32, 32)  # noqa: E731
    for name, leaf in sent.items():
        size = float(v[name].square().sum().sqrt())
        bits += float_bits(size) if levels else ""
        for x in leaf.flatten().tolist():
            whole = round(abs(x) / size * levels)  # what a receiver needs: sign and level
            bits += ("1" if x < 0 else "0") + f"{whole:0{width}b}" if levels else float_bits(x)
            assert not levels or math.copysign(whole * size / levels, x) == pytest.approx(x, abs=1e-12)
    assert len(bits) <= 8 * langevin.quantised_bytes(v, levels) < len(bits) + 8
