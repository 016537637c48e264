"""The file of a personal model: its tensors, and one JSON text that says what they are, in the safetensors format.

Nothing in a file is unpickled or run. What is bespoke's own (model, method, objective, transform) is rebuilt from its
name and settings. A user's own is either code that the file names by its path, imported only where the caller trusts
it, or an object that the caller has to give again.
"""

import copy
import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from bespoke.algorithms import ALGORITHMS
from bespoke.clients import states
from bespoke.core import memory, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import FederatedData, Transform
from bespoke.core.inputs import InputContract
from bespoke.core.objective import METRICS, OBJECTIVES, Objective
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.data.images.degrade import DEGRADATIONS
from bespoke.data.images.views import compose
from bespoke.data.settings import DataSettings
from bespoke.data.sources.built_in import sixteen_levels_to_unit
from bespoke.data.transforms import TRANSFORMS, Step, Steps, fingerprint, parsed, step_of, text_of
from bespoke.errors import UserError, reason, shown
from bespoke.files import check_regular, write_atomic
from bespoke.models import MODELS, ModelSettings, build_module
from bespoke.models.start import CONSTANTS, INPUTS
from bespoke.registry import Registry, import_object, is_path
from bespoke.runs.experiment import Experiment, name_of, read_algorithm, read_fields

