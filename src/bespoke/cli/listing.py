"""The lists of ``bespoke list``: names with one line each. Heavy modules are imported on demand."""

from collections.abc import Callable


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
    "objectives": _objectives,
    "experiments": _experiments,
    "tables": _tables,
}
