"""Layers with a vmap rule of their own.

Their plumbing is checked on the CPU, with torch in the kernels' place. The kernels themselves need Triton: on a CUDA
device they are run as they are; without one ``TRITON_INTERPRET=1`` runs them slowly on the CPU, in float32 alone. Where
there is neither, these tests are skipped.
"""

from types import SimpleNamespace

import pytest
import torch
from kernel_runs import DEVICE, INTERPRETED, drawn, needs_triton
from torch.func import grad, grad_and_value, vmap
from torch.nn import functional as F

from bespoke.core import rng
from bespoke.errors import UserError
from bespoke.gpu import fast_layers
from bespoke.models import ModelSettings, build_module, build_task, layers

# --- torch in the kernels' place ----------------------------------------------------------------------------


def channels_last(x, dtype):
    return x.permute(0, 1, 3, 4, 2).contiguous().to(dtype)


def pack_maps(x, dtype):
    ready = x.dtype == dtype and x[0].permute(0, 2, 3, 1).is_contiguous()
    return None if ready else channels_last(x, dtype)


def pack_weight(weight, dtype):
    return weight.to(dtype, copy=True)


def forward(maps, packed, bias, weight, conv):
    assert packed.shape[1:] == weight
    outs, codes = [], []
    for i, x in enumerate(maps.float().permute(0, 1, 4, 2, 3)):
        y = F.conv2d(x, packed[i].float(), None if bias is None else bias[i], conv.stride, conv.padding)
        if conv.pooled:
            y, place = F.max_pool2d(F.leaky_relu(y, conv.slope), 2, return_indices=True)
            codes.append((place, y > 0))
        outs.append(y)
    code = None
    if conv.pooled:
        # As the kernels' code: place in the window and sign, here of the whole map.
        code = torch.stack([place * 2 + positive for place, positive in codes]).permute(0, 1, 3, 4, 2)
    return channels_last(torch.stack(outs), conv.result), code


