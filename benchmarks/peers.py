"""Other libraries beside this one: the same rows, split, net and settings, one after the other in one call.

``python benchmarks/peers.py --pfllib FOLDER`` runs pfl (``pip install "pfl[pytorch]"``) on its own CIFAR-10 workload
and PFLlib, from the folder that you give. A peer that is not there is named and skipped. Every run is a process of its
own, timed from before its start to after its end, and made twice: first with an empty kernel cache, in which ours
compiles its kernels, then with the filled one. Without the real CIFAR-10 (``bespoke data fetch cifar10``) rows are
random and no accuracy is shown. A table is printed and ``peers.json`` written; ``peers.md`` says what is not the same.
On a CPU, ``--device cpu --clients 20 --cohort 5 --rounds 4 --every 2 --subsample 0.02`` is a quick test.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from peer_runs import Found, Rows, Work, net, read_rows

from bespoke import DataSettings
from bespoke.data import federate_data
from bespoke.data.sources import store

WORKS = {
    "pfl": Work("pfl", {"pool": "split", "partition": "iid"}, 1000, 50, 1500, 10, 0.1, "uniform"),
    "pfllib": Work(
        "pfllib",
        {"pool": "train+test", "partition": "dirichlet", "alpha": 0.1, "min_rows": 40, "test": 0.25},
        *(20, 20, 20, 10, 0.005, "samples"),
    ),
}
ACCURACY = {"pfl": "one model, all test rows in one batch", "pfllib": "every client's own test rows, pooled"}
ROWS = 60_000  # of random ones, as many as CIFAR-10 has
METHODS = {"fedavg": "FedAvg", "fedper": "FedPer"}  # ours, PFLlib's


class Failed(Exception):
    """A peer's run that ended with an error, or without what was asked of it."""


def write_rows(work: Work, folder: Path, subsample: float, real: bool) -> None:
    """Deal the rows to clients, and write rows, split, scale and initial weights for every run to read."""
    source = {"name": "cifar10"} if real else {"name": "random", "like": "cifar10", "rows": ROWS}
    settings = DataSettings(**source, **work.data, clients=work.clients, subsample=subsample)
    pool = federate_data(settings, seed=0)
    mean = std = torch.full((3,), 127.5)  # to [-1, 1]
    if work.peer == "pfl":  # by the moments of each channel over the train rows
        std, mean = torch.std_mean(pool.x[pool.train.index].float(), dim=(0, 2, 3), correction=0)
    split = {"train": pool.train.index, "train_sizes": pool.train.sizes}
    split |= {"test": pool.test.index, "test_sizes": pool.test.sizes}
    np.savez(folder / "rows.npz", x=pool.x, y=pool.y, mean=mean, std=std, **split)
    np.savez(folder / "start.npz", *(p.detach().numpy() for p in net(work.peer, ours=False).parameters()))
    (folder / "work.json").write_text(json.dumps(work._asdict()))


def write_for_pfllib(rows: Rows, folder: Path) -> Path:
    """Write rows as PFLlib reads them, two files for each client, and return the folder to start it in."""
    for part, lists in (("train", rows.train), ("test", rows.test)):
        place = folder / "dataset" / "Cifar10" / part
        place.mkdir(parents=True)
        for client, own in enumerate(lists):
            mine = {"x": rows.x[own].numpy(), "y": rows.y[own].numpy()}
            np.savez_compressed(place / f"{client}.npz", data=np.array(mine, dtype=object))
    (folder / "system").mkdir()
    return folder / "system"  # PFLlib looks for ../dataset, and writes to ../results and here


