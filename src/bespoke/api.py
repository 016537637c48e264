"""From an experiment, or from one's own data and model, to a run: build, run or resume, and what comes out."""

import copy
import hashlib
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import safetensors.torch
import torch
from torch import Tensor, nn

from bespoke import __version__, ranks
from bespoke.checkpoint import Checkpoint, load_newest, save
from bespoke.clients import BatchedClients, Clients, LoopClients, ShardedClients, Simulated
from bespoke.clients.states import KINDS
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import Data, Pool
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.datasets import from_arrays, partitioned
from bespoke.datasets.settings import DataSettings
from bespoke.errors import UserError
from bespoke.experiment import Experiment, from_tables, load
from bespoke.federation import Evaluation, Event, Federation
from bespoke.files import write_atomic
from bespoke.models import ModelSettings, build_task
from bespoke.records import RunFolder
from bespoke.report.summary import summarise

BACKENDS = {"batched": BatchedClients, "loop": LoopClients}


@dataclass(frozen=True)
class PersonalModel:
    """One client's own model."""

    algorithm: Algorithm
    task: Task
    personal: Tree
    pool: Pool
    client: int

    def logits(self, x: Any) -> Tensor:
        """Logits (B, C) for examples x (B, ...) in the form the client's own data has."""
        with torch.no_grad():
            ready = _ready(self.pool, self.task, torch.as_tensor(x), self.client)
            out = self.algorithm.predict(self.task, self.personal, ready)
        return next(iter(out.values())) if isinstance(out, dict) else out

    def predict(self, x: Any) -> Tensor:
        """The predicted classes (B,) for examples x (B, ...)."""
        return self.logits(x).argmax(dim=-1)


def _ready(pool: Pool, task: Task, x: Tensor, client: int = 0) -> Tensor:
    """Raw examples x (B, ...) as a client's model takes them: transformed, in its type, on its device."""
    rows = torch.arange(len(x), device=task.device)
    extra = tree.map(lambda t: t[client].to(task.device), pool.extra)
    data = Data(x.to(task.device), torch.zeros_like(rows), rows, rows.new_tensor(len(x)), extra, pool.transform)
    return replace(data, dtype=task.dtype).gather(rows, rng.key(0, task.device), train=False)[0]


@dataclass
class Run:
    """A finished (or interrupted) run: its records, and its models on request."""

    experiment: Experiment
    folder: RunFolder
    federation: Federation
    server: Tree
    pool: Pool
    notes: list[str] = field(default_factory=list)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The numbers of the run, derived from its records: see ``bespoke.report.summarise``."""
        return summarise(self.folder)

    @property
    def accuracy(self) -> float:
        """Pooled test accuracy of the headline view, last round, all clients of the training population."""
        headline = self.summary["views"].get(self.summary["headline"], {"last": {}})
        value = headline["last"].get("all", {}).get("pooled")
        if value is None:
            raise UserError("there is no accuracy: no client was evaluated on test rows of its own")
        return float(value)

    @cached_property
    def models(self) -> dict[str, PersonalModel]:
        """The personal model of every client by name, new clients included; made when first asked for.

        In a run of several processes all of them have to ask, and each is given all models.
        """
        everyone = range(self.pool.total_clients)
        algorithm, task, clients = self.federation.algorithm, self.federation.task, self.federation.clients
        assert isinstance(clients, Simulated | ShardedClients)  # only a simulation may look at its clients
        shared, own = self.federation.down(self.server, everyone)
        rounds = self.folder.rounds()
        last = rounds[-1]["round"] if rounds else 0  # the models that were evaluated last, to the bit
        trees = clients.personal(last, everyone, shared, own)
        return {
            name: PersonalModel(algorithm, task, personal, self.pool, i)
            for i, (name, personal) in enumerate(zip(self.pool.names, trees, strict=True))
        }

    def save_models(self) -> Path:
        """Write every personal model as ``models/NAME.safetensors`` in the run's folder.

        What a file's name cannot hold, such as a slash, is written as in an address on the web.
        """
        models, folder = self.models, self.folder.path / "models"
        if not ranks.first():
            return folder
        RunFolder.create(folder)
        for name, model in models.items():
            flat = {n: t.cpu().contiguous().clone() for n, t in tree.flatten(model.personal).items()}
            write_atomic(folder / f"{quote(name, safe=' ')}.safetensors", safetensors.torch.save(flat))
        return folder


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
    if picked == torch.device("cuda") and ranks.world() > 1:
        picked = ranks.own_gpu()
    elif picked.type == "cuda" and ranks.world() > 1:
        raise UserError(f"each of {ranks.world()} processes takes a GPU of its own: use cuda instead of {device}")
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count() or "no"
        raise UserError(f"device {device} was asked for, but torch sees {seen} CUDA devices here: use cpu or auto")
    return picked


def _assemble(
    experiment: Experiment, pool: Pool, task: Task, params: Tree, backend: str, states: str, callbacks: Sequence[Any]
) -> Federation:
    if states not in KINDS:
        raise UserError(f"states cannot be kept on {states!r}: use one of {', '.join(KINDS)}")
    task.check(_ready(pool, task, pool.x[pool.train.client(0)[:4]]))
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
    if ranks.world() > 1:
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
        callbacks=callbacks if ranks.first() else (),
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
    ranks.join()
    if isinstance(experiment, str | Path):
        experiment, _ = load(experiment)
    if not isinstance(experiment, Experiment):
        raise UserError(f"run(...) takes an Experiment, a file or the name of a shipped one, not {experiment!r}")
    with ranks.one_first():  # what is prepared for the first time is kept in files
        pool, partition = partitioned(experiment.data, experiment.seed, experiment.training.skip_empty)
    shape = tuple(pool.x.shape[1:])
    where, dtype = pick_device(device), torch.get_default_dtype()
    task = build_task(experiment.model, shape, pool.num_classes, where, dtype, pick_precision(precision, where, dtype))
    federation = _assemble(experiment, pool, task, _initial(task, experiment.seed), backend, states, callbacks)
    described = _describe(pool) | partition.describe()
    return _run(experiment, federation, pool, described, out, resume, checkpoint_every, stop, about or {})


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
    ranks.join()
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
    return _run(experiment, federation, pool, _describe(pool), out, resume, 10, lambda: False, {})


def _digest(*parts: Any) -> str:
    """What tells one's own data or model from another's, for the experiment's hash."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digest.update(repr((part.shape, part.dtype) if isinstance(part, Tensor) else part).encode())
    return digest.hexdigest()[:16]


