"""What each Triton kernel of ``bespoke.gpu`` gains over plain operations, recorded alike and in the same precision.

Each workload is timed through ``clients.train`` with all kernels, then without one: the kernel's caller is given
torch's own operations instead, in bfloat16 where the kernel is, and those become CUDA graphs too. A gain is the share
of the time without the kernel that it saves: of a step (a round of training over its steps), and of a round of a whole
run. ``differs`` is the distance of the two rounds' mean models, relative to how far one of them moved; Adam's first
steps are signs of the gradient, so that it shows roundings. ``python benchmarks/kernels.py`` needs CUDA; it prints a
table, writes ``kernels.json``, and ends with 1 if a kernel gains less than 5 % everywhere.
"""

import contextlib
import dataclasses
import functools
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import report
import torch
from cohort_step import images, seconds
from torch import Tensor
from torch.nn import functional as F

from bespoke import DataSettings, Experiment, ModelSettings, Training
from bespoke.algorithms import ALGORITHMS
from bespoke.clients import BatchedClients
from bespoke.core import rng
from bespoke.core.data import FederatedData
from bespoke.core.tree import Tree, leaves
from bespoke.data import federate_data
from bespoke.data.images import degrade
from bespoke.engine import optim
from bespoke.errors import reason
from bespoke.models import build_task, layers
from bespoke.runs import api
from bespoke.runs.experiment import load

BAR = 5.0  # percent
HALF = torch.bfloat16


# --- torch's own operations in a kernel's place ----------------------------------------------------------------------


def plain_conv(self: layers.Conv2d, input: Tensor) -> Tensor:
    """Convolve in bfloat16: under vmap one grouped convolution of cuDNN."""
    bias = None if self.bias is None else self.bias.to(HALF)
    return F.conv2d(input.to(HALF), self.weight.to(HALF), bias, self.stride, self.padding)


def plain_norm(self: layers.GroupNorm, input: Tensor, residual: Tensor | None = None) -> Tensor:
    """Normalise in bfloat16, add the residual, apply the ReLU."""
    scale, shift = (part.to(HALF) for part in self._by_channel())
    out = F.group_norm(input.to(HALF), self.num_groups, scale, shift, self.eps)
    out = out if residual is None else out + residual.to(HALF)
    return F.relu(out) if self.relu else out


def plain_pool(self: layers.MaxPool2d, input: Tensor) -> Tensor:
    """Take the largest of each window by torch."""
    return F.max_pool2d(input, self.kernel_size, self.stride, self.padding)


NOT_USABLE = SimpleNamespace(usable=lambda *_: False)
NO_STAGE = (layers, "_stage", lambda _: None)
PLAIN_CONV = (layers.Conv2d, "forward", plain_conv)
PLAIN_NORM = (layers.GroupNorm, "forward", plain_norm)
BY_OPERATIONS = (optim, "update_in_place", lambda *_: False)

# By kernel, what is replaced so that it is not called: an object, its attribute, and the new one.
Replaced = list[tuple[Any, str, Any]]
KERNELS: dict[str, Replaced] = {
    "threefry": [(rng, "step", NOT_USABLE)],
    "sgd_update": [BY_OPERATIONS],
    "adam_update": [BY_OPERATIONS],
    "conv_stage": [NO_STAGE, PLAIN_CONV],
    "conv2d": [PLAIN_CONV],
    "norm": [PLAIN_NORM],
    "max_pool": [(layers.MaxPool2d, "forward", plain_pool)],
    "jitter": [(degrade, "images", NOT_USABLE)],
}
FURTHER: dict[str, Replaced] = {  # they say more, and are not judged
    "conv_stage, but not conv2d": [NO_STAGE],
    "conv2d and norm": [PLAIN_CONV, PLAIN_NORM],
}
OFF = KERNELS | FURTHER


@contextlib.contextmanager
def off(name: str) -> Iterator[None]:
    """Replace a kernel while the context lasts; no name replaces nothing."""
    with contextlib.ExitStack() as held:
        for where, attribute, other in OFF[name] if name else []:
            held.enter_context(mock.patch.object(where, attribute, other))
        yield


