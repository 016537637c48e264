"""The kernels for images, beside the same changes written with torch."""

import pytest
import torch
from kernel_runs import DEVICE, needs_triton
from torch.func import vmap

from bespoke.core import rng
from bespoke.data.images import degrade
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


def test_the_degradation_uses_it(monkeypatch):
    """Where the kernel can take the images, it does."""
    x = pictures(3, 8, 8)
    amounts, order = torch.tensor([0.5, 1.5, 0.7, 0.3]), torch.tensor([2, 0, 3, 1])
    plain = degrade.jitter(x[0], amounts, order)
    monkeypatch.setattr(images, "usable", lambda x: True)
    own = [t.to(DEVICE) for t in (x[0], amounts, order)]
    torch.testing.assert_close(degrade.jitter(*own).cpu(), plain, rtol=0, atol=JITTER)
