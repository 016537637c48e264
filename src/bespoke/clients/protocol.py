"""The two-call protocol by which a server reaches its clients, wherever they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from bespoke.core.algorithm import Uploads
from bespoke.core.tree import Tree


@dataclass(frozen=True)
class Trained:
    """The answer to :meth:`Clients.train`."""

    uploads: Uploads  # of those who answered soundly
    refused: dict[int, str] = field(default_factory=dict)
    logged: dict[str, list[float]] = field(default_factory=dict)  # by name, aligned with uploads.clients
    padding_waste: float = 0.0
    host_breaks: int = 0


class Evaluated(NamedTuple):
    """One client's counts for one split and one named prediction."""

    client: int
    split: str
    view: str
    correct: int
    total: int
    loss_sum: float
    logged: dict[str, float]


class States(Protocol):
    """What a checkpoint has to know of the states of the clients that took part."""

    kind: str  # where they are kept

    def open(self, folder: Path, files: Sequence[Mapping[str, str]] = ()) -> None:
        """Keep files in ``folder`` from now on, and hold the states of ``files`` alone, as :meth:`flush` gave them."""
        ...

    def flush(self) -> list[dict[str, str]]:
        """Write what changed since the last call, and name the files that hold all states, oldest first."""
        ...


class Clients(Protocol):
    """How a server reaches its clients. ``shared`` goes to all, ``own`` (leaves (K, ...)) to each."""

    @property
    def store(self) -> States:
        """The states of the clients that took part, for checkpoints."""
        ...

    def train(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> Trained:
        """Let each client do one round of local work; states change only for accepted uploads."""
        ...

    def evaluate(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> list[Evaluated]:
        """Personalise and count on each client's own held-out rows; no state changes."""
        ...

    def took_part(self, client: int) -> bool:
        """Whether an upload of this client was ever accepted."""
        ...
