"""Where the states of the clients that took part are kept: on the device, on the host, or on disk.

All states have one layout, so a store is a few tensors with one row per client, and a cohort is one gather
per leaf. Changes since the last checkpoint are written to a new *generation*, a safetensors file with
the stacked states of some clients and their ids. The checkpoint's manifest lists the generations, oldest first:
a client's state is in the newest one that has its id. A generation whose successors have grown to half its
rows is merged into the next, so there are few of them, and together they have fewer than twice as many rows as
there are clients.

On the device and on the host the files are only for checkpoints. On disk they are memory-mapped and read from,
and memory holds only what is not yet written.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.files import write_atomic
from bespoke.records import RESUME, is_count, is_list_of

KINDS = ("device", "host", "disk")
PIECE = 2**24  # bytes moved at once
SPILL = 2**28  # bytes of changed states that a store on disk keeps in memory before it writes them

PATTERN = re.compile(r"states-(\d{6,16})\.safetensors")  # the names of its files
OWNER = "experiment"  # the entry of a file's metadata that says which experiment wrote it

_IDS, _PREFIX, _METADATA = "ids", "clients/", "__metadata__"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Generation(NamedTuple):
    """A file with the states of some clients."""

    file: str
    sha256: str
    ids: list[int]
    leaves: dict[str, Tensor]  # (K, ...), mapped from the file; empty if nothing reads them


class StateStore:
    """The states of the clients that took part, by client. A state keeps its names, shapes and types."""

    def __init__(self, kind: str, device: torch.device | str) -> None:
        """Keep states in a place of :data:`KINDS`, and return them on ``device``."""
        self.kind, self.device = kind, torch.device(device)
        self._home = self.device if kind == "device" else torch.device("cpu")
        self._folder: Path | None = None
        self._number, self._step = 0, 1  # of the newest file in the folder, and to the next
        self._owner = ""  # the experiment's hash
        self._keeps: Callable[[int], bool] = lambda client: True
        self._clear([])

    def _clear(self, generations: list[Generation]) -> None:
        """Forget all states but those of these generations."""
        self._layout: dict[str, Tensor] = {}  # one client's leaves, on the meta device
        self._memory: dict[str, Tensor] = {}  # leaves (rows, ...)
        self._rows: dict[int, int] = {}  # client -> row of the memory
        self._changed: set[int] = set()  # since the last generation was written
        self._generations = generations
        self._filed = {  # the newest wins
            client: (g, row) for g in generations for row, client in enumerate(g.ids) if self._keeps(client)
        }

    # --- in a round ---------------------------------------------------------------------------------------------

    def __contains__(self, client: object) -> bool:
        return client in self._rows or client in self._filed

    def ids(self) -> list[int]:
        """Return the clients that have a state, in ascending order."""
        return sorted(self._rows.keys() | self._filed.keys())

    @property
    def layout(self) -> Tree:
        """One client's state without values, on the meta device; empty before the first :meth:`put`."""
        return tree.unflatten(self._layout)

    def fits(self, state: Tree) -> bool:
        """Return whether stored states, if any, are like this one in names, shapes and types."""
        held = {n: (tuple(t.shape), t.dtype) for n, t in self._layout.items() if n.partition("/")[0] == "state"}
        return not held or held == _kinds(state)

    def get(self, clients: Sequence[int]) -> Tree:
        """Return the states of these clients on the device: leaves (K, ...) that own their memory."""
        return tree.to(tree.unflatten(self._gather(clients, list(self._layout))), self.device)

    @torch.no_grad()
    def put(self, clients: Sequence[int], stacked: Tree) -> None:
        """Store the states of these clients, leaves (K, ...), in place of their old ones."""
        if not clients:
            return
        flat = _flatten(stacked, len(clients))
        self._check(flat)
        for client in clients:
            self._rows.setdefault(client, len(self._rows))
        self._make_room()
        index = self._index([self._rows[c] for c in clients])
        for name, leaf in flat.items():
            self._memory[name].index_copy_(0, index, leaf.to(self._home))
        self._changed.update(clients)
        if self.kind == "disk" and self._folder is not None and len(self._changed) * self._nbytes() > SPILL:
            self._write(self._folder)

    def _check(self, flat: dict[str, Tensor]) -> None:
        """Refuse leaves (K, ...) that are not in the layout of the states put before."""
        layout = {name: torch.empty(leaf.shape[1:], dtype=leaf.dtype, device="meta") for name, leaf in flat.items()}
        self._layout = self._layout or layout
        here, there = ({n: (tuple(t.shape), t.dtype) for n, t in one.items()} for one in (layout, self._layout))
        for name in here.keys() | there.keys():
            if here.get(name) != there.get(name):
                raise ValueError(
                    f"a client's state must keep its names, shapes and types, but {name!r} was "
                    f"{there.get(name, 'absent')} and is {here.get(name, 'absent')}"
                )

    def _make_room(self) -> None:
        """Double the memory if it is too small, so that growing costs a constant share of filling."""
        wanted = len(self._rows)
        for name, like in self._layout.items():
            old = self._memory.get(name, torch.empty((0, *like.shape), dtype=like.dtype, device=self._home))
            if len(old) < wanted:
                new = torch.empty((max(wanted, 2 * len(old)), *like.shape), dtype=like.dtype, device=self._home)
                new[: len(old)] = old
                self._memory[name] = new

    def _gather(self, clients: Sequence[int], names: Sequence[str]) -> dict[str, Tensor]:
        """Return these leaves of these clients, (K, ...), on the device where the store keeps them."""
        sources: dict[int, tuple[Mapping[str, Tensor], list[int], list[int]]] = {}
        for place, client in enumerate(clients):
            if client in self._rows:
                leaves, row = self._memory, self._rows[client]
            else:
                generation, row = self._filed[client]
                leaves = generation.leaves
            _, places, rows = sources.setdefault(id(leaves), (leaves, [], []))
            places.append(place)
            rows.append(row)
        parts = [tree.take({n: leaves[n] for n in names}, self._index(rows)) for leaves, _, rows in sources.values()]
        return tree.merge(parts, [places for _, places, _ in sources.values()])

    def _index(self, rows: list[int]) -> Tensor:
        """Return rows as an index (K,) where the store keeps its states."""
        return torch.tensor(rows, dtype=torch.int64).to(self._home, non_blocking=True)

    def _nbytes(self) -> int:
        """Return the bytes of one client's state."""
        return sum(like.numel() * like.element_size() for like in self._layout.values())

    # --- between rounds -----------------------------------------------------------------------------------------

    def open(
        self,
        folder: Path,
        files: Sequence[Mapping[str, str]] = (),
        keeps: Callable[[int], bool] = lambda client: True,
        turn: int = 0,
        stores: int = 1,
        owner: str = "",
        read_only: bool = False,
    ) -> None:
        """Keep files in ``folder`` from now on, and hold only the states of ``files``, as :meth:`flush` returned them.

        Several ``stores`` may share a folder if each ``keeps`` different clients and has its own ``turn``, from 0:
        they number their files in turns. New files name their ``owner``, and no file is ever overwritten; a
        ``read_only`` store never writes any.
        """
        self._folder, self._keeps, self._step, self._owner = None if read_only else folder, keeps, stores, owner
        found = (PATTERN.fullmatch(path.name) for path in folder.glob("states-*"))
        numbers = (int(name[1]) for name in found if name)
        self._number = max((n for n in numbers if n < 10**15), default=0) + 1 + turn - stores  # no run gets that far
        self._clear([_read(folder, entry["file"], entry["sha256"]) for entry in files])
        for generation in self._generations[-1:]:
            self._layout = {n: torch.empty_like(leaf[0], device="meta") for n, leaf in generation.leaves.items()}
        if self.kind != "disk":
            for part in _parts(self.ids(), self._nbytes()):
                self.put(part, self.get(part))
            self._changed, self._filed = set(), {}
            self._generations = [generation._replace(leaves={}) for generation in self._generations]

    def flush(self) -> list[dict[str, str]]:
        """Write the changes since the last call, and return the files that hold all states, oldest first."""
        if self._folder is None:
            raise ValueError("a store cannot write before it has a folder: call `open` first")
        if self._changed:
            self._write(self._folder)
        return [{"file": g.file, "sha256": g.sha256} for g in self._generations]

    def _write(self, folder: Path) -> None:
        """Write a new generation of what changed, merged with those before it that have at most twice its rows."""
        older, clients = list(self._generations), set(self._changed)
        while older and len(older[-1].ids) <= 2 * len(clients):
            clients.update(filter(self._keeps, older.pop().ids))
        ids = sorted(clients)
        self._number += self._step
        file, digest = f"states-{self._number:06d}.safetensors", hashlib.sha256()

        def pieces() -> Iterator[bytes]:
            for piece in self._pieces(ids):
                digest.update(piece)
                yield piece

        write_atomic(folder / file, pieces(), RESUME)
        self._changed = set()
        if self.kind == "disk":
            generation = _read(folder, file, digest.hexdigest())
            self._filed |= {client: (generation, row) for row, client in enumerate(ids)}
            self._memory, self._rows = {}, {}
        else:
            generation = Generation(file, digest.hexdigest(), ids, {})
        self._generations = [*older, generation]

    def _pieces(self, ids: list[int]) -> Iterator[bytes]:
        """Yield a safetensors file in pieces. The header keeps the tree's order; ids and larger types come first."""
        layout = {_IDS: torch.empty((), dtype=torch.int64, device="meta")}
        layout |= {_PREFIX + name: like for name, like in self._layout.items()}
        spans, end = dict[str, list[int]](), 0
        for name in sorted(layout, key=lambda name: -layout[name].element_size()):  # so that each is aligned
            start, end = end, end + len(ids) * layout[name].numel() * layout[name].element_size()
            spans[name] = [start, end]
        header: dict[str, Any] = {
            name: {"dtype": _NAMES[like.dtype], "shape": [len(ids), *like.shape], "data_offsets": spans[name]}
            for name, like in layout.items()
        }
        text = json.dumps(header | {_METADATA: {OWNER: self._owner}}).encode()
        text += b" " * (-(8 + len(text)) % 64)
        yield len(text).to_bytes(8, "little") + text + _bytes(torch.tensor(ids, dtype=torch.int64))
        for name in list(spans)[1:]:
            leaf, like = name.removeprefix(_PREFIX), layout[name]
            for part in _parts(ids, like.numel() * like.element_size()):
                yield _bytes(self._gather(part, [leaf])[leaf])


