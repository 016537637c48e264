"""FedPCE's degradations: against formulas written out, alike in a loop and under vmap, and wired by the settings."""

import colorsys
import itertools

import numpy as np
import pytest
import torch

from bespoke.core import rng, tree
from bespoke.data import DATASETS, DataSettings, Examples, partitioned
from bespoke.data.images import degrade, views
from bespoke.data.images.views import MOMENTS, compose, constants
from bespoke.errors import UserError

KINDS = ("noise",) * 4 + ("jitter",) * 4 + ("imbalance",) * 4
RANKS = (0, 1, 2, 3) * 3


def images(count=5, size=8, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.random((count, 3, size, size))
    x[0, :, :2] = x[0, :1, :2]  # some grey pixels
    x[0, :, 0, 0], x[0, :, 0, 1] = 0.0, 1.0
    return torch.tensor(x, dtype=torch.float32)


# --- formulas -----------------------------------------------------------------------------------------------------


def clip(x):
    return np.minimum(np.maximum(x, 0.0), 1.0)


def by_hand(image, op, amount):
    """One colour change of one image (3, H, W), pixel by pixel."""
    r, g, b = image
    luma = 0.2989 * r + 0.587 * g + 0.114 * b
    if op == 0:
        return clip(amount * image)
    if op == 1:
        return clip(amount * image + (1 - amount) * luma.mean())
    if op == 2:
        return clip(amount * image + (1 - amount) * luma[None])
    out = np.empty_like(image)
    for place in np.ndindex(r.shape):
        h, s, v = colorsys.rgb_to_hsv(*image[(slice(None), *place)])
        out[(slice(None), *place)] = colorsys.hsv_to_rgb((h + amount) % 1.0, s, v)
    return out


@pytest.mark.parametrize("op", [0, 1, 2, 3])
@pytest.mark.parametrize("amount", [0.5, 0.9, 1.0, 1.5, -0.5, -0.2, 0.3])
def test_each_colour_change_is_its_formula(op, amount):
    x = images()
    change = (degrade.brightness, degrade.contrast, degrade.saturation, degrade.hue)[op]
    found = change(x, torch.tensor(amount)).numpy()
    for image, got in zip(x.double().numpy(), found, strict=True):
        assert np.abs(got - by_hand(image, op, amount)).max() < 2e-6


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_four_changes_follow_any_order(order):
    x, amounts = images(2), (0.7, 1.4, 0.6, 0.2)
    found = degrade.jitter(x, torch.tensor(amounts), torch.tensor(order)).numpy()
    for image, got in zip(x.double().numpy(), found, strict=True):
        for op in order:
            image = by_hand(image, op, amounts[op])
        assert np.abs(got - image).max() < 1e-5


def test_orders_differ():
    x, amounts = images(), torch.tensor([1.4, 1.5, 1.4, 0.3])
    found = [degrade.jitter(x, amounts, torch.tensor(o)) for o in itertools.permutations(range(4))]
    assert all((a - b).abs().max() > 1e-4 for a, b in itertools.combinations(found, 2))


def test_noise_has_its_variance_and_is_not_clipped():
    x = torch.full((20, 3, 32, 32), 0.5)
    for variance in (0.005, 1.0):
        added = degrade.noise(rng.key(3), x, torch.tensor(variance)) - x
        assert added.mean().item() == pytest.approx(0, abs=4 * (variance / x.numel()) ** 0.5)
        assert added.var().item() == pytest.approx(variance, rel=0.02)
    assert (x + added).min() < 0 and (x + added).max() > 1
    assert torch.equal(degrade.noise(rng.key(3), x, torch.tensor(0.0)), x)


# --- parameters ---------------------------------------------------------------------------------------------------


def test_parameters_rise_evenly_and_are_permuted():
    kinds = ("noise",) * 10 + ("jitter",) * 10 + ("imbalance",) * 10
    found = degrade.parameters(kinds, tuple(range(10)) * 3, np.random.default_rng(0))
    assert found["variance"][:10].tolist() == pytest.approx(np.linspace(0.005, 1, 10).tolist())
    assert not found["variance"][10:].any()
    assert found["jitter"].tolist() == [kind == "jitter" for kind in kinds]
    amounts = found["amounts"][10:20]
    for j, (low, high) in enumerate([(0.5, 1.5)] * 3 + [(-0.5, 0.5)]):
        assert sorted(amounts[:, j].tolist()) == pytest.approx(np.linspace(low, high, 10).tolist())
    orders = [amounts[:, j].argsort().tolist() for j in range(4)]
    assert len({tuple(o) for o in orders}) == 4  # four permutations of their own
    assert found["amounts"][0].tolist() == [1, 1, 1, 0]
    assert all(sorted(order) == [0, 1, 2, 3] for order in found["order"].tolist())
    assert len({tuple(order) for order in found["order"][10:20].tolist()}) > 1


def test_ranks_carry_the_parameters_whatever_the_order_of_clients():
    """New clients are moved to the end, but keep the variance of their number."""
    kinds, ranks = ("noise", "noise", "jitter", "noise"), (0, 2, 0, 1)
    found = degrade.parameters(kinds, ranks, np.random.default_rng(0))
    assert found["variance"].tolist() == pytest.approx([0.005, 1.0, 0.0, 0.5025])


# --- the transform ------------------------------------------------------------------------------------------------


def parts(count=12, batch=6, settings=DataSettings()):  # noqa: B008
    x = torch.tensor(np.random.default_rng(1).integers(0, 256, (count, batch, 3, 8, 8), dtype=np.uint8))
    keys = rng.fold_in(rng.key(5), torch.arange(count))
    extra = degrade.parameters(KINDS, RANKS, np.random.default_rng(2))
    return keys, x, extra | constants(settings, count, x.numpy()[:, 0])


@pytest.mark.parametrize("jitter_order", ["client", "call"])
@pytest.mark.parametrize("noise_at", ["before", "after"])
@pytest.mark.parametrize("noise_scale", ["unit", "image"])
@pytest.mark.parametrize("train", [True, False])
def test_a_loop_over_clients_equals_vmap(jitter_order, noise_at, noise_scale, train):
    order = {"jitter_order": jitter_order, "noise_at": noise_at, "noise_scale": noise_scale}
    settings = DataSettings(degrade="fedpce", augment="fedpce", **order)
    transform, (keys, x, extra) = compose(settings), parts()
    one_by_one = torch.stack(
        [transform(keys[i], x[i], tree.map(lambda leaf, i=i: leaf[i], extra), train) for i in range(12)]
    )
    together = torch.func.vmap(lambda k, z, e: transform(k, z, e, train))(keys, x, extra)
    assert (one_by_one - together).abs().max() <= 1e-6
    again = torch.func.vmap(lambda k, z, e: transform(k, z, e, train))(keys, x, extra)
    assert torch.equal(together, again)
    assert one_by_one.dtype == torch.float32 and torch.isfinite(one_by_one).all()


def test_each_kind_is_degraded_in_its_own_way():
    settings = DataSettings(degrade="fedpce", normalise="cifar")
    transform, (keys, x, extra) = compose(settings), parts(settings=settings)
    mean, std = (torch.tensor(m)[:, None, None] for m in MOMENTS["cifar"])
    for i, kind in enumerate(KINDS):
        own = tree.map(lambda leaf, i=i: leaf[i], extra)
        plain = x[i] / 255.0
        found = {train: transform(keys[i], x[i], own, train) * std + mean for train in (True, False)}
        assert torch.equal(found[True], found[False])  # at every access, in training and in evaluation
        later = transform(keys[(i + 1) % 12], x[i], own, False) * std + mean
        if kind == "noise":
            wanted = degrade.noise(rng.fold_in(keys[i], 0), plain, own["variance"])
            assert not torch.allclose(later, found[False])  # new at every access
        elif kind == "jitter":
            wanted = degrade.jitter(plain, own["amounts"], own["order"])
            assert torch.equal(later, found[False])  # always the same
        else:
            wanted = plain
        assert (found[False] - wanted).abs().max() < 1e-5


def test_the_order_of_changes_can_be_drawn_at_every_call():
    transform, (keys, x, extra) = compose(DataSettings(degrade="fedpce", jitter_order="call")), parts()
    own = tree.map(lambda leaf: leaf[KINDS.index("jitter")], extra)
    found = {transform(rng.fold_in(keys[0], i), x[0], own, True).sum().item() for i in range(30)}
    assert 5 < len(found) <= 24


def test_padding_changes_nothing():
    """A row's noise depends on its place in the batch, not on how many rows follow it."""
    transform = compose(DataSettings(degrade="fedpce", augment="fedpce"))
    keys, x, extra = parts()
    own = tree.map(lambda leaf: leaf[2], extra)
    assert torch.equal(transform(keys[2], x[2], own, True)[:4], transform(keys[2], x[2][:4], own, True))


def test_only_training_images_are_augmented():
    transform, (keys, x, extra) = compose(DataSettings(augment="fedpce")), parts()
    own = tree.map(lambda leaf: leaf[0], extra)
    assert torch.allclose(transform(keys[0], x[0], own, False), x[0] / 127.5 - 1, atol=1e-6)
    assert not torch.allclose(transform(keys[0], x[0], own, True), x[0] / 127.5 - 1, atol=1e-2)


@pytest.mark.parametrize("noise_at", ["before", "after"])
def test_noise_comes_before_or_after_the_augmentation(noise_at):
    """Erased pixels are flat if noise came before, and noisy if it came after."""
    transform = compose(DataSettings(degrade="fedpce", augment="fedpce", noise_at=noise_at))
    own = {
        "variance": torch.tensor(0.04),
        "jitter": torch.tensor(False),
        "amounts": torch.tensor([1.0, 1, 1, 0]),
        "order": torch.arange(4),
        "mean": torch.full((1, 1, 1), 0.5),
        "deviation": torch.full((1, 1, 1), 0.5),
    }
    x = torch.full((40, 3, 32, 32), 255, dtype=torch.uint8)
    flat = (transform(rng.key(1), x, own, True) == 0).float().mean().item()
    assert (flat > 0.02) == (noise_at == "before")


def test_noise_may_be_on_the_scale_of_each_image():
    """As the code does it: normalised, scaled to [0, 1] by the image's least and largest value, noise, and back."""
    x = torch.tensor(np.random.default_rng(2).integers(40, 180, (5, 3, 8, 8), dtype=np.uint8))
    x[0] //= 4  # a dark image of little contrast
    mean, deviation = (torch.tensor(values)[:, None, None] for values in ((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)))
    own = {
        "variance": torch.tensor(0.3),
        "jitter": torch.tensor(False),
        "amounts": torch.tensor([1.0, 1, 1, 0]),
        "order": torch.arange(4),
        "mean": mean,
        "deviation": deviation,
    }
    unit, image = (
        compose(DataSettings(degrade="fedpce", noise_scale=scale))(rng.key(4), x, own, True)
        for scale in ("unit", "image")
    )
    clean = ((x / 255.0 - mean) / deviation).double().numpy()
    drawn = ((unit - torch.tensor(clean)) * deviation).numpy()  # the same draws, on the scale of the pixels
    low, high = (f(clean, axis=(1, 2, 3), keepdims=True) for f in (np.min, np.max))
    theirs = ((clean - low) / (high - low) + drawn) * (high - low) + low
    np.testing.assert_allclose(image.numpy(), theirs, atol=1e-5)


# --- from the settings --------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(monkeypatch):
    """A data set of 720 small colour images of four classes, a sixth of them official test rows."""
    x = np.random.default_rng(3).integers(0, 256, (720, 3, 8, 8), dtype=np.uint8)
    examples = Examples(x, np.arange(720) % 4, 4, official_test=np.arange(720) >= 600)
    monkeypatch.setitem(DATASETS, "pictures", DATASETS.read(lambda: examples, "here"))
    return x


def test_a_federation_of_fedpce(pictures):
    settings = DataSettings(
        name="pictures", partition="degradations", degrade="fedpce", clients=12, new_clients=3, folds=5, fold=1
    )
    pool, found = partitioned(settings, 0)
    assert (pool.num_clients, pool.total_clients) == (9, 12)
    assert [name.split("-")[0] for name in pool.names] == ["noise"] * 3 + ["jitter"] * 3 + ["imbalance"] * 3 + [
        "noise",
        "jitter",
        "imbalance",
    ]
    noisy = [name.startswith("noise") for name in pool.names]
    assert (pool.extra["variance"] > 0).tolist() == noisy
    spread = np.linspace(0.005, 1, 4)
    for name, variance in zip(pool.names, pool.extra["variance"].tolist(), strict=True):
        if name.startswith("noise"):
            assert variance == pytest.approx(spread[int(name.split("-")[1])])
    assert found.conditions[0] == f"noise of variance {pool.extra['variance'][0].item():.4g}"
    assert found.conditions[3].startswith("jitter by ")
    for name, condition in zip(pool.names, found.conditions, strict=True):
        if name.startswith("imbalance"):  # alpha from 0.1 to 10 over two pairs
            assert condition == f"imbalance by {(0.1, 10)[int(name.split('-')[1]) // 2]:g}"
    again, _ = partitioned(settings, 0)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(pool.extra), tree.leaves(again.extra), strict=True))


