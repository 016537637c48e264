"""How a run uses the cores of a CPU: one client after another, in blocks, or spread over several processes."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from bespoke.clients import ShardedClients, Simulated, processes
from bespoke.core import rng
from bespoke.errors import UserError
from bespoke.machine import cores
from bespoke.records import RunFolder
from bespoke.runs.execution import Options, label_of, newest, said
from bespoke.runs.federation import Federation
from bespoke.runs.folder import CHECKPOINTS
from bespoke.runs.results import Run

_ROUND = 0.5  # seconds of a round from which on the exchange of uploads between processes is small beside it
_RUN = 10.0  # seconds to gain, so that looking for a faster way and starting processes is small beside them
_SMALL = 0.05  # seconds of a client's training: above them blocks gain nothing on a CPU
_BLOCK = 16  # clients in the trial of a block
_TRIAL = 5.0  # seconds after which a trial is not repeated: setting things up takes less
_FASTER = 2.0  # times that blocks must be faster, since their last bits differ


class How(NamedTuple):
    """How the clients of a run are carried out."""

    backend: str
    processes: int = 1
    notes: Sequence[str] = ()


def choose(options: Options, out: str | Path | None, device: torch.device, make: Callable[[str], Federation]) -> How:
    """Choose the number of processes, and with ``auto`` for both also the backend, and note what nobody asked for.

    ``auto`` is one process for each core where clients run one after another, so that the bits are the same, and where
    that saves time; or one process with clients in blocks, where they are small and blocks are much faster. The
    training of a few clients tells; a run in ``out`` that goes on keeps the backend it began with. ``make(backend)``
    builds the run's federation in one process.
    """
    wanted, backend, refusal = options["processes"], options["backend"], _refusal(device)
    notes = list[str]()
    if backend == "auto" and device.type == "cpu" and options["resume"] and out is not None:
        began = said(RunFolder(out), "backend")
        backend = "batched" if began == "batched" else "loop" if began else "auto"
        notes = [_GOES_ON] if began == "batched" else []
    if isinstance(wanted, int):
        if wanted > 1 and refusal:
            raise UserError(f"--processes {wanted} (processes={wanted} in Python): {refusal}")
        return How(backend, wanted, notes)
    if refusal or processes.world() > 1 or torch.get_num_threads() > 1 or backend == "batched":
        return How(backend, 1, notes)
    federation = make("loop")
    cohort = rng.cohort_size(federation.num_clients, federation.training.rate)
    number = min(cores(), cohort)
    each = _client_seconds(federation, 1)
    one_round = cohort * each
    run = one_round * federation.training.rounds
    if backend == "auto" and each < _SMALL and cohort >= _BLOCK and run * (1.0 - 1.0 / _FASTER) > _RUN:
        faster = each / (_client_seconds(make("batched"), _BLOCK) or each)
        if faster > max(_FASTER, number if one_round > _ROUND else 1):
            return How("batched", 1, [_BLOCKS.format(faster)])
    if number < 2 or one_round < _ROUND or run * (1.0 - 1.0 / number) < _RUN:
        return How(backend)
    return How(backend, number, [_PROCESSES.format(one_round, number)])


_BLOCKS = (
    "clients are small and train about {:.1f} times faster in blocks than one after another, so that is how they are "
    "run; --backend loop (backend='loop' in Python) runs one after another, whose last bits differ"
)
_GOES_ON = (
    "the run began with clients in blocks and goes on so; --backend loop (backend='loop' in Python) runs one after "
    "another, whose last bits differ"
)
_PROCESSES = (
    "a round takes about {:.1f} s in one process, so the clients are spread over {} processes of one thread each, with "
    "the same bits; --processes 1 (processes=1 in Python) keeps one"
)


def _refusal(device: torch.device) -> str:
    """Return why the processes of one machine cannot share a run; "" if they can."""
    if device.type != "cpu":
        return "they share the CPU's cores; for several GPUs start bespoke with torchrun"
    if sys.platform != "linux":
        return "they need Linux: start bespoke with torchrun instead"
    if torch.cuda.device_count():  # autograd's threads for a GPU do not survive a fork
        return "they cannot start where torch sees a GPU: hide it with CUDA_VISIBLE_DEVICES=, or use torchrun"
    return ""


def _client_seconds(federation: Federation, count: int) -> float:
    """Return how long each of so many clients of about median size trains; 0 if that fails, which the run will tell.

    It is the least of up to three times, since the first call may set things up, and in seconds of this process's work,
    since other programs may keep the cores busy.
    """
    assert isinstance(federation.clients, Simulated)  # in one process
    sizes = federation.clients.pool.train.sizes[: federation.num_clients]
    start = max(0, (len(sizes) - count) // 2)
    clients = sorted(range(len(sizes)), key=lambda client: sizes[client])[start : start + count]
    shared, own = federation.down(federation.start(), clients)
    taken: list[float] = []
    try:
        while len(taken) < 3 and sum(taken) < _TRIAL:
            begin = time.process_time()
            federation.clients.train(1, clients, shared, own)
            taken.append(time.process_time() - begin)
    except Exception:
        return 0.0
    return min(taken) / len(clients)


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
