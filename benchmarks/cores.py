"""One run on the cores of a CPU: pFedFDA's cohort of 30 of 100 clients on its CIFAR CNN, in one process and in several.

Random rows in CIFAR-10's shape, Dirichlet .5, batches of 50, one epoch, FedAvg and pFedFDA. ``python
benchmarks/cores.py`` runs each with one process and with ``auto``, which takes one for each core, in turns, compares
the records to the bit, prints a table and writes ``cores.json``. It needs no GPU; other programs on the machine spoil
the ratio.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import report
import torch

import bespoke
from bespoke import DataSettings, Evaluation, Experiment, ModelSettings, Training

BAR = 1.6  # on two cores


def workload(method: str, rounds: int) -> Experiment:
    """Return the experiment."""
    return Experiment(
        data=DataSettings("random", like="cifar10", rows=12_000, partition="dirichlet", alpha=0.5, clients=100),
        model=ModelSettings("cifar_cnn"),
        algorithm=method,
        training=Training(rounds=rounds, epochs=1, batch=50, lr=0.01, rate=0.3),
        evaluation=Evaluation(every=rounds),
    )


def seconds(experiment: Experiment, folder: Path, processes: int | str) -> float:
    """Return how long a run takes, from its settings to its end."""
    begin = time.perf_counter()
    run = bespoke.run(experiment, folder, device="cpu", processes=processes)
    taken = time.perf_counter() - begin
    if processes == "auto" and not any("spread over" in note for note in run.notes):
        raise SystemExit(f"auto took one process: {run.notes}")
    return taken


def main() -> int:
    """Run all, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    cores, runs = len(os.sched_getaffinity(0)), []
    if cores < 2:
        raise SystemExit("this benchmark needs two cores or more, and this process has one")
    for method in ("fedavg", "pfedfda"):
        experiment = workload(method, chosen.rounds)
        found: dict[int | str, list[float]] = {1: [], "auto": []}
        with tempfile.TemporaryDirectory() as name:
            for repeat in range(chosen.repeats):
                for number, times in found.items():
                    times.append(seconds(experiment, Path(name) / f"{number}-{repeat}", number))
            records = [[Path(name) / f"{n}-0" / f"{part}.jsonl" for part in ("rounds", "clients")] for n in found]
            same = all(one.read_bytes() == all_.read_bytes() for one, all_ in zip(*records, strict=True))
        one, all_ = (statistics.median(times) for times in found.values())
        runs.append(
            {"method": method, "processes": cores, "one_s": one, "all_s": all_, "ratio": one / all_, "same": same}
        )
        print(runs[-1], flush=True)
    print(report.table(runs))
    report.store(chosen.out, "cpu", rounds=chosen.rounds, cores=cores, bar=BAR, runs=runs)
    return int(not all(run["same"] and (cores != 2 or run["ratio"] >= BAR) for run in runs))


if __name__ == "__main__":
    sys.exit(main())
