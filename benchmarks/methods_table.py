"""Fill the columns "cost" and "lines" of the README's table of methods from ``methods.json``.

Run ``python benchmarks/methods_table.py`` after ``python benchmarks/methods.py``. A test checks the table against the
measurements. A method that was not measured has empty cells.
"""

import json
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
MEASURED = Path(__file__).with_name("methods.json")
HEADER = "| name | paper | venue |"


def cost(row: dict[str, Any], plain: float) -> str:
    """Return a training round in FedAvg rounds, and an evaluation's time beyond ``plain`` seconds if it is large."""
    if "error" in row:
        return ""
    fedavg = row["seconds"] / row["ratio"]
    more = (row["evaluate_seconds"] - plain) / fedavg
    return f"{row['ratio']:.1f}" + (f" + {more:.1f}" if more > 0.2 else "")


def filled(text: str, measured: list[dict[str, Any]]) -> str:
    """Return the README with the two columns as measured."""
    plain = next((row["evaluate_seconds"] for row in measured if row["name"] == "fedavg" and "error" not in row), 0.0)
    costs = {row["name"]: cost(row, plain) for row in measured}
    sizes = {row["name"]: str(row.get("code_lines", "")) for row in measured}
    lines, inside = text.splitlines(), False
    for number, line in enumerate(lines):
        inside = line.startswith(HEADER) or (inside and line.startswith("|"))
        if inside and line.startswith("| `"):
            cells = [cell.strip() for cell in line.split("|")[1:-3]]
            names = [name.strip("` ") for name in cells[0].split(",")]
            found = "; ".join(dict.fromkeys(costs[name] for name in names if costs.get(name)))
            lines[number] = "| " + " | ".join([*cells, found, sizes.get(names[0], "")]) + " |"
    return "\n".join(lines) + "\n"


def main() -> int:
    """Rewrite the README's table."""
    measured = json.loads(MEASURED.read_text())["methods"] if MEASURED.exists() else []
    README.write_text(filled(README.read_text(encoding="utf-8"), measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
