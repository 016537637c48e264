"""Why some of our numbers are far from the papers': ``reasons.toml`` beside the results, each with its evidence."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from bespoke.errors import UserError, shown
from bespoke.files import read_settings
from bespoke.registry import closest

NAME = "reasons.toml"
TRIED, ARGUED = "tried", "argued"  # how it was looked into where the cause stays open: by runs of it, or from elsewhere


@dataclass(frozen=True)
class Reason:
    """The reason for one number, or for a column's other best method, and the files or tests that support it."""

    reason: str
    evidence: tuple[str, ...]  # "results/readings/pfedme.json", "tests/algorithms/test_pfedme.py::test_steps"
    open: str = ""  # where the cause stays open, how it was looked into: TRIED or ARGUED


def read(root: Path) -> dict[str, Reason]:
    """Return the reasons kept in a folder of results; none if there is no such file.

    They are by number, "TABLE/CELL/ROW", or by column, "TABLE/CELL", whose best method is another than the paper's.
    """
    path = root / NAME
    if not path.exists():
        return {}
    found: dict[str, Reason] = {}
    for first, values in read_settings(path, "hold reasons").items():
        where = f"{path}: [{shown(first)}]"
        reason = _reason(values, where)
        also = values.get("also", [])
        for id in (first, *also) if isinstance(also, list) else (first, also):
            if not isinstance(id, str) or id in found:
                raise UserError(f"{where}: {shown(id)} is no name of a number or column, or has a reason already")
            found[id] = reason
    return found


def _reason(values: object, where: str) -> Reason:
    if not isinstance(values, dict) or values.keys() - {"also", "open"} != {"reason", "evidence"}:
        raise UserError(f"{where} must have a reason and its evidence; others that it serves may stand in also")
    if values.get("open", "") not in ("", TRIED, ARGUED):
        raise UserError(f"{where}: open must be {TRIED!r} or {ARGUED!r}, not {shown(values['open'])}")
    evidence = values["evidence"] if isinstance(values["evidence"], list) else [values["evidence"]]
    for text in (values["reason"], *evidence):
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{where}: {shown(text)} is no text: write the reason and its evidence as strings")
    if not evidence:
        raise UserError(f"{where}: names no evidence: add a file of results/ or a test")
    return Reason(" ".join(values["reason"].split()), tuple(evidence), values.get("open", ""))


def check(reasons: Mapping[str, Reason], known: Collection[str], root: Path) -> None:
    """Refuse reasons for numbers and columns that no table has, and evidence that is not there.

    ``root`` holds the results. Evidence lies beside the folder of results or in it: a file, or as "FILE::NAME" a test
    or one of the names in a JSON file.
    """
    for id, reason in reasons.items():
        where = f"{root / NAME}: [{shown(id)}]"
        if id not in known:
            raise UserError(
                f"{where}: no table has this number or column{closest(id, known)}; rename or move the reason"
            )
        for text in reason.evidence:
            name, _, part = text.partition("::")
            path = root.resolve().parent / name
            if not path.is_file() or not path.resolve().is_relative_to(root.resolve().parent):
                raise UserError(f"{where}: its evidence {shown(text)} is no file here")
            if part and not _has(path, part):
                raise UserError(f"{where}: its evidence {shown(text)} is no test, and no name, of that file")


def _has(path: Path, part: str) -> bool:
    """Return whether a JSON file has a name, or another a function."""
    pattern = rf'^ *"{re.escape(part)}": ' if path.suffix == ".json" else rf"^ *def {re.escape(part)}\("
    return re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE) is not None