FORMAT = 1
_ENTRY, _SUM = "bespoke", "sha256"  # of the file's metadata
_MOST_TEXT = 2**22  # bytes of the JSON text
_MOST_STRUCTURE = 2**16  # characters of the text of a model's layers
_PLAIN, _SYMMETRIC, _LEVELS, _IMAGES, _STEPS = "none", "symmetric", "sixteen_levels", "images", "steps"
_SEEN = ("degrade", *DEGRADATIONS["fedpce"], "augment")  # settings of [data] that change how an image looks
_KINDS = {"BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "C64"}  # of tensors in a file
_DTYPES = {"float32": torch.float32, "float64": torch.float64}

Card = dict[str, Any]
Origin = dict[str, Any]  # {"name", "settings"}: bespoke's own; {"path", "settings"}: code; {"object"}: to be given


# --- where the parts come from --------------------------------------------------------------------------------------


def path_of(thing: Any) -> str:
    """Return the path MODULE:NAME at which another process can import a thing, or nothing."""
    module, name = getattr(thing, "__module__", None) or "", getattr(thing, "__qualname__", "")
    found: Any = None if module == "__main__" else sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is thing and found is not None else ""


def model_origin(experiment: Experiment, task: Task) -> Origin:
    """Return where the model comes from; ``own:CLASS:HASH`` and ``own:MODULE:NAME:HASH`` are those of ``federate``."""
    settings = experiment.model
    if settings.name.startswith("own:"):
        parts = settings.name.split(":")[1:-1]
        return {"path": ":".join(parts)} if len(parts) == 2 else {"object": parts[0]}
    vectors = [len(value) for name, value in task.constants().items() if name.endswith(".words.vectors")]
    known = dataclasses.replace(settings, start="", vectors="", vocabulary=vectors[0] if vectors else 0)
    given = {f.name: getattr(known, f.name) for f in dataclasses.fields(known) if getattr(known, f.name) != f.default}
    given.pop("name", None)
    return {"path" if is_path(settings.name) else "name": settings.name, "settings": given}


def method_origin(experiment: Experiment) -> Origin:
    """Return where the method comes from, with all its settings."""
    method, name = experiment.method, experiment.algorithm_name
    settings = dataclasses.asdict(method)
    if any(type(ALGORITHMS[listed]()) is type(method) for listed in ALGORITHMS.shipped):
        return {"name": name if name in ALGORITHMS.shipped else name_of(method), "settings": settings}
    path = name if is_path(name) else path_of(type(method))
    return {"path": path, "settings": settings} if path else {"object": type(method).__name__}


def objective_origin(experiment: Experiment, objective: Objective) -> Origin:
    """Return where the objective comes from, with the names of its metrics."""
    name, metrics = experiment.objective.name, [metric for metric in objective.metrics if metric != "loss"]
    if is_path(name) and not name.startswith("own:"):
        return {"path": name}
    known = OBJECTIVES[name].metrics.keys() | METRICS.keys() if name in OBJECTIVES.shipped else set()
    if known and all(metric in known or re.fullmatch(r"detection_[0-9]{1,9}", metric) for metric in metrics):
        return {"name": name, "settings": {"metrics": metrics}}
    return {"object": objective.name}


def transform_origin(pool: FederatedData, data: DataSettings) -> Origin:
    """Return how the rows of a federation become what its model takes; steps are texts, as in ``[data] transform``."""
    if not isinstance(pool.transform, Steps):
        return _scaling_origin(pool.transform, pool, data)
    last = _scaling_origin(pool.transform.last, pool, data)
    texts = list(data.transform) or [text_of(step) or path_of(step) for step in pool.transform.steps]
    how = {"name": _STEPS} if all(texts) and "object" not in last else {"object": repr(pool.transform)[:200]}
    return (
        how
        if "object" in last
        else how | {"settings": {"steps": texts, "last": last, "code": fingerprint(pool.transform.steps)}}
    )


def _scaling_origin(transform: Transform | None, pool: FederatedData, data: DataSettings) -> Origin:
    """Return what a data set itself does to its examples."""
    if transform is None:
        return {"name": _SYMMETRIC if pool.x.dtype == torch.uint8 else _PLAIN}
    if transform is sixteen_levels_to_unit:
        return {"name": _LEVELS}
    if (data.degrade, data.augment, data.normalise) != ("none", "none", "auto"):
        return {"name": _IMAGES, "settings": {key: getattr(data, key) for key in _SEEN}}
    path = path_of(transform)
    return {"path": path} if path else {"object": getattr(transform, "__qualname__", "the transform")}


def card_of(experiment: Experiment, task: Task, pool: FederatedData) -> Card:
    """Return what the files of a run say alike of its model, method, objective and inputs."""
    return {
        "model": model_origin(experiment, task),
        "method": method_origin(experiment),
        "objective": objective_origin(experiment, task.objective),
        "transform": transform_origin(pool, experiment.data),
        "structure": _structure(task),
        "head": task.head_name,
        "outputs": task.num_outputs,
        "dtype": str(task.dtype).removeprefix("torch."),
        "parameters": {name: list(shape) for name, shape in task.shapes.items()},
        "inputs": dataclasses.asdict(pool.inputs),
        "holds": experiment.method.holds,
    }


def _structure(task: Task) -> str:
    """Return the text of a model's layers, or a hash of a long one."""
    text = task.structure
    return text if len(text) <= _MOST_STRUCTURE else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


# --- writing --------------------------------------------------------------------------------------------------------


def write(
    path: str | Path,
    card: Card,
    personal: Tree,
    constants: Tree,
    inputs: Tree,
    owner: str,
    *,
    entry: str = _ENTRY,
    then: str = "",
) -> None:
    """Write a model's file whole; refuse to overwrite a file that is no model.

    ``entry`` names its description in the metadata, ``then`` says how to go on after a failure.
    """
    path, order = Path(path), list(tree.flatten(personal))  # the first view is the headline; files have no order
    told = json.dumps({"format": FORMAT, **card, "tensors": order}, allow_nan=False)
    check_target(path)
    if taken := {CONSTANTS[:-1], INPUTS[:-1]} & personal.keys():
        raise UserError(
            f"the method's personal model has a part named {min(taken)!r}, which model files use: rename it"
        )
    if len(told) > _MOST_TEXT:
        raise UserError(
            f"the description of the model takes {len(told):,} bytes, more than {_MOST_TEXT:,}: shorten names"
        )
    parts = {CONSTANTS[:-1]: constants, INPUTS[:-1]: inputs}
    held = tree.flatten({name: part for name, part in parts.items() if part} | personal)
    flat = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in held.items()}
    said = {states.OWNER: owner, entry: told, _SUM: _checksum(told, flat)}
    write_atomic(path, safetensors.torch.save(flat, said), then)


def _checksum(told: str, flat: Mapping[str, Tensor]) -> str:
    """Return a hash of a file's description and tensors."""
    digest = hashlib.sha256(told.encode())
    for name, leaf in sorted(flat.items()):
        digest.update(name.encode() + leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_target(path: Path) -> None:
    """Refuse a place for a model's file that holds something else, or has no folder."""
    if os.path.lexists(path) and (path.is_symlink() or not is_model(path)):
        raise UserError(f"{path} is there and is no model: choose another name, or move it away")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}; make it")


def is_model(path: Path) -> bool:
    """Return whether a file says that it is a personal model."""
    try:
        check_regular(path)
        with safetensors.safe_open(path, "pt") as file:
            return _ENTRY in (file.metadata() or {})
    except (OSError, safetensors.SafetensorError):
        return False


# --- reading --------------------------------------------------------------------------------------------------------


