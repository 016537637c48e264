"""What a computation needs against the memory that is there, before anything is allocated."""

import math
import os
from pathlib import Path

from bespoke.errors import UserError


def require(needed: float, what: str, cure: str) -> None:
    """Refuse what needs more bytes of the host's memory than are free; ``needed`` is a lower bound."""
    there = free()
    if needed > there:
        raise UserError(
            f"{what} would take at least {in_words(needed)} of memory, and {in_words(there)} are free: {cure}"
        )


def free() -> float:
    """Return the bytes of memory that the machine has available; all it has, or infinity, where it does not tell.

    Limits of this process or of its container are not looked at.
    """
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return math.inf


def in_words(count: float) -> str:
    """Return a number of bytes as people read it: 1.5 GB."""
    units = ("bytes", "kB", "MB", "GB", "TB", "PB")
    power = min(len(units) - 1, int(math.log10(max(1.0, count)) // 3))
    return f"{count / 1000**power:,.1f} {units[power]}"
