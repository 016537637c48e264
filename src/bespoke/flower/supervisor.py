"""The client's side of a federation as processes: one that works, a node that carries, and what starts both again.

Flower's node forgets everything when it ends, and refuses its own key for a minute after it was killed. So this one,
which does nothing that may fail, starts what has ended, and says in a sentence what no trying will mend.
"""

import json
import socket
import ssl
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from bespoke.errors import UserError, visible
from bespoke.files import make_folder
from bespoke.flower import children, keys, worker
from bespoke.flower.children import Told
from bespoke.runs.lock import FolderLock

_LOOK = 0.3  # seconds between two looks
_LIVE = 90.0  # seconds for which a key may be refused because a node with it was there before
_QUICK, _DEATHS = 20.0, 4  # so many deaths in a row, each this soon after its start, are no accident
_GONE, _STAY = 10.0, 120.0  # seconds without the server, or with it, after which a client with its model leaves
_WORKER_LOG, _NODE_LOG, _SECRET = "worker.log", "node.log", "node.secret"


@dataclass(frozen=True)
class Place:
    """Who a client is, and where."""

    address: str  # of the server, HOST:PORT
    experiment: str
    data: Path
    home: Path
    key: Path | None  # None, with ca: without TLS, on loopback
    ca: Path | None
    test: Path | None = None
    wait: float = 600.0  # seconds for the server to appear


def join(place: Place, told: Told) -> None:
    """Check the data, then take part until the federation is finished."""
    line = keys.public_of(place.key) if place.key else ""
    if place.ca is not None and not place.ca.is_file():
        raise UserError(f"--ca {place.ca} is no file: get the server's ca.crt from its operator")
    make_folder(place.home)
    lock = FolderLock(place.home)
    try:
        _Supervisor(place, line, told).run()
    finally:
        lock.close()


