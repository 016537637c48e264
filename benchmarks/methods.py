"""The cost of each method: seconds of a round and of an evaluation, bytes on the wire, memory, lines of code.

One workload for all: 20 clients with 100 to 400 random 32x32 colour images, pFedVMP's CNN with GroupNorm (which FedBN
and FedPCE need), batches of 50, two epochs, all clients in every round, each method with its own defaults. Rounds of
FedAvg alternate with the method's, and the ratio is that of the two medians; FedAvg's own line shows its accuracy.

``python benchmarks/methods.py`` uses CUDA if available; it prints one line per method as it goes and writes
``methods.json`` beside itself, from which ``benchmarks/methods_table.py`` fills the table of the README. A method that
fails has its error in its line. On a CPU, ``--device cpu --rounds 2 --clients 4 --rows 20 60`` is a quick test.
"""

import ast
import gc
import inspect
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch

from bespoke.algorithms import ALGORITHMS, method_class
from bespoke.core import rng
from bespoke.core.data import FederatedData, Rows
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.models import ModelSettings, build_task
from bespoke.runs.api import BACKENDS, pick_backend, pick_device, pick_precision
from bespoke.runs.federation import Federation
from bespoke.runs.recording import round_line

MODEL = ModelSettings(name="pfedvmp_cnn", norm="group")
TRAINING = Training(rounds=1000, epochs=2, batch=50, lr=0.01, momentum=0.5)
ENOUGH = 3.0  # seconds of measured rounds after which three rounds suffice
COLUMNS = "{:<11} {:>9} {:>8} {:>9} {:>10} {:>10} {:>8} {:>6}  {}"


def images(clients: int, fewest: int, most: int) -> FederatedData:
    """Return random colour images: clients of evenly spread sizes, and a fifth as many test rows."""
    sizes = torch.linspace(fewest, most, clients).round().long().tolist()
    tests = [max(1, n // 5) for n in sizes]
    count, key = sum(sizes) + sum(tests), rng.key(1)
    lists = torch.arange(count).split(sizes + tests)
    y = (rng.bits(key, torch.arange(count)) % 10).long()
    return FederatedData(
        rng.uniform(key, (count, 3, 32, 32)) * 2 - 1,
        y,
        Rows.of(lists[:clients]),
        Rows.of(lists[clients:]),
        Rows.of([[]] * clients),
        10,
        clients,
        tuple(str(i) for i in range(clients)),
    )


class Runs:
    """One method's federation, one round at a time."""

    def __init__(self, name: str, task: Task, params: Tree, pool: FederatedData) -> None:
        method = ALGORITHMS[name]()
        backend = BACKENDS[pick_backend("auto", task.device)]
        self.clients = backend(method, task, params, pool, TRAINING, seed=0)
        self.federation = Federation.simulated(self.clients, seed=0)
        self.rounds = self.federation.rounds()

    def round(self) -> None:
        """Train all clients and aggregate."""
        self.last = next(self.rounds)

    def evaluate(self) -> None:
        """Personalise and count, for all clients."""
        self.federation.evaluate(self.last)


def seconds(work: Callable[[], None]) -> float:
    """Return the seconds of a call, including the device's work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


class Peak:
    """Peak bytes in use since its creation, beyond those in use then: on CUDA, or the process's on the CPU.

    Linux reports the latter, and resets its peak on request; elsewhere the answer is None. A process reuses memory
    that an earlier method freed, so on the CPU the figure is a lower bound.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self.device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.base: int | None = torch.cuda.memory_allocated()
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self.base = None
            else:
                self.base = self._status("VmRSS")

    def read(self) -> int | None:
        if self.base is None:
            return None
        most = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else self._status("VmHWM")
        return max(0, most - self.base)

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def code_lines(name: str) -> int:
    """Count the lines of the method's file without blank lines, comments and docstrings."""
    text = Path(inspect.getfile(method_class(name))).read_text(encoding="utf-8")
    lines = {i for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def measure(name: str, task: Task, params: Tree, pool: FederatedData, rounds: int, baseline: Runs) -> dict[str, Any]:
    """Measure all figures of one method."""
    begin, peak = time.perf_counter(), Peak(task.device)
    runs = Runs(name, task, params, pool)
    warm = 3 if task.device.type == "cuda" else 1  # on CUDA a shape is seen, recorded, and replayed
    for _ in range(warm):
        runs.round()
    for _ in range(warm - 1):
        runs.evaluate()
    evaluation = min(seconds(runs.evaluate) for _ in range(2))
    most = peak.read()
    own, fedavg = list[float](), list[float]()
    while len(own) < rounds and (len(own) < 3 or sum(own) < ENOUGH):
        own.append(seconds(runs.round))
        fedavg.append(seconds(baseline.round))
    row = round_line(runs.last)
    notes = [*runs.clients.notes, *([row["note"]] if "note" in row else [])]
    if row["refused"]:
        notes.append(f"{len(row['refused'])} clients were refused: {next(iter(row['refused'].values()))}")
    return {
        "name": name,
        "seconds": statistics.median(own),
        "ratio": statistics.median(own) / statistics.median(fedavg),
        "evaluate_seconds": evaluation,
        "bytes_up": round(row["bytes_up"] / len(row["cohort"])),
        "bytes_down": round(row["bytes_down"] / len(row["cohort"])),
        "peak_bytes": most,
        "code_lines": code_lines(name),
        "notes": notes,
        "rounds": len(own),
        "benchmark_seconds": time.perf_counter() - begin,
    }


def line(row: dict[str, Any]) -> str:
    """Return a measured method as a line of the table."""
    if "error" in row:
        return f"{row['name']:<11} failed: {row['error']}"
    return COLUMNS.format(
        row["name"],
        f"{row['seconds']:.4f}",
        f"{row['ratio']:.2f}",
        f"{row['evaluate_seconds']:.4f}",
        f"{row['bytes_up'] / 1e6:.4f}",
        f"{row['bytes_down'] / 1e6:.4f}",
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
        row["code_lines"],
        f"[{row['benchmark_seconds']:.1f} s] {'; '.join(row['notes'])}",
    )


def main() -> int:
    """Measure, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--methods", default=",".join(ALGORITHMS), help="names, separated by commas")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds per method")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument(
        "--rows", type=int, nargs=2, default=(100, 400), help="rows of the smallest and the largest client"
    )
    chosen = parser.parse_args()
    device = pick_device(chosen.device)
    precision = pick_precision("auto", device, torch.float32)
    task = build_task(MODEL, (3, 32, 32), 10, device, precision=precision)
    params, pool = task.init(rng.key(0)), images(chosen.clients, *chosen.rows).to(device, task.dtype)
    begin, rows = time.perf_counter(), list[dict[str, Any]]()
    about = {
        "precision": precision,
        "clients": chosen.clients,
        "rows": list(chosen.rows),
        "parameters": sum(p.numel() for p in params.values()),
    }
    baseline = Runs("fedavg", task, params, pool)
    for _ in range(4):
        baseline.round()
    print(COLUMNS.format("method", "s a round", "x FedAvg", "s to eval", "MB up", "MB down", "peak MB", "lines", ""))
    for name in chosen.methods.split(","):
        try:
            rows.append(measure(name, task, params, pool, chosen.rounds, baseline))
        except Exception as error:  # one method's failure must not lose the others' figures
            traceback.print_exc()
            rows.append({"name": name, "error": str(error).strip().splitlines()[0] if str(error) else repr(error)})
        print(line(rows[-1]), flush=True)
        report.store(chosen.out, device.type, **about, methods=rows)
    print(f"{time.perf_counter() - begin:.0f} seconds in all")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
