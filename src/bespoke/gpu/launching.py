"""How kernels are launched, and how those that some work needs are compiled beforehand, many at once.

Triton compiles a kernel, and C code to launch it, when it is first launched: one after another, on one core. In a
*rehearsal* of some work a launch only asks for its kernel, and a pool of threads compiles what was asked for; nearly
all of that happens outside Python's lock. What a kernel would have computed is zero in a rehearsal: numbers that could
come from any kernel, and so are harmless as indices too.
"""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from bespoke.gpu.step import has_triton
from bespoke.machine import cores

# By stream, since work on other streams goes on. Autograd's own threads use the stream of the forward pass, but know
# nothing of the context in which Triton looks for the pool of compilers: it is kept here for them.
_rehearsals: dict[Any, Context] = {}


def launch(kernel: Any, grid: Sequence[int], results: Sequence[Tensor | None], *args: Any, **constants: Any) -> None:
    """Run a kernel; in a rehearsal, ask for it, and fill with zeros its ``results``, tensors made for it to fill."""
    context = _rehearsals.get(_here()) if _rehearsals else None
    if context is None:
        kernel[grid](*args, **constants)
        return
    context.run(kernel.warmup, *args, grid=grid, **constants)
    for result in results:
        if result is not None:
            result.zero_()


def warm_up(device: torch.device) -> None:
    """Start a CUDA device and Triton in the background, which takes most of a second in which data can be read."""
    if device.type == "cuda":
        has_triton()  # imports it here, since two threads that import it at once find halves of it
        Thread(target=_warm_up, args=(device,), name="warm up").start()


def _warm_up(device: torch.device) -> None:
    with contextlib.suppress(Exception):  # the work itself will show it
        torch.zeros(1, device=device)
        if has_triton():
            from triton.runtime.cache import triton_key

            triton_key()  # a hash of Triton's own files, without which no compiled kernel is found


def rehearse(work: Callable[[], object]) -> None:
    """Do ``work`` on the current stream without launching kernels, and compile those that it asks for.

    ``work`` may change nothing, and an error in it only ends the rehearsal: the work itself will show it, also that
    there is too little memory.
    """
    mode = _compile_mode()
    if mode is None:
        return
    here = _here()
    compilers = _Compilers(cores(), "compile", torch.cuda.set_stream, (here,))

    def collect() -> None:
        with mode(compilers, ignore_errors=True):  # which waits for all of them
            _rehearsals[here] = copy_context()
            try:
                with contextlib.suppress(Exception):
                    work()
            except BaseException:  # the user wants to stop, while kernels are collected
                compilers.wanted = False
                raise
            finally:
                del _rehearsals[here]

    with compilers:
        try:
            copy_context().run(collect)  # of its own, since the mode stays set where the waiting is interrupted
        except BaseException:  # or while they are compiled
            compilers.wanted = False
            raise


def _compile_mode() -> Any:
    """Return Triton's mode in which an executor compiles, or None if this Triton has none."""
    if not has_triton():
        return None
    import triton

    return getattr(triton, "AsyncCompileMode", None)


def _here() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels until they are ready to be launched, as long as that is wanted."""

    wanted = True

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Compile a kernel by ``fn``, then what launches it."""

        def ready() -> Any:
            if not self.wanted:  # a future that was cancelled would be waited for in vain
                raise CancelledError
            kernel = fn(*args, **kwargs)
            _ = kernel.run  # compiles the C code, and loads both
            return kernel

        return super().submit(ready)
