"""Checkpoints: written atomically, verified when read, never unpickled.

A checkpoint is ``000010.safetensors`` with the server's tensors, the files of clients' states that
:mod:`bespoke.clients.states` has written, and ``000010.json``, the manifest: round, experiment hash, names and
checksums of those files, byte offsets and checksums of the records, and a checksum of itself. The manifest is
written last, so a checkpoint exists once its manifest does. The last two are kept, and the states' files that they
name. Only files that this run wrote are removed: those that its manifests name, and those whose header names its
experiment.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from bespoke.clients import states
from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.errors import UserError, reason
from bespoke.files import check_regular, write_atomic
from bespoke.records import COLUMNS, RESUME, Sound, is_count, is_list_of, is_table_of, is_text
from bespoke.runs.bounds import Sizes

KEEP = 2

_MANIFEST, _TENSORS = re.compile(r"\d{6,}\.json"), re.compile(r"\d{6,}\.safetensors")
PATTERNS = (_MANIFEST, _TENSORS, states.PATTERN)  # the names of its files


class OtherExperimentError(ValueError):
    """A checkpoint that is intact, but of another experiment."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to continue: the server, every client that took part, and the length of the records."""

    round: int
    server: Tree
    states: list[dict[str, str]]  # the files of the clients' states and their checksums, oldest first
    offsets: dict[str, int]
    sums: dict[str, str] | None = None  # checksums of the records up to their offsets; older runs have none
    recent: Sizes = field(default_factory=dict)  # of accepted uploads, for the bound on those to come
    clients: frozenset[int] = frozenset()  # who have a state in the files, as :func:`load_newest` found them


def _digest(content: bytes) -> str:
    """Return the checksum of a file's content."""
    return hashlib.sha256(content).hexdigest()


def save(folder: Path, checkpoint: Checkpoint, experiment_hash: str) -> None:
    """Write a checkpoint into ``folder`` and remove this run's others except the one before it."""
    flat = {n: t.detach().cpu().contiguous().clone() for n, t in tree.flatten(checkpoint.server).items()}
    content = safetensors.torch.save(flat, {states.OWNER: experiment_hash})
    manifest = {
        "round": checkpoint.round,
        "experiment": experiment_hash,
        "tensors": _digest(content),
        "states": checkpoint.states,
        "offsets": checkpoint.offsets,
        "sums": checkpoint.sums,
        "recent": checkpoint.recent,
        "names": list(flat),  # safetensors does not keep their order, and sums over a tree depend on it
    }
    stem = f"{checkpoint.round:06d}"
    signed = json.dumps(manifest | {"manifest": _digest(_canonical(manifest))})
    for path, data in ((folder / f"{stem}.safetensors", content), (folder / f"{stem}.json", signed)):
        _make_way(path, experiment_hash)
        write_atomic(path, data, RESUME)
    _remove_others(folder, checkpoint.round, experiment_hash)


def _make_way(path: Path, experiment_hash: str) -> None:
    """Move a file aside that this run cannot know to be its own, a damaged one of its own included."""
    if not os.path.lexists(path) or states.owner(path) == experiment_hash:
        return
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.suffix == ".json" and _manifest(path)["experiment"] == experiment_hash:
            return
    path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}.aside"))


def _remove_others(folder: Path, newest: int, experiment_hash: str) -> None:
    """Remove what this run wrote and neither the newest checkpoint nor the one before it needs."""
    own = {}  # round -> manifest
    for path in folder.iterdir():
        if _MANIFEST.fullmatch(path.name):
            try:
                manifest = _manifest(path)
            except (OSError, ValueError, RecursionError):
                continue
            if manifest["experiment"] == experiment_hash:
                own[manifest["round"]] = manifest
    named = {number: _files(manifest) for number, manifest in own.items()}
    # Anything beyond the newest was skipped as damaged, or its writing was interrupted.
    kept = sorted(number for number in own if number <= newest)[-KEEP:]
    needed = {name for number in kept for name in named[number]}
    written = {name for names in named.values() for name in names}
    for path in sorted(folder.iterdir(), key=lambda path: path.suffix):  # a checkpoint ends with its manifest
        if path.name not in needed and path.is_file() and (path.name in written or _was_left(path, experiment_hash)):
            path.unlink()


def _was_left(path: Path, experiment_hash: str) -> bool:
    """Return whether this run wrote a file for a checkpoint that it did not complete."""
    named_so = _TENSORS.fullmatch(path.name) or states.PATTERN.fullmatch(path.name)
    return bool(named_so) and states.owner(path) == experiment_hash


def _files(manifest: dict[str, Any]) -> list[str]:
    """Return the names of a checkpoint's files."""
    stem = f"{manifest['round']:06d}"
    return [f"{stem}.json", f"{stem}.safetensors", *(entry["file"] for entry in manifest["states"])]


