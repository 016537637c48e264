"""``bespoke evaluate RUN``: a trained run on other rows or other clients, with a record of its own."""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from bespoke.errors import visible


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a trained run.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="TABLE.KEY=VALUE", help="Change a setting of the evaluation, as data.corrupt=fog:3."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the record; default: RUN/evaluations/HASH, by the settings.")
    ] = None,
    backend: Annotated[str, typer.Option(help="batched, loop or auto, as for run.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    precision: Annotated[str, typer.Option(help="fp32, tf32, bf16 or auto, as for run.")] = "auto",
    states: Annotated[str, typer.Option(help="Where clients' states are kept: device, host or disk.")] = "device",
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads, as for run.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Evaluate a trained run again, with some settings changed: other rows, other clients, other fine-tuning."""
    import torch

    from bespoke.report.summary import numbers_of, pick
    from bespoke.runs import evaluating
    from bespoke.runs.progress import adaptation

    torch.set_num_threads(threads)
    trained = evaluating.reopened(run, backend=backend, device=device, precision=precision, states=states)
    folder = out or evaluating.folder_for(trained, set_ or [])
    if not (quiet or as_json):
        told = f"evaluating {run} after round {trained.last_round}"
        print(visible(f"{told}, with {', '.join(set_)}" if set_ else told), file=sys.stderr, flush=True)
    with nullcontext() if quiet or as_json else adaptation():
        done = evaluating.evaluate(trained, set_ or [], folder)
    for note in done.notes:
        print(visible(f"note: {note}"), file=sys.stderr)
    if as_json:
        print(json.dumps(done.summary | {"folder": str(folder), "seed": done.experiment.seed}, indent=2))
        return
    groups = [group for group in ("all", "new") if pick(done.summary, group=group)]
    found = "; ".join(numbers_of(done.summary, group=group) for group in groups)
    print(f"{done.experiment.algorithm_name}, seed {done.experiment.seed}, {found}; records in {folder}")
    for line in _by_condition(done.summary, groups):
        print(visible(line))


def _by_condition(summary: dict[str, Any], groups: Sequence[str]) -> list[str]:
    """Return the headline number of each kind of clients, such as clean and fog, if there are several."""
    from bespoke.report.units import Unit

    kinds = summary["views"][summary["headline"]]["last"].get("conditions", {}) if groups else {}
    found = [(kind, group, kinds[kind][group]) for group in groups for kind in kinds if group in kinds[kind]]
    unit = Unit.of(summary["metric"], [numbers["pooled"] for _, _, numbers in found], places=2)
    lines = []
    for kind, group, numbers in found:
        pooled, mean = (f"{unit.text(numbers[key])}{unit.sign}" for key in ("pooled", "mean"))
        who = f"{'new client' if group == 'new' else 'client'}{'' if numbers['clients'] == 1 else 's'}"
        of = f"{kind or 'no condition'}, {numbers['clients']} {who}"
        lines.append(f"{of}: {summary['metric']} {pooled} pooled, {mean} mean over clients")
    return lines if len(kinds) > 1 else []
