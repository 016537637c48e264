"""What BatchNorm does to FedLDA's federation: FedAvg and LG-FedAvg with it and with GroupNorm, in plain torch.

FedLDA's paper does not tell the norm of its networks. Its FedAvg has 25 % with WRN-16-2 on CIFAR-10, and ours, with
GroupNorm and as the table was read first, twice as much. BatchNorm keeps running means and variances, which `bespoke`
does not offer: averaged over clients with different classes they fit none of them, and averaged over a few clients of a
round still less. The paper's Fashion-MNIST points there too: with WRN-16-2 its FedAvg has 28.90 % and its FedPAC
65.50 %, with ResNet-18 76.60 and 90.50 %, while LG-FedAvg, whose clients keep their bodies, has 90.35 and 93.05 %.

This script trains the same federation one client after another with either norm. Averages include the running
statistics. A client is tested with the averaged model; LG-FedAvg's with its own body, if it has taken part. A second
curve tests clients that have taken part with all that their last training left them, before averaging.

``python benchmarks/batch_norm.py --out results/batch_norm.json`` trains what the file lacks. A step is one CUDA
graph where there is a GPU. ``--set`` changes settings: ``training.rate=0.1``, or ``training.rounds=2`` for a small
test; ``--seed 10`` takes the partition of the open questions; ``--bf16`` computes as the library's tables do.
Results are kept as they come: one that was stopped shows the rounds that it had, and is trained anew when asked for.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bespoke.core import rng
from bespoke.files import write_atomic
from bespoke.models.layers import GroupNorm
from bespoke.models.settings import ModelSettings
from bespoke.models.wide_resnet import wrn16_2
from bespoke.runs.api import data_of
from bespoke.runs.execution import code_commit
from bespoke.runs.experiment import Experiment, load

RUN_FILE = "fedlda/cifar10_wrn16_2"
BEFORE = ["training.rate=1.0", "training.lr=0.01"]  # how FedLDA's tables were read first
METHODS = ("fedavg", "lg_fedavg")
NAMED_BY = ("method", "norm", "set", "seed", "precision")  # what tells one result from another
State = dict[str, Tensor]


def network(norm: str, classes: int) -> nn.Module:
    """Return WRN-16-2 for 32x32 colour images, with GroupNorm or BatchNorm."""
    model = wrn16_2(ModelSettings(name="wrn16_2", norm="group"), (3, 32, 32), classes)
    if norm == "batch":
        for parent in list(model.modules()):
            for name, layer in parent.named_children():
                if isinstance(layer, GroupNorm):
                    setattr(parent, name, nn.Sequential(nn.BatchNorm2d(layer.num_channels), nn.ReLU()))
    return model


class Desk:
    """The one place where clients train, each from the state that it is given."""

    def __init__(self, model: nn.Module, experiment: Experiment, device: torch.device) -> None:
        """Record a step on a batch of the experiment's size, where there is a GPU."""
        training = experiment.training
        self.model, self.batch = model, training.batch
        self.optimizer = torch.optim.SGD(
            model.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
        )
        self.x = torch.zeros(self.batch, 3, 32, 32, device=device)
        self.y = torch.zeros(self.batch, dtype=torch.int64, device=device)
        self.replay: Callable[[], None] = self._step
        if device.type == "cuda":
            stream = torch.cuda.Stream()  # gradients belong to the stream on which they are first computed
            with torch.cuda.stream(stream):
                self._step()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self._step()
            self.replay = graph.replay

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        functional.cross_entropy(self.model(self.x).float(), self.y).backward()
        self.optimizer.step()

    def train(self, state: State, x: Tensor, y: Tensor, epochs: int) -> State:
        """Return the state after some epochs over the rows of x, y, whose number the batch divides."""
        self.model.train()
        self.model.load_state_dict(state)
        for moments in self.optimizer.state.values():
            moments["momentum_buffer"].zero_()
        for _ in range(epochs):
            for rows in torch.randperm(len(y), device=y.device).split(self.batch):
                self.x.copy_(x[rows])
                self.y.copy_(y[rows])
                self.replay()
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def own(method: str, name: str) -> bool:
    """Return whether a parameter, or a buffer, is a client's own."""
    return method == "lg_fedavg" and not name.startswith("head.")


