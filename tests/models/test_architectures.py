"""The papers' architectures: published sizes, shapes, multiplications, and each net against a transcription."""

import re
import tomllib
from math import isclose
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bespoke.core import rng
from bespoke.models import ModelSettings, build_module, build_task
from bespoke.models.layers import SharedGroupNorm, norm2d

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"


def module_of(name, shape, classes=10, **settings):
    """A module whose tensors have shapes and no values: sizes cost nothing."""
    with torch.device("meta"):
        return build_module(ModelSettings(name=name, **settings), shape, classes)


def size(module):
    return sum(p.numel() for p in module.parameters())


def shapes_of(module, shape):
    """Output shape of every layer by name, for one example."""
    shapes = {}

    def note(name, out):
        shapes[name] = tuple(out.shape[1:])

    for name, layer in module.named_modules():
        layer.register_forward_hook(lambda layer, given, out, name=name: note(name, out))
    module(torch.empty(1, *shape, device="meta"))
    return shapes


def multiplications(module, shape):
    """Multiply-accumulates of convolutions and linear layers for one example."""
    total = 0
    for name, out in shapes_of(module, shape).items():
        layer = module.get_submodule(name)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            total += layer.weight.numel() * int(np.prod(out[1:]))
    return total


# --- sizes --------------------------------------------------------------------------------------------------


GROUPNORM, SHARED = {"norm": "group"}, {"norm": "per_group", "stem": "imagenet"}
MNIST, CIFAR, TINY, PHOTO = (1, 28, 28), (3, 32, 32), (3, 64, 64), (3, 224, 224)
SIZES = [  # name, settings, shape, classes, body, head
    ("cifar_cnn", {}, CIFAR, 10, 106_400, 1_290),  # printed in pFedFDA's table of sizes, as are the next three
    ("cifar_cnn", {}, CIFAR, 100, 106_400, 12_900),
    ("emnist_cnn", {}, MNIST, 62, 115_776, 7_998),
    ("resnet18", SHARED, TINY, 200, 11_167_212, 102_600),
    ("mobilenet_v3_small", {}, PHOTO, 1000, 927_008 + 590_848, 1_025_000),  # 1,615,848 behind the maps
    ("pfedvmp_cnn", {}, MNIST, 10, 576_896, 5_130),
    ("pfedvmp_cnn", {}, MNIST, 47, 576_896, 24_111),
    ("pfedvmp_cnn", {}, CIFAR, 10, 873_408, 5_130),
    ("pfedvmp_cnn", {}, CIFAR, 100, 873_408, 51_300),
    *(("pfedvmp_cnn", {"hidden": f}, CIFAR, 10, 53_696 + 1_601 * f, 10 * f + 10) for f in (128, 256, 384, 640)),
    *(("pfedvmp_cnn", {"hidden": f}, MNIST, 10, 52_096 + 1_025 * f, 10 * f + 10) for f in (128, 256, 384, 640)),
    ("resnet18", {"stem": "imagenet"}, TINY, 200, 11_176_512, 102_600),  # as with BatchNorm: one scale a channel
    ("resnet18", {"stem": "imagenet"}, MNIST, 10, 11_170_240, 5_130),
    ("resnet18", {}, CIFAR, 10, 11_168_832, 5_130),
    ("resnet18", {"norm": "instance"}, CIFAR, 10, 11_168_832, 5_130),
    ("resnet18", {}, CIFAR, 100, 11_168_832, 51_300),
    ("resnet18", {}, MNIST, 10, 11_167_680, 5_130),
    ("fedpce_resnet18", {}, CIFAR, 10, 11_174_986 - 5_130, 5_130),
    ("fedpce_resnet18", {}, CIFAR, 100, 11_221_156 - 51_300, 51_300),
    ("wrn16_2", {}, CIFAR, 10, 690_384, 1_290),
    ("wrn16_2", {}, CIFAR, 100, 690_384, 12_900),
    ("wrn16_2", {}, MNIST, 10, 690_096, 1_290),
    ("linear", {}, MNIST, 10, 0, 7_850),
    ("lenet", {}, CIFAR, 10, 61_156, 850),
    ("sent140_lstm", {"vocabulary": 9}, (25,), 2, 160_400 + 80_400 + 3_030, 62),
    ("audio_cnn", {}, (1, 49, 40), 2, 3_025_024, 770),
    ("audio_cnn", {}, (1, 49, 40), 10, 3_025_024, 3_850),
]