def _data_digest(pool: Pool) -> str:
    rows = (pool.train, pool.test, pool.val)
    return "sha256:" + _digest(pool.x, pool.y, pool.names, *(part for r in rows for part in (r.index, r.sizes)))


def _model_digest(model: nn.Module, head: str) -> str:
    weights = model.state_dict()
    return _digest(repr(model), head, tuple(weights), *(t for t in weights.values() if isinstance(t, Tensor)))


# --- one run in its folder ----------------------------------------------------------------------------------------


def _run(
    experiment: Experiment,
    federation: Federation,
    pool: Pool,
    described: dict[str, Any],
    out: str | Path | None,
    resume: bool,
    checkpoint_every: int,
    stop: Callable[[], bool],
    about: dict[str, Any],
) -> Run:
    if checkpoint_every < 1:
        raise UserError(f"checkpoint_every must be at least 1, not {checkpoint_every!r}")
    ranks.same(f"experiment {experiment.hash()} on {federation.task.device.type} in {federation.task.precision}")
    folder = _folder(out)
    checkpoints, store = folder.path / "checkpoints", federation.clients.store
    first, server, found, notes, offsets = 1, None, None, list[str](), dict[str, int]()
    if folder.holds_run():
        if not resume:
            raise UserError(
                f"{folder.path} already holds a run: add --resume to go on with it, or choose another folder with --out"
            )
        found, notes = _find_start(experiment, folder, federation)
        if found is not None:
            first, server = found.round + 1, found.server
        offsets = found.offsets if found else dict.fromkeys(folder.offsets(), 0)
    store.open(checkpoints, found.states if found else ())
    environment = _environment(federation, experiment) | about
    ranks.wait()  # nothing is written before every process has read what was there
    if ranks.first():
        RunFolder.create(checkpoints)
        folder.truncate(offsets)
        write_atomic(folder.path / "config.toml", experiment.toml())
        folder.write_json("federation.json", described)
        folder.write_json("environment.json", environment | {"notes": notes})
    ranks.wait()

    def checkpoint(round: int, server: Tree) -> None:
        files = store.flush()
        if ranks.first():
            save(checkpoints, Checkpoint(round, server, files, folder.offsets()), experiment.hash())
        ranks.wait()  # files that no checkpoint names are removed before any process writes another

    records = folder if ranks.first() else _Reader(folder)
    server = federation.run(records, server, first, checkpoint, checkpoint_every, lambda: ranks.any_of(stop()))
    notes = notes + list(getattr(federation.clients, "notes", []))
    done = Run(experiment, folder, federation, server, pool, notes)
    if ranks.first():
        folder.write_json("environment.json", environment | _device_seconds(federation.clients) | {"notes": notes})
        folder.write_json("summary.json", done.summary)
        if out is not None:
            folder.export_parquet()
    ranks.wait()
    _ = done.summary  # which the others read while the first process keeps the folder
    ranks.wait()
    return done


