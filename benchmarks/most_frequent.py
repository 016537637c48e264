"""What shares of classes give without training: clients of papers' tables that name their most frequent class.

A client names the most frequent class of its train rows for each of its test rows. The accuracy is FedLDA's mean over
clients, and pFedVMP's over all test rows together. How far it varies over seeds says how far chance in a partition
moves such tables. ``python benchmarks/most_frequent.py --out results/most_frequent.json``
"""

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev

from bespoke.core.data import FederatedData
from bespoke.files import write_atomic
from bespoke.runs.api import data_of
from bespoke.runs.execution import code_commit
from bespoke.runs.experiment import load

SEEDS = 20
SETTINGS = {  # the run file, what is changed in it, and whether all test rows are taken together
    "FedLDA, 500 rows": ("fedlda/cifar10_wrn16_2", [], False),
    "FedLDA, 1000 rows": ("fedlda/cifar10_wrn16_2", ["data.volume=1000"], False),
    "FedLDA, 2000 rows": ("fedlda/cifar10_wrn16_2", ["data.volume=2000"], False),
    "FedLDA, all rows": ("fedlda/cifar10_dir_wrn16_2", [], False),
    "FedLDA, 500 rows, Dir(0.2)": ("fedlda/cifar10_wrn16_2", ["data.alpha=0.2"], False),
    "FedLDA, 500 rows, Dir(0.3)": ("fedlda/cifar10_wrn16_2", ["data.alpha=0.3"], False),
    "pFedVMP, CIFAR-10 Dir(0.3)": ("pfedvmp/cifar10_dir0.3", [], True),
    "pFedVMP, Fashion-MNIST Dir(0.3)": ("pfedvmp/fmnist_dir0.3", [], True),
}


def percent(data: FederatedData, pooled: bool) -> float:
    """Return the accuracy in percent, over all test rows together or in the mean over clients."""
    right, rows = [], []
    for i in range(data.num_clients):
        named = data.y[data.train.client(i)].mode().values
        test = data.y[data.test.client(i)]
        right.append(int((test == named).sum()))
        rows.append(len(test))
    if pooled:
        return 100 * sum(right) / sum(rows)
    return 100 * fmean(a / n for a, n in zip(right, rows, strict=True))


def main() -> None:
    """Write the accuracy for each setting and seed, and print its mean over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "most_frequent.json")
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name, (run_file, settings, pooled) in SETTINGS.items():
        found[name] = {}
        for seed in range(SEEDS):
            data, _ = data_of(load(run_file, "fedavg", settings, seed)[0])
            found[name][str(seed)] = round(percent(data, pooled), 2)
        told = found[name].values()
        print(f"{name}: {fmean(told):.1f} ± {stdev(told):.1f} %, from {min(told)} to {max(told)}", flush=True)
    write_atomic(args.out, json.dumps({"commit": code_commit(), "mean_percent_by_seed": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
