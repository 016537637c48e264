"""The processes of one run: which one is first, and how they exchange data.

``torchrun`` starts a program several times and numbers the processes; :func:`together` forks this one for a single
run on one machine's cores. All of them call the functions here at the same places; in a run of one process they
cost nothing. Messages are JSON text and the bytes of tensors, so nothing is unpickled: text by gloo, tensors by gloo
on the CPU and by NCCL on CUDA.
"""

import atexit
import contextlib
import ctypes
import json
import math
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.errors import UserError, reason
from bespoke.records import RESUME_OPTION

PATIENCE = timedelta(seconds=10)

_launcher: int | None = None  # the process that started this one together with others


class PeerLostError(UserError):
    """Another process of the run ended; reported only if that process could not report why."""


def join() -> None:
    """Join the other processes if ``torchrun`` has started several and this one has not joined yet."""
    global _launcher
    several = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and not _met():
        _launcher = os.getppid()
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        except (RuntimeError, ValueError) as error:  # one that has met the others may have ended, and reports why
            raise PeerLostError(f"process {os.environ['RANK']} cannot meet the others: {reason(error)}") from error
        atexit.register(dist.destroy_process_group)


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
            "start one process per GPU, or use --device cpu (device='cpu' in Python)"
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", rank()))


# --- processes of one run on this machine's cores -----------------------------------------------------------------

T = TypeVar("T")


_PLACES, _SIGNALS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_LONGEST = timedelta(days=365)  # that one process may wait for a slower one
_GONE = "a process of this run ended before it began: is there enough memory?"
_MEETING = timedelta(seconds=60)  # in which all have to meet: one that is gone by then never comes


class _Fork(NamedTuple):
    pid: int
    said: int  # a pipe's end from which its error is read


def together(number: int, work: Callable[[], T]) -> T:
    """Call ``work`` in this process and in ``number - 1`` forks of it, all joined; return what it returns here.

    Each computes with one thread. The forks have this process's memory as it is now; they are silent, leave signals to
    this process, and are gone when this returns. An error in one of them is raised here.
    """
    if _met():
        raise UserError(
            f"this program's processes are connected already ({world()} of them): leave out --processes (processes= in "
            "Python)"
        )
    threads, others = torch.get_num_threads(), list[_Fork]()
    alone = {name: os.environ.pop(name) for name in _PLACES if name in os.environ}  # of another launcher
    with contextlib.ExitStack() as kept:  # outside: the forks are gone before the place where they meet is removed
        try:
            torch.set_num_threads(1)
            _start(number, work, others, kept)
            return work()
        except PeerLostError as lost:
            raise _told(others) or lost from None
        finally:
            for other in others:
                # Where ends of processes are not waited for, there is none to wait for.
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(other.pid, signal.SIGKILL)
                    os.waitpid(other.pid, 0)
                os.close(other.said)
            if _met():
                dist.destroy_process_group()
            torch.set_num_threads(threads)
            os.environ.update(alone)


def _start(number: int, work: Callable[[], Any], others: list[_Fork], kept: contextlib.ExitStack) -> None:
    """Fork the ``others`` and meet them at a file that is ``kept``, since the last may come late."""
    try:
        place = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="bespoke-"))) / "meeting"
        for turn in range(1, number):
            _fork(place, turn, number, work, others)
        if not all(os.read(other.said, 1) for other in others):  # meeting them would wait for one that is gone
            raise PeerLostError(_GONE)
        _meet(place, 0, number)
    except OSError as error:
        raise UserError(
            f"cannot start {number} processes: {error.strerror or error}; use --processes 1 (processes=1 in Python)"
        ) from error


def _meet(place: Path, turn: int, number: int) -> None:
    """Join the others, who meet at a file and then talk over the loopback device; one that ends is noticed at once."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.FileStore(str(place), number)
        dist.init_process_group("gloo", store=store, rank=turn, world_size=number, timeout=_MEETING)
        dist.distributed_c10d._set_pg_timeout(_LONGEST)
    except RuntimeError as error:
        raise PeerLostError(_GONE) from error
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME")
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before


def _fork(place: Path, turn: int, number: int, work: Callable[[], Any], others: list[_Fork]) -> None:
    """Fork a process that joins the others, calls ``work`` and then waits for its end; add it to the ``others``."""
    said, say = os.pipe()
    parent = os.getpid()
    try:
        with _signals_later(), warnings.catch_warnings():
            # Of threads that a fork lacks: none of ours does what the fork needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if not pid:
                _as_fork(place, turn, number, work, parent, say)
            others.append(_Fork(pid, said))
    except OSError:
        os.close(said)
        raise
    finally:
        os.close(say)


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Let signals wait: one in between might lose a fork, or send it into the caller's code. They reach one thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = list[int]()
    before = {each: signal.signal(each, lambda number, _: heard.append(number)) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in heard:
            signal.raise_signal(number)


def _as_fork(place: Path, turn: int, number: int, work: Callable[[], Any], parent: int, say: int) -> NoReturn:
    """Live as a fork: work in silence, tell an error through a pipe, and end with the parent."""
    global _launcher
    try:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # where the parent is killed, so is this process
        if os.getppid() != parent:
            os._exit(0)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        sys.stdout = sys.stderr = os.fdopen(nowhere, "w")
        _launcher = parent
        os.write(say, b"+")
        _meet(place, turn, number)
        work()
        while os.getppid() == parent:  # which ends this process when it is done itself
            time.sleep(1.0)
    except BaseException as error:
        if not isinstance(error, PeerLostError):
            mine = isinstance(error, UserError)
            text = str(error) if mine else "".join(traceback.format_exception(error))
            os.write(say, json.dumps([mine, text[-5_000:]]).encode())  # less than a pipe holds
    finally:
        os._exit(0)


def _told(others: Sequence[_Fork]) -> Exception | None:
    """Return the error that a fork has told before it ended."""
    deadline = time.monotonic() + PATIENCE.total_seconds()
    waiting = {other.said for other in others}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for said in select.select(waiting, [], [], left)[0]:
            waiting.remove(said)
            if text := os.read(said, 2**16):
                mine, sentence = json.loads(text)
                return UserError(sentence) if mine else RuntimeError(sentence)
    return None


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
            f"memory): continue from the last checkpoint with {RESUME_OPTION}"
        ) from error


# --- ending -------------------------------------------------------------------------------------------------------


def fail(text: str, code: int) -> NoReturn:
    """End this process, and print why unless another process has already reported its own reason.

    It ends at once, without a shutdown that needs the others; ``torchrun`` then ends those.
    """
    sys.stdout.flush()
    if _launcher is None:  # a mistake in the command itself, which every process meets
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
    except (RuntimeError, KeyError):
        _tell(text)  # the keeper of the marks is gone, or was never named: better reported twice than never
    os._exit(code)


def _tell(text: str) -> None:
    print(text, file=sys.__stderr__, flush=True)


def _marks() -> dist.Store:
    """Return the store that outlasts a process: ``torchrun`` keeps it, or else the first process."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=PATIENCE, wait_for_workers=False)
    return dist.PrefixStore(f"bespoke/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
