"""From an experiment, or from your own data and model, to a run: what to build, and on which device."""

import copy
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn

from bespoke.algorithms import ALGORITHMS, method_class
from bespoke.clients import BatchedClients, SequentialClients, ShardedClients, processes
from bespoke.clients.states import KINDS
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import FederatedData
from bespoke.core.objective import OBJECTIVES, Metric, Objective, ObjectiveSettings
from bespoke.core.settings import Training
from bespoke.core.task import Task, check_precision
from bespoke.core.tree import Tree
from bespoke.data import from_arrays, odd_scales, partitioned
from bespoke.data.settings import DataSettings
from bespoke.data.transforms import Step
from bespoke.errors import UserError, reason, shown
from bespoke.gpu.launching import rehearse, warm_up
from bespoke.machine import MOST_PROCESSES
from bespoke.models import ModelSettings, build_task
from bespoke.models.start import read_start
from bespoke.models.text import check_tokens
from bespoke.registry import closest
from bespoke.runs import progress
from bespoke.runs.costs import check_costs
from bespoke.runs.execution import Options, execute
from bespoke.runs.experiment import Experiment, load
from bespoke.runs.federation import QUICK, Evaluation, Federation
from bespoke.runs.model_files import path_of
from bespoke.runs.personal import ready
from bespoke.runs.results import Run
from bespoke.runs.spreading import choose, gathered

BACKENDS = {"batched": BatchedClients, "loop": SequentialClients}


DEFAULTS: Options = {
    "backend": "auto",
    "device": "auto",
    "precision": "auto",
    "states": "device",
    "halve": True,
    "processes": 1,
    "resume": False,
    "callbacks": (),
    "checkpoint_every": None,
    "stop": lambda: False,
    "about": {},
    "progress": None,
}


class Built(NamedTuple):
    """What an experiment is made of, before its method."""

    pool: FederatedData
    task: Task
    params: Tree  # the common initial weights
    described: dict[str, Any]  # what the record says of the data beside what the pool shows


def _check_arguments(call: str, given: Collection[str], known: Collection[str]) -> None:
    unknown = sorted(set(given).difference(known))
    if unknown:
        near = closest(unknown[0], known)
        raise UserError(f"{call}(...) has no argument {unknown[0]!r}{near}; it takes {', '.join(known)}")


def _check_kinds(call: str, **given: tuple[Any, str, bool]) -> None:
    """Refuse the first argument that is not of its kind: its value, what it takes, and whether it is that."""
    for name, (value, takes, right) in given.items():
        if not right:
            raise UserError(f"{call}({name}=...) takes {takes}, not {shown(value)}")


def _is_number(value: Any, whole: bool = False) -> bool:
    return isinstance(value, int if whole else int | float) and not isinstance(value, bool)


def _check_options(call: str, chosen: Options) -> None:
    """Refuse an option that is not of its kind."""
    every, stop, calls, about = chosen["checkpoint_every"], chosen["stop"], chosen["callbacks"], chosen["about"]
    number, seen, halve = chosen["processes"], chosen["progress"], chosen["halve"]
    several = number == "auto" or (isinstance(number, int) and _is_number(number) and 1 <= number <= MOST_PROCESSES)
    _check_kinds(
        call,
        processes=(number, f"a number from 1 to {MOST_PROCESSES}, or auto", several),
        checkpoint_every=(
            every,
            "a number of rounds from 1",
            every is None or (_is_number(every, whole=True) and every >= 1),
        ),
        halve=(halve, "True or False", isinstance(halve, bool)),
        stop=(stop, "a function without arguments", callable(stop)),
        callbacks=(calls, "a list of functions", isinstance(calls, Sequence) and all(map(callable, calls))),
        about=(about, "a dict", isinstance(about, dict)),
        progress=(seen, "True, False or None", seen is None or isinstance(seen, bool)),
    )


def pick_backend(backend: str, device: torch.device) -> str:
    """Choose the backend; ``auto`` is ``batched`` on CUDA and ``loop`` on the CPU, unless :func:`choose` decides."""
    if backend == "auto":
        return "batched" if device.type == "cuda" else "loop"
    if backend not in BACKENDS:
        raise UserError(f"there is no backend {backend!r}: use one of {', '.join(BACKENDS)} or auto")
    return backend


