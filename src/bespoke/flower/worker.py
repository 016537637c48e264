"""``python -m bespoke.flower.worker PARENT SETTINGS``: the process in which a client works, message after message."""

import json
import logging
import sys
import time
from pathlib import Path
from typing import NoReturn

import httpx

from bespoke.errors import UserError
from bespoke.flower.children import end_with

READY, FINISHED = "ready", "finished"  # in the client's home: its data have been checked, its model has been made
REFUSED = 2  # how the process ends where its data or settings are wrong
_INTERVAL = 0.2  # seconds between two looks for a message
_TOLD = 5.0  # seconds for the server to hear why a client leaves
_log = logging.getLogger("bespoke.node")


def work(settings: dict[str, str]) -> NoReturn:
    """Check the data, say so, and answer messages; a server that was resumed may ask for the model once more."""
    from flwr.common.serde import context_from_proto  # noqa: F401 - before the first message, not within it
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

    from bespoke.flower import client_app, tasks

    _log.info("imported")
    home = Path(settings["home"])
    node = client_app.node(*(settings[name] for name in ("experiment", "data", "home", "test")))
    (home / READY).touch()
    _log.info("checked the data")
    api = tasks.Api(settings["runtime"], None, Path(settings["secret"]).read_bytes())
    with api.client() as idle:
        while True:
            try:
                found = tasks.acquire(idle, "flwr-clientapp")
            except httpx.HTTPError:
                found = None  # the node is not there yet, or begins anew
            if found is None:
                time.sleep(_INTERVAL)
                continue
            try:
                with api.client(found[0]) as client, tasks.beating(client):
                    _log.info("took a message")
                    message, context, _, _ = pull_task_input(client)
                    _log.info("read it")
                    answer, reply = client_app.answered(node, message)
                    _log.info("worked on it")
                    push_message(client, answer, context)
                    tasks.give_back(client)
                    _log.info("answered")
            except httpx.HTTPError as error:
                _log.warning("the node is gone, and an answer with it: %s", error)
                continue
            if reply is not None and reply.kind == "finished":
                (home / FINISHED).touch()
            if client_app.is_foreign(node, message):
                time.sleep(_TOLD)
                raise UserError("the server runs another experiment: get its file from the server's operator")


def main() -> None:
    """Work until this process is ended."""
    parent, settings = sys.argv[1:]
    end_with(int(parent))
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
    _log.setLevel(logging.INFO)
    _log.info("started")
    try:
        work(json.loads(settings))
    except UserError as error:
        print(f"bespoke: {error}", file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
