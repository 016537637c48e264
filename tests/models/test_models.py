"""Models: their settings, heads, batches of one, many parameter sets at once, and what is refused."""

import copy
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import bespoke
from bespoke.core import rng, tree
from bespoke.core.data import Batch
from bespoke.core.task import Task
from bespoke.errors import UserError
from bespoke.models import MODELS, ModelSettings, build_module, build_task

GREY, COLOUR = (1, 8, 8), (3, 32, 32)
PLAIN = ("none", "group", "instance", "layer")
SMALL = {  # the smallest that each can be: settings, shape, kinds of norm
    "linear": ({}, GREY, ("none",)),
    "mlp": ({"hidden": 12}, GREY, ("none", "group", "layer")),
    "cnn": ({"width": 6, "hidden": 12}, GREY, PLAIN),
    "cifar_cnn": ({}, (3, 16, 16), PLAIN),
    "emnist_cnn": ({}, (1, 12, 12), PLAIN),
    "pfedvmp_cnn": ({"hidden": 12}, (1, 16, 17), PLAIN),
    "lenet": ({}, (1, 17, 16), PLAIN),
    "resnet18": ({"width": 8}, (2, 9, 9), ("group", "instance", "layer", "per_group")),
    "fedpce_resnet18": ({"width": 6}, (3, 17, 17), ("instance",)),
    "wrn16_2": ({}, (1, 8, 8), ("group", "per_group")),
    "mobilenet_v3_small": ({}, (1, 32, 33), ("group", "per_group")),
    "sent140_lstm": ({"vocabulary": 11}, (5,), ("none",)),
    "audio_cnn": ({}, (1, 16, 16), ("none",)),
}
CASES = [(name, norm, settings, shape) for name, (settings, shape, norms) in SMALL.items() for norm in norms]
CASES += [
    ("resnet18", "per_group", {"width": 16, "stem": "imagenet", "final_norm": "map"}, (1, 8, 8)),
    ("resnet18", "instance", {"width": 6, "stem_pool": True, "final_norm": "vector"}, (1, 18, 18)),
]
every_case = pytest.mark.parametrize(("name", "norm", "settings", "shape"), CASES)


def task_of(name, norm="", shape=COLOUR, classes=10, dtype=torch.float64, **settings):
    return build_task(ModelSettings(name=name, norm=norm, **settings), shape, classes, dtype=dtype)


def count(params):
    return sum(p.numel() for p in params.values())


def inputs(name, *shape):
    if name == "sent140_lstm":
        return torch.arange(np.prod(shape)).reshape(shape) * 7 % 11
    return rng.normal(rng.key(5), shape, torch.float64)


def near(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_every_model_is_tried():
    assert SMALL.keys() == MODELS.keys()


@every_case
def test_model_is_its_head_on_its_features(name, norm, settings, shape):
    task = task_of(name, norm, shape, **settings)
    for batch in (1, 3):
        task.check(inputs(name, batch, *shape))
    assert task.head_names == ("head.weight", "head.bias")
    params = task.init(rng.key(0))
    assert set(task.body(params)) | set(task.head(params)) == set(params)
    assert bool(task.norm_names) == (norm != "none")
    x = inputs(name, 3, *shape)
    alone = torch.cat([task.logits(params, x[i : i + 1]) for i in range(3)])
    assert near(alone, task.logits(params, x))
    assert task.features(params, x).shape == (3, params["head.weight"].shape[1])


@every_case
def test_many_parameter_sets_at_once_equal_one_by_one(name, norm, settings, shape):
    task = task_of(name, norm, shape, **settings)
    many = [task.init(rng.key(seed)) for seed in range(2)]
    x = inputs(name, 2, 3, *shape)
    y = torch.tensor([0, 9, 3])
    mask = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)

    def slope(params, x):
        return grad(task.loss)(params, Batch(x, y, mask, y, y[0], y[:2]))

    stacked = tree.stack(many)
    logits = vmap(task.logits)(stacked, x)
    slopes = vmap(slope)(stacked, x)
    for i, params in enumerate(many):
        assert near(logits[i], task.logits(params, x[i]))
        for leaf, value in slope(params, x[i]).items():
            assert near(slopes[leaf][i], value), leaf
            assert value.any(), leaf  # every parameter matters
    shared = vmap(task.logits, in_dims=(0, None))(stacked, x[0])
    assert near(shared[1], task.logits(many[1], x[0]))


@pytest.mark.parametrize("name", MODELS)
def test_copies_of_a_module_are_its_equals(name):
    settings, shape, _ = SMALL[name]
    module = build_module(ModelSettings(name=name, **settings), shape, 3).double()
    x = inputs(name, 2, *shape)
    assert torch.equal(copy.deepcopy(module)(x), module(x))


