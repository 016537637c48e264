"""Corruptions: each against its rule written out image by image, then assignment, cache and refusals."""

import colorsys
import io
import itertools
import math

import numpy as np
import pytest
import scipy.ndimage
import torch
from PIL import Image

from bespoke.data import DATASETS, DataSettings, Examples, partitioned
from bespoke.data.images import cifar_s, weather
from bespoke.data.images.corrupt import CORRUPTIONS, Corruption, Pair, corrupt, disk_kernel, generator, parse
from bespoke.data.sources import store
from bespoke.errors import UserError

ROWS = (3, 11, 59_999, 40)


def scenes(count=4, size=32, channels=3):
    """Images that look real enough: smooth shading, hard edges, dark and bright corners; uint8 (n, C, H, W)."""
    draw = np.random.default_rng(5)
    line = np.linspace(0, 1, size)
    images = []
    for i in range(count):
        image = draw.random((3, 1, 1)) * line[:, None] + draw.random((3, 1, 1)) * line[None, :]
        top, left = draw.integers(2, size - 12, 2)
        image[:, top : top + 9, left : left + 9] = draw.random((3, 1, 1))
        image += 0.05 * draw.standard_normal(image.shape)
        image[:, :3, :3], image[:, -3:, -3:] = 0.0, 1.0
        images.append(np.clip(image * (0.6 + 0.15 * i), 0, 1))
    return (255 * np.stack(images)).round().astype(np.uint8)[:, :channels]


def real():
    """Four images of CIFAR-10 where it is here, and the drawn ones."""
    if not store.holds("cifar10"):
        return scenes()
    return np.ascontiguousarray(store.load("cifar10").x[[0, 7, 31_415, 59_999]])


# --- the rules written out: image (H, W, 3) in [0, 1], severity, generator -> uint8 --------------------------------


def truncated(x):
    return np.array([[[int(255 * min(max(v, 0.0), 1.0) + 1e-6) for v in pixel] for pixel in row] for row in x])


def by_hand_gaussian_noise(x, s, draw):
    return truncated(x + draw.normal(0, [0.04, 0.06, 0.08, 0.09, 0.10][s - 1], x.shape))


def by_hand_shot_noise(x, s, draw):
    c = [500, 250, 100, 75, 50][s - 1]
    return truncated(draw.poisson(x * c) / c)


def by_hand_impulse_noise(x, s, draw):
    amount = [0.01, 0.02, 0.03, 0.05, 0.07][s - 1]
    out = x.copy()
    u = draw.random(x.shape)
    for place in np.ndindex(x.shape):
        if u[place] < amount:
            out[place] = 1.0 if u[place] < amount / 2 else 0.0
    return truncated(out)


def by_hand_defocus_blur(x, s, draw):
    r, blur = [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)][s - 1]
    grid = np.arange(-8, 9)
    disk = np.array([[float(i * i + j * j <= r * r) for j in grid] for i in grid])
    g = np.exp(-(np.arange(-1, 2) ** 2) / (2 * blur**2))
    kernel = scipy.ndimage.convolve(disk / disk.sum(), np.outer(g, g) / g.sum() ** 2, mode="mirror")
    return truncated(np.stack([scipy.ndimage.correlate(x[:, :, c], kernel, mode="mirror") for c in range(3)], axis=2))


def by_hand_motion_blur(x, s, draw):
    radius, sigma = [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)][s - 1]
    angle = math.radians(draw.uniform(-45, 45))
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    out = np.zeros_like(x)
    for y in range(len(x)):
        for z in range(x.shape[1]):
            for i, weight in enumerate(weights):
                row = y + math.ceil(i * math.sin(angle) - 0.5)
                column = z + math.ceil(i * math.cos(angle) - 0.5)
                out[y, z] += weight * x[min(max(row, 0), len(x) - 1), min(max(column, 0), x.shape[1] - 1)]
    return np.round(255 * out / sum(weights)).astype(int)


def plasma_by_hand(draw, size, decay):
    """Diamond and square, point by point; draws are taken in the order of the rule."""
    field, step, wibble = np.zeros((size, size)), size, 100.0
    while step >= 2:
        half = step // 2
        cells = range(0, size, step)
        fresh = {
            kind: iter(draw.uniform(-wibble, wibble, (len(cells),) * 2).flatten() * wibble)
            for kind in ("centre", "top", "side")
        }
        at = lambda i, j: field[i % size, j % size]  # noqa: E731
        for i in cells:
            for j in cells:
                corners = at(i, j) + at(i + step, j) + at(i, j + step) + at(i + step, j + step)
                field[i + half, j + half] = corners / 4 + next(fresh["centre"])
        for i in cells:
            for j in cells:
                around = at(i + half, j + half) + at(i - half, j + half) + at(i, j) + at(i, j + step)
                field[i, j + half] = around / 4 + next(fresh["top"])
        for i in cells:
            for j in cells:
                around = at(i + half, j + half) + at(i + half, j - half) + at(i, j) + at(i + step, j)
                field[i + half, j] = around / 4 + next(fresh["side"])
        step, wibble = half, wibble / decay
    return (field - field.min()) / (field.max() - field.min())


