"""Objects by name: shipped with bespoke, registered by users, provided by installed packages, or at a module path.

A function that a user registers receives its arguments by the names of its parameters, so its signature also declares
the settings it takes.
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

from bespoke.errors import UserError, reason, shown

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # it becomes part of a folder's name
_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_PATH = re.compile(rf"{_DOTTED}:{_DOTTED}")


def closest(name: object, names: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" with the nearest name, or "" if none is near; case, '_' and '-' do not count."""
    known = {_plain(each): each for each in names}
    near = difflib.get_close_matches(_plain(name if isinstance(name, str) else shown(name)), known, n=1)
    return f" (did you mean {known[near[0]]!r}?)" if near else ""


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def is_path(name: object) -> bool:
    """Return whether a name is the path of an object in a module, such as ``mine:HalfWay``."""
    return isinstance(name, str) and ":" in name


class Registry(UserDict[str, T]):
    """A table of objects of one kind. The shipped ones are fixed; users may add others, and replace those."""

    def __init__(
        self,
        kind: str,
        shipped: dict[str, T],
        read: Callable[[Any, str], T],
        group: str,
        reserved: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.data = shipped
        self.kind = kind  # the word for one of them in a sentence: "method"
        self.read = read  # (what a user gives, where) -> what the table holds, or a UserError
        self.group = group  # of entry points, through which installed packages provide theirs
        self.reserved = tuple(reserved)  # words that stand for none of them, such as "auto"
        self.shipped = frozenset([*reserved, *shipped])

    def register(self, name: str, thing: Any, call: str) -> None:
        """Add a user's object under a name; ``call`` is the function that an error message names."""
        where = f"{call}({shown(name)}, ...)"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"{where}: a name may have only letters, digits, '_', '-' and '.': choose another")
        if name in self.shipped:
            raise UserError(f"{where}: {name} is one of bespoke's own {self.kind}s: choose another name")
        self[name] = self.read(thing, where)

    def find(self, name: Any, where: str) -> T:
        """Return the object of that name, from an installed package if needed; ``where`` starts an error message."""
        if isinstance(name, str) and name in self:
            return self[name]
        offered = self.offered()
        if isinstance(name, str) and name in offered:
            self[name] = self.read(offered[name].load(), f"{where} = {name!r}")
            return self[name]
        if is_path(name):
            raise UserError(
                f"{where}: {shown(name)} is an object of a module, and only a run imports modules: "
                "give the object itself, or register it under a name"
            )
        names = [*self.reserved, *self, *offered]
        near = closest(name, names)
        raise UserError(f"{where}: there is no {self.kind} {shown(name)}{near}; there are {', '.join(names)}")

    def offered(self) -> dict[str, EntryPoint]:
        """Return what installed packages provide and nobody has used yet, by name, without importing it."""
        return {entry.name: entry for entry in entry_points(group=self.group) if entry.name not in self}

    def import_path(self, name: Any, where: str) -> None:
        """Import the object at a module path, and add it under that path; ignore other names."""
        if is_path(name):
            self[name] = self.read(import_object(name, where), f"{where} = {name!r}")

    def docs(self, doc: Callable[[T], str]) -> dict[str, str]:
        """Return one line on each object, its ``doc``, without importing those of installed packages."""
        offered = {name: f"{entry.value}, from an installed package" for name, entry in self.offered().items()}
        return {name: doc(thing) for name, thing in self.items()} | offered


def first_line(doc: str | None) -> str:
    """Return the first line of a docstring."""
    return (doc or "").strip().partition("\n")[0]


# --- module paths -------------------------------------------------------------------------------------------------


_ANNOUNCED: set[str] = set()


def import_object(path: str, where: str) -> Any:
    """Import ``module:name`` from the working directory or Python's path; say so on stderr, once per module."""
    name, _, inside = path.partition(":")
    if not _PATH.fullmatch(path) or name.endswith(".py"):
        raise UserError(f"{where}: {path!r} is not a module path: write MODULE:NAME, such as mine:HalfWay")
    top = name.partition(".")[0]
    place = _find(top, where)
    if name not in sys.modules or name not in _ANNOUNCED:
        _ANNOUNCED.add(name)
        print(f"note: importing the module {name!r} from {place}, which runs its code", file=sys.stderr, flush=True)
    module = _import(name, top, place, where)
    found: Any = module
    for part in inside.split("."):
        if not hasattr(found, part):
            file = getattr(module, "__file__", None) or place
            raise UserError(f"{where}: the module {name!r} ({file}) has no {inside!r}{closest(part, dir(found))}")
        found = getattr(found, part)
    return found


def _find(top: str, where: str) -> str:
    """Return the file or folder of a module or package, without running any of its code."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()  # the file may be brand new
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # it exists only in memory, as __main__ does
        return "memory"
    if spec is None:
        raise UserError(
            f"{where}: there is no module {top!r} in {here} or on Python's path: correct the name, or start in the "
            f"folder that holds {top}.py"
        )
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "memory")


def _import(name: str, top: str, place: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"{where}: the package {top} ({place}) has no module {name!r}: correct the name") from None
        raise UserError(
            f"{where}: the module {name!r} cannot be imported ({type(error).__name__}: {reason(error)}): "
            f"correct {_place(error, place)}"
        ) from error


def _place(error: BaseException, file: str) -> str:
    """Return the file and line at which a module's import failed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    return f"{own[0].filename}, line {own[0].lineno}" if own else file


# --- functions called by the names of their parameters ------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A function that is called with the offered values that its parameters name."""

    call: Callable[..., Any]
    asks: Mapping[str, Any]  # the parameters it is called with, each with its default or ``inspect.Parameter.empty``
    doc: str

    def __call__(self, offered: Mapping[str, Any]) -> Any:
        """Call it with the values that its parameters name."""
        return self.call(**{name: offered[name] for name in self.asks})

    def takes(self, keys: Iterable[str]) -> set[str]:
        """Return the keys of a table that it reads; a function with a parameter ``settings`` may read any."""
        return {key for key in keys if key in self.asks or "settings" in self.asks}

    def default(self, key: str, otherwise: Any) -> Any:
        """Return the default of a parameter, or ``otherwise`` where it has none."""
        declared = self.asks.get(key, inspect.Parameter.empty)
        return otherwise if declared is inspect.Parameter.empty else declared


def function(thing: Any, offered: Collection[str], table: str, keys: Collection[str], where: str) -> Function:
    """Check a function whose parameters name ``offered`` values and ``keys`` of a table of the experiment."""
    if not callable(thing):
        raise UserError(f"{where}: {shown(thing)} is not a function")
    name = getattr(thing, "__name__", type(thing).__name__)
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        raise UserError(f"{where}: {name} has no readable signature: wrap it in a function") from None
    asks = {}
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in (*offered, *keys) and parameter.kind is not parameter.POSITIONAL_ONLY:
            asks[parameter.name] = parameter.default
        elif parameter.default is parameter.empty:
            near = closest(parameter.name, (*offered, *keys))
            raise UserError(
                f"{where}: {name} asks for {parameter.name!r}{near}, but only {', '.join(offered)} and keys of "
                f"[{table}] are available: rename the argument, or give it a default"
            )
    return Function(thing, asks, first_line(thing.__doc__) or f"{thing.__module__}.{name}")
