"""Result files: what a run gave for one cell of a table and one seed, as small JSON files that are kept for good."""

import ast
import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import bespoke
from bespoke.errors import UserError, shown
from bespoke.files import read_settings, write_atomic
from bespoke.report.groups import PEOPLE, members
from bespoke.report.metrics import Aggregates, Scores, aggregate
from bespoke.tables.spec import Entry

USUAL = Path("results")  # a folder that need not be there before the first sweep
DOUBTS = "doubts.toml"  # among the results
_DIGITS = 1e-6  # the share by which numbers may differ that are kept with seven digits
_WHOLE = 2**53  # below it a float with no fraction is written as a whole number


@dataclass(frozen=True)
class Result:
    """One result file."""

    path: Path
    content: dict[str, Any]

    @property
    def done(self) -> bool:
        """Whether the run came to its end; otherwise ``content["error"]`` says why not."""
        return self.content["status"] == "done"

    @property
    def seed(self) -> int:
        """The seed, which decides the partition too."""
        return int(self.content["seed"])

    @property
    def identity(self) -> str:
        """A hash of what was run and what was read from it."""
        return _identity(self.content)

    @property
    def same_source(self) -> bool:
        """Whether the method's source is still the one that gave this result."""
        told = self.content["source"]
        return told["method"] is None or told["method"] == source_hash(tuple(told["modules"]))

    def scores(self, metric: str = "", group: str = "all") -> Scores:
        """Return the clients of a group, such as "new" or "train:noise", by a recorded metric."""
        clients, metric = self.content["clients"], metric or self.content["metric"]
        if metric not in clients["metrics"]:
            raise UserError(f"{self.path} holds no {metric}; it has {', '.join(clients['metrics'])}")
        keep = members(group, clients["group"], clients["condition"], str(self.path))
        own = [i for i, there in enumerate(keep) if there]
        pairs = clients["metrics"][metric]
        names, rows = ([clients[key][i] for i in own] for key in ("client", "rows"))
        return Scores.of(names, rows, [(pairs["sum"][i], pairs["weight"][i]) for i in own])

    def aggregates(self, metric: str = "", group: str = "all") -> Aggregates:
        """Return all statistics of a metric over the clients of a group, in the metric's own scale."""
        return aggregate(self.scores(metric, group), self.content["higher"][metric or self.content["metric"]])

    def value(self, entry: Entry) -> float | None:
        """Return the number that the entry asks for, in the metric's own scale."""
        found = getattr(self.aggregates(entry.metric, entry.group), entry.statistic)
        return None if found is None else float(found)


def _identity(content: dict[str, Any]) -> str:
    read = [content.get(key) for key in ("settings", "evaluate", "view", "selection", "group")]
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:8]


# --- files ----------------------------------------------------------------------------------------------------------


def place(root: Path, entry: Entry) -> Path:
    """Return the folder of an entry's results."""
    return root / entry.table / entry.cell.id / entry.row.id


def read(path: Path) -> Result:
    """Read a result file; refuse one that lacks what is used of it, or whose place is that of another."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is no file: remove it, and sweep again")
    try:
        content = json.loads(path.read_bytes(), parse_int=_whole, parse_float=_finite, parse_constant=_finite)
        sound = _sound(content)
    except (ValueError, RecursionError):
        sound = False
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not sound:
        raise UserError(f"{path}: is no result of a table: remove it, and sweep again")
    if not _at(content, path):
        own = f"{shown(content['table'])}, cell {shown(content['cell'])}, seed {content['seed']}"
        raise UserError(f"{path}: is the result of {own}: it belongs elsewhere; remove it, and sweep again")
    return Result(path, content)


def of(root: Path, entry: Entry) -> dict[int, Result]:
    """Return an entry's results by seed, those that failed and those with other settings included."""
    found = (read(path) for path in place(root, entry).glob("*.json") if path.stem.isdigit())
    return {result.seed: result for result in sorted(found, key=lambda result: result.seed)}


