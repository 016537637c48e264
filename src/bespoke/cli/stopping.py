"""The end of a run after its round, on a signal."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
