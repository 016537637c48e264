"""Other libraries beside this one: the same rows, split, net and settings, one after the other in one call.

``python benchmarks/peers.py --pfllib FOLDER`` runs pfl (``pip install "pfl[pytorch]"``) on its own CIFAR-10 workload
and PFLlib, from the folder that you give. A peer that is not there is named and skipped. Every run is a process of its
own, timed from before its start to after its end, and made twice: first with an empty kernel cache, in which ours
compiles its kernels, then with the filled one. Without the real CIFAR-10 (``bespoke data fetch cifar10``) rows are
random and no accuracy is shown. A table is printed and ``peers.json`` written; ``peers.md`` says what is not the same.
On a CPU, ``--device cpu --clients 20 --cohort 5 --rounds 4 --every 2 --subsample 0.02`` is a quick test.
"""

import importlib
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
from typing import Any, NamedTuple

import numpy as np
import report
import torch
from torch import Tensor, nn

import bespoke
from bespoke.data import federate_data
from bespoke.data.sources import store
from bespoke.models import layers

Found = dict[str, Any]  # what one run found: seconds, seconds a round, accuracy, parameters
METHODS = {"fedavg": "FedAvg", "fedper": "FedPer"}  # ours, PFLlib's


class Work(NamedTuple):
    """What a peer and we train."""

    peer: str
    data: dict[str, Any]  # of the [data] table
    clients: int
    cohort: int
    rounds: int
    every: int  # rounds between evaluations
    lr: float
    weighting: str
    method: str = "fedavg"
    batch: int = 10

    @property
    def trained(self) -> int:
        """The rounds that are trained: PFLlib trains once more after its last evaluation, and so do we."""
        return self.rounds + (self.peer == "pfllib")

    @property
    def judged(self) -> int:
        """The round after which the accuracy is compared: the last that the peer evaluates."""
        last = self.trained - 1
        return last - last % self.every + (self.peer == "pfl")

    @property
    def accuracy_of(self) -> str:
        """Which accuracy is compared, in words."""
        whose = "one model, all test rows in one batch" if self.peer == "pfl" else "all clients' own test rows, pooled"
        return f"{whose}, after round {self.judged}"


WORKS = {
    "pfl": Work("pfl", {"pool": "split", "partition": "iid"}, 1000, 50, 1500, 10, 0.1, "uniform"),
    "pfllib": Work(
        "pfllib",
        {"pool": "train+test", "partition": "dirichlet", "alpha": 0.1, "min_rows": 40, "test": 0.25},
        *(20, 20, 20, 10, 0.005, "samples"),
    ),
}


class Failed(Exception):
    """A run that ended with an error, or without what was asked of it."""


# --- rows and nets --------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Scaled images (N, 3, 32, 32), their classes (N,), and each client's train and test rows."""

    x: Tensor
    y: Tensor
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]


def write_rows(work: Work, folder: Path, subsample: float, real: bool) -> None:
    """Deal the rows to clients, and write rows, split, scale and initial weights for every run to read."""
    source = {"name": "cifar10"} if real else {"name": "random", "like": "cifar10", "rows": 60_000}
    settings = bespoke.DataSettings(**source, **work.data, clients=work.clients, subsample=subsample)
    pool = federate_data(settings, seed=0)
    if work.peer == "pfl":  # by the moments of each channel over the train rows
        pixels = pool.x[pool.train.index].double()
        std, mean = torch.std_mean(pixels, dim=(0, 2, 3), correction=0)
    else:  # to [-1, 1]
        mean = std = torch.full((3,), 127.5)
    split = {"train": pool.train.index, "train_sizes": pool.train.sizes}
    split |= {"test": pool.test.index, "test_sizes": pool.test.sizes}
    np.savez(folder / "rows.npz", x=pool.x, y=pool.y, mean=mean.float(), std=std.float(), **split)
    np.savez(folder / "start.npz", *(p.detach().numpy() for p in net(work.peer, ours=False).parameters()))
    (folder / "work.json").write_text(json.dumps(work._asdict()))