# --- workloads -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A round of training: FedAvg on 32x32 colour images, and the kernels that it calls."""

    name: str
    model: ModelSettings
    clients: int
    rows: int  # of each client
    training: Training
    kernels: tuple[str, ...]
    run: Callable[[int], Experiment] | None = None  # a whole run of it with so many rounds
    pool: Callable[[int, int], FederatedData] = images  # of so many clients and rows each

    @property
    def steps(self) -> int:
        """Steps of a round."""
        return self.training.steps or self.training.epochs * (self.rows // self.training.batch)


def paper_run(rounds: int) -> Experiment:
    """Return pFedFDA's CIFAR-10 run of FedAvg, on random rows."""
    data = ["data.name=random", "data.like=cifar10", "data.rows=60000"]
    return load("pfedfda/cifar10_dir0.5", "fedavg", [*data, f"training.rounds={rounds}"])[0]


def augmented(clients: int, rows: int) -> FederatedData:
    """Return random images, degraded and augmented at every access as in FedPCE's run."""
    changed = {"degrade": "fedpce", "augment": "fedpce", "normalise": "cifar"}
    split = {"pool": "train+test", "partition": "degradations", "clients": clients, "test": 0.2, "min_rows": 1}
    return federate_data(
        DataSettings("random", like="cifar10", rows=5 * clients * rows // 4, **split, **changed), seed=0
    )


CROSS_DEVICE = ModelSettings("cnn", width=32, hidden=512, dropout=0.5)


def cross_device(rounds: int) -> Experiment:
    """Return the run of benchmarks/cross_device.py, on random rows."""
    return Experiment(
        data=DataSettings("random", like="cifar10", rows=60_000, pool="split", partition="iid", clients=1000),
        model=CROSS_DEVICE,
        algorithm="fedavg",
        training=Training(rounds=rounds, epochs=1, batch=10, lr=0.1, rate=0.05),
    )


def small_batches(rounds: int) -> Experiment:
    """Return FedAvg on the data and settings of benchmarks/small_batches.py, on random rows."""
    data = DataSettings(
        "random", like="cifar10", rows=15_000, pool="train+test", partition="dirichlet", alpha=0.3, balance=True,
        clients=50, min_rows=40, test=0.2,
    )  # fmt: skip
    training = Training(rounds=rounds, epochs=1, batch=10, lr=0.01)
    return Experiment(data=data, model=ModelSettings("pfedvmp_cnn"), algorithm="fedavg", training=training)


STEP_PARTS = ("threefry", "sgd_update")
DEEP = ("conv2d", "norm", "conv2d and norm")
SGD = Training(epochs=5, batch=50, lr=0.01, momentum=0.5, weight_decay=5e-4)
WORKLOADS = {
    each.name: each
    for each in (
        Workload(
            "CIFAR-CNN 30 x 50",
            ModelSettings("cifar_cnn"),
            30,
            450,
            SGD,
            (*STEP_PARTS, "conv_stage", "conv_stage, but not conv2d"),
            paper_run,
        ),
        Workload(
            "CNN with dropout 50 x 10",
            CROSS_DEVICE,
            50,
            50,
            Training(epochs=1, batch=10, lr=0.1),
            (*STEP_PARTS, "conv_stage"),
            cross_device,
        ),
        Workload(
            "pFedVMP-CNN 50 x 10",
            ModelSettings("pfedvmp_cnn"),
            50,
            240,
            Training(epochs=1, batch=10, lr=0.01),
            (*STEP_PARTS, "conv_stage"),
            small_batches,
        ),
        Workload(
            "WRN-16-2 20 x 50",
            ModelSettings("wrn16_2"),
            20,
            500,
            dataclasses.replace(SGD, epochs=1),
            (*STEP_PARTS, *DEEP),
        ),
        Workload(
            "FedPCE's ResNet-18 24 x 64",
            ModelSettings("fedpce_resnet18"),
            24,
            320,
            Training(steps=5, batch=64, lr=1e-3, optimizer="adam"),
            ("adam_update", *DEEP, "max_pool", "jitter"),
            pool=augmented,
        ),
    )
}


def step_ms(workload: Workload, device: str, repeats: int) -> tuple[float, Tree, list[str]]:
    """Return the milliseconds of a step, the mean model after a round, and the notes."""
    pool = workload.pool(workload.clients, workload.rows)
    precision = "bf16" if device == "cuda" else "fp32"
    task = build_task(workload.model, (3, 32, 32), 10, device, precision=precision)
    params = task.init(rng.key(0))
    cohort = BatchedClients(ALGORITHMS["fedavg"](), task, params, pool, workload.training, seed=0)
    everyone = list(range(workload.clients))

    def round() -> Any:
        return cohort.train(1, everyone, {"model": params}, {})

    for _ in range(2):  # kernels and libraries are loaded, then all is recorded
        trained = round()
    mean = trained.uploads.mean("model")
    moved = {name: (mean[name] - params[name]).float().cpu() for name in params}
    return 1e3 * seconds(round, repeats) / workload.steps, moved, list(cohort.notes)


@functools.lru_cache(maxsize=1)
def built(make: Callable[[int], Experiment], rounds: int, device: str) -> tuple[Experiment, api.Built]:
    """Return a workload's experiment, its data and its model, once for all kernels."""
    experiment = make(rounds)
    return experiment, api.built(experiment, device, "bf16" if device == "cuda" else "fp32")


def run_ms(make: Callable[[int], Experiment], device: str, rounds: int) -> float:
    """Return the milliseconds of a round of a whole run, the median of its second half, the last one left out."""
    experiment, parts = built(make, rounds, device)
    taken = list[float]()
    api.carry_out(experiment, parts, callbacks=[lambda event: taken.append(sum(event.seconds.values()))])
    return 1e3 * statistics.median(taken[rounds // 2 : -1])


def distance(found: Tree, base: Tree) -> float:
    """Return how far a mean model is from another, relative to how far that one moved."""
    pairs = list(zip(leaves(found), leaves(base), strict=True))
    apart, moved = sum(float((a - b).square().sum()) for a, b in pairs), sum(float(b.square().sum()) for _, b in pairs)
    return (apart / moved) ** 0.5


def measured(workload: Workload, kernel: str, device: str, repeats: int, rounds: int) -> dict[str, Any]:
    """Return a step's and a run's milliseconds without a kernel, or with all of them; or why there are none."""
    try:
        with off(kernel):
            taken, moved, notes = step_ms(workload, device, repeats)
            found: dict[str, Any] = {"ms": taken, "moved": moved, "notes": notes}
            found["run_ms"] = run_ms(workload.run, device, rounds) if rounds and workload.run else None
    except Exception as error:  # one kernel's failure must not hide the others' times
        found = {"error": f"{type(error).__name__}: {reason(error)}"}
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    print(workload.name, kernel or "with all", {k: v for k, v in found.items() if k != "moved"}, flush=True)
    return found


def compared(workload: Workload, kernel: str, base: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    row: dict[str, Any] = {"kernel": kernel, "workload": workload.name}
    if "error" in found:
        return row | found
    row |= {"with_ms": base["ms"], "without_ms": found["ms"], "gain": 100.0 * (1.0 - base["ms"] / found["ms"])}
    if found["run_ms"]:
        row |= {"run_with_ms": base["run_ms"], "run_without_ms": found["run_ms"]}
        row["run_gain"] = 100.0 * (1.0 - base["run_ms"] / found["run_ms"])
    row["differs"] = distance(found["moved"], base["moved"])
    return row | ({"notes": found["notes"]} if found["notes"] else {})


def idle(rows: list[dict[str, Any]]) -> list[str]:
    """Return the kernels that were measured and gain less than the bar everywhere."""
    best = dict[str, float]()
    for row in rows:
        if row["kernel"] in KERNELS and "gain" in row:
            best[row["kernel"]] = max(best.get(row["kernel"], -100.0), row.get("run_gain", row["gain"]))
    return [kernel for kernel, gain in best.items() if gain < BAR]


def tiny(workload: Workload) -> Workload:
    """Return a round of few steps of six clients."""
    return dataclasses.replace(workload, clients=6, rows=20, training=dataclasses.replace(workload.training, batch=4))


def main() -> int:
    """Measure, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--workloads", default="", help="only those whose name starts with one of these: CIFAR,WRN")
    parser.add_argument("--kernels", default="", help="only these")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40, help="of the whole runs; 0 for none")
    parser.add_argument("--device", default="cuda", help="cpu, with tiny rounds, tries the script alone")
    chosen = parser.parse_args()
    if chosen.device == "cuda":
        report.needs_cuda()
    starts, kernels = tuple(chosen.workloads.split(",")), chosen.kernels.split(",") if chosen.kernels else list(OFF)
    table = list[dict[str, Any]]()
    try:
        for workload in WORKLOADS.values():
            wanted = [kernel for kernel in workload.kernels if kernel in kernels]
            if not workload.name.startswith(starts) or not wanted:
                continue
            if chosen.device == "cpu":
                workload = tiny(workload)
            rest = chosen.device, chosen.repeats, chosen.rounds
            base = measured(workload, "", *rest)
            if "error" in base:
                table.append({"kernel": "all", "workload": workload.name} | base)
                continue
            table += [compared(workload, kernel, base, measured(workload, kernel, *rest)) for kernel in wanted]
    finally:
        print(report.table(table))
        report.store(chosen.out, chosen.device, bar=BAR, rounds=chosen.rounds, rows=table)
    low = idle(table)
    if low:
        print(f"less than {BAR:.0f} % everywhere: {', '.join(low)}")
    return int(bool(low) or any("error" in row for row in table))


if __name__ == "__main__":
    sys.exit(main())
