"""An experiment as frozen dataclasses, to and from TOML, with every mistake reported in one sentence."""

import dataclasses
import glob
import hashlib
import json
import numbers
import os
import re
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bespoke.algorithms import ALGORITHMS
from bespoke.core.algorithm import Algorithm
from bespoke.core.objective import OBJECTIVES, ObjectiveSettings
from bespoke.core.settings import Training, allowed, problem
from bespoke.data import DATASETS, PARTITIONS
from bespoke.data.settings import DataSettings
from bespoke.data.transforms import TRANSFORMS, parsed
from bespoke.errors import UserError, shown
from bespoke.files import experiments_folder, parse_toml, read_settings
from bespoke.models import MODELS
from bespoke.models.settings import ModelSettings
from bespoke.network.settings import FederationSettings
from bespoke.registry import Registry, closest, is_path
from bespoke.runs.federation import Evaluation

_TABLES = {
    "data": DataSettings,
    "model": ModelSettings,
    "objective": ObjectiveSettings,
    "training": Training,
    "evaluation": Evaluation,
    "federation": FederationSettings,
}
_KNOWN = ("seed", *_TABLES, "algorithm")
_FEDAVG = {"name": "fedavg"}
_NAMED: tuple[tuple[str, str, Registry[Any]], ...] = (  # settings that may name an object of a module
    ("data", "name", DATASETS),
    ("data", "partition", PARTITIONS),
    ("model", "name", MODELS),
    ("objective", "name", OBJECTIVES),
)
_LATER = (  # settings that older runs lack: at their defaults not hashed
    ("training", "robust"),
    ("training", "trim"),
    ("training", "bound"),
    ("data", "like"),
    ("data", "classes"),
    ("data", "keep_clients"),
    ("data", "new_draw"),
    ("data", "noise_scale"),
    ("model", "start"),
    ("data", "between"),
    ("data", "client"),
    ("data", "label"),
    ("data", "features"),
    ("data", "categorical"),
    ("data", "delimiter"),
    ("data", "size"),
    ("data", "transform"),
    ("data", "shape"),
    ("data", "dtype"),
    ("data", "class_names"),
    ("data", "targets"),
)
_KINDS = {int: "a whole number", float: "a number", str: "a string in quotes", bool: "true or false"}


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run's result: data, model, objective, method, training, evaluation and seed.

    ``algorithm`` is a method, or the name of one with its defaults.
    """

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    algorithm: Algorithm | str = "fedavg"
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    seed: int = 0
    algorithm_name: str = ""  # set automatically
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    federation: FederationSettings = field(default_factory=FederationSettings)
    folder: str = field(default="", compare=False)  # of the file it was read from; relative paths start there

    def __post_init__(self) -> None:
        """Turn a name into a method, and check every table and their combination."""
        name, method = self.algorithm_name, self.algorithm
        if isinstance(method, str):
            name, method = method, read_algorithm({"name": method}, "Experiment(algorithm=...)")
        elif not isinstance(method, Algorithm):
            is_class = isinstance(method, type) and issubclass(method, Algorithm)
            wrong = f"the class {method.__name__}: add (), as in {method.__name__}()" if is_class else shown(method)
            raise UserError(f"Experiment(algorithm=...) takes a method or its name, not {wrong}")
        object.__setattr__(self, "algorithm", _checked(method, type(method), "[algorithm]"))
        object.__setattr__(self, "algorithm_name", name or name_of(method))
        object.__setattr__(self, "seed", _seed(self.seed, "seed"))
        for table, kind in _TABLES.items():
            object.__setattr__(self, table, _checked(getattr(self, table), kind, f"[{table}]"))
        if self.evaluation.patience and not (self.data.validation and self.evaluation.every):
            raise UserError(
                "[evaluation] patience stops early on validation accuracy: set [data] validation and "
                "[evaluation] every as well (validation= and evaluate_every= of federate)"
            )
        if self.evaluation.patience and self.evaluation.clients == "new":
            raise UserError('[evaluation] patience judges the training population: set [evaluation] clients = "all"')
        if self.evaluation.select == "best_val" and not self.data.validation:
            raise UserError('[evaluation] select = "best_val" needs validation rows: set [data] validation')

    @property
    def method(self) -> Algorithm:
        """The method itself."""
        assert isinstance(self.algorithm, Algorithm)  # ensured by __post_init__
        return self.algorithm

    def located(self) -> tuple[DataSettings, ModelSettings]:
        """Return data and model with the paths of files as seen from the working directory.

        A relative path starts in the folder of the file that the experiment was read from if something is there,
        else in the working directory. The experiment, and so its hash, keeps the path as written.
        """

        def seen(path: str) -> str:
            beside = os.path.join(self.folder, os.path.expanduser(path))
            return beside if path and glob.glob(beside, recursive=True) else path

        data = dataclasses.replace(self.data, path=seen(self.data.path))
        return data, dataclasses.replace(self.model, vectors=seen(self.model.vectors), start=seen(self.model.start))

    def import_modules(self) -> None:
        """Import the modules that hold data set, partition, transform or model; the method is already imported."""
        for table, key, registry in _NAMED:
            if table in _TABLES:
                registry.import_path(getattr(getattr(self, table), key), f"[{table}] {key}")
        for step in self.data.transform:
            TRANSFORMS.import_path(parsed(step, "[data] transform")[0], "[data] transform")

    def tables(self) -> dict[str, Any]:
        """Return the experiment as plain values, as in ``config.toml``; ``federation`` only where it says anything."""
        own = {} if self.federation == FederationSettings() else {"federation": dataclasses.asdict(self.federation)}
        return {
            "seed": self.seed,
            "data": dataclasses.asdict(self.data),
            "model": dataclasses.asdict(self.model),
            "objective": dataclasses.asdict(self.objective),
            "algorithm": {"name": self.algorithm_name, **dataclasses.asdict(self.method)},
            "training": dataclasses.asdict(self.training),
            "evaluation": dataclasses.asdict(self.evaluation),
            **own,
        }

    def toml(self) -> str:
        """Return the experiment as TOML text."""
        return to_toml(self.tables())

    def hash(self) -> str:
        """Return the hash of what identifies a run: data, model, objective, algorithm, training, and seed.

        ``rounds`` is left out, so that a run may be extended, unless a schedule depends on it. The device and the
        metrics do not count. Classification counts as no objective, and the newest settings count only where they are
        set, so that older runs keep their hash.
        """
        tables = self.tables()
        tables.pop("federation", None)
        del tables["evaluation"], tables["training"]["rounds"], tables["objective"]
        for table, key in _LATER:
            if tables[table][key] == getattr(_TABLES[table], key):
                del tables[table][key]
        if self.objective.name != ObjectiveSettings.name:
            tables["objective"] = self.objective.name
        if self.training.schedule != "constant":
            tables["training"]["schedule_rounds"] = self.training.horizon()
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]


# --- reading ------------------------------------------------------------------------------------------------------


def shipped() -> dict[str, Path]:
    """Return the shipped experiments by name."""
    root = experiments_folder()
    paths = [p for p in sorted(root.rglob("*.toml")) if p.parent.name not in ("algorithms", "tables", "comparisons")]
    return {p.relative_to(root).with_suffix("").as_posix(): p for p in paths}


def find(name: str) -> Path:
    """Find an experiment file by path, or by the name of a shipped one."""
    if os.path.isfile(name):
        return Path(name)
    named = shipped()
    if name in named:
        return named[name]
    meant = [file for file in (f"{name}.toml", f"{name}/config.toml") if os.path.isfile(file)]
    hint = f" (did you mean {meant[0]!r}?)" if meant else closest(name, named)
    raise UserError(
        f"there is no experiment file {shown(name)} and no shipped experiment of that name{hint}; "
        "bespoke list experiments shows them"
    )


def load(
    name: str | Path,
    algorithm: str | None = None,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    any_method: bool = False,
) -> tuple[Experiment, str]:
    """Read an experiment, and return it with the source of its method's settings.

    With ``algorithm``, the file ``algorithms/NAME.toml`` next to the experiment gives that method's settings
    (and its changes to ``[training]``); without such a file the method's defaults apply.
    ``overrides`` are ``table.key=value`` and override both. A method named by its module path is imported,
    which runs that module's code; with ``any_method`` no method is read, and the experiment has FedAvg instead.
    """
    path = find(str(name))
    tables, source = _parse(path), str(path)
    _check_tables(tables, _KNOWN, str(path))
    if any_method:
        tables = {table: values for table, values in tables.items() if table != "algorithm"}
        overrides = [text for text in overrides if not text.startswith("algorithm.")]
    own = tables.get("algorithm", {}).get("name")
    replaced = algorithm is not None and algorithm != own
    if not (replaced and is_path(own)):  # a module that is not used is not imported
        ALGORITHMS.import_path(own, f"{path}: [algorithm] name")
        _read_tables(tables, str(path))  # so that a mistake is blamed on the file, the preset or the override
    preset = path.parent / "algorithms" / f"{algorithm}.toml"
    if algorithm is not None:
        ALGORITHMS.import_path(algorithm, "--algorithm")
    if algorithm is not None and preset.is_file():
        tables, source = tables | _preset(preset, algorithm, tables), str(preset)
    elif replaced:
        read_algorithm({"name": algorithm}, "--algorithm")
        tables, source = tables | {"algorithm": {"name": algorithm}}, "the method's defaults"
    for override in overrides:
        _override(tables, override)
    if seed is not None:
        tables["seed"] = _seed(seed, "--seed")
    typed = any(text.partition("=")[0].strip() in ("data.path", "model.vectors", "model.start") for text in overrides)
    folder = "" if typed else str(path.parent)  # a path that was typed starts in the working directory
    return dataclasses.replace(from_tables(tables, str(path)), folder=folder), source


def changed(experiment: Experiment, overrides: Sequence[str]) -> Experiment:
    """Return an experiment with some settings changed, each ``table.key=value``."""
    tables = experiment.tables()
    for override in overrides:
        _override(tables, override, experiment.method)
    return dataclasses.replace(from_tables(tables, "the changed settings", experiment.method), folder=experiment.folder)


def _parse(path: Path) -> dict[str, Any]:
    return read_settings(path, "be an experiment")


def _preset(path: Path, algorithm: str, tables: dict[str, Any]) -> dict[str, Any]:
    """Return an experiment's ``[algorithm]`` and ``[training]`` tables as changed by a method's own file."""
    extra = _parse(path)
    _check_tables(extra, ("algorithm", "training"), str(path))
    method = {"name": algorithm} | extra.get("algorithm", {})
    if method["name"] != algorithm:
        raise UserError(
            f"{path}: [algorithm] name must be that of the file, {algorithm!r}, not {shown(method['name'])}"
        )
    read_algorithm(method, f"{path}: [algorithm]")
    training = read_fields(extra.get("training", {}), Training, f"{path}: [training]")
    return {"algorithm": method, "training": tables.get("training", {}) | training}


def _override(tables: dict[str, Any], text: str, method: Algorithm | None = None) -> None:
    """Change one of the tables; ``method`` is used for a name that is not listed."""
    where = f"the setting {shown(text, 100)}"
    name, _, value = (part.strip() for part in text.partition("="))
    table, _, key = name.partition(".")
    if not value or "." in key:
        raise UserError(f"{where}: write TABLE.KEY=VALUE, for example training.lr=0.1")
    if name == "seed":
        tables["seed"] = _seed(_value(value, where), where)
        return
    if name == "algorithm.name":
        raise UserError(f"{where}: choose the method with --algorithm {value} (algorithm= in Python)")
    if not key:
        owners = tables_with(table)
        hint = f" (did you mean {owners[0]}.{table}?)" if owners else ""
        raise UserError(f"{where}: name the table as well, as in training.lr=0.1{hint}")
    _check_tables({table: {}}, _KNOWN[1:], where)
    before = tables.get(table, _FEDAVG if table == "algorithm" else {})
    if table in _TABLES:
        kind = _TABLES[table]
    else:
        listed = method is None or before.get("name") in ALGORITHMS
        kind = type(ALGORITHMS.find(before.get("name"), where)() if listed else method)
    parsed = _value(value, where)
    if typing.get_type_hints(kind).get(key) is str and not isinstance(parsed, str):
        parsed = value  # digits may be a string
    read_fields({key: parsed}, kind, f"{where}: [{table}]")
    tables[table] = before | {key: parsed}


def defaults_of(table: str) -> Any:
    """Return the settings of an experiment's table, or of a method, with their default values."""
    if table in _TABLES:
        return _TABLES[table]()
    if table not in ALGORITHMS and table not in ALGORITHMS.offered():
        known = [*_TABLES, *ALGORITHMS]
        hint = closest(table, known) or " (give a method's name for its own settings)" * (table == "algorithm")
        raise UserError(f"there is no table of settings {shown(table)}{hint}; there are {', '.join(known)}")
    return ALGORITHMS.find(table, "the method")()