def current(root: Path, entry: Entry) -> tuple[dict[int, Result], list[Result]]:
    """Return an entry's results by seed, and those left out: made with other settings than its table has now."""
    if root != USUAL and not root.is_dir():
        raise UserError(f"there is no folder {root}: name that of the results, or make it with bespoke sweep")
    there = of(root, entry)
    if not any(result.done for result in there.values()):
        return there, []
    from bespoke.tables import counting, plan  # they import torch: only where there is a result to check

    if not entry.runs and not (counting.is_counted(entry) and entry.base):
        return there, []

    def fits(result: Result) -> bool:
        if not result.done:
            return True
        if ("clients" in result.content) is not entry.runs:  # the cell was of another kind
            return False
        if entry.runs:
            return plan.answers(result, plan.job_of(entry, result.seed), entry)
        return plan.same_settings(result.content["settings"], counting.experiment_of(entry)[0])

    fitting = {seed: result for seed, result in there.items() if fits(result)}
    return fitting, [result for seed, result in there.items() if seed not in fitting]


def doubts(root: Path) -> dict[str, str]:
    """Return the commits whose results may not come out again, each with the reason; none if there is no such file."""
    path = root / DOUBTS
    told = read_settings(path, "hold doubts") if path.exists() else {}
    for commit, text in told.items():
        if len(commit) < 7 or not isinstance(text, str) or not text.strip():
            raise UserError(f"{path}: {shown(commit)} must be a commit, of seven digits or more, with a sentence")
    return {commit: " ".join(text.split()) for commit, text in told.items()}


def left_out(table: str, seeds: Sequence[int]) -> str:
    """Return a sentence about results of a table that were left out, each given by its seed."""
    results, are, them = ("result was", "is", "it") if len(seeds) == 1 else ("results were", "are", "them")
    again = " ".join(map(str, sorted({*seeds})))
    made = (
        f"{len(seeds)} {results} made with other settings than the table has now, or read otherwise, and {are} left out"
    )
    return f"{made}: bespoke sweep {table} --seeds {again} makes {them} again"


def at(root: Path, entry: Entry, seed: int) -> Result | None:
    """Return an entry's result of a seed; None if it has none, or a damaged file, which a new result replaces."""
    path = place(root, entry) / f"{seed}.json"
    try:
        return read(path) if path.exists() else None
    except UserError:
        return None


def tries(root: Path, entry: Entry, today: Iterable[Result]) -> list[Result]:
    """Return results that the entry once had, with other settings than ``today``'s; a copy of one is not another."""
    found = {
        (result.seed, result.identity): result for result in map(read, sorted(place(root, entry).glob("*-*.json")))
    }
    known = {(result.seed, result.identity) for result in today if result.done}
    return [result for key, result in found.items() if key not in known]


def everything(root: Path) -> Iterator[Result]:
    """Yield every result of a run under a folder that came to its end."""
    for path in sorted(root.glob("*/*/*/*/*.json")):
        with contextlib.suppress(UserError):  # a damaged file is told by whoever needs it
            found = read(path)
            if found.done and "clients" in found.content:  # a benchmark's has none
                yield found


