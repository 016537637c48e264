"""One run of ours or of pfl on a workload that ``peers.py`` wrote: ``peer_runs.py ours|pfl FOLDER DEVICE PRECISION``.

It prints its figures as JSON. Nothing of ours is imported where pfl runs, since its process is timed as a whole.
"""

import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

Found = dict[str, Any]  # the figures of a run


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


class Rows(NamedTuple):
    """Scaled images (N, 3, 32, 32), their classes (N,), and each client's train and test rows."""

    x: Tensor
    y: Tensor
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]


def read_work(folder: Path) -> Work:
    """Read the workload's settings."""
    return Work(**json.loads((folder / "work.json").read_text()))


def read_rows(folder: Path) -> Rows:
    """Read rows and split, and scale the pixels."""
    with np.load(folder / "rows.npz") as stored:
        arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    x = (arrays["x"].float() - arrays["mean"].view(3, 1, 1)) / arrays["std"].view(3, 1, 1)
    train, test = (arrays[part].split(arrays[f"{part}_sizes"].tolist()) for part in ("train", "test"))
    return Rows(x, arrays["y"], train, test)


def net(peer: str, ours: bool) -> nn.Sequential:
    """Return the peer's CNN for 32x32 colour images: of torch's layers, or of ours, with the same parameters."""
    torch.manual_seed(0)
    conv, linear, flatten, sequence = nn.Conv2d, nn.Linear, nn.Flatten, nn.Sequential
    drop: Callable[[float], nn.Module] = nn.Dropout
    act: list[nn.Module] = [nn.ReLU()]
    if ours:
        from bespoke.models import layers

        conv, linear, flatten, sequence = layers.conv2d, layers.linear, layers.Flatten, layers.Stages
        drop, act = layers.Dropout, [nn.Identity(), nn.ReLU()]  # a stage: convolution, norm, ReLU and pool
    if peer == "pfl":
        body = [conv(3, 32, 3), *act, conv(32, 64, 3), *act, nn.MaxPool2d(2), drop(0.25), flatten()]
        body, head = [*body, linear(12544, 128), nn.ReLU(), drop(0.5)], linear(128, 10)
    else:
        body = [conv(3, 32, 5), *act, nn.MaxPool2d(2), conv(32, 64, 5), *act, nn.MaxPool2d(2), flatten()]
        body, head = [*body, linear(1600, 512), nn.ReLU()], linear(512, 10)
    made = nn.Sequential(OrderedDict(body=sequence(*body), head=head))
    for weight in made.parameters():
        if peer == "pfl" and weight.dim() > 1:
            nn.init.xavier_uniform_(weight)
    return made


def load_start(module: nn.Module, folder: Path) -> int:
    """Give a net the common initial weights, and return the number of its parameters."""
    with np.load(folder / "start.npz") as stored, torch.no_grad():
        for parameter, name in zip(module.parameters(), stored.files, strict=True):
            parameter.copy_(torch.from_numpy(stored[name]))
    return sum(p.numel() for p in module.parameters())


def mean_round(ends: list[float]) -> float:
    """Return the mean seconds of all rounds but the first."""
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def ours(folder: Path, device: str, precision: str) -> Found:
    """Train with this library."""
    import bespoke
    from bespoke.models import layers

    work, rows, ends, accuracy = read_work(folder), read_rows(folder), list[float](), dict[int, float]()
    module = layers.set_precision(net(work.peer, ours=True), precision)
    size, held = load_start(module, folder), torch.cat(rows.test)
    x, y = rows.x[held].to(device), rows.y[held].to(device)

    def note(event: Any) -> None:
        if work.peer == "pfl" and (event.round - 1) % work.every == 0:  # as often as pfl, and the same way
            with torch.no_grad():
                right = event.federation.task.logits(event.server["model"], x).argmax(1) == y
            accuracy[event.round] = right.double().mean().item()
        elif work.peer == "pfllib" and event.evaluated:
            shown = event.row["evaluated"]
            lines = [e for e in event.evaluated if (e["split"], e["view"]) == ("test", shown["view"])]
            sums = [e["metrics"][shown["metric"]] for e in lines]
            accuracy[event.round] = sum(right for right, _ in sums) / sum(total for _, total in sums)
        ends.append(time.time())

    both = zip(rows.train, rows.test, strict=True)
    clients = [(rows.x[own], rows.y[own], rows.x[test], rows.y[test]) for own, test in both]
    settings = {"rounds": work.trained, "batch": work.batch, "lr": work.lr, "rate": work.cohort / work.clients}
    settings |= {"weighting": work.weighting, "device": device, "precision": precision, "callbacks": [note]}
    if work.peer == "pfllib":
        settings |= {"last_batch": "drop", "evaluate_every": work.every}
    run = bespoke.federate(clients, module, "head", work.method, num_classes=10, **settings)
    cohorts = sorted({len(line["cohort"]) for line in run.folder.rounds()})
    found = {"round_s": mean_round(ends), "accuracy": accuracy[work.judged], "parameters": size}
    return found | {"cohorts": cohorts, "notes": run.notes}


def pfl(folder: Path, device: str, _: str) -> Found:
    """Train with pfl, as its own CIFAR-10 benchmark does."""
    os.environ["PFL_PYTORCH_DEVICE"] = device
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

    class Net(nn.Sequential):
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
            shown = metrics.to_simple_dict(to_lowercase=True)
            if "central val | accuracy" in shown:
                accuracy[central_iteration + 1] = shown["central val | accuracy"]
            ends.append(time.time())
            return False, Metrics()

    work, rows, ends, accuracy = read_work(folder), read_rows(folder), list[float](), dict[int, float]()
    module = Net(OrderedDict(net("pfl", ours=False).named_children())).to(device)
    size, held = load_start(module, folder), torch.cat(rows.test)
    np.random.seed(0)
    x, y = rows.x.to(device), rows.y.to(device)
    users, others = (
        FederatedDataset.from_slices([(x[own], y[own]) for own in lists], get_user_sampler("random", range(len(lists))))
        for lists in (rows.train, rows.test)
    )
    whole = NNEvalHyperParams(local_batch_size=10_000)
    FederatedAveraging().run(
        NNAlgorithmParams(work.rounds, work.every, train_cohort_size=work.cohort, val_cohort_size=0),
        SimulatedBackend(training_data=users, val_data=others, postprocessors=[WeightByUser()]),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch),
        whole,
        [CentralEvaluationCallback(Dataset([x[held], y[held]]), whole, work.every), Note()],
    )
    return {"round_s": mean_round(ends), "accuracy": accuracy[work.judged], "parameters": size}


if __name__ == "__main__":
    who, where, *how = sys.argv[1:]
    print(json.dumps({"ours": ours, "pfl": pfl}[who](Path(where), *how)))
