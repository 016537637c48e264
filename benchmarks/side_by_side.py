"""What finishes most trainings a second on one GPU: processes with and without MPS, threads, or further lanes.

The trainings are pFedFDA's CIFAR-10 run, shortened, by FedAvg and by pFedFDA, all with one seed, so that their work is
the same. ``python benchmarks/side_by_side.py`` needs CUDA; without CIFAR-10 it takes random rows of its shape. Each way
is held against one process alone: ``gain`` counts from the start of the first process to the end of the last,
``steady_gain`` the rounds a second while all are training, which is what lasting workers gain. Several seeds as lanes
of one program are not built: their line is the most that they could give, a step of 30 lanes times their number over a
step of all lanes. It prints a table and writes ``side_by_side.json``.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import report
import torch
from cohort_step import images, seconds
from paper_run import EXPERIMENT, METHODS

from bespoke.algorithms import ALGORITHMS
from bespoke.clients import BatchedClients
from bespoke.core import rng
from bespoke.core.settings import Training
from bespoke.errors import UserError, reason
from bespoke.models import ModelSettings, build_task
from bespoke.runs import api
from bespoke.runs.experiment import load
from bespoke.tables import mps

PARTS = ("processes", "mps", "threads", "lanes")
LANES, BATCH, STEPS = 30, 50, 100
RANDOM = ["data.name=random", "data.like=cifar10", "data.rows=60000"]
UNSAFE = "threads share the collector and the arithmetic's switches, which a recording and a run set for all of them"


# --- the trainings ---------------------------------------------------------------------------------------------------


def train(method: str, overrides: list[str], device: str) -> dict[str, Any]:
    """Run once; return when each round ended, and the notes, or why it failed."""
    ends = list[float]()
    try:
        experiment, _ = load(EXPERIMENT, method, [*METHODS[method], *overrides])
        run = api.run(experiment, device=device, callbacks=[lambda event: ends.append(time.time())])
    except Exception as error:  # of one thread; the others go on, and the parent says it
        return {"ends": ends, "error": f"{type(error).__name__}: {reason(error)}"}
    return {"ends": ends, "notes": run.notes}


def child(method: str, threads: int, overrides: list[str], device: str) -> None:
    """Run once in each thread, on a stream of its own, and print what is told of it as JSON."""
    torch.set_num_threads(1)

    def own(_: int) -> dict[str, Any]:
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
        with stream:
            return train(method, overrides, device)

    if threads == 1:
        print(json.dumps([train(method, overrides, device)]))
    else:
        with ThreadPoolExecutor(threads) as pool:
            print(json.dumps(list(pool.map(own, range(threads)))))


def together(
    method: str, processes: int, threads: int, overrides: list[str], device: str, own: Mapping[str, str], limit: float
) -> tuple[float, list[dict[str, Any]]]:
    """Start processes together; return the seconds until the last one ended, and what their runs told."""
    words = [sys.executable, __file__, "--child", method, "--threads", str(threads), "--device", device]
    words += [word for override in overrides for word in ("--set", override)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | own
    begin, told = time.time(), list[dict[str, Any]]()
    children = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(processes)
    ]
    for each in children:
        try:
            out, err = each.communicate(timeout=max(1.0, begin + limit - time.time()))
        except subprocess.TimeoutExpired:
            each.kill()
            each.communicate()
            told.append({"error": f"it did not end within {limit:.0f} s"})
            continue
        lines = err.strip().splitlines() or ["it said nothing"]
        told += (
            json.loads(out.splitlines()[-1])
            if each.returncode == 0
            else [{"error": f"code {each.returncode}: {lines[-1]}"}]
        )
    return time.time() - begin, told


def steady(runs: list[list[float]]) -> float:
    """Return the rounds a second of runs, from when all have had their first quarter until one begins its last round.

    In the first quarter most steps are recorded. It is 0 where they are never all at it, since they are too short.
    """
    begin, end = max(ends[len(ends) // 4] for ends in runs), min(ends[-2] for ends in runs)
    return sum(begin < each <= end for ends in runs for each in ends) / (end - begin) if end > begin else 0.0


def measured(way: str, method: str, number: int, *rest: Any) -> dict[str, Any]:
    """Return a row of the table: so many trainings at once."""
    threads = number if way == "threads" else 1
    taken, told = together(method, number // threads, threads, *rest)
    row: dict[str, Any] = {"method": method, "way": way, "number": number, "seconds": taken}
    errors = list(dict.fromkeys(each["error"] for each in told if "error" in each))
    if errors:
        return row | {"error": "; ".join(errors)}
    row |= {"trainings_per_s": number / taken, "rounds_per_s": steady([each["ends"] for each in told])}
    notes = list(dict.fromkeys(note for each in told for note in each["notes"]))
    return row | ({"notes": notes} if notes else {})


def against(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Add a row's gains over one process alone."""
    names = {"gain": "trainings_per_s", "steady_gain": "rounds_per_s"}
    return row | {gain: row[key] / base[key] for gain, key in names.items() if row.get(key) and base.get(key)}