def trained(
    method: str, norm: str, settings: list[str], seed: int, bf16: bool, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Train the federation with some settings changed; yield the clients' mean accuracy by round, in percent."""
    began = time.perf_counter()
    experiment, _ = load(RUN_FILE, method, [*BEFORE, *settings], seed)
    rounds, root = experiment.training.rounds, rng.key(experiment.seed)
    data, _ = data_of(experiment)
    torch.manual_seed(seed)
    key = torch.zeros(2, dtype=torch.int64)

    def rows(index: Tensor) -> tuple[Tensor, Tensor]:
        x = data.x[index] if data.transform is None else data.transform(key, data.x[index], {}, False)
        return x.float().to(device), data.y[index].to(device)

    clients = range(data.num_clients)
    train, test = ([rows(part.client(i)) for i in clients] for part in (data.train, data.test))
    model = network(norm, data.num_classes).to(device, memory_format=torch.channels_last)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
        desk, shared = Desk(model, experiment, device), first
        kept: list[State] = [{name: value for name, value in first.items() if own(method, name)} for _ in clients]
        last: dict[int, State] = {}  # what its last training left a client
        averaged, before = {}, {}
        for number in range(1, rounds + 1):
            cohort = rng.cohort(root, number, len(clients), experiment.training.rate, experiment.training.sampling)
            after = {i: desk.train(shared | kept[i], *train[i], experiment.training.epochs) for i in cohort}
            shared = {name: torch.stack([each[name].double() for each in after.values()]).mean(0) for name in shared}
            shared = {name: value.to(first[name].dtype) for name, value in shared.items()}
            last |= after
            for i, state in after.items():
                kept[i] = {name: value for name, value in state.items() if own(method, name)}
            if number % 10 == 0 or number == rounds:
                tested = sorted(last) if method == "lg_fedavg" else clients
                average = 100 * fmean(_accuracy(model, shared | kept[i], *test[i]) for i in tested)
                own_average = 100 * fmean(_accuracy(model, last[i], *test[i]) for i in sorted(last))
                averaged[str(number)], before[str(number)] = round(average, 2), round(own_average, 2)
                print(
                    f"{method}, {norm}, round {number}: {average:.2f} %, before averaging {own_average:.2f} %",
                    flush=True,
                )
                yield {
                    "method": method,
                    "norm": norm,
                    "set": settings,
                    "mean_percent_by_round": averaged,
                    "mean_percent_before_averaging": before,
                    "clients": len(clients),
                    "seed": seed,
                    "rounds": rounds,
                    "commit": code_commit(),
                    "precision": precision(bf16, device),
                    "seconds": round(time.perf_counter() - began, 1),
                    "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                }


def precision(bf16: bool, device: torch.device) -> str:
    """Name the precision; without bf16 it is PyTorch's default for convolutions."""
    return "bf16" if bf16 else "tf32" if device.type == "cuda" else "fp32"


@torch.no_grad()
def _accuracy(model: nn.Module, state: State, x: Tensor, y: Tensor) -> float:
    model.eval()
    model.load_state_dict(state)
    return float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    """Train what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "batch_norm.json")
    parser.add_argument("--set", nargs="*", default=[], help="settings: training.rate=0.1, training.rounds=2")
    parser.add_argument("--only", metavar="METHOD/NORM", help="one of them, for instance fedavg/batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, keep weights in float32")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for method in METHODS:
        for norm in ("batch", "group"):
            wanted = (method, norm, args.set, args.seed, precision(args.bf16, device))
            runs = json.loads(args.out.read_text()) if args.out.exists() else []
            there = [run for run in runs if tuple(run[name] for name in NAMED_BY) == wanted]
            complete = any(str(run["rounds"]) in run["mean_percent_by_round"] for run in there)
            if not complete and args.only in (None, f"{method}/{norm}"):
                others = [run for run in runs if run not in there]
                for run in trained(method, norm, args.set, args.seed, args.bf16, device):
                    write_atomic(args.out, json.dumps([*others, run], indent=1) + "\n")


if __name__ == "__main__":
    main()
