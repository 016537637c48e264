"""What a server sees of a client in a round: every array of its upload, and how many numbers it has."""

from pathlib import Path

from bespoke.algorithms import ALGORITHMS
from bespoke.network.messages import overhead
from bespoke.network.terms import dry_run
from bespoke.runs.agreement import agreement
from bespoke.runs.experiment import Experiment, load


def seen(experiment: Experiment) -> tuple[dict[str, int], list[str], int, int]:
    """Return the numbers of each part of an upload, what is logged beside it, its bytes, and those of its headers."""
    agreed = agreement(experiment)
    answers = dry_run(agreed.terms, agreed.rows)
    parts: dict[str, int] = {}
    for name, leaf in answers.up.items():
        part = name.partition("/")[0]
        parts[part] = parts.get(part, 0) + leaf.nbytes // leaf.dtype.itemsize
    return parts, sorted(answers.logged), sum(leaf.nbytes for leaf in answers.up.values()), overhead(answers.up)


def table(experiment: Path) -> str:
    """Return what the server sees of each method, as Markdown, for the data and the model of an experiment."""
    rows = ["| method | arrays of an upload, with their numbers | numbers | logged beside it |", "|---|---|--:|---|"]
    for name in ALGORITHMS:
        loaded, _ = load(str(experiment), name, ["model.norm=layer"])
        parts, logged, _, _ = seen(loaded)
        told = ", ".join(f"`{part}` {number:,}" for part, number in parts.items()) or "nothing"
        rows.append(f"| {name} | {told} | {sum(parts.values()):,} | {', '.join(logged)} |")
    return "\n".join(rows) + "\n"
