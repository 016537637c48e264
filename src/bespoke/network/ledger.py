"""The server's ledger: who its clients are, and which of their states it has accepted. A checkpoint keeps it."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bespoke.clients.states import StateStore
from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.errors import UserError

_FREE = "0" * 64  # in the place of a fingerprint
STRIKES = 3  # refused uploads in a row after which a client is asked no more


def fingerprint(key: str) -> str:
    """Return the name of a public key, by which a member is known: 64 hex digits."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass
class Member:
    """A place in the roster, which nobody may have taken yet."""

    key: str = ""  # the fingerprint of its public key; "" while the place is free
    rows: int = 0  # train rows that it declared
    accepted: int = 0  # the last round whose upload was accepted; 0 = none
    version: str = ""  # what it called its state then
    strikes: int = 0  # refused uploads in a row
    test: int = 0  # rows that it declared for scores alone,
    val: int = 0  # and for validation

    @property
    def quarantined(self) -> bool:
        """Whether it is asked no more."""
        return self.strikes >= STRIKES


class Ledger:
    """The members of a federation by place, and what a checkpoint must know of them. The states stay with them."""

    kind = "network"

    def __init__(self, members: Sequence[Member]) -> None:
        """Begin a federation of these members; :meth:`open` may put an earlier one in its place."""
        keys = [member.key for member in members if member.key]
        if len(set(keys)) < len(keys):
            raise UserError("two clients of the roster have the same key: give each its own")
        if empty := [client for client, member in enumerate(members) if member.key and member.rows < 1]:
            raise UserError(f"client {empty[0]} of the roster has no train rows: leave it out")
        self.members, self.federation = list(members), secrets.token_hex(8)
        self._store = StateStore("host", "cpu")
        self._oldest, self._newest = ([0] * len(members) for _ in range(2))  # accepted at the last two checkpoints

    def oldest(self, client: int) -> int:
        """Return the round of the oldest state of a client that a resumed run may ask for."""
        return self._oldest[client]

    def sample(self) -> Tree:
        """Return what the files hold for one client."""
        return _written(Member(), "0" * 16)

    def open(self, folder: Path, files: Sequence[Mapping[str, str]] = (), *, owner: str = "") -> None:
        """Keep files in ``folder`` from now on, and go on with the federation in ``files``, if there are any."""
        self._store.open(folder, files, owner=owner)
        if not files:
            return
        ids = self._store.ids()
        if ids != list(range(len(self.members))):
            raise UserError(
                f"the run in {folder} has {len(ids)} clients, and the roster {len(self.members)}: give the roster that "
                "the run began with"
            )
        for client, found in enumerate(tree.unstack(self._store.get(ids), len(ids))):
            self._restore(client, found["state"])
        self._oldest, self._newest = [0] * len(ids), [member.accepted for member in self.members]

    def flush(self) -> list[dict[str, str]]:
        """Write the ledger, and return the files that hold it, oldest first."""
        rows = [{"state": _written(member, self.federation)} for member in self.members]
        self._store.put(range(len(rows)), tree.stack(rows))
        # A run may be resumed from the last two checkpoints.
        self._oldest, self._newest = self._newest, [member.accepted for member in self.members]
        return self._store.flush()

    def _restore(self, client: int, found: Tree) -> None:
        member = self.members[client]
        key, rows = _hex(found["key"]).replace(_FREE, ""), int(found["rows"])
        if member.key and (key, rows) != (member.key, member.rows):
            raise UserError(
                f"client {client} of the roster has another key or another number of rows than in the run's "
                "checkpoint: give the roster that the run began with"
            )
        member.key, member.rows = key, rows
        member.accepted, member.strikes = int(found["accepted"]), int(found["strikes"])
        member.test, member.val = int(found["test"]), int(found["val"])
        member.version = _hex(found["version"]) if member.accepted else ""
        self.federation = _hex(found["federation"])


def _written(member: Member, federation: str) -> Tree:
    """Return a member as tensors."""
    texts = {"key": member.key or _FREE, "version": member.version or "0" * 16, "federation": federation}
    numbers = {name: getattr(member, name) for name in ("rows", "test", "val", "accepted", "strikes")}
    return {
        **{name: torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8) for name, text in texts.items()},
        **{name: torch.tensor(number) for name, number in numbers.items()},
    }


def _hex(values: Tensor) -> str:
    return bytes(values.tolist()).hex()
