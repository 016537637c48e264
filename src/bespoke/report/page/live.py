"""The page while runs go on: served to this machine alone, and made again when their records have changed.

`beside` serves it from a process of its own, so that a run neither waits for it nor fails with it; `Server` serves it
from this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from bespoke.errors import UserError, listed, reason, short
from bespoke.records import CLIENTS, ROUNDS, SUMMARY, TIMING, RunFolder
from bespoke.report import probes
from bespoke.report.page.content import page_of
from bespoke.report.page.parts import Live, Page
from bespoke.report.page.render import html
from bespoke.report.runs import find_runs

HOST, PORT = "127.0.0.1", 8470  # where a page is served unless somebody says otherwise
NAMED = 3  # runs that the line at the top names
REST = 5  # times as long as a page took to make, until the next one is made
SILENT = 1.5  # seconds after which a page that did not ask is gone; it asks every second
LAST = 1.0  # seconds for answers that are under way to arrive once the page ends
GRACE = 20.0  # seconds for the other process to end: it may have a large page to make

_FILES = ("config.toml", ROUNDS, CLIENTS, TIMING, SUMMARY, "environment.json", probes.NAME)  # that change with a run
_WAITING = Page(
    "Waiting for an evaluated round", "The tables and charts appear here once a round has been evaluated.", (), (), ()
)
_NOTHING = Page("No round was evaluated", "There is nothing to show.", (), (), ())
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",  # the page has the rest
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


# --- what is shown -------------------------------------------------------------------------------------------------


class _Stand(NamedTuple):
    """How far a run is."""

    name: str
    round: int
    rounds: int | None
    ended: bool

    @property
    def words(self) -> str:
        """As in `3 of 20 rounds`."""
        return f"{self.round}{f' of {self.rounds}' if self.rounds else ''} rounds"


class _Shown(NamedTuple):
    page: Page
    live: Live
    update: bytes  # what a page that is open takes
    tag: str  # names the update


class Followed:
    """The newest page about runs, made once for each state of their records, however many ask for it."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], make: Callable[..., Page] = page_of) -> None:
        """Follow the runs at `paths`, which may come later; `make` makes the page of those with an evaluation."""
        self.over = False  # whether this is the last page
        self._paths, self._make = [Path(path) for path in paths], make
        self._lock = threading.Lock()
        self._page = _WAITING
        self._state: Any = None
        self._next = 0.0
        self._shown: _Shown | None = None

    def newest(self) -> _Shown:
        """Return what to show now."""
        with self._lock:
            runs = _runs(self._paths)
            state = self.over, [(run.path, *(_stamp(run.path / name) for name in _FILES)) for run in runs]
            due = self.over or time.monotonic() >= self._next
            if self._shown is None or (state != self._state and due):
                begin = time.monotonic()
                self._shown, self._state = self._made(runs), state
                self._next = time.monotonic() + REST * (time.monotonic() - begin)
            return self._shown

    def _made(self, runs: list[RunFolder]) -> _Shown:
        trouble = ""
        try:
            evaluated = [run.path for run in runs if _stamp(run.path / CLIENTS)[0]]
            self._page = self._make(evaluated, ended=self.over) if evaluated else _NOTHING if self.over else _WAITING
            told = _told(runs, self.over)
        except Exception as error:  # what is wrong with a record is told here, and never ends the run
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            told, trouble = "", f"This page cannot be brought up to date: {kind}{short(reason(error), 400)}."
        live = Live(" ".join(filter(None, [trouble, told])), self.over)
        update = html(self._page, live, bare=True).encode()
        return _Shown(self._page, live, update, f'"{hashlib.sha256(update).hexdigest()[:16]}"')


def _runs(paths: Sequence[Path]) -> list[RunFolder]:
    """Return the runs that have begun by now."""
    found: dict[Path, RunFolder] = {}
    for path in paths:
        with contextlib.suppress(UserError, OSError):  # there is none yet
            found |= {run.path.resolve(): run for run in find_runs(path)}
    return list(found.values())


