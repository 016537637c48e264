"""How a run on the command line goes: a bar, or lines in a log; and Ctrl-C, which ends it after the round."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def shown(experiment: Any, quiet: bool, several: bool = False) -> Iterator[tuple[Any, Any]]:
    """A callback that shows how a run goes, and a function that says whether Ctrl-C was pressed.

    ``several`` says whether torchrun has started more processes than this one.
    """
    asked: list[int] = []

    def interrupt(signum: int, frame: Any) -> None:
        if asked and several:
            return  # torchrun passes signals on, so that the same one comes twice
        if asked:
            print("stopped at once; what came after the last checkpoint is lost", file=sys.stderr)
            raise SystemExit(130)
        asked.append(signum)
        again = "" if several else "; press Ctrl-C again to stop at once"
        print(f"finishing this round, then saving a checkpoint{again}", file=sys.stderr)

    # torchrun ends its processes with SIGTERM, and gives them half a minute
    signals = (signal.SIGINT, signal.SIGTERM) if several else (signal.SIGINT,)
    before = {number: signal.signal(number, interrupt) for number in signals}
    metric = experiment.evaluation.metric
    try:
        if quiet:
            yield (lambda event: None), lambda: bool(asked)
        elif sys.stderr.isatty():
            with _bar(experiment, metric) as callback:
                yield callback, lambda: bool(asked)
        else:
            yield _plain_lines(experiment, metric), lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _accuracy(event: Any, metric: str) -> float | None:
    from bespoke.report.metrics import aggregate

    view = event.evaluated[0]["view"] if event.evaluated else None
    rows = [r for r in event.evaluated if r["view"] == view and r["split"] == "test" and r["group"] != "new"]
    if not rows:
        return None
    return getattr(aggregate([r["correct"] for r in rows], [r["total"] for r in rows]), metric)


def _plain_lines(experiment: Any, metric: str) -> Any:
    last = [0.0]

    def callback(event: Any) -> None:
        accuracy = _accuracy(event, metric)
        now = time.monotonic()
        if accuracy is None and event.round < event.rounds and now - last[0] < 5.0:
            return  # a line every few seconds is enough for a log
        last[0] = now
        loss = event.row["train_loss"]
        text = f"{experiment.algorithm_name}: round {event.round}/{event.rounds}"
        text += f", train loss {loss:.4f}" if loss is not None else ""
        text += f", accuracy {100 * accuracy:.2f} % ({metric})" if accuracy is not None else ""
        text += f", refused {event.row['refused']}" if event.row["refused"] else ""
        print(text, file=sys.stderr, flush=True)

    return callback


@contextmanager
def _bar(experiment: Any, metric: str) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TextColumn("{task.fields[accuracy]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(experiment.algorithm_name, total=experiment.training.rounds, accuracy="")
        started: list[int] = []

        def callback(event: Any) -> None:
            accuracy = _accuracy(event, metric)
            if not started:  # a resumed run did not do its first rounds just now
                started.append(event.round)
                progress.reset(bar, completed=event.round - 1)
            progress.update(bar, completed=event.round)
            if accuracy is not None:
                progress.update(bar, accuracy=f"accuracy {100 * accuracy:.2f} % ({metric})")
            if event.row["refused"]:
                progress.console.print(f"round {event.round}: refused {event.row['refused']}")

        yield callback
