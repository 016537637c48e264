"""The papers' tables on the command line: sweep runs what a table lacks, table shows it. Imports are inside."""

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from bespoke.cli.stopping import stopping
from bespoke.errors import UserError, visible

Results = Annotated[Path, typer.Option(help="Folder of the results.")]


def sweep(
    table: Annotated[list[str], typer.Argument(help="Tables or figures: names that bespoke list tables shows.")],
    methods: Annotated[list[str] | None, typer.Option(metavar="NAME...", help="Only these rows.")] = None,
    cells: Annotated[list[str] | None, typer.Option(metavar="ID...", help="Only these columns.")] = None,
    seeds: Annotated[
        list[int] | None, typer.Option(metavar="N...", help="Seeds to run; default: the table's, 0 for a paper's.")
    ] = None,
    jobs: Annotated[
        str, typer.Option(metavar="N", help="Trainings side by side; auto: as many as the machine carries best.")
    ] = "auto",
    budget: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Save and stop before this time is over.")
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Try all of it: random rows, few clients, two rounds; nothing is kept.")
    ] = False,
    results: Results = Path("results"),
    work: Annotated[Path, typer.Option(help="Folder of the runs until their results are written.")] = Path(
        "runs/sweeps"
    ),
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    precision: Annotated[str, typer.Option(help="As for run.")] = "auto",
    backend: Annotated[str, typer.Option(help="As for run.")] = "auto",
    dry: Annotated[bool, typer.Option("--dry", help="Only say what would be run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run the cells of a table that have no result yet; finished ones are skipped, half-done ones resumed."""
    begin = time.monotonic()
    if budget is not None and not math.isfinite(budget):
        raise UserError(f"--budget takes seconds, not {budget}")
    if jobs != "auto" and not (jobs.isdecimal() and 1 <= int(jobs) <= 256):
        raise UserError(f"--jobs takes auto or a number from 1 to 256, not {jobs!r}")
    import torch

    from bespoke.runs.api import pick_backend, pick_device, pick_precision
    from bespoke.tables import counting, plan, spec
    from bespoke.tables.sweep import place_at
    from bespoke.tables.sweep import sweep as carry_out
    from bespoke.tables.tiny import tiny as as_tiny

    where = pick_device(device)  # a mistake is told before anything is planned
    pick_backend(backend, where)
    pick_precision(precision, where, torch.get_default_dtype())
    read = [spec.find(name) for name in dict.fromkeys(table)]
    entries = plan.chosen(read, methods or (), cells or ())
    counted = 0 if methods or tiny or dry else counting.count(read, results, cells or ())
    if counted and not entries:
        print(json.dumps({"counted": counted}) if as_json else f"{counted} numbers counted; nothing of this is trained")
        return
    if not entries:
        names = ", ".join(each.name for each in read)
        others = " ".join(dict.fromkeys(name for each in read for name in each.derived_from))
        how = f"bespoke sweep {others} makes its runs" if others else "bespoke table or bespoke figure shows it"
        raise UserError(f"{names}: nothing of this is trained; {how}")
    wanted = plan.jobs(entries, dict.fromkeys(seeds or ()))
    with ExitStack() as held:
        if tiny:
            scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="bespoke-tiny-")))
            results, work = scratch / "results", scratch / "work"
            wanted = plan.merged(as_tiny(job) for job in wanted)
        if dry:
            _print_plan(plan.needed(wanted, results, where))
            return
        place = place_at(results, work, device, precision, backend)
        stopped = held.enter_context(stopping())
        show = held.enter_context(_shown(quiet or as_json))
        left = None if budget is None else budget - (time.monotonic() - begin)
        processes = None if jobs == "auto" else int(jobs)
        state = carry_out(wanted, place, processes=processes, budget=left, stopped=stopped, show=show)
    seconds = time.monotonic() - begin
    _print_end(state, seconds, as_json, tiny)
    if state.interrupted:
        raise typer.Exit(stopped.code)
    if state.failed:
        raise typer.Exit(1)


def table(
    name: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="A name that bespoke list tables shows; default: all.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    results: Results = Path("results"),
    write: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a page for each paper into this folder.")
    ] = None,
) -> None:
    """Show a paper's table with ours beside it; without a name, how far all tables are."""
    from bespoke.tables import sections, site, spec

    if markdown and as_json:
        raise UserError("give --markdown or --json, not both")
    if name is None:
        if markdown:
            raise UserError("--markdown shows one table: name it, or write pages of all with --write FOLDER")
        everything = site.gather(results)
        if write is None:
            everything.check()
        else:
            for path in everything.write(write):
                print(visible(f"written: {path}"), file=sys.stderr)
        print(json.dumps(everything.as_dict(), indent=2) if as_json else everything.text().rstrip("\n"))
        return
    if write is not None:
        raise UserError("--write writes pages of all tables: name none")
    page = sections.beside(spec.find(name), results)
    if as_json:
        print(json.dumps(page.as_dict(), indent=2))
    elif markdown:
        print(page.markdown(), end="")
    elif sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.print(page.table(console.width))
    else:
        print(page.text(), end="")


