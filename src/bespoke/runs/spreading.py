"""One run on all cores of a machine: whether several processes pay, and one process again at its end."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from bespoke.clients import ShardedClients, Simulated, processes
from bespoke.core import rng
from bespoke.errors import UserError
from bespoke.runs.execution import label_of, newest
from bespoke.runs.federation import Federation
from bespoke.runs.folder import CHECKPOINTS
from bespoke.runs.results import Run

_ROUND = 0.5  # seconds of a round from which on the exchange of uploads is small beside it
_RUN = 10.0  # seconds to gain, so that starting the processes is small beside them


def spread(wanted: int | str, device: torch.device, make: Callable[[], Federation]) -> tuple[int, list[str]]:
    """Return over how many processes to spread a run's clients, and a note where nobody asked for that number.

    ``auto`` is one for each core where the clients are run one after another, so that the bits are the same, and
    where that saves time, which the training of one client tells. ``make`` builds the run's federation in one process.
    """
    if processes.world() > 1 and wanted == "auto":
        return 1, []
    refusal = _refusal(device)
    if isinstance(wanted, int):
        if wanted > 1 and refusal:
            raise UserError(f"--processes {wanted} (processes={wanted} in Python): {refusal}")
        return wanted, []
    cores = len(os.sched_getaffinity(0)) if not refusal else 1
    if cores < 2 or torch.get_num_threads() > 1:
        return 1, []
    federation = make()
    cohort = rng.cohort_size(federation.num_clients, federation.training.rate)
    number = min(cores, cohort)
    if number < 2 or federation.clients.name != "loop":
        return 1, []
    seconds = cohort * _client_seconds(federation)
    if seconds < _ROUND or seconds * federation.training.rounds * (1.0 - 1.0 / number) < _RUN:
        return 1, []
    return number, [
        f"a round takes about {seconds:.1f} s in one process, so the clients are spread over {number} processes of one "
        "thread each, with the same bits; --processes 1 (processes=1 in Python) keeps one"
    ]


def _refusal(device: torch.device) -> str:
    """Return why the processes of one machine cannot share a run; "" if they can."""
    if device.type != "cpu":
        return "they share the CPU's cores; for several GPUs start bespoke with torchrun"
    if sys.platform != "linux":
        return "they need Linux: start bespoke with torchrun instead"
    if torch.cuda.device_count():  # autograd's threads for a GPU do not survive a fork
        return "they cannot start where torch sees a GPU: hide it with CUDA_VISIBLE_DEVICES=, or use torchrun"
    return ""


def _client_seconds(federation: Federation) -> float:
    """Return how long a client of median size trains; infinitely short if it fails, which the run will tell."""
    clients = federation.clients
    assert isinstance(clients, Simulated)  # in one process
    sizes = clients.pool.train.sizes[: federation.num_clients]
    typical = sorted(range(len(sizes)), key=lambda client: sizes[client])[len(sizes) // 2]
    shared, own = federation.down(federation.start(), [typical])
    try:
        for _ in range(2):  # the first call may set things up
            begin = time.perf_counter()
            clients.train(1, [typical], shared, own)
            seconds = time.perf_counter() - begin
            if seconds > 1.0:
                break
    except Exception:
        return 0.0
    return seconds


def gathered(done: Run) -> Run:
    """Return a run whose other processes have ended: all its clients live in this one, with the states it wrote."""
    clients = done.federation.clients
    assert isinstance(clients, ShardedClients)
    label = label_of(done.folder) or done.experiment.hash()
    found, _ = newest(done.folder, done.federation, done.federation.start(), label)
    clients.inner.store.open(done.folder.path / CHECKPOINTS, found.states if found else (), read_only=True)
    bound = done.federation.bound
    done.federation = replace(done.federation, clients=clients.inner, inside=clients.inner)
    done.federation.bound = bound
    return done