def _manifest(path: Path) -> dict[str, Any]:
    """Read a manifest and require that every entry is what :func:`save` writes."""
    check_regular(path)
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or manifest.pop("manifest", "") != _digest(_canonical(manifest)):
        raise ValueError("the manifest's checksum does not match")

    manifest = {"sums": None, "recent": {}} | manifest  # which older runs lack
    wrong = next((key for key, sound in _SOUND.items() if not sound(manifest.get(key))), "")
    if wrong or f"{manifest['round']:06d}" != path.stem:
        raise ValueError(f"its manifest's {wrong or 'round'} cannot be right")
    return manifest


def _is_entry(value: Any) -> bool:
    """Return whether a value names a file of states, in this folder, and its checksum."""
    return is_table_of(is_text)(value) and "sha256" in value and bool(states.PATTERN.fullmatch(value.get("file", "")))


def _is_size(value: Any) -> bool:
    """Return whether a value is the size of an upload: finite, and not negative."""
    return type(value) is float and 0.0 <= value < math.inf


def _is_by_record(sound: Sound) -> Sound:
    """Return the check of a table with a ``sound`` value for each file of records."""
    return lambda value: is_table_of(sound)(value) and value.keys() == COLUMNS.keys()


_SOUND: dict[str, Sound] = {  # what the entries of a manifest look like
    "round": is_count,
    "experiment": is_text,
    "tensors": is_text,
    "states": is_list_of(_is_entry),
    "offsets": _is_by_record(is_count),
    "sums": lambda value: value is None or _is_by_record(is_text)(value),
    "recent": is_table_of(is_list_of(_is_size)),
    "names": is_list_of(is_text),
}


def _canonical(manifest: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest that its checksum is of."""
    return json.dumps(manifest, sort_keys=True).encode()


def load_newest(
    folder: Path,
    device: torch.device | str = "cpu",
    *,
    experiment_hash: str | None = None,
    like: Tree | None = None,
    clients: int | None = None,
    state: Tree | None = None,
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint, and a sentence for each one that was skipped.

    Where they are given, it must belong to the experiment, its server be ``like`` this one in names, shapes and
    types, and its states be like ``state`` and of some of so many ``clients``. If there are only checkpoints of other
    experiments, starting anew would lose them: that is refused.
    """
    skipped: list[str] = []
    others: list[Exception] = []
    paths = (path for path in folder.glob("*.json") if _MANIFEST.fullmatch(path.name))
    for path in sorted(paths, key=lambda path: (len(path.name), path.name), reverse=True):
        try:
            return _load(path, device, experiment_hash, like, clients, state), skipped
        except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
            skipped.append(f"checkpoint {path} is damaged, or of another version ({reason(error)}), and was skipped")
            others += [error] if isinstance(error, OtherExperimentError) else []
    if others:
        raise UserError(
            f"{folder} has no checkpoint of experiment {experiment_hash}, as environment.json beside it names it "
            f"({reason(others[0])}): restore the right files, or choose another folder"
        )
    return None, skipped


def _load(
    path: Path,
    device: torch.device | str,
    experiment_hash: str | None,
    like: Tree | None,
    clients: int | None,
    state: Tree | None,
) -> Checkpoint:
    """Return the checkpoint of a manifest, verified as :func:`load_newest` says; raise what is wrong with it."""
    manifest = _manifest(path)
    if experiment_hash not in (None, manifest["experiment"]):
        raise OtherExperimentError(f"it belongs to another experiment, {manifest['experiment']}")
    for name in _files(manifest):
        check_regular(path.with_name(name))
    content = path.with_suffix(".safetensors").read_bytes()
    if manifest["tensors"] != _digest(content):
        raise ValueError("the tensors' checksum does not match")
    for entry in manifest["states"]:
        with path.with_name(entry["file"]).open("rb") as file:
            if entry["sha256"] != hashlib.file_digest(file, "sha256").hexdigest():
                raise ValueError(f"the checksum of {entry['file']} does not match")
    held = states.check(path.parent, [entry["file"] for entry in manifest["states"]], clients, state)
    # Cloned, because views into one buffer are aligned differently from separate tensors, and on some
    # machines the last bit of a matrix product depends on that.
    loaded = safetensors.torch.load(content)
    if sorted(loaded) != sorted(manifest["names"]):
        raise ValueError("its tensors are not those that its manifest names")
    flat = {n: loaded[n].clone().to(device) for n in manifest["names"]}
    if like is not None and layout(flat) != layout(tree.flatten(like)):
        raise ValueError("its tensors are not those of this method's server")
    kept = {key: manifest[key] for key in ("round", "states", "offsets", "sums", "recent")}
    return Checkpoint(server=tree.unflatten(flat), clients=held, **kept)


def layout(flat: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and type of each leaf."""
    return {name: (leaf.shape, leaf.dtype) for name, leaf in flat.items()}