def table_names() -> list[str]:
    """Return the names of an experiment's tables that are the same for all methods."""
    return list(_TABLES)


def tables_with(key: str) -> list[str]:
    """Return the tables that have a setting of that name."""
    return [table for table, kind in _TABLES.items() if key in {field.name for field in dataclasses.fields(kind)}]


def _value(text: str, where: str) -> Any:
    """Parse a TOML value; a bare word is a string, and a number may begin or end with its point."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return float(text) if re.fullmatch(r"[+-]?(\d+\.|\.\d+)", text) else text
    except ValueError as error:
        raise UserError(f"{where}: cannot be a setting: {error}") from None


def _check_tables(tables: dict[str, Any], known: Sequence[str], where: str) -> None:
    for key, value in tables.items():
        if key not in known:
            raise UserError(f"{where}: unknown key {shown(key)}{closest(key, known)}; allowed are {', '.join(known)}")
        if key != "seed" and not isinstance(value, dict):
            raise UserError(f"{where}: {key} must be a table, written [{key}]")


def from_tables(tables: dict[str, Any], where: str, method: Algorithm | None = None) -> Experiment:
    """Check plain values and make an experiment from them; every error message names ``where``.

    ``method`` is used for a name that is not listed.
    """
    parts = _read_tables(tables, where, method)
    try:
        return Experiment(**parts)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _read_tables(tables: dict[str, Any], where: str, method: Algorithm | None = None) -> dict[str, Any]:
    _check_tables(tables, _KNOWN, where)
    parts = {
        name: kind(**read_fields(tables.get(name, {}), kind, f"{where}: [{name}]")) for name, kind in _TABLES.items()
    }
    table = tables.get("algorithm", _FEDAVG)
    if method is None or table.get("name") in [None, *ALGORITHMS]:
        method = read_algorithm(table, f"{where}: [algorithm]")
    else:
        fields = {k: v for k, v in table.items() if k != "name"}
        method = dataclasses.replace(method, **read_fields(fields, type(method), f"{where}: [algorithm]"))
    seed = _seed(tables.get("seed", 0), f"{where}: seed")
    return {**parts, "algorithm": method, "algorithm_name": table["name"], "seed": seed}


def read_algorithm(table: dict[str, Any], where: str) -> Algorithm:
    """Make a method from its name and fields."""
    if "name" not in table:
        raise UserError(f"{where} needs a name, one of {', '.join(ALGORITHMS)}")
    method = ALGORITHMS.find(table["name"], where)()
    fields = {k: v for k, v in table.items() if k != "name"}
    return dataclasses.replace(method, **read_fields(fields, type(method), where))


def name_of(method: Algorithm) -> str:
    """Return the name under which a method is listed; of several, the one with the closest settings."""
    listed = {name: factory() for name, factory in ALGORITHMS.items()}
    names = [name for name, made in listed.items() if type(made) is type(method)]
    if not names:
        return type(method).__name__.lower()
    values = dataclasses.asdict(method)
    return min(names, key=lambda name: sum(values[k] != v for k, v in dataclasses.asdict(listed[name]).items()))


def read_fields(table: dict[str, Any], kind: type[Any], where: str) -> dict[str, Any]:
    """Return a table's values, each in the type of the field of ``kind`` that it names."""
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values = {}
    for key, value in table.items():
        if key not in fields:
            names = ", ".join(fields) or "none: it takes no settings"
            raise UserError(f"{where} has no key {shown(key)}{closest(key, fields)}; allowed are {names}")
        values[key] = _typed(value, hints[key], f"{where} {key}")
        wrong = problem(fields[key], values[key])
        if wrong:
            raise UserError(f"{where} {key} {wrong}")
    return values


