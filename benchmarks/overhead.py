"""The library's overhead on the CPU over a hand-written loop: FedAvg rounds, both backends, beside plain PyTorch.

All do the same steps (same clients, batch sizes, epochs, SGD with momentum) in the same process, alternating; the
figure is the ratio of the medians. Run with ``python benchmarks/overhead.py``; it writes ``overhead.json`` beside
itself and exits with 1 if the default backend, one client after another, is above its bar.
"""

import statistics
import sys
import time
from collections.abc import Callable

import report
import torch
from torch import nn
from torch.nn import functional as F

from bespoke.algorithms import ALGORITHMS
from bespoke.clients import BatchedClients, SequentialClients, Simulated
from bespoke.core import rng
from bespoke.core.data import FederatedData, Rows
from bespoke.core.settings import Training
from bespoke.data import DataSettings, federate_data
from bespoke.models import ModelSettings, build_module, build_task
from bespoke.runs.federation import Federation

REPEATS = 9


def hand_written(
    pool: FederatedData, module: nn.Module, start: dict[str, torch.Tensor], training: Training
) -> Callable[[], None]:
    """Run one round of FedAvg, written by hand for this data."""
    prepared = pool.x if pool.transform is None else pool.transform(rng.key(0), pool.x, {}, False)
    generator = torch.Generator().manual_seed(0)
    clients = [pool.train.client(i) for i in range(pool.num_clients)]

    def round() -> None:
        total = [torch.zeros_like(p) for p in start.values()]
        for rows in clients:
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    parameter.copy_(start[name])
            optimizer = torch.optim.SGD(module.parameters(), lr=training.lr, momentum=training.momentum)
            for _ in range(training.epochs):
                order = rows[torch.randperm(len(rows), generator=generator)]
                for batch in order.split(training.batch):
                    loss = F.cross_entropy(module(prepared[batch]), pool.y[batch])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            for mean, parameter in zip(total, module.parameters(), strict=True):
                mean.add_(parameter.detach(), alpha=len(rows))
        size = sum(pool.train.sizes)
        for mean in total:
            mean.div_(size)

    return round


def measure(
    name: str, pool: FederatedData, model: ModelSettings, training: Training, bar: float
) -> dict[str, float | str]:
    """Return the median seconds of all, alternating, and their ratios."""
    shape = tuple(pool.x.shape[1:])
    task = build_task(model, shape, pool.num_classes)
    params = task.init(rng.key(0))
    method = ALGORITHMS["fedavg"]()

    def round_of(backend: type[Simulated]) -> Callable[[], None]:
        federation = Federation.simulated(backend(method, task, params, pool, training, seed=0), seed=0)

        def ours() -> None:
            next(federation.rounds({"model": params}))

        return ours

    plain = hand_written(pool, build_module(model, shape, pool.num_classes), params, training)
    seconds: dict[Callable[[], None], list[float]] = {
        work: [] for work in (plain, round_of(SequentialClients), round_of(BatchedClients))
    }
    for _ in range(REPEATS + 1):
        for work, times in seconds.items():
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
    by_hand, loop, batched = (statistics.median(times[1:]) for times in seconds.values())  # the first warms up
    return {
        "case": name,
        "hand_written_s": by_hand,
        "loop_s": loop,
        "batched_s": batched,
        "ratio": loop / by_hand,
        "batched_ratio": batched / by_hand,
        "bar": bar,
    }


def colour_images(clients: int, rows: int) -> FederatedData:
    """Return random 32x32 colour images: their content does not affect the time."""
    key, count = rng.key(1), clients * rows
    x = rng.uniform(key, (count, 3, 32, 32)) * 2 - 1
    y = (rng.bits(key, torch.arange(count)) % 10).long()
    lists = list(torch.arange(count).split(rows))
    none = Rows.of([[]] * clients)
    return FederatedData(x, y, Rows.of(lists), none, none, 10, clients, tuple(str(i) for i in range(clients)))


def main() -> int:
    """Measure both cases, print and store them."""
    chosen = report.parser(__doc__, __file__).parse_args()
    torch.set_num_threads(1)
    digits = federate_data(DataSettings(name="digits", clients=10, alpha=1.0, min_rows=20), seed=0)
    cases = [
        measure(
            "digits, small cnn, batch 32", digits, ModelSettings(name="cnn"), Training(epochs=2, momentum=0.5), 1.25
        ),
        measure(
            "32x32 colour, CIFAR CNN, batch 50",
            colour_images(4, 200),
            ModelSettings(name="cifar_cnn"),
            Training(epochs=1, batch=50, lr=0.01, momentum=0.5),
            1.12,
        ),
    ]
    print(report.table(cases))
    report.store(chosen.out, "cpu", threads=1, cases=cases)
    return int(any(case["ratio"] > case["bar"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
