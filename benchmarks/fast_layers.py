"""The kernels of ``bespoke.gpu.layer_kernels`` on a CUDA device: are they right, and how long do they take?

    python benchmarks/fast_layers.py            checks, times of each kernel, times of whole steps
    python benchmarks/fast_layers.py --tune     times of other block sizes, the best five
    ... --only cnns | deep, --layers 64,128, --precision bf16    a part of it

Checks are against torch in float64 on operands that the precision can hold, so only the kernels' own rounding remains.
Times are of CUDA graphs, in microseconds (kernels) and milliseconds (steps).
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional as F

from bespoke.core import rng
from bespoke.gpu import fast_layers
from bespoke.gpu import layer_kernels as kernels
from bespoke.gpu.step_kernels import sgd_update
from bespoke.models import ModelSettings, build_task, layers

TYPES = {"tf32": torch.float32, "bf16": torch.bfloat16}
BARS = {"tf32": 3e-3, "bf16": 2e-2}


class Layer(NamedTuple):
    """A convolution of K clients with B images each."""

    name: str
    clients: int
    batch: int
    channels: int
    side: int
    outputs: int
    kernel: int
    stride: int
    padding: int
    pooled: bool
    first: bool = False

    def conv(self, precision: str) -> fast_layers.Conv:
        dtype = TYPES[precision]
        return fast_layers.Conv(self.stride, self.padding, self.pooled, 0.1 if self.pooled else 0.0, dtype, dtype)

    @property
    def weight(self) -> tuple[int, int, int, int]:
        return self.outputs, self.channels, self.kernel, self.kernel


def stages(name: str, clients: int, batch: int, rows: list[tuple[int, ...]]) -> list[Layer]:
    return [
        Layer(f"{name}{i}", clients, batch, c, side, out, k, 1, pad, True, i == 1)
        for i, (c, side, out, k, pad) in enumerate(rows, 1)
    ]


CIFAR = [(3, 32, 16, 5, 0), (16, 14, 32, 5, 1), (32, 6, 64, 3, 1)]
VMP = [(3, 32, 32, 5, 0), (32, 14, 64, 5, 0)]
CNNS = stages("cifar", 30, 50, CIFAR) + stages("vmp", 30, 50, VMP) + stages("vmp_small", 50, 10, VMP)
DEEP = [
    Layer("stem", 24, 64, 3, 32, 64, 3, 1, 1, False, True),
    Layer("64", 24, 64, 64, 16, 64, 3, 1, 1, False),
    Layer("64-128", 24, 64, 64, 16, 128, 3, 2, 1, False),
    Layer("64-128 1x1", 24, 64, 64, 16, 128, 1, 2, 0, False),
    Layer("128", 24, 64, 128, 8, 128, 3, 1, 1, False),
    Layer("128-256", 24, 64, 128, 8, 256, 3, 2, 1, False),
    Layer("256", 24, 64, 256, 4, 256, 3, 1, 1, False),
    Layer("256-512", 24, 64, 256, 4, 512, 3, 2, 1, False),
    Layer("512", 24, 64, 512, 2, 512, 3, 1, 1, False),
    # without a max-pool after the stem
    Layer("wide 64", 20, 50, 64, 32, 64, 3, 1, 1, False),
    Layer("wide 64-128", 20, 50, 64, 32, 128, 3, 2, 1, False),
    Layer("wide 128", 20, 50, 128, 16, 128, 3, 1, 1, False),
    Layer("wide 128-256", 20, 50, 128, 16, 256, 3, 2, 1, False),
    Layer("wide 256", 20, 50, 256, 8, 256, 3, 1, 1, False),
    Layer("wide 256-512", 20, 50, 256, 8, 512, 3, 2, 1, False),
    Layer("wide 512", 20, 50, 512, 4, 512, 3, 1, 1, False),
    # WRN-16-2
    Layer("wrn stem", 20, 50, 3, 32, 16, 3, 1, 1, False, True),
    Layer("wrn 16-32", 20, 50, 16, 32, 32, 3, 1, 1, False),
    Layer("wrn 16-32 1x1", 20, 50, 16, 32, 32, 1, 1, 0, False),
    Layer("wrn 32", 20, 50, 32, 32, 32, 3, 1, 1, False),
    Layer("wrn 32-64", 20, 50, 32, 32, 64, 3, 2, 1, False),
    Layer("wrn 64", 20, 50, 64, 16, 64, 3, 1, 1, False),
    Layer("wrn 64-128", 20, 50, 64, 16, 128, 3, 2, 1, False),
    Layer("wrn 128", 20, 50, 128, 8, 128, 3, 1, 1, False),
]
NORMS = [(24, 64, 32, 64, False), (24, 64, 16, 64, True), (24, 64, 8, 128, True), (24, 64, 4, 256, True)]
NORMS += [(24, 64, 2, 512, True)]  # clients, images, side, channels, whether a residual is added
STEPS = [("cifar_cnn", 30, 50), ("pfedvmp_cnn", 30, 50), ("pfedvmp_cnn", 50, 10), ("fedpce_resnet18", 24, 64)]


def drawn(*shape: int, scale: float = 1.0, precision: str = "bf16") -> Tensor:
    """Draw random float32 numbers that bfloat16 or TF32 can hold exactly."""
    x = scale * torch.randn(shape, device="cuda")
    if precision == "bf16":
        return x.bfloat16().float()
    return (((x.view(torch.int32) + 0x1000) >> 13) << 13).view(torch.float32)


def last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (K, B, C, H, W) with channels last in memory."""
    return x.to(dtype).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def operands(layer: Layer, precision: str, clients: int) -> tuple[Tensor, Tensor, Tensor]:
    x = drawn(clients, layer.batch, layer.channels, layer.side, layer.side, precision=precision)
    w = drawn(clients, *layer.weight, scale=0.1, precision=precision)
    return x if layer.first else last(x, TYPES[precision]), w, drawn(clients, layer.outputs, scale=0.1)


