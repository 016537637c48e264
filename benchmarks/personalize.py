"""What a model for a client that comes later costs: pFedFDA on the CNN for CIFAR, 100 rows, one core of the CPU.

A run on random images like CIFAR-10 is trained for a round and opened from its folder. After start-up ``personalize``
is timed against a forward pass of the same rows, the two in turns; of each the least of all times counts, since other
work on the machine only adds. ``python benchmarks/personalize.py`` writes ``personalize.json`` beside itself, and exits
with 1 if the ratio is above its bar.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch

import bespoke
from bespoke.runs.personal import ready

BAR = 2.5
ROWS, REPEATS, WARM = 100, 100, 5


def opened(folder: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return a run of pFedFDA opened from its folder, and the rows of a client that never took part."""
    experiment = bespoke.Experiment(
        data=bespoke.DataSettings(name="random", like="cifar10", rows=2000, clients=11, partition="iid", new_clients=1),
        model=bespoke.ModelSettings(name="cifar_cnn"),
        algorithm=bespoke.PFedFDA(),
        training=bespoke.Training(rounds=1, batch=50, lr=0.01, momentum=0.5),
    )
    run = bespoke.run(experiment, folder / "run", device="cpu", backend="loop")
    rows = run.pool.train.client(run.pool.num_clients)[:ROWS]
    return bespoke.open_run(folder / "run"), run.pool.x[rows], run.pool.y[rows]


def seconds(work: Callable[[], Any]) -> float:
    """Return how long a piece of work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measured() -> dict[str, Any]:
    """Return the least times and their ratio, and that of the medians."""
    with tempfile.TemporaryDirectory() as folder:
        run, x, y = opened(Path(folder))
        task, params = run.federation.task, run.federation.params

        @torch.no_grad()
        def forward() -> None:
            task.logits(params, ready(task, x, run.pool.transform, {}))

        pairs = [(seconds(forward), seconds(lambda: run.personalize(x, y))) for _ in range(WARM + REPEATS)][WARM:]
    passes, models = zip(*pairs, strict=True)
    return {
        "rows": len(x),
        "forward_ms": 1e3 * min(passes),
        "personalize_ms": 1e3 * min(models),
        "ratio": min(models) / min(passes),
        "ratio_of_medians": statistics.median(models) / statistics.median(passes),
        "bar": BAR,
    }


def main() -> None:
    """Measure, print and store."""
    arguments = report.parser(__doc__, __file__).parse_args()
    torch.set_num_threads(1)
    found = measured()
    print(report.table([found]))
    report.store(arguments.out, "cpu", threads=1, repeats=REPEATS, **found)
    sys.exit(found["ratio"] > BAR)


if __name__ == "__main__":
    main()
