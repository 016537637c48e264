"""What every step does beside the model: random words and the optimiser, for all clients at once.

The rules under vmap are checked on the CPU, with torch in the kernels' place; the kernels are run where Triton can,
as those of the layers.
"""

from types import SimpleNamespace

import pytest
import torch
from kernel_runs import DEVICE, drawn, needs_triton
from torch.func import vmap

from bespoke.core import rng
from bespoke.gpu import step

# --- the rules --------------------------------------------------------------------------------------------------


def words(first, second, counter):
    """(..., 2) by torch alone."""
    assert all(type(t) is torch.Tensor for t in (first, second, counter))
    return torch.stack(rng.threefry(first, second, (counter >> 32) & 0xFFFFFFFF, counter & 0xFFFFFFFF), dim=-1)


def put_in_place(monkeypatch):
    monkeypatch.setattr(step, "kernels", lambda: SimpleNamespace(threefry=words))
    monkeypatch.setattr(step, "usable", lambda x, dtype=torch.float32: x.dtype == dtype)


def test_drawing_for_all_lanes_is_drawing_for_each(monkeypatch):
    """The rule under vmap, with torch in the kernel's place: shapes that broadcast, keys or counters that all share."""
    keys = rng.fold_in(rng.key(7), torch.arange(6)).reshape(3, 2, 2)
    one, rows = rng.key(1), torch.arange(3)
    draws = [
        lambda k, c: rng.fold_in(k, c),
        lambda k, c: rng.bits(k[:, None], torch.arange(4) + c),
        lambda k, c: rng.bits(one, c[None]),
        lambda k, c: rng.uniform(k[0], (2, 3)),
        lambda k, c: rng.normal(k[1], (5,)),
        lambda k, c: rng.shuffle(k, 7, 3 + c),
        lambda k, c: vmap(lambda a, b: rng.fold_in(a, b), (0, None))(k, c),
    ]
    wanted = [torch.stack([draw(k, c) for k, c in zip(keys, rows, strict=True)]) for draw in draws]
    put_in_place(monkeypatch)
    for draw, right in zip(draws, wanted, strict=True):
        assert torch.equal(vmap(draw)(keys, rows), right)
        assert torch.equal(torch.stack([draw(k, c) for k, c in zip(keys, rows, strict=True)]), right)


# --- the kernels ------------------------------------------------------------------------------------------------


def by_leaf(rates, leaves):
    """Every leaf's own multiple of the lanes' rates; one of them is the same for all lanes."""
    return [rates[0] if i == 2 else rates * (1 + i % 3) for i in range(leaves)]


def groups_of(params, rates, lane):
    """The same for torch.optim."""
    return [{"params": [p], "lr": r.expand(3)[lane].item()} for p, r in zip(params, rates, strict=True)]


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("momentum", "decay"), [(0.5, 5e-4), (0.0, 0.0)])
def test_the_step_of_sgd(momentum, decay, own):
    """Three steps beside torch.optim.SGD, on the first lanes of a buffer; one client rests once, with NaN gradients."""
    from bespoke.gpu.step_kernels import sgd_update

    shapes = [(3,), (30, 50), (1,), (1024,)] + [(5, 2)] * 15  # more than one launch takes
    params = [drawn(4, *shape, seed=i)[:3].to(DEVICE) for i, shape in enumerate(shapes)]
    rates = torch.tensor([0.1, 0.2, 0.3], device=DEVICE)
    alone = [[torch.nn.Parameter(p[k].clone()) for p in params] for k in range(3)]
    rate = by_leaf(rates, len(shapes)) if own else rates
    groups = [groups_of(ps, rate if own else [rates] * len(shapes), k) for k, ps in enumerate(alone)]
    steps = [torch.optim.SGD(group, momentum=momentum, weight_decay=decay) for group in groups]
    moments = [torch.zeros_like(p) for p in params] if momentum else None
    for t in range(3):
        grads = [drawn(3, *shape, seed=100 * t + i).to(DEVICE) for i, shape in enumerate(shapes)]
        active = torch.tensor([True, t != 1, True], device=DEVICE)
        for k in range(3):
            for p, g in zip(alone[k], grads, strict=True):
                p.grad = g[k].clone()
            if active[k]:
                steps[k].step()
            else:
                for g in grads:
                    g[k] = torch.nan
        sgd_update(params, grads, moments, rate, active, decay, momentum)
    for i, p in enumerate(params):
        torch.testing.assert_close(p, torch.stack([ps[i].detach() for ps in alone]), rtol=0, atol=1e-6)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("decay", "own"), [(0.1, False), (0.1, True), (0.0, False)])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_step_of_adam(kind, decay, own):
    """Four steps beside torch's, on the first lanes of a buffer; one client rests once, with NaN gradients."""
    from bespoke.gpu.step_kernels import adam_update

    shapes = [(3,), (30, 50), (1,), (1024,)] + [(5, 2)] * 15  # more than one launch takes
    params = [drawn(4, *shape, seed=i)[:3].to(DEVICE) for i, shape in enumerate(shapes)]
    rates = torch.tensor([0.01, 0.02, 0.03], device=DEVICE)
    alone = [[torch.nn.Parameter(p[k].clone()) for p in params] for k in range(3)]
    rate = by_leaf(rates, len(shapes)) if own else rates
    groups = [groups_of(ps, rate if own else [rates] * len(shapes), k) for k, ps in enumerate(alone)]
    steps = [kind(group, betas=(0.8, 0.95), weight_decay=decay) for group in groups]
    moments = {name: [torch.zeros_like(p) for p in params] for name in ("m", "v")} | {"t": [torch.zeros_like(rates)]}
    for t in range(4):
        grads = [drawn(3, *shape, seed=100 * t + i).to(DEVICE) for i, shape in enumerate(shapes)]
        active = torch.tensor([True, t != 1, True], device=DEVICE) if t < 3 else None
        for k in range(3):
            for p, g in zip(alone[k], grads, strict=True):
                p.grad = g[k].clone()
            if active is None or active[k]:
                steps[k].step()
            else:
                for g in grads:
                    g[k] = torch.nan
        adam_update(params, grads, moments, rate, active, decay, (0.8, 0.95), kind is torch.optim.AdamW)
    assert moments["t"][0].tolist() == [4.0, 3.0, 4.0]
    for i, p in enumerate(params):
        torch.testing.assert_close(p, torch.stack([ps[i].detach() for ps in alone]), rtol=0, atol=2e-6)
        first = torch.stack([each.state[ps[i]]["exp_avg_sq"] for each, ps in zip(steps, alone, strict=True)])
        torch.testing.assert_close(moments["v"][i], first, rtol=1e-5, atol=1e-8)


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_the_kernel_of_randomness_is_threefry_to_the_bit():
    from bespoke.gpu.step_kernels import threefry

    key = rng.fold_in(rng.key(7), torch.arange(6)).reshape(3, 2, 2)
    row = torch.arange(1500) * (2**32 + 17) - 5
    cases = [
        (key[0, 0], torch.tensor(3)),
        (key[0, 0], row),
        (key[:, :, None], row[:400]),
        (key[:, None, :, None], row[:40].reshape(2, 1, 20)),
        (key[:, None, None, None, None, 0], row[:6].reshape(1, 3, 1, 2, 1)),
    ]
    for key, counter in cases:
        got = threefry(*(t.to(DEVICE) for t in (key[..., 0], key[..., 1], counter)))
        assert torch.equal(got.cpu(), words(key[..., 0], key[..., 1], counter))
