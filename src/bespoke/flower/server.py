"""The server's side: a SuperLink of our own, the keys that it knows, and runs in it."""

import contextlib
import hashlib
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import SUPERLINK_NODE_ID as SUPERLINK
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.runtime_pb2 import PullTaskInputRequest
from flwr.supercore.fab import Fab
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from bespoke.errors import UserError
from bespoke.files import make_folder, write_atomic
from bespoke.flower import children, keys, tasks
from bespoke.flower.link import FlowerLink, LinkLost
from bespoke.runs.lock import FolderLock

_START, _LEAVE = 60.0, 20.0  # seconds for a SuperLink to answer, and for an earlier one to leave
_LOSSES, _QUICK_LOSSES, _QUICK = 20, 3, 10.0  # of the SuperLink until a run gives up; where each comes this soon
_LOG, _DATABASE, _SECRET = "superlink.log", "superlink.db", "superlink.secret"
_REGISTERED = "registered.pub"  # the keys that the operator has let in
APP = Path(__file__).parent / "app"


class SuperLink:
    """A SuperLink process with its files in a folder; without certificates it takes no keys, on loopback only."""

    def __init__(self, folder: Path, host: str, port: int, certificates: Path | None) -> None:
        """Keep everything in ``folder``; an earlier SuperLink's nodes and keys in it are known again."""
        make_folder(folder)
        self.folder, self.host, self.port, self.certificates = folder, host, port, certificates
        self.ca = (certificates / keys.CA).read_bytes() if certificates else None
        self.process: subprocess.Popen[bytes] | None = None
        self.known: Collection[str] | None = None  # the keys of clients that may take part; None: all
        own = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        self.api = tasks.Api(f"{own}:{port}", self.ca, keys.new_secret(folder / _SECRET))

    def start(self) -> None:
        """Start it, and return when it answers."""
        files = self.certificates
        safety = ["--insecure"]
        if files is not None:
            safety = ["--ssl-ca-certfile", str(files / keys.CA), "--ssl-certfile", str(files / keys.CERTIFICATE)]
            safety += ["--ssl-keyfile", str(files / keys.KEY), "--enable-supernode-auth"]
        arguments = [*safety, "--host", self.host, "--port", str(self.port), "--isolation", "process"]
        arguments += ["--superexec-auth-secret-file", str(self.folder / _SECRET)]
        arguments += ["--database", str(self.folder / _DATABASE), "--disable-runtime-dependency-installation"]
        self._await_port()
        self.process = children.start("superlink", arguments, self.folder / _LOG, self.folder / "flwr")
        end, why = time.monotonic() + _START, "it did not answer"
        while time.monotonic() < end:
            if not self.alive():
                raise UserError(f"the SuperLink ended at once: see {self.folder / _LOG}")
            try:
                tasks.nodes(self.api.address, self.ca)
                return
            except httpx.HTTPError as error:
                why = str(error)
                if "certificate" in why.lower():
                    break
                time.sleep(0.2)
        self.stop()
        raise UserError(f"the SuperLink at {self.api.address} cannot be used: {why}; see {self.folder / _LOG}")

    def _await_port(self) -> None:
        """Wait for a SuperLink whose command was killed to leave the port."""
        end = time.monotonic() + _LEAVE
        while not children.is_free(self.host, self.port):
            if time.monotonic() > end:
                raise UserError(f"another program listens on {self.host}:{self.port}: choose another --address")
            time.sleep(0.5)

    def alive(self) -> bool:
        """Return whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """End it."""
        children.stop(self.process)
        self.process = None

    def forget(self) -> None:
        """Remove its database, which holds messages of clients."""
        for path in self.folder.glob(f"{_DATABASE}*"):
            path.unlink()

    def register(self, lines: Iterable[str]) -> None:
        """Let the nodes with these public keys in, and those that earlier calls let in, and nobody else.

        Whoever reaches the port may register a key with Flower, so that its word is not enough.
        """
        path = self.folder / _REGISTERED
        earlier = keys.read_lines([path]) if path.exists() else []
        self.known = list(dict.fromkeys([*earlier, *lines]))
        write_atomic(path, "".join(f"{line}\n" for line in self.known))
        known = tasks.nodes(self.api.address, self.ca)
        with tasks.control(self.api.address, self.ca) as client:
            for line in self.known:
                if line not in known:
                    client.RegisterNode(RegisterNodeRequest(public_key=keys.pem_of_line(line)))

    @contextmanager
    def run(self, ttl: float) -> Iterator[FlowerLink]:
        """Begin a run and yield the link of its server app, which is whatever the caller does with it."""
        try:
            with tasks.control(self.api.address, self.ca) as client:
                content = build_fab_from_disk(APP)
                fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
                number = client.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
            token = self._task(number)
            grid = HttpGrid(self.api.address, self.ca is None, self.ca, token=token)
            vars(grid)["_retry_invoker"] = None  # it would try for ever, or end this process
            with self.api.client(token) as own, tasks.beating(own):
                task = own.PullTaskInput(PullTaskInputRequest())
                TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task.task_id, number, SUPERLINK
                grid.set_run(run_from_proto(task.run))
                try:
                    yield FlowerLink(grid, ttl, self.alive, self.known)
                except BaseException as error:
                    self._end(own, f"the server failed with {type(error).__name__}")
                    raise
                else:
                    self._end(own)
                finally:
                    grid.close()
        except httpx.HTTPError as error:
            raise LinkLost(str(error) or type(error).__name__) from error

    def _task(self, number: int) -> str:
        """Return the token of a run's server app; tasks of runs that others have started are refused."""
        end = time.monotonic() + _START
        with self.api.client() as idle:
            while time.monotonic() < end:
                if found := tasks.acquire(idle, "flwr-serverapp"):
                    token, run = found
                    if run == number:
                        return token
                    with self.api.client(token) as foreign:
                        tasks.give_back(foreign, "this SuperLink runs its own federation only")
                time.sleep(0.1)
        raise LinkLost("the SuperLink gave no task for its run")

    @staticmethod
    def _end(own: Any, why: str = "") -> None:
        with contextlib.suppress(httpx.HTTPError):  # it is gone, or the run was stopped
            tasks.give_back(own, why)


