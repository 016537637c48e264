"""Where a step of the deep nets goes: WRN-16-2 and ResNet-18, with and without a max-pool after the stem.

Each case trains all clients for some steps through the clients' public ``train`` and divides by their number, then
looks at one more round with torch's profiler: milliseconds of a step by kernel. ``python benchmarks/deep_nets.py``
needs CUDA; it prints tables and writes ``deep_nets.json`` beside itself.
"""

import sys
from collections import Counter
from typing import Any

import report
import torch
from cohort_step import FP32_FLOPS, images, seconds
from torch.profiler import ProfilerActivity, profile

from bespoke.algorithms import ALGORITHMS
from bespoke.clients import BatchedClients
from bespoke.core import rng
from bespoke.core.settings import Training
from bespoke.models import ModelSettings, build_task

SGD = {"optimizer": "sgd", "lr": 0.01, "momentum": 0.5, "weight_decay": 5e-4}
ADAM = {"optimizer": "adam", "lr": 1e-4, "weight_decay": 1e-4, "beta1": 0.5, "beta2": 0.9}
# clients, batch, optimiser, [model], multiply-accumulates of a forward pass of one image
CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], float]] = {
    "wrn16_2, group norm": (20, 50, SGD, {"name": "wrn16_2"}, 101e6),
    "resnet18, group norm": (20, 50, SGD, {"name": "resnet18", "stem": "cifar", "norm": "group"}, 555.4e6),
    "resnet18, instance norm": (20, 50, SGD, {"name": "resnet18", "stem": "cifar", "norm": "instance"}, 555.4e6),
    "resnet18 with stem pool, group norm": (
        24,
        64,
        ADAM,
        {"name": "resnet18", "stem": "cifar", "stem_pool": True, "norm": "group"},
        140.2e6,
    ),
    "fedpce_resnet18, Adam": (24, 64, ADAM, {"name": "fedpce_resnet18"}, 140.2e6),
    "fedpce_resnet18, SGD": (24, 64, SGD, {"name": "fedpce_resnet18"}, 140.2e6),
}
# What the profiler's names are called in the table; the first that occurs in a name counts.
PARTS = {
    "_norm_gradient": "norm, gradient",
    "_norm": "norm",
    "_forward": "convolution",
    "_weight_gradient": "convolution, gradient of weights",
    "_sum_parts": "convolution, sum of its parts",
    "_input_gradient": "convolution, gradient of maps",
    "_pack_": "packing",
    "_adam": "optimiser",
    "_sgd": "optimiser",
    "max_pool": "max-pool",
    "Memcpy": "copies",
    "copy": "copies",
    "CatArray": "copies",
    "reduce_kernel": "sums",
    "elementwise": "elementwise",
}


def part(name: str) -> str:
    """Return the table's word for a kernel."""
    return next((word for passage, word in PARTS.items() if passage in name), "all else")


def measure(case: str, steps: int, precision: str) -> dict[str, Any]:
    """Return a case's milliseconds per step, and by part; torch's largest kernels are named in ``others``."""
    clients, batch, optimizer, model, mac = CASES[case]
    pool = images(clients, 4 * batch)
    task = build_task(ModelSettings(**model), (3, 32, 32), 10, "cuda", precision=precision)
    params = task.init(rng.key(0))
    training = Training(steps=steps, batch=batch, **optimizer)
    cohort = BatchedClients(ALGORITHMS["fedavg"](), task, params, pool, training, seed=0)
    everyone = list(range(clients))

    def one_round() -> None:
        cohort.train(1, everyone, {"model": params}, {})

    for _ in range(2):  # new shapes are seen, then recorded
        one_round()
    taken = 1e3 * seconds(one_round, 3) / steps
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        one_round()
        torch.cuda.synchronize()
    by_part, by_name = Counter[str](), Counter[str]()
    for event in found.key_averages():
        spent = event.self_device_time_total / 1e3 / steps
        by_part[part(event.key)] += spent  # type: ignore[assignment]
        by_name[event.key[:90]] += spent  # type: ignore[assignment]
    arithmetic = 1e3 * 6 * mac * clients * batch / FP32_FLOPS
    row = {"case": case, "precision": precision, "ms": taken, "ms at float32 rate": arithmetic, "notes": cohort.notes}
    print(f"{case}, {precision}: {taken:.2f} ms a step {cohort.notes or ''}", flush=True)
    for name, spent in by_part.most_common():
        print(f"    {spent:8.3f} ms {100 * spent / taken:5.1f} %  {name}")
    top = {name: round(spent, 4) for name, spent in by_name.most_common(14)}
    return row | {"parts": {name: round(spent, 4) for name, spent in by_part.most_common()}, "kernels": top}


def main() -> int:
    """Measure, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", default="bf16")
    chosen = parser.parse_args()
    report.needs_cuda()
    rows = [measure(case, chosen.steps, chosen.precision) for case in CASES if chosen.only in case]
    print(report.table(rows))
    report.store(chosen.out, "cuda", cases=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