def full_gradient(dy, code, weight, conv, sides):
    """The gradient before pool and activation, (K, B, outputs, H', W')."""
    dy = dy.float().permute(0, 1, 4, 2, 3)
    if not conv.pooled:
        return dy
    code = code.permute(0, 1, 4, 2, 3)
    dy = torch.where(code % 2 == 1, dy, conv.slope * dy)
    before = [side + 2 * conv.padding - k + 1 for side, k in zip(sides, weight[2:], strict=True)]
    full = dy.new_zeros((*dy.shape[:3], before[0] * before[1]))
    return full.scatter(3, (code // 2).flatten(3), dy.flatten(3)).unflatten(3, before)


def weight_gradient(maps, dy, code, weight, conv):
    full = full_gradient(dy, code, weight, conv, maps.shape[2:4])
    xs = maps.float().permute(0, 1, 4, 2, 3)
    pairs = zip(xs, full, strict=True)
    dw = [torch.nn.grad.conv2d_weight(x, weight, g, conv.stride, conv.padding) for x, g in pairs]
    return torch.stack(dw), full.sum((1, 3, 4)) if conv.pooled else None


def input_gradient(dy, code, packed, weight, conv, sides, dtype):
    full = full_gradient(dy, code, weight, conv, sides)
    shape = (dy.shape[1], weight[1], *sides)
    pairs = zip(packed.float(), full, strict=True)
    dx = [torch.nn.grad.conv2d_input(shape, w, g, conv.stride, conv.padding) for w, g in pairs]
    return channels_last(torch.stack(dx), dtype)


def written_norm(maps, residual, scale, shift, groups, eps, relu):
    """(K, B, H, W, C) by mean and variance."""
    parts = maps.float().unflatten(4, (groups, -1))
    centred = parts - parts.mean((2, 3, 5), keepdim=True)
    parts = centred / (centred.square().mean((2, 3, 5), keepdim=True) + eps).sqrt()
    y = parts.flatten(4) * scale[:, None, None, None] + shift[:, None, None, None]
    y = y if residual is None else y + residual.float()
    return y.relu() if relu else y


def norm(maps, residual, scale, shift, groups, eps, relu):
    parts = maps.float().unflatten(4, (groups, -1))
    mean, var = parts.mean((2, 3, 5)), parts.var((2, 3, 5), correction=0)
    size = maps.shape[4] // groups
    by_channel = [t.repeat_interleave(size, 2) for t in (mean, (var + eps).rsqrt())]
    return written_norm(maps, residual, scale, shift, groups, eps, relu).to(maps.dtype), *by_channel


def norm_gradient(dy, maps, y, scale, shift, mean, rate, groups, relu):
    assert mean.shape == rate.shape == (*maps.shape[:2], maps.shape[4])
    eps = 1e-5
    dy = dy.float()
    added = None
    if y is not None:
        dy = torch.where(y > 0, dy, 0.0) if relu else dy
        added = dy.to(maps.dtype)
    leaves = [t.float().clone().requires_grad_() for t in (maps, scale, shift)]
    with torch.enable_grad():
        out = written_norm(leaves[0], None, *leaves[1:], groups, eps, relu and y is None)
        dx, dscale, dshift = torch.autograd.grad(out, leaves, dy)
    return dx.to(maps.dtype), added, dscale, dshift


def max_pool(maps, pool):
    pairs = [F.max_pool2d(x, *pool, return_indices=True) for x in maps.float().permute(0, 1, 4, 2, 3)]
    y, code = (torch.stack(t) for t in zip(*pairs, strict=True))
    return channels_last(y, maps.dtype), code.permute(0, 1, 3, 4, 2)


def max_pool_gradient(dy, code, pool, sides):
    dy, code = (t.permute(0, 1, 4, 2, 3).flatten(3) for t in (dy, code))
    dx = dy.new_zeros((*dy.shape[:3], sides[0] * sides[1])).scatter_add(3, code, dy)
    return channels_last(dx.unflatten(3, sides), dy.dtype)


REFERENCE = SimpleNamespace(
    pack_maps=pack_maps,
    pack_weight=pack_weight,
    forward=forward,
    weight_gradient=weight_gradient,
    input_gradient=input_gradient,
    norm=norm,
    norm_gradient=norm_gradient,
    max_pool=max_pool,
    max_pool_gradient=max_pool_gradient,
)


@pytest.fixture
def reference(monkeypatch):
    """Torch in the kernels' place; -> the list of calls made."""
    calls = []

    def note(name):
        def call(*args):
            assert all(type(a) is torch.Tensor for a in args if isinstance(a, torch.Tensor))
            calls.append(name)
            return getattr(REFERENCE, name)(*args)

        return call

    noting = SimpleNamespace(**{name: note(name) for name in vars(REFERENCE)})
    monkeypatch.setattr(fast_layers, "kernels", lambda: noting)
    monkeypatch.setattr(fast_layers, "usable", lambda x, precision: precision != "fp32")
    return calls


def plain_stage(x, w, b, padding, slope):
    return F.max_pool2d(F.leaky_relu(F.conv2d(x, w, b, padding=padding), slope), 2)


# --- the rule -----------------------------------------------------------------------------------------------


def both_gradients(ours, torchs, *inputs, in_dims=0):
    """Values and gradients of all inputs under vmap, for the sum of the outputs times fixed numbers."""

    def of(fn):
        def loss(*inputs):
            out = fn(*inputs).float()
            return (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum()

        return vmap(grad_and_value(loss, tuple(range(len(inputs)))), in_dims)(*inputs)

    (gs, value), (es, wanted) = of(ours), of(torchs)
    return [*gs, value], [*es, wanted]


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("shared", ["nothing", "x", "weights"])
def test_a_stage_under_vmap_is_torchs(shared):
    x, w, b = drawn(3, 2, 3, 9, 8), drawn(3, 5, 3, 3, 3, seed=1), drawn(3, 5, seed=2)
    in_dims = [0, 0, 0]
    if shared == "x":
        x, in_dims = x[0], [None, 0, 0]
    elif shared == "weights":
        w, b, in_dims = w[0], b[0], [0, None, None]
    got, wanted = both_gradients(
        lambda x, w, b: fast_layers.conv_stage(x, w, b, 1, 0.1, "tf32"),
        lambda x, w, b: plain_stage(x, w, b, 1, 0.1),
        x, w, b, in_dims=tuple(in_dims),
    )  # fmt: skip
    for g, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (1, 2, 0), (5, 2, 3)])
def test_a_convolution_under_vmap_is_torchs(kernel, stride, padding):
    x, w = drawn(2, 3, 4, 7, 8), drawn(2, 6, 4, kernel, kernel, seed=1)
    got, wanted = both_gradients(
        lambda x, w: fast_layers.conv2d(x, w, stride, padding, "tf32"),
        lambda x, w: F.conv2d(x, w, None, stride, padding),
        x, w,
    )  # fmt: skip
    for g, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_a_norm_under_vmap_is_torchs(groups, adds, relu):
    x, added, scale, shift = (
        drawn(2, 3, 6, 4, 5),
        drawn(2, 3, 6, 4, 5, seed=1),
        drawn(2, 6, seed=2),
        drawn(2, 6, seed=3),
    )

    def torchs(x, scale, shift, *added):
        out = F.group_norm(x, groups, scale, shift)
        out = out + added[0] if added else out
        return out.relu() if relu else out

    def ours(x, scale, shift, *added):
        return fast_layers.norm(x, added[0] if added else None, scale, shift, groups, 1e-5, relu, "tf32")

    inputs = (x, scale, shift, added) if adds else (x, scale, shift)
    got, wanted = both_gradients(ours, torchs, *inputs)
    for g, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)