def read_work(folder: Path) -> Work:
    """Read which workload was written."""
    return Work(**json.loads((folder / "work.json").read_text()))


def read_rows(folder: Path) -> Rows:
    """Read what :func:`write_rows` wrote."""
    with np.load(folder / "rows.npz") as stored:
        arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    x = (arrays["x"].float() - arrays["mean"].view(3, 1, 1)) / arrays["std"].view(3, 1, 1)
    train, test = (arrays[part].split(arrays[f"{part}_sizes"].tolist()) for part in ("train", "test"))
    return Rows(x, arrays["y"], train, test)


def net(peer: str, ours: bool) -> layers.Classifier:
    """Return the peer's CNN for 32x32 colour images: of torch's layers, or of ours, with the same parameters."""
    torch.manual_seed(0)
    conv, linear, flatten = nn.Conv2d, nn.Linear, nn.Flatten
    drop: Callable[[float], nn.Module] = nn.Dropout
    if ours:  # Stages takes convolution, norm, ReLU and pool
        conv, linear, flatten, drop = layers.conv2d, layers.linear, layers.Flatten, layers.Dropout
    maps = [nn.Identity(), nn.ReLU()] if ours else [nn.ReLU()]
    if peer == "pfl":
        body = [conv(3, 32, 3), *maps, conv(32, 64, 3), *maps, nn.MaxPool2d(2), drop(0.25), flatten()]
        body += [linear(12544, 128), nn.ReLU(), drop(0.5)]
    else:
        body = [conv(3, 32, 5), *maps, nn.MaxPool2d(2), conv(32, 64, 5), *maps, nn.MaxPool2d(2), flatten()]
        body += [linear(1600, 512), nn.ReLU()]
    sequence = layers.Stages if ours else nn.Sequential
    made = layers.Classifier(sequence(*body), linear(128 if peer == "pfl" else 512, 10))
    if peer == "pfl":
        for weight in made.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)
    return made


def load_start(module: nn.Module, folder: Path) -> int:
    """Give a net the common initial weights, and return the number of its parameters."""
    with np.load(folder / "start.npz") as stored, torch.no_grad():
        for parameter, name in zip(module.parameters(), stored.files, strict=True):
            parameter.copy_(torch.from_numpy(stored[name]))
    return sum(p.numel() for p in module.parameters())


# --- one run of each ------------------------------------------------------------------------------------------------


def ours(folder: Path, device: str, precision: str) -> Found:
    """Train with this library."""
    work, rows = read_work(folder), read_rows(folder)
    module = layers.set_precision(net(work.peer, ours=True), precision)
    size, central = load_start(module, folder), torch.cat(rows.test)
    x, y, ends, accuracy = rows.x[central].to(device), rows.y[central].to(device), list[float](), [0.0]

    def note(event: Any) -> None:
        if work.peer == "pfl" and (event.round - 1) % work.every == 0:
            with torch.no_grad():
                right = event.federation.task.logits(event.server["model"], x).argmax(1) == y
            accuracy[0] = right.double().mean().item()
        elif event.round == work.judged and work.peer == "pfllib":
            shown = event.row["evaluated"]
            lines = [e for e in event.evaluated if (e["split"], e["view"]) == ("test", shown["view"])]
            sums = [e["metrics"][shown["metric"]] for e in lines]
            accuracy[0] = sum(right for right, _ in sums) / sum(total for _, total in sums)
        ends.append(time.time())

    both = zip(rows.train, rows.test, strict=True)
    clients = [(rows.x[own], rows.y[own], rows.x[held], rows.y[held]) for own, held in both]
    settings = {"rounds": work.trained, "batch": work.batch, "lr": work.lr, "rate": work.cohort / work.clients}
    settings |= {"weighting": work.weighting, "device": device, "precision": precision, "callbacks": [note]}
    if work.peer == "pfllib":
        settings |= {"last_batch": "drop", "evaluate_every": work.every}
    run = bespoke.federate(clients, module, "head", work.method, num_classes=10, **settings)
    cohorts = {len(line["cohort"]) for line in run.folder.rounds()}
    return {"round_s": mean_round(ends), "accuracy": accuracy[0], "parameters": size, "cohorts": sorted(cohorts)}