@pytest.mark.parametrize(("name", "settings", "shape", "classes", "body", "head"), SIZES)
def test_published_sizes(name, settings, shape, classes, body, head):
    module = module_of(name, shape, classes, **settings)
    assert (size(module.body), size(module.head)) == (body, head)


def test_totals_that_papers_print_or_imply():
    totals = {(name, classes, *shape): body + head for name, settings, shape, classes, body, head in SIZES}
    assert totals["cifar_cnn", 10, *CIFAR] == 107_690
    assert totals["cifar_cnn", 100, *CIFAR] == 119_300
    assert totals["emnist_cnn", 62, *MNIST] == 123_774
    assert totals["mobilenet_v3_small", 1000, *PHOTO] == 2_542_856
    assert totals["resnet18", 10, *CIFAR] == 11_173_962
    assert totals["resnet18", 100, *CIFAR] == 11_220_132
    assert totals["wrn16_2", 10, *CIFAR] == 691_674
    assert totals["wrn16_2", 100, *CIFAR] == 703_284
    assert totals["wrn16_2", 10, *MNIST] == 691_386
    assert totals["lenet", 10, *CIFAR] == 62_006
    assert totals["sent140_lstm", 2, 25] - 31 == 243_861  # with one output and a sigmoid instead of two classes
    assert isclose(totals["audio_cnn", 2, 1, 49, 40], 3e6, rel_tol=0.02)


def norm_sizes(module):
    return [size(layer) for layer in module.modules() if isinstance(layer, nn.GroupNorm | nn.LayerNorm)]


def test_scales_and_shifts():
    per_channel = norm_sizes(module_of("resnet18", TINY, 200, stem="imagenet"))
    per_group = norm_sizes(module_of("resnet18", TINY, 200, **SHARED))
    assert (len(per_channel), sum(per_channel), sum(per_group)) == (20, 2 * 4_800, 300)
    convolutions = size(module_of("resnet18", TINY, 200, **SHARED).body) - 300
    assert convolutions + 2 * 4_800 == 11_176_512  # BatchNorm, which is not built
    wide = norm_sizes(module_of("wrn16_2", CIFAR))
    assert (len(wide), sum(wide)) == (13, 2 * (16 + 4 * 32 + 4 * 64 + 4 * 128))
    mobile = module_of("mobilenet_v3_small", PHOTO, 1000)
    assert (size(mobile.body.maps), size(mobile.body.fc)) == (927_008, 590_848)
    task = build_task(ModelSettings("fedpce_resnet18", width=64), CIFAR, 10)
    assert sum(p.numel() for p in task.norm(task.init(rng.key(0))).values()) == 10_624
    assert len(task.norm_names) == 2 * 21