def by_hand_fog(x, s, draw):
    a, decay = [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)][s - 1]
    return truncated((x + a * plasma_by_hand(draw, 32, decay)[:, :, None]) * x.max() / (x.max() + a))


def by_hand_brightness(x, s, draw):
    added = [0.05, 0.1, 0.15, 0.2, 0.3][s - 1]
    out = np.empty_like(x)
    for place in np.ndindex(x.shape[:2]):
        h, sat, v = colorsys.rgb_to_hsv(*x[place])
        out[place] = colorsys.hsv_to_rgb(h, sat, min(v + added, 1.0))
    return truncated(out)


def by_hand_contrast(x, s, draw):
    c = [0.75, 0.5, 0.4, 0.3, 0.15][s - 1]
    means = [x[:, :, channel].mean() for channel in range(3)]
    return truncated(np.stack([c * x[:, :, i] + (1 - c) * means[i] for i in range(3)], axis=2))


def by_hand_frost(x, s, draw):
    a, b = [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)][s - 1]
    picture = weather.frost_picture(int(draw.integers(5)))
    top, left = int(draw.integers(picture.shape[0] - 32)), int(draw.integers(picture.shape[1] - 32))
    return truncated(a * x + b * picture[top : top + 32, left : left + 32])


def by_hand_jpeg_compression(x, s, draw):
    file = io.BytesIO()
    Image.fromarray((255 * x).round().astype(np.uint8)).save(file, "JPEG", quality=[80, 65, 58, 50, 40][s - 1])
    return np.array(Image.open(file)).astype(int)


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_each_corruption_is_its_rule_written_out(name, severity):
    pair, x = Pair(name, severity), real()
    found = corrupt(x, pair, ROWS)
    assert found.dtype == np.uint8 and found.shape == x.shape
    for image, row, got in zip(x, ROWS, found, strict=True):
        wanted = globals()[f"by_hand_{name}"](image.transpose(1, 2, 0) / 255.0, severity, generator(pair, row))
        assert np.array_equal(got.transpose(1, 2, 0), wanted)


@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_a_higher_severity_is_farther_from_the_image(name):
    x = scenes(96) // 2 if name == "frost" else scenes(24)  # dark ones: nothing is clipped
    distance = []
    for severity in range(1, 6):
        found = corrupt(x, Pair(name, severity), range(len(x)))
        if name == "frost":  # it darkens as it covers: what counts is how little the image can be seen
            distance.append(1 - np.corrcoef(found.flatten(), x.flatten())[0, 1])
        else:
            distance.append(np.abs(found.astype(int) - x).mean())
    slack = 0.6 if name == "motion_blur" else 0.0  # severities 3 and 4 are nearly the same
    assert all(b > a - slack for a, b in itertools.pairwise(distance))
    assert distance[4] > 1.1 * distance[0] > 0.01


@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_an_image_is_corrupted_alike_wherever_it_lies(name):
    """Its randomness depends on corruption, severity and row: not on its company, order or number of calls."""
    x = scenes(6)
    rows = np.array([5, 2, 9, 100, 7, 1])
    together = corrupt(x, Pair(name, 3), rows)
    assert np.array_equal(together[::-1], corrupt(x[::-1], Pair(name, 3), rows[::-1]))
    assert np.array_equal(together[2:3], corrupt(x[2:3], Pair(name, 3), [9]))
    random = name in ("gaussian_noise", "shot_noise", "impulse_noise", "motion_blur", "fog", "frost")
    assert np.array_equal(together[:1], corrupt(x[:1], Pair(name, 3), [6])) != random


def test_batches_of_a_thousand_leave_no_seam(monkeypatch):
    x = scenes(7)
    whole = corrupt(x, Pair("shot_noise", 2), range(7))
    monkeypatch.setattr("bespoke.data.images.corrupt._AT_ONCE", 3)
    assert np.array_equal(corrupt(x, Pair("shot_noise", 2), range(7)), whole)