def ways(
    parts: list[str], numbers: list[int], threads: list[int]
) -> Generator[tuple[str, int, Mapping[str, str]], None, None]:
    """Yield each way, its number of trainings, and the environment of its processes; the baseline first."""
    yield "processes", 1, {}
    for number in numbers if "processes" in parts else []:
        if number > 1:
            yield "processes", number, {}
    for number in threads if "threads" in parts else []:
        yield "threads", number, {}
    if "mps" in parts:
        with mps.service() as shared:
            print(f"{shared.words[0].upper()}{shared.words[1:]}", flush=True)
            for number in numbers if shared.environment else []:
                yield "mps", number, shared.environment


# --- further lanes ---------------------------------------------------------------------------------------------------


class Wide(BatchedClients):
    """All clients in one block."""

    chunk = 4 * LANES


def step(lanes: int, steps: int, device: str) -> float:
    """Return the milliseconds of a step of the CIFAR-CNN with so many lanes."""
    pool = images(lanes, 4 * BATCH)
    precision = "bf16" if device == "cuda" else "fp32"
    task = build_task(ModelSettings(name="cifar_cnn"), (3, 32, 32), 10, device, precision=precision)
    params = task.init(rng.key(0))
    training = Training(steps=steps, batch=BATCH, lr=0.01, momentum=0.5, weight_decay=5e-4)
    cohort = Wide(ALGORITHMS["fedavg"](), task, params, pool, training, seed=0)
    everyone = list(range(lanes))

    def round() -> None:
        cohort.train(1, everyone, {"model": params}, {})

    for _ in range(2):  # the kernels are compiled, then all is recorded
        round()
    return 1e3 * seconds(round, 3) / steps


def lanes(steps: int, device: str) -> list[dict[str, Any]]:
    """Return the most that two and three seeds as further lanes could give."""
    rows = list[dict[str, Any]]()
    for number in (1, 2, 3):
        taken = step(number * LANES, steps, device)
        first = rows[0]["step_ms"] if rows else taken
        rows.append({"way": "lanes", "number": number, "lanes": number * LANES, "step_ms": taken})
        rows[-1]["steady_gain"] = number * first / taken
        print(rows[-1], flush=True)
    return rows


# --- all of it -------------------------------------------------------------------------------------------------------


def data(overrides: list[str]) -> list[str]:
    """Return the overrides, with random rows where CIFAR-10 is not at hand."""
    if any(override.startswith("data.name") for override in overrides):
        return overrides
    try:
        api.data_of(load(EXPERIMENT, "fedavg", overrides)[0])
    except UserError as error:
        print(f"random rows of CIFAR-10's shape: {error}", flush=True)
        return [*RANDOM, *overrides]
    return overrides


def main() -> int:
    """Measure, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--processes", default="1,2,3,4,6")
    parser.add_argument("--in-threads", default="2,4")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one measurement, at most")
    for hidden, default in (("--device", "cuda"), ("--child", ""), ("--threads", 1), ("--steps", STEPS)):
        parser.add_argument(hidden, type=type(default), default=default, help="not for you")
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen.child, chosen.threads, chosen.set, chosen.device)
        return 0
    if chosen.device == "cuda":
        report.needs_cuda()
    parts, methods = chosen.parts.split(","), chosen.methods.split(",")
    numbers, threads = ([int(n) for n in text.split(",")] for text in (chosen.processes, chosen.in_threads))
    rows = list[dict[str, Any]]()
    try:
        if {*parts} - {"lanes"}:
            rest = [*data(chosen.set), f"training.rounds={chosen.rounds}"], chosen.device
            for method in [*methods]:
                warm = measured("processes", method, 1, *rest, {}, chosen.limit)  # compiles the kernels
                print(f"{method}: {warm.get('error', 'the kernels are compiled')}", flush=True)
                if "error" in warm:
                    methods.remove(method)
                    rows.append(warm)
            base, failed = dict[str, dict[str, Any]](), set[tuple[str, str]]()
            with contextlib.closing(ways(parts, numbers, threads)) as planned:  # also ends the service
                for way, number, own in planned:
                    for method in methods:
                        if (way, method) in failed:
                            continue
                        row = measured(way, method, number, *rest, own, chosen.limit)
                        rows.append(against(row, base.setdefault(method, row)))
                        failed |= {(way, method)} if "error" in row else set()
                        print(rows[-1], *([UNSAFE] if way == "threads" else []), flush=True)
        rows += lanes(chosen.steps, chosen.device) if "lanes" in parts else []
    finally:
        print(report.table(rows))
        report.store(chosen.out, chosen.device, rounds=chosen.rounds, cores=os.cpu_count(), threads=UNSAFE, rows=rows)
    return int(any("error" in row and row["way"] == "processes" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
