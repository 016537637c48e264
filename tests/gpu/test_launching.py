"""Launches and rehearsals, with stand-ins for Triton: what is launched, what is compiled, and where errors go."""

import threading
from concurrent.futures import as_completed
from contextvars import ContextVar

import pytest
import torch

from bespoke.gpu import launching
from bespoke.gpu.launching import launch, rehearse

active = ContextVar("active", default=None)
leaving = threading.Event()


class Mode:
    """As Triton's: a kernel that is asked for in its context is compiled by the executor, and ready at the end."""

    def __init__(self, executor, ignore_errors):
        assert ignore_errors
        self.executor, self.futures = executor, []

    def __enter__(self):
        active.set(self)

    def __exit__(self, *_):
        active.set(None)
        leaving.set()
        for future in as_completed(self.futures):
            future.exception()


class Compiled:
    """Gets ready to be launched when it is first asked how to run."""

    def __init__(self):
        self.thread = None

    @property
    def run(self):
        self.thread = threading.current_thread()


class Kernel:
    """Fills a tensor; counts launches and compilations."""

    def __init__(self, error=None):
        self.grids, self.compiled, self.error = [], [], error

    def __getitem__(self, grid):
        def run(x, *, value):
            self.grids.append(grid)
            x.fill_(value)

        return run

    def warmup(self, x, *, grid, value):
        mode = active.get()
        mode.futures.append(mode.executor.submit(self._compile))

    def _compile(self):
        if self.error:
            raise self.error
        self.compiled.append(Compiled())
        return self.compiled[-1]


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(launching, "_compile_mode", lambda: Mode)


def filled(kernel):
    x = torch.full((2,), 5.0)
    launch(kernel, (3, 1), [x, None], x, value=7.0)
    return x.tolist()


@pytest.mark.usefixtures("stand_in")
def test_a_rehearsal_compiles_and_launches_nothing():
    kernel, seen = Kernel(), []
    rehearse(lambda: seen.append(filled(kernel)))
    assert seen == [[0.0, 0.0]] and kernel.grids == []
    assert [c.thread is not threading.current_thread() and c.thread is not None for c in kernel.compiled] == [True]
    assert filled(kernel) == [7.0, 7.0] and kernel.grids == [(3, 1)] and len(kernel.compiled) == 1


@pytest.mark.usefixtures("stand_in")
def test_a_launch_from_another_thread_belongs_to_the_rehearsal():
    """Autograd goes back in threads of its own, to which Triton's mode is unknown."""
    kernel, seen = Kernel(), []

    def work():
        other = threading.Thread(target=lambda: seen.append(filled(kernel)))
        other.start()
        other.join()

    rehearse(work)
    assert seen == [[0.0, 0.0]] and kernel.grids == [] and len(kernel.compiled) == 1


@pytest.mark.usefixtures("stand_in")
def test_a_launch_on_another_stream_is_none_of_the_rehearsal(monkeypatch):
    kernel, seen, stream = Kernel(), [], ["ours"]
    monkeypatch.setattr(launching, "_here", lambda: stream[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)

    def work():
        stream[0] = "theirs"
        seen.append(filled(kernel))

    rehearse(work)
    assert seen == [[7.0, 7.0]] and kernel.compiled == [] and not launching._rehearsals


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("error", [ValueError("zeros"), torch.OutOfMemoryError("full")])
def test_an_error_ends_a_rehearsal_and_what_was_asked_for_is_compiled(error):
    kernel, spoilt, after = Kernel(), Kernel(RuntimeError("does not compile")), Kernel()

    def work():
        filled(kernel)
        filled(spoilt)
        raise error

    rehearse(work)
    assert len(kernel.compiled) == 1 and spoilt.compiled == []
    assert filled(after) == [7.0, 7.0]


@pytest.mark.usefixtures("stand_in")
def test_the_wish_to_stop_ends_more_than_a_rehearsal(monkeypatch):
    """What has not been begun is not compiled."""
    monkeypatch.setattr(launching, "cores", lambda: 1)
    leaving.clear()
    begun, waiting = Kernel(), Kernel()
    monkeypatch.setattr(begun, "_compile", lambda: leaving.wait() and Compiled())

    def work():
        filled(begun)
        filled(waiting)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rehearse(work)
    assert waiting.compiled == [] and filled(waiting) == [7.0, 7.0]


@pytest.mark.usefixtures("stand_in")
def test_the_wish_to_stop_while_kernels_are_compiled(monkeypatch):
    """What has not been begun is not compiled, and the next rehearsal finds nothing left of this one."""
    monkeypatch.setattr(launching, "cores", lambda: 1)
    leave, left = Mode.__exit__, []

    def interrupted(self, *how):
        if left:
            return leave(self, *how)
        left.append(self)
        leaving.set()
        raise KeyboardInterrupt  # and the mode stays set, as Triton's does

    monkeypatch.setattr(Mode, "__exit__", interrupted)
    leaving.clear()
    begun, waiting = Kernel(), Kernel()
    monkeypatch.setattr(begun, "_compile", lambda: leaving.wait() and Compiled())
    with pytest.raises(KeyboardInterrupt):
        rehearse(lambda: [filled(begun), filled(waiting)])
    assert waiting.compiled == [] and active.get() is None
    rehearse(lambda: filled(waiting))
    assert len(waiting.compiled) == 1


def test_without_a_way_to_compile_there_is_no_rehearsal(monkeypatch):
    monkeypatch.setattr(launching, "has_triton", lambda: False)
    rehearse(lambda: pytest.fail("rehearsed"))
