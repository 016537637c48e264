"""What shares of classes give without training: clients of FedLDA's Table 1 that name their most frequent class.

A client names the most frequent class of its train rows for each of its test rows; the accuracy is the mean over the
clients, as in the table. ``python benchmarks/most_frequent.py --out results/most_frequent.json``
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

from bespoke.files import write_atomic
from bespoke.runs.api import data_of
from bespoke.runs.execution import code_commit
from bespoke.runs.experiment import load

SETTINGS = {
    "500 rows": ("fedlda/cifar10_wrn16_2", []),
    "1000 rows": ("fedlda/cifar10_wrn16_2", ["data.volume=1000"]),
    "2000 rows": ("fedlda/cifar10_wrn16_2", ["data.volume=2000"]),
    "all rows": ("fedlda/cifar10_dir_wrn16_2", []),
    "500 rows, Dir(0.2)": ("fedlda/cifar10_wrn16_2", ["data.alpha=0.2"]),
    "500 rows, Dir(0.3)": ("fedlda/cifar10_wrn16_2", ["data.alpha=0.3"]),
}


def percent(run_file: str, settings: list[str], seed: int) -> float:
    """Return the clients' mean accuracy in percent."""
    data, _ = data_of(load(run_file, "fedavg", settings, seed)[0])
    rows = range(data.num_clients)
    named = [data.y[data.train.client(i)].mode().values for i in rows]
    return 100 * fmean(float((data.y[data.test.client(i)] == named[i]).float().mean()) for i in rows)


def main() -> None:
    """Write the accuracy for each setting and seed, and print its mean over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "most_frequent.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, *range(10, 20)])
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name, (run_file, settings) in SETTINGS.items():
        found[name] = {str(seed): round(percent(run_file, settings, seed), 2) for seed in args.seeds}
        print(
            f"{name}: {fmean(found[name].values()):.1f} % over {len(args.seeds)} seeds, from {found[name]}", flush=True
        )
    write_atomic(args.out, json.dumps({"commit": code_commit(), "mean_percent_by_seed": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