def test_maps_stay_with_channels_last_and_are_not_packed_again(reference):
    x, w, b = drawn(2, 3, 8, 12, 12), drawn(2, 16, 8, 3, 3), drawn(2, 16)
    w2, b2 = drawn(2, 4, 16, 3, 3), drawn(2, 4)

    def two(x, w, b, w2, b2):
        return fast_layers.conv_stage(
            fast_layers.conv_stage(x, w, b, 1, 0.0, "bf16"), w2, b2, 1, 0.0, "bf16", last=True
        )

    out = vmap(two)(x, w, b, w2, b2)
    assert out.dtype == torch.float32 and out.permute(0, 1, 3, 4, 2).is_contiguous()
    packed = [
        pack_maps(x, torch.bfloat16),
        pack_maps(fast_layers._channels_second(drawn(2, 3, 6, 6, 16)), torch.float32),
    ]
    assert packed[0].dtype == torch.bfloat16 and packed[1] is None
    assert reference == ["pack_maps", "pack_weight", "forward"] * 2


@pytest.mark.usefixtures("reference")
def test_the_first_layer_has_no_input_gradient(reference):
    x, w, b = drawn(2, 3, 3, 8, 8), drawn(2, 4, 3, 3, 3), drawn(2, 4)
    loss = lambda w, b, x: fast_layers.conv_stage(x, w, b, 1, 0.0, "tf32").sum()  # noqa: E731
    vmap(grad(loss, (0, 1)))(w, b, x)
    assert "weight_gradient" in reference and "input_gradient" not in reference
    vmap(grad(loss, (0, 2)))(w, b, x)
    assert "input_gradient" in reference


@pytest.mark.usefixtures("reference")
def test_one_client_alone_is_the_same():
    x, w, b = drawn(2, 3, 3, 9, 9), drawn(2, 4, 3, 3, 3), drawn(2, 4)
    stage = lambda x, w, b: fast_layers.conv_stage(x, w, b, 1, 0.1, "tf32").square().sum()  # noqa: E731
    mapped = vmap(grad(stage, (0, 1, 2)))(x, w, b)
    for i in range(2):
        leaves = [t[i].clone().requires_grad_() for t in (x, w, b)]
        alone = torch.autograd.grad(stage(*leaves), leaves)
        for a, m in zip(alone, mapped, strict=True):
            torch.testing.assert_close(a, m[i])


