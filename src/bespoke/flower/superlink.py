"""``python -m bespoke.flower.superlink PARENT ...``: Flower's SuperLink, which ends with its parent."""

import sys

from bespoke.flower.children import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    from flwr.superlink.cli.flower_superlink import flower_superlink

    flower_superlink()
