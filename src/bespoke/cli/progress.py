"""The progress of a run on the command line, as a bar or as log lines, and its end after the round on Ctrl-C."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def shown(experiment: Any, quiet: bool, several: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yield a callback that shows a run's progress, and a function that says whether Ctrl-C was pressed.

    ``several`` says whether torchrun started more processes than this one.
    """
    asked: list[int] = []

    def interrupt(signum: int, frame: Any) -> None:
        if asked and several:
            return  # torchrun forwards signals, so the same one arrives twice
        if asked:
            print("stopped at once; rounds after the last checkpoint are lost", file=sys.stderr)
            raise SystemExit(130)
        asked.append(signum)
        again = "" if several else "; press Ctrl-C again to stop at once"
        print(f"finishing this round, then saving a checkpoint{again}", file=sys.stderr)

    # torchrun ends its processes with SIGTERM and waits half a minute for them
    signals = (signal.SIGINT, signal.SIGTERM) if several else (signal.SIGINT,)
    before = {number: signal.signal(number, interrupt) for number in signals}
    statistic = experiment.evaluation.metric
    try:
        if quiet:
            yield (lambda event: None), lambda: bool(asked)
        elif sys.stderr.isatty():
            with _bar(experiment, statistic) as callback:
                yield callback, lambda: bool(asked)
        else:
            yield _plain_lines(experiment, statistic), lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def headline_text(event: Any, statistic: str) -> str:
    """Return an evaluated round's headline metric, as in `accuracy 94.12 % (pooled)`; "" for other rounds."""
    from bespoke.report.metrics import aggregate
    from bespoke.report.summary import headline
    from bespoke.report.units import written

    named = headline(event.row, event.evaluated)
    found = aggregate(named.scores(event.evaluated)) if named else None
    if named is None or found is None or not found.clients:
        return ""
    value = getattr(found, statistic)
    return f"{named.metric} is not finite" if value is None else f"{written(named.metric, value)} ({statistic})"


def _plain_lines(experiment: Any, statistic: str) -> Any:
    last = [0.0]

    def callback(event: Any) -> None:
        shown = headline_text(event, statistic)
        now = time.monotonic()
        if not shown and event.round < event.rounds and now - last[0] < 5.0:
            return  # a line every few seconds is enough for a log
        last[0] = now
        loss = event.row["train_loss"]
        text = f"{experiment.algorithm_name}: round {event.round}/{event.rounds}"
        text += f", train loss {loss:.4f}" if loss is not None else ""
        text += f", {shown}" if shown else ""
        text += f", refused {event.row['refused']}" if event.row["refused"] else ""
        print(text, file=sys.stderr, flush=True)

    return callback


@contextmanager
def _bar(experiment: Any, statistic: str) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TextColumn("{task.fields[headline]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(experiment.algorithm_name, total=experiment.training.rounds, headline="")
        started: list[int] = []

        def callback(event: Any) -> None:
            shown = headline_text(event, statistic)
            if not started:  # a resumed run has done its first rounds before
                started.append(event.round)
                progress.reset(bar, completed=event.round - 1)
            progress.update(bar, completed=event.round)
            if shown:
                progress.update(bar, headline=shown)
            if event.row["refused"]:
                progress.console.print(f"round {event.round}: refused {event.row['refused']}")

        yield callback
