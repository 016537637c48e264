"""FedPCE's augmentation: against one image at a time in plain Python, its frequencies, and vmap."""

import math

import numpy as np
import pytest
import torch

from bespoke.core import rng
from bespoke.data.images import augment
from bespoke.data.images.augment import erase, move

FILL = torch.tensor([0.4, 0.5, 0.6])[:, None, None]


def images(count, size=32, seed=0):
    return torch.tensor(np.random.default_rng(seed).random((count, 3, size, size)), dtype=torch.float32)


def draws(count, seed=0):
    return rng.uniform(rng.key(seed), (count, 5), torch.float64)


def moved_by_hand(image, u):
    """Pad, crop, flip and rotate one image (3, H, W), one after another, in float64."""
    size, fill = image.shape[-1], FILL.double().numpy()
    padded = np.tile(fill, (1, size + 8, size + 8))
    padded[:, 4 : 4 + size, 4 : 4 + size] = image
    top, left = int(u[0] * 9), int(u[1] * 9)
    out = padded[:, top : top + size, left : left + size]
    if u[2] < 0.25:
        out = out[:, :, ::-1]
    if u[3] < 0.25:
        angle, centre, turned = math.radians(15 * (2 * u[4] - 1)), (size - 1) / 2, np.tile(fill, (1, size, size))
        for row in range(size):
            for column in range(size):
                down, right = row - centre, column - centre
                source = (
                    round(math.cos(angle) * down + math.sin(angle) * right + centre),
                    round(-math.sin(angle) * down + math.cos(angle) * right + centre),
                )
                if min(source) >= 0 and max(source) < size:
                    turned[:, row, column] = out[:, source[0], source[1]]
        out = turned
    return out


def test_crop_flip_and_rotation_are_those_of_one_image_at_a_time():
    x, u = images(40), draws(40, 3)
    found = move(x, u, FILL).double().numpy()
    assert (u[:, 2] < 0.25).any() and (u[:, 3] < 0.25).any() and ((u[:, 2] < 0.25) & (u[:, 3] < 0.25)).any()
    for image, one, got in zip(x.double().numpy(), u.tolist(), found, strict=True):
        assert np.abs(got - moved_by_hand(image, one)).max() < 1e-6


def test_the_middle_of_the_draws_moves_nothing():
    x = images(3)
    still = torch.tensor([[0.5, 0.5, 0.9, 0.9, 0.5]], dtype=torch.float64).expand(3, 5)
    assert torch.equal(move(x, still, FILL), x)
    flipped = torch.tensor([[0.5, 0.5, 0.1, 0.9, 0.5]], dtype=torch.float64).expand(3, 5)
    assert torch.equal(move(x, flipped, FILL), x.flip(-1))


def test_a_positive_angle_turns_counter_clockwise():
    x = torch.zeros(1, 3, 32, 32)
    x[:, :, 15:17, 20:] = 1.0  # a hand that points to the right
    turned = move(x, torch.tensor([[0.5, 0.5, 0.9, 0.1, 1 - 1e-9]], dtype=torch.float64), FILL * 0)
    rows = torch.nonzero(turned[0, 0, :, 28])[:, 0].float().mean().item()
    assert rows == pytest.approx(15.5 - 12.5 * math.tan(math.radians(15)), abs=1.0)


