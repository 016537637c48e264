"""What the benchmarks share: a table on the screen, and a JSON file with the machine named in it."""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


def needs_cuda() -> None:
    """End the script with one sentence where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none here")


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as aligned columns, headed by their keys; lists and mappings among the values are left to the file."""
    rows = list(rows)
    heads = list(dict.fromkeys(k for row in rows for k, v in row.items() if not isinstance(v, (list, dict))))
    lines = [heads, *([_cell(row.get(head, "")) for head in heads] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first, *others = widths
    return "\n".join(
        "  ".join([line[0].ljust(first), *(cell.rjust(w) for cell, w in zip(line[1:], others, strict=True))]).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def store(out: str | Path, device: str, **figures: Any) -> None:
    """Write the figures to ``out`` as JSON, floats to five digits, with what they were measured on (cpu or cuda)."""
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()}-core CPU"
    about = {"machine": machine, "torch": torch.__version__, "python": platform.python_version()}
    Path(out).write_text(json.dumps(_rounded(about | figures), indent=2) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