def _stamp(path: Path) -> tuple[int, int]:
    """Return a file's size and time of change, zeros without one."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _stand(run: RunFolder, over: bool) -> _Stand:
    """Return how far a run is; one that has ended wrote its summary last."""
    training = run.config().get("training", {})
    wanted = training.get("rounds") if isinstance(training, dict) else None
    rounds = wanted if isinstance(wanted, int) else None
    last = max((row["round"] for row in run.rounds()), default=0)
    written = {name: _stamp(run.path / name)[1] for name in ("config.toml", ROUNDS, SUMMARY)}
    summarised = written[SUMMARY] > 0 and written[SUMMARY] == max(written.values())
    return _Stand(short(run.path.name, 40), last, rounds, over or summarised or (rounds is not None and last >= rounds))


def _told(runs: Sequence[RunFolder], over: bool) -> str:
    """Return how far the runs are, in a sentence or two."""
    stands = [_stand(run, over) for run in runs]
    going = [each for each in stands if not each.ended]
    if not stands:
        return "No run was begun." if over else "No run has begun yet."
    if len(stands) == 1:
        (only,) = stands
        said = f"{only.name} has {'ended after' if only.ended else 'done'} {only.words}."
    else:
        said = f"{len(stands) - len(going)} of {len(stands)} runs have ended."
        if going:
            said += f" Going on: {listed([f'{each.name} ({each.words})' for each in going], NAMED)}."
    newest = max(_stamp(run.path / name)[1] for run in runs for name in _FILES)
    said += f" Last record at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(newest / 1e9))}."
    return said + (" This page stays as it is." if over else "")


# --- who is answered -----------------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of `/`, the page, and of `/update`, what a page that is open takes."""

    server: Server
    timeout = 5.0  # seconds for a request to arrive, and for its answer to leave

    def do_GET(self) -> None:
        if self._refused():
            return
        if self.path not in ("/", "/update"):
            return self._say(HTTPStatus.NOT_FOUND, "there is nothing here")
        try:
            shown = self.server.followed.newest()
            if self.path == "/":
                return self._answer(HTTPStatus.OK, html(shown.page, shown.live).encode(), "text/html")
        except Exception as error:  # of the page's own code: whoever looks should see it
            return self._say(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {reason(error)}")
        self.server.asked = time.monotonic()
        if self.headers.get("If-None-Match") == shown.tag:
            return self._answer(HTTPStatus.NOT_MODIFIED, b"", "text/html", shown.tag)
        self._answer(HTTPStatus.OK, shown.update, "text/html", shown.tag)

    do_HEAD = do_GET

    def _not_allowed(self) -> None:
        if not self._refused():
            self._say(HTTPStatus.METHOD_NOT_ALLOWED, "this page is only read", Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _not_allowed

    def _refused(self) -> bool:
        """Refuse whoever came by another name: a site may have its own name lead to this machine."""
        port = self.server.socket.getsockname()[1]
        names = [f"{name}{end}" for name in (HOST, "localhost") for end in (f":{port}", "")[: 1 + (port == 80)]]
        given = self.headers.get_all("Host", [])
        if len(given) == 1 and given[0].lower() in names:
            return False
        self._say(HTTPStatus.FORBIDDEN, f"this page is served as {self.server.url} alone")
        return True

    def _say(self, status: HTTPStatus, text: str, **headers: str) -> None:
        self._answer(status, f"{status.value} {status.phrase}: {text}\n".encode(), "text/plain", **headers)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str, tag: str = "", **headers: str) -> None:
        self.send_response(status)
        own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))} | _HEADERS | headers
        for name, value in (own | ({"ETag": tag} if tag else {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "bespoke"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal is the run's."""


def listen(port: int | None = None) -> socket.socket:
    """Return a socket that listens on this machine alone: at `port`, 0 for any free one; None: the usual one or any."""
    if port is not None and not 0 <= port < 2**16:
        raise UserError(f"{port} is no port: choose one from 1 to {2**16 - 1}, or 0 for any that is free")
    try:
        return socket.create_server((HOST, PORT if port is None else port))
    except OSError as error:
        if port is None:
            return socket.create_server((HOST, 0))
        why = os.strerror(error.errno or 0).lower()
        raise UserError(f"port {port} cannot be used: {why}; choose another one, or 0 for any that is free") from None


def _url(listening: socket.socket) -> str:
    return f"http://{HOST}:{listening.getsockname()[1]}/"


class Server(ThreadingHTTPServer):
    """Serves the page; ended as a context, it lets answers under way arrive, but waits for nobody's request."""

    daemon_threads = True  # so that nobody who reads or writes slowly keeps the process

    def __init__(self, listening: socket.socket, followed: Followed) -> None:
        """Answer on a socket that listens."""
        super().__init__((HOST, 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.url, self.followed = _url(listening), followed
        self.asked = -SILENT  # when a page last asked for what is new
        self._open: set[socket.socket] = set()
        self._changed = threading.Condition()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, and remember the connection until it is closed."""
        with self._changed:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        super().shutdown_request(request)
        with self._changed:
            self._open.discard(request)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: somebody has closed a page."""

    def server_close(self) -> None:
        """Stop listening; requests that have not arrived are over at once, answers that have not after `LAST`."""
        super().server_close()
        with self._changed:
            self._cut(socket.SHUT_RD)
            self._changed.wait_for(lambda: not self._open, LAST)
            self._cut(socket.SHUT_RDWR)

    def _cut(self, how: int) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):  # whoever was there has gone
                connection.shutdown(how)

    def end(self) -> None:
        """Let pages that are open take the last state, and stop."""
        self.followed.over = True
        if time.monotonic() - self.asked < SILENT:
            self.followed.newest()  # made before anybody waits for it
            time.sleep(SILENT)
        self.shutdown()


# --- a process of its own ------------------------------------------------------------------------------------------


@contextmanager
def beside(paths: Sequence[str | os.PathLike[str]], port: int | None = None) -> Iterator[str]:
    """Serve the page about runs from another process, and yield its address; the page ends with the context.

    `port` is as for `listen`. The runs may begin later.
    """
    with listen(port) as listening:
        url = _url(listening)
        command = [sys.executable, "-P", "-m", __name__, str(listening.fileno()), *map(str, paths)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # it ends when this end is closed, whatever ended this process
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
            start_new_session=True,  # Ctrl-C is for the run
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    try:
        yield url
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _main(descriptor: str, *paths: str) -> None:
    """Serve the page on a socket that was inherited, until the standard input ends."""
    os.nice(10)  # the run comes first
    with Server(socket.socket(fileno=int(descriptor)), Followed(paths)) as server:

        def wait() -> None:
            sys.stdin.buffer.read()
            server.end()

        threading.Thread(target=wait, daemon=True).start()
        server.serve_forever(0.1)


if __name__ == "__main__":
    _main(*sys.argv[1:])