def test_settings_that_make_no_sense(pictures):
    for change, sentence in [
        ({"degrade": "fedpce"}, 'set partition = "degradations"'),
        ({"degrade": "fedpce", "name": "digits"}, "degrade needs 8-bit images, which 'digits' does not"),
        ({"augment": "fedpce", "name": "gaussian"}, "augment needs 8-bit images"),
        ({"normalise": "cifar", "name": "gaussian"}, "normalise needs 8-bit images"),
    ]:
        with pytest.raises(UserError, match=sentence):
            partitioned(DataSettings(**({"name": "pictures", "clients": 6} | change)), 0)


def test_grey_images_have_no_colours_to_change(monkeypatch):
    grey = Examples(np.zeros((60, 1, 8, 8), np.uint8), np.arange(60) % 3, 3)
    monkeypatch.setitem(DATASETS, "grey", DATASETS.read(lambda: grey, "here"))
    for change in ({"degrade": "fedpce", "partition": "degradations"}, {"normalise": "imagenet"}):
        with pytest.raises(UserError, match=r"needs three colour channels, but 'grey' has 1"):
            partitioned(DataSettings(name="grey", clients=6, **change), 0)
    pool, _ = partitioned(DataSettings(name="grey", clients=6, partition="iid", augment="fedpce"), 0)
    own = tree.map(lambda leaf: leaf[0], pool.extra)
    assert pool.transform(rng.key(0), pool.x[:2], own, True).shape == (2, 1, 8, 8)


