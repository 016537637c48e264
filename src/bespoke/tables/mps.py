"""NVIDIA's multi-process service (MPS): with it processes compute on one GPU together, without it they take turns."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

CONTROL = "nvidia-cuda-mps-control"
_SECONDS = 20.0  # that it has to answer

# A process of its own, since CUDA looks for the service once in a process. It needs no torch, so it takes no time.
_TRIAL = """
import ctypes
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
problem = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
problem = problem or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
raise SystemExit(1 if problem else 0)
"""


class Service(NamedTuple):
    """Whether processes compute together."""

    words: str  # to end a sentence with: "with NVIDIA's MPS"
    environment: Mapping[str, str]  # of the processes that are to compute together


@contextlib.contextmanager
def service() -> Iterator[Service]:
    """Yield a service of our own, ended with the context; where one runs already, or none can run, say so instead."""
    program = shutil.which(CONTROL)
    if program is None:
        yield Service("without NVIDIA's MPS, which is not installed here", {})
    elif _told(program, "get_server_list", {}):
        yield Service("with the NVIDIA MPS that runs here", {})
    else:
        with contextlib.ExitStack() as held:
            own = held.enter_context(_started(program))
            if own and _done([sys.executable, "-c", _TRIAL], "", own):
                yield Service("with NVIDIA's MPS", own)
            else:
                held.close()
                yield Service("without NVIDIA's MPS, under which no process could use the GPU", {})


@contextlib.contextmanager
def _started(program: str) -> Iterator[dict[str, str]]:
    """Start the service in a folder of its own; yield where, for its clients, or nothing if it does not start."""
    with tempfile.TemporaryDirectory(prefix="bespoke-mps-", ignore_cleanup_errors=True) as name:
        parts = {"CUDA_MPS_PIPE_DIRECTORY": Path(name, "pipe"), "CUDA_MPS_LOG_DIRECTORY": Path(name, "log")}
        own = {key: str(path) for key, path in parts.items()}
        for path in parts.values():
            path.mkdir()
        try:
            # It numbers the GPUs that it sees from 0, and its clients would choose among those once more: it sees all.
            yield own if _done(["env", "-u", "CUDA_VISIBLE_DEVICES", program, "-d"], "", own) else {}
        finally:
            if not _told(program, "quit", own) and _told(program, "get_server_list", own):
                sys.stderr.write(f"NVIDIA's MPS in {name} did not end: kill nvidia-cuda-mps-control\n")


def _told(program: str, word: str, own: Mapping[str, str]) -> bool:
    """Tell the service a word; return whether there is one that took it."""
    return _done([program], word + "\n", own)


def _done(command: list[str], text: str, own: Mapping[str, str]) -> bool:
    """Return whether a command ended well; it prints nothing, and a terminal's Ctrl-C is not for it."""
    try:
        done = subprocess.run(
            command,
            input=text,
            text=True,
            env=os.environ | own,
            stdout=subprocess.DEVNULL,  # no pipe: a service that stays would keep it open
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