def erased_by_hand(image, u):
    size = image.shape[-1]
    low, high = math.ceil(size * size / 64), size * size // 4
    if u[0] >= 0.5:
        return image
    area, ratio = low + (high - low) * u[1], 4.0 ** (2 * u[2] - 1)
    tall = min(max(round(math.sqrt(area * ratio)), 1), size)
    wide = round(area / tall)
    wide = min(max(wide, math.ceil(low / tall)), high // tall)
    wide = min(max(wide, 1), size)
    top, left = int(u[3] * (size - tall + 1)), int(u[4] * (size - wide + 1))
    out = image.copy()
    for row in range(top, top + tall):
        for column in range(left, left + wide):
            out[:, row, column] = FILL[:, 0, 0].double().numpy()
    return out


@pytest.mark.parametrize("size", [32, 28, 8])
def test_erasing_is_that_of_one_image_at_a_time(size):
    x, u = images(60, size), draws(60, 4)
    found = erase(x, u, FILL).double().numpy()
    for image, one, got in zip(x.double().numpy(), u.tolist(), found, strict=True):
        assert np.abs(got - erased_by_hand(image, one)).max() < 1e-6


def test_erased_rectangles_have_16_to_256_pixels():
    u = draws(5000, 1)
    u[:, 0] = 0.0
    gone = (erase(torch.zeros(5000, 1, 32, 32), u, torch.ones(1, 1, 1)) == 1)[:, 0]
    pixels = gone.sum(dim=(1, 2))
    assert pixels.min() == 16 and pixels.max() == 256
    assert pixels.float().mean().item() == pytest.approx(136, rel=0.03)  # uniform in between
    tall, wide = gone.any(dim=2).sum(dim=1), gone.any(dim=1).sum(dim=1)
    assert torch.equal(tall * wide, pixels)  # a rectangle
    ratio = tall / wide
    assert ratio.min() > 0.15 and ratio.max() < 7  # 1/4 to 4 before whole pixels
    assert (ratio > 1).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_frequencies():
    """Flip .25, rotation .25, erasing .5, and each of 81 crops as often as any other."""
    count = 20_000
    u = rng.uniform(rng.key(9), (count, augment.DRAWS), torch.float64)
    mark = torch.zeros(count, 1, 16, 16)
    mark[:, :, 8, 8] = 1.0
    still = u[:, :5].clone()
    still[:, 2:4] = 0.9
    places = move(mark, still, torch.zeros(1, 1, 1)).flatten(1).argmax(dim=1)
    found, hits = places.unique(return_counts=True)
    assert len(found) == 81
    assert hits.min() > 0.7 * count / 81 and hits.max() < 1.3 * count / 81
    assert sorted({int(p) // 16 for p in found}) == list(range(4, 13))
    line = torch.linspace(0, 1, 16).expand(count, 1, 16, 16)
    flips = u[:, :5].clone()
    flips[:, :2], flips[:, 3] = 0.5, 0.9
    assert (move(line, flips, FILL[:1])[:, 0, 0, 0] == 1).float().mean().item() == pytest.approx(0.25, abs=0.015)
    turns = u[:, :5].clone()
    turns[:, :2], turns[:, 2] = 0.5, 0.9
    same = (move(line, turns, FILL[:1]) == line).flatten(1).all(dim=1).float().mean().item()
    still = math.degrees(math.asin(0.5 / 7.5)) / 15  # a smaller angle moves no pixel
    assert same == pytest.approx(0.75 + 0.25 * still, abs=0.01)
    erased = (erase(torch.zeros(count, 1, 16, 16), u[:, 5:], FILL[:1]) != 0).flatten(1).any(dim=1)
    assert erased.float().mean().item() == pytest.approx(0.5, abs=0.015)


def test_every_image_has_draws_of_its_own():
    x = images(1).expand(30, 3, 32, 32)
    found = augment.augment(rng.key(0), x, FILL)
    assert len({one.sum().item() for one in found}) == 30
    assert torch.equal(found, augment.augment(rng.key(0), x, FILL))
    assert not torch.equal(found, augment.augment(rng.key(1), x, FILL))


def test_a_loop_over_clients_equals_vmap():
    x = images(24).reshape(4, 6, 3, 32, 32)
    keys = rng.fold_in(rng.key(2), torch.arange(4))
    together = torch.func.vmap(lambda k, z: augment.augment(k, z, FILL))(keys, x)
    assert torch.equal(together, torch.stack([augment.augment(k, z, FILL) for k, z in zip(keys, x, strict=True)]))