def _checked(settings: Any, kind: type[Any], where: str) -> Any:
    """Return a table with every value in its field's own type, so that equal settings have equal hashes."""
    if not isinstance(settings, kind):
        raise UserError(f"{where} must be a {kind.__name__}, not {shown(settings)}")
    fields = {f.name: getattr(settings, f.name) for f in dataclasses.fields(kind) if f.init}
    return dataclasses.replace(settings, **read_fields(fields, kind, where))


def _seed(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise UserError(f"{where} must be a whole number of at least 0, not {shown(value)}")
    if int(value) >= 2**63:
        raise UserError(f"{where} must be a whole number below 2^63, not {shown(value)}")
    return int(value)


def _typed(value: Any, kind: Any, where: str) -> Any:
    """Return a value of the field's type; a whole number may stand for a float, nothing else is converted."""
    if kind in (int, float) and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value) if kind is int or abs(int(value)) > 2**1000 else float(value)  # the limits are checked later
    if kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)  # NumPy's numbers are numbers
    if isinstance(kind, types.GenericAlias) and kind.__origin__ is tuple:  # tuple[T, ...]
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} must be a list, not {shown(value)}")
        return tuple(_typed(v, typing.get_args(kind)[0], where) for v in value)
    if kind not in _KINDS:
        raise UserError(
            f"{where} is declared as {kind}: a setting is an int, float, str, bool or tuple[T, ...] of them"
        )
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where} must be {_KINDS[kind]}, not {shown(value)}")
    return value


# --- writing ------------------------------------------------------------------------------------------------------


def to_toml(tables: dict[str, Any]) -> str:
    """Write plain values and one level of tables as TOML text."""
    lines = [f"{k} = {literal(v)}" for k, v in tables.items() if not isinstance(v, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{k} = {literal(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def literal(value: Any) -> str:
    """Write a plain value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    return repr(value)


def describe(kind: type[Any]) -> list[tuple[str, Any, str]]:
    """Return (key, default, meaning with allowed values) of each field of a table, for help pages."""
    rows = []
    for f in dataclasses.fields(kind):
        rule = allowed(f)
        doc = f.metadata.get("doc", "")
        rows.append((f.name, f.default, f"{doc} ({rule})" if rule else doc))
    return rows
