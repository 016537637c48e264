"""The server's link over Flower: a client is the node with its public key, which Flower has verified."""

import functools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import httpx
from flwr.app import Message as FlowerMessage
from flwr.app import MessageType
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException

from bespoke.flower import keys
from bespoke.flower.records import from_records, to_records
from bespoke.network.messages import Message, MessageError

_TRIES, _PAUSE = 4, 1.0  # of a call to the SuperLink, and seconds between them

Answer = TypeVar("Answer")


class LinkLost(Exception):
    """The SuperLink is gone, or does not know this run any more; a new run may go on from the last checkpoint."""


class FlowerLink:
    """Carries messages over a Grid; ``ttl`` is for how many seconds a message and its answer are of use."""

    def __init__(
        self,
        grid: Grid,
        ttl: float = 12 * 3600.0,
        alive: Callable[[], bool] = lambda: True,
        known: Collection[str] | None = None,
    ) -> None:
        """Take a grid whose run has begun; ``alive`` says whether there is a SuperLink to be tried again.

        Nodes whose keys are not ``known`` are not there, whatever the SuperLink says; None: all are.
        """
        self.grid, self.ttl, self.alive, self.known = grid, ttl, alive, known
        self._nodes: dict[str, Any] = {}  # what Flower tells of the nodes that are online, by key
        self._pushed: dict[str, tuple[str, str]] = {}  # by key: the last message's id, and when the node had come

    def online(self) -> set[str]:
        """Return the keys of the nodes that are connected, or were less than a minute ago."""
        found = self._tried(lambda: list(self.grid.get_nodes()))
        nodes = {keys.line_of_pem(node.public_key): node for node in found}
        self._nodes = {key: node for key, node in nodes.items() if self.known is None or key in self.known}
        return set(self._nodes)

    def push(self, messages: Mapping[str, Message]) -> None:
        """Send each client its message; the answers to earlier ones are not awaited any more."""
        for key, message in messages.items():
            node = self._nodes.get(key)
            if node is None:  # it has gone since online() was asked: pull will tell
                self._pushed[key] = "", ""
                continue
            sent = FlowerMessage(to_records(message), node.node_id, MessageType.QUERY, ttl=self.ttl)
            (number,) = self._tried(functools.partial(self._push, sent))
            self._pushed[key] = number or "", node.last_activated_at

    def _push(self, sent: FlowerMessage) -> list[str]:
        return list(self.grid.push_messages([sent]))

    def pull(self) -> list[tuple[str, Message | str]]:
        """Return the answers that have come; a text says why a client will not answer."""
        found: list[tuple[str, Message | str]] = []
        waiting = {number: key for key, (number, _) in self._pushed.items() if number}
        replies = self._tried(lambda: list(self.grid.pull_messages(list(waiting)))) if waiting else []
        for reply in replies:
            key = waiting.get(reply.metadata.reply_to_message_id)  # errors carry the SuperLink's node id
            if key is not None:
                found.append((key, _read(reply)))
        found += [(key, why) for key, why in self._gone().items() if key not in dict(found)]
        for key, _ in found:
            del self._pushed[key]
        return found

    def _gone(self) -> dict[str, str]:
        """Return those who cannot answer though they are online, as :meth:`online` saw them last, by key, and why."""
        gone = {key: "its message could not be sent" for key, (number, _) in self._pushed.items() if not number}
        for key, (_, came) in self._pushed.items():
            if key in self._nodes and self._nodes[key].last_activated_at != came:  # it does not know the message
                gone.setdefault(key, "its node was started again during its work")
        return gone

    def _tried(self, call: Callable[[], Answer]) -> Answer:
        """Return what a call to the SuperLink returns; a network's fault may pass, other errors end the run."""
        for attempt in range(1, _TRIES + 1):
            try:
                return call()
            except (httpx.HTTPError, RunNotRunningException) as error:
                passing = isinstance(error, httpx.TransportError) or (
                    isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (502, 503, 504)
                )
                if not passing or attempt == _TRIES or not self.alive():
                    raise LinkLost(str(error) or type(error).__name__) from error
            time.sleep(_PAUSE)
        raise AssertionError


def _read(reply: FlowerMessage) -> Message | str:
    """Return an answer, or why there is none."""
    if reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE:
        return "it went offline during its work"
    if reply.has_error():
        return f"its program failed: {reply.error.reason or f'error {reply.error.code}'}"
    try:
        return from_records(reply.content)
    except MessageError as error:
        return f"its answer cannot be read: {error}"
