"""The client's side: one message in, one answer out, by a node of ours."""

import functools
import logging

import torch
from flwr.app import Context, Error
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from bespoke.errors import UserError
from bespoke.flower.records import from_records, to_records
from bespoke.network.messages import MessageError, Reply, Request, read_head
from bespoke.network.node import Node
from bespoke.runs.experiment import load
from bespoke.runs.joining import member

_log = logging.getLogger("bespoke.node")
app = ClientApp()


def answered(node: Node, message: FlowerMessage) -> tuple[FlowerMessage, Reply | None]:
    """Return a node's answer, and its head; an error is told by its kind, since it may hold data."""
    try:
        answer = node.answer(from_records(message.content))
        return FlowerMessage(to_records(answer), reply_to=message), read_head(answer.head, Reply)
    except MessageError as error:
        why = str(error)
    except Exception as error:
        _log.exception("a message could not be answered")
        why = type(error).__name__
    return FlowerMessage(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, why), reply_to=message), None


def is_foreign(node: Node, message: FlowerMessage) -> bool:
    """Return whether a message is of another experiment than the node's, so that no later one can be of use."""
    try:
        return read_head(from_records(message.content).head, Request).experiment != node.terms.experiment
    except MessageError:
        return False


@app.query()
def query(message: FlowerMessage, context: Context) -> FlowerMessage:
    """Answer a message as an ordinary Flower app, in a process that was started for it."""
    given = {name: context.node_config.get(name, "") for name in ("experiment", "data", "test", "home")}
    if absent := [name for name in ("experiment", "data", "home") if not given[name]]:
        raise UserError(f"the node config has no {absent[0]}: start the SuperNode with experiment, data and home in it")
    return answered(node(**given), message)[0]


@functools.cache
def node(experiment: str, data: str, home: str, test: str = "") -> Node:
    """Return the node of a client with these files."""
    torch.set_num_threads(1)
    loaded, _ = load(experiment)
    return member(loaded, data, home, test=test or None)