def generated(module, embedding=32, hidden=64):
    """Size of FedPCE's shared part: each scale and each shift from a two-layer net of its own."""
    channels = [n // 2 for n in norm_sizes(module)]
    nets = sum(2 * (embedding * hidden + hidden + hidden * c + c) for c in channels)
    return size(module) - 2 * sum(channels) + nets


@pytest.mark.parametrize(
    ("width", "classes", "shared"),
    [(64, 10, 11_943_626), (62, 10, 11_235_384), (64, 100, 11_989_796), (62, 100, 11_280_146 - 32)],
)
def test_sizes_with_generated_norms(width, classes, shared):
    module = module_of("fedpce_resnet18", CIFAR, classes, width=width)
    assert generated(module) == shared
    assert len(norm_sizes(module)) == 21


def test_what_fedpce_prints_of_its_sizes():
    module, narrow = (module_of("fedpce_resnet18", CIFAR, width=width) for width in (64, 62))
    base = size(module)
    assert round(100 * (generated(module) + 32 - base) / base, 1) == 6.9
    assert round(100 * (generated(narrow) + 32 - base) / base, 2) == 0.54
    assert [generated(module, hidden=h) + 32 for h in (16, 64, 256)] == [11_367_178, 11_943_658, 14_249_578]
    by_embedding = [generated(module, embedding=e) + e for e in (2, 4, 8, 16, 64)]
    assert by_embedding == [11_862_988, 11_868_366, 11_879_122, 11_900_634, 12_029_706]


def test_what_pfedfda_prints_of_its_overhead():
    """A Gaussian head (means, one covariance) against a linear one, in percent of the model."""

    def gaussian(module):
        classes, d = module.head.weight.shape
        return classes * d + d * (d + 1) // 2

    def overhead(module):
        return round(100 * (gaussian(module) - size(module.head)) / size(module), 3)

    assert overhead(module_of("emnist_cnn", MNIST, 62)) == 6.620
    assert overhead(module_of("cifar_cnn", CIFAR, 100)) == 6.837
    assert overhead(module_of("cifar_cnn", CIFAR, 10)) == 7.657
    assert overhead(module_of("resnet18", TINY, 200, **SHARED)) == 1.164
    mobile = module_of("mobilenet_v3_small", PHOTO, 1000)
    assert gaussian(mobile) == 1_548_800
    assert round(100 * (1_548_800 - 1_615_848) / size(mobile), 3) == -2.637  # against both linear layers


def test_the_table_of_the_document():
    row = r"^\| `(\w+)`(?: with `(.*?)`)? \| ([\dx]+) \| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (\d+) \|"
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Sizes")[2].partition("## Settings")[0]
    rows = re.findall(row, text, re.MULTILINE)
    assert len(rows) == text.count("\n| `") > 0
    for name, given, shape, classes, *numbers in rows:
        settings = tomllib.loads(given.replace(", ", "\n"))
        module = module_of(name, tuple(map(int, shape.split("x"))), int(classes), **settings)
        found = [size(module.body), size(module.head), size(module), module.head.weight.shape[1]]
        assert found == [int(n.replace(",", "")) for n in numbers], name


# --- shapes and multiplications -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "shape", "wanted"),
    [
        ("cifar_cnn", {}, CIFAR, 3_521_280),
        ("emnist_cnn", {}, MNIST, 1_612_800),
        ("pfedvmp_cnn", {}, MNIST, 4_261_888),
        ("pfedvmp_cnn", {}, CIFAR, 7_820_800),
        ("lenet", {}, CIFAR, 650_880),
        ("resnet18", {}, CIFAR, 555_417_600),
        ("resnet18", {}, MNIST, 455_795_712),
        ("resnet18", SHARED, TINY, 148_045_824),
        ("resnet18", SHARED, CIFAR, 37_011_456),
        ("fedpce_resnet18", {}, CIFAR, 140_181_504),
        ("wrn16_2", {}, CIFAR, 101_105_664),
        ("wrn16_2", {}, MNIST, 77_183_232),
    ],
)
def test_multiplications(name, settings, shape, wanted):
    module = module_of(name, shape, **settings)
    assert multiplications(module, shape) - module.head.weight.numel() == wanted


def test_multiplications_of_mobilenet():
    module = module_of("mobilenet_v3_small", PHOTO, 1000)
    assert multiplications(module.body.maps, PHOTO) == 54_896_576


RESNET = ["body.group1", "body.group2", "body.group3", "body.group4"]


@pytest.mark.parametrize(
    ("name", "settings", "shape", "layers", "wanted"),
    [
        (
            "cifar_cnn",
            {},
            CIFAR,
            ["body.conv1", "body.conv2", "body.conv3", "body.pool3", "body"],
            [(16, 28, 28), (32, 12, 12), (64, 6, 6), (64, 3, 3), (128,)],
        ),
        (
            "emnist_cnn",
            {},
            MNIST,
            ["body.conv1", "body.conv2", "body.pool2"],
            [(16, 24, 24), (32, 10, 10), (32, 5, 5)],
        ),
        ("pfedvmp_cnn", {}, MNIST, ["body.flatten", "body"], [(1024,), (512,)]),
        ("pfedvmp_cnn", {}, CIFAR, ["body.flatten", "body"], [(1600,), (512,)]),
        ("lenet", {}, CIFAR, ["body.conv1", "body.conv2", "body.flatten"], [(6, 28, 28), (16, 10, 10), (400,)]),
        ("resnet18", {}, MNIST, RESNET, [(64, 28, 28), (128, 14, 14), (256, 7, 7), (512, 4, 4)]),
        (
            "resnet18",
            SHARED,
            TINY,
            ["body.conv1", *RESNET],
            [(64, 32, 32), (64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2)],
        ),
        (
            "fedpce_resnet18",
            {"width": 62},
            CIFAR,
            ["body.conv1", *RESNET, "body.final_norm"],
            [(62, 32, 32), (62, 16, 16), (124, 8, 8), (248, 4, 4), (496, 2, 2), (496,)],
        ),
        ("resnet18", {"final_norm": "map"}, CIFAR, ["body.final_norm", "body"], [(512, 4, 4), (512,)]),
        (
            "wrn16_2",
            {},
            CIFAR,
            ["body.conv1", "body.group1", "body.group2", "body.group3", "body"],
            [(16, 32, 32), (32, 32, 32), (64, 16, 16), (128, 8, 8), (128,)],
        ),
        ("mobilenet_v3_small", {}, PHOTO, ["body.maps", "body.mean", "body"], [(576, 7, 7), (576,), (1024,)]),
        ("audio_cnn", {}, (1, 49, 40), ["body.pool2", "body.pool11", "body"], [(64, 24, 20), (384, 3, 2), (384,)]),
    ],
)
def test_shapes(name, settings, shape, layers, wanted):
    shapes = shapes_of(module_of(name, shape, **settings), shape)
    assert [shapes[layer] for layer in layers] == wanted