def timed(command: list[str], environment: dict[str, str], where: Path) -> tuple[str, float]:
    """Run a command, and return what it printed and its seconds, from before its start to after its end."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=where)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1])
    return done.stdout, seconds


def child(who: str, folder: Path, device: str, precision: str, environment: dict[str, str]) -> Found:
    """Run ours or pfl in a process of its own."""
    script = str(Path(__file__).with_name("peer_runs.py").resolve())
    said, seconds = timed([sys.executable, script, who, str(folder), device, precision], environment, folder)
    return json.loads(said.splitlines()[-1]) | {"seconds": seconds}


def pfllib(work: Work, main: Path, where: Path, python: str, device: str, environment: dict[str, str]) -> Found:
    """Run PFLlib's own main.py in the folder ``where``, and read what it prints."""
    settings = {"dataset": "Cifar10", "num_classes": 10, "model": "cnn", "algorithm": METHODS[work.method]}
    join = min(1.0, (work.cohort + 0.5) / work.clients)  # PFLlib rounds down
    settings |= {"num_clients": work.clients, "join_ratio": join, "global_rounds": work.rounds, "eval_gap": work.every}
    settings |= {"local_epochs": 1, "batch_size": work.batch, "local_learning_rate": work.lr, "device": device}
    settings |= {"device_id": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    said, seconds = timed([python, str(main), *words], environment, where)
    return read_pfllib(said, work, device) | {"seconds": seconds}


def read_pfllib(said: str, work: Work, device: str) -> Found:
    """Return what PFLlib printed: its accuracy, seconds a round, and the number of parameters of its net."""
    used, rounds = re.findall(r"Using device: (\w+)", said), re.findall(r"Round number: (\d+)", said)
    accuracy = re.findall(r"Averaged Test Accura\w+: ([\d.]+)", said)
    if used != [device] or not accuracy or rounds[-1:] != [str(work.judged)]:
        raise Failed(f"it printed device {used}, last round {rounds[-1:]} and {len(accuracy)} accuracies")
    convolutions = re.findall(r"Conv2d\((\d+), (\d+), kernel_size=\((\d+), (\d+)\)", said)
    shapes = [(int(b), int(a) * int(h) * int(w)) for a, b, h, w in convolutions]
    shapes += [(int(b), int(a)) for a, b in re.findall(r"Linear\(in_features=(\d+), out_features=(\d+)", said)]
    size = sum(outputs * (inputs + 1) for outputs, inputs in shapes)
    later = [float(cost) for cost in re.findall(r"time cost -+ ([\d.e+-]+)", said)[1:]]
    return {"round_s": sum(later) / len(later) if later else 0.0, "accuracy": float(accuracy[-1]), "parameters": size}


def missing(peer: str, folder: str) -> str:
    """Return why a peer cannot be run, or an empty string."""
    if peer == "pfl":
        return "" if importlib.util.find_spec("pfl") else 'it is not installed: pip install "pfl[pytorch]"'
    if not folder:
        return "give the folder of your copy with --pfllib FOLDER"
    return "" if (Path(folder) / "system" / "main.py").is_file() else f"there is no system/main.py in {folder}"


def version(peer: str, folder: str) -> str:
    """Return the version of a peer: pfl's number, or the commit of PFLlib's folder if it is a clone."""
    if peer == "pfl":
        return importlib.metadata.version("pfl")
    done = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def beside(work: Work, chosen: Any, real: bool) -> list[Found]:
    """Run ours in each precision, then the peer, and return a row for each."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, device = Path(scratch), chosen.device
        write_rows(work, folder, chosen.subsample, real)
        environment = dict(os.environ)  # Python's cache of compiled modules is kept, and not in a peer's folder
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "bespoke-pycache")
        if not chosen.once:
            environment["TRITON_CACHE_DIR"] = str(folder / "kernels")
        runs = {
            f"bespoke {name}": partial(child, "ours", folder, device, name, environment)
            for name in chosen.precision.split(",")
        }
        if work.peer == "pfl":
            runs["pfl"] = partial(child, "pfl", folder, device, "fp32", environment)
        else:
            script, where = (
                Path(chosen.pfllib).resolve() / "system/main.py",
                write_for_pfllib(read_rows(folder), folder),
            )
            runs["pfllib"] = partial(pfllib, work, script, where, chosen.pfllib_python, device, environment)
        rows = [_row(who, run, 1 if chosen.once else 2, real) for who, run in runs.items()]
    return compared(rows)


def _row(who: str, run: Callable[[], Found], tries: int, real: bool) -> Found:
    try:
        found = [run() for _ in range(tries)]
    except Failed as error:
        if who.startswith("bespoke"):
            raise SystemExit(f"{who}: {error}") from None
        return {"who": who, "error": str(error)}
    accuracy = 100 * found[-1].pop("accuracy")
    row = {"who": who, "first_s": found[0]["seconds"], "again_s": found[-1].pop("seconds"), **found[-1]}
    return row | ({"accuracy_%": accuracy} if real else {})


def compared(rows: list[Found]) -> list[Found]:
    """Add to each row what it takes relative to the first, ours; a peer with another net is not compared."""
    first = rows[0]
    for row in rows:
        if "error" not in row and row["parameters"] != first["parameters"]:
            row["error"] = f"another net: {row['parameters']:,} parameters, ours has {first['parameters']:,}"
        if "error" not in row:
            row["times_ours"] = row["again_s"] / first["again_s"]
            row["round_times_ours"] = row["round_s"] / first["round_s"] if row["round_s"] else ""
    return rows


def main() -> int:
    """Run ours and the peers, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--peers", default=",".join(WORKS), help="which of them")
    parser.add_argument("--pfllib", default="", help="folder of your copy of PFLlib")
    parser.add_argument("--pfllib-python", default=sys.executable, help="the Python that has what PFLlib needs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="", help="ours; the ratio is to the first (bf16,tf32; fp32 on a CPU)")
    parser.add_argument("--method", default="fedavg", choices=METHODS, help="beside PFLlib")
    parser.add_argument("--subsample", type=float, default=1.0, help="share of CIFAR-10's rows")
    parser.add_argument("--random", action="store_true", help="use random rows even if CIFAR-10 is stored")
    parser.add_argument("--once", action="store_true", help="run once, with the usual kernel cache")
    own = ("clients", "cohort", "rounds", "every")
    for name in own:
        parser.add_argument(f"--{name}", type=int, help="instead of the workload's own")
    chosen = parser.parse_args()
    chosen.precision = chosen.precision or ("bf16,tf32" if chosen.device == "cuda" else "fp32")
    real, results, skipped = store.holds("cifar10") and not chosen.random, list[Found](), dict[str, str]()
    for peer in chosen.peers.split(","):
        if peer not in WORKS:
            parser.error(f"there is no peer {peer!r}: use {', '.join(WORKS)}")
        if why := missing(peer, chosen.pfllib):
            print(f"{peer}: skipped: {why}", flush=True)
            skipped[peer] = why
            continue
        given = {name: getattr(chosen, name) for name in own if getattr(chosen, name) is not None}
        work = WORKS[peer]._replace(**given, **({"method": chosen.method} if peer == "pfllib" else {}))
        if not 1 <= work.cohort <= work.clients or not 1 <= work.every < work.trained:
            parser.error("a cohort is 1 to all clients, and --every is at least 1 and less than the rounds")
        rows, of = beside(work, chosen, real), f"{ACCURACY[peer]}, after round {work.judged}" if real else None
        print(f"{peer}: {work.clients} clients, {work.cohort} per round, {work.trained} rounds")
        print(f"accuracy: {of}" if real else "random rows, for the time alone: no accuracy")
        print(report.table(rows), flush=True)
        settings = work._asdict() | {"trained": work.trained, "subsample": chosen.subsample, "real_rows": real}
        about = {"peer": peer, "version": version(peer, chosen.pfllib), "accuracy_of": of}
        results.append(about | {"settings": settings, "rows": rows})
    if not results:
        print(f"nothing was measured, so {chosen.out} is as it was")
        return 0
    report.store(chosen.out, chosen.device, results=results, skipped=skipped)
    return int(any("error" in row for result in results for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