@pytest.mark.parametrize("shared", [False, True])
def test_a_linear_layers_gradient_lies_as_its_weight_does(shared):
    k = rng.key(5)
    x, weight = rng.normal(rng.fold_in(k, 0), (3, 6, 8)), rng.normal(rng.fold_in(k, 1), (3, 5, 8)).requires_grad_()
    x, in_dims = (x[0], (None, 0)) if shared else (x, (0, 0))
    ours, torchs = (vmap(layer, in_dims=in_dims)(x, weight) for layer in (layers.product, F.linear))
    torch.testing.assert_close(ours, torchs)
    ours, torchs = (torch.autograd.grad((y**3).sum(), weight)[0] for y in (ours, torchs))
    torch.testing.assert_close(ours, torchs)
    assert ours.is_contiguous()


@pytest.mark.usefixtures("reference")
def test_gradients_outside_vmap_and_vmap_in_vmap():
    x, w, b = drawn(2, 3, 1, 3, 6, 6), drawn(2, 4, 3, 3, 3), drawn(2, 4)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    inner = vmap(lambda x, w, b: fast_layers.conv_stage(x, w, b, 1, 0.1, "tf32"), (0, None, None))
    got = vmap(inner)(*leaves)
    wanted = torch.stack([plain_stage(x.flatten(0, 1), w, b, 1, 0.1) for x, w, b in zip(*leaves, strict=True)])
    torch.testing.assert_close(got.flatten(1, 2), wanted, rtol=1e-4, atol=1e-4)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (got, wanted)), strict=True)
    for g, e in pairs:
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-3)


# --- in models ----------------------------------------------------------------------------------------------

MODELS = [
    ("cifar_cnn", (3, 20, 20), {}),
    ("cnn", (1, 9, 8), {"norm": "group"}),
    ("lenet", (3, 16, 17), {}),
    ("fedpce_resnet18", (3, 17, 17), {"width": 4}),
    ("resnet18", (3, 20, 20), {"width": 4, "stem": "imagenet", "norm": "per_group"}),
    ("wrn16_2", (1, 8, 8), {}),
    ("audio_cnn", (1, 16, 16), {}),
    ("mobilenet_v3_small", (3, 32, 32), {}),
]


def gradients(name, shape, settings, precision, dtype=torch.float32, clients=2, batch=3):
    """(gradients, loss) of a step of all clients, whose parameters differ."""
    task = build_task(ModelSettings(name=name, **settings), shape, 4, dtype=dtype)
    layers.set_precision(task._module, precision)
    starts = [task.init(rng.key(i)) for i in range(clients)]
    params = {n: torch.stack([s[n] for s in starts]) for n in starts[0]}
    x = drawn(clients, batch, *shape, seed=5).to(dtype)
    y = torch.arange(clients * batch).reshape(clients, batch) % 4

    def loss(params, x, y):
        logits = task.logits(params, x)
        assert logits.dtype == dtype
        return F.cross_entropy(logits, y)

    return vmap(grad_and_value(loss))(params, x, y)


@pytest.mark.parametrize(("name", "shape", "settings"), MODELS)
def test_a_models_step(reference, name, shape, settings):
    wanted, _ = gradients(name, shape, settings, "fp32", torch.float64)
    assert not reference
    got, _ = gradients(name, shape, settings, "tf32")
    assert "forward" in reference and "weight_gradient" in reference
    largest = max(g.norm() for g in wanted.values())  # a scale before another norm has a gradient of almost 0
    for key in wanted:
        assert (got[key].double() - wanted[key]).norm() <= 2e-3 * wanted[key].norm() + 1e-6 * largest, key


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(("name", "shape", "settings"), MODELS)
def test_parameters_and_logits_stay_float32(name, shape, settings):
    got, loss = gradients(name, shape, settings, "bf16")
    assert loss.dtype == torch.float32 and loss.isfinite().all()
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in got.values())