def read(path: str | Path, entry: str = _ENTRY) -> tuple[Card, Tree, Tree, Tree]:
    """Return what a file says of its model, the personal tree, the model's constants and those of the transform."""
    what = "personal model: give a file that model.save has written" if entry == _ENTRY else "beginning of a run"
    try:
        check_regular(path)
        with safetensors.safe_open(path, "pt") as file:
            said = file.metadata() or {}
            told = said.get(entry)
            if told is None:
                raise UserError(f"{path} is no {what}")
            card = _card(told, f"{path}")
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if (kind := file.get_slice(name).get_dtype()) not in _KINDS:
                    raise UserError(f"{path} is damaged: its tensor {shown(name)} cannot be of the type {kind}")
            held = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no dict
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a sound .safetensors file: {reason(error)}; copy it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or reason(error)}") from None
    if _SUM in said and said[_SUM] != _checksum(told, held):
        raise UserError(f"{path} is damaged: its checksum does not match; copy it again")
    for name, leaf in held.items():
        if not torch.isfinite(leaf).all():
            raise UserError(f"{path}: {shown(name)} holds NaN or infinity: the file is damaged, or its training failed")
    parts: dict[str, dict[str, Tensor]] = {CONSTANTS: {}, INPUTS: {}, "": {}}
    for name, leaf in held.items():
        prefix = next(prefix for prefix in parts if name.startswith(prefix))
        parts[prefix][name.removeprefix(prefix)] = leaf
    for name in {*card["tensors"]} ^ parts[""].keys():
        said = "has no tensor" if name in card["tensors"] else "does not tell of its tensor"
        raise UserError(f"{path} is damaged: it {said} {shown(name)}")
    for name, leaf in parts[""].items():
        wanted = card["parameters"].get(name.rpartition("/")[2])
        if wanted is not None and list(leaf.shape) != wanted:
            raise UserError(
                f"{path}: {name!r} has the shape {list(leaf.shape)}, and the model's is {wanted}: it is damaged"
            )
    return card, tree.unflatten({name: parts[""][name] for name in card["tensors"]}), parts[CONSTANTS], parts[INPUTS]


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**40 for size in value)


def _is_rows(value: Any) -> bool:
    """Return whether a value read from JSON is a list of equally long lists of numbers with a point."""
    rows = isinstance(value, list) and all(isinstance(row, list) for row in value)
    return rows and len({len(row) for row in value}) < 2 and all(type(each) is float for row in value for each in row)


