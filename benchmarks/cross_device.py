"""Many small clients: CIFAR-10 dealt out evenly to 1000 clients of 50 images, 50 a round, one epoch in batches of 10.

1500 rounds of FedAvg with a CNN of two convolutions and dropout, through ``bespoke.run``. ``python
benchmarks/cross_device.py`` needs CUDA and the real CIFAR-10; it prints a line and writes ``cross_device.json``.
"""

import json
import sys
import time
from pathlib import Path

import torch

import bespoke
from bespoke import DataSettings, Evaluation, Experiment, ModelSettings, Training

BAR = 40.0


def main() -> int:
    """Run, print and store."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
    experiment = Experiment(
        data=DataSettings(name="cifar10", pool="split", partition="iid", clients=1000),
        model=ModelSettings("cnn", width=32, hidden=512, dropout=0.5),
        algorithm="fedavg",
        training=Training(rounds=rounds, epochs=1, batch=10, lr=0.1, rate=0.05),
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
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rounds": rounds,
        "seconds": round(total, 2),
        "bar_s": BAR,
        "parts": parts,
        "device_seconds": run.folder.read_json("environment.json")["device_seconds"],
        "notes": run.notes,
        "train_loss": [row["train_loss"] for row in run.folder.rounds()][:: max(1, rounds // 10)],
    }
    print(json.dumps(result))
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    return int(total > BAR * rounds / 1500)


if __name__ == "__main__":
    sys.exit(main())
