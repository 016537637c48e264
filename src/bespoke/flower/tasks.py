"""Flower's tasks, done by programs of our own, and what a SuperLink tells those who ask.

Flower sends the code of an app with each run and starts a process for each message, which executes that code. Here both
sides take only the task, and run what is installed: no code that came over a network is executed, and a client's
process stays, so that importing torch costs no time. A secret that only the starting command knows protects the tasks.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
from flwr.common.constant import SubStatus
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient

from bespoke.flower import keys

_HEARTBEAT = 5.0  # seconds between two signs of life, without which Flower gives a task up
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


class Api(NamedTuple):
    """Where tasks are: at a SuperLink or a SuperNode."""

    address: str
    ca: bytes | None  # None: without TLS, on loopback
    secret: bytes

    def client(self, token: str = "") -> RuntimeHttpClient:
        """Return a connection that may acquire tasks, or do the one with this token."""
        allowed = (
            RuntimeTokenHttpInterceptor(token)
            if token
            else SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods={_ACQUIRE})
        )
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.ca is None,
            root_certificates=self.ca,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="bespoke"), allowed],
        )


def acquire(client: RuntimeHttpClient, kind: str) -> tuple[str, int] | None:
    """Return the token and the run of a task that waits, or None."""
    found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
    return (found.token, found.task.run_id) if found.token and found.HasField("task") else None


def give_back(client: RuntimeHttpClient, why: str = "") -> None:
    """Say that a task is done, or ``why`` it failed."""
    status = SubStatus.FAILED if why else SubStatus.COMPLETED
    client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=why))


@contextmanager
def beating(client: RuntimeHttpClient) -> Iterator[None]:
    """Tell Flower now and then that a task is worked on."""
    done = threading.Event()

    def beat() -> None:
        while not done.is_set():
            with contextlib.suppress(httpx.HTTPError):  # whoever works on the task will hear of it
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            done.wait(_HEARTBEAT)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(_HEARTBEAT)


def control(address: str, ca: bytes | None) -> ControlHttpClient:
    """Return a connection to a SuperLink that asks for and tells what the command ``flwr`` does."""
    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    return ControlHttpClient.from_server_address(
        server_address=address, insecure=ca is None, root_certificates=ca, interceptors=[version]
    )


def nodes(address: str, ca: bytes | None) -> dict[str, Any]:
    """Return what a SuperLink tells of the nodes that it knows, online or not, by public key."""
    with control(address, ca) as client:
        found = client.ListNodes(ListNodesRequest()).nodes_info
    return {keys.line_of_pem(node.public_key): node for node in found if not node.unregistered_at}


def runs(address: str, ca: bytes | None) -> list[Any]:
    """Return what a SuperLink tells of its runs."""
    with control(address, ca) as client:
        return list(client.ListRuns(ListRunsRequest()).run_dict.values())
