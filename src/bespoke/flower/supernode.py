"""``python -m bespoke.flower.supernode PARENT ...``: Flower's SuperNode, which ends with its parent."""

import sys

from bespoke.flower.children import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()
