"""The processes of one run: which one is first, and how they exchange data.

``torchrun`` starts a program several times and numbers the processes. All of them call the functions here at
the same places; in a run of one process they cost nothing. Messages are JSON text and the bytes of tensors,
so nothing is unpickled: text by gloo, tensors by gloo on the CPU and by NCCL on CUDA.
"""

import atexit
import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.errors import UserError

PATIENCE = timedelta(seconds=10)

_launcher: int | None = None  # the process that started this one together with others


class PeerLostError(UserError):
    """Another process of the run ended; reported only if that process could not report why."""


def join() -> None:
    """Join the other processes if ``torchrun`` has started several and this one has not joined yet."""
    global _launcher
    several = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and not _met():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(dist.destroy_process_group)
        _launcher = os.getppid()


def _met() -> bool:
    return dist.is_available() and dist.is_initialized()


def world() -> int:
    """Return the number of processes that share the run."""
    return dist.get_world_size() if _met() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if _met() else 0


def on_this_machine() -> int:
    """Return how many of the processes run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world())) if _met() else 1


def first() -> bool:
    """Return whether this is the process that writes and prints."""
    return rank() == 0


def orphaned() -> bool:
    """Return whether the process that started this one and the others has ended, so that nobody watches them."""
    return _launcher is not None and os.getppid() != _launcher


def own_gpu() -> torch.device:
    """Return the GPU of this process, the one with its number on this machine."""
    number, seen = _local_rank(), torch.cuda.device_count()
    if number >= seen:
        raise UserError(
            f"process {number} on this machine has no GPU, since torch sees only {seen}: "
            "start one process per GPU, or use --device cpu"
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", rank()))


# --- what all processes exchange ----------------------------------------------------------------------------------


def gather(value: Any, part: Tree, device: torch.device | str = "cpu") -> list[tuple[Any, Tree]]:
    """Gather from each process, in the order of their numbers, a JSON value and a tree of tensors on ``device``."""
    if world() == 1:
        return [(value, part)]
    flat = tree.flatten(part)
    kinds = [[name, str(leaf.dtype).removeprefix("torch."), list(leaf.shape)] for name, leaf in flat.items()]
    heads = [json.loads(text) for text in _texts(json.dumps([value, kinds]))]
    lengths = [sum(_nbytes(dtype, shape) for _, dtype, shape in kinds) for _, kinds in heads]
    content = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *(_bytes(t, device) for t in flat.values())])
    received = _exchange(content, lengths)
    return [(value, _tree(kinds, content)) for (value, kinds), content in zip(heads, received, strict=True)]


def from_first(value: Any) -> Any:
    """Return the JSON value of the first process."""
    return gather(value, {})[0][0]


def any_of(flag: bool) -> bool:
    """Return whether the flag is set in any process."""
    if world() == 1:
        return flag
    found = torch.tensor(int(flag))
    with _peers():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def wait() -> None:
    """Wait until all processes have reached this place."""
    any_of(False)


@contextlib.contextmanager
def one_first() -> Iterator[None]:
    """Let one process per machine go before the others: it writes the files that they then find."""
    leads = world() == 1 or _local_rank() == 0
    if not leads:
        wait()
    yield
    if leads:
        wait()


def same(value: str) -> None:
    """Refuse to continue if the processes would run different things."""
    values = [found for found, _ in gather(value, {})]
    for number, other in enumerate(values):
        if other != values[0]:
            raise UserError(f"all processes must run the same: process 0 has {values[0]}, process {number} {other}")


def _texts(text: str) -> list[str]:
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world())]
    with _peers():
        dist.all_gather(lengths, torch.tensor([len(content)]))
    return [t.numpy().tobytes().decode() for t in _exchange(content, [int(n) for n in lengths])]


def _exchange(content: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Exchange the bytes of all processes, whose lengths are known; they travel padded to the longest."""
    longest = max(lengths)
    padded = content.new_zeros(longest)
    padded[: len(content)] = content
    received = [torch.empty_like(padded) for _ in lengths]
    if longest:
        with _peers():
            dist.all_gather(received, padded)
    return [t[:n] for t, n in zip(received, lengths, strict=True)]


def _bytes(leaf: Tensor, device: torch.device | str) -> Tensor:
    return leaf.detach().to(device).contiguous().reshape(-1).view(torch.uint8)


def _nbytes(dtype: str, shape: Sequence[int]) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return math.prod(shape) * kind.itemsize


def _tree(kinds: list[tuple[str, str, list[int]]], content: Tensor) -> Tree:
    parts = content.split([_nbytes(dtype, shape) for _, dtype, shape in kinds])
    # Cloned, because a view as another type must start at an aligned address.
    leaves = (
        part.clone().view(getattr(torch, dtype)).reshape(shape)
        for part, (_, dtype, shape) in zip(parts, kinds, strict=True)
    )
    return tree.unflatten({name: leaf for (name, _, _), leaf in zip(kinds, leaves, strict=True)})


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            f"process {rank()} lost another process of this run, which ended without a message (killed, or out of "
            "memory): continue from the last checkpoint with --resume"
        ) from error


# --- ending -------------------------------------------------------------------------------------------------------


def fail(text: str, code: int) -> NoReturn:
    """End this process, and print why unless another process has already reported its own reason.

    It ends at once, without a shutdown that needs the others; ``torchrun`` then ends those.
    """
    sys.stdout.flush()
    if not _met():  # a mistake in the command itself, which every process meets
        if os.environ.get("RANK") == "0":
            _tell(text)
        os._exit(code)
    try:
        marks = _marks()
        if marks.add("claimed", 1) == 1:
            _tell(text)
            marks.set("told", "")
        else:
            marks.wait(["told"], PATIENCE)  # ending before the other has reported could end it too
    except RuntimeError:
        _tell(text)  # the keeper of the marks is gone: better reported twice than never
    os._exit(code)


def _tell(text: str) -> None:
    print(text, file=sys.__stderr__, flush=True)


def _marks() -> dist.Store:
    """Return the store that outlasts a process: ``torchrun`` keeps it, or else the first process."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=PATIENCE, wait_for_workers=False)
    return dist.PrefixStore(f"bespoke/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