def test_equal_keys_give_equal_weights():
    task = task_of("cnn", "group", GREY)
    a, b, c = (task.init(rng.key(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["head.weight"], c["head.weight"])
    assert task_of("mlp", dtype=torch.float32).init(rng.key(0))["head.bias"].dtype == torch.float32


# --- settings -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", MODELS)
def test_a_models_own_choices_can_be_spelled_out(name):
    spec, (needed, shape, _) = MODELS[name], SMALL[name]
    written = ModelSettings(name=name, norm=spec.norms[0], **{**spec.takes, **needed})
    left_out = ModelSettings(name=name, **needed)
    shapes = [{n: p.shape for n, p in build_module(s, shape, 4).named_parameters()} for s in (written, left_out)]
    assert shapes[0] == shapes[1]


OTHER = {"hidden": 7, "width": 7, "stem": "cifar", "stem_pool": True, "final_norm": "map"}
OTHER |= {"vectors": "glove.npy", "vocabulary": 3, "dropout": 0.5}


@pytest.mark.parametrize("name", MODELS)
def test_settings_that_a_model_has_not_are_refused(name):
    assert {"name", "norm", "start"} | OTHER.keys() == {f.name for f in fields(ModelSettings)}
    needed, shape, _ = SMALL[name]
    for key in OTHER.keys() - MODELS[name].takes.keys():
        with pytest.raises(
            UserError, match=rf"\[model\] {key} = .* means nothing to {name}, which takes .*leave it out"
        ):
            build_task(ModelSettings(name=name, **{**needed, key: OTHER[key]}), shape, 4)


@pytest.mark.parametrize(
    ("settings", "shape", "sentence"),
    [
        ({"name": "cn"}, GREY, r"no model 'cn' \(did you mean 'cnn'\?\); there are linear, mlp, cnn"),
        ({"norm": "batch"}, GREY, 'norm = "batch" is not available.*use norm = "group"'),
        ({"name": "linear", "norm": "batch"}, GREY, 'use norm = "group"'),
        (
            {"norm": "grup"},
            GREY,
            "norm of cnn must be one of 'none', 'group', 'instance', 'layer', not 'grup'",
        ),
        ({"name": "mlp", "norm": "instance"}, GREY, "norm of mlp must be one of 'none', 'group', 'layer'"),
        ({"name": "linear", "norm": "layer"}, GREY, "norm of linear must be one of 'none'"),
        ({"name": "linear", "hidden": 3}, GREY, "hidden = 3 means nothing to linear, which takes no settings"),
        ({"name": "lenet", "hidden": 3}, COLOUR, "hidden = 3 means nothing to lenet, which takes norm: leave"),
        ({"name": "cifar_cnn", "norm": "per_group"}, COLOUR, "norm of cifar_cnn must be one of 'none', 'group'"),
        ({"name": "resnet18", "norm": "none"}, COLOUR, "norm of resnet18 must be one of 'group', 'instance'"),
        ({"name": "fedpce_resnet18", "norm": "group"}, COLOUR, "norm of fedpce_resnet18 must be one of 'instance'"),
        ({"name": "resnet18", "stem": "vgg"}, COLOUR, "stem must be one of '', 'imagenet', 'cifar', not 'vgg'"),
        ({"name": "cifar_cnn"}, GREY, r"cifar_cnn needs images .* at least 16x16.*\(1, 8, 8\)"),
        ({"name": "emnist_cnn"}, (1, 11, 28), "emnist_cnn needs images .* at least 12x12"),
        ({"name": "pfedvmp_cnn"}, (1, 28, 15), "pfedvmp_cnn needs images .* at least 16x16"),
        ({"name": "lenet"}, (3, 15, 15), "lenet needs images .* at least 16x16"),
        ({"name": "resnet18"}, (3, 7, 7), "resnet18 needs images .* at least 8x8"),
        ({"name": "wrn16_2"}, (3, 8, 7), "wrn16_2 needs images .* at least 8x8"),
        ({"name": "mobilenet_v3_small"}, (3, 31, 32), "mobilenet_v3_small needs images .* at least 32x32"),
        ({"name": "audio_cnn"}, (1, 15, 40), "audio_cnn needs images .* at least 16x16"),
        ({"name": "audio_cnn"}, (49, 40), r"shape \(49, 40\): add an axis for the channel"),
        ({"name": "cifar_cnn"}, (32, 32, 3), r"shape \(32, 32, 3\): put the channels first"),
        ({"name": "resnet18", "norm": "instance"}, (3, 8, 8), "8x8 leave resnet18 maps of one pixel.*than 8x8"),
        (
            {"name": "resnet18", "norm": "instance", "stem": "imagenet"},
            COLOUR,
            "leave resnet18 maps of one pixel, which instance norm makes zero: .* larger than 32x32",
        ),
        ({"name": "resnet18", "norm": "instance", "final_norm": "map"}, COLOUR, "gives all images the same features"),
        ({"name": "fedpce_resnet18"}, (1, 16, 16), "leave fedpce_resnet18 maps of one pixel.* larger than 16x16"),
        (
            {"name": "mobilenet_v3_small", "norm": "instance"},
            COLOUR,
            "norm of mobilenet_v3_small must be one of 'group'",
        ),
        ({}, (20,), r"cnn needs images .* shape \(20,\): use mlp or linear"),
        ({}, (1, 3, 8), "cnn needs images .* at least 4x4"),
        ({"hidden": -1}, GREY, "hidden must be at least 0 and at most 1,000,000, not -1"),
        ({"name": "sent140_lstm", "vocabulary": 5}, COLOUR, "sent140_lstm needs rows of tokens"),
        ({"name": "sent140_lstm"}, (25,), "sent140_lstm needs word vectors: set .* vectors"),
        ({"name": "sent140_lstm", "vectors": "no.npy"}, (25,), "vectors = 'no.npy' cannot be read.*No such file"),
    ],
)
def test_settings_that_make_no_sense(settings, shape, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        build_task(ModelSettings(**settings), shape, 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "side"), [("cnn", 4), ("cifar_cnn", 16), ("emnist_cnn", 12), ("pfedvmp_cnn", 16)])
@pytest.mark.parametrize("norm", ["none", "instance"])
def test_the_smallest_images(name, side, norm):
    task = task_of(name, norm, (2, side, side + 1))
    task.check(inputs(name, 1, 2, side, side + 1))


# --- tokens -------------------------------------------------------------------------------------------------


def test_word_vectors_come_from_a_file_and_stay_as_they_are(tmp_path):
    wanted = np.arange(6 * 300, dtype=np.float64).reshape(6, 300) / 1000
    np.save(tmp_path / "words.npy", wanted)
    task = task_of("sent140_lstm", shape=(4,), vectors=str(tmp_path / "words.npy"))
    assert not any("words" in name for name in task.init(rng.key(0)))
    module = build_module(ModelSettings("sent140_lstm", vectors=str(tmp_path / "words.npy")), (4,), 2)
    assert np.allclose(module.body.words(torch.tensor([[5, 0]])), wanted[[5, 0]])
    with pytest.raises(UserError, match=r"cannot take examples of shape \(4,\): index out of range"):
        task.check(torch.tensor([[0, 1, 2, 6]]))
    with pytest.raises(UserError, match="needs whole numbers"):
        task.check(torch.zeros(1, 4))
    with pytest.raises(UserError, match=r"vocabulary = 7, but .* holds 6 vectors: leave it out"):
        task_of("sent140_lstm", shape=(4,), vectors=str(tmp_path / "words.npy"), vocabulary=7)


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((6, 299), np.float32), np.zeros(300), np.zeros((3, 300), np.int64), np.array([{}]), b"glove", b""],
)
def test_files_that_hold_no_word_vectors(tmp_path, wrong):
    path = tmp_path / "words.npy"
    path.write_bytes(wrong) if isinstance(wrong, bytes) else np.save(path, wrong, allow_pickle=True)
    with pytest.raises(UserError, match=r"must hold numbers of shape \(vocabulary, 300\)|cannot be read as an .npy"):
        task_of("sent140_lstm", shape=(4,), vectors=str(path))


