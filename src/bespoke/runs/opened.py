"""A finished run opened from its folder alone: records, server and method, and no client's data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bespoke.clients import SequentialClients, states
from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import FederatedData, Rows, Transform
from bespoke.core.inputs import InputContract
from bespoke.core.objective import Objective
from bespoke.data.agreed import CONTRACT
from bespoke.data.transforms import Step
from bespoke.errors import UserError, shown
from bespoke.network.ledger import Ledger
from bespoke.records import FEDERATION, START, RunFolder
from bespoke.runs import beginnings, identity, model_files, newcomers
from bespoke.runs.api import pick_device
from bespoke.runs.evaluating import last_checkpoint, trained_folder, unverified
from bespoke.runs.execution import label_of
from bespoke.runs.experiment import Experiment, from_tables, read_fields
from bespoke.runs.federation import Federation
from bespoke.runs.folder import is_temporary
from bespoke.runs.personal import PersonalModel, check_fit, load_model
from bespoke.runs.results import Run, file_names, no_model

_SAVE = "run.save_models() in Python where the run was made, or bespoke run ... --resume --save-models"


@dataclass(repr=False)
class OpenedRun(Run):
    """A run without its clients' rows and states: what :class:`Run` reads from records, and ``personalize``."""

    parts: dict[str, Any] = field(default_factory=dict)  # what was given for its own model, method and so on
    own_constants: list[str] = field(default_factory=list)  # of each client, for its examples; they are not known here

    @cached_property
    def models(self) -> "Mapping[str, PersonalModel]":  # type: ignore[override]
        """The personal models of the clients, by name, loaded from the files that ``save_models`` has written."""
        return SavedModels(self)

    def personalize(self, x: Any, y: Any, *, name: str = "new", adapt_rounds: int | None = None) -> PersonalModel:
        """Return the model of a client that never took part: see :meth:`Run.personalize`."""
        newcomers.refuse_constants(self.own_constants)
        return super().personalize(x, y, name=name, adapt_rounds=adapt_rounds)

    def save_models(self, out: str | Path | None = None) -> Path:
        """Refuse: models are made from the clients' own rows."""
        raise UserError(f"this run was opened without its clients' data, of which models are made: use {_SAVE}")


class SavedModels(Mapping[str, PersonalModel]):
    """The saved models of an opened run, each loaded when it is asked for."""

    def __init__(self, run: OpenedRun) -> None:
        names = run.pool.names
        files = [run.folder.path / "models" / f"{file}.safetensors" for file in file_names(names)]
        self._files = {name: file for name, file in zip(names, files, strict=True) if file.is_file()}
        self._run = run
        if not self._files:
            raise UserError(f"{run.folder.path} holds no saved models of its clients: save them with {_SAVE}")

    def __getitem__(self, name: str) -> PersonalModel:
        path = self._files.get(name)
        if path is None:
            raise no_model(name, self._files, f" in {self._run.folder.path / 'models'}")
        if states.owner(path) != self._run.experiment.hash():
            raise UserError(f"{path} is no model of this run: save the models again")
        found = load_model(path, device=str(self._run.federation.task.device), **self._run.parts)
        if found.about.get("client") != name:
            raise UserError(
                f"{path} is of client {shown(found.about.get('client'))}, not {name!r}: save the models again"
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def open_run(
    folder: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    algorithm: Algorithm | None = None,
    objective: Objective | str | None = None,
    transform: Transform | Step | Sequence[Step] | None = None,
    trust_code: bool = False,
    device: str = "cpu",
) -> OpenedRun:
    """Open the folder of a run as of its newest intact checkpoint, without the data of any client.

    It has the records, the summary, the server's state and the method; ``personalize`` makes a model for a client that
    never took part, and ``models`` are those that were saved. Nothing in the folder is written, run or unpickled.
    A model, method, objective or transform of somebody's own is imported only with ``trust_code=True``, or given again,
    as for :func:`load_model`.
    """
    if is_temporary(Path(folder)):
        raise UserError(
            f"{Path(folder)} is of a run that was given no folder, and lasts as long as the run: use the run itself, "
            "which has models and personalize, or run with out=... and open that folder"
        )
    run = trained_folder(folder)
    start, where = beginnings.read(run), str(run.path / START)
    method = model_files.rebuilt_method(start.card, algorithm, trust_code, where)
    experiment = _experiment(run, method)
    notes = unverified(run, experiment)
    if start.owner != (label_of(run) or experiment.hash()):
        raise UserError(f"{where} is not of this run: {beginnings.CURE}")
    goal = model_files.rebuilt_objective(start.card, objective, trust_code, where)
    numbers = sum(leaf.numel() for leaf in (*start.params.values(), *start.constants.values()))
    task = model_files.rebuilt_task(start.card, start.constants, numbers, goal, model, trust_code, where)
    change = model_files.rebuilt_transform(start.card, transform, trust_code, where)
    params = {name: leaf.to(task.dtype) for name, leaf in start.params.items()}
    pool = _pool(run, start, change)
    if not start.own:
        check_fit(PersonalModel(Algorithm(), task, params, pool.inputs, start.card, change, start.extra), where)
    place = pick_device(device)
    task, params = task if task.device == place else task.on(place), tree.to(params, place)
    training, seed = experiment.training, experiment.seed
    clients = SequentialClients(experiment.method, task, params, pool, training, seed)
    federation = replace(Federation.simulated(clients, seed, experiment.evaluation), inside=None)
    roster = Ledger(()).sample() if experiment.data.name == CONTRACT else None  # in the place of states
    found, told = last_checkpoint(run, experiment, federation, roster)
    notes += told
    if found.round < experiment.training.rounds:
        notes.append(f"the run has done {found.round} of {experiment.training.rounds} rounds")
    given = {"model": model, "algorithm": algorithm, "objective": objective, "transform": transform}
    parts = {**given, "trust_code": trust_code}
    return OpenedRun(experiment, run, federation, found.server, pool, notes, found.round, parts, start.own)


def _experiment(run: RunFolder, method: Algorithm) -> Experiment:
    """Return a run's experiment, with the method that its folder names and the settings it was trained with."""
    path, tables = run.path / "config.toml", run.config()
    table = tables.pop("algorithm", None)
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise UserError(f"{path} names no method: restore it")
    settings = {key: value for key, value in table.items() if key != "name"}
    method = replace(method, **read_fields(settings, type(method), f"{path}: [algorithm]"))
    return replace(from_tables(tables, str(path)), algorithm=method, algorithm_name=table["name"])


def _pool(run: RunFolder, start: beginnings.Beginning, transform: Transform | None) -> FederatedData:
    """Return what is known of a federation's data: clients, sizes, the form of examples; no row."""
    told = run.federation()
    if told is None or not 0 < told["clients"] <= len(told["names"]) or type(told.get("num_classes")) is not int:
        raise UserError(f"{run.path / FEDERATION} is missing or damaged: restore it")
    contract, total = InputContract.from_dict(start.card["inputs"]), len(told["names"])
    train, val, test = (Rows(torch.empty(0, dtype=torch.int64), tuple(told[split])) for split in identity.SIZES)
    extra = {name: leaf.expand(total, *leaf.shape) for name, leaf in start.extra.items()}
    return FederatedData(
        x=torch.empty(0, *contract.shape, dtype=getattr(torch, contract.dtype)),
        y=torch.empty(0, dtype=torch.int64 if told["num_classes"] else torch.float32),
        train=train,
        test=test,
        val=val,
        num_classes=told["num_classes"],
        num_clients=told["clients"],
        names=tuple(told["names"]),
        extra=extra,
        transform=transform,
        contract=contract,
    )
