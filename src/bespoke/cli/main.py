"""The command line: demo, run, compare, curves, report, list. Heavy modules are imported inside the commands."""

import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click
import typer

from bespoke._version import __version__
from bespoke.cli import data, doctor, evaluate, federation, listing, new, personal, tables, tune
from bespoke.cli.live import FOLLOWING, Live, Watch, show_beside, watch, with_ports
from bespoke.cli.stopping import stopping
from bespoke.errors import UserError, is_out_of_device_memory, reason, visible
from bespoke.machine import MOST_PROCESSES

app = typer.Typer(
    help="Personalised federated learning: a model for every client.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data.app, name="data")
app.add_typer(new.app, name="new")
app.add_typer(federation.app, name="federation")
for command in (
    doctor.doctor,
    evaluate.evaluate,
    personal.personalize,
    personal.predict,
    tune.tune,
    tables.sweep,
    tables.table,
    tables.figure,
    federation.keys,
    federation.serve,
    federation.join,
):
    app.command()(command)

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def main() -> None:
    """Run the command line; report a user's mistake in one sentence with exit code 2.

    With several processes, only the first prints, and the first failing process reports the error.
    """
    try:
        with _one_voice():
            code = app(with_ports(_spread(sys.argv[1:])), standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "bespoke"
        text = error.format_message().rstrip(".")
        if isinstance(error, click.NoSuchOption) and error.option_name in FOLLOWING:
            text = f"{command} has no option {error.option_name}: run and serve have --live, and report has --watch"
        elif isinstance(error, click.NoSuchOption) and command.endswith(" run"):
            text = _as_setting(error.option_name) or f"{text}; change the experiment's settings with --set"
        _refuse(f"{text} (see {command} --help)")
    except click.Abort:
        sys.exit(130)
    except UserError as error:
        _refuse(str(error))
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the pipe is gone: nobody would see a message
        sys.exit(141)
    except OSError as error:  # no room for temporary files, a folder that may not be read
        _refuse(f"{error.filename or 'the system'}: {error.strerror or error}")
    except Exception as error:
        if _is_out_of_memory(error):
            _refuse(f"the memory is too small: {reason(error)}; choose smaller settings, or --states disk")
        if not _several():
            raise
        _fail(traceback.format_exc().rstrip(), 1)


def _as_setting(option: str) -> str:
    """Return how to write an option that ``run`` lacks as a setting, or "" if there is no such setting."""
    from bespoke.runs.experiment import tables_with

    key = option.removeprefix("--").replace("-", "_")
    owners = tables_with(key)
    if not owners:
        return ""
    # The words that follow; an equals sign may join the first one to the option.
    after = " ".join(sys.argv).partition(f" {option}")[2].removeprefix("=").split()
    value = after[0] if after and not after[0].startswith("--") else "VALUE"
    return f"there is no option {option}: write --set {owners[0]}.{key}={value}"


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out, of the host or of a device."""
    of_host = isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
    return of_host or is_out_of_device_memory(error)


def _several() -> bool:
    """Return whether torchrun started more processes than this one."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def _one_voice() -> Iterator[None]:
    """Silence every process but the first."""
    if not _several() or os.environ.get("RANK") == "0":
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _refuse(sentence: str) -> NoReturn:
    """End with one sentence, safe for a terminal, and exit code 2."""
    _fail(visible(f"bespoke: {sentence}"), 2)


def _fail(text: str, code: int) -> NoReturn:
    if _several():
        from bespoke.clients import processes

        processes.fail(text, code)
    print(text, file=sys.stderr)
    sys.exit(code)


def _spread(arguments: list[str]) -> list[str]:
    """Rewrite ``--seeds 0 1 2`` and ``--set a.b=1 c.d=2`` as the repeated options that the parser expects."""
    spread: list[str] = []
    option = ""
    for word in arguments:
        if option and not word.startswith("-") and _SEVERAL[option](word):
            spread += [word] if spread[-1] == option else [option, word]
            continue
        option = word.partition("=")[0] if word.partition("=")[0] in _SEVERAL else ""
        spread.append(word)
    return spread


# Options that take several words, and whether a word that follows may be one.
_SEVERAL: dict[str, Callable[[str], bool]] = {
    "--seeds": str.isdigit,
    "--set": lambda word: "=" in word,
    "--methods": bool,
    "--cells": bool,
}


def _version(value: bool) -> None:
    if value:
        print(f"bespoke {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="An experiment file, or the name of a shipped one.")],
    algorithm: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run this method instead of the file's; MODULE:NAME imports yours."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE...", help="Change settings, one or several."),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="batched: a cohort at once; loop: one client after another; auto: to suit the device.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    precision: Annotated[
        str, typer.Option(help="Precision of matmuls and convolutions on CUDA: fp32, tf32 or bf16; auto: bf16.")
    ] = "auto",
    states: Annotated[
        str, typer.Option(help="Where idle clients' states are kept: device, host, or disk for very many clients.")
    ] = "device",
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    seeds: Annotated[list[int] | None, typer.Option(metavar="N...", help="Run once for each seed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run, or for all runs with --seeds.")] = None,
    save_models: Annotated[bool, typer.Option("--save-models", help="Also write every personal model.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also write features of some train rows of each client, for bespoke report.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=1, max=2**31 - 1, help="Rounds between checkpoints; default 10, or more where they are large."
        ),
    ] = None,
    processes: Annotated[
        str,
        typer.Option(
            "--processes", metavar="N", help="Processes on the CPU's cores; auto: as many as cores, where that pays."
        ),
    ] = "auto",
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="CPU threads; clients' batches are small, so 1 is fast.")
    ] = 1,
    log: Annotated[
        list[str] | None, typer.Option(help="Also send the numbers to tensorboard, wandb or mlflow; may be repeated.")
    ] = None,
    live: Live = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run an experiment and record it in a folder."""
    from bespoke import loggers
    from bespoke.clients import processes as peers
    from bespoke.records import RunFolder
    from bespoke.report.summary import trouble
    from bespoke.runs import api
    from bespoke.runs.experiment import load

    _use_threads(threads)
    peers.join()
    if seed is not None and seeds:
        raise UserError("give --seed or --seeds, not both")
    results = []
    wanted: list[int | None] = [*dict.fromkeys(seeds)] if seeds else [seed]
    read = [load(experiment, algorithm, set_ or [], number) for number in wanted]  # a mistake is told before any run
    if peers.first():
        show_beside(live, [_folder(experiment, loaded, out, bool(seeds)) for loaded, _ in read])
    for number, (loaded, source) in zip(wanted, read, strict=True):
        folder = _folder(experiment, loaded, out, bool(seeds))
        if resume and not RunFolder(folder).holds_run() and not (folder.is_dir() and any(folder.iterdir())):
            print(visible(f"note: {folder} holds no run to resume; starting a new one"), file=sys.stderr)
        tools = log if log and peers.first() else ()
        trackers = [loggers.make(tool, folder, folder.name, loaded.tables()) for tool in tools]
        with stopping(_several()) as stopped:
            done = api.run(
                loaded,
                folder,
                backend=backend,
                device=device,
                precision=precision,
                states=states,
                processes=_number(processes),
                resume=resume,
                callbacks=trackers,
                progress=not (quiet or as_json),
                checkpoint_every=checkpoint_every,
                stop=stopped,
                about={"settings_from": source},
            )
        for note in done.notes:
            print(visible(f"note: {note}"), file=sys.stderr)
        last, total = done.summary["rounds"], loaded.training.rounds
        if peers.any_of(stopped()) and (last < total or number != wanted[-1]):
            command = shlex.join(["bespoke", *(word for word in sys.argv[1:] if word != "--resume"), "--resume"])
            print(f"stopped after round {last} of {total}, all saved; resume with: {command}", file=sys.stderr)
            raise typer.Exit(max(code for code, _ in peers.gather(stopped.code, {})))  # the same in every process
        if save_models:
            done.save_models()
        if probe:
            _probe(done)
        results.append((done, folder))
        if not as_json:
            print(_sentence(done, folder))
    if as_json:
        summaries = [done.summary | {"folder": str(folder), "seed": done.experiment.seed} for done, folder in results]
        print(json.dumps(summaries if seeds else summaries[0], indent=2))
    if any(trouble(done.summary) for done, _ in results):
        raise typer.Exit(3)


def _probe(done: Any) -> None:
    """Write what a report shows of a run's features; where it has none, that is a note: the run is done."""
    from bespoke import analysis

    try:
        analysis.probe(done)
    except UserError as error:
        print(visible(f"note: no probe: {error}"), file=sys.stderr)