def pick_precision(precision: str, device: torch.device, dtype: torch.dtype) -> str:
    """Choose the precision; ``auto`` is bf16 on a CUDA device that has it if torch computes in float32, else fp32."""
    if precision == "auto":
        able = device.type == "cuda" and dtype == torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)
        return "bf16" if able else "fp32"
    check_precision(precision, device)
    return precision


def pick_device(device: str) -> torch.device:
    """Choose the device; ``auto`` is CUDA if available, else the CPU. Of several processes each takes its own GPU."""
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
        raise UserError(f"each of {processes.world()} processes takes its own GPU: use cuda instead of {device}")
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count() or "no"
        raise UserError(f"device {device} was asked for, but torch sees {seen} CUDA devices here: use cpu or auto")
    return picked


def check_together(experiment: Experiment, pool: FederatedData, task: Task) -> None:
    """Refuse a method, a model and data that do not fit each other."""
    if experiment.method.needs_classes and not task.objective.classes:
        free = ", ".join(name for name in ALGORITHMS if not method_class(name).needs_classes)
        raise UserError(
            f"{experiment.algorithm_name} needs classes, which the objective {task.objective.name!r} does not have: "
            f"use one of {free}"
        )
    if experiment.evaluation.clients == "new" and pool.total_clients == pool.num_clients:
        raise UserError('[evaluation] clients = "new", but there are no new clients: set [data] new_clients')
    check_tokens(task.constants(), pool.x)
    # On CUDA a whole minibatch, so that the kernels which are compiled for this are those of a step.
    rows = pool.train.client(0)[: min(experiment.training.batch, 256) if task.device.type == "cuda" else 4]
    targets = pool.y[rows].to(task.device, task.dtype if pool.y.is_floating_point() else None)

    def check() -> None:
        x = ready(task, pool.x[rows], pool.transform, tree.map(lambda leaf: leaf[0], pool.extra))
        if x.is_floating_point():  # of moderate size: this is about the model, not about a client's units
            x = x / x.abs().amax().clamp(min=1.0)
        task.check(x, targets)

    if task.device.type == "cuda":
        common, own = torch.cuda.current_stream(task.device), torch.cuda.Stream(task.device)
        own.wait_stream(common)
        with torch.cuda.stream(own):  # what another thread launches on the common one is no rehearsal
            _rehearsed(check, task)
        common.wait_stream(own)
    check()


def _rehearsed(check: Callable[[], None], task: Task) -> None:
    """Compile the kernels of a model's check; a module that changes its buffers is still for the check to find."""
    before = {name: value.clone() for name, value in task.constants().items()}
    rehearse(check)
    for name, value in task.constants().items():
        value.copy_(before[name])


def assemble(
    experiment: Experiment, parts: Built, backend: str, states: str, notes: Sequence[str] = (), halve: bool = True
) -> Federation:
    """Put a federation together from data, model and method; ``notes`` are what the record says first."""
    pool, task, params, _ = parts
    if states not in KINDS:
        raise UserError(f"states cannot be kept on {states!r}: use one of {', '.join(KINDS)}")
    check_together(experiment, pool, task)
    evaluation = experiment.evaluation
    inner = BACKENDS[pick_backend(backend, task.device)](
        experiment.method,
        task,
        params,
        pool,
        experiment.training,
        experiment.seed,
        adapt_rounds=evaluation.adapt_rounds,
        adapt_epochs=evaluation.adapt_epochs,
        states=states,
        halve=halve,
    )
    check_costs(experiment, pool, inner)
    inner.notes += [*notes, *pool.notes, *ignored(experiment), *_late(experiment, pool), *odd_scales(pool)]
    federation = Federation.simulated(inner, experiment.seed, evaluation)
    if processes.world() > 1:
        sharded = ShardedClients(inner)
        federation = replace(federation, clients=sharded, inside=sharded)
    return federation


def ignored(experiment: Experiment) -> list[str]:
    """Return a note for each key of ``[training]`` that was set and that the method, or another setting, ignores."""
    training, name, ignored = experiment.training, experiment.algorithm_name, experiment.method.ignores
    given = {f.name: getattr(training, f.name) for f in fields(Training) if getattr(training, f.name) != f.default}
    if unknown := ignored.keys() - Training.__dataclass_fields__.keys():
        raise UserError(f"{name} says that it ignores {min(unknown)!r}, which is no key of [training]")
    notes = [f"{name} ignores [training] {key} = {given[key]!r}: {why}" for key, why in ignored.items() if key in given]
    idle = training.idle()
    return notes + [f"[training] {key} = {given[key]!r} has no effect: {idle[key]}" for key in given if key in idle]


