"""The processes that a command starts: each ends with the one that started it, whatever ends that one."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bespoke.errors import UserError

Told = Callable[[str], None]  # takes lines for whoever watches a command

_LOOK, _GRACE = 0.5, 15.0  # seconds between two looks at the parent; for a process to end when it is asked to
_PARENT = "BESPOKE_PARENT"  # the process with which a command shall end; without it, it outlives whoever typed it


def end_with(parent: int) -> None:
    """End this process soon after its parent has died."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def start(module: str, arguments: list[str], log: Path, home: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start a module of this package, in a group of its own, that writes to ``log``; Flower's files lie in ``home``."""
    command = [sys.executable, "-m", f"bespoke.flower.{module}", str(os.getpid()), *arguments]
    environment = os.environ | {"FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1"} | variables
    with log.open("ab") as sink:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment, start_new_session=True
        )


def command(*words: object, log: Path | None = None, **variables: str) -> subprocess.Popen[bytes]:
    """Start a command of this program's, as somebody types it, that ends with this process; it may write to ``log``."""
    environment = os.environ | {_PARENT: str(os.getpid())} | variables
    with log.open("ab") if log else contextlib.nullcontext() as sink:
        typed = [sys.executable, "-m", "bespoke", *map(str, words)]
        return subprocess.Popen(typed, stdout=sink, stderr=sink, env=environment, start_new_session=True)


def end_as_asked() -> None:
    """Let SIGTERM end this command as Ctrl-C does, so that what it has started ends too, and end with its parent."""

    def end(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, end)
    if parent := os.environ.get(_PARENT):
        end_with(int(parent))


def stop(process: subprocess.Popen[bytes] | None) -> None:
    """End a process and all that it has started."""
    if process is None:
        return
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """Return a port on which nobody listens here."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def is_free(host: str, port: int) -> bool:
    """Return whether a server may listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another address") from None
            return False
    return True