def supervised(superlink: SuperLink, ttl: float, work: Callable[[FlowerLink, int], Any], told: children.Told) -> Any:
    """Return what ``work(link, attempt)`` returns; when the SuperLink dies, start it again and let it go on."""
    attempt = 0
    while True:
        began = time.monotonic()
        try:
            with superlink.run(ttl) as link:
                return work(link, attempt)
        except LinkLost as error:
            quick = time.monotonic() - began < _QUICK
            attempt += 1
            if attempt > _LOSSES or (quick and attempt > _QUICK_LOSSES):
                raise UserError(f"the SuperLink was lost {attempt} times, the last time with: {error}") from error
            told(f"the SuperLink was lost ({error}); it is started again, and the run goes on from its last round")
            superlink.stop()
            superlink.start()


def serve(
    experiment: Any,
    folder: Path,
    address: tuple[str, int],
    certificates: Path | None,
    lines: Iterable[str],
    *,
    resume: bool,
    wait: float,
    told: children.Told,
) -> Any:
    """Run an experiment over the clients with these public keys, through deaths of the SuperLink; return the run."""
    from bespoke.runs import serving

    make_folder(folder)
    lock = FolderLock(folder)
    superlink, out = SuperLink(folder, *address, certificates), folder / "run"
    try:
        superlink.start()
        if certificates is not None:
            superlink.register(lines)
        told(f"listening on {address[0]}:{address[1]}")

        def work(link: FlowerLink, attempt: int) -> Any:
            goes_on = resume or (attempt > 0 and out.is_dir() and any(out.iterdir()))
            return serving.serve(experiment, link, out, resume=goes_on, wait=wait, told=told)

        done = supervised(superlink, experiment.federation.round_timeout + _START, work, told)
        superlink.stop()
        superlink.forget()
        return done
    finally:
        superlink.stop()
        lock.close()