@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_other_shapes_can_be_corrupted(name):
    for x in (scenes(2, channels=1), scenes(2, size=28), scenes(1, size=64)):
        out = corrupt(x, Pair(name, 5), range(len(x)))
        assert out.shape == x.shape and not np.array_equal(out, x)


@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_black_and_white_images_stay_in_range(name):
    """Nothing wraps around at the ends of the bytes."""
    for level in (0, 255):
        flat = np.full((1, 3, 32, 32), level, dtype=np.uint8)
        out = corrupt(flat, Pair(name, 5), [0]).astype(int)
        if name in ("contrast", "jpeg_compression", "defocus_blur", "motion_blur"):
            assert np.abs(out - level).max() <= 1
        elif level == 0:
            assert out.mean() < 130
        else:
            assert out.mean() > 120


def test_the_noise_has_its_moments():
    grey = np.full((30, 3, 32, 32), 128, dtype=np.uint8)
    rows = range(30)
    noise = corrupt(grey, Pair("gaussian_noise", 3), rows) / 255.0
    assert noise.std() == pytest.approx(0.08, rel=0.02)
    shots = corrupt(grey, Pair("shot_noise", 5), rows) / 255.0
    assert shots.var() == pytest.approx(128 / 255 / 50, rel=0.05)
    hit = corrupt(grey, Pair("impulse_noise", 5), rows)
    assert (hit != 128).mean() == pytest.approx(0.07, rel=0.05)
    assert (hit == 0).mean() == pytest.approx((hit == 255).mean(), rel=0.1)


@pytest.mark.parametrize(
    ("constants", "centre", "edge", "corner"),
    [
        ((0.3, 0.4), 0.845, 0.037, 0.0016),
        ((0.4, 0.5), 0.619, 0.084, 0.011),
        ((0.5, 0.6), 0.445, 0.111, 0.028),
        ((1, 0.2), 0.2, 0.2, 0.0),
        ((1.5, 0.1), 1 / 9, 1 / 9, 1 / 9),
    ],
)
def test_defocus_kernels(constants, centre, edge, corner):
    kernel = disk_kernel(*constants)
    assert kernel.sum() == pytest.approx(1.0)
    assert (kernel[2, 2], kernel[1, 2], kernel[1, 1]) == pytest.approx((centre, edge, corner), abs=6e-4)


def test_the_frost_is_drawn_and_says_so():
    assert CORRUPTIONS["frost"].label == "frost-like"
    assert str(Pair("frost", 2)) == "frost-like:2"
    for number, (height, width) in enumerate(weather.FROST_SIZES):
        picture = weather.frost_picture(number)
        assert picture.shape == (height, width, 3)
        assert picture.min() >= 0 and picture.max() <= 1
        assert picture.std() > 0.1  # a texture, not a veil
        assert picture[:, :, 2].mean() > picture[:, :, 0].mean()  # pale blue
    assert not np.array_equal(weather.frost_picture(1), weather.frost_picture(2))


# --- who gets what ------------------------------------------------------------------------------------------------


def test_ten_pairs_as_in_the_released_code():
    pairs = cifar_s.assign(DataSettings(corrupt="cifar_s"), 100)
    assert pairs[50:] == [None] * 50
    ten = ["motion_blur:1", "defocus_blur:2", "gaussian_noise:3", "shot_noise:4", "impulse_noise:5"]
    ten += ["frost:1", "fog:2", "jpeg_compression:3", "brightness:4", "contrast:5"]
    assert [f"{p.name}:{p.severity}" for p in pairs[:50]] == 5 * ten


def test_fifty_pairs_as_in_the_text():
    pairs = cifar_s.assign(DataSettings(corrupt="cifar_s", pairs="paper"), 100)
    assert len(set(pairs[:50])) == 50
    assert pairs[:2] == [Pair("motion_blur", 1), Pair("defocus_blur", 1)]
    assert pairs[9:11] == [Pair("contrast", 1), Pair("motion_blur", 2)]
    assert pairs[49] == Pair("contrast", 5)