def mean_round(ends: list[float]) -> float:
    """Return the mean seconds of all rounds but the first."""
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def pfl(folder: Path, device: str) -> Found:
    """Train with pfl, as its own CIFAR-10 benchmark does."""
    os.environ["PFL_PYTORCH_DEVICE"] = device  # read when pfl is imported
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data import FederatedDataset, get_user_sampler
    from pfl.data.dataset import Dataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Net(layers.Classifier):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.train()(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            out = self.eval()(x)
            loss = nn.functional.cross_entropy(out, y, reduction="sum").item()
            right = (out.argmax(1) == y).sum().item()
            return {"loss": Weighted(loss, len(x)), "accuracy": Weighted(right, len(x))}

    class Note(TrainingProcessCallback):
        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
            accuracy[0] = metrics.to_simple_dict(to_lowercase=True).get("central val | accuracy", accuracy[0])
            ends.append(time.time())
            return False, Metrics()

    work, rows, plain = read_work(folder), read_rows(folder), net("pfl", ours=False)
    ends, accuracy, module = list[float](), [0.0], Net(plain.body, plain.head).to(device)
    size = load_start(module, folder)
    np.random.seed(0)
    x, y, central = rows.x.to(device), rows.y.to(device), torch.cat(rows.test)
    users, held = (
        FederatedDataset.from_slices([(x[own], y[own]) for own in lists], get_user_sampler("random", range(len(lists))))
        for lists in (rows.train, rows.test)
    )
    whole = NNEvalHyperParams(local_batch_size=10_000)
    FederatedAveraging().run(
        NNAlgorithmParams(work.rounds, work.every, train_cohort_size=work.cohort, val_cohort_size=0),
        SimulatedBackend(training_data=users, val_data=held, postprocessors=[WeightByUser()]),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch),
        whole,
        [CentralEvaluationCallback(Dataset([x[central], y[central]]), whole, work.every), Note()],
    )
    return {"round_s": mean_round(ends), "accuracy": accuracy[0], "parameters": size}


def write_for_pfllib(rows: Rows, folder: Path) -> Path:
    """Write rows as PFLlib reads them, one file for a client's train rows and one for its test rows."""
    for part, lists in (("train", rows.train), ("test", rows.test)):
        place = folder / "dataset" / "Cifar10" / part
        place.mkdir(parents=True)
        for client, own in enumerate(lists):
            mine = {"x": rows.x[own].numpy(), "y": rows.y[own].numpy()}
            np.savez_compressed(place / f"{client}.npz", data=np.array(mine, dtype=object))
    (folder / "system").mkdir()
    return folder / "system"  # PFLlib looks for ../dataset, and writes to ../results and here


def pfllib(work: Work, main: Path, where: Path, python: str, device: str, environment: dict[str, str]) -> Found:
    """Train with PFLlib's own main.py in the folder ``where``, and read what it prints."""
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
        raise Failed(f"it printed device {used}, rounds {rounds[-1:]} and {len(accuracy)} accuracies")
    convolutions = re.findall(r"Conv2d\((\d+), (\d+), kernel_size=\((\d+), (\d+)\)", said)
    shapes = [(int(b), int(a) * int(h) * int(w)) for a, b, h, w in convolutions]
    shapes += [(int(b), int(a)) for a, b in re.findall(r"Linear\(in_features=(\d+), out_features=(\d+)", said)]
    later = [float(cost) for cost in re.findall(r"time cost -+ ([\d.e+-]+)", said)[1:]]
    size = sum(outputs * (inputs + 1) for outputs, inputs in shapes)
    return {"round_s": sum(later) / len(later) if later else 0.0, "accuracy": float(accuracy[-1]), "parameters": size}


# --- side by side ---------------------------------------------------------------------------------------------------