def test_the_audio_net_has_eleven_layers():
    body = module_of("audio_cnn", (1, 49, 40)).body
    assert sum(isinstance(layer, nn.Conv2d | nn.MaxPool2d) for layer in body) == 11


# --- norms --------------------------------------------------------------------------------------------------


def standardised(x, groups, eps=1e-5):
    """NumPy: x (B, C, H, W) with mean 0 and variance 1 in each sample and group of channels."""
    out = np.empty_like(x)
    step = x.shape[1] // groups
    for b in range(len(x)):
        for first in range(0, x.shape[1], step):
            part = x[b, first : first + step]
            out[b, first : first + step] = (part - part.mean()) / np.sqrt(((part - part.mean()) ** 2).mean() + eps)
    return out


def drawn(*shape, seed=0):
    return rng.normal(rng.key(seed), shape, torch.float64)


@pytest.mark.parametrize(("channels", "groups"), [(64, 2), (96, 3), (32, 1), (48, 3), (62, 31)])
def test_one_scale_and_shift_a_group(channels, groups):
    norm = norm2d("per_group", channels).double()
    assert isinstance(norm, SharedGroupNorm)
    assert norm.weight.shape == norm.bias.shape == (groups,)
    x = 3 * drawn(2, channels, 3, 5) + 1
    assert np.allclose(norm(x).detach(), standardised(x.numpy(), groups), atol=1e-12)
    scale, shift = drawn(groups, seed=1), drawn(groups, seed=2)
    norm.load_state_dict({"weight": scale, "bias": shift})
    wanted = standardised(x.numpy(), groups)
    for channel in range(channels):
        group = channel // (channels // groups)
        wanted[:, channel] = wanted[:, channel] * float(scale[group]) + float(shift[group])
    assert np.allclose(norm(x).detach(), wanted, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "size", "groups"),
    [("instance", 0, 48), ("group", 0, 4), ("group", 16, 3), ("group", 32, 3), ("layer", 0, 1)],
)
def test_one_scale_and_shift_a_channel(kind, size, groups):
    norm = norm2d(kind, 48, size).double()
    scale, shift = drawn(48, seed=1), drawn(48, seed=2)
    norm.load_state_dict({"weight": scale, "bias": shift})
    x = 3 * drawn(2, 48, 3, 5) + 1
    wanted = standardised(x.numpy(), groups) * scale.numpy()[:, None, None] + shift.numpy()[:, None, None]
    assert np.allclose(norm(x).detach(), wanted, atol=1e-12)
    assert isinstance(norm2d("none", 48), nn.Identity)


def test_instance_norm_is_torchs_own():
    ours, torchs = norm2d("instance", 6), nn.InstanceNorm2d(6, affine=True)
    torchs.load_state_dict({"weight": drawn(6, seed=1).float(), "bias": drawn(6, seed=2).float()})
    ours.load_state_dict(torchs.state_dict())
    x = drawn(3, 6, 4, 5).float()
    assert torch.allclose(ours(x), torchs(x), atol=1e-6)


# --- each net against a transcription -----------------------------------------------------------------------