class _Supervisor:
    def __init__(self, place: Place, line: str, told: Told) -> None:
        self.place, self.line, self.told = place, line, told
        self.home, self.port = place.home, children.free_port()
        self.worker: subprocess.Popen[bytes] | None = None
        self.node: subprocess.Popen[bytes] | None = None
        self.deaths = 0
        self.refused: float | None = None  # since when the server has refused the key
        keys.new_secret(self.home / _SECRET)
        for name in (_WORKER_LOG, _NODE_LOG, worker.FINISHED):
            (self.home / name).unlink(missing_ok=True)

    def run(self) -> None:
        """Start both processes, and whichever ends once more, until the work is finished."""
        try:
            self._start_worker()
            self._reach()
            self._start_node()
            while not (self.home / worker.FINISHED).exists():
                self._keep()
            self._stay()
        finally:
            children.stop(self.node)
            children.stop(self.worker)

    def _keep(self) -> None:
        """Wait a little, and start what has ended."""
        time.sleep(_LOOK)
        if self.worker is not None and self.worker.poll() is not None:
            self._worker_ended(self.worker.returncode)
        elif self.node is not None and self.node.poll() is not None:
            self._node_ended()

    def _stay(self) -> None:
        """Stay until the server has gone: Flower drops the answer of a node that leaves before it is read."""
        end = gone = time.monotonic()
        while time.monotonic() < min(end + _STAY, gone + _GONE):
            time.sleep(_LOOK)
            if not unreachable(self.place.address, self.place.ca):
                gone = time.monotonic()
                self._keep()

    # --- the process that works -----------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        """Start it, and return when it has checked the data."""
        place, ready = self.place, self.home / worker.READY
        ready.unlink(missing_ok=True)
        settings = {
            "experiment": place.experiment,
            "data": str(place.data),
            "test": str(place.test or ""),
            "home": str(self.home),
            "runtime": f"127.0.0.1:{self.port}",
            "secret": str(self.home / _SECRET),
        }
        log = self.home / _WORKER_LOG
        self.worker_began = time.monotonic()
        self.worker = children.start("worker", [json.dumps(settings)], log, self.home / "flwr")
        while not ready.exists():
            if self.worker.poll() is not None:
                raise UserError(_last_sentence(log) or f"the client's process ended before its work: see {log}")
            time.sleep(0.1)

    def _worker_ended(self, code: int) -> None:
        if code == worker.REFUSED:
            raise UserError(_last_sentence(self.home / _WORKER_LOG))
        self._count(self.worker_began, f"the client's process ended with code {code}: see {self.home / _WORKER_LOG}")
        children.stop(self.worker)
        self.told(f"the client's process ended with code {code}; it is started again")
        self._start_worker()

    # --- the node -------------------------------------------------------------------------------------------------

    def _reach(self) -> None:
        """Return when the server can be reached; refuse one that cannot be the right one."""
        end, said = time.monotonic() + self.place.wait, False
        while why := unreachable(self.place.address, self.place.ca):
            if time.monotonic() > end:
                raise UserError(f"no server at {self.place.address} within {self.place.wait:g} s: {why}")
            if not said:
                self.told(f"waiting for a server at {self.place.address}")
                said = True
            time.sleep(1.0)

    def _start_node(self) -> None:
        place = self.place
        safety = ["--insecure"]
        if place.ca is not None and place.key is not None:
            safety = ["--root-certificates", str(place.ca), "--auth-supernode-private-key", str(place.key)]
        arguments = ["--superlink", place.address, *safety, "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--isolation", "process", "--superexec-auth-secret-file", str(self.home / _SECRET)]
        log = self.home / _NODE_LOG
        self.said = log.stat().st_size if log.exists() else 0
        self.node_began = time.monotonic()
        self.node = children.start("supernode", arguments, log, self.home / "flwr")

    def _node_ended(self) -> None:
        """Start the node again, unless the server will never take it."""
        children.stop(self.node)
        text = self._node_said()
        if "Failed to activate SuperNode" in text:
            self._wait_for_key()
        else:
            self._count(self.node_began, f"the node ended: see {self.home / _NODE_LOG}")
            self.told("the node ended; it is started again")
            self.refused = None
            self._reach()
        self._start_node()

    def _wait_for_key(self) -> None:
        """Wait while the server may believe that an earlier node with this key still lives."""
        if self._status() == "unknown":
            raise UserError(
                f"the server at {self.place.address} does not know this client's key: ask its operator to start it "
                f"with --register and the line in {self.place.key}.pub"
            )
        if self.refused is None:
            self.told("a node with this key was there less than a minute ago; trying again until the server forgets it")
            self.refused = time.monotonic()
        if time.monotonic() > self.refused + _LIVE:
            raise UserError(
                f"the server at {self.place.address} refuses this client's key: another client with the same key is "
                "connected, or the key is not registered; each client needs its own"
            )
        time.sleep(3.0)

    def _status(self) -> str:
        """Return what the server says of this client's key, or "" where it tells nobody."""
        import httpx

        from bespoke.flower import tasks  # which imports Flower, and is seldom needed

        try:
            found = tasks.nodes(self.place.address, self.place.ca.read_bytes() if self.place.ca else None)
        except httpx.HTTPError:
            return ""
        return found[self.line].status if self.line in found else "unknown"

    def _node_said(self) -> str:
        """Return what the node that was started last has said."""
        with (self.home / _NODE_LOG).open("rb") as file:
            file.seek(self.said)
            return file.read().decode(errors="replace")

    def _count(self, began: float, why: str) -> None:
        """Give up after several deaths in a row."""
        self.deaths = self.deaths + 1 if time.monotonic() < began + _QUICK else 1
        if self.deaths > _DEATHS:
            raise UserError(why)


def unreachable(address: str, ca: Path | None) -> str:
    """Return why a server cannot be reached yet, or ""; refuse one whose certificate or protocol is another."""
    host, port = split(address)
    try:
        with socket.create_connection((host, port), 5.0) as plain:
            if ca is None:
                _speak_plainly(plain, address)
                return ""
            with _context(ca).wrap_socket(plain, server_hostname=host):
                return ""
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"the server at {address} shows a certificate that --ca {ca} does not vouch for "
            f"({error.verify_message}): get the right ca.crt from its operator, and use the address that it names"
        ) from None
    except ssl.SSLError:
        raise UserError(f"the server at {address} does not speak TLS: nothing was sent to it") from None
    except OSError as error:
        return error.strerror or str(error)


def split(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{address!r} is no address: write HOST:PORT")
    return host.strip("[]"), int(port)


def _context(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError:  # SSLError is one
        raise UserError(f"--ca {ca} holds no certificate: get the server's ca.crt from its operator") from None


def _speak_plainly(plain: socket.socket, address: str) -> None:
    """Refuse a server that does not answer without TLS."""
    plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
    try:
        answer = plain.recv(16)
    except ConnectionError:
        answer = b""
    if not answer.startswith(b"HTTP/"):
        raise UserError(f"the server at {address} speaks TLS: leave out --insecure, and give --key and --ca")


def _last_sentence(log: Path) -> str:
    """Return the sentence with which a process of ours has refused."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("bespoke: ")]
    return visible(lines[-1].removeprefix("bespoke: ")) if lines else ""
