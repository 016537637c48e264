"""The lists of ``bespoke list``: names with one line each, and settings. Heavy modules are imported on demand."""

import typing
from collections.abc import Callable
from typing import Any


def _algorithms() -> dict[str, str]:
    from bespoke.algorithms import ALGORITHMS
    from bespoke.registry import first_line

    return ALGORITHMS.docs(lambda factory: first_line(type(factory()).__doc__))


def _models() -> dict[str, str]:
    from bespoke.models import MODELS

    return MODELS.docs(lambda spec: spec.doc)


def _datasets() -> dict[str, str]:
    from bespoke.data import DATASETS

    return DATASETS.docs(lambda function: function.doc)


def _partitions() -> dict[str, str]:
    from bespoke.data import PARTITIONS

    return PARTITIONS.docs(lambda function: function.doc)


def _transforms() -> dict[str, str]:
    from bespoke.data.transforms import TRANSFORMS
    from bespoke.registry import first_line

    return TRANSFORMS.docs(lambda thing: first_line(thing.__doc__))


def _objectives() -> dict[str, str]:
    from bespoke.core.objective import OBJECTIVES

    return OBJECTIVES.docs(lambda objective: f"metrics: {', '.join(objective.metrics)}")


def _experiments() -> dict[str, str]:
    from bespoke.runs.experiment import shipped

    firsts = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in shipped().items()}
    return {name: first.removeprefix("#").strip() for name, first in firsts.items()}


def _tables() -> dict[str, str]:
    from bespoke.tables import spec

    return {name: spec.read(path).doc for name, path in spec.listed().items()}


LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "algorithms": _algorithms,
    "models": _models,
    "datasets": _datasets,
    "partitions": _partitions,
    "transforms": _transforms,
    "objectives": _objectives,
    "experiments": _experiments,
    "tables": _tables,
}


def settings(table: str | None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return type, default and meaning of each setting by key, of one table or method, or by default of all tables."""
    from bespoke.runs import experiment

    found = {name: experiment.defaults_of(name) for name in ([table] if table else experiment.table_names())}
    return {name: _described(values) for name, values in found.items()}


def _described(values: Any) -> dict[str, dict[str, Any]]:
    from bespoke.runs.experiment import describe

    hints = typing.get_type_hints(type(values))
    return {
        key: {"type": _type(hints[key]), "default": getattr(values, key), "meaning": meaning}
        for key, _, meaning in describe(type(values))
    }


def _type(hint: Any) -> str:
    """Return a setting's type in a word; a tuple is written as a list."""
    inner = typing.get_args(hint)
    return f"list of {_type(inner[0])}" if inner else hint.__name__


def settings_text(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return settings as tables of text: key, type, default as in TOML, meaning."""
    from bespoke.report.table import aligned
    from bespoke.runs.experiment import literal, table_names

    tables = []
    for name, rows in found.items():
        lines = [[key, row["type"], literal(row["default"]), row["meaning"]] for key, row in rows.items()]
        title = f"[{name}]" if name in table_names() else f"[algorithm] name = {literal(name)}"
        tables.append(f"{title}\n{aligned(lines, ()) if lines else 'no settings of its own'}")
    return "\n\n".join(tables)
