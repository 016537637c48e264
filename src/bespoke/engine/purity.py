"""A step must be a pure function of its arguments: what it closes over is checked before it runs."""

import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor


def _captured(fn: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of everything a function reads besides its arguments, through inner functions."""
    if depth > 4:
        return
    if isinstance(fn, functools.partial):
        yield from ((f"argument {i}", v) for i, v in enumerate(fn.args))
        yield from fn.keywords.items()
        yield from _captured(fn.func, depth + 1)
    elif isinstance(fn, FunctionType):
        found = list(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        values = [(name, cell.cell_contents) for name, cell in found if _is_filled(cell)]
        values += [(name, fn.__globals__[name]) for name in _names(fn.__code__) if name in fn.__globals__]
        values += [(f"a default of {fn.__name__}", v) for v in fn.__defaults__ or ()]
        values += (fn.__kwdefaults__ or {}).items()
        for name, value in values:
            yield name, value
            # Another module's function is that module's business; a sibling of this one is the method's.
            sibling = isinstance(value, functools.partial) or getattr(value, "__module__", None) == fn.__module__
            if sibling and value is not fn:
                yield from _captured(value, depth + 1)


def _names(code: CodeType) -> list[str]:
    """Return the global names that a function's code reads, comprehensions and inner functions included."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return [*code.co_names, *inner]


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the name is assigned later
        return False
    return True


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return any(_holds_tensor(v) for v in value.values())
    if isinstance(value, tuple | list):
        return any(_holds_tensor(v) for v in value)
    return False


def refuse_tensors(fn: Callable[..., Any], desk: type, what: str) -> None:
    """Raise if ``fn`` closes over a tensor, a tree of tensors, or the client's desk (class ``desk``)."""
    for name, value in _captured(fn):
        if isinstance(value, desk):
            raise TypeError(
                f"the {what} closes over {name!r}, the client's desk, whose values change from round to round: "
                f"bind what it needs first (task = {name}.task) and pass tensors as extra arguments"
            )
        if _holds_tensor(value):
            raise TypeError(
                f"the {what} closes over the tensor {name!r}; a recorded step would replay its first value forever: "
                f"pass it as an extra argument, as in local.sgd(loss, params, {name})"
            )