def _late(experiment: Experiment, pool: FederatedData) -> list[str]:
    """Return a note where new clients are not evaluated in every evaluated round, although nobody asked for that."""
    evaluation = experiment.evaluation
    long = evaluation.adapt_rounds > QUICK and evaluation.adapt_every < 0 and evaluation.clients != "train"
    if not (long and evaluation.every and pool.total_clients > pool.num_clients):
        return []
    return [
        f"new clients adapt for {evaluation.adapt_rounds} rounds, so they are evaluated after the last round only: "
        "[evaluation] adapt_every sets this"
    ]


def _init_key(seed: int) -> Tensor:
    return rng.stream(rng.key(seed), rng.INIT)


def _fitting(pool: FederatedData, objective: Objective) -> FederatedData:
    """Return the pool with targets as the objective takes them."""
    if objective.classes and not pool.num_classes:
        raise UserError(
            f"the objective {objective.name!r} needs class numbers, and the data has other targets: give whole "
            "numbers 0, 1, ..., or choose another objective, such as regression"
        )
    if objective.classes and bool((pool.y == pool.y[:1]).all()):
        raise UserError(
            "the data has one class: nothing to learn for a classifier; give rows of several classes, or choose "
            "another objective, such as regression"
        )
    if not objective.classes and pool.contract is not None and pool.contract.classes:
        values = pool.contract.class_values()
        if values is None:
            raise UserError(
                f"the targets are words, such as {pool.contract.classes[0]!r}, and the objective {objective.name!r} "
                "needs numbers: give another label, or a classification"
            )
        y = torch.from_numpy(values)[pool.y.long()].to(torch.get_default_dtype())
        pool = replace(pool, y=y, num_classes=0, contract=replace(pool.contract, classes=()))
    elif not objective.classes and pool.num_classes:
        pool = replace(pool, y=pool.y.to(torch.get_default_dtype()), num_classes=0)
    if wrong := objective.complaint(pool.y):
        raise UserError(f"the targets do not fit the objective {objective.name!r}: {wrong}")
    return pool


def run(
    experiment: Experiment | str | Path,
    out: str | Path | None = None,
    **options: Unpack[Options],
) -> Run:
    """Run an experiment, given as an object, a file or a shipped name, and return its records and models.

    ``out`` is the run's folder; without one, the records live as long as the returned object. The other arguments are
    those of :class:`Options`, such as ``device="cpu"`` or ``resume=True``. A module that the experiment names, as in
    ``[model] name = "mine:build"``, is imported, which runs its code; a note on stderr says so. Under ``torchrun`` the
    clients are spread over its processes; the first keeps the records and calls ``callbacks``, and each returns all.
    """
    _check_arguments("run", options, DEFAULTS)
    chosen = DEFAULTS | options
    _check_options("run", chosen)
    processes.join()
    if isinstance(experiment, str | Path):
        experiment, _ = load(experiment)
    if not isinstance(experiment, Experiment):
        raise UserError(f"run(...) takes an Experiment, a file or the name of a shipped one, not {experiment!r}")
    return carry_out(experiment, built(experiment, chosen["device"], chosen["precision"]), out, **chosen)


def built(experiment: Experiment, device: str, precision: str) -> Built:
    """Build data, model and initial weights; import the modules that the experiment names, with a note on stderr."""
    experiment.import_modules()
    where = pick_device(device)
    warm_up(where)
    pool, described = data_of(experiment)
    return Built(pool, *model_of(experiment, pool, where, precision), described)


def model_of(experiment: Experiment, pool: FederatedData, device: torch.device, precision: str) -> tuple[Task, Tree]:
    """Build the model for a pool's form of rows, of which there may be none, and its initial weights."""
    objective, model, key = objective_of(experiment), experiment.located()[1], _init_key(experiment.seed)
    outputs = objective.num_outputs(pool.y if len(pool.y) else pool.y.new_zeros(1, *pool.y.shape[1:]), pool.num_classes)
    dtype = torch.get_default_dtype()
    own = pick_precision(precision, device, dtype)
    task = build_task(model, tuple(pool.x.shape[1:]), outputs, device, dtype, own, objective, key)
    return task, read_start(model.start, task) if model.start else task.init(key)


def objective_of(experiment: Experiment) -> Objective:
    """Return the objective of an experiment, with the metrics that it names."""
    return OBJECTIVES.find(experiment.objective.name, "[objective] name").measured_by(experiment.objective.metrics)