def test_the_default_is_torchs_own_layers(monkeypatch):
    monkeypatch.setattr(fast_layers, "usable", lambda x, precision: precision != "fp32")
    monkeypatch.setattr(fast_layers, "kernels", lambda: pytest.fail("kernels were asked for"))
    gradients("cifar_cnn", (3, 20, 20), {}, "fp32")
    assert not fast_layers.usable(drawn(2), "fp32")


def test_a_second_derivative_is_refused_in_one_sentence(reference):
    x, weight, bias = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)

    def loss(weight):
        return fast_layers.conv_stage(x, weight, bias, 1, 0.1, "tf32").square().sum()

    with pytest.raises(UserError, match="second derivatives, which the fast layers do not have: use precision fp32"):
        grad(lambda w: grad(loss)(w).square().sum())(weight)


def test_an_unknown_precision_is_refused():
    module = build_module(ModelSettings(name="cnn"), (1, 8, 8), 3)
    with pytest.raises(UserError, match="one of fp32, tf32, bf16, not 'half'"):
        layers.set_precision(module, "half")


# --- the kernels --------------------------------------------------------------------------------------------

BARS = {"tf32": 1e-5 if INTERPRETED else 3e-3, "bf16": 2e-2}
PRECISIONS = ["tf32"] if INTERPRETED else ["tf32", "bf16"]


def held(x, precision):
    """x on the device, rounded to what the operands can hold, so that only the kernels' own rounding is left."""
    x = x.to(DEVICE)
    if precision == "bf16":
        return x.bfloat16().float()
    return x if INTERPRETED else (((x.view(torch.int32) + 0x1000) >> 13) << 13).view(torch.float32)


def assert_near(got, wanted, precision):
    for g, e in zip(got, wanted, strict=True):
        assert (g.double() - e).norm() <= BARS[precision] * e.norm()


