"""Milliseconds of one SGD step of a cohort: a plain loop, vmap without recording, our engine, and the floor.

Ours go through the clients' public ``train``: a round of many steps, timed from outside and divided by their number, so
gathering the rows, the optimiser and the masks are included. ``python benchmarks/cohort_step.py`` needs CUDA; it
prints a table and writes ``cohort_step.json`` beside itself.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import report
import torch
from torch.nn import functional as F

from bespoke.algorithms import ALGORITHMS
from bespoke.clients import BatchedClients
from bespoke.core import rng
from bespoke.core.data import FederatedData, Rows
from bespoke.core.settings import Training
from bespoke.models import ModelSettings, build_module, build_task

# name, clients, batch, multiply-accumulates of a forward pass of one image, bar in ms or against the plain loop
CASES: dict[str, dict[str, Any]] = {
    "cifar_cnn": {"clients": 30, "batch": 50, "mac": 3.52e6, "bar_ms": 1.2},
    "pfedvmp_cnn": {"clients": 30, "batch": 50, "mac": 7.82e6, "bar_ms": 2.0},
    "fedpce_resnet18": {"clients": 24, "batch": 64, "mac": 140.2e6, "bar_ratio": 8.0},
}
FP32_FLOPS, BYTES = 67e12, 4.3e12  # of an H200: float32 operations per second, bytes per second as measured by a copy


def images(clients: int, rows: int) -> FederatedData:
    """Return random 32x32 colour images of 8 bits."""
    count = clients * rows
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, 10, (count,), generator=draw)
    none = Rows.of([[]] * clients)
    names = tuple(str(i) for i in range(clients))
    return FederatedData(x, y, Rows.of(list(torch.arange(count).split(rows))), none, none, 10, clients, names)


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a call, including the device's work, after a warm-up call."""
    times, wait = [], torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(repeats + 1):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def plain_loop(name: str, clients: int, batch: int) -> float:
    """Return the milliseconds of one step of every client, one after another, in a hand-written loop."""
    module = build_module(ModelSettings(name=name), (3, 32, 32), 10).cuda()
    x, y = torch.randn(batch, 3, 32, 32, device="cuda"), torch.randint(0, 10, (batch,), device="cuda")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5, weight_decay=5e-4)

    def step() -> None:
        for _ in range(clients):
            loss = F.cross_entropy(module(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return 1e3 * seconds(step, 5)


def ours(name: str, clients: int, batch: int, steps: int, precision: str, graphs: bool, repeats: int = 3) -> float:
    """Return the milliseconds of one step of all clients, through ``train``."""
    pool = images(clients, 4 * batch)
    task = build_task(ModelSettings(name=name), (3, 32, 32), 10, "cuda", precision=precision)
    params = task.init(rng.key(0))
    training = Training(steps=steps, batch=batch, lr=0.01, momentum=0.5, weight_decay=5e-4)
    cohort = BatchedClients(ALGORITHMS["fedavg"](), task, params, pool, training, seed=0, graphs=graphs)
    everyone = list(range(clients))

    def round() -> None:
        cohort.train(1, everyone, {"model": params}, {})

    for _ in range(2 if graphs else 0):  # new shapes are seen, then recorded
        round()
    taken = 1e3 * seconds(round, repeats) / steps
    print(f"{name} {precision}{'' if graphs else ', not recorded'}: {taken:.3f} ms", *cohort.notes, flush=True)
    return taken


def floor(case: dict[str, Any], parameters: int) -> float:
    """Return the milliseconds for arithmetic at float32 rate, or for the bytes of parameters, gradients and moments."""
    images_ = case["clients"] * case["batch"]
    arithmetic = 3 * 2 * case["mac"] * images_ / FP32_FLOPS
    memory = case["clients"] * parameters * 4 * 6 / BYTES
    return 1e3 * max(arithmetic, memory)


def slow(row: dict[str, Any]) -> bool:
    """Return whether our step in bf16 misses its bar, in milliseconds or relative to the plain loop."""
    case = CASES[row["model"]]
    most: float = case["bar_ms"] if "bar_ms" in case else row["loop_ms"] / case["bar_ratio"]
    return bool(row["bf16_ms"] > most)


def main() -> int:
    """Measure, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--precisions", default="fp32,tf32,bf16")
    chosen = parser.parse_args()
    report.needs_cuda()
    rows = []
    for name in chosen.models.split(","):
        case = CASES[name]
        clients, batch = case["clients"], case["batch"]
        steps = 100 if "bar_ms" in case else 20
        count = sum(p.numel() for p in build_module(ModelSettings(name=name), (3, 32, 32), 10).parameters())
        row: dict[str, Any] = {"model": name, "clients": clients, "batch": batch, "floor_ms": floor(case, count)}
        row["loop_ms"] = plain_loop(name, clients, batch)
        row["vmap_ms"] = ours(name, clients, batch, 5, "fp32", graphs=False, repeats=1)
        for precision in chosen.precisions.split(","):
            row[f"{precision}_ms"] = ours(name, clients, batch, steps, precision, graphs=True)
        rows.append(row)
    print(report.table(rows))
    report.store(chosen.out, "cuda", cases=rows)
    return int(any(slow(row) for row in rows if "bf16_ms" in row))


if __name__ == "__main__":
    sys.exit(main())
