"""What a server sees of a client in a round: every array of its upload, and how many numbers it has."""

from pathlib import Path
from typing import NamedTuple

from bespoke.algorithms import ALGORITHMS
from bespoke.network.messages import overhead
from bespoke.network.terms import dry_run
from bespoke.runs.agreement import agreement
from bespoke.runs.experiment import Experiment, load


class Upload(NamedTuple):
    """What a client sends in a round."""

    parts: dict[str, int]  # numbers by name
    logged: list[str]  # names of the values beside it
    size: int  # bytes of its numbers
    overhead: int  # bytes of its arrays' headers and names
    compact: int  # bytes that the record counts: without absent classes and packed, of a client with four rows


def seen(experiment: Experiment) -> Upload:
    """Return what the server sees of a client in a round."""
    agreed = agreement(experiment)
    answers = dry_run(agreed.terms, agreed.rows)
    parts: dict[str, int] = {}
    for name, leaf in answers.up.items():
        part = name.partition("/")[0]
        parts[part] = parts.get(part, 0) + leaf.nbytes // leaf.dtype.itemsize
    size = sum(leaf.nbytes for leaf in answers.up.values())
    compact = int(answers.logged.get("bytes_up", size))
    return Upload(parts, sorted(answers.logged), size, overhead(answers.up), compact)


def table(experiment: Path) -> str:
    """Return what the server sees of each method, as Markdown, for the data and the model of an experiment."""
    heads = "method", "arrays of an upload, with their numbers", "numbers", "bytes", "compact", "logged beside it"
    rows = [f"| {' | '.join(heads)} |", "|---|---|--:|--:|--:|---|"]
    for name in ALGORITHMS:
        loaded, _ = load(str(experiment), name, ["model.norm=layer"])
        up = seen(loaded)
        told = ", ".join(f"`{part}` {number:,}" for part, number in up.parts.items()) or "nothing"
        numbers, size = sum(up.parts.values()), up.size + up.overhead
        rows.append(f"| {name} | {told} | {numbers:,} | {size:,} | {up.compact:,} | {', '.join(up.logged)} |")
    return "\n".join(rows) + "\n"