def is_texts(value: Any) -> bool:
    """Return whether a value read from JSON is a list of texts."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_origin(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= {"name", "path", "object", "settings"}:
        return False
    kinds = [value[kind] for kind in ("name", "path", "object") if kind in value]
    return len(kinds) == 1 and isinstance(kinds[0], str) and isinstance(value.get("settings", {}), dict)


_KEYS: dict[str, Callable[[Any], bool]] = {
    "model": _is_origin,
    "method": _is_origin,
    "objective": _is_origin,
    "transform": _is_origin,
    "structure": lambda value: isinstance(value, str),
    "head": lambda value: isinstance(value, str),
    "outputs": lambda value: type(value) is int and 0 < value < 2**31,
    "dtype": lambda value: value in ("float32", "float64"),
    "tensors": is_texts,
    "parameters": lambda value: isinstance(value, dict) and all(_is_sizes(shape) for shape in value.values()),
    "inputs": lambda value: isinstance(value, dict),  # read as a contract at once
    "holds": lambda value: isinstance(value, str),
    "about": lambda value: isinstance(value, dict),
    "probe": _is_rows,
}
_LATER = ("structure", "probe")  # keys that files of earlier versions do not have


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _card(told: str, where: str) -> Card:
    """Return what a file says, after a look at its form."""
    if len(told) > _MOST_TEXT:
        raise UserError(f"{where} is damaged: its description has more than {_MOST_TEXT:,} bytes")
    try:
        card = json.loads(told, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is damaged: its description is not JSON ({reason(error)})") from None
    if not isinstance(card, dict) or "format" not in card:
        raise UserError(f"{where} is damaged: its description has no format number")
    if card["format"] != FORMAT:
        raise UserError(
            f"{where} is a model file of format {shown(card['format'])}, and this bespoke reads format {FORMAT}: load "
            "it with the version that wrote it"
        )
    for key, right in _KEYS.items():
        if key not in card and key not in _LATER:
            raise UserError(f"{where} is damaged: its description has no {key!r}")
        if key in card and not right(card[key]):
            raise UserError(f"{where} is damaged: {key!r} in its description cannot be {shown(card[key])}")
    try:
        InputContract.from_dict(card["inputs"])
    except UserError as error:
        raise UserError(f"{where} is damaged: {error}") from None
    return card


# --- rebuilding -----------------------------------------------------------------------------------------------------


def _imported(origin: Origin, what: str, argument: str, trust: bool, where: str) -> Any:
    """Return the object at the path that a file names, if its user trusts it."""
    if not trust:
        raise UserError(
            f"{where}: its {what} is code of somebody's own, {origin['path']!r}, which loading would run: if you trust "
            f"it, load it with trust_code=True (--trust-code), or give {argument}=..."
        )
    return import_object(origin["path"], where)


def _wanted(origin: Origin, what: str, argument: str, where: str) -> UserError:
    return UserError(
        f"{where}: its {what} was an object of a program, {origin['object']!r}, which no file can hold: give it again, "
        f"as {argument}=..."
    )


def _by_name(registry: Registry[Any], origin: Origin, what: str, argument: str, trust: bool, where: str) -> str:
    """Return the name under which a table has what a file names; import it if that is a path that its user trusts."""
    if "object" in origin:
        raise _wanted(origin, what, argument, where)
    if "path" in origin:
        registry[origin["path"]] = registry.read(_imported(origin, what, argument, trust, where), where)
        return str(origin["path"])
    if not trust and origin["name"] in registry.offered():
        raise UserError(
            f"{where}: its {what} {origin['name']!r} is of an installed package, which loading would import: if you "
            f"trust it, load it with trust_code=True (--trust-code), or give {argument}=..."
        )
    registry.find(origin["name"], where)  # a sentence if there is none
    return str(origin["name"])


def rebuilt_method(card: Card, given: Algorithm | None, trust: bool, where: str) -> Algorithm:
    """Return the method of a file, or the one that is given for it."""
    origin = card["method"]
    if given is not None:
        if not isinstance(given, Algorithm):
            raise UserError(f"algorithm=... takes a method, such as FedAvg(), not {shown(given)}")
        return given
    name = _by_name(ALGORITHMS, origin, "method", "algorithm", trust, where)
    return read_algorithm({"name": name, **origin.get("settings", {})}, where)


def rebuilt_objective(card: Card, given: Objective | str | None, trust: bool, where: str) -> Objective:
    """Return the objective of a file with its metrics, or the one that is given for it."""
    origin = card["objective"]
    if isinstance(given, Objective):
        return given
    if given is not None:
        return OBJECTIVES.find(given, "objective=...")
    name = _by_name(OBJECTIVES, origin, "objective", "objective", trust, where)
    metrics = origin.get("settings", {}).get("metrics", [])
    if not is_texts(metrics):
        raise UserError(f"{where} is damaged: the metrics in its description cannot be {shown(metrics)}")
    return OBJECTIVES[name].measured_by(metrics)


def rebuilt_transform(card: Card, given: Any, trust: bool, where: str) -> Transform | None:
    """Return the transform of a file, or the one that is given for it, as to ``federate`` where it was given there."""
    origin, own = card["transform"], tuple(given) if isinstance(given, Sequence) else (given,)
    told = origin.get("settings", {})
    if given is not None and not all(map(callable, own)):
        raise UserError(f"transform=... takes a function, not {shown(given)}")
    if "steps" not in told:
        return _scaling(origin, trust, where) if given is None else given
    if not is_texts(told["steps"]) or not _is_origin(told.get("last")):
        raise UserError(f"{where} is damaged: the steps of its transform cannot be {shown(told)}")
    if given is None and "object" in origin:
        raise _wanted(origin, "transform", "transform", where)
    there, here = told.get("code", ""), fingerprint(own) if given is not None else ""
    if not isinstance(there, str):
        raise UserError(f"{where} is damaged: the hash of its transform cannot be {shown(there)}")
    if here != there and here and here.partition(":")[0] == there.partition(":")[0]:
        raise UserError(f"{where} is of another transform than this one, by its settings or code: give that one")
    steps = own if given is not None else tuple(_step(text, trust, where) for text in told["steps"])
    return Steps(steps, _scaling(told["last"], trust, where))


def _step(text: str, trust: bool, where: str) -> Step:
    """Return a step by its text; one of somebody's own is imported if its user trusts it."""
    name, _ = parsed(text, where)
    _by_name(TRANSFORMS, {"path" if is_path(name) else "name": name}, "transform", "transform", trust, where)
    return step_of(text, where)


