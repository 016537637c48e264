"""Models: sizes, heads, batches of one, many parameter sets at once, and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from bespoke.core import rng, tree
from bespoke.core.data import Batch
from bespoke.core.task import Task
from bespoke.errors import UserError
from bespoke.models import MODELS, ModelSettings, build_task

GREY, COLOUR = (1, 8, 8), (3, 32, 32)
NORMS = {"linear": ["none"], "mlp": ["none", "group", "layer"], "cifar_cnn": ["none"]}
CASES = [
    (name, norm, shape)
    for name in MODELS
    for norm in NORMS.get(name, ["none", "group", "instance", "layer"])
    for shape in ([COLOUR] if name == "cifar_cnn" else [GREY, COLOUR])
]


def task_of(name, norm="none", shape=COLOUR, classes=10, **options):
    settings = ModelSettings(name=name, norm=norm, hidden=12, width=6)
    return build_task(settings, shape, classes, dtype=options.get("dtype", torch.float64))


def count(params):
    return sum(p.numel() for p in params.values())


def inputs(*shape):
    return rng.normal(rng.key(5), shape, torch.float64)


@pytest.mark.parametrize(("name", "norm", "shape"), CASES)
def test_model_is_its_head_on_its_features(name, norm, shape):
    task = task_of(name, norm, shape)
    for batch in (1, 5):
        task.check(inputs(batch, *shape))
    assert task.head_names == ("head.weight", "head.bias")
    params = task.init(rng.key(0))
    assert set(task.body(params)) | set(task.head(params)) == set(params)
    assert bool(task.norm_names) == (norm != "none")
    x = inputs(4, *shape)
    alone = torch.cat([task.logits(params, x[i : i + 1]) for i in range(4)])
    assert torch.allclose(alone, task.logits(params, x), atol=1e-10)


@pytest.mark.parametrize(("name", "norm", "shape"), CASES)
def test_many_parameter_sets_at_once_equal_one_by_one(name, norm, shape):
    task = task_of(name, norm, shape)
    many = [task.init(rng.key(seed)) for seed in range(3)]
    x = inputs(3, 4, *shape)
    y = torch.tensor([0, 3, 9, 3])
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)

    def slope(params, x):
        return grad(task.loss)(params, Batch(x, y, mask, y, y[0], y[:2]))

    stacked = tree.stack(many)
    logits = vmap(task.logits)(stacked, x)
    slopes = vmap(slope)(stacked, x)
    for i, params in enumerate(many):
        assert torch.allclose(logits[i], task.logits(params, x[i]), atol=1e-10, rtol=0)
        for leaf, value in slope(params, x[i]).items():
            assert torch.allclose(slopes[leaf][i], value, atol=1e-10, rtol=0), leaf
    shared = vmap(task.logits, in_dims=(0, None))(stacked, x[0])
    assert torch.allclose(shared[2], task.logits(many[2], x[0]), atol=1e-10, rtol=0)


@pytest.mark.parametrize(("classes", "total"), [(10, 107_690), (100, 119_300)])
def test_cifar_cnn_has_its_published_size(classes, total):
    task = task_of("cifar_cnn", classes=classes)
    params = task.init(rng.key(0))
    assert count(task.body(params)) == 106_400
    assert count(params) == total
    assert [tuple(params[f"body.{n}.weight"].shape) for n in ("conv1", "conv2", "conv3", "fc")] == [
        (16, 3, 5, 5),
        (32, 16, 5, 5),
        (64, 32, 3, 3),
        (128, 576),
    ]
    body = MODELS["cifar_cnn"].build(ModelSettings(name="cifar_cnn"), COLOUR, classes).body.double()
    maps = [body[:n](inputs(1, *COLOUR)).shape[1:] for n in (1, 4, 7, 9)]
    assert maps == [(16, 28, 28), (32, 12, 12), (64, 6, 6), (64, 3, 3)]
    features = task.features(params, inputs(2, *COLOUR))
    assert features.shape == (2, 128)
    assert (features < 0).any()  # taken after the leaky ReLU, which lets a little through


def test_sizes_of_the_small_models():
    settings = ModelSettings()
    linear = build_task(replace(settings, name="linear"), GREY, 10).init(rng.key(0))
    assert count(linear) == 64 * 10 + 10
    assert all(n.startswith("head.") for n in linear)
    mlp = build_task(replace(settings, name="mlp", hidden=32), (20,), 3)
    assert count(mlp.init(rng.key(0))) == 21 * 32 + 33 * 3
    cnn = build_task(settings, GREY, 10)
    params = cnn.init(rng.key(0))
    assert count(params) == 160 + 4640 + (32 * 4 + 1) * 64 + 650
    assert cnn.features(params, torch.zeros(2, *GREY)).shape == (2, 64)
    assert count(build_task(replace(settings, norm="layer"), GREY, 10).init(rng.key(0))) == count(params) + 96


@pytest.mark.parametrize(("norm", "groups"), [("instance", 6), ("group", 2), ("layer", 1)])
def test_norms_normalise_each_group_of_channels(norm, groups):
    module = MODELS["cnn"].build(ModelSettings(norm=norm, width=6), GREY, 10).double()
    maps = module.body.conv1(inputs(3, 1, 8, 8))
    parts = maps.reshape(3, groups, -1)
    wanted = (parts - parts.mean(2, keepdim=True)) / (parts.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(module.body.norm1(maps), wanted.reshape(maps.shape), atol=1e-10)


def test_equal_keys_give_equal_weights():
    task = task_of("cnn", "group", GREY)
    a, b, c = (task.init(rng.key(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["head.weight"], c["head.weight"])
    assert task_of("mlp", dtype=torch.float32).init(rng.key(0))["head.bias"].dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "shape", "sentence"),
    [
        ({"name": "cn"}, GREY, "'cn' is none of linear, mlp, cnn, cifar_cnn: did you mean 'cnn'"),
        ({"norm": "batch"}, GREY, 'norm = "batch" is not offered.*use norm = "group"'),
        ({"name": "linear", "norm": "batch"}, GREY, 'use norm = "group"'),
        (
            {"norm": "grup"},
            GREY,
            "norm of cnn must be one of 'none', 'group', 'instance', 'layer', not 'grup'",
        ),
        ({"name": "mlp", "norm": "instance"}, GREY, "norm of mlp must be one of 'none', 'group', 'layer'"),
        ({"name": "linear", "norm": "layer"}, GREY, "norm of linear must be one of 'none'"),
        ({"name": "cifar_cnn", "norm": "group"}, COLOUR, "norm of cifar_cnn must be one of 'none'"),
        ({"name": "cifar_cnn"}, GREY, r"cifar_cnn needs images .* at least 16x16.*\(1, 8, 8\)"),
        ({}, (20,), r"cnn needs images .* shape \(20,\): use mlp or linear"),
        ({}, (1, 3, 8), "cnn needs images .* at least 4x4"),
        ({"hidden": 0}, GREY, "hidden must be at least 1, not 0"),
    ],
)
def test_settings_that_make_no_sense(settings, shape, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        build_task(ModelSettings(**settings), shape, 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "side"), [("cnn", 4), ("cifar_cnn", 16)])
@pytest.mark.parametrize("norm", ["none", "instance"])
def test_the_smallest_images(name, side, norm):
    task = task_of(name, norm if name == "cnn" else "none", (2, side, side + 1))
    task.check(inputs(1, 2, side, side + 1))


# --- models of one's own ------------------------------------------------------------------------------------


def own(*layers):
    return lambda: nn.Sequential(nn.Flatten(), *layers, nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("build", "head", "sentence"),
    [
        (own(), "fc", "no module named 'fc' to serve as head; its layers are '0', '1'"),
        (own(), "", "no module named ''"),
        (own(nn.ReLU()), "1", "'1' has no parameters and cannot serve as head"),
        (own(nn.BatchNorm1d(4)), "2", r"layer '1' keeps running statistics \(BatchNorm\).*nn.GroupNorm"),
        (own(nn.BatchNorm1d(4, track_running_stats=False)), "2", "layer '1' keeps running statistics"),
        (own(nn.InstanceNorm1d(4, track_running_stats=True)), "2", "layer '1' keeps running statistics"),
        (own(nn.Dropout(0.5)), "2", "layer '1' is dropout with p=0.5"),
    ],
)
def test_modules_that_cannot_serve(build, head, sentence):
    with pytest.raises(UserError, match=sentence):
        Task(build, head, 3)


def test_modules_that_can_serve():
    x = torch.ones(2, 4)
    Task(own(nn.Dropout(0.0), nn.LayerNorm(4)), "3", 3).check(x)
    with pytest.raises(UserError, match=r"outputs of shape \(2, 3\) for 2 examples, but the data has 5 classes"):
        Task(own(), "1", 5).check(x)


def test_a_head_in_the_middle_is_refused():
    class Detour(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.last(self.first(x))

    x = torch.ones(2, 3)
    Task(Detour, "last", 3).check(x)
    with pytest.raises(UserError, match="not its head 'first' applied to features"):
        Task(Detour, "first", 3).check(x)
