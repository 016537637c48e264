"""``python -m bespoke.flower.superlink PARENT ...``: Flower's SuperLink, which ends with its parent."""

import sys

from bespoke.flower.children import end_with

if __name__ == "__main__":
    end_with(int(sys.argv.pop(1)))
    from flwr.common.logger import update_console_handler
    from flwr.superlink.cli.flower_superlink import flower_superlink

    update_console_handler(timestamps=True, colored=False)
    flower_superlink()