def _scaling(origin: Origin, trust: bool, where: str) -> Transform | None:
    """Return what a data set itself does to its examples."""
    if "object" in origin:
        raise _wanted(origin, "transform", "transform", where)
    if "path" in origin:
        found: Transform = _imported(origin, "transform", "transform", trust, where)
        return found
    known: dict[str, Callable[[], Transform | None]] = {
        _PLAIN: lambda: None,
        _SYMMETRIC: lambda: None,  # what is done to 8-bit numbers where there is no transform
        _LEVELS: lambda: sixteen_levels_to_unit,
        _IMAGES: lambda: compose(DataSettings(**read_fields(origin.get("settings", {}), DataSettings, where))),
    }
    if origin["name"] not in known:
        raise UserError(
            f"{where}: there is no transform {shown(origin['name'])}: load it with the version that wrote it"
        )
    return known[origin["name"]]()


def rebuilt_task(
    card: Card,
    constants: Mapping[str, Tensor],
    numbers: int,
    objective: Objective,
    given: nn.Module | Callable[[], nn.Module] | None,
    trust: bool,
    where: str,
) -> Task:
    """Return the task of a file of so many ``numbers``, on the CPU; ``given`` replaces the model that it names."""
    parameters, dtype = card["parameters"], _DTYPES[card["dtype"]]
    make = _maker(card, numbers, given, trust, where)
    wanted = parameters | {name: list(value.shape) for name, value in constants.items()}

    def build() -> nn.Module:
        module = make()
        if not isinstance(module, nn.Module):
            raise UserError(f"{where}: its model is a torch module, not {shown(module)}")
        if wrong := _difference(module, wanted):
            raise UserError(f"{where} is of another model than this one: {wrong}")
        module = module.to(dtype=dtype)
        with torch.no_grad():
            for name, value in _tensors(module).items():
                if name in constants:
                    value.copy_(constants[name])
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in parameters)
        return module

    task = Task(build, card["head"], card["outputs"], "cpu", dtype, "fp32", objective)
    if given is not None or card["model"].get("name") not in MODELS.shipped:
        _check_structure(card.get("structure", ""), _structure(task), where)
    return task


def _check_structure(there: str, here: str, where: str) -> None:
    """Refuse a model whose layers are not those that a file tells of; files of earlier versions tell nothing."""
    if there and there != here:
        lines = zip_longest(there.splitlines(), here.splitlines(), fillvalue="nothing")
        old, new = next(((a.strip(), b.strip()) for a, b in lines if a != b), (there, here))
        raise UserError(f"{where} is of another model than this one: {shown(old)} there is {shown(new)} here")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _difference(module: nn.Module, wanted: Mapping[str, list[int]]) -> str:
    """Return the first way in which a module's parameters and buffers are not those wanted, or nothing."""
    own = {name: list(value.shape) for name, value in _tensors(module).items()}
    for name, shape in wanted.items():
        if name not in own:
            return f"it has {name!r}, which this one has not"
        if own[name] != shape:
            return f"{name!r} has the shape {shape} there and {own[name]} here"
    return next((f"it has no {name!r}" for name in own if name not in wanted), "")


def _maker(card: Card, numbers: int, given: Any, trust: bool, where: str) -> Callable[[], nn.Module]:
    """Return what makes the module of a file, or of what is given for it."""
    origin = card["model"]
    if given is not None:
        if not isinstance(given, nn.Module) and not callable(given):
            raise UserError(f"model=... takes a torch module, or a function that makes one, not {shown(given)}")
        return (lambda: copy.deepcopy(given)) if isinstance(given, nn.Module) else given
    if "path" in origin and "settings" not in origin:  # a function without arguments, given to federate
        made: Callable[[], nn.Module] = _imported(origin, "model", "model", trust, where)
        return made
    name, shape = _by_name(MODELS, origin, "model", "model", trust, where), tuple(card["inputs"]["shape"])
    settings = ModelSettings(**read_fields({**origin.get("settings", {}), "name": name}, ModelSettings, where))
    if settings.vocabulary > numbers:
        raise UserError(f"{where} is damaged: it cannot hold {settings.vocabulary:,} word vectors")
    if name in MODELS.shipped:
        with torch.device("meta"):
            module = build_module(settings, shape, card["outputs"])
        count = sum(value.numel() for value in _tensors(module).values())
        if count > 2 * numbers + 2**24:
            raise UserError(f"{where} is damaged: it names a model of {count:,} numbers and holds {numbers:,}")
        memory.require(8 * count, f"the model of {where}", "load it on a larger machine")
    return lambda: build_module(settings, shape, card["outputs"])