def data_of(experiment: Experiment) -> tuple[FederatedData, dict[str, Any]]:
    """Build an experiment's data, with targets as its objective takes them, and what the record says of them."""
    with processes.one_first():  # what is prepared for the first time is kept in files
        pool, partition = partitioned(experiment.located()[0], experiment.seed, experiment.training.skip_empty)
    return _fitting(pool, objective_of(experiment)), partition.describe()


def federate(
    clients: Mapping[str, Any] | Sequence[Any],
    model: nn.Module | Callable[[], nn.Module],
    head: str | None = None,
    algorithm: Algorithm | str = "fedavg",
    *,
    objective: Objective | str = "classification",
    metrics: Sequence[str] | Mapping[str, Metric] = (),
    seed: int = 0,
    test: float = 0.2,
    validation: float = 0.0,
    new_clients: int = 0,
    num_classes: int | None = None,
    transform: Step | Sequence[Step] | None = None,
    out: str | Path | None = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    training: Training | None = None,
    evaluation: Evaluation | None = None,
    **settings: Any,
) -> Run:
    """Train a personal model for each of your own clients.

    ``clients`` is a list (or a dict by name) of ``(x, y)``, ``(x, y, x_test, y_test)`` or torch Datasets; ``model`` any
    module, with its weights as the common start, whose sub-module ``head`` maps features to outputs. By default that is
    the last linear layer, where it is the only one with as many outputs. ``model`` may also be a function without
    arguments, or a class, that makes the module: then ``seed`` decides the weights, and a saved model can name it.
    ``objective`` is a name, such as ``classification`` or ``regression``, or your own :class:`Objective`, and
    ``metrics`` replace those it records, the first as the headline: names, or a dict of :class:`Metric`.
    ``num_classes`` defaults to the largest label plus one. ``transform`` is what is done to examples at every access:
    a function ``fn(key, x, train)``, such as ``bespoke.data.Flip()``, or several.

    ``evaluate_every`` is the number of rounds between evaluations; ``patience`` stops the run after this many
    evaluations without a better validation value; both replace those of ``evaluation``, which has the other settings of
    that table. ``settings`` are those of :class:`Training` (``rounds=20, lr=0.1, ...``), on top of ``training`` if that
    is given, and the :class:`Options` of :func:`run`; ``out`` is as there.
    """
    processes.join()
    make = (lambda: copy.deepcopy(model)) if isinstance(model, nn.Module) else model
    if not callable(make):
        raise UserError(f"federate(...) takes a torch module as its model, such as Net(), not {model!r}")
    _check_arguments("federate", settings, [*Training.__dataclass_fields__, *DEFAULTS])
    chosen = cast(Options, {name: settings.pop(name, default) for name, default in DEFAULTS.items()})
    _check_options("federate", chosen)
    _check_kinds(
        "federate",
        test=(test, "a share of the rows", _is_number(test)),
        validation=(validation, "a share of the rows", _is_number(validation)),
        new_clients=(new_clients, "a whole number", _is_number(new_clients, whole=True)),
        num_classes=(num_classes, "a whole number", num_classes is None or _is_number(num_classes, whole=True)),
        head=(head, "the name of a layer", head is None or isinstance(head, str)),
        training=(training, "a bespoke.Training", training is None or isinstance(training, Training)),
        evaluation=(evaluation, "a bespoke.Evaluation", evaluation is None or isinstance(evaluation, Evaluation)),
    )
    if isinstance(objective, str):
        objective = OBJECTIVES.find(objective, "federate(objective=...)")
    if not isinstance(objective, Objective):
        raise UserError(f"federate(objective=...) takes a name or an Objective, not {objective!r}")
    objective = objective.measured_by(metrics)
    if num_classes is not None and not objective.classes:
        raise UserError(f"num_classes means nothing to the objective {objective.name!r}: leave it out")
    given: dict[str, Any] = {"every": evaluate_every, "patience": patience}
    experiment = Experiment(
        data=DataSettings(validation=validation),
        algorithm=algorithm,
        training=replace(training or Training(), **settings),
        evaluation=replace(evaluation or Evaluation(), **{key: n for key, n in given.items() if n is not None}),
        seed=seed,
    )
    pool = from_arrays(
        clients,
        test=test,
        validation=validation,
        new_clients=new_clients,
        num_classes=num_classes,
        seed=seed,
        skip_empty=experiment.training.skip_empty,
        classes=objective.classes,
        transform=transform,
    )
    pool, key = _fitting(pool, objective), _init_key(seed)
    where, dtype = pick_device(chosen["device"]), torch.get_default_dtype()
    own = pick_precision(chosen["precision"], where, dtype)
    outputs = objective.num_outputs(pool.y, pool.num_classes)
    checked = _checked_maker(make)
    if head is None:
        head, note = _found_head(checked, outputs)
        pool = replace(pool, notes=(*pool.notes, note))
    task = Task(checked, head, outputs, where, dtype, own, objective, key)
    params = task.init(key)
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
        model=ModelSettings(_own_name(model, head, params, task.constants())),
        objective=_objective_settings(objective),
    )
    return carry_out(experiment, Built(pool, task, params, {}), out, **chosen)


