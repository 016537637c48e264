"""The corruption of each client, and the corrupted images, computed once and stored."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bespoke.data import home
from bespoke.data.images.corrupt import CIFAR_S, CORRUPTIONS, SEVERITIES, Pair, corrupt, parse
from bespoke.data.settings import DataSettings
from bespoke.data.sources import store
from bespoke.errors import UserError
from bespoke.files import write_whole

EDITION = b"corruptions 1"  # changes with the rules, so that older files are not used


def assign(settings: DataSettings, clients: int) -> list[Pair | None]:
    """Return the corruption of each client, or None for a clean one.

    ``corrupt = "cifar_s"`` counts the corrupted clients i = 0, 1, ...: the corruption is number i mod 10; the
    severity is i mod 5 + 1 with ``pairs = "code"``, which gives ten pairs, and (i div 10) mod 5 + 1 with
    ``pairs = "paper"``, which gives all fifty.
    """
    if not settings.corrupt:
        return [None] * clients
    chosen = {
        "half": range(clients // 2),
        "new": range(clients - settings.new_clients, clients),
        "all": range(clients),
    }[settings.corrupt_clients]
    if not len(chosen):
        raise UserError(
            f"[data] corrupt_clients = {settings.corrupt_clients!r} selects no client: set [data] new_clients"
        )
    if settings.corrupt == CIFAR_S:
        names = list(CORRUPTIONS)
        number = (lambda i: i) if settings.pairs == "code" else (lambda i: i // len(names))
        pairs = [Pair(names[i % len(names)], number(i) % SEVERITIES + 1) for i in range(len(chosen))]
    else:
        pairs = [parse(settings.corrupt)] * len(chosen)
    of = dict(zip(chosen, pairs, strict=True))
    return [of.get(i) for i in range(clients)]


def corrupted(x: np.ndarray, lists: Sequence[np.ndarray], pairs: Sequence[Pair | None]) -> np.ndarray:
    """Return a copy of ``x``, uint8 (N, C, H, W), with each client's rows corrupted by its pair.

    The result is stored in the data folder, named by a hash of the images, rows and pairs.
    """
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1] not in (1, 3):
        raise UserError(
            f"[data] corrupt needs 8-bit images, uint8 (rows, 1 or 3 channels, height, width), not {x.dtype} "
            f"of shape {x.shape}: leave it out"
        )
    of: dict[Pair, list[np.ndarray]] = {}
    for rows, pair in zip(lists, pairs, strict=True):
        if pair is not None:
            of.setdefault(pair, []).append(rows)
    rows_of = {pair: np.sort(np.concatenate(of[pair])) for pair in sorted(of)}
    order = np.concatenate(list(rows_of.values()))
    clean = np.ascontiguousarray(x[order])
    path = home.root() / "derived" / f"corrupted-{_name(rows_of, clean)}.npy"
    found = _read(path, clean.shape)
    if found is None:
        found, start = np.empty_like(clean), 0
        for pair, rows in rows_of.items():
            part = slice(start, start + len(rows))
            found[part] = corrupt(clean[part], pair, rows)
            start += len(rows)
        _write(path, found)
    out = np.array(x)
    out[order] = found
    return out


def _name(rows_of: dict[Pair, np.ndarray], clean: np.ndarray) -> str:
    digest = hashlib.sha256(EDITION)
    for pair, rows in rows_of.items():
        digest.update(f"{pair.name}:{pair.severity}:{len(rows)};".encode())
        digest.update(rows.astype("<i8").tobytes())
    digest.update(str(clean.shape).encode())
    digest.update(clean.data)
    return digest.hexdigest()[:32]


def _read(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the stored images, or None if there are none or the hash beside them does not match."""
    try:
        digest = path.with_suffix(".sha256").read_text()
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    sound = found.shape == shape and found.dtype == np.uint8 and found.flags.c_contiguous
    return found if sound and hashlib.sha256(found.data).hexdigest() == digest else None


def _write(path: Path, found: np.ndarray) -> None:
    """Store the images completely or not at all; if the folder is not writable, they are only computed again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with store.locked(path.parent.name):
            write_whole(path, store.npy(found))
            write_whole(path.with_suffix(".sha256"), [hashlib.sha256(found.data).hexdigest().encode()])
    except (OSError, UserError):
        return
