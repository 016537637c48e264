"""What every step does beside the model: the loss, the rows, random words and SGD, for all clients at once.

The rules under vmap are checked on the CPU, with torch in the kernels' place; the kernels are run where Triton can,
as those of the layers.
"""

from types import SimpleNamespace

import pytest
import torch
from kernel_runs import DEVICE, drawn, needs_triton
from torch.func import grad, grad_and_value, vmap
from torch.nn import functional as F

from bespoke.core import rng
from bespoke.core.objective import cross_entropies, masked_mean
from bespoke.gpu import step

# --- the rules --------------------------------------------------------------------------------------------------


def entropy_case(clients, rows, classes, device="cpu"):
    """Logits, labels, and a mask that leaves out rows, and all rows of the last client."""
    logits = 5 * drawn(clients, rows, classes).to(device)
    labels = torch.arange(clients * rows, device=device).reshape(clients, rows) % classes
    mask = torch.ones(clients, rows, device=device)
    if clients > 1:
        mask[:, rows // 2 + 1 :] = 0.0
        mask[-1] = 0.0
    return logits, labels, mask


def written_entropy(logits, labels, mask):
    """Losses (K,) and their gradients (K, B, C), written out."""
    weight = mask / mask.sum(1, keepdim=True).clamp(min=1.0)
    losses = logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]
    slope = logits.softmax(-1) - F.one_hot(labels, logits.shape[-1]).to(logits.dtype)
    return (losses * weight).sum(1), slope * weight[..., None]


def words(first, second, counter):
    """(..., 2) by torch alone."""
    assert all(type(t) is torch.Tensor for t in (first, second, counter))
    return torch.stack(rng.threefry(first, second, (counter >> 32) & 0xFFFFFFFF, counter & 0xFFFFFFFF), dim=-1)


@pytest.fixture
def small_reference(monkeypatch):
    """Torch in the place of the kernels beside the model."""
    put_in_place(monkeypatch)


def put_in_place(monkeypatch):
    scaled = lambda x, rows: x[rows].float() / 127.5 - 1.0  # noqa: E731
    reference = SimpleNamespace(cross_entropy=written_entropy, take_scaled=scaled, threefry=words)
    monkeypatch.setattr(step, "kernels", lambda: reference)
    monkeypatch.setattr(step, "usable", lambda x, dtype=torch.float32: x.dtype == dtype)


def plain_entropy(logits, labels, mask):
    return masked_mean(cross_entropies(logits, labels), mask)


def of_slope(loss):
    """A function of the first derivative, whose gradient needs the second."""

    def value(logits, *rest):
        return (grad(loss)(logits, *rest) * torch.linspace(-1, 2, logits.numel()).reshape(logits.shape)).sum()

    return value


@pytest.mark.usefixtures("small_reference")
@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_loss_and_its_derivatives_under_vmap(order):
    case = entropy_case(3, 6, 4)
    ours, plain = step.cross_entropy, plain_entropy
    for _ in range(order - 1):
        ours, plain = of_slope(ours), of_slope(plain)
    got, wanted = vmap(grad_and_value(ours))(*case), vmap(grad_and_value(plain))(*case)
    assert wanted[0].abs().max() > 1e-3
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("small_reference")
def test_the_losses_slope_passes_on_what_comes_from_behind():
    case = entropy_case(3, 6, 4)
    mix = lambda loss: lambda *case: (3.0 * loss(*case)).exp()  # noqa: E731
    got, wanted = vmap(grad(mix(step.cross_entropy)))(*case), vmap(grad(mix(plain_entropy)))(*case)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_reference")
def test_rows_are_taken_and_scaled_for_all_lanes():
    x = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(4, 2, 3)
    rows = torch.tensor([[0, 3], [1, 1], [2, 0]])
    got = vmap(lambda r: step.take_scaled(x, r, torch.float32))(rows)
    assert torch.equal(got, x[rows].float() / 127.5 - 1.0)
    assert step.take_scaled(x, rows[0], torch.float64).dtype == torch.float64


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
@pytest.mark.parametrize(("clients", "rows", "classes"), [(3, 10, 10), (1, 1, 2), (2, 70, 37), (2, 5, 100)])
def test_the_kernel_of_the_loss(clients, rows, classes):
    from bespoke.gpu.step_kernels import cross_entropy

    logits, labels, mask = entropy_case(clients, rows, classes, DEVICE)
    loss, slope = cross_entropy(logits, labels, mask)
    wanted, gradient = written_entropy(logits.double(), labels, mask.double())
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope.double(), gradient, rtol=1e-5, atol=1e-7)


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


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_the_kernel_of_rows():
    from bespoke.gpu.step_kernels import take_scaled

    x = (rng.bits(rng.key(3), torch.arange(7 * 1500)) % 256).to(torch.uint8).reshape(7, 3, 500).to(DEVICE)
    rows = torch.tensor([[0, 6, 3], [6, 6, 1]], device=DEVICE)
    assert torch.equal(take_scaled(x, rows).cpu(), x[rows].cpu().float() / 127.5 - 1.0)