class Replay:
    """Takes the parameters of a net in their order and applies each to a map: a net as one reads it."""

    def __init__(self, task, params):
        self.left = [params[name] for name in task.body_names]

    def take(self, count):
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    def conv(self, x, stride=1, groups=1, bias=False, padding=None):
        weight, *rest = self.take(1 + bias)
        return F.conv2d(x, weight, *rest, stride=stride, groups=groups, padding=padding or weight.shape[-1] // 2)

    def norm(self, x, size=16):
        weight, bias = self.take(2)
        groups = x.shape[1] // np.gcd(size, x.shape[1])
        standard = torch.from_numpy(standardised(x.numpy(), groups))
        return standard * weight[:, None, None] + bias[:, None, None]


def prepared(name, shape, **settings):
    """A task, its parameters with every scale and bias moved from its start, and examples."""
    task = build_task(ModelSettings(name=name, **settings), shape, 4, dtype=torch.float64)
    params = {n: p + 0.2 * drawn(*p.shape, seed=i) for i, (n, p) in enumerate(task.init(rng.key(0)).items())}
    return task, params, drawn(2, *shape)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("resnet18", {"width": 16}),
        ("resnet18", {"width": 6, "norm": "instance", "stem_pool": True}),
        ("resnet18", {"width": 16, "stem": "imagenet"}),
        ("fedpce_resnet18", {"width": 6}),
    ],
)
def test_resnet18_as_written(name, settings):
    task, params, x = prepared(name, (2, 20, 20), **settings)
    net = Replay(task, params)
    fedpce = name == "fedpce_resnet18"
    size = 1 if fedpce or settings.get("norm") == "instance" else 16  # channels a group
    imagenet = settings.get("stem") == "imagenet"
    maps = net.conv(x, 2 if imagenet else 1)
    assert maps.shape[2:] == ((10, 10) if imagenet else (20, 20))
    maps = F.relu(net.norm(maps, size))
    if imagenet or fedpce or "stem_pool" in settings:
        maps = F.max_pool2d(maps, 3, 2, 1)
    for group in range(4):
        for block in range(2):
            change = group > 0 and block == 0
            out = F.relu(net.norm(net.conv(maps, 2 if change else 1), size))
            out = net.norm(net.conv(out), size)
            maps = F.relu(out + (net.norm(net.conv(maps, 2, padding=0), size) if change else maps))
    features = maps.mean((2, 3))
    if fedpce:
        weight, bias = net.take(2)
        centred = features - features.mean(1, keepdim=True)
        features = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight + bias
    assert not net.left
    assert torch.allclose(task.features(params, x), features, atol=1e-9)


def test_wide_resnet_as_written():
    task, params, x = prepared("wrn16_2", (1, 9, 9))
    net = Replay(task, params)
    maps = net.conv(x)
    for group in range(3):
        for block in range(2):
            active = F.relu(net.norm(maps))
            stride = 2 if group > 0 and block == 0 else 1
            out = net.conv(F.relu(net.norm(net.conv(active, stride))))
            maps = out + (net.conv(active, stride) if block == 0 else maps)
    features = F.relu(net.norm(maps)).mean((2, 3))
    assert not net.left
    assert torch.allclose(task.features(params, x), features, atol=1e-8)


def hard_sigmoid(x):
    return (x / 6 + 0.5).clamp(0, 1)


def test_mobilenet_as_written():
    task, params, x = prepared("mobilenet_v3_small", (1, 32, 32))
    net = Replay(task, params)

    def act(x, hard):
        return x * hard_sigmoid(x) if hard else F.relu(x)

    # channels after widening and after the block, squeeze and excitation, hard swish, stride
    rows = [(16, 16, 1, 0, 2), (72, 24, 0, 0, 2), (88, 24, 0, 0, 1), (96, 40, 1, 1, 2), (240, 40, 1, 1, 1)]
    rows += [(240, 40, 1, 1, 1), (120, 48, 1, 1, 1), (144, 48, 1, 1, 1), (288, 96, 1, 1, 2)]
    rows += [(576, 96, 1, 1, 1), (576, 96, 1, 1, 1)]
    maps = act(net.norm(net.conv(x, 2)), True)
    for wide, narrow, squeeze, hard, stride in rows:
        out = maps
        if wide != maps.shape[1]:
            out = act(net.norm(net.conv(out)), hard)
        out = act(net.norm(net.conv(out, stride, groups=wide)), hard)
        if squeeze:
            mean = out.mean((2, 3), keepdim=True)
            out = out * hard_sigmoid(net.conv(F.relu(net.conv(mean, bias=True)), bias=True))
        out = net.norm(net.conv(out))
        maps = maps + out if stride == 1 and maps.shape == out.shape else out
        assert maps.shape[1] == narrow
    maps = act(net.norm(net.conv(maps)), True)
    weight, bias = net.take(2)
    features = act(maps.mean((2, 3)) @ weight.T + bias, True)
    assert not net.left
    assert torch.allclose(task.features(params, x), features, atol=1e-6, rtol=1e-6)


