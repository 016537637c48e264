"""A client's states on its own disk: one file for each proposed one, until no server can ask for it any more.

A file is the checksum of its content and then the content, a safetensors file. Its name has the round, and a name of
the version that nobody can foretell: work that is repeated, or that comes late, proposes another version and never
replaces one. The server names the version that it accepted last, and exactly that one is loaded.
"""

import contextlib
import hashlib
import json
import re
import secrets
from pathlib import Path

import safetensors.torch
import torch

from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.files import make_folder, temporary_of, write_atomic

NAME = re.compile(r"[0-9a-f]{16}")  # of a version, and of a federation

_FILE = re.compile(r"(\d{6,16})-[0-9a-f]{16}\.state")
_SUM = 32  # bytes of the checksum


def forget_others(folder: Path, federation: str) -> None:
    """Remove the states of all federations in a client's folder but one: that may still be lengthened."""
    for other in folder.iterdir() if folder.is_dir() else ():
        if not NAME.fullmatch(other.name) or other.name == federation or other.is_symlink():
            continue
        for own in other.iterdir():
            for path in own.iterdir() if own.is_dir() and not own.is_symlink() else ():
                if _FILE.fullmatch(temporary_of(path.name) or path.name):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds what is not ours
                own.rmdir()
        with contextlib.suppress(OSError):
            other.rmdir()


class Versions:
    """The states that one client of one federation has proposed."""

    def __init__(self, folder: Path) -> None:
        """Keep them in ``folder``, which is made with the first one."""
        self.folder = folder

    def save(self, round: int, kept: Tree) -> str:
        """Write the state that a client proposes after a round, and return the version's name."""
        make_folder(self.folder)
        flat = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in tree.flatten(kept).items()}
        content = safetensors.torch.save(flat, {"names": json.dumps(list(flat))})  # the format keeps no order
        version = secrets.token_hex(8)
        write_atomic(self._path(round, version), [hashlib.sha256(content).digest(), content])
        return version

    def load(self, round: int, version: str, device: torch.device | str = "cpu") -> Tree | None:
        """Return the state of this version, or None if it is lost or damaged."""
        try:
            found = self._path(round, version).read_bytes()
        except OSError:
            return None
        content = found[_SUM:]
        if hashlib.sha256(content).digest() != found[:_SUM]:
            return None
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        flat = safetensors.torch.load(content)
        return tree.unflatten({n: flat[n].clone().to(device) for n in json.loads(header["__metadata__"]["names"])})

    def forget(self, oldest: int) -> None:
        """Remove the versions from before the round ``oldest``."""
        for path in self.folder.iterdir():
            name = _FILE.fullmatch(temporary_of(path.name) or path.name)  # a process may have died while it wrote one
            if name and int(name[1]) < oldest:
                path.unlink(missing_ok=True)

    def _path(self, round: int, version: str) -> Path:
        return self.folder / f"{round:06d}-{version}.state"
