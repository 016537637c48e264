"""From an experiment, or from one's own data and model, to a run: what to build, and on what."""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bespoke.clients import BatchedClients, Clients, SequentialClients, ShardedClients, processes
from bespoke.clients.states import KINDS
from bespoke.core import rng
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import FederatedData
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.data import from_arrays, partitioned
from bespoke.data.settings import DataSettings
from bespoke.errors import UserError
from bespoke.models import ModelSettings, build_task
from bespoke.runs.execution import execute
from bespoke.runs.experiment import Experiment, load
from bespoke.runs.federation import Evaluation, Event, Federation
from bespoke.runs.results import Run, ready

BACKENDS = {"batched": BatchedClients, "loop": SequentialClients}


def pick_backend(backend: str, device: torch.device) -> str:
    """``auto`` runs a cohort at once on CUDA, and one client after another on the CPU, where that is never slow."""
    if backend == "auto":
        return "batched" if device.type == "cuda" else "loop"
    if backend not in BACKENDS:
        raise UserError(f"there is no backend {backend!r}: use one of {', '.join(BACKENDS)} or auto")
    return backend


def pick_precision(precision: str, device: torch.device, dtype: torch.dtype) -> str:
    """``auto`` is bf16 on a CUDA device that has it, unless torch computes in another type than float32; else fp32."""
    if precision == "auto":
        able = device.type == "cuda" and dtype == torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)
        return "bf16" if able else "fp32"
    return precision