def test_hidden_layers_of_squeeze_and_excitation():
    module = module_of("mobilenet_v3_small", PHOTO)
    hidden = [m.squeeze.weight.shape[0] for m in module.modules() if hasattr(m, "squeeze")]
    assert hidden == [8, 24, 64, 64, 32, 40, 72, 144, 144]


@pytest.mark.parametrize(
    ("name", "slope", "stages", "shape"),
    [
        ("cifar_cnn", 0.01, [0, 1, 1], CIFAR),
        ("emnist_cnn", 0.01, [0, 1], MNIST),
        ("pfedvmp_cnn", 0.1, [0, 0], MNIST),
        ("lenet", 0.0, [0, 0], CIFAR),
    ],
)
def test_small_nets_as_written(name, slope, stages, shape):
    task, params, x = prepared(name, shape)
    net = Replay(task, params)
    for padding in stages:
        weight, bias = net.take(2)
        x = F.max_pool2d(F.leaky_relu(F.conv2d(x, weight, bias, padding=padding), slope), 2)
    x = x.flatten(1)
    while net.left:
        weight, bias = net.take(2)
        x = F.leaky_relu(x @ weight.T + bias, slope)
    assert torch.allclose(task.features(params, drawn(2, *shape)), x, atol=1e-9)
    assert ((x < 0).any() and slope > 0) or (x >= 0).all()


def test_the_norm_stands_before_the_activation():
    task, params, x = prepared("pfedvmp_cnn", (1, 16, 16), norm="group", hidden=5)
    net = Replay(task, params)
    for _ in range(2):
        weight, bias = net.take(2)
        maps = F.conv2d(x, weight, bias)
        x = F.max_pool2d(F.leaky_relu(net.norm(maps, len(weight) // 4), 0.1), 2)
    weight, bias = net.take(2)
    assert torch.allclose(task.features(params, drawn(2, 1, 16, 16)), F.leaky_relu(x.flatten(1) @ weight.T + bias, 0.1))


def test_lstm_is_torchs_own_with_one_more_for_the_forget_gate():
    task, params, _ = prepared("sent140_lstm", (6,), vocabulary=11)
    torchs = nn.LSTM(300, 100, 2, batch_first=True).double()
    state = {}
    for i in (0, 1):
        bias = params[f"body.lstm{i + 1}.bias"].clone()
        bias[100:200] += 1
        state |= {f"weight_ih_l{i}": params[f"body.lstm{i + 1}.weight_x"], f"bias_ih_l{i}": bias}
        state |= {f"weight_hh_l{i}": params[f"body.lstm{i + 1}.weight_h"], f"bias_hh_l{i}": 0 * bias}
    torchs.load_state_dict(state)
    tokens = torch.tensor([[1, 10, 0, 3, 3, 7], [2, 2, 2, 2, 2, 2]])
    words = build_module(ModelSettings("sent140_lstm", vocabulary=11), (6,), 2).body.words(tokens).double()
    last = torchs(words)[0][:, -1]
    wanted = last @ params["body.fc.weight"].T + params["body.fc.bias"]
    assert torch.allclose(task.features(params, tokens), wanted, atol=1e-10)


@pytest.mark.parametrize("name", ["resnet18", "wrn16_2", "mobilenet_v3_small", "audio_cnn"])
def test_initial_weights_of_the_deep_nets(name):
    task = build_task(ModelSettings(name), CIFAR, 10)
    params = task.init(rng.key(0))
    for leaf, value in params.items():
        if value.ndim == 4 and value.numel() > 20_000:
            fan_out = value.shape[0] * value.shape[2] * value.shape[3]
            assert isclose(value.std(), (2 / fan_out) ** 0.5, rel_tol=0.05), leaf
        if leaf in task.norm_names or (leaf.endswith("bias") and "fc" not in leaf and "head" not in leaf):
            assert (value == (1.0 if leaf.endswith("weight") else 0.0)).all(), leaf
    bound = params["head.weight"].shape[1] ** -0.5
    assert 0.9 * bound < params["head.weight"].abs().max() <= bound
