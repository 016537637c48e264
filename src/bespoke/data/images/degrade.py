"""FedPCE's degradations: Gaussian noise redrawn at every access, and a colour jitter fixed per client.

All of it works on images in [0, 1], (B, 3, H, W), with fixed shapes and the client's parameters as tensors, so
the result is the same for one client and under ``torch.func.vmap``.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bespoke.core import rng
from bespoke.core.tree import Tree
from bespoke.gpu import images

# The values of [data] degrade, each with the settings it takes.
DEGRADATIONS: dict[str, tuple[str, ...]] = {"none": (), "fedpce": ("jitter_order", "noise_at", "noise_scale")}

LOW_VARIANCE, HIGH_VARIANCE = 0.005, 1.0
GREY = (0.2989, 0.587, 0.114)  # weights of red, green and blue


def parameters(kinds: Sequence[str], ranks: Sequence[int], draws: np.random.Generator) -> Tree:
    """Return each client's constants, by its kind (noise, jitter or imbalance) and number within the kind.

    ``variance`` (M,) rises evenly from 0.005 to 1 over the noise clients, and is 0 elsewhere. ``jitter`` (M,)
    marks the jitter clients. ``amounts`` (M, 4) are brightness, contrast and saturation factors from 0.5 to 1.5
    and a hue shift from -0.5 to 0.5, each spread evenly and permuted separately over the jitter clients.
    ``order`` (M, 4) is the order of the four changes, drawn once per client.
    """
    clients = len(kinds)
    of = {kind: np.flatnonzero(np.array(kinds) == kind) for kind in ("noise", "jitter")}
    rank = np.array(ranks)
    variance = np.zeros(clients)
    variance[of["noise"]] = np.linspace(LOW_VARIANCE, HIGH_VARIANCE, len(of["noise"]))[rank[of["noise"]]]
    amounts = np.tile([1.0, 1.0, 1.0, 0.0], (clients, 1))
    jittered = np.zeros(clients, dtype=bool)
    jittered[of["jitter"]] = True
    for j, (low, high) in enumerate([(0.5, 1.5)] * 3 + [(-0.5, 0.5)]):
        steps = np.linspace(low, high, len(of["jitter"]))
        amounts[of["jitter"], j] = draws.permutation(steps)[rank[of["jitter"]]]
    order = np.stack([draws.permutation(4) for _ in range(clients)])
    return {
        "variance": torch.tensor(variance, dtype=torch.float32),
        "jitter": torch.tensor(jittered),
        "amounts": torch.tensor(amounts, dtype=torch.float32),
        "order": torch.tensor(order),
    }


def noise(key: Tensor, x: Tensor, variance: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """Add Gaussian noise of a variance (), drawn from ``key`` (2,), to ``x`` (B, C, H, W), without clipping.

    ``scale`` is what one unit of the noise is in ``x``, a number or by image and channel (B, C, 1, 1).
    """
    return x + scale * variance.sqrt() * rng.normal(key, x.shape, x.dtype)


def drawn_order(key: Tensor) -> Tensor:
    """Draw a random order of the four colour changes: int64 (4,)."""
    return rng.shuffle(key, 4, 4)


def jitter(x: Tensor, amounts: Tensor, order: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue of ``x`` (B, 3, H, W) in [0, 1], in the ``order`` (4,).

    ``amounts`` (4,) are the three factors and the shift. The order is data: at each of four positions all four
    changes are computed and the right one is selected; on CUDA one kernel does it all.
    """
    if images.usable(x):
        return images.jitter(x, amounts, order, GREY)
    for place in range(4):
        which = order[place]
        changed = hue(x, amounts[3])
        for number, change in enumerate((brightness, contrast, saturation)):
            changed = torch.where(which == number, change(x, amounts[number]), changed)
        x = changed
    return x


def grey(x: Tensor) -> Tensor:
    """Return the luma of ``x`` (B, 3, H, W): (B, 1, H, W)."""
    r, g, b = x.unbind(dim=-3)
    return (GREY[0] * r + GREY[1] * g + GREY[2] * b).unsqueeze(-3)


def brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Return ``factor`` x, clipped to [0, 1]."""
    return (factor * x).clamp(0.0, 1.0)


def contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Pull x towards the image's mean luma, clipped to [0, 1]."""
    mean = grey(x).mean(dim=(-3, -2, -1), keepdim=True)
    return (factor * x + (1.0 - factor) * mean).clamp(0.0, 1.0)


def saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Pull x towards its own luma, clipped to [0, 1]."""
    return (factor * x + (1.0 - factor) * grey(x)).clamp(0.0, 1.0)


def hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of x by ``shift`` of the full circle; value and saturation stay.

    A colour of value v and chroma c has the channels v - c clamp(min(k, 4 - k), 0, 1), k = (n + 6 hue) mod 6,
    with n = 5, 3, 1 for red, green and blue.
    """
    r, g, b = x.unbind(dim=-3)
    value = x.amax(dim=-3)
    chroma = value - x.amin(dim=-3)
    safe = torch.where(chroma > 0, chroma, torch.ones_like(chroma))
    sector = torch.where(
        value == r, (g - b) / safe, torch.where(value == g, 2.0 + (b - r) / safe, 4.0 + (r - g) / safe)
    )
    sector = sector + 6.0 * shift
    channels = []
    for n in (5.0, 3.0, 1.0):
        k = (n + sector).remainder(6.0)
        channels.append(value - chroma * torch.minimum(k, 4.0 - k).clamp(0.0, 1.0))
    return torch.stack(channels, dim=-3)
