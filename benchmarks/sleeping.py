"""FedAvg whose local work is a sleep, for ``federation_round.py``: what remains of a round is the network's."""

import json
import os
import time
from dataclasses import dataclass

from bespoke.algorithms.fedavg import FedAvg
from bespoke.core.local import Local
from bespoke.core.tree import Tree


@dataclass(frozen=True)
class Sleeping(FedAvg):
    """Sleeps where SLEEP says for how long, and notes when in the file SLEEP_LOG."""

    def client_update(self, local: Local, state: Tree, message: Tree) -> tuple[Tree, Tree]:
        """Return the model as it came."""
        began = time.time()
        time.sleep(float(os.environ.get("SLEEP", "0")))
        if path := os.environ.get("SLEEP_LOG"):
            with open(path, "a") as file:
                file.write(json.dumps([began, time.time()]) + "\n")
        return state, {"model": message["model"]}
