"""What there is, by name and in a sentence each. Heavy modules are imported when a list is asked for."""

from collections.abc import Callable


def _first_sentence(doc: str | None) -> str:
    return (doc or "").strip().splitlines()[0] if doc else ""


def _algorithms() -> list[tuple[str, str]]:
    from bespoke.algorithms import ALGORITHMS, load_plugins, method_class

    load_plugins()
    return [(name, _first_sentence(method_class(name).__doc__)) for name in ALGORITHMS]


def _models() -> list[tuple[str, str]]:
    from bespoke.models import MODELS

    return [(name, spec.doc) for name, spec in MODELS.items()]


def _datasets() -> list[tuple[str, str]]:
    from bespoke.data import DATASETS

    return [(name, _first_sentence(loader.__doc__)) for name, loader in DATASETS.items()]


def _partitions() -> list[tuple[str, str]]:
    from bespoke.data import PARTITIONS

    return [(name, spec.doc) for name, spec in PARTITIONS.items()]


def _experiments() -> list[tuple[str, str]]:
    from bespoke.runs.experiment import shipped

    rows = []
    for name, path in shipped().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        rows.append((name, first.removeprefix("#").strip()))
    return rows


LISTS: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "algorithms": _algorithms,
    "models": _models,
    "datasets": _datasets,
    "partitions": _partitions,
    "experiments": _experiments,
}
