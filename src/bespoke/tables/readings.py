"""How many ways to read a method were tried: `results/readings/METHOD.json`, which `benchmarks/readings.py` writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bespoke.errors import UserError


@dataclass(frozen=True)
class Readings:
    """What was tried for one method on one column."""

    path: Path
    method: str
    column: str  # "pfedfda/cifar10_dir0.5", the run file
    chosen: str  # the first of those within 0.3 points of the closest to the published number
    readings: int  # that the paper's words allow
    others: int  # run beside them, to see what decides


def read(root: Path) -> list[Readings]:
    """Return what was tried, method by method, from a folder of results."""
    return [_read(path) for path in sorted((root / "readings").glob("*.json"))]


def _read(path: Path) -> Readings:
    try:
        if not path.is_file():
            raise ValueError("no file")
        told = json.loads(path.read_text(encoding="utf-8"))
        column, own = str(told["chosen_by"]), [t for t in told["tries"] if t["column"] == told["chosen_by"]]
        others = sum(bool(t["ablation"]) for t in own)
        return Readings(path, str(told["method"]), column, str(told["chosen"] or ""), len(own) - others, others)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: holds no readings of a method: restore it, or make it again") from None