def test_one_pair_for_half_the_new_or_all_clients():
    settings = {"corrupt": "fog:3", "new_clients": 3}
    fog = Pair("fog", 3)
    assert cifar_s.assign(DataSettings(**settings), 8) == [fog] * 4 + [None] * 4
    assert cifar_s.assign(DataSettings(**settings, corrupt_clients="new"), 8) == [None] * 5 + [fog] * 3
    assert cifar_s.assign(DataSettings(**settings, corrupt_clients="all"), 8) == [fog] * 8
    assert cifar_s.assign(DataSettings(), 3) == [None] * 3
    with pytest.raises(UserError, match=r"corrupt_clients = 'new' selects no client: set .*new_clients"):
        cifar_s.assign(DataSettings(corrupt="fog:3", corrupt_clients="new"), 8)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gausian_noise:3", "no corruption 'gausian_noise' .did you mean 'gaussian_noise'"),
        ("cifars", "did you mean 'cifar_s'"),
        ("zzz:1", "there are cifar_s, motion_blur, .*contrast"),
        ("fog", "give a severity from 1 to 5, as in 'fog:3'"),
        ("fog:6", "severity from 1 to 5"),
        ("fog:0", "severity from 1 to 5"),
    ],
)
def test_names_that_are_wrong(text, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(text)
    with pytest.raises(UserError, match=sentence):  # before any data is read
        partitioned(DataSettings(name="cifar10", corrupt=text), 0)


# --- from the settings to the pool --------------------------------------------------------------------------------


@pytest.fixture
def pictures(monkeypatch, tmp_path):
    """A data set of 60 images, and a folder of data sets of its own."""
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "data"))
    x = scenes(60)
    monkeypatch.setitem(DATASETS, "pictures", DATASETS.read(lambda: Examples(x, np.arange(60) % 3, 3), "here"))
    return x


def federation(seed=0, **keys):
    keys = {"partition": "iid", "clients": 20, "corrupt": "cifar_s"} | keys
    return partitioned(DataSettings(name="pictures", **keys), seed)


def test_half_of_the_clients_see_corrupted_images(pictures):
    pool, found = federation(validation=0.5)
    assert found.conditions[:3] == ("motion blur:1", "defocus blur:2", "Gaussian noise:3")
    assert found.conditions[10:] == ("clean",) * 10
    assert min(*pool.train.sizes, *pool.test.sizes, *pool.val.sizes) == 1
    for i in range(20):
        for part in (pool.train, pool.test, pool.val):
            rows = part.client(i).numpy()
            pair = cifar_s.assign(DataSettings(corrupt="cifar_s"), 20)[i]
            wanted = pictures[rows] if pair is None else corrupt(pictures[rows], pair, rows)
            assert np.array_equal(pool.x[rows].numpy(), wanted)
    clean, _ = federation(validation=0.5, corrupt="")
    assert torch.equal(clean.x, torch.tensor(pictures))
    assert not torch.equal(pool.x, clean.x)


def test_corrupted_images_are_made_once(pictures, monkeypatch, tmp_path):
    first, _ = federation()
    files = sorted((tmp_path / "data" / "derived").iterdir())
    assert [f.suffix for f in files] == [".npy", ".sha256"]
    made = []
    monkeypatch.setattr(cifar_s, "corrupt", lambda *args: made.append(args) or corrupt(*args))
    again, _ = federation()
    assert torch.equal(first.x, again.x) and not made
    federation(seed=1)  # other clients hold other rows
    assert made


@pytest.mark.parametrize("damage", ["bytes", "shape", "short", "hash", "no hash"])
def test_damaged_copies_are_made_anew(pictures, tmp_path, damage):
    first, _ = federation()
    array, digest = sorted((tmp_path / "data" / "derived").iterdir())
    whole = array.read_bytes()
    if damage == "bytes":
        array.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "shape":
        np.save(array, np.zeros((2, 3), np.uint8))
    elif damage == "short":
        array.write_bytes(whole[:100])
    elif damage == "hash":
        digest.write_text("0" * 64)
    else:
        digest.unlink()
    again, _ = federation()
    assert torch.equal(first.x, again.x)
    assert array.read_bytes() == whole


def test_a_folder_that_cannot_be_written_does_no_harm(pictures, tmp_path, monkeypatch):
    first, _ = federation()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "file"))
    again, _ = federation()
    assert torch.equal(first.x, again.x)


def test_a_full_disk_leaves_nothing_behind(pictures, tmp_path, monkeypatch):
    def full(array):
        yield b"half"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "npy", full)
    federation()
    assert list((tmp_path / "data" / "derived").iterdir()) == []


def test_only_images_of_bytes_can_be_corrupted():
    with pytest.raises(UserError, match=r"corrupt needs 8-bit images, .*not float32 of shape \(200, 20\)"):
        partitioned(DataSettings(name="gaussian", rows=200, clients=4, corrupt="fog:1"), 0)


def test_the_table_is_complete():
    assert len(CORRUPTIONS) == 10
    assert all(isinstance(c, Corruption) and len(c.constants) == 5 for c in CORRUPTIONS.values())
