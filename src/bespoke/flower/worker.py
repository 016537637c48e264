"""``python -m bespoke.flower.worker PARENT SETTINGS``: the process in which a client works, message after message."""

import json
import logging
import os
import sys
import time
from pathlib import Path

import httpx

from bespoke.errors import UserError
from bespoke.flower.children import end_with

READY = "ready"  # in the client's home, once its data have been checked
FINISHED, REFUSED = 0, 2  # how the process ends
_INTERVAL = 0.2  # seconds between two looks for a message


def work(settings: dict[str, str]) -> None:
    """Check the data, say so, and answer messages until the federation is finished."""
    from flwr.common.serde import context_from_proto  # noqa: F401 - before the first message, not within it
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

    from bespoke.flower import client_app, tasks

    home = Path(settings["home"])
    node = client_app.node(*(settings[name] for name in ("experiment", "data", "home", "test")))
    (home / READY).touch()
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
                    message, context, _, _ = pull_task_input(client)
                    answer, finished = client_app.answered(node, message)
                    push_message(client, answer, context)
                    tasks.give_back(client)
            except httpx.HTTPError as error:
                logging.getLogger("bespoke.node").warning("the node is gone, and an answer with it: %s", error)
                continue
            if finished:
                return


def main() -> None:
    """Work, and end with the exit code that says how."""
    parent, settings = sys.argv[1:]
    end_with(int(parent))
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
    try:
        work(json.loads(settings))
        code = FINISHED
    except UserError as error:
        print(f"bespoke: {error}", file=sys.stderr)
        code = REFUSED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Flower's threads need not end first


if __name__ == "__main__":
    main()
