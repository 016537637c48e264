"""Whole runs of deep nets: FedLDA's WRN-16-2 on CIFAR-10, and FedPCE's ResNet-18, from the start of the process.

FedLDA's run (20 clients with 500 rows, all in each of 200 rounds) is measured whole. FedPCE's (24 clients, 1000 rounds
of 50 Adam steps with augmentation, then 200 rounds of adaptation for six new clients) is scaled from some of its
rounds: what comes before and the first rounds, which record, count once; a later round counts as the mean of the later
ones, adaptation by its rounds, and checkpoints as often as a run writes them, which is for at most a tenth of its time.
``python benchmarks/deep_runs.py`` needs CUDA and the real CIFAR-10; it prints a table and writes ``deep_runs.json``.
"""

import math
import statistics
import sys
from typing import Any

import report
from paper_run import measure

ROUNDS, ADAPT = 1000, 200  # of FedPCE's run
EARLY = 10  # rounds that may record
BARS = {"FedLDA": 60.0, "FedPCE": 650.0}


def fedlda() -> dict[str, Any]:
    """Measure FedLDA's run."""
    run = measure("fedlda", 0, "auto", ["training.rate=1.0", "training.lr=0.01"], None, "fedlda/cifar10_wrn16_2")
    return {"run": "FedLDA", "seconds": run["seconds"]["total"], "measured": run}


def fedpce(rounds: int, adapt: int) -> dict[str, Any]:
    """Measure some of FedPCE's rounds, and scale."""
    few = [f"training.rounds={rounds}", f"evaluation.adapt_rounds={adapt}"]
    run = measure("fedpce", 0, "auto", few, None, "fedpce/cifar10")
    sums = [sum(seconds.values()) for seconds in run["by_round"]]
    evaluations = [seconds["evaluate"] for seconds in run["by_round"] if seconds["evaluate"] > 0.01]
    last = evaluations[-1] - statistics.median(evaluations[:-1])  # adaptation is part of the last evaluation
    written = [seconds["checkpoint"] for seconds in run["by_round"] if seconds["checkpoint"] > 0.01]
    checkpoint = statistics.mean(written)
    round_ = statistics.mean(sum(s.values()) - s["checkpoint"] for s in run["by_round"][EARLY:-1])
    between = EARLY * math.ceil(checkpoint / (0.1 * round_) / EARLY)  # rounds from one checkpoint to the next
    checkpoints = (ROUNDS - EARLY) // between * checkpoint
    before = run["seconds"]["total"] - sum(sums)
    seconds = before + sum(sums[:EARLY]) + (ROUNDS - EARLY) * round_ + last * ADAPT / adapt + checkpoints
    parts = {"before": before, "a round": round_, "an adapt round": last / adapt, "checkpoints": checkpoints}
    return {"run": "FedPCE", "seconds": seconds, **parts, "rounds measured": rounds, "measured": run}


def main() -> int:
    """Measure, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--only", default="FedLDA,FedPCE")
    parser.add_argument("--rounds", type=int, default=100, help="of FedPCE's run")
    parser.add_argument("--adapt", type=int, default=40, help="of FedPCE's adaptation")
    chosen = parser.parse_args()
    report.needs_cuda()
    rows = []
    for name in chosen.only.split(","):
        rows.append(fedlda() if name == "FedLDA" else fedpce(chosen.rounds, chosen.adapt))
        print(f"{name}: {rows[-1]['seconds']:.1f} s {rows[-1]['measured']['notes'] or ''}", flush=True)
    print(report.table(rows))
    for row in rows:
        row["measured"].pop("by_round")
    report.store(chosen.out, "cuda", runs=rows)
    return int(any(row["seconds"] > BARS[row["run"]] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
