"""What the machine offers this process."""

import os
from pathlib import Path

MOST_PROCESSES = 1024  # of one run on one machine


def cores() -> int:
    """Return how many cores this process may use: those it is bound to, or fewer by a container's quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(bound, int(quota) // int(period)))
    except (OSError, ValueError):  # there is none
        return bound
