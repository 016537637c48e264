"""Where a client of pFedFDA spends its time: network passes, means and covariances, the search for beta.

The paper's Table 9 on the CPU with one thread, in the loop backend: the CNN for CIFAR with d = 128, E = 5 epochs in
batches of 50, clients with about 480 train rows. Each client's call is timed from outside, by wrapping the functions
that do the work; everything else (the head, priors, folds, packing) is "rest". ``python benchmarks/pfedfda_shares.py``
writes ``pfedfda_shares.json`` beside itself and the results of that table, and exits with 1 if everything but the
network passes takes more than its bar of a client's time.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import report
import torch

import bespoke
from bespoke.algorithms import pfedfda
from bespoke.clients import SequentialClients
from bespoke.core import rng
from bespoke.core.data import FederatedData, Rows
from bespoke.core.local import Local
from bespoke.core.settings import Training
from bespoke.maths import gaussian
from bespoke.models import ModelSettings, build_task
from bespoke.runs.execution import code_commit
from bespoke.tables import results, spec

ROOT = Path(__file__).parents[1]
BAR = 20.0  # percent
SIZES = (440, 460, 480, 480, 480, 500, 520)  # train rows; the first client warms up
TRAINING = Training(epochs=5, batch=50, lr=0.01, momentum=0.5)
PARTS: dict[str, list[tuple[Any, str]]] = {
    "network": [(Local, "sgd"), (Local, "features")],
    "statistics": [(gaussian, "estimate")],
    "beta": [(pfedfda, "cross_validated_beta")],
}


def images(classes: int) -> FederatedData:
    """Return random 32x32 colour images, brighter or darker by class; each client favours a few classes."""
    key, count = rng.key(1), sum(SIZES)
    favourite = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES)) * 3
    spread = (rng.uniform(key, (count,)).square() * classes).long()
    y = (favourite + spread) % classes
    x = rng.uniform(key, (count, 3, 32, 32)) * 2 - 1 + (y / classes)[:, None, None, None]
    none = Rows.of([[]] * len(SIZES))
    lists = torch.arange(count).split(list(SIZES))
    return FederatedData(
        x, y, Rows.of(lists), none, none, classes, len(SIZES), tuple(str(i) for i in range(len(SIZES)))
    )


def timed(work: Callable[..., Any], seconds: dict[str, float], part: str) -> Callable[..., Any]:
    """Return the same function, which adds its seconds to a part's."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - begin

    return wrapper


def client_seconds(clients: SequentialClients, client: int, shared: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of one client's round, in total and by part."""
    seconds = dict.fromkeys(PARTS, 0.0)
    patches = [
        mock.patch.object(owner, name, timed(getattr(owner, name), seconds, part))
        for part, functions in PARTS.items()
        for owner, name in functions
    ]
    for patch in patches:
        patch.start()
    begin = time.perf_counter()
    trained = clients.train(1, [client], shared, {})
    total = time.perf_counter() - begin
    for patch in patches:
        patch.stop()
    assert len(trained.uploads.clients) == 1, trained.refused
    return {"total": total, **seconds, "rest": total - sum(seconds.values())}


def measure(classes: int) -> dict[str, Any]:
    """Return median seconds and shares in percent over the clients."""
    pool, method = images(classes), pfedfda.PFedFDA()
    task = build_task(ModelSettings(name="cifar_cnn"), (3, 32, 32), classes)
    params = task.init(rng.key(0))
    clients = SequentialClients(method, task, params, pool, TRAINING, seed=0)
    server = method.server_init(task, params, len(SIZES), rng.key(0))
    runs = [client_seconds(clients, client, method.broadcast(server)) for client in range(len(SIZES))][1:]
    shares = [{part: 100 * run[part] / run["total"] for part in (*PARTS, "rest")} for run in runs]
    median = {part: round(statistics.median(s[part] for s in shares), 2) for part in shares[0]}
    beyond = statistics.median(100 - s["network"] for s in shares)
    return {
        "classes": classes,
        "clients": len(runs),
        "seconds": round(statistics.median(run["total"] for run in runs), 3),
        "percent": median,
        "beyond_network": round(beyond, 2),
        "bar": BAR,
    }


def write_results(case: dict[str, Any], root: Path = ROOT / "results") -> None:
    """Write the shares as results of pFedFDA's Table 9, whose cells are data sets."""
    cell = {10: "cifar10", 100: "cifar100"}[case["classes"]]
    for entry in spec.find("pfedfda/t9").entries:
        if entry.cell.id == cell:
            told = {"table": entry.table, "cell": entry.id, "seed": 0, "status": "done", "evaluate": [], "view": ""}
            settings = {"model": {"name": "cifar_cnn"}, "training": asdict(TRAINING), "classes": case["classes"]}
            about = {"settings": settings, "environment": {"device": "cpu", "precision": "fp32"}, "seconds": 0.0}
            source = {"bespoke": bespoke.__version__, "commit": code_commit(), "modules": [], "method": None}
            value = {"value": case["percent"][entry.row.id], "source": source}
            results.write(root, entry, told | about | value)


def main() -> int:
    """Measure with 10 and 100 classes, print and store."""
    chosen = report.parser(__doc__, __file__).parse_args()
    torch.set_num_threads(1)
    cases = [measure(classes) for classes in (10, 100)]
    print(report.table(case | {f"{part}, %": share for part, share in case["percent"].items()} for case in cases))
    report.store(chosen.out, "cpu", threads=1, cases=cases)
    for case in cases:
        write_results(case)
    return int(any(case["beyond_network"] > case["bar"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
