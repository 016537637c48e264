"""Whose data: the clients of a federation, their order, and a hash of each client's own rows.

Keys, cohorts and stored states go by a client's place, so a run continues only with the clients that it began with.
``federation.json`` says who they were; it is written once.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bespoke.core import tree
from bespoke.core.data import FederatedData
from bespoke.core.tree import Tree
from bespoke.errors import UserError
from bespoke.machine import cores
from bespoke.records import FEDERATION, ROUNDS, RunFolder
from bespoke.runs.folder import ELSEWHERE

PIECE = 2**22  # bytes of rows gathered at once
THREADS = 8  # that hash

SIZES = ("train", "val", "test")


def described(pool: FederatedData, start: Tree | None = None) -> dict[str, Any]:
    """Return the description of a federation; ``start`` are the weights that it was given to start from, if any."""
    everyone, elsewhere = map(pool.train.client, range(pool.total_clients)), not len(pool.x)
    counted = pool.num_classes and not elsewhere  # clients on machines of their own keep their rows
    counts = [_class_counts(pool.y[rows]) for rows in everyone] if counted else None
    named = pool.contract.classes if counted and pool.contract else ()
    return {
        "clients": pool.num_clients,
        "new_clients": pool.total_clients - pool.num_clients,
        "names": list(pool.names),
        "train": list(pool.train.sizes),
        "val": list(pool.val.sizes),
        "test": list(pool.test.sizes),
        "classes": None if counts is None else [len(own) for own in counts],
        "num_classes": pool.num_classes,
        **({} if counts is None else {"class_counts": counts}),
        **({"class_names": list(named)} if named else {}),
        "content": [""] * pool.total_clients if elsewhere else content_hashes(pool),
        **({"start": weights_hash(start)} if start is not None else {}),
    }


def _class_counts(labels: Tensor) -> dict[str, int]:
    """Return how often each class occurs among a client's train labels (n, ...), without those that do not."""
    found, counts = labels.unique(return_counts=True)
    return {str(label): count for label, count in zip(found.tolist(), counts.tolist(), strict=True)}


def weights_hash(params: Tree) -> str:
    """Return a hash of a model's weights, with their names, shapes and types, in any order."""
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in sorted(tree.flatten(params).items()):
        digest.update(repr((name, str(leaf.dtype), list(leaf.shape))).encode() + _bytes(leaf[None]).tobytes())
    return digest.hexdigest()


def content_hashes(pool: FederatedData) -> list[str]:
    """Return a hash of each client's x and y of its train, validation and test rows, in order, and its constants.

    Some threads share the clients. Each gathers rows in pieces of 4 MiB, so memory stays bounded whatever the clients'
    sizes.
    """
    splits = [getattr(pool, name) for name in SIZES]
    counts = np.array([rows.sizes for rows in splits], dtype=np.int64)  # (3, clients)
    owner = np.concatenate([np.repeat(np.arange(pool.total_clients), sizes) for sizes in counts])
    order = torch.cat([rows.index for rows in splits])[torch.from_numpy(np.argsort(owner, kind="stable"))]
    extra = {name: _bytes(leaf) for name, leaf in tree.flatten(pool.extra).items() if len(leaf)}
    kinds = [(name, str(leaf.dtype), list(leaf.shape[1:])) for name, leaf in tree.flatten(pool.extra).items()]
    kind = repr([str(pool.x.dtype), list(pool.x.shape[1:]), str(pool.y.dtype), list(pool.y.shape[1:]), kinds]).encode()
    step = max(1, PIECE // max(1, sum(math.prod(t.shape[1:]) * t.element_size() for t in (pool.x, pool.y))))
    totals = counts.sum(axis=0)
    ends = np.cumsum(totals)

    def hashes(clients: "np.ndarray[Any, Any]") -> list[str]:
        first, last = clients[0], clients[-1]
        pieces = _pieces(pool, order[ends[first] - totals[first] : ends[last]], step)
        piece, found = np.empty((0, 0), dtype=np.uint8), []
        for client in clients:
            digest, rows = hashlib.blake2b(kind + counts[:, client].tobytes(), digest_size=16), int(totals[client])
            for constants in extra.values():
                digest.update(constants[client].data)
            while rows:
                piece = piece if len(piece) else next(pieces)
                digest.update(piece[:rows].data)
                rows, piece = max(0, rows - len(piece)), piece[rows:]
            found.append(digest.hexdigest())
        return found

    threads = min(THREADS, cores(), pool.total_clients)
    shares = np.array_split(np.arange(pool.total_clients), threads)
    with ThreadPoolExecutor(threads) as workers:
        return [digest for share in workers.map(hashes, shares) for digest in share]


def _pieces(pool: FederatedData, order: Tensor, step: int) -> "Iterator[np.ndarray[Any, Any]]":
    """Yield the bytes of x and y in the order of rows (n,), ``step`` rows at once: uint8 (step, bytes)."""
    for rows in order.split(step):
        yield np.concatenate([_bytes(t[rows]) for t in (pool.x, pool.y)], axis=1)


def _bytes(values: Tensor) -> "np.ndarray[Any, Any]":
    """Return the bytes of each row: uint8 (n, bytes)."""
    flat = values.detach().cpu().contiguous().reshape(len(values), math.prod(values.shape[1:]))
    return flat.view(torch.uint8).numpy()


def compare(folder: RunFolder, here: dict[str, Any], instead: str = ELSEWHERE) -> list[str]:
    """Refuse a federation that is not the one the run in a folder began with; return notes about what is unknown.

    ``here`` is from :func:`described`; ``instead`` ends a refusal's sentence: what to do without the same data.
    """
    told = folder.federation()
    if told is None and not (folder.path / ROUNDS).exists():
        return []  # it ended before it wrote any
    if told is None:
        return [
            f"{folder.path / FEDERATION} is missing, so the data could not be compared with those the run began with"
        ]
    keys = ("names", *SIZES, "content" if "content" in told else "names")
    there, mine = (zip(*(one[key] for key in keys), strict=True) for one in (told, here))
    for old, new in itertools.zip_longest(there, mine):
        if old != new:
            how = _how(old, new, told["names"], here["names"])
            raise UserError(
                f"the data are not those that the run in {folder.path} began with: {how}; give it the same data, or "
                f"{instead}"
            )
    if told["clients"] != here["clients"]:
        raise UserError(
            f"{told['clients']} clients train in {folder.path}, and {here['clients']} of the same clients here: "
            f"give it the same data, or {instead}"
        )
    if told.get("start") != here.get("start"):
        raise UserError(
            f"the weights of [model] start are not those that the run in {folder.path} began with: restore the file, "
            f"or {instead}"
        )
    if "content" not in told:
        return [f"{folder.path} has no hashes of its clients' rows: only their names and numbers were compared"]
    return []


def _how(old: Any, new: Any, there: Sequence[str], here: Sequence[str]) -> str:
    """Return how the first two clients that differ do so; ``old`` or ``new`` is None where there are no more."""
    if new is not None and new[0] not in there:
        return f"client {new[0]!r} is new"
    if old is not None and old[0] not in here:
        return f"client {old[0]!r} is gone"
    name = (old or new)[0]
    if old is None or new is None or old[0] != new[0]:
        return f"client {name!r} is at another place ({there.index(name)} there, {here.index(name)} here)"
    return f"client {name!r} has other rows"
