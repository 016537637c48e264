"""Seconds of a round in which new clients adapt side by side: 50 Adam steps of FedPCE's ResNet-18.

Through the clients' public ``evaluate``: six new clients with random images adapt for some rounds. The first round runs
eagerly and records the steps of its loop, the second is recorded, later ones are replayed; each is timed from outside,
after the device has finished. ``python benchmarks/adaptation.py`` needs CUDA; it prints a table and writes
``adaptation.json`` beside itself.
"""

import statistics
import sys
import time
from typing import Any

import report
import torch

from bespoke.algorithms.fedpce import FedPCE
from bespoke.clients import BatchedClients
from bespoke.clients.simulated import Call, Mapped
from bespoke.core import rng
from bespoke.core.data import FederatedData, Rows
from bespoke.core.settings import Training
from bespoke.models import ModelSettings, build_task
from bespoke.runs.federation import Federation

CLIENTS, ROWS, BATCH, STEPS = 6, 1250, 64, 50
PAPER = 200  # rounds of adaptation
UNRECORDED = 2  # rounds before the first one that is only replayed


class Timed(BatchedClients):
    """Clients that note when each of their calls began and how long it took, in seconds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take what :class:`BatchedClients` takes."""
        super().__init__(*args, **options)
        self.calls: list[tuple[str, float, float]] = []  # name, begin, seconds

    def _map(self, call: Call) -> Mapped:
        begin = _now(self.task.device)
        done = super()._map(call)
        self.calls.append((call.name, begin, _now(self.task.device) - begin))
        return done


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def images(clients: int, rows: int, test: int = 250) -> FederatedData:
    """Return random 32x32 colour images of 8 bits; all clients but the first one are new."""
    count = clients * (rows + test)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, 10, (count,), generator=draw)
    parts = list(torch.arange(count).split([rows, test] * clients))
    names = tuple(str(i) for i in range(clients))
    return FederatedData(x, y, Rows.of(parts[::2]), Rows.of(parts[1::2]), Rows.of([[]] * clients), 10, 1, names)


def measured(model: str, precision: str, rounds: int, steps: int, device: str = "cuda") -> dict[str, Any]:
    """Return what ``rounds`` rounds of adaptation cost, for six new clients."""
    task = build_task(ModelSettings(name=model), (3, 32, 32), 10, device, precision=precision)
    how = {"optimizer": "adam", "lr": 1e-3, "schedule": "cosine", "lr_final": 1e-6, "keep_optimizer": True}
    training = Training(rounds=1, steps=steps, batch=BATCH, **how)
    pool = images(CLIENTS + 1, ROWS)
    clients = Timed(FedPCE(), task, task.init(rng.key(0)), pool, training, 0, adapt_rounds=rounds)
    federation, new = Federation.simulated(clients, 0), range(1, CLIENTS + 1)
    down = federation.down(federation.start(), new)
    begin = _now(task.device)
    clients.evaluate(1, new, *down)
    first = next(started for name, started, _ in clients.calls if name == "adapt")
    taken = [seconds for name, _, seconds in clients.calls if name == "adapt"]
    later = statistics.median(taken[UNRECORDED:])
    row = {
        "model": model,
        "precision": precision,
        "before_s": first - begin,
        "first_s": taken[0],
        "second_s": taken[1],
        "round_s": later,
        "step_ms": 1e3 * later / steps,
        f"of_{PAPER}_s": sum(taken[:UNRECORDED]) + (PAPER - UNRECORDED) * later,
        "evaluate_s": clients.calls[-1][2],
        "rounds": taken,
        "notes": clients.notes,
    }
    if device == "cuda":
        row["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def main() -> int:
    """Measure, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--model", default="fedpce_resnet18")
    parser.add_argument("--precisions", default="bf16,tf32,fp32")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of adaptation, at least 3")
    parser.add_argument("--steps", type=int, default=STEPS, help="Adam steps of a round")
    chosen = parser.parse_args()
    if chosen.rounds <= UNRECORDED:
        parser.error(f"--rounds must be at least {UNRECORDED + 1}")
    report.needs_cuda()
    rows = []
    for precision in chosen.precisions.split(","):
        torch.cuda.reset_peak_memory_stats()
        rows.append(measured(chosen.model, precision, chosen.rounds, chosen.steps))
        print(*rows[-1]["notes"], sep="\n", flush=True)
    print(report.table(rows))
    report.store(chosen.out, "cuda", clients=CLIENTS, batch=BATCH, steps=chosen.steps, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