def compare(ours, torchs, inputs, precision):
    """Output and gradients under vmap against torch in float64, one client after another."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    y, wanted = vmap(ours)(*leaves), torch.stack([torchs(*each) for each in zip(*exact, strict=True)])
    dy = held(drawn(*wanted.shape, seed=9), precision)
    got = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    assert_near([y, *got], [wanted, *torch.autograd.grad(wanted, exact, dy.double())], precision)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("clients", "batch", "channels", "sides", "outputs", "kernel", "padding", "slope"),
    [
        (2, 2, 3, (12, 12), 16, 5, 0, 0.01),
        (1, 1, 6, (11, 9), 6, 5, 2, 0.1),
        (3, 1, 1, (7, 8), 20, 3, 1, 0.0),
        (2, 3, 16, (6, 7), 32, 3, 1, 0.01),
        (1, 2, 8, (5, 4), 70, 3, 0, 0.1),
    ],
)
def test_stage_kernels(precision, clients, batch, channels, sides, outputs, kernel, padding, slope):
    inputs = [
        drawn(clients, batch, channels, *sides),
        0.2 * drawn(clients, outputs, channels, kernel, kernel, seed=1),
        drawn(clients, outputs, seed=2),
    ]
    compare(
        lambda x, w, b: fast_layers.conv_stage(x, w, b, padding, slope, precision),
        lambda x, w, b: plain_stage(x, w, b, padding, slope),
        [held(t, precision) for t in inputs],
        precision,
    )


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("clients", "batch", "channels", "sides", "outputs", "kernel", "stride", "padding"),
    [
        (2, 2, 3, (8, 8), 16, 3, 1, 1),
        (2, 1, 16, (8, 9), 32, 3, 2, 1),
        (1, 3, 16, (5, 6), 24, 1, 2, 0),
        (1, 1, 3, (11, 10), 24, 7, 2, 3),
        (2, 2, 64, (4, 4), 136, 3, 1, 1),
        (2, 2, 64, (6, 5), 64, 3, 2, 1),
        (1, 2, 128, (4, 4), 64, 1, 2, 0),
        (2, 1, 32, (5, 5), 32, 3, 1, 1),
        (2, 1, 16, (8, 7), 24, 3, 3, 1),
    ],
)
def test_convolution_kernels(precision, clients, batch, channels, sides, outputs, kernel, stride, padding):
    inputs = [drawn(clients, batch, channels, *sides), 0.2 * drawn(clients, outputs, channels, kernel, kernel, seed=1)]
    compare(
        lambda x, w: fast_layers.conv2d(x, w, stride, padding, precision),
        lambda x, w: F.conv2d(x, w, None, stride, padding),
        [held(t, precision) for t in inputs],
        precision,
    )


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_first_of_equal_values_wins_a_pool_and_zero_has_the_slope(precision):
    """Windows of four equal values: the gradient goes to the first. A value of 0 passes the slope's share."""
    x = torch.ones(1, 1, 1, 4, 4, device=DEVICE, requires_grad=True)
    w, b = torch.ones(1, 1, 1, 1, 1, device=DEVICE), torch.tensor([[-1.0]], device=DEVICE)
    for bias, share in ((b + 1, 1.0), (b, 0.25)):
        y = vmap(lambda x, w, b: fast_layers.conv_stage(x, w, b, 0, 0.25, precision))(x, w, bias)
        (dx,) = torch.autograd.grad(y.sum(), x)
        wanted = torch.zeros(4, 4)
        wanted[::2, ::2] = share
        assert torch.equal(dx[0, 0, 0].cpu(), wanted)


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_a_nan_reaches_the_output():
    x = torch.zeros(1, 1, 1, 4, 4, device=DEVICE)
    x[..., 0, 1] = float("nan")
    w, b = torch.ones(1, 1, 1, 1, 1, device=DEVICE), torch.zeros(1, 1, device=DEVICE)
    y = vmap(lambda x, w, b: fast_layers.conv_stage(x, w, b, 0, 0.1, "tf32"))(x, w, b)
    assert y.isnan().flatten().tolist() == [True, False, False, False]


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("relu", "adds"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(
    ("channels", "groups", "sides"),
    [(12, 12, (3, 5)), (12, 4, (3, 5)), (20, 1, (3, 5)), (48, 3, (3, 5)), (64, 8, (3, 5)), (32, 2, (24, 20))],
)
def test_norm_kernels(precision, channels, groups, sides, relu, adds):
    shape = (2, 3, channels, *sides)
    inputs = [3 * drawn(*shape) + 1, drawn(2, channels, seed=1), drawn(2, channels, seed=2)]
    inputs += [drawn(*shape, seed=3)] if adds else []

    def torchs(x, scale, shift, *added):
        out = F.group_norm(x, groups, scale, shift)
        out = out + added[0] if added else out
        return out.relu() if relu else out

    compare(
        lambda x, scale, shift, *added: fast_layers.norm(
            x, added[0] if added else None, scale, shift, groups, 1e-5, relu, precision
        ),
        torchs,
        [held(t, precision) for t in inputs],
        precision,
    )


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 3, 2)])
def test_pool_kernels(precision, kernel, stride, padding):
    x = drawn(2, 3, 20, 7, 9)
    x[:, :, :, 2:4] = x[:, :, :, 4:6]  # equal values: the first wins
    compare(
        lambda x: fast_layers.max_pool(x, kernel, stride, padding, precision),
        lambda x: F.max_pool2d(x, kernel, stride, padding),
        [held(x, precision)],
        precision,
    )


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_a_nan_passes_a_pool():
    x = torch.zeros(1, 1, 1, 4, 4, device=DEVICE)
    x[..., 0, 0] = float("nan")
    y = vmap(lambda x: fast_layers.max_pool(x, 2, 2, 0, "tf32"))(x)
    assert y.isnan().flatten().tolist() == [True, False, False, False]