def write(root: Path, entry: Entry, content: dict[str, Any]) -> Path:
    """Write a result whole or not at all; a finished one with other settings is kept beside it, as a try."""
    folder = place(root, entry)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{content['seed']}.json"
    old = at(root, entry, content["seed"])
    if old is not None and old.done and not _replaces(content, old):
        os.replace(path, folder / f"{old.seed}-{old.identity}.json")
    exact = {key: value if key == "settings" else rounded(value) for key, value in content.items()}
    lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in exact.items()]
    write_atomic(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def _replaces(content: dict[str, Any], old: Result) -> bool:
    """Return whether a result is of the same run and reading as an older one, so that it may take its place."""
    return content["status"] == "done" and _identity(content) == old.identity


def rounded(value: Any) -> Any:
    """Return plain values with floats of seven digits, which is what a float32 holds; NaN and inf become None."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        if not np.isfinite(value):
            return None
        return int(value) if value == int(value) and abs(value) < _WHOLE else float(f"{value:.7g}")
    return value


# --- what a file must hold --------------------------------------------------------------------------------------------

_NUMBER, _TEXT, _NUMBER_OR_NONE = (int, float), (str,), (int, float, type(None))
_NUMBERS = [_NUMBER_OR_NONE]
_EVERY: dict[Any, Any] = {
    **{key: _TEXT for key in ("table", "cell", "status", "view")},
    **{"seed": (int,), "seconds": _NUMBER, "settings": (dict,), "evaluate": [_TEXT]},
    "source": {"modules": [_TEXT], **{key: (str, type(None)) for key in ("method", "commit")}},
}
_FAILED: dict[Any, Any] = {"error": _TEXT}
_COUNTED: dict[Any, Any] = {"value": _NUMBER_OR_NONE, "environment": (dict,)}
_RUN: dict[Any, Any] = {
    **{key: _TEXT for key in ("headline", "selection", "group", "metric")},
    "settings": {"algorithm": {"name": _TEXT}},
    "environment": {"device": _TEXT},
    "higher": {...: (bool,)},
    "totals": {...: _NUMBER_OR_NONE},
    "curve": {"round": [_NUMBER], "pooled": _NUMBERS, "mean": _NUMBERS, ...: _NUMBERS},
    "clients": {
        **{"client": [(int, str)], "group": [_TEXT], "rows": [(int,)], "condition": (list, type(None))},
        "metrics": {...: {"sum": [(*_NUMBER_OR_NONE, list)], "weight": [(*_NUMBER_OR_NONE, list)]}},
        "logged": {...: _NUMBERS},
    },
}
_VECTORS: dict[Any, Any] = {"vectors": [[_NUMBER]], "clients": [(int, str)]}
_BY_CONDITION: dict[Any, Any] = {**_VECTORS, "conditions": [_TEXT], "silhouette": _NUMBER_OR_NONE}
_PROBES: dict[Any, Any] = {
    "embeddings": _BY_CONDITION,
    "norms": {"layers": [{**_BY_CONDITION, "layer": (int,), "name": _TEXT}]},
    "features": {**_VECTORS, "classes": [_NUMBER], "kept": _NUMBER, "scatter": {...: _NUMBER_OR_NONE}},
    "gaussianity": {"round": [(int,)], ...: {...: _NUMBERS}},
    "hierarchy": {...: _NUMBER_OR_NONE},
}


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value of a JSON file is of one of several types, a list of such, or a table of such.

    In a table, ``...`` stands for every key that is not named.
    """
    if isinstance(kind, dict):
        lacking = kind.keys() - {...} - value.keys() if isinstance(value, dict) else {...}
        return not lacking and all(_fits(each, kind.get(key, kind.get(...))) for key, each in value.items())
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(each, kind[0]) for each in value)
    return kind is None or type(value) in kind


def _sound(content: Any) -> bool:
    """Return whether a file's content has all that is used of a result, each of its kind."""
    if not _fits(content, _EVERY) or content["status"] not in ("done", "failed"):
        return False
    if content["status"] == "failed":
        return _fits(content, _FAILED) and bool(content["error"].strip())
    if "clients" not in content:
        return _fits(content, _COUNTED)
    kinds = _fits(content, _RUN) and _probed(content.get("probe", {}))
    return kinds and _alike(content) and _possible(content) and _agrees(content)


def _probed(probe: Any) -> bool:
    """Return whether what was taken from a run beside its numbers can be drawn."""
    kinds = _fits(probe, {...: (dict,)}) and all(_fits(found, _PROBES.get(name)) for name, found in probe.items())
    if not kinds or probe.get("norms", {}).get("layers") == [] or probe.get("gaussianity", {}).keys() == {"round"}:
        return False
    return all(map(_drawable, _drawn(probe)))


