"""``python -m bespoke.flower.supernode PARENT ...``: Flower's SuperNode, which ends with its parent.

Flower believes a node or a client's process alive for twice the time between two signs of life, and for so long it
refuses a new node with its key and lets a round wait. Half a minute is enough for that, instead of a whole one.
"""

import sys

from flwr.common import constant
from flwr.common.logger import update_console_handler

from bespoke.flower.children import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    constant.HEARTBEAT_DEFAULT_INTERVAL = 15  # before the modules that take it are imported
    from flwr.supernode.cli.flower_supernode import flower_supernode

    update_console_handler(timestamps=True, colored=False)
    flower_supernode()