def _flatten(stacked: Tree, count: int) -> dict[str, Tensor]:
    """Return the leaves by name; an empty branch is a leaf without elements, which has rows too."""
    none = torch.empty(count, 0, dtype=torch.uint8)
    return {name: none if name.endswith("/") else leaf for name, leaf in tree.flatten(stacked).items()}


def _parts(ids: list[int], nbytes: int) -> Iterator[list[int]]:
    """Split clients into groups whose rows of ``nbytes`` make one piece."""
    step = max(1, PIECE // max(1, nbytes))
    return (ids[i : i + step] for i in range(0, len(ids), step))


def _bytes(leaf: Tensor) -> bytes:
    """Return a tensor's bytes."""
    return leaf.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the place where its tensors begin."""
    size = path.stat().st_size
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"the header of {path.name} is longer than the file")
        header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"the header of {path.name} is no table")
    return header, 8 + length


def owner(path: Path) -> str | None:
    """Return the experiment that a safetensors file says has written it, or None."""
    try:
        said = _header(path)[0].get(_METADATA) if path.is_file() and not path.is_symlink() else None
    except (OSError, ValueError, RecursionError):
        return None
    return said.get(OWNER) if isinstance(said, dict) else None


def _kinds(state: Tree) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and type of each leaf of a client's state, by its name in a store."""
    flat = tree.flatten({"state": state})
    return {n: ((0,), torch.uint8) if n.endswith("/") else (tuple(t.shape), t.dtype) for n, t in flat.items()}


def check(folder: Path, files: Sequence[str], clients: int | None = None, state: Tree | None = None) -> frozenset[int]:
    """Return whose states files hold; raise a ValueError if not of so many ``clients``, in one layout, like ``state``.

    Beside a state lie the moments that the optimiser keeps, by the tags and parameters that the method descends with.
    Those are known only once a client has trained, so that of moments only the one layout is checked.
    """
    wanted = {} if state is None else _kinds(state)
    layouts, held = [], set[int]()
    for file in files:
        read = _read(folder, file, "")
        layouts.append({n: (tuple(leaf.shape[1:]), leaf.dtype) for n, leaf in read.leaves.items()})
        own = {n: kind for n, kind in layouts[-1].items() if n.partition("/")[0] == "state"}
        if state is not None and own != wanted:
            raise ValueError(f"the states in {file} are not those of this method's clients")
        if len(set(read.ids)) < len(read.ids) or any(c < 0 or (clients is not None and c >= clients) for c in read.ids):
            raise ValueError(f"{file} holds states of clients that do not exist, or of one client twice")
        held.update(read.ids)
    if any(a != b for a, b in itertools.pairwise(layouts)):
        raise ValueError("its files of states have different layouts")
    return frozenset(held)


def _read(folder: Path, file: str, sha256: str) -> Generation:
    """Map a file whose checksum has been verified; a ValueError says what is wrong with it nevertheless."""
    path = folder / file
    header, start = _header(path)
    content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[start:]
    header.pop(_METADATA, None)
    leaves = {name: _leaf(file, name, entry, content) for name, entry in header.items()}
    ids = leaves.pop(_IDS, None)
    if ids is None or ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"{file} does not say whose states it holds")
    if any(not name.startswith(_PREFIX) or leaf.shape[:1] != ids.shape for name, leaf in leaves.items()):
        raise ValueError(f"{file} does not hold one state for each of its clients")
    held = {name.removeprefix(_PREFIX): leaf for name, leaf in leaves.items()}
    return Generation(file, sha256, ids.tolist(), held)


def _leaf(file: str, name: str, entry: Any, content: Tensor) -> Tensor:
    """Return one leaf of a file's content, as its entry in the header describes it."""
    told: dict[str, Any] = entry if isinstance(entry, dict) else {}
    kind, shape, span = told.get("dtype"), told.get("shape"), told.get("data_offsets")
    dtype = _DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None or not _are_counts(shape) or not _are_counts(span) or len(span) != 2:
        raise ValueError(f"{file} describes {name!r} in a way that cannot be read")
    start, end = span
    if not start <= end <= len(content) or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{file} has another number of bytes for {name!r} than its shape needs")
    if (content.storage_offset() + start) % dtype.itemsize:
        raise ValueError(f"{file} holds {name!r} at a place where it cannot be mapped")
    return content[start:end].view(dtype).view(shape)


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    """Return whether a value is a list of counts."""
    return is_list_of(is_count)(values)