def _drawn(probe: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what has vectors."""
    yield from (probe[name] for name in ("embeddings", "features") if name in probe)
    yield from probe.get("norms", {}).get("layers", [])


def _drawable(found: dict[str, Any]) -> bool:
    """Return whether there are vectors, all of one length, and a client, class or condition for each."""
    vectors, lengths = found["vectors"], {len(vector) for vector in found["vectors"]}
    beside = (found[key] for key in ("clients", "classes", "conditions") if key in found)
    return len(lengths) == 1 and 0 not in lengths and all(len(each) == len(vectors) for each in beside)


def _alike(content: dict[str, Any]) -> bool:
    """Return whether all columns have an entry for each client, or for each round, and each metric its direction."""
    curve, clients = content["curve"], content["clients"]
    pairs = clients["metrics"].values()
    columns = [clients[key] for key in ("client", "group", "rows")] + [*clients["logged"].values()]
    columns += [pair[part] for pair in pairs for part in ("sum", "weight")]
    if clients["condition"] is not None:
        columns.append(clients["condition"])
    return (
        len({len(column) for column in columns}) == 1
        and len({len(column) for column in curve.values()}) == 1
        and _fits(clients["condition"] or [], [_TEXT])
        and all(_uniform([*pair["sum"], *pair["weight"]]) for pair in pairs)
        and next(iter(clients["metrics"]), content["metric"]) == content["metric"]  # a run records its headline first
        and {content["metric"], *clients["metrics"]} <= content["higher"].keys()
        and all(before < after for before, after in itertools.pairwise(curve["round"]))
    )


def _possible(content: dict[str, Any]) -> bool:
    """Return whether a run can have given this: each client once and in a group, not more right than rows."""
    clients, higher = content["clients"], content["higher"]
    together = content["environment"].get("side_by_side", 1)
    right = clients["metrics"].get("accuracy", {"sum": [], "weight": []})
    counted = [pair for pair in zip(right["sum"], right["weight"], strict=True) if {*map(type, pair)} <= {*_NUMBER}]
    return (
        len(set(clients["client"])) == len(clients["client"])
        and {*clients["group"]} <= {*PEOPLE} - {"all"}
        and all(0 <= own <= weight for own, weight in counted)
        and (not counted or right["weight"] == clients["rows"])
        and higher.get("accuracy", True)
        and not higher.get("loss", False)
        and content["settings"].get("seed") == content["seed"]
        and content["seconds"] >= 0
        and type(together) in _NUMBER
        and together >= 1
    )


def _agrees(content: dict[str, Any]) -> bool:
    """Return whether its clients have the number that the curve has in their round, and the run goes as far."""
    curve, clients, number = content["curve"], content["clients"], content.get("round")
    try:
        keep = members(content["group"], clients["group"], clients["condition"])
    except UserError:
        return False
    own = [i for i, there in enumerate(keep) if there]
    if not curve["round"] or not own:
        return True  # nobody of the group is there in that round, so it has no number
    if number not in (curve["round"][-1:] if content["selection"] == "last" else curve["round"]):
        return False
    names, rows = ([clients[key][i] for i in own] for key in ("client", "rows"))
    pairs = {name: [(pair["sum"][i], pair["weight"][i]) for i in own] for name, pair in clients["metrics"].items()}
    pooled = {name: Scores.of(names, rows, each).pooled() for name, each in pairs.items()}
    found = {name: value for name, value in pooled.items() if value is not None}
    told = curve["pooled"][curve["round"].index(number)]
    if told is not None and found:
        drawn = [n for n, value in found.items() if math.isclose(told, value, rel_tol=_DIGITS, abs_tol=_DIGITS)]
        values = [value for key in ("pooled", "mean") for value in curve[key] if value is not None]
        if not drawn or (drawn == ["accuracy"] and not all(0 <= value <= 1 for value in values)):
            return False
    return content["totals"].get("rounds", number) >= curve["round"][-1]


def _at(content: dict[str, Any], path: Path) -> bool:
    """Return whether a file lies where a result of its table, cell and seed belongs."""
    table, cell, seed = content["table"], content["cell"], content["seed"]
    return "/".join(path.absolute().parts[-5:-1]) == f"{table}/{cell}" and str(seed) == path.stem.partition("-")[0]


def _uniform(values: list[Any]) -> bool:
    """Return whether values are all numbers, or all lists of equally many numbers."""
    lists = [value for value in values if isinstance(value, list)]
    return not lists or (
        len(lists) == len(values) and _fits(lists, [_NUMBERS]) and len({len(value) for value in lists}) == 1
    )


def _whole(text: str) -> int:
    number = int(text)
    if abs(number) >= 2**63:
        raise ValueError(f"{number} is too large")
    return number


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


# --- the method's source --------------------------------------------------------------------------------------------


def modules_of(module: str) -> list[str]:
    """Return a method's module and the modules of shared mathematics that it imports."""
    path = _file(module)
    if path is None or not path.is_file():
        return []
    found = [module]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "bespoke.maths":
            found += [f"bespoke.maths.{name.name}" for name in node.names]
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("bespoke.maths."):
            found.append(str(node.module))
    inner = [other for each in found[1:] for other in modules_of(each)]
    return sorted({*found, *inner})


@cache
def source_hash(modules: tuple[str, ...]) -> str | None:
    """Return a hash of the modules' lines without blank ones and comments; None if one is not part of this package."""
    digest = hashlib.sha256()
    for module in modules:
        path = _file(module)
        if path is None or not path.is_file():
            return None
        lines = (line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
        digest.update("\n".join(line for line in lines if line and not line.lstrip().startswith("#")).encode())
    return digest.hexdigest()[:12] if modules else None


def _file(module: str) -> Path | None:
    first, *rest = module.split(".")
    return Path(bespoke.__file__).parent.joinpath(*rest).with_suffix(".py") if first == "bespoke" and rest else None
