"""Many small clients: CIFAR-10 dealt evenly to 1000 clients with 50 images, 50 per round, one epoch in batches of 10.

1500 rounds of FedAvg with a CNN of two convolutions and dropout, through ``bespoke.run``. ``python
benchmarks/cross_device.py`` needs CUDA and the real CIFAR-10; it prints a table and writes ``cross_device.json``.
"""

import sys
import time

import report

import bespoke
from bespoke import DataSettings, Evaluation, Experiment, ModelSettings, Training

BAR = 40.0


def main() -> int:
    """Run, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--rounds", type=int, default=1500)
    chosen = parser.parse_args()
    report.needs_cuda()
    experiment = Experiment(
        data=DataSettings(name="cifar10", pool="split", partition="iid", clients=1000),
        model=ModelSettings("cnn", width=32, hidden=512, dropout=0.5),
        algorithm="fedavg",
        training=Training(rounds=chosen.rounds, epochs=1, batch=10, lr=0.1, rate=0.05),
        evaluation=Evaluation(),
    )
    begin = time.perf_counter()
    run = bespoke.run(experiment, device="cuda", precision="bf16", checkpoint_every=100)
    total = time.perf_counter() - begin
    parts = {
        name: round(sum(row.get(name, 0.0) for row in run.folder.timing()), 2)
        for name in ("train", "aggregate", "record", "checkpoint")
    }
    result = {
        "rounds": chosen.rounds,
        "seconds": round(total, 2),
        "bar_s": BAR,
        "parts": parts,
        "device_seconds": run.folder.read_json("environment.json")["device_seconds"],
        "notes": run.notes,
        "train_loss": [row["train_loss"] for row in run.folder.rounds()][:: max(1, chosen.rounds // 10)],
    }
    print(report.table([{"rounds": chosen.rounds, "seconds": total, "bar_s": BAR} | parts]), *run.notes, sep="\n")
    report.store(chosen.out, "cuda", **result)
    return int(chosen.rounds == 1500 and total > BAR)


if __name__ == "__main__":
    sys.exit(main())
