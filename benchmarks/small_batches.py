"""Batches so small that launches dominate: pFedVMP's CIFAR-10 run, 50 clients, all in each of 1000 rounds, batch 10.

25 % of the pooled CIFAR-10, Dir(0.3), one epoch per round, FedPer and pFedVMP, evaluated at the end, through
``bespoke.run``. ``python benchmarks/small_batches.py`` needs CUDA and the real CIFAR-10; it prints a table and
writes ``small_batches.json``.
"""

import sys
import time

import report

import bespoke
from bespoke import DataSettings, Experiment, ModelSettings, Training

BARS = {"fedper": 85.0, "pfedvmp": 120.0}


def main() -> int:
    """Run both, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=1000)
    chosen = parser.parse_args()
    report.needs_cuda()
    runs, slow = [], False
    for method, bar in BARS.items():
        experiment = Experiment(
            data=DataSettings(
                name="cifar10",
                pool="train+test",
                subsample=0.25,
                partition="dirichlet",
                alpha=0.3,
                balance=True,
                clients=50,
                min_rows=40,
                test=0.2,
            ),
            model=ModelSettings("pfedvmp_cnn"),
            algorithm=method,
            training=Training(rounds=chosen.rounds, epochs=1, batch=10, lr=0.01),
        )
        begin = time.perf_counter()
        run = bespoke.run(experiment, device="cuda", precision="bf16", checkpoint_every=100)
        total = time.perf_counter() - begin
        last = run.summary["views"]["personal"]["last"]["all"]
        result = {
            "method": method,
            "rounds": chosen.rounds,
            "seconds": round(total, 2),
            "bar_s": bar,
            "pooled": last["pooled"],
            "mean": last["mean"],
            "device_seconds": run.folder.read_json("environment.json")["device_seconds"],
            "notes": run.notes,
        }
        print(f"{method}: {total:.1f} s", *run.notes, flush=True)
        runs.append(result)
        slow |= chosen.rounds == 1000 and total > bar
    print(report.table(runs))
    report.store(chosen.out, "cuda", runs=runs)
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
