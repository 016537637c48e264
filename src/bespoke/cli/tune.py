"""``bespoke tune``: search for settings on validation rows."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bespoke.errors import visible


def tune(
    experiment: Annotated[str, typer.Argument(help="An experiment file, or the name of a shipped one.")],
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE.KEY=VALUES", help="What to search: LOW:HIGH, LOW:HIGH:log or A,B,C; may be repeated."
        ),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tune this method instead of the file's.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE...", help="Change settings, one or several.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="Number of trials, earlier ones included.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the runs and of the search.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder of the log and of best.toml.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Search for a method's settings on the clients' validation rows; test rows are never used."""
    import torch

    from bespoke.tuning import BEST, LOG, parse_range
    from bespoke.tuning import tune as searched

    torch.set_num_threads(1)
    ranges = [parse_range(text) for text in search or []]
    folder = out or Path("runs") / f"tune-{Path(experiment).name.removesuffix('.toml')}-{algorithm or 'method'}"

    def told(line: dict[str, Any]) -> None:
        value = line.get("error") or f"{line['value']:.6g}"
        print(visible(f"trial {line['trial'] + 1} of {trials}: {line['values']}: {value}"), file=sys.stderr, flush=True)

    best = searched(
        experiment,
        ranges,
        folder,
        algorithm=algorithm,
        overrides=set_ or [],
        trials=trials,
        seed=seed,
        device=device,
        told=told,
    )
    if as_json:
        print(json.dumps(best))
        return
    chosen = " ".join(f"--set {key}={value}" for key, value in best["values"].items())
    print(
        f"best on validation rows: {best['value']:.6g} with {chosen}; log in {folder / LOG}, preset in {folder / BEST}"
    )