# --- right? -------------------------------------------------------------------------------------------------


def error(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def check(layer: Layer, precision: str) -> bool:
    """Compare output and gradients of the layer under vmap with torch in float64, one client at a time."""
    x, w, b = operands(layer, precision, 3)
    conv = layer.conv(precision)
    exact = [t.double().requires_grad_() for t in (x, w, b)]
    outs = []
    for xi, wi, bi in zip(*exact, strict=True):
        out = F.conv2d(xi, wi, bi if layer.pooled else None, layer.stride, layer.padding)
        outs.append(F.max_pool2d(F.leaky_relu(out, conv.slope), 2) if layer.pooled else out)
    wanted = torch.stack(outs)
    dy = drawn(*wanted.shape, precision=precision)
    gradients = torch.autograd.grad(wanted, exact if layer.pooled else exact[:2], dy.double())

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if layer.pooled:
            return fast_layers.conv_stage(x, w, b, layer.padding, conv.slope, precision)
        return fast_layers.conv2d(x, w, layer.stride, layer.padding, precision)

    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = vmap(ours)(*leaves)
    found = torch.autograd.grad(y, leaves if layer.pooled else leaves[:2], dy.to(y.dtype))
    errors = [error(y, wanted), *(error(g, e) for g, e in zip(found, gradients, strict=True))]
    good = all(e < BARS[precision] for e in errors)
    names = ("y", "dx", "dw", "db")
    text = "  ".join(f"{n} {e:.1e}" for n, e in zip(names, errors, strict=False))
    print(f"  {layer.name:12} {precision}  {text}  {'ok' if good else 'WRONG'}")
    return good


# --- how long? ----------------------------------------------------------------------------------------------


def graph_time(fn: Callable[[], Any], calls: int, replays: int = 10) -> float:
    """Return the seconds of one call, in a CUDA graph of ``calls`` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    graph.replay()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / replays / calls)
    return best


class Job(NamedTuple):
    """One kernel of one layer: ``run(blocks)``, with the table's own choice for None."""

    kind: str
    layer: Layer
    run: Callable[[kernels.Blocks | None], Any]
    default: kernels.Blocks | None


def jobs(layer: Layer, precision: str) -> Iterator[Job]:
    x, w, b = operands(layer, precision, layer.clients)
    conv, weight = layer.conv(precision), layer.weight
    dtype = conv.operands
    maps = kernels.pack_maps(x, dtype)
    if maps is None:
        maps = x.permute(0, 1, 3, 4, 2)
    else:
        yield Job("pack maps", layer, lambda _: kernels.pack_maps(x, dtype), None)
    packed = kernels.pack_weight(w, dtype)
    yield Job("pack weight", layer, lambda _: kernels.pack_weight(w, dtype), None)
    side = (layer.side + 2 * layer.padding - layer.kernel) // layer.stride + 1
    side = side // 2 if layer.pooled else side
    shape = (layer.clients, layer.batch, side, side, layer.outputs)
    dy = drawn(*shape).to(dtype)
    code = torch.randint(8, shape, dtype=torch.uint8, device="cuda") if layer.pooled else None
    rows, depth = layer.batch * side * side, kernels._depth(weight, conv)
    yield Job(
        "forward",
        layer,
        lambda blocks: kernels.forward(maps, packed, b if layer.pooled else None, weight, conv, blocks),
        kernels.choose_blocks("forward", conv, rows, layer.outputs, depth, layer.channels),
    )
    yield Job(
        "weight",
        layer,
        lambda blocks: kernels.weight_gradient(maps, dy, code, weight, conv, blocks),
        kernels.choose_blocks("weight", conv, depth, layer.outputs, rows, layer.channels),
    )
    if layer.first:
        return
    sides = (layer.side, layer.side)
    step = 2 if layer.pooled else layer.stride
    across = (layer.side - 1 + layer.padding) // step - layer.padding // step + 1
    padded = kernels._power(layer.channels, low=16 if step == 1 else 4)
    yield Job(
        "input",
        layer,
        lambda blocks: kernels.input_gradient(dy, code, packed, weight, conv, sides, dtype, blocks),
        kernels.choose_blocks("input", conv, layer.batch * across**2, step**2 * padded, layer.outputs, layer.channels),
    )


def time_norms(precision: str) -> bool:
    """Measure instance norm with ReLU: errors against torch in float64, microseconds forward and backward."""
    print(f"{precision}: instance norm [+ residual] + ReLU, relative errors and microseconds")
    dtype, good = TYPES[precision], True
    for clients, batch, side, channels, adds in NORMS:
        shape = (clients, batch, side, side, channels)
        x, added, dy = (drawn(*shape, precision=precision).to(dtype) for _ in range(3))
        scale, shift = drawn(clients, channels), drawn(clients, channels)
        residual = added if adds else None
        forward = partial(kernels.norm, x, residual, scale, shift, channels, 1e-5, True)
        y, mean, rate = forward()
        back = partial(kernels.norm_gradient, dy, x, y if adds else None, scale, shift, mean, rate, channels, True)
        dx, _, dscale, dshift = back()
        exact = [t[:1].double().requires_grad_() for t in (x, scale, shift)]
        wanted = F.group_norm(exact[0][0].permute(0, 3, 1, 2), channels, exact[1][0], exact[2][0])
        wanted = F.relu(wanted + (added[0].double().permute(0, 3, 1, 2) if adds else 0)).permute(0, 2, 3, 1)
        gradients = torch.autograd.grad(wanted, exact, dy[0].double())
        pairs = zip((y[0], dx[:1], dscale[:1], dshift[:1]), (wanted, *gradients), strict=True)
        errors = [error(got, want) for got, want in pairs]
        good &= all(e < BARS[precision] for e in errors)
        text = "  ".join(f"{e:.1e}" for e in errors)
        times = f"{graph_time(forward, 10) * 1e6:.0f}  {graph_time(back, 10) * 1e6:.0f}"
        print(f"  {side}x{side}x{channels:<4} y, dx, dscale, dshift {text}   {times}")
    return good


def time_sgd() -> None:
    """Time one leaf of all parameters, beside the bytes it moves."""
    for name, clients, size in (("cifar_cnn", 30, 107_690), ("pfedvmp_cnn", 30, 878_538)):
        param, gradient, moment = (torch.randn(clients, size, device="cuda") for _ in range(3))
        rate = torch.full((clients,), 0.01, device="cuda")
        active = torch.ones(clients, dtype=torch.bool, device="cuda")
        seconds = graph_time(partial(sgd_update, [param], [gradient], [moment], rate, active, 5e-4, 0.5), 10)
        print(f"SGD of {name}: {seconds * 1e6:.1f} us, {20 * clients * size / seconds / 1e12:.2f} TB/s")


def attempt(work: tuple[Job, kernels.Blocks | None]) -> str:
    """Compile by a first call; return what went wrong, if anything did."""
    job, blocks = work
    try:
        job.run(blocks)
        torch.cuda.synchronize()
    except Exception as problem:  # a block too large for the device is an answer, not a failure
        return type(problem).__name__
    return ""


def compile_all(work: list[tuple[Job, kernels.Blocks | None]]) -> list[str]:
    started = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        problems = list(pool.map(attempt, work))
    print(f"compiled {len(work)} calls in {time.perf_counter() - started:.0f} s")
    return problems


def time_kernels(chosen: list[Layer], precision: str) -> None:
    found = [job for layer in chosen for job in jobs(layer, precision)]
    problems = compile_all([(job, None) for job in found])
    print(f"{precision}: microseconds of each kernel (a weight gradient with the sum of its parts)")
    for layer in chosen:
        cells = []
        for job, problem in zip(found, problems, strict=True):
            if job.layer is layer:
                cells.append(f"{job.kind} {problem or f'{graph_time(partial(job.run, None), 20) * 1e6:.1f}'}")
        print(f"  {layer.name:12} {'  '.join(cells)}")


def alternatives(job: Job) -> list[kernels.Blocks]:
    """Return block sizes near the default; for plain convolutions also larger ones, and deeper pipelines."""
    own, plain = job.default, not job.layer.pooled
    assert own is not None
    rows, depth = [64, 128], [32, 64]
    columns = {own.columns, own.columns * 2 if own.columns < 128 else 256, max(16, own.columns // 2)}
    if job.kind == "weight" or plain:
        depth = [32, 64, 128]
    if plain and job.layer.channels < 32:
        depth = [16, 32, 64]
    widest = max(16, 1 << (job.layer.outputs - 1).bit_length())
    if job.kind == "input":
        widest = (2 if job.layer.pooled else job.layer.stride) ** 2 * max(16, job.layer.channels)
    found = []
    for r, c, d, warps, deep in itertools.product(rows, sorted(columns), depth, (4, 8), (3, 4) if plain else (2, 3)):
        accumulators = r * c * (4 if job.layer.pooled and job.kind != "input" else 1)
        fits = 2 * d * (r + c) * deep <= 200 * 1024
        if c <= min(widest, 256) and 32 * warps * 16 <= accumulators <= 32 * warps * 128 and fits:
            found.append(kernels.Blocks(r, c, d, warps, deep))
    return found


def tune(chosen: list[Layer], precision: str, share: str) -> None:
    """Time other block sizes; with a ``share``, i/n, only compile that part of them, for n processes side by side."""
    part, parts = map(int, (share or "0/1").split("/"))
    results: dict[tuple[str, str], list[tuple[float, kernels.Blocks]]] = {}
    for layer in chosen:
        tuned = [job for job in jobs(layer, precision) if job.default is not None]
        work = [(job, b) for job in tuned for b in dict.fromkeys([job.default, *alternatives(job)])]
        for job, blocks in work[part::parts]:
            if not attempt((job, blocks)) and not share:
                found = results.setdefault((layer.name, job.kind), [])
                found.append((graph_time(partial(job.run, blocks), 3, 4) * 1e6, blocks))
        for job in () if share else tuned:
            times = results.get((layer.name, job.kind), [])
            best = "  ".join(f"{tuple(b)} {t:.1f}" for t, b in sorted(times)[:5])
            mine = next((f"{t:.1f}" for t, b in times if b == job.default), "does not run")
            print(f"  {layer.name:14} {job.kind:8} own {tuple(job.default or ())} {mine}   best {best}", flush=True)


def step_time(name: str, clients: int, batch: int, precision: str, torchs: bool) -> float:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    task = build_task(ModelSettings(name), (3, 32, 32), 10, "cuda")
    layers.set_precision(task._module, "fp32" if torchs else precision)
    start = task.init(rng.key(0))
    params = {n: p.expand(clients, *p.shape).contiguous() for n, p in start.items()}
    x = torch.randn(clients, batch, 3, 32, 32, device="cuda")
    y = torch.randint(10, (clients, batch), device="cuda")

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(task.logits(params, x), y)

    return graph_time(lambda: vmap(grad_and_value(loss))(params, x, y), 1, 10 if name.endswith("cnn") else 3)


def time_steps(chosen: list[tuple[str, int, int]]) -> None:
    ways = [("fp32", True), ("tf32", True), ("tf32", False), ("bf16", False)]
    print("milliseconds of a step (loss and gradients): torch fp32, torch tf32, ours tf32, ours bf16")
    for name, clients, batch in chosen:
        cells = []
        for precision, torchs in ways:
            try:
                cells.append(f"{step_time(name, clients, batch, precision, torchs) * 1e3:.3f}")
            except Exception as problem:  # one way's failure must not hide the others' times
                cells.append(f"{type(problem).__name__}: {str(problem)[:200]}")
            torch.cuda.empty_cache()
        print(f"  {name} {clients} x {batch}:  {'  '.join(cells)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="time other block sizes")
    parser.add_argument("--compile", default="", metavar="I/N", help="with --tune: only compile the I-th of N parts")
    parser.add_argument("--only", choices=["cnns", "deep"], help="only small CNNs, or only ResNets")
    parser.add_argument("--layers", default="", help="only layers of these names, with commas")
    parser.add_argument("--precision", choices=["tf32", "bf16"], help="only this precision")
    asked = parser.parse_args()
    chosen = {"cnns": CNNS, "deep": DEEP}.get(asked.only, CNNS + DEEP)
    chosen = [layer for layer in chosen if not asked.layers or layer.name in asked.layers.split(",")]
    precisions = [asked.precision] if asked.precision else ["bf16", "tf32"]
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, kernels.triton.__version__)
    if asked.tune:
        tune(chosen, precisions[0], asked.compile)
        return 0
    steps = [s for s in STEPS if not asked.only or (s[0].endswith("cnn") == (asked.only == "cnns"))]
    good = True
    time_sgd()
    for precision in precisions:
        if asked.only != "cnns":
            good &= time_norms(precision)
        time_kernels(chosen, precision)
        for layer in chosen:
            good &= check(layer, precision)
    time_steps(steps)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
