"""``bespoke evaluate RUN``: a trained run on other rows or other clients, with a record of its own."""

import json
import sys
from pathlib import Path
from typing import Annotated

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

    torch.set_num_threads(threads)
    trained = evaluating.reopened(run, backend=backend, device=device, precision=precision, states=states)
    folder = out or evaluating.folder_for(trained, set_ or [])
    if not (quiet or as_json):
        told = f"evaluating {run} after round {trained.last_round}"
        print(visible(f"{told}, with {', '.join(set_)}" if set_ else told), file=sys.stderr, flush=True)
    done = evaluating.evaluate(trained, set_ or [], folder)
    for note in done.notes:
        print(visible(f"note: {note}"), file=sys.stderr)
    if as_json:
        print(json.dumps(done.summary | {"folder": str(folder), "seed": done.experiment.seed}, indent=2))
        return
    groups = [group for group in ("all", "new") if pick(done.summary, group=group)]
    found = "; ".join(numbers_of(done.summary, group=group) for group in groups)
    print(f"{done.experiment.algorithm_name}, seed {done.experiment.seed}, {found}; records in {folder}")