def test_random_word_vectors_do_not_depend_on_the_seed():
    vectors = []
    for seed in range(2):
        torch.manual_seed(seed)
        vectors.append(build_module(ModelSettings("sent140_lstm", vocabulary=3), (4,), 2).body.words.vectors)
    assert torch.equal(*vectors)
    assert vectors[0].shape == (3, 300)
    assert 0.35 < vectors[0].std() < 0.45


def test_tokens_travel_through_a_whole_run(tmp_path):
    for name in ("anna", "bert"):
        x = np.random.default_rng(0).integers(0, 11, (12, 5))
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.arange(12) % 2)
    spec = bespoke.Experiment(
        data=bespoke.DataSettings("files", path=str(tmp_path / "*.npz")),
        model=ModelSettings("sent140_lstm", vocabulary=11),
        training=bespoke.Training(rounds=1, batch=4),
    )
    a, b = (bespoke.run(spec, backend=backend).models["bert"].logits(x) for backend in ("loop", "batched"))
    assert a.shape == (12, 2)
    assert torch.allclose(a, b, atol=1e-5)


# --- models of one's own ------------------------------------------------------------------------------------


def own(*layers):
    return lambda: nn.Sequential(nn.Flatten(), *layers, nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("build", "head", "sentence"),
    [
        (own(), "fc", "no module named 'fc' to serve as head; its layers are '0', '1'"),
        (own(), "", "no module named ''"),
        (own(nn.ReLU()), "1", "'1' has no parameters and cannot serve as head"),
        (
            own(nn.BatchNorm1d(4)),
            "2",
            r"layer '1' keeps running statistics \(BatchNorm\).*bespoke.models.converted\(model\)",
        ),
        (own(nn.BatchNorm1d(4, track_running_stats=False)), "2", "layer '1' keeps running statistics"),
        (own(nn.InstanceNorm1d(4, track_running_stats=True)), "2", "layer '1' keeps running statistics"),
        (own(nn.Dropout(0.5)), "2", r"layer '1' is dropout with p=0.5.*bespoke.models.converted\(model\)"),
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


@pytest.mark.parametrize("hidden", [1, 2, 4])
def test_group_norm_of_groups_of_one_is_refused(hidden):
    with pytest.raises(UserError, match=rf"makes {hidden} units zero, in {hidden} groups of one"):
        build_task(ModelSettings("mlp", norm="group", hidden=hidden), (4,), 2)
    build_task(ModelSettings("mlp", norm="group", hidden=8), (4,), 2)