@pytest.mark.parametrize("normalise", ["symmetric", "cifar", "imagenet"])
def test_normalisation(normalise):
    x = torch.tensor(np.random.default_rng(0).integers(0, 256, (2, 3, 4, 4), dtype=np.uint8))
    settings = DataSettings(normalise=normalise)
    own = tree.map(lambda leaf: leaf[0], constants(settings, 2, x.numpy()))
    found = compose(settings)(rng.key(0), x, own, True)
    for c in range(3):
        mean, std = (m[c % len(m)] for m in MOMENTS[normalise])
        assert torch.allclose(found[:, c], (x[:, c] / 255.0 - mean) / std, atol=1e-6)


def test_pixels_are_standardised_by_their_own_moments(monkeypatch):
    """FedProx's MNIST: (x - mean) / (deviation + 0.001) of each pixel on the scale 0..255, over all rows of the set."""
    x = np.random.default_rng(0).integers(0, 256, (90, 3, 4, 5), dtype=np.uint8)
    x[:, 0, 0, 0] = 0  # as at the border of a digit
    examples = Examples(x, np.arange(90) % 3, 3, official_test=np.arange(90) >= 60)
    monkeypatch.setitem(DATASETS, "pixels", DATASETS.read(lambda: examples, "here"))
    monkeypatch.setattr(views, "PIECE", 1000)  # several pieces
    pool, _ = partitioned(DataSettings(name="pixels", partition="iid", clients=6, new_clients=2, normalise="pixel"), 0)
    values = x.astype(np.float64)
    wanted = (values - values.mean(axis=0)) / (values.std(axis=0) + 0.001)
    for client in (0, 5):
        own = tree.map(lambda leaf, client=client: leaf[client], pool.extra)
        found = pool.transform(rng.key(0), pool.x, own, True)
        assert np.abs(found.numpy() - wanted).max() < 2e-5
        assert (found[:, 0, 0, 0] == 0.0).all()
    assert all(leaf.stride(0) == 0 for leaf in tree.leaves(pool.extra))  # one copy for all clients


@pytest.mark.parametrize("change", [{"corrupt": "fog:3"}, {"augment": "fedpce"}, {"degrade": "fedpce"}])
def test_pixels_that_are_changed_later_have_no_moments_of_their_own(pictures, change):
    partition = "degradations" if "degrade" in change else "iid"
    with pytest.raises(UserError, match=f"which images that {next(iter(change))} changes do not have: leave one of"):
        partitioned(DataSettings(name="pictures", clients=6, partition=partition, normalise="pixel", **change), 0)
