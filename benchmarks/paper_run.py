"""pFedFDA's whole CIFAR-10 run: 100 clients, Dir(0.5), 30 per round, 200 rounds of 5 epochs, from start to results.

Each run is a separate process, timed from before its start. ``python benchmarks/paper_run.py`` needs CUDA and the
real CIFAR-10 (``bespoke data fetch cifar10``); it prints a table and writes ``paper_run.json`` beside itself. Each
method runs twice: first with an empty cache, so that it compiles its kernels, then with the filled cache.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

EXPERIMENT = "pfedfda/cifar10_dir0.5"
# FedAvg is looked at as FedAvg with fine-tuning: each client's model after its last local training.
METHODS: dict[str, list[str]] = {"fedavg": ["evaluation.when='local'"], "pfedfda": []}
BARS = {"fedavg": 12.0, "pfedfda": 14.0}
FIRST = 6.0  # seconds that a first run, which compiles, may take longer
RATIO = 1.35  # pFedFDA may take this many times as long as FedAvg


def child(method: str, began: float, seed: int, precision: str, overrides: list[str], file: str) -> None:
    """Do one run of an experiment's ``file``, and print its figures as JSON."""
    from bespoke.runs import api
    from bespoke.runs.experiment import load

    laps = {"start": time.time() - began}
    experiment, _ = load(file, method, [*METHODS.get(method, []), *overrides], seed)
    rounds: list[dict[str, float]] = []
    ends: list[float] = []

    def note(event: Any) -> None:
        ends.append(time.time())
        rounds.append(dict(event.seconds))

    run = api.run(experiment, device="cuda", precision=precision, callbacks=[note])
    laps["data"] = ends[0] - sum(rounds[0].values()) - began - laps["start"]
    for phase in ("train", "aggregate", "evaluate", "record", "checkpoint"):
        laps[phase] = sum(r[phase] for r in rounds)
    laps["total"] = time.time() - began
    environment = run.folder.read_json("environment.json")
    last = next(iter(run.summary["views"].values()))["last"]["all"]
    waste = [r["padding_waste"] for r in run.folder.rounds()]
    print(
        json.dumps(
            {
                "method": method,
                "seed": seed,
                "precision": environment["precision"],
                "rounds": len(rounds),
                "pooled": last["pooled"],
                "mean": last["mean"],
                "padding_waste": sum(waste) / len(waste),
                "seconds": {k: round(v, 2) for k, v in laps.items()},
                "by_round": [{k: round(v, 4) for k, v in r.items()} for r in rounds],
                "device_seconds": environment["device_seconds"],
                "notes": run.notes,
            }
        )
    )


def environment() -> dict[str, str]:
    """Return variables that let Python cache compiled modules, also where packages cannot be written to."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {"PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "bespoke-pycache")} | kept


def measure(
    method: str, seed: int, precision: str, overrides: list[str], cache: str | None, file: str = EXPERIMENT
) -> dict[str, Any]:
    """Measure one run in a separate process; ``cache`` is the folder of its compiled kernels, if not the usual one."""
    command = [sys.executable, __file__, "--child", method, "--seeds", str(seed), "--precision", precision]
    command += ["--experiment", file]
    for override in overrides:
        command += ["--set", override]
    own = {} if cache is None else {"TRITON_CACHE_DIR": cache}
    begin = ["--began", repr(time.time())]
    done = subprocess.run([*command, *begin], capture_output=True, text=True, env=environment() | own)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# What the table shows of a run.
LINES: dict[str, Callable[[dict[str, Any]], float]] = {
    "start of Python and torch": lambda run: run["seconds"]["start"],
    "data, model, clients": lambda run: run["seconds"]["data"],
    "training": lambda run: run["seconds"]["train"],
    "- on the device: recorded steps": lambda run: run["device_seconds"]["steps"],
    "- on the device: batches, statistics, all else": lambda run: run["device_seconds"]["update"],
    "- on the host, in between: recording": lambda run: run["device_seconds"]["recording"],
    "aggregation": lambda run: run["seconds"]["aggregate"],
    "evaluation": lambda run: run["seconds"]["evaluate"],
    "records and checkpoints": lambda run: run["seconds"]["record"] + run["seconds"]["checkpoint"],
    "whole run": lambda run: run["seconds"]["total"],
}


def by_phase(runs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the table's rows: seconds by phase, one column per run."""
    heads = [f"{run['method']} {run['precision']} {run['seed']}" for run in runs]
    rows = {name: [line(run) for run in runs] for name, line in LINES.items()}
    if all(run["compiling"] is not None for run in runs):
        rows["more in a first run, which compiles"] = [run["compiling"] for run in runs]
    rows |= {f"{key}, %": [100 * run[key] for run in runs] for key in ("pooled", "mean", "padding_waste")}
    return [
        {"seconds": name} | {head: f"{x:.1f}" for head, x in zip(heads, cells, strict=True)}
        for name, cells in rows.items()
    ]


def main() -> int:
    """Run the methods, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--child", default="")
    parser.add_argument("--experiment", default=EXPERIMENT)
    parser.add_argument("--began", type=float, default=0.0)
    parser.add_argument("--once", action="store_true", help="run once, with the usual kernel cache")
    chosen = parser.parse_args()
    seeds = [int(s) for s in chosen.seeds.split(",")]
    if chosen.child:
        child(chosen.child, chosen.began, seeds[0], chosen.precision, chosen.set, chosen.experiment)
        return 0
    report.needs_cuda()
    # Python's modules and torch's libraries are read from the disk once, so that a first run differs by its kernels.
    once = [
        sys.executable,
        "-c",
        "import bespoke.runs.api, triton, torch; torch.ones(9, 9).cuda() @ torch.ones(9).cuda()",
    ]
    subprocess.run(once, env=environment(), check=True)
    runs = []
    for precision, method, seed in itertools.product(chosen.precision.split(","), chosen.methods.split(","), seeds):
        with tempfile.TemporaryDirectory() as folder:
            cache = None if chosen.once else folder
            cold = None if chosen.once else measure(method, seed, precision, chosen.set, cache)["seconds"]["total"]
            run = measure(method, seed, precision, chosen.set, cache)
        del run["by_round"]
        run["compiling"] = None if cold is None else round(cold - run["seconds"]["total"], 2)
        runs.append(run)
        print(
            f"{method} {run['precision']} seed {seed}: {run['seconds']['total']:.1f} s {run['notes'] or ''}", flush=True
        )
    print(report.table(by_phase(runs)))
    report.store(chosen.out, "cuda", runs=runs)
    total = dict[str, float]()  # the slowest of each method's whole runs in the precision that the bars are for
    for run in runs:
        if run["rounds"] == 200 and run["precision"] == "bf16":
            total[run["method"]] = max(total.get(run["method"], 0.0), run["seconds"]["total"])
    ratio = total["pfedfda"] / total["fedavg"] if total.keys() == BARS.keys() else 0.0
    if ratio:
        print(f"pFedFDA / FedAvg: {ratio:.2f} (at most {RATIO})")
    slow_first = any((run["compiling"] or 0.0) > FIRST for run in runs)
    return int(ratio > RATIO or slow_first or any(total[method] > BARS[method] for method in total))


if __name__ == "__main__":
    sys.exit(main())
