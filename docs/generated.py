"""Write the tables of the documents that the code knows: settings, keys, records' columns.

A page holds such a table between `<!-- generated: NAME -->` and `<!-- end: NAME -->`. `python docs/generated.py`
writes all of them anew, `make docs` does so before it builds the site, and a test compares them with the code.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bespoke.algorithms import ALGORITHMS
from bespoke.cli.listing import settings
from bespoke.data import DATASETS, PARTITIONS, DataSettings
from bespoke.files import write_atomic
from bespoke.models import MODELS
from bespoke.records import COLUMNS
from bespoke.report.table import for_markdown
from bespoke.runs.experiment import literal, table_names

DOCS = Path(__file__).parent
REGION = re.compile(r"(?P<begin><!-- generated: (?P<name>\w+) -->\n).*?(?P<end><!-- end: (?P=name) -->)", re.DOTALL)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _code(*words: str) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _settings_of(name: str) -> str:
    rows = [
        [_code(key), row["type"], _code(literal(row["default"])), for_markdown(row["meaning"])]
        for key, row in settings(name)[name].items()
    ]
    return _table(["key", "type", "default", "meaning"], rows) if rows else "No settings of its own."


def _tables() -> str:
    return "\n\n".join(f"### `[{name}]`\n\n{_settings_of(name)}" for name in table_names())


def _methods() -> str:
    return "\n\n".join(f"### `{name}`\n\n{_settings_of(name)}" for name in ALGORITHMS)


def _keys() -> str:
    """Which keys of ``[data]`` each data set and each partition takes."""
    belongs = {key: field.metadata.get("of") for key, field in DataSettings.__dataclass_fields__.items()}
    rows = [
        [_code(f"{key} = {literal(name)}"), _code(*(own for own in function.asks if belongs.get(own) == key))]
        for key, known in (("name", DATASETS), ("partition", PARTITIONS))
        for name, function in known.items()
    ]
    return _table(["with", "keys of its own"], rows)


def _models() -> str:
    rows = [
        [_code(name), _code(*spec.norms), _code(*(f"{key} = {literal(value)}" for key, value in spec.takes.items()))]
        for name, spec in MODELS.items()
    ]
    return _table(["model", "`norm`", "other settings, with the model's own defaults"], rows)


def _columns() -> str:
    rows = [
        [_code(file), _code(column), for_markdown(meaning)]
        for file, columns in COLUMNS.items()
        for column, meaning in columns.items()
    ]
    return _table(["file", "column", "content"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "tables": _tables,
    "methods": _methods,
    "keys": _keys,
    "models": _models,
    "columns": _columns,
}


def pages() -> dict[Path, str]:
    """Return the text that every page with generated tables should have."""
    found = {}
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        fresh = REGION.sub(lambda part: f"{part['begin']}\n{TABLES[part['name']]()}\n\n{part['end']}", text)
        if REGION.search(text):
            found[path] = fresh
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") != text:
            write_atomic(path, text)
            print(f"wrote {path.name}")