def pick_device(device: str) -> torch.device:
    """``auto`` is CUDA where there is some, else the CPU; of several processes each takes a GPU of its own."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except RuntimeError:
        picked = torch.device("meta")
    if picked.type not in ("cpu", "cuda"):
        raise UserError(f"there is no device {device!r}: use cpu, cuda or auto")
    if picked == torch.device("cuda") and processes.world() > 1:
        picked = processes.own_gpu()
    elif picked.type == "cuda" and processes.world() > 1:
        raise UserError(f"each of {processes.world()} processes takes a GPU of its own: use cuda instead of {device}")
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count() or "no"
        raise UserError(f"device {device} was asked for, but torch sees {seen} CUDA devices here: use cpu or auto")
    return picked


def _assemble(
    experiment: Experiment,
    pool: FederatedData,
    task: Task,
    params: Tree,
    backend: str,
    states: str,
    callbacks: Sequence[Any],
) -> Federation:
    if states not in KINDS:
        raise UserError(f"states cannot be kept on {states!r}: use one of {', '.join(KINDS)}")
    task.check(ready(pool, task, pool.x[pool.train.client(0)[:4]]))
    evaluation = experiment.evaluation
    clients: Clients
    clients = inner = BACKENDS[pick_backend(backend, task.device)](
        experiment.method,
        task,
        params,
        pool,
        experiment.training,
        experiment.seed,
        adapt_rounds=evaluation.adapt_rounds,
        adapt_epochs=evaluation.adapt_epochs,
        states=states,
    )
    if processes.world() > 1:
        clients = ShardedClients(inner)
    return Federation(
        algorithm=experiment.method,
        task=task,
        params=params,
        clients=clients,
        num_clients=pool.num_clients,
        total_clients=pool.total_clients,
        training=experiment.training,
        evaluation=evaluation,
        seed=experiment.seed,
        callbacks=callbacks if processes.first() else (),
    )


def _initial(task: Task, seed: int) -> Tree:
    return task.init(rng.stream(rng.key(seed), rng.INIT))


def run(
    experiment: Experiment | str | Path,
    out: str | Path | None = None,
    *,
    backend: str = "auto",
    device: str = "auto",
    precision: str = "auto",
    states: str = "device",
    resume: bool = False,
    callbacks: Sequence[Callable[[Event], None]] = (),
    checkpoint_every: int = 10,
    stop: Callable[[], bool] = lambda: False,
    about: dict[str, Any] | None = None,
) -> Run:
    """Run an experiment, or the one in a file or of a shipped name, and return its records and models.

    ``out`` is the run's folder; without one, the records live as long as the returned object. ``resume``
    goes on from the newest sound checkpoint in ``out``. ``precision`` is that of products of matrices on CUDA:
    ``fp32``, ``tf32``, or ``bf16``, which the shipped models know and ``auto`` takes. ``states`` says where the
    states of clients are kept while they are not at work: on the ``device``, on the ``host``, or on ``disk``, for
    populations larger than memory. ``about`` is added to ``environment.json``.

    Under ``torchrun`` the clients are spread over its processes; the first one keeps the records and calls
    ``callbacks``, and every one returns the whole result.
    """
    processes.join()
    if isinstance(experiment, str | Path):
        experiment, _ = load(experiment)
    if not isinstance(experiment, Experiment):
        raise UserError(f"run(...) takes an Experiment, a file or the name of a shipped one, not {experiment!r}")
    experiment.import_modules()
    data, model = experiment.located()
    with processes.one_first():  # what is prepared for the first time is kept in files
        pool, partition = partitioned(data, experiment.seed, experiment.training.skip_empty)
    shape = tuple(pool.x.shape[1:])
    where, dtype = pick_device(device), torch.get_default_dtype()
    task = build_task(model, shape, pool.num_classes, where, dtype, pick_precision(precision, where, dtype))
    federation = _assemble(experiment, pool, task, _initial(task, experiment.seed), backend, states, callbacks)
    described = partition.describe()
    return execute(experiment, federation, pool, described, out, resume, checkpoint_every, stop, about or {})


def federate(
    clients: Mapping[str, Any] | Sequence[Any],
    model: nn.Module,
    head: str,
    algorithm: Algorithm | str = "fedavg",
    *,
    seed: int = 0,
    test: float = 0.2,
    validation: float = 0.0,
    new_clients: int = 0,
    num_classes: int | None = None,
    out: str | Path | None = None,
    backend: str = "auto",
    device: str = "auto",
    precision: str = "auto",
    states: str = "device",
    resume: bool = False,
    evaluate_every: int = 0,
    callbacks: Sequence[Callable[[Event], None]] = (),
    **training: Any,
) -> Run:
    """Train a personal model for each of one's own clients.

    ``clients`` is a list (or a dict by name) of ``(x, y)``, ``(x, y, x_test, y_test)`` or torch Datasets;
    ``model`` any module whose sub-module ``head`` maps features to logits, its weights being the common
    start; ``training`` takes the keys of the ``[training]`` table (``rounds=20, lr=0.1, ...``).
    ``num_classes`` defaults to the largest label plus one; the other arguments are as in :func:`run`.
    """
    processes.join()
    if not isinstance(model, nn.Module):
        raise UserError(f"federate(...) takes a torch module as its model, such as Net(), not {model!r}")
    known = {f for f in Training.__dataclass_fields__}
    unknown = sorted(training.keys() - known)
    if unknown:
        raise UserError(f"federate(...) has no argument {unknown[0]!r}; training takes {', '.join(sorted(known))}")
    experiment = Experiment(
        algorithm=algorithm, training=Training(**training), evaluation=Evaluation(every=evaluate_every), seed=seed
    )
    pool = from_arrays(
        clients,
        test=test,
        validation=validation,
        new_clients=new_clients,
        num_classes=num_classes,
        seed=seed,
        skip_empty=experiment.training.skip_empty,
    )
    where, dtype = pick_device(device), torch.get_default_dtype()
    own = pick_precision(precision, where, dtype)
    task = Task(lambda: copy.deepcopy(model), head, pool.num_classes, where, dtype, own)
    experiment = replace(
        experiment,
        data=DataSettings(
            "arrays",
            _data_digest(pool),
            test=test,
            validation=validation,
            new_clients=new_clients,
            num_classes=pool.num_classes,
        ),
        model=ModelSettings(f"own:{type(model).__name__}:{_model_digest(model, head)}"),
    )
    federation = _assemble(experiment, pool, task, _initial(task, seed), backend, states, callbacks)
    return execute(experiment, federation, pool, {}, out, resume, 10, lambda: False, {})


def _digest(*parts: Any) -> str:
    """What tells one's own data or model from another's, for the experiment's hash."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digest.update(repr((part.shape, part.dtype) if isinstance(part, Tensor) else part).encode())
    return digest.hexdigest()[:16]


def _data_digest(pool: FederatedData) -> str:
    rows = (pool.train, pool.test, pool.val)
    return "sha256:" + _digest(pool.x, pool.y, pool.names, *(part for r in rows for part in (r.index, r.sizes)))


def _model_digest(model: nn.Module, head: str) -> str:
    weights = model.state_dict()
    return _digest(repr(model), head, tuple(weights), *(t for t in weights.values() if isinstance(t, Tensor)))