def timed(command: list[str], environment: dict[str, str], where: Path) -> tuple[str, float]:
    """Run a command, and return what it printed and its seconds, from before its start to after its end."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=where)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1])
    return done.stdout, seconds


def child(who: str, folder: Path, device: str, precision: str, environment: dict[str, str]) -> Found:
    """Run this script's own part for ours or for pfl in a process of its own."""
    words = ["--child", who, "--folder", str(folder), "--device", device, "--precision", precision]
    said, seconds = timed([sys.executable, str(Path(__file__).resolve()), *words], environment, folder)
    return json.loads(said.splitlines()[-1]) | {"seconds": seconds}


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
        folder = Path(scratch)
        write_rows(work, folder, chosen.subsample, real)
        environment = dict(os.environ)  # Python's cache of compiled modules; nothing is written to a peer's folder
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "bespoke-pycache")
        if not chosen.once:
            environment["TRITON_CACHE_DIR"] = str(folder / "kernels")
        runs: dict[str, Callable[[], Found]] = {
            f"bespoke {name}": partial(child, "ours", folder, chosen.device, name, environment)
            for name in chosen.precision.split(",")
        }
        if work.peer == "pfl":
            runs["pfl"] = partial(child, "pfl", folder, chosen.device, "fp32", environment)
        else:
            where, main = write_for_pfllib(read_rows(folder), folder), Path(chosen.pfllib).resolve()
            started = partial(pfllib, work, main / "system" / "main.py", where, chosen.pfllib_python, chosen.device)
            runs["pfllib"] = partial(started, environment)
        rows = [_row(who, run, 1 if chosen.once else 2, real) for who, run in runs.items()]
    first = rows[0]
    for row in rows[1:]:
        if "error" not in row and row["parameters"] != first["parameters"]:
            row["error"] = f"another net: {row['parameters']:,} parameters, ours has {first['parameters']:,}"
    for row in rows:
        if "error" not in row:
            row["times_ours"] = row["again_s"] / first["again_s"]
            row["round_times_ours"] = row["round_s"] / first["round_s"] if row["round_s"] else ""
    return rows


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
    for name in ("clients", "cohort", "rounds", "every"):
        parser.add_argument(f"--{name}", type=int, help="instead of the workload's own")
    parser.add_argument("--child", default="", choices=("ours", "pfl"), help="used by the script itself")
    parser.add_argument("--folder", type=Path, help="used by the script itself")
    chosen = parser.parse_args()
    if chosen.child:
        found = pfl(chosen.folder, chosen.device) if chosen.child == "pfl" else None
        print(json.dumps(found or ours(chosen.folder, chosen.device, chosen.precision)))
        return 0
    chosen.precision = chosen.precision or ("bf16,tf32" if chosen.device == "cuda" else "fp32")
    given = {name: getattr(chosen, name) for name in ("clients", "cohort", "rounds", "every") if getattr(chosen, name)}
    real, results, skipped = store.holds("cifar10") and not chosen.random, list[Found](), dict[str, str]()
    for peer in chosen.peers.split(","):
        if peer not in WORKS:
            parser.error(f"there is no peer {peer!r}: use {', '.join(WORKS)}")
        if why := missing(peer, chosen.pfllib):
            print(f"{peer}: skipped: {why}", flush=True)
            skipped[peer] = why
            continue
        work = WORKS[peer]._replace(**given, **({"method": chosen.method} if peer == "pfllib" else {}))
        if not work.cohort <= work.clients or not 1 <= work.every < work.trained:
            parser.error("a cohort is at most all clients, and there are more rounds than between two evaluations")
        rows = beside(work, chosen, real)
        shown = f"accuracy: {work.accuracy_of}" if real else "random rows: no accuracy"
        print(f"{peer}: {work.clients} clients, {work.cohort} per round, {work.trained} rounds; {shown}")
        print(report.table(rows), flush=True)
        settings = work._asdict() | {"trained": work.trained, "subsample": chosen.subsample, "real_rows": real}
        about = {"version": version(peer, chosen.pfllib), "accuracy_of": work.accuracy_of if real else None}
        results.append({"peer": peer, **about, "settings": settings, "rows": rows})
    report.store(chosen.out, chosen.device, results=results, skipped=skipped)
    return int(any("error" in row for result in results for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