def _print_plan(needed: Any) -> None:
    """Print what is left, and how long it may take."""
    for job in needed.left:
        guess = needed.clock.guess(job)
        about = "never measured here" if guess is None else f"about {_duration(guess)}"
        names = ", ".join(entry.id for entry in job.entries)
        print(visible(f"{job.experiment.algorithm_name}, seed {job.experiment.seed}: {names}: {about}"))
    taken = f"; {len(needed.found)} cells would be taken from other tables" if needed.found else ""
    print(f"{len(needed.left)} trainings for {sum(len(job.entries) for job in needed.left)} cells{taken}")


def _print_end(state: Any, seconds: float, as_json: bool, tiny: bool) -> None:
    """Print how a sweep ended."""
    elsewhere = sum(len(job.entries) for job in state.elsewhere)
    if as_json:
        failed = [{"cells": [entry.id for entry in job.entries], "error": why} for job, why in state.failed]
        told = {"cells": state.total, "done": state.done, "before": state.before, "adopted": state.adopted}
        told |= {"failed": failed, "elsewhere": elsewhere, "left": state.left, "cut": state.cut}
        told |= {"crowded": state.crowded, "seconds": seconds}
        print(json.dumps(told))
        return
    for job, why in state.failed:
        print(visible(f"failed: {', '.join(entry.id for entry in job.entries)}: {why}"), file=sys.stderr)
    parts = [f"{state.done} of {state.total} cells have a result"]
    parts += [f"{state.before} had one before"] if state.before else []
    parts += [f"{state.adopted} were taken from other tables"] if state.adopted else []
    parts += (
        [f"{elsewhere} are run by another sweep, or wait for its end: run the same command again then"]
        if elsewhere
        else []
    )
    if state.left:
        why = "interrupted" if state.interrupted else "out of time"
        parts.append(f"{state.left} left ({why}: {'nothing is kept' if tiny else 'run the same command again'})")
    if state.crowded:
        parts.append(f"memory ran out for {state.crowded} of them beside others, and they went on alone")
    if state.cut and not tiny:
        parts.append(f"{state.cut} trainings were ended within a round and go on from their last checkpoint, if any")
    print("; ".join([*parts, f"{seconds:.0f} s"]))


@contextmanager
def _shown(quiet: bool) -> Iterator[Callable[[Any], None]]:
    """Yield a function that shows a sweep's state: one line that changes, or a line now and then in a log.

    What runs side by side is said once, before.
    """
    last, told = [0.0, -1.0], set[str]()

    def first(state: Any, write: Callable[[str], Any]) -> None:
        if state.how and state.how not in told:
            told.add(state.how)
            write(state.how)

    def text(state: Any) -> str:
        running = ", ".join(f"{job.title} {share:.0%}" for job, share in state.running.values())
        left = "" if state.seconds_left is None else f"; about {_duration(state.seconds_left)} left"
        failed = f", {len(state.failed)} failed" if state.failed else ""
        return visible(f"{state.done} of {state.total} cells{failed}; {running or 'nothing running'}{left}")

    def line(state: Any) -> None:
        first(state, lambda words: print(words, file=sys.stderr, flush=True))
        now, done = time.monotonic(), float(len(state.finished) + len(state.failed))
        if now - last[0] >= 10.0 or done != last[1]:
            last[:] = [now, done]
            print(text(state), file=sys.stderr, flush=True)

    if quiet:
        yield lambda state: None
    elif not sys.stderr.isatty():
        yield line
    else:
        from rich.console import Console

        console = Console(stderr=True)
        with console.status("starting") as status:

            def update(state: Any) -> None:
                first(state, console.print)
                status.update(text(state))

            yield update


def _duration(seconds: float) -> str:
    """Return seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def figure(
    name: Annotated[str, typer.Argument(help="A figure: a name that bespoke list tables shows.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The .png, .pdf or .svg file, or a folder for PNG and PDF; default: here."),
    ] = None,
    results: Results = Path("results"),
) -> None:
    """Draw a figure of a paper from the results; what is missing is said."""
    from bespoke.tables.figures import draw

    paths, missing = draw(name, results, out)
    for sentence in missing:
        print(visible(f"missing: {sentence}"), file=sys.stderr)
    for path in paths:
        print(path)