@dataclass(frozen=True)
class _Reader:
    """The records in a process that is not the first: they are read here, and written there."""

    folder: RunFolder

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        pass

    def clients(self) -> Iterator[dict[str, Any]]:
        return self.folder.clients()


def _folder(out: str | Path | None) -> RunFolder:
    """The run's folder, made by the first process and seen by all."""
    made = (_temporary_folder() if out is None else RunFolder.create(out)) if ranks.first() else None
    path = ranks.from_first(str(made.path) if made else None)
    folder = made or RunFolder(path)
    if not folder.path.is_dir():
        raise UserError(f"process {ranks.rank()} does not see the folder {folder.path}: put it where all processes do")
    return folder


def _temporary_folder() -> RunFolder:
    """A folder that is removed when nobody holds it any longer."""
    folder = RunFolder.create(tempfile.mkdtemp(prefix="bespoke-"))
    weakref.finalize(folder, shutil.rmtree, folder.path, ignore_errors=True)
    return folder


def _find_start(
    experiment: Experiment, folder: RunFolder, federation: Federation
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, after making sure that it is this experiment's."""
    stored = from_tables(folder.config(), str(folder.path / "config.toml"), experiment.method)
    if stored.hash() != experiment.hash():
        raise UserError(
            f"{folder.path} holds the run of another experiment (hash {stored.hash()}, this one is "
            f"{experiment.hash()}; {_difference(stored, experiment)}): choose another folder with --out"
        )
    found, notes = load_newest(folder.path / "checkpoints", federation.task.device)
    rounds, done = experiment.training.rounds, found.round if found else 0
    if rounds < done:
        raise UserError(f"{folder.path} has done {done} rounds already: set training.rounds to {done} or more")
    if experiment.training.full_last and done == stored.training.rounds != rounds:
        raise UserError(
            f"{folder.path} has finished with a last round of all clients, so it cannot be made longer: "
            f"run {rounds} rounds in another folder"
        )
    if found is None:
        notes = [*notes, f"{folder.path} holds no sound checkpoint: started over from round 1"]
    return found, notes


def _difference(stored: Experiment, experiment: Experiment) -> str:
    """The first setting in which two experiments differ."""
    there, here = stored.tables(), experiment.tables()
    if there["seed"] != here["seed"]:
        return f"seed is {there['seed']} there and {here['seed']} here"
    for table in ("data", "model", "algorithm", "training"):
        for key in there[table] | here[table]:
            old, new = there[table].get(key), here[table].get(key)
            if old != new:
                return f"{table}.{key} is {old!r} there and {new!r} here"
    return "no setting differs"


def _describe(pool: Pool) -> dict[str, Any]:
    classes = [int(pool.y[rows].unique().numel()) for rows in map(pool.train.client, range(pool.total_clients))]
    return {
        "clients": pool.num_clients,
        "new_clients": pool.total_clients - pool.num_clients,
        "names": list(pool.names),
        "train": list(pool.train.sizes),
        "val": list(pool.val.sizes),
        "test": list(pool.test.sizes),
        "classes": classes,
        "num_classes": pool.num_classes,
    }


def _environment(federation: Federation, experiment: Experiment) -> dict[str, Any]:
    device = federation.task.device
    return {
        "bespoke": __version__,
        "git": _git_hash(),
        "experiment": experiment.hash(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(federation.task.dtype).removeprefix("torch."),
        "precision": federation.task.precision,
        "backend": getattr(federation.clients, "name", "unknown"),
        "states": federation.clients.store.kind,
        "world_size": ranks.world(),
    }


def _device_seconds(clients: Any) -> dict[str, Any]:
    """Where the device's time went, if the clients' runner counts it."""
    runner = getattr(clients, "runner", None)
    seconds = {name: round(s, 3) for name, s in runner.timings().items()} if runner else {}
    return {"device_seconds": seconds} if seconds else {}


def _git_hash() -> str | None:
    """The commit of the source tree that runs, if it is a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
