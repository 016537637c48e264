"""A small paper with tables and results of its own, for tests of what is shown of them.

The results have the settings that their table asks for; only the numbers in them are made up.
"""

from itertools import compress
from pathlib import Path
from typing import Any

from bespoke.report.groups import members
from bespoke.tables import plan, results, spec
from bespoke.tables.spec import Entry, Table

TABLE = """# A made-up table.
paper = "Maker"
source = "Table 1"
title = "Accuracy by data set"
about = "Two data sets."
published_over = "one run"

[[row]]
id = "fedavg"
label = "FedAvg"
algorithm = "fedavg_ft"
view = "global"

[[row]]
id = "ditto"
label = "Ditto"

[[row]]
id = "ours"
label = "Ours"
algorithm = "pfedfda"
set = ["algorithm.folds=3"]

[[cell]]
id = "easy"
label = "Easy"
base = "easy"
[cell.published]
fedavg = 62.5
ditto = 73.6
ours = 76.3
[cell.deviation]
ditto = 2.0

[[cell]]
id = "hard"
label = "Hard"
base = "easy"
set = ["data.alpha=0.1"]
by_seed = { "data.replay" = 42 }
[cell.published]
fedavg = 50.0
ditto = 60.0
ours = 55.0

[[cell]]
id = "other"
label = "Other"
base = "easy"
stand_in = "digits instead of letters"
[cell.published]
fedavg = 10.0
ditto = 20.0
ours = 30.0

[[cell]]
id = "lost"
label = "Lost"
missing = "its data are private"
[cell.published]
fedavg = 1.0
ditto = 2.0
ours = 3.0
"""


def make(folder: Path, text: str = TABLE, name: str = "maker/t1") -> Table:
    """Write a paper's folder with a run file and a table under `folder`/experiments, and read the table.

    `folder`/results is there, and empty at first.
    """
    paper, _, stem = name.partition("/")
    tables = folder / "experiments" / paper / "tables"
    tables.mkdir(parents=True, exist_ok=True)
    (folder / "results").mkdir(exist_ok=True)
    (tables.parent / "easy.toml").write_text("# Easy.\n[data]\nname = 'digits'\n")
    (tables / f"{stem}.toml").write_text(text)
    return spec.read(tables / f"{stem}.toml")


def settings(entry: Entry, seed: int) -> dict[str, Any]:
    """Return the settings with which the entry is run."""
    return plan.job_of(entry, seed).experiment.tables() if entry.runs else {}


def other_settings(table: Table, id: str, seed: int = 0) -> dict[str, Any]:
    """Return settings with which the entry may have been run before."""
    told = settings(table.entry(id), seed)
    return told | {"training": told["training"] | {"lr": 0.123}}


def content(entry: Entry, seed: int, values: list[float], **changes: Any) -> dict[str, Any]:
    """Return the content of a result: the accuracy of clients with 100 rows each, in percent."""
    clients = len(values)
    told: dict[str, Any] = {
        "table": entry.table,
        "cell": entry.id,
        "seed": seed,
        "base": entry.cell.base,
        "status": "done",
        "settings": settings(entry, seed),
        "evaluate": list(entry.cell.evaluate),
        "view": entry.view or "personal",
        "headline": "personal",
        "selection": entry.selection,
        "group": entry.group,
        "round": 200,
        "metric": "accuracy",
        "higher": {"accuracy": True, "loss": False},
        "clients": {
            "client": list(range(clients)),
            "group": ["train"] * clients,
            "condition": None,
            "rows": [100] * clients,
            "metrics": {
                "accuracy": {"sum": values, "weight": [100] * clients},
                "loss": {"sum": [100.0 - v for v in values], "weight": [100] * clients},
            },
            "logged": {},
        },
        "curve": {"round": [200], "pooled": [0.5], "mean": [0.5], "loss": [0.5]},
        "totals": {"rounds": 200, "bytes_up": 1000, "bytes_down": 2000, "round_seconds": 0.5, "refused": 0},
        "notes": [],
        "source": {"bespoke": "0", "commit": None, "modules": [], "method": None},
        "environment": {"device": "NVIDIA H200", "precision": "bf16"},
        "seconds": 100.0,
        "shared_with": [],
    }
    rounds = changes.get("curve", told["curve"])["round"]
    told["round"] = rounds[-1] if rounds else 200
    told["totals"]["rounds"] = told["round"]
    return agreeing(told | changes)


def agreeing(told: dict[str, Any]) -> dict[str, Any]:
    """Return the content with a curve that has, in the round that is shown, the accuracy of the clients, if any."""
    clients, curve = told["clients"], told["curve"]
    pair = clients["metrics"].get(told["metric"], {"sum": [], "weight": []})
    keep = members(told["group"], clients["group"], clients["condition"])
    pairs = [
        (own, rows) for own, rows in compress(zip(pair["sum"], pair["weight"], strict=True), keep) if own is not None
    ]
    if not pairs or told["round"] not in curve["round"]:
        return told
    pooled = [*curve["pooled"]]
    pooled[curve["round"].index(told["round"])] = sum(own for own, _ in pairs) / sum(rows for _, rows in pairs)
    return told | {"curve": curve | {"pooled": pooled}}


def source(entry: Entry) -> Entry:
    """Return the entry whose run gives a number: another one's, where it is another statistic of that."""
    if entry.cell.how != "statistic":
        return entry
    (named,) = entry.cell.of
    table, _, cell = named.rpartition(":")
    return spec.find(table or entry.table).entry(f"{cell}/{entry.row.id}")


def put(root: Path, table: Table, id: str, seed: int, *values: float, **changes: Any) -> Path:
    """Write a result of the entry "CELL/ROW"; a benchmark's holds its value alone."""
    entry = table.entry(id)
    told = content(entry, seed, list(values), **changes)
    if entry.cell.kind == "benchmark":
        del told["clients"]
    return results.write(root, entry, told)


def fail(root: Path, table: Table, id: str, seed: int, sentence: str, **changes: Any) -> Path:
    """Write the result of a run that failed."""
    told = content(table.entry(id), seed, [], **changes)
    kept = {key: told[key] for key in ("table", "cell", "seed", "base", "settings", "evaluate", "view", "source")}
    return results.write(root, table.entry(id), kept | {"status": "failed", "error": sentence, "seconds": 0.0})
