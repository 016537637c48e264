"""The cost of packing: a step by its number of lanes, and whole runs by how finely finished lanes are dropped.

Clients that have finished are dropped in units of lanes. A small unit wastes less work, but has more steps to record.
``python benchmarks/packing.py`` needs CUDA and the labels of CIFAR-10; it measures the steps of the CIFAR-CNN through
``clients.train`` and the cost of a recording, sums them over the 200 rounds of pFedFDA's CIFAR-10 run for each unit,
prints two tables and writes ``packing.json`` beside itself.
"""

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import report
from cohort_step import images, seconds

from bespoke.algorithms import ALGORITHMS
from bespoke.clients import BatchedClients
from bespoke.core import rng
from bespoke.core.local import per_pass
from bespoke.core.settings import Training
from bespoke.data import partitioned
from bespoke.engine import graphs
from bespoke.engine.lanes import blocks, schedule
from bespoke.models import ModelSettings, build_task
from bespoke.runs.experiment import load

LANES = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
UNITS = (1, 2, 4, 8, 16, 32)
BATCH, STEPS = 50, 100


def measure(lanes: int, precision: str) -> tuple[float, float]:
    """Return the milliseconds of a step of this many lanes, and of recording it (with compiled kernels)."""
    pool = images(lanes, 4 * BATCH)
    task = build_task(ModelSettings(name="cifar_cnn"), (3, 32, 32), 10, "cuda", precision=precision)
    params = task.init(rng.key(0))
    training = Training(steps=STEPS, batch=BATCH, lr=0.01, momentum=0.5, weight_decay=5e-4)
    cohort = BatchedClients(ALGORITHMS["fedavg"](), task, params, pool, training, seed=0)
    everyone = list(range(lanes))

    def round() -> None:
        cohort.train(1, everyone, {"model": params}, {})

    round()
    capture = cohort.runner.timings()["recording"]  # of the loop's step; the plan around it is recorded the next time
    round()
    return 1e3 * seconds(round, 3) / STEPS, 1e3 * capture


def steps_of_run(unit: int) -> Counter[int]:
    """Count the steps by number of lanes in the run, if lanes are dropped in units of this size."""
    experiment, _ = load("pfedfda/cifar10_dir0.5", "fedavg")
    sizes = partitioned(experiment.data, experiment.seed)[0].train.sizes
    training, counts, everyone = experiment.training, Counter[int](), list(range(len(sizes)))
    drop = training.last_batch == "drop"
    graphs.STEP_LANES, used = unit, graphs.STEP_LANES
    for round in range(1, training.rounds + 1):
        cohort = rng.cohort(rng.key(experiment.seed), round, len(sizes), training.rate, training.sampling)
        cohort = everyone if training.full_last and round == training.rounds else cohort
        for block in blocks([sizes[c] for c in cohort], BatchedClients.chunk, similar=0.0):
            job = SimpleNamespace(
                num_steps=lambda n: training.epochs * per_pass(n, training.batch, drop),
                carry=[range(graphs._up(len(block), graphs.PLAN_LANES))],
                rows=0,
                rows_seen=lambda n: 0,
            )
            plan = schedule(job, [sizes[cohort[i]] for i in block], graphs._slots)  # type: ignore[arg-type]
            counts.update(lanes for _, _, lanes in plan.steps)
    graphs.STEP_LANES = used
    return counts


def by_unit(step_ms: dict[int, float], record_ms: float) -> list[dict[str, Any]]:
    """Return the seconds of the run for each unit, interpolating linearly between the measured numbers of lanes."""
    rows = list[dict[str, Any]]()
    for unit in UNITS:
        counts = steps_of_run(unit)
        times = np.interp(list(counts), list(step_ms), list(step_ms.values()))
        replay, record = float(times @ list(counts.values())) / 1e3, len(counts) * record_ms / 1e3
        rows.append({"unit": unit, "steps": counts.total(), "recordings": len(counts)})
        rows[-1] |= {"replay_s": round(replay, 2), "record_s": round(record, 2), "sum_s": round(replay + record, 2)}
    return rows


def main() -> int:
    """Measure, sum, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--precision", default="bf16")
    chosen = parser.parse_args()
    report.needs_cuda()
    measure(4, chosen.precision)  # compiles the kernels
    steps, captures = dict[int, float](), list[float]()
    for lanes in LANES:
        steps[lanes], capture = measure(lanes, chosen.precision)
        captures.append(capture)
        print(f"{lanes:3} lanes: {steps[lanes]:.3f} ms a step, {steps[lanes] / lanes:.4f} a lane", flush=True)
    recording = sorted(captures)[len(captures) // 2]
    units = by_unit(steps, recording)
    print(f"a recording: {recording:.0f} ms; the unit that is used: {graphs.STEP_LANES}", report.table(units), sep="\n")
    report.store(chosen.out, "cuda", precision=chosen.precision, step_ms=steps, record_ms=recording, units=units)
    return 0


if __name__ == "__main__":
    sys.exit(main())
