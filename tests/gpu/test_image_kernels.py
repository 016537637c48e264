"""The kernels for images, beside the same changes written with torch."""

import pytest
import torch
from kernel_runs import DEVICE, needs_triton
from torch.func import vmap

from bespoke.core import rng
from bespoke.data.images import augment, degrade
from bespoke.gpu import images

CLIENTS, BATCH = 4, 5
JITTER = 5e-6  # float32, with the device's quick division in the hue
pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]


def pictures(channels, height, width):
    shape = (CLIENTS, BATCH, channels, height, width)
    x = (rng.bits(rng.key(3), torch.arange(torch.Size(shape).numel())) % 256).reshape(shape) / 255.0
    x[0, 0] = x[0, 0].mean(dim=0)  # grey: no chroma
    x[0, 1] = 0.0
    return x.float()


@pytest.mark.parametrize("sides", [(8, 8), (7, 11)])
def test_jitter(sides):
    x = pictures(3, *sides)
    amounts = torch.tensor([[0.5, 1.5, 0.7, 0.3], [1.4, 0.6, 1.2, -0.5], [1.0, 1.0, 1.0, 0.0], [1.5, 1.5, 1.5, 0.49]])
    order = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1]])
    wanted = torch.stack([degrade.jitter(*own) for own in zip(x, amounts, order, strict=True)])
    inputs = [t.to(DEVICE) for t in (x, amounts, order)]
    found = vmap(lambda x, amounts, order: images.jitter(x, amounts, order, degrade.GREY))(*inputs)
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=JITTER)
    alone = images.jitter(*(t[1] for t in inputs), degrade.GREY)
    torch.testing.assert_close(alone.cpu(), wanted[1], rtol=0, atol=JITTER)


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 9, 12)])
def test_moving_and_erasing(shape):
    """To the bit, on draws that crop, flip, rotate and erase, and do not."""
    x, keys = pictures(*shape), rng.fold_in(rng.key(5), torch.arange(CLIENTS))
    fill = torch.linspace(0.1, 0.9, CLIENTS * shape[0]).reshape(CLIENTS, shape[0], 1, 1)
    u = torch.stack([rng.uniform(key, (BATCH, augment.DRAWS), torch.float64) for key in keys])
    u[:, 0, [2, 3, 5]] = 0.1  # all of it
    u[:, 1, [2, 3, 5]] = 0.9  # none but the crop
    u[:, 1, :2] = 0.5
    assert {(row < 0.25).item() for row in u[..., 3].flatten()} == {True, False}
    plain = [augment.erase(augment.move(a, b[:, :5], c), b[:, 5:], c) for a, b, c in zip(x, u, fill, strict=True)]
    moves = [torch.stack([*augment.turns(b[:, :5]), *augment.rectangles(b[:, 5:], *shape[1:])], -1) for b in u]
    found = vmap(images.move)(x.to(DEVICE), torch.stack(moves).to(DEVICE), fill.flatten(1).to(DEVICE))
    assert torch.equal(found.cpu(), torch.stack(plain))
    assert torch.equal(found[:, 1].cpu(), x[:, 1]) and not torch.equal(found[:, 0].cpu(), x[:, 0])


def test_the_transforms_use_them(monkeypatch):
    """Where a kernel can take the images, it does; the draws are the same."""
    x, key, fill = pictures(3, 8, 8), rng.key(2), torch.tensor([0.2, 0.4, 0.6])[:, None, None]
    amounts, order = torch.tensor([0.5, 1.5, 0.7, 0.3]), torch.tensor([2, 0, 3, 1])
    plain = augment.augment(key, x[0], fill), degrade.jitter(x[0], amounts, order)
    monkeypatch.setattr(images, "usable", lambda x: True)
    own = [t.to(DEVICE) for t in (key, x[0], fill, amounts, order)]
    assert torch.equal(augment.augment(own[0], own[1], own[2]).cpu(), plain[0])
    torch.testing.assert_close(degrade.jitter(own[1], own[3], own[4]).cpu(), plain[1], rtol=0, atol=JITTER)
