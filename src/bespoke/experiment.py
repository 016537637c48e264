"""An experiment as frozen dataclasses, to and from TOML, with every mistake told in one sentence."""

import dataclasses
import difflib
import hashlib
import json
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bespoke.algorithms import ALGORITHMS, load_plugins, method_class
from bespoke.core.algorithm import Algorithm
from bespoke.core.settings import Training, allowed, problem
from bespoke.datasets.settings import DataSettings
from bespoke.errors import UserError
from bespoke.federation import Evaluation
from bespoke.models.settings import ModelSettings

_TABLES = {"data": DataSettings, "model": ModelSettings, "training": Training, "evaluation": Evaluation}
_KINDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run's result: data, model, method, training, evaluation and seed.

    ``algorithm`` is a method, or the name of one with its defaults.
    """

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    algorithm: Algorithm | str = "fedavg"
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    seed: int = 0
    algorithm_name: str = ""  # set by itself

    def __post_init__(self) -> None:
        """Turn a name into a method, and check every table and what they mean together."""
        name, method = self.algorithm_name, self.algorithm
        if isinstance(method, str):
            name, method = method, read_algorithm({"name": method}, "Experiment(algorithm=...)")
        elif not isinstance(method, Algorithm):
            raise UserError(f"Experiment(algorithm=...) takes a method or its name, not {method!r}")
        object.__setattr__(self, "algorithm", method)
        object.__setattr__(self, "algorithm_name", name or name_of(method))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise UserError(f"seed must be a whole number of at least 0, not {self.seed!r}")
        for table, kind in _TABLES.items():
            _check_table(getattr(self, table), kind, f"[{table}]")
        if self.evaluation.patience and not (self.data.validation and self.evaluation.every):
            raise UserError(
                "[evaluation] patience stops early on validation accuracy: set [data] validation and "
                "[evaluation] every as well"
            )
        if self.evaluation.select == "best_val" and not self.data.validation:
            raise UserError('[evaluation] select = "best_val" needs validation rows: set [data] validation')

    @property
    def method(self) -> Algorithm:
        """The method itself."""
        assert isinstance(self.algorithm, Algorithm)  # __post_init__ has seen to it
        return self.algorithm

    def tables(self) -> dict[str, Any]:
        """The experiment as plain values: what ``config.toml`` holds."""
        return {
            "seed": self.seed,
            "data": dataclasses.asdict(self.data),
            "model": dataclasses.asdict(self.model),
            "algorithm": {"name": self.algorithm_name, **dataclasses.asdict(self.method)},
            "training": dataclasses.asdict(self.training),
            "evaluation": dataclasses.asdict(self.evaluation),
        }

    def toml(self) -> str:
        """The experiment as TOML text."""
        return to_toml(self.tables())

    def hash(self) -> str:
        """What makes two runs the same: data, model, algorithm, training without ``rounds``, and seed.

        A run may be lengthened or moved to another device, not changed. Where the schedule runs over all
        rounds, its length is part of the training.
        """
        tables = self.tables()
        del tables["evaluation"], tables["training"]["rounds"]
        if self.training.schedule != "constant":
            tables["training"]["schedule_rounds"] = self.training.horizon()
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]


# --- reading ------------------------------------------------------------------------------------------------------


def experiments_folder() -> Path:
    """The shipped experiments: inside the installed package, or at the root of a checkout."""
    inside = Path(__file__).parent / "experiments"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "experiments"


def shipped() -> dict[str, Path]:
    """The shipped experiments by name."""
    root = experiments_folder()
    paths = [p for p in sorted(root.rglob("*.toml")) if p.parent.name != "algorithms"]
    return {p.relative_to(root).with_suffix("").as_posix(): p for p in paths}


def find(name: str) -> Path:
    """An experiment file by path, or by the name of a shipped one."""
    path = Path(name)
    if path.is_file():
        return path
    named = shipped()
    if name in named:
        return named[name]
    raise UserError(
        f"there is no experiment file {name!r} and no shipped experiment of that name{_closest(name, named)}; "
        f"shipped are {', '.join(named)}"
    )


def load(
    name: str | Path, algorithm: str | None = None, overrides: Sequence[str] = (), seed: int | None = None
) -> tuple[Experiment, str]:
    """Read an experiment, and say where its method's settings come from.

    With ``algorithm``, the file ``algorithms/NAME.toml`` beside the experiment gives that method's settings
    (and what it changes in ``[training]``); without such a file the method's defaults hold.
    ``overrides`` are ``table.key=value`` and win over both.
    """
    path = find(str(name))
    tables, source = _parse(path), str(path)
    if algorithm is not None and algorithm != tables.get("algorithm", {}).get("name"):
        preset = path.parent / "algorithms" / f"{algorithm}.toml"
        if preset.is_file():
            source = str(preset)
            extra = _parse(preset)
            for table in extra:
                if table not in ("algorithm", "training"):
                    raise UserError(f"{preset}: may hold the tables [algorithm] and [training] only, not {table!r}")
            tables["algorithm"] = {"name": algorithm, **extra.get("algorithm", {})}
            tables["training"] = tables.get("training", {}) | extra.get("training", {})
        else:
            source = "the method's defaults"
            tables["algorithm"] = {"name": algorithm}
    for override in overrides:
        _override(tables, override)
    if seed is not None:
        tables["seed"] = seed
    return from_tables(tables, str(path)), source


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not valid TOML: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _override(tables: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) > 2:
        raise UserError(f"--set {text!r}: write TABLE.KEY=VALUE, for example --set training.lr=0.1")
    if len(parts) == 1 and parts[0] != "seed":
        owners = [t for t, kind in _TABLES.items() if parts[0] in {f.name for f in dataclasses.fields(kind)}]
        hint = f": did you mean {owners[0]}.{parts[0]}?" if owners else ""
        raise UserError(f"--set {text!r}: name the table as well, as in training.lr=0.1{hint}")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # a bare word is a text
    if len(parts) == 1:
        tables[parts[0]] = parsed
    else:
        tables.setdefault(parts[0], {})[parts[1]] = parsed


def from_tables(tables: dict[str, Any], where: str) -> Experiment:
    """Check plain values and make an experiment of them; ``where`` is named in every complaint."""
    known = ["seed", *_TABLES, "algorithm"]
    for key, value in tables.items():
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}{_closest(key, known)}; allowed are {', '.join(known)}")
        if key != "seed" and not isinstance(value, dict):
            raise UserError(f"{where}: {key} must be a table, written [{key}]")
    parts = {name: _read_table(tables.get(name, {}), kind, f"{where}: [{name}]") for name, kind in _TABLES.items()}
    method = tables.get("algorithm", {"name": "fedavg"})
    algorithm = read_algorithm(method, f"{where}: [algorithm]")
    try:
        return Experiment(**parts, algorithm=algorithm, seed=tables.get("seed", 0), algorithm_name=method["name"])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def read_algorithm(table: dict[str, Any], where: str) -> Algorithm:
    """A method from its name and fields."""
    load_plugins()
    if "name" not in table:
        raise UserError(f"{where} needs a name, one of {', '.join(ALGORITHMS)}")
    name = table["name"]
    if name not in ALGORITHMS:
        raise UserError(
            f"{where} name: there is no method {name!r}{_closest(str(name), ALGORITHMS)}; "
            f"allowed are {', '.join(ALGORITHMS)}"
        )
    kind = method_class(name)
    fields = {k: v for k, v in table.items() if k != "name"}
    return ALGORITHMS[name](**_read_fields(fields, kind, where))


def name_of(method: Algorithm) -> str:
    """The name under which a method is listed: of several, the one whose settings are nearest."""
    names = [n for n in ALGORITHMS if method_class(n) is type(method)]
    if not names:
        return type(method).__name__.lower()
    values = dataclasses.asdict(method)
    return min(names, key=lambda n: sum(values[k] != v for k, v in dataclasses.asdict(ALGORITHMS[n]()).items()))


def _read_table(table: dict[str, Any], kind: type[Any], where: str) -> Any:
    return kind(**_read_fields(table, kind, where))


def _read_fields(table: dict[str, Any], kind: type[Any], where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values = {}
    for key, value in table.items():
        if key not in fields:
            names = ", ".join(fields) or "none: it takes no settings"
            raise UserError(f"{where} has no key {key!r}{_closest(key, fields)}; allowed are {names}")
        values[key] = _typed(value, hints[key], f"{where} {key}")
        wrong = problem(fields[key], values[key])
        if wrong:
            raise UserError(f"{where} {key} {wrong}")
    return values


def _check_table(settings: Any, kind: type[Any], where: str) -> None:
    if not isinstance(settings, kind):
        raise UserError(f"{where} must be a {kind.__name__}, not {settings!r}")
    _read_fields({f.name: getattr(settings, f.name) for f in dataclasses.fields(kind)}, kind, where)


def _typed(value: Any, kind: Any, where: str) -> Any:
    """A value of the field's type; a whole number may stand for a floating one, nothing else is converted."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, types.GenericAlias):  # tuple[T, ...]
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} must be a list, not {value!r}")
        return tuple(_typed(v, typing.get_args(kind)[0], where) for v in value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where} must be {_KINDS.get(kind, kind)}, not {value!r}")
    return value


def _closest(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


# --- writing ------------------------------------------------------------------------------------------------------


def to_toml(tables: dict[str, Any]) -> str:
    """Plain values and one level of tables as TOML text."""
    lines = [f"{k} = {_literal(v)}" for k, v in tables.items() if not isinstance(v, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{k} = {_literal(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(v) for v in value) + "]"
    return repr(value)


def describe(kind: type[Any]) -> list[tuple[str, Any, str]]:
    """(key, default, meaning with allowed values) of each field of a table, for help pages."""
    rows = []
    for f in dataclasses.fields(kind):
        rule = allowed(f)
        doc = f.metadata.get("doc", "")
        rows.append((f.name, f.default, f"{doc} ({rule})" if rule else doc))
    return rows
