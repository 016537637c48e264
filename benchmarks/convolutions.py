"""Three ways to convolve for many clients at once: cuDNN's groups, unfolding and one product, and our kernels.

A stage (convolution, bias, leaky ReLU, 2x2 max-pool) of all clients with all its gradients, in bfloat16, as a CUDA
graph: the stages of the CIFAR-CNN and of the pFedVMP-CNN. ``python benchmarks/convolutions.py`` compares the ways'
outputs (gradients differ where rounding makes another pixel the largest), prints microseconds and writes
``convolutions.json``.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import report
import torch
from fast_layers import CIFAR, VMP, Layer, error, graph_time, last, operands, stages
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from bespoke.gpu import fast_layers

SLOPE = 0.1
Way = Callable[[Layer, Tensor, Tensor, Tensor], Tensor]  # (x (K, B, C, H, W), weight, bias) -> (K, B, outputs, H', W')


def grouped(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run the clients as groups of one cuDNN convolution, side by side in the channels, which are last in memory."""
    clients = len(x)
    wide = x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)
    out = F.conv2d(wide, weight.flatten(0, 1), bias.flatten(), padding=layer.padding, groups=clients)
    return F.max_pool2d(F.leaky_relu(out, SLOPE), 2).unflatten(1, (clients, -1)).transpose(0, 1)


def unfolded(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Unfold every window into a row, with one matrix product per client."""
    clients, batch, k, pad = len(x), x.shape[1], layer.kernel, layer.padding
    maps = F.pad(x.permute(0, 1, 3, 4, 2), (0, 0, pad, pad, pad, pad))
    windows = maps.unfold(2, k, 1).unfold(3, k, 1)  # (K, B, H', W', C, k, k)
    sides = windows.shape[2:4]
    rows = windows.permute(0, 1, 2, 3, 5, 6, 4).reshape(clients, batch * sides[0] * sides[1], -1)
    out = torch.baddbmm(bias[:, None], rows, weight.permute(0, 3, 4, 2, 1).reshape(clients, rows.shape[2], -1))
    out = F.leaky_relu(out, SLOPE).reshape(clients * batch, *sides, -1).permute(0, 3, 1, 2)  # channels last
    return F.max_pool2d(out, 2).unflatten(0, (clients, batch))


def ours(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run one kernel for the stage, one for each gradient."""
    return vmap(lambda x, w, b: fast_layers.conv_stage(x, w, b, layer.padding, SLOPE, "bf16"))(x, weight, bias)


WAYS: dict[str, Way] = {"grouped cuDNN": grouped, "unfolded": unfolded, "ours": ours}


def work(way: Way, layer: Layer, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Return the stage's output and its gradients; a first stage needs none for its input."""
    out = way(layer, *leaves)
    return [out, *torch.autograd.grad(out, [t for t in leaves if t.requires_grad], dy.to(out.dtype))]


def measure(layer: Layer) -> dict[str, Any]:
    """Return the microseconds of each way, and the relative distance of its outputs from cuDNN's."""
    x, weight, bias = operands(layer, "bf16", layer.clients)
    row: dict[str, Any] = {"stage": layer.name}
    outs: dict[str, Tensor] = {}
    side = (layer.side + 2 * layer.padding - layer.kernel + 1) // 2
    dy = last(torch.randn(layer.clients, layer.batch, layer.outputs, side, side, device=x.device), torch.bfloat16)
    for name, way in WAYS.items():
        # Ours rounds the parameters itself, the others are given them rounded.
        low = [t if way is ours else t.bfloat16() for t in (weight, bias)]
        leaves = [t.detach().requires_grad_() for t in (last(x, torch.bfloat16), *low)]
        leaves[0].requires_grad_(not layer.first)
        outs[name] = work(way, layer, leaves, dy)[0].detach()
        row[f"{name}, difference"] = error(outs[name], outs["grouped cuDNN"].double())
        row[f"{name}, us"] = round(1e6 * graph_time(partial(work, way, layer, leaves, dy), 10), 1)
    return row


def main() -> int:
    """Measure, print and store."""
    chosen = report.parser(__doc__, __file__).parse_args()
    report.needs_cuda()
    rows: list[dict[str, Any]] = []
    for layer in stages("cifar", 30, 50, CIFAR) + stages("vmp", 30, 50, VMP):
        rows.append(measure(layer))
        print(f"{layer.name}: ours {rows[-1]['ours, us']} us", flush=True)
    sums = [
        {"stage": f"{net}, all"} | {f"{n}, us": sum(r[f"{n}, us"] for r in rows if net in r["stage"]) for n in WAYS}
        for net in ("cifar", "vmp")
    ]
    print(report.table([*rows, *sums]))
    report.store(chosen.out, "cuda", stages=rows)
    return int(any(value > 0.02 for row in rows for name, value in row.items() if name.endswith("difference")))


if __name__ == "__main__":
    sys.exit(main())