def _number(text: str) -> int | str:
    """Return the number of processes, or ``auto``."""
    if text != "auto" and not (text.isdecimal() and 1 <= int(text) <= MOST_PROCESSES):
        raise UserError(f"--processes takes auto or a number from 1 to {MOST_PROCESSES}, not {text!r}")
    return text if text == "auto" else int(text)


def _use_threads(threads: int) -> None:
    """Set torch's threads: on small batches several mostly wait, and one gives the same bits on every machine."""
    import torch

    torch.set_num_threads(threads)


def _folder(name: str, experiment: Any, out: Path | None, several: bool) -> Path:
    method = experiment.algorithm_name.replace(":", ".")  # some file systems forbid colons
    stem = f"{Path(name).name.removesuffix('.toml')}-{method}-seed{experiment.seed}"
    if out is None:
        return Path("runs") / stem
    return out / stem if several else out


def _sentence(done: Any, folder: Path) -> str:
    from bespoke.report.summary import sentence

    found = sentence(done.summary, done.experiment.evaluation.select)
    return f"{done.experiment.algorithm_name}, seed {done.experiment.seed}, {found}; records in {folder}"


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that contain them.")],
    baseline: Annotated[
        str | None, typer.Option(help="Method to compare the others with: its label, or a unique part of it.")
    ] = None,
    select: Annotated[
        str | None, typer.Option(help="Round to report: last, best_val or best_test; default: as in the runs.")
    ] = None,
    view: Annotated[str | None, typer.Option(help="Prediction to report, where a method has several.")] = None,
    group: Annotated[
        str,
        typer.Option(help="Clients to include: all, train, unseen or new; train:noise: of those, the ones with noise."),
    ] = "all",
    metric: Annotated[str | None, typer.Option(help="Metric to report; default: as in the runs.")] = None,
    by: Annotated[
        str | None, typer.Option(metavar="condition", help="A column for each condition that the data name.")
    ] = None,
    chart: Annotated[Path | None, typer.Option(help="Also draw every client's value (.png, .svg or .pdf).")] = None,
    curves: Annotated[Path | None, typer.Option(help="Also draw the mean by round (.png, .svg or .pdf).")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Compare runs in a table like those in papers."""
    from bespoke import report
    from bespoke.report.charts import check_path

    for path in filter(None, (chart, curves)):
        check_path(path)  # before anything is read
    comparison = report.compare(folders, baseline, select, view, group, metric, by)
    _show(comparison, markdown, as_json)
    if chart is not None:
        print(f"chart: {report.client_chart(comparison, chart)}", file=sys.stderr)
    if curves is not None:
        print(f"curves: {report.curves(folders, curves, view, metric, group)}", file=sys.stderr)


@app.command()
def curves(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that contain them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture: .png, .svg or .pdf.")] = Path(
        "curves.png"
    ),
    view: Annotated[str | None, typer.Option(help="As for compare.")] = None,
    group: Annotated[str, typer.Option(help="As for compare.")] = "all",
    metric: Annotated[str | None, typer.Option(help="As for compare.")] = None,
) -> None:
    """Draw a metric over rounds: a line for each method, and a band over its seeds."""
    from bespoke import report

    print(visible(f"curves: {report.curves(folders, output, view, metric, group)}"))


@app.command()
def report(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders that contain them.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page, .html; default: report.html.")
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(metavar="TABLE", help="Instead of runs: a paper's table that bespoke list tables shows."),
    ] = None,
    results: Annotated[Path | None, typer.Option(help="With --table: folder of the results; default: results.")] = None,
    pdf: Annotated[Path | None, typer.Option(help="Also print the page to this file, through a browser.")] = None,
    baseline: Annotated[str | None, typer.Option(help="As for compare.")] = None,
    select: Annotated[str | None, typer.Option(help="As for compare.")] = None,
    view: Annotated[str | None, typer.Option(help="As for compare.")] = None,
    group: Annotated[str, typer.Option(help="As for compare.")] = "all",
    metric: Annotated[str | None, typer.Option(help="As for compare.")] = None,
    watched: Watch = None,
) -> None:
    """Write a page about runs, or about a paper's table: one file for any browser, which needs no network."""
    from bespoke.report import page
    from bespoke.report.page.render import check_paths

    if bool(folders) == (table is not None):
        raise UserError("give folders of runs, or the name of a table with --table")
    if table is not None and (baseline or select or view or metric or group != "all"):
        raise UserError(
            "--table shows what a paper's table says: leave --baseline, --select, --view, --group, --metric out"
        )
    if results is not None and table is None:
        raise UserError("--results is the folder of a table's results: name the table with --table, or leave it out")
    made = partial(page.page_of, baseline=baseline, select=select, view=view, group=group, metric=metric)
    if watched is not None:
        if output or pdf or not folders:
            raise UserError("--watch serves the page of runs and writes no file: leave --output, --pdf and --table out")
        return watch(watched, folders, made)
    output = output or Path("report.html")
    check_paths(output, pdf)  # before anything is read
    if table is not None:
        from bespoke.tables import sections

        shown = sections.page_of(table, results or Path("results"))
    else:
        shown = made(folders or [])
    page.write(shown, output)
    print(visible(f"report: {output}"))
    if pdf is not None:
        print(visible(f"printed: {page.pdf(output, pdf)}"))


def _show(comparison: Any, markdown: bool = False, as_json: bool = False) -> None:
    if as_json:
        print(json.dumps(comparison.as_dict(), indent=2))
    elif markdown:
        print(comparison.markdown(), end="")
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(comparison.table())
    else:
        print(comparison.text(), end="")


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(
            help="algorithms, models, datasets, partitions, transforms, objectives, experiments, tables or settings."
        ),
    ],
    table: Annotated[
        str | None, typer.Argument(help="With settings: data, model, ..., training, evaluation, or a method.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the available algorithms, models, data sets, partitions, experiments or tables; or all settings."""
    if what == "settings":
        found = listing.settings(table)
        print(json.dumps(found, indent=2) if as_json else listing.settings_text(found))
        return
    if what not in listing.LISTS:
        raise UserError(f"there is no list of {what!r}: use one of {', '.join([*listing.LISTS, 'settings'])}")
    if table is not None:
        raise UserError(f"list {what} takes no further word, such as {table!r}: only list settings does")
    rows = listing.LISTS[what]()
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        width = max(map(len, rows))
        for name, doc in rows.items():
            print(f"{name:<{width}}  {doc}")


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Keep the runs and the report in this folder.")] = None,
    open_: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the report in a browser, where you sit at a screen.")
    ] = True,
    quiet: Quiet = False,
) -> None:
    """Train eight methods on handwritten digits spread over 20 clients, and compare them in a table and a report."""
    import tempfile

    from bespoke.cli import demo as demonstration

    if _several():
        raise UserError("the demonstration runs in one process: start it without torchrun")
    _use_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="bespoke-demo-")) if out is None else out
    try:
        with stopping() as stopped:
            comparison, page = demonstration.run(folder, not quiet, stopped)
    except KeyboardInterrupt as stopped:
        print(f"stopped; resume with: {shlex.join(['bespoke', 'demo', '--out', str(folder)])}", file=sys.stderr)
        raise typer.Exit(stopped.args[0] if stopped.args else 130) from None
    _show(comparison)
    opened = " (opened in your browser)" if open_ and demonstration.show(page) else ""
    print(f"\n{demonstration.lesson(comparison)}\n{visible(f'report: {page}{opened}')}")
