"""The cost of a large population: rounds of 50 clients out of 1,000 and out of 100,000, with states on disk.

FedPer keeps a head of 512 x 10 for each client. Before the clock starts, every client of both populations has a stored
state. The two then alternate their rounds in one process; the figure is the ratio of the medians. Checkpoints are timed
separately, and count in the mean of all rounds. Finally all 100,000 clients are evaluated, and the process's peak
memory is read. Run with ``python benchmarks/population.py``; it writes ``population.json`` beside itself and exits with
1 if the ratio or the memory is above its bar.
"""

import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import report
import torch

from bespoke.algorithms import ALGORITHMS
from bespoke.clients import BatchedClients
from bespoke.core import rng, tree
from bespoke.core.data import FederatedData, Rows
from bespoke.core.settings import Training
from bespoke.core.tree import Tree
from bespoke.models import ModelSettings, build_task
from bespoke.records import RunFolder
from bespoke.runs import checkpoint
from bespoke.runs.federation import Federation
from bespoke.runs.recording import recorded

COHORT, ROUNDS, CHECKPOINT_EVERY = 50, 40, 10
INPUTS, FEATURES, CLASSES = 256, 512, 10
TRAIN_ROWS, TEST_ROWS = 50, 5  # of each client
BAR_RATIO, BAR_GB = 1.10, 8.0


def pool(clients: int) -> FederatedData:
    """Return clients that share 10,000 examples, each with its own rows."""
    key, examples = rng.key(1), 10_000
    x = rng.uniform(key, (examples, INPUTS))
    y = (rng.bits(key, torch.arange(examples)) % CLASSES).long()

    def rows(each: int, purpose: int) -> Rows:
        index = rng.bits(rng.fold_in(key, purpose), torch.arange(clients * each)) % examples
        return Rows(index, (each,) * clients)

    names = tuple(str(i) for i in range(clients))
    return FederatedData(
        x, y, rows(TRAIN_ROWS, 1), rows(TEST_ROWS, 2), Rows.of([[]] * clients), CLASSES, clients, names
    )


@dataclass
class Population:
    """A federation whose clients all have a state on disk, and the time of its rounds."""

    clients: int
    folder: RunFolder
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)  # CPU seconds, which other programs disturb less
    saving: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        data = pool(self.clients)
        task = build_task(ModelSettings(name="mlp", hidden=FEATURES), (INPUTS,), CLASSES)
        params, method = task.init(rng.key(0)), ALGORITHMS["fedper"]()
        training = Training(rounds=10**6, batch=10, lr=0.05, rate=COHORT / self.clients)
        simulated = BatchedClients(method, task, params, data, training, seed=0, states="disk")
        self.federation = Federation.simulated(simulated, seed=0)
        self.server: Tree = self.federation.start()
        self.simulated, self.store = simulated, simulated.store
        self.store.open(self.folder.path)
        for ids in torch.arange(self.clients).split(1000):
            state = simulated.stored(ids.tolist(), mapped=True)
            own = tree.map(lambda leaf, ids=ids: leaf + 1e-6 * ids.reshape(-1, *[1] * (leaf.dim() - 1)), state)
            self.store.put(ids.tolist(), own)
        self._save(0, self.server)

    def _save(self, round: int, server: Tree) -> None:
        saved = checkpoint.Checkpoint(round, server, self.store.flush(), self.folder.offsets())
        checkpoint.save(self.folder.path, saved, "benchmark")

    def round(self, number: int) -> None:
        """Do one round, from the draw of the cohort to its record; then a checkpoint, where one is due."""
        begin, busy = time.perf_counter(), time.process_time()
        self.server = recorded(self.federation, self.folder, self.server, number, stop=lambda: True)
        self.seconds.append(time.perf_counter() - begin)
        self.busy.append(time.process_time() - busy)
        if number % CHECKPOINT_EVERY == 0:
            begin = time.perf_counter()
            self._save(number, self.server)
            self.saving.append(time.perf_counter() - begin)

    def evaluate(self) -> float:
        """Evaluate every client; return the seconds."""
        begin = time.perf_counter()
        some = [range(i, min(i + 1000, self.clients)) for i in range(0, self.clients, 1000)]
        rows = [row for ids in some for row in self.simulated.evaluate(1, ids, *self.federation.down(self.server, ids))]
        assert len(rows) == self.clients == len(self.store.ids())
        return time.perf_counter() - begin

    def row(self) -> dict[str, float | int]:
        """Return the figures as a row of the table."""
        files = self.store.flush()
        return {
            "clients": self.clients,
            "round_s": statistics.median(self.seconds[1:]),  # the first warms up
            "round_cpu_s": statistics.median(self.busy[1:]),
            "checkpoint_s": statistics.median(self.saving),
            "mean_with_checkpoints_s": (sum(self.seconds[1:]) + sum(self.saving)) / len(self.seconds[1:]),
            "files": len(files),
            "files_gb": sum((self.folder.path / f["file"]).stat().st_size for f in files) / 1e9,
        }


def main() -> int:
    """Measure both populations, print and store them."""
    chosen = report.parser(__doc__, __file__).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        both = [Population(count, RunFolder.create(Path(root) / str(count))) for count in (1_000, 100_000)]
        for number in range(1, ROUNDS + 2):
            for population in both if number % 2 else both[::-1]:
                population.round(number)
        small, large = (population.row() for population in both)
        evaluation = both[1].evaluate()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB
    ratio = large["round_s"] / small["round_s"]
    print(report.table([small, large]))
    print(f"ratio of rounds {ratio:.3f} (bar {BAR_RATIO}), peak memory {peak:.2f} GB (bar {BAR_GB})")
    result = {
        "threads": 1,
        "case": f"FedPer, head {FEATURES} x {CLASSES}, cohort {COHORT}, {TRAIN_ROWS} rows, batch 10, states on disk",
        "populations": [small, large],
        "round_ratio": ratio,
        "round_ratio_bar": BAR_RATIO,
        "evaluation_of_all_s": evaluation,
        "peak_memory_gb": peak,
        "peak_memory_gb_bar": BAR_GB,
    }
    report.store(chosen.out, "cpu", **result)
    return int(ratio > BAR_RATIO or peak > BAR_GB)


if __name__ == "__main__":
    sys.exit(main())
