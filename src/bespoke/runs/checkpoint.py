"""Checkpoints: written atomically, verified when read, never unpickled.

A checkpoint is ``000010.safetensors`` with the server's tensors, the files of clients' states that
:mod:`bespoke.clients.states` has written, and ``000010.json``, the manifest: round, experiment hash, names and
checksums of those files, byte offsets of the records, and a checksum of itself. The manifest is written last,
so a checkpoint exists once its manifest does. The last two are kept, and the states' files that they name.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.files import write_atomic

KEEP = 2


@dataclass(frozen=True)
class Checkpoint:
    """Everything needed to continue: the server, every client that took part, and the length of the records."""

    round: int
    server: Tree
    states: list[dict[str, str]]  # the files of the clients' states and their checksums, oldest first
    offsets: dict[str, int]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def save(folder: Path, checkpoint: Checkpoint, experiment_hash: str) -> None:
    """Write a checkpoint into ``folder`` and remove all others except the one before it."""
    flat = {n: t.detach().cpu().contiguous().clone() for n, t in tree.flatten(checkpoint.server).items()}
    content = safetensors.torch.save(flat)
    manifest = {
        "round": checkpoint.round,
        "experiment": experiment_hash,
        "tensors": _digest(content),
        "states": checkpoint.states,
        "offsets": checkpoint.offsets,
        "names": list(flat),  # safetensors does not keep their order, and sums over a tree depend on it
    }
    stem = f"{checkpoint.round:06d}"
    write_atomic(folder / f"{stem}.safetensors", content)
    write_atomic(folder / f"{stem}.json", json.dumps(manifest | {"manifest": _digest(_canonical(manifest))}))
    # Anything beyond this round was skipped as damaged, or its writing was interrupted.
    kept = sorted(path for path in folder.glob("*.json") if path.stem <= stem)[-KEEP:]
    needed = {name for path in kept for name in (path.name, f"{path.stem}.safetensors", *_states_named(path))}
    for suffix in ("json", "safetensors"):  # a checkpoint ends with its manifest
        for old in folder.glob(f"*.{suffix}"):
            if old.name not in needed:
                old.unlink()


def _states_named(path: Path) -> list[str]:
    """Return the state files that a manifest needs; none if it is damaged."""
    try:
        return [entry["file"] for entry in _manifest(path)["states"]]
    except (OSError, ValueError, KeyError):
        return []


def _manifest(path: Path) -> dict[str, Any]:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or manifest.pop("manifest", "") != _digest(_canonical(manifest)):
        raise ValueError("the manifest's checksum does not match")
    return manifest


def _canonical(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True).encode()


def load_newest(folder: Path, device: torch.device | str = "cpu") -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint, and a sentence for each damaged one that was skipped."""
    damaged: list[str] = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        try:
            return _load(path, device), damaged
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            damaged.append(f"checkpoint {path} is damaged ({error}) and was skipped")
    return None, damaged


def _load(path: Path, device: torch.device | str) -> Checkpoint:
    manifest = _manifest(path)
    content = path.with_suffix(".safetensors").read_bytes()
    if manifest["tensors"] != _digest(content):
        raise ValueError("the tensors' checksum does not match")
    for entry in manifest["states"]:
        with path.with_name(entry["file"]).open("rb") as file:
            if entry["sha256"] != hashlib.file_digest(file, "sha256").hexdigest():
                raise ValueError(f"the checksum of {entry['file']} does not match")
    # Cloned, because views into one buffer are aligned differently from separate tensors, and on some
    # machines the last bit of a matrix product depends on that.
    loaded = safetensors.torch.load(content)
    flat = {n: loaded[n].clone().to(device) for n in manifest["names"]}
    return Checkpoint(manifest["round"], tree.unflatten(flat), manifest["states"], manifest["offsets"])
