"""The progress of a run on the command line, as a bar or as log lines, and its end after the round on a signal."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bespoke.errors import visible


class Stop:
    """Says whether to stop: after the first SIGINT (Ctrl-C) or SIGTERM, and which exit code that means."""

    def __init__(self) -> None:
        """Wait for a signal."""
        self.signal = 0

    def __call__(self) -> bool:
        """Return whether a signal has come."""
        return bool(self.signal)

    @property
    def code(self) -> int:
        """The exit code of a shell for the signal: 130 or 143; 130 where only another process was told."""
        return 128 + (self.signal or signal.SIGINT)


@contextmanager
def stopping(several: bool = False) -> Iterator[Stop]:
    """Yield a :class:`Stop` that hears signals; a second one ends the program at once.

    ``several`` says whether torchrun started more processes than this one.
    """
    stop = Stop()

    def interrupt(signum: int, frame: Any) -> None:
        if stop() and several:
            return  # torchrun forwards signals, so the same one arrives twice
        if stop():
            print("stopped at once; rounds after the last checkpoint are lost", file=sys.stderr)
            raise SystemExit(128 + signum)
        stop.signal = signum
        again = "" if several else "; press Ctrl-C again to stop at once"
        print(f"finishing this round, then saving a checkpoint{again}", file=sys.stderr)

    # torchrun and batch systems end processes with SIGTERM, and wait half a minute or so for them
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def shown(experiment: Any, quiet: bool, several: bool = False) -> Iterator[tuple[Any, Stop]]:
    """Yield a callback that shows a run's progress, and a :class:`Stop` that says whether to end after the round."""
    statistic = experiment.evaluation.metric
    with stopping(several) as stop:
        if quiet:
            yield (lambda event: None), stop
        elif sys.stderr.isatty():
            with _bar(experiment, statistic) as callback:
                yield callback, stop
        else:
            with adaptation(f"{experiment.algorithm_name}: "):
                yield _plain_lines(experiment, statistic), stop


class _Adaptation(logging.Handler):
    """Shows how far new clients have adapted, a text every few seconds, in the process that made it."""

    def __init__(self, show: Callable[[str], None], pause: float) -> None:
        super().__init__()
        self._show, self._pause, self._last, self._process = show, pause, time.monotonic(), os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        others = os.getpid() != self._process or os.environ.get("RANK", "0") != "0"  # a fork, or another of torchrun's
        now = time.monotonic()
        if not others and now - self._last >= self._pause:
            self._last = now
            self._show(record.getMessage())


@contextmanager
def adaptation(prefix: str = "", show: Callable[[str], None] | None = None, pause: float = 5.0) -> Iterator[None]:
    """Show how far new clients have adapted, which may take most of an evaluation: by default as lines on stderr."""

    def line(text: str) -> None:
        print(visible(prefix + text), file=sys.stderr, flush=True)

    handler, logger = _Adaptation(show or line, pause), logging.getLogger("bespoke.adaptation")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


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
        print(visible(text), file=sys.stderr, flush=True)

    return callback


@contextmanager
def _bar(experiment: Any, statistic: str) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

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
                progress.console.print(Text(visible(f"round {event.round}: refused {event.row['refused']}")))

        with adaptation(show=lambda text: progress.update(bar, headline=text), pause=0.0):
            yield callback
