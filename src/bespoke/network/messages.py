"""Messages: a head, which is a small JSON text, and arrays by ``/``-joined names, each a whole ``.npy`` file.

Nothing is unpickled, and no header of an array is ever parsed: both sides know the layout of what they will receive, a
layout has one header for each array, and the received bytes are compared with it. Only when all headers and sizes are
right is anything allocated. So a transport may carry the arrays one by one, in any order, and any tool can read them.
An array takes its own bytes and a header of 128 (or a little more, if it has many axes), see :func:`overhead`.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, get_origin

import numpy as np
import torch
from torch import Tensor

from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.errors import UserError, shown

MOST_TEXT = 2**20  # characters of a head
_LARGEST = 2**53  # of a head's whole numbers
_TYPES = {
    torch.float64: "<f8",
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "|V2",  # NumPy has no such numbers: two raw bytes each, the lower one first
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.bool: "|b1",
}


class MessageError(ValueError):
    """A message that is not what was asked for; the text completes "client 3 is refused:"."""


class Message(NamedTuple):
    """What travels, in either direction."""

    head: str  # a Request or a Reply, as JSON
    leaves: Sequence[tuple[str, bytes]] = ()  # arrays by name, in any order


class Leaf(NamedTuple):
    """The form of one array."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def header(self) -> bytes:
        """The one header that its ``.npy`` file may have (version 1.0, padded to a multiple of 64)."""
        if self.dtype not in _TYPES:
            raise MessageError(f"arrays of {_name(self.dtype)} cannot be sent")
        text = f"{{'descr': '{_TYPES[self.dtype]}', 'fortran_order': False, 'shape': {self.shape}, }}"
        length = -(-(len(text) + 11) // 64) * 64 - 10
        return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


Layout = dict[str, Leaf]  # by name, in the order of the tree


def layout_of(content: Tree) -> Layout:
    """Return the layout of a tree."""
    return {name: Leaf(tuple(leaf.shape), leaf.dtype) for name, leaf in tree.flatten(content).items()}


def check_layout(layout: Layout, what: str) -> None:
    """Refuse a layout with an array that cannot be sent; ``what`` it is begins the sentence."""
    for name, leaf in layout.items():
        if leaf.dtype not in _TYPES:
            known = ", ".join(map(_name, _TYPES))
            raise UserError(f"{what} holds {name!r} of type {_name(leaf.dtype)}, which cannot be sent: use {known}")


def overhead(layout: Layout) -> int:
    """Return the bytes that a message's arrays take beside their numbers: headers and names."""
    return sum(len(leaf.header) + len(name.encode()) for name, leaf in layout.items())


def encode(content: Tree) -> list[tuple[str, bytes]]:
    """Return the arrays of a tree, each as a ``.npy`` file."""
    return [
        (name, Leaf(tuple(leaf.shape), leaf.dtype).header + _bytes(leaf.detach().cpu().contiguous()))
        for name, leaf in tree.flatten(content).items()
    ]


def _bytes(leaf: Tensor) -> bytes:
    return (leaf.view(torch.int16) if leaf.dtype == torch.bfloat16 else leaf).numpy().tobytes()


def decode(leaves: Iterable[tuple[str, bytes]], layout: Layout, device: torch.device | str = "cpu") -> Tree:
    """Return the tree that arrays are, in the order of its layout; refuse anything else before it is allocated."""
    found: dict[str, bytes] = {}
    for name, content in leaves:
        if name not in layout:
            raise MessageError(f"it holds an unknown array, {shown(name)}")
        if name in found:
            raise MessageError(f"it holds {name!r} twice")
        wanted = layout[name]
        header = wanted.header
        if content[: len(header)] != header:
            raise MessageError(f"its {name!r} is no array of {_name(wanted.dtype)} {wanted.shape}")
        if len(content) != len(header) + wanted.nbytes:
            raise MessageError(f"its {name!r} has {len(content):,} bytes, not {len(header) + wanted.nbytes:,}")
        found[name] = content
    if absent := [name for name in layout if name not in found]:
        raise MessageError(f"it does not hold {absent[0]!r}")
    return tree.unflatten({name: _tensor(name, found[name], leaf).to(device) for name, leaf in layout.items()})


def _tensor(name: str, content: bytes, leaf: Leaf) -> Tensor:
    """Return a leaf of its ``.npy`` file, which has the right header and size."""
    if not leaf.nbytes:
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    raw = leaf.dtype == torch.bfloat16
    flat = np.frombuffer(content, "<i2" if raw else _TYPES[leaf.dtype], offset=len(leaf.header))
    if leaf.dtype == torch.bool and (flat.view(np.uint8) > 1).any():
        raise MessageError(f"its {name!r} holds what is neither true nor false")
    found = torch.from_numpy(flat.copy())
    return (found.view(leaf.dtype) if raw else found).reshape(leaf.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- heads ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a server asks of a client; the arrays are what the method sends down."""

    kind: str  # enrol, which has no arrays and means no client and no round; train, evaluate, or finish
    id: str  # of this message; the answer repeats it
    experiment: str  # its hash
    federation: str  # this run of the experiment
    client: int = 0  # its place, by which its keys are made
    new: bool = False  # whether it is outside the training population, and unknown to the method
    round: int = 1
    accepted: int = 0  # the last round whose upload was accepted; 0 = none
    version: str = ""  # what the client called its state then
    oldest: int = 0  # states before this round are never asked for again
    rounds: int = 0
    adapt_rounds: int = 0
    adapt_epochs: int = 0


@dataclass(frozen=True)
class Reply:
    """What a client answers; the arrays are its upload."""

    kind: str  # enrolled, trained, unsound, evaluated, finished, lost, or failed
    id: str  # of the request
    experiment: str
    federation: str
    client: int
    round: int
    version: str = ""  # what the client calls the state that it proposes
    why: str = ""  # of an answer without a result
    breaks: int = 0  # calls to the host
    logged: dict[str, float] = field(default_factory=dict)
    scores: list[Any] = field(default_factory=list)  # [split, view, rows, metrics, logged] of each evaluation
    rows: dict[str, int] = field(default_factory=dict)  # that the client has, by split


Head = TypeVar("Head", Request, Reply)


def write_head(head: Request | Reply) -> str:
    """Return a head as JSON; numbers that are not finite are written as Python does."""
    return json.dumps(dataclasses.asdict(head))


def read_head(text: str, kind: type[Head]) -> Head:
    """Return the head that a text is; refuse anything else."""
    if len(text) > MOST_TEXT:
        raise MessageError(f"its head has {len(text):,} characters, more than {MOST_TEXT:,}")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise MessageError("its head is no JSON") from None
    fields = dataclasses.fields(kind)
    if not isinstance(given, dict) or given.keys() != {each.name for each in fields}:
        raise MessageError(f"its head is no {kind.__name__.lower()}")
    for each in fields:
        value = given[each.name]
        if type(value) is not (get_origin(each.type) or each.type):
            raise MessageError(f"its head has {shown(value)} as {each.name!r}")
        if type(value) is int and not 0 <= value < _LARGEST:
            raise MessageError(f"its head has {shown(value)} as {each.name!r}, out of range")
    return kind(**given)
