"""What packing costs: a step by its number of lanes, and whole runs by how finely finished lanes are dropped.

Clients that have finished are dropped in units of lanes. A small unit computes less in vain, and has more steps to
record. ``python benchmarks/packing.py`` needs CUDA and the labels of CIFAR-10; it measures the steps of the CIFAR-CNN
through ``clients.train`` and what a recording costs, adds them up over the 200 rounds of pFedFDA's CIFAR-10 run for
each unit, prints two tables and writes ``packing.json`` beside itself.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cohort_step import images, seconds

from bespoke.algorithms import ALGORITHMS
from bespoke.clients import BatchedClients, graphs
from bespoke.core import rng
from bespoke.core.settings import Training
from bespoke.datasets import partitioned
from bespoke.experiment import load
from bespoke.models import ModelSettings, build_task

LANES = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
UNITS = (1, 2, 4, 8, 16, 32)
BATCH, STEPS = 50, 100


def measure(lanes: int, precision: str) -> tuple[float, float]:
    """Milliseconds of a step of so many lanes, and of recording it (the kernels are there already)."""
    pool = images(lanes, 4 * BATCH)
    task = build_task(ModelSettings(name="cifar_cnn"), (3, 32, 32), 10, "cuda", precision=precision)
    params = task.init(rng.key(0))
    training = Training(steps=STEPS, batch=BATCH, lr=0.01, momentum=0.5, weight_decay=5e-4)
    cohort = BatchedClients(ALGORITHMS["fedavg"](), task, params, pool, training, seed=0)
    everyone = list(range(lanes))

    def round() -> None:
        cohort.train(1, everyone, {"model": params}, {})

    round()
    capture = cohort.runner.timings()["capture"]  # of the loop's step; the plan around it is recorded the next time
    round()
    return 1e3 * seconds(round, 3) / STEPS, 1e3 * capture


def between(known: dict[int, float]) -> Callable[[int], float]:
    """The time of any number of lanes, on straight lines between the measured ones."""

    def at(lanes: int) -> float:
        if lanes in known:
            return known[lanes]
        low, high = max(k for k in known if k < lanes), min(k for k in known if k > lanes)
        return known[low] + (known[high] - known[low]) * (lanes - low) / (high - low)

    return at


def steps_of_run(unit: int) -> Counter[int]:
    """How often steps of each number of lanes occur in the run, if lanes are dropped in such units."""
    experiment, _ = load("pfedfda/cifar10_dir0.5", "fedavg")
    sizes = partitioned(experiment.data, experiment.seed)[0].train.sizes
    training, counts = experiment.training, Counter[int]()
    for round in range(1, training.rounds + 1):
        cohort = rng.cohort(rng.key(experiment.seed), round, len(sizes), training.rate, training.sampling)
        left = sorted(training.epochs * -(-sizes[c] // training.batch) for c in cohort)
        lanes, done = -(-len(left) // unit) * unit, 0
        for step in range(left[-1]):
            while left[done] <= step:
                done += 1
            active = len(left) - done
            lanes = min(lanes, active if active <= 2 else -(-active // unit) * unit)
            counts[lanes] += 1
    return counts


def main() -> int:
    """Measure, add up, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")))
    chosen = parser.parse_args()
    measure(4, chosen.precision)  # compiles the kernels
    steps, captures = dict[int, float](), list[float]()
    for lanes in LANES:
        steps[lanes], capture = measure(lanes, chosen.precision)
        captures.append(capture)
        print(f"{lanes:3} lanes: {steps[lanes]:.3f} ms a step, {steps[lanes] / lanes:.4f} a lane", flush=True)
    recording, at = sorted(captures)[len(captures) // 2], between(steps)
    print(f"a recording: {recording:.0f} ms")
    units = list[dict[str, Any]]()
    for unit in UNITS:
        counts = steps_of_run(unit)
        replay, record = sum(n * at(lanes) for lanes, n in counts.items()) / 1e3, len(counts) * recording / 1e3
        units.append({"unit": unit, "steps": counts.total(), "recordings": len(counts)})
        units[-1] |= {"replay_s": round(replay, 2), "record_s": round(record, 2), "sum_s": round(replay + record, 2)}
        print(units[-1], "<- used" if unit == graphs.STEP_LANES else "", flush=True)
    result = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "precision": chosen.precision,
        "step_ms": {k: round(v, 4) for k, v in steps.items()},
        "record_ms": round(recording, 1),
        "units": units,
    }
    Path(chosen.out).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
