"""The progress of a run: a bar in a terminal or a notebook, lines in a log."""

import html
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from bespoke.errors import visible
from bespoke.report.metrics import aggregate
from bespoke.report.summary import headline
from bespoke.report.units import written
from bespoke.runs.experiment import Experiment
from bespoke.runs.recording import Event

Callback = Callable[[Event], None]


@contextmanager
def shown(experiment: Experiment, wanted: bool | None = None) -> Iterator[Callback]:
    """Yield a callback that shows a run's progress on stderr, or below the cell of a notebook.

    That is a bar where somebody looks, a terminal or a notebook. Elsewhere it is lines if ``wanted`` is true, and
    nothing if it is None; if it is false, there is nothing anywhere.
    """
    name, rounds, statistic = experiment.algorithm_name, experiment.training.rounds, experiment.evaluation.metric
    if wanted is False:
        yield lambda event: None
    elif _in_notebook():
        with _notebook_bar(name, rounds) as bar, _followed(bar, statistic) as callback:
            yield callback
    elif sys.stderr.isatty():
        with _terminal_bar(name, rounds) as bar, _followed(bar, statistic) as callback:
            yield callback
    elif wanted:
        with adaptation(f"{name}: "):
            yield _plain_lines(name, statistic)
    else:
        yield lambda event: None


# --- a bar --------------------------------------------------------------------------------------------------------


class _Bar(Protocol):
    def begin(self, done: int) -> None:
        """Start to count after so many rounds, which another run has done."""

    def show(self, done: int | None = None, text: str | None = None) -> None:
        """Show how many rounds are done, and the text beside the bar; None: as before."""

    def say(self, line: str) -> None:
        """Print a line that stays."""


@contextmanager
def _followed(bar: _Bar, statistic: str) -> Iterator[Callback]:
    """Yield a callback that moves a bar, which also shows how far new clients have adapted."""
    started: list[int] = []

    def callback(event: Event) -> None:
        if not started:  # a resumed run has done its first rounds before
            started.append(event.round)
            bar.begin(event.round - 1)
        bar.show(event.round, headline_text(event, statistic) or None)
        if told := left_out(event.row):
            bar.say(visible(f"round {event.round}: {told}"))

    with adaptation(show=lambda text: bar.show(text=text), pause=0.0):
        yield callback


@contextmanager
def _terminal_bar(name: str, rounds: int) -> Iterator[_Bar]:
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

    class Bar:
        def begin(self, done: int) -> None:
            progress.reset(task, completed=done)

        def show(self, done: int | None = None, text: str | None = None) -> None:
            fields: Any = {} if text is None else {"headline": text}
            progress.update(task, completed=done, **fields)

        def say(self, line: str) -> None:
            progress.console.print(Text(line))

    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=rounds, headline="")
        yield Bar()


def _in_notebook() -> bool:
    """Return whether a notebook's kernel runs this program."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class _NotebookBar:
    """A bar below a notebook's cell, which IPython displays and replaces; it stays there with what it showed last."""

    _PAUSE = 0.1  # seconds between two displays

    def __init__(self, name: str, rounds: int) -> None:
        from IPython.display import display

        self._name, self._rounds, self._done, self._text, self._lines = name, rounds, 0, "", list[str]()
        self._shown_at = time.monotonic()
        self._handle = display(self, display_id=True)

    def begin(self, done: int) -> None:
        self._done = done

    def show(self, done: int | None = None, text: str | None = None) -> None:
        self._done = self._done if done is None else done
        self._text = self._text if text is None else text
        if time.monotonic() - self._shown_at >= self._PAUSE:
            self.update()

    def say(self, line: str) -> None:
        self._lines.append(line)
        self.update()

    def update(self) -> None:
        self._shown_at = time.monotonic()
        self._handle.update(self)

    def __repr__(self) -> str:
        state = f"{self._name}: {self._done}/{self._rounds} rounds {self._text}".rstrip()
        return "\n".join([*self._lines, state])

    def _repr_html_(self) -> str:
        bar = f'<progress max="{self._rounds}" value="{self._done}"></progress>'
        told = "".join(f"{html.escape(line)}<br>" for line in self._lines)
        state = f"{self._done}/{self._rounds} rounds {self._text}"
        return f"<div>{told}{html.escape(self._name)} {bar} {html.escape(state)}</div>"


@contextmanager
def _notebook_bar(name: str, rounds: int) -> Iterator[_Bar]:
    bar = _NotebookBar(name, rounds)
    try:
        yield bar
    finally:
        bar.update()  # what came too soon after another display


# --- adaptation ---------------------------------------------------------------------------------------------------


class _Adaptation(logging.Handler):
    """Shows how far new clients have adapted, a text every few seconds, in the process that made it."""

    def __init__(self, show: Callable[[str], None], pause: float) -> None:
        super().__init__()
        self._show, self._pause, self._last, self._process = show, pause, time.monotonic(), os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if os.getpid() == self._process and now - self._last >= self._pause:  # a fork is silent
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


# --- text ---------------------------------------------------------------------------------------------------------


def headline_text(event: Any, statistic: str) -> str:
    """Return an evaluated round's headline metric, as in `accuracy 94.12 % (pooled)`; "" for other rounds."""
    named = headline(event.row, event.evaluated)
    found = aggregate(named.scores(event.evaluated)) if named else None
    if named is None or found is None or not found.clients:
        return ""
    value = getattr(found, statistic)
    return f"{named.metric} is not finite" if value is None else f"{written(named.metric, value)} ({statistic})"


def left_out(row: dict[str, Any]) -> str:
    """Return who was left out of a round or its evaluation, and why; "" if nobody was."""
    missing, unheard = row.get("missing", {}), row.get("evaluated", {}).get("missing", {})
    told = {"refused": row["refused"], "missing": missing, "not evaluated": unheard}
    return ", ".join(f"{word} {who}" for word, who in told.items() if who)


def _plain_lines(name: str, statistic: str) -> Callback:
    last = [0.0]

    def callback(event: Event) -> None:
        shown = headline_text(event, statistic)
        now = time.monotonic()
        if not shown and not left_out(event.row) and event.round < event.rounds and now - last[0] < 5.0:
            return  # a line every few seconds is enough for a log
        last[0] = now
        loss = event.row["train_loss"]
        text = f"{name}: round {event.round}/{event.rounds}"
        text += f", train loss {loss:.4f}" if loss is not None else ""
        text += f", {shown}" if shown else ""
        text += f", {left_out(event.row)}" if left_out(event.row) else ""
        print(visible(text), file=sys.stderr, flush=True)

    return callback
