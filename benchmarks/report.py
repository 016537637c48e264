"""What the benchmarks share: their arguments, a table on the screen, a JSON file that names the machine."""

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from bespoke.files import write_atomic
from bespoke.report.table import aligned


def parser(doc: str | None, script: str) -> argparse.ArgumentParser:
    """Return a parser for a script's arguments, with ``--out``, its JSON file, by default beside it."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--out", default=str(Path(script).with_suffix(".json")), help="the JSON file to write")
    return made


def needs_cuda() -> None:
    """End the script with one sentence where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none here")


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Print rows as aligned columns under their keys; lists and mappings among the values are only in the file."""
    rows = list(rows)
    heads = list(dict.fromkeys(k for row in rows for k, v in row.items() if not isinstance(v, (list, dict))))
    return aligned([heads, *([_cell(row.get(head, "")) for head in heads] for row in rows)], range(1, len(heads)))


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def store(out: str, device: str, **figures: Any) -> None:
    """Write the figures to ``out`` as JSON, floats to five digits, with the machine they were measured on."""
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()}-core CPU"
    about = {"machine": machine, "torch": torch.__version__, "python": platform.python_version()}
    write_atomic(out, json.dumps(_rounded(about | figures), indent=2) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