def _checked_maker(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        try:
            module = make()
        except TypeError as error:
            raise UserError(
                f"federate(...) takes a torch module as its model, such as Net(), not {shown(make)}, which cannot be "
                f"called without arguments: {reason(error)}"
            ) from error
        if not isinstance(module, nn.Module):
            raise UserError(f"federate(model=...) is a function that returns {shown(module)}: return a torch module")
        return module

    return made


def _found_head(make: Callable[[], nn.Module], outputs: int) -> tuple[str, str]:
    """Return the name of a module's last linear layer and a note about it; refuse one that may not be the head."""
    with torch.random.fork_rng(devices=[]):
        layers = [(name, layer) for name, layer in make().named_modules() if name and isinstance(layer, nn.Linear)]
    fitting = [name for name, layer in layers if layer.out_features == outputs]
    if len(fitting) != 1 or fitting[0] != layers[-1][0]:
        sizes = ", ".join(f"{name!r} with {layer.out_features}" for name, layer in layers)
        raise UserError(
            f"which layer is the head is not clear: of the linear layers ({sizes or 'there are none'}) the last one "
            f"alone should have {outputs} outputs; name the layer that maps features to outputs, as in head='fc'"
        )
    return fitting[0], f"the head is {fitting[0]!r}, the model's last linear layer; head= names another"


def _own_name(model: nn.Module | Callable[[], nn.Module], head: str, params: Tree, constants: Tree) -> str:
    """Return the name of a user's model in the record: its class, or what makes it, and a hash of its first weights."""
    if isinstance(model, nn.Module):
        return f"own:{type(model).__name__}:{_model_digest(model, head)}"
    digest = _digest(head, tuple(params), *params.values(), tuple(constants), *constants.values())
    return f"own:{path_of(model) or getattr(model, '__name__', 'function')}:{digest}"


def carry_out(experiment: Experiment, parts: Built, out: str | Path | None = None, **options: Unpack[Options]) -> Run:
    """Run an experiment whose data and model are built."""
    chosen = DEFAULTS | options
    how = choose(chosen, out, parts.task.device, lambda name: assemble(experiment, parts, name, chosen["states"]))

    def work() -> Run:
        federation = assemble(experiment, parts, how.backend, chosen["states"], how.notes, chosen["halve"])
        return execute(experiment, federation, parts.pool, parts.described, out, chosen)

    with progress.shown(experiment, chosen["progress"] if processes.first() else False) as callback:
        chosen["callbacks"] = [callback, *chosen["callbacks"]]
        return gathered(processes.together(how.processes, work)) if how.processes > 1 else work()


def _objective_settings(objective: Objective) -> ObjectiveSettings:
    """Return an objective's entry in the record; one with other losses than the known one of its name is the user's."""
    known = OBJECTIVES.get(objective.name)
    listed = known is not None and known.row_losses is objective.row_losses
    return ObjectiveSettings(objective.name if listed else f"own:{objective.name}", tuple(objective.metrics))


def _digest(*parts: Any) -> str:
    """Return a hash that identifies the user's data or model in the experiment's hash."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digest.update(repr((part.shape, part.dtype) if isinstance(part, Tensor) else part).encode())
    return digest.hexdigest()[:16]


def _data_digest(pool: FederatedData) -> str:
    rows = (pool.train, pool.test, pool.val)
    seen = () if pool.transform is None else (repr(pool.transform),)
    return "sha256:" + _digest(pool.x, pool.y, pool.names, *(part for r in rows for part in (r.index, r.sizes)), *seen)


def _model_digest(model: nn.Module, head: str) -> str:
    weights = model.state_dict()
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    return _digest(repr(model), head, tuple(weights), *(t for t in weights.values() if isinstance(t, Tensor)), *frozen)
