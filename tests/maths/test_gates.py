"""Gates and valves: torch's layers, shares between 0 and 1, and the noise that enters them."""

import torch
from scipy.stats import kstest
from toy import CLASSES, HIDDEN

from bespoke.core import rng, tree
from bespoke.maths import gates


def test_blocks_are_torchs_layers():
    block = gates.init(rng.key(8), 5, 10, torch.float64)
    layer, norm = torch.nn.Linear(5, 10, dtype=torch.float64), torch.nn.LayerNorm(10, dtype=torch.float64)
    layer.load_state_dict({"weight": block["weight"], "bias": block["bias"]})
    x = rng.normal(rng.key(9), (7, 5), torch.float64)
    assert torch.equal(gates.linear(block, x), layer(x))
    assert torch.allclose(gates.norm(block, gates.linear(block, x)), norm(layer(x)), atol=1e-14)
    for leaf in (block["weight"], block["bias"]):
        assert 0.8 * 5**-0.5 < leaf.abs().max() <= 5**-0.5 and abs(leaf.mean()) < 0.2


def test_a_gate_is_a_share():
    key, d = rng.key(5), 6
    block = gates.init(rng.fold_in(key, 0), d, 2 * d, torch.float64)
    for scale in (0.0, 1.0, 1e6):
        z = scale * rng.normal(rng.fold_in(key, 1), (50, d), torch.float64)
        context = rng.normal(rng.fold_in(key, 2), (d,), torch.float64)
        quiet, noisy = gates.gate(block, z, context), gates.gate(block, z, context, key)
        for r in (quiet, noisy):
            assert r.shape == z.shape and r.min() >= 0.0 and r.max() <= 1.0
        assert not torch.equal(quiet, noisy)
    low = block | {"shift": torch.full((2 * d,), -50.0, dtype=torch.float64)}
    assert torch.equal(gates.gate(low, z, context), torch.full_like(z, 0.5))  # both halves clipped


def test_two_valves_are_one_for_a_balanced_client():
    opened = gates.valve_init(rng.key(1), HIDDEN, torch.float64)
    e = rng.normal(rng.key(2), (CLASSES, HIDDEN), torch.float64)
    z = rng.normal(rng.key(3), (20, HIDDEN), torch.float64)
    share = torch.full((CLASSES,), 1.0 / CLASSES, dtype=torch.float64)
    even, skewed = gates.valve(opened, z, share @ e), gates.valve(opened, z, e[0])
    assert torch.allclose(even, gates.valve(opened, z, e.mean(dim=0)), atol=1e-13)
    assert even.min() >= 0.0 and (even - skewed).abs().max() > 1e-2
    closed = tree.map(torch.zeros_like, opened)  # gamma = beta = 0: what is left is the rectified feature
    assert torch.equal(gates.valve(closed, z, e[0]), torch.relu(z))


def test_logistic_numbers():
    draws = rng.logistic(rng.key(7), (20_000,), torch.float64)
    assert kstest(draws.numpy(), "logistic").pvalue > 0.01
    assert torch.equal(rng.logistic(rng.key(7), (3,), torch.float64), draws[:3])  # a longer draw begins the same
    assert draws.abs().max() <= 17.4 and torch.isfinite(rng.logistic(rng.key(7), (20_000,))).all()
