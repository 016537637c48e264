"""How a server reaches its clients, wherever they are, and what simulations offer in addition."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from bespoke.core.algorithm import Uploads
from bespoke.core.local import Local
from bespoke.core.tree import Tree


@dataclass(frozen=True)
class Trained:
    """The answer to :meth:`Clients.train`."""

    uploads: Uploads  # of the clients whose answer was finite
    refused: dict[int, str] = field(default_factory=dict)  # the reason by client
    logged: dict[str, list[float]] = field(default_factory=dict)  # by name, aligned with uploads.clients
    padding_waste: float = 0.0
    host_breaks: int = 0
    missing: dict[int, str] = field(default_factory=dict)  # who did not answer, and why; nobody in a simulation


class Evaluated(NamedTuple):
    """One client's metrics for one split and one named prediction."""

    client: int
    split: str
    view: str
    total: int  # rows
    metrics: dict[str, list[Any]]  # [sum, weight] by name: two numbers, or two lists of equal length
    logged: dict[str, float]


class States(Protocol):
    """What a checkpoint needs to know about the states of the clients that took part."""

    kind: str  # where they are kept

    def open(self, folder: Path, files: Sequence[Mapping[str, str]] = (), *, owner: str = "") -> None:
        """Keep files in ``folder`` from now on, marked with their ``owner``, and hold only the states of ``files``."""
        ...

    def flush(self) -> list[dict[str, str]]:
        """Write the changes since the last call, and return the files that hold all states, oldest first."""
        ...


class Clients(Protocol):
    """How a server reaches its clients. ``shared`` goes to all, ``own`` (leaves (K, ...)) to each."""

    @property
    def name(self) -> str:
        """The name of this way to reach clients, for the record."""
        ...

    @property
    def notes(self) -> list[str]:
        """What a reader of the run should know."""
        ...

    @property
    def store(self) -> States:
        """The states of the clients that took part, for checkpoints."""
        ...

    @property
    def absent(self) -> Mapping[int, str]:
        """Who did not answer the last :meth:`evaluate`, and why; nobody in a simulation."""
        ...

    def train(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> Trained:
        """Let each client do one round of local work. No state changes before :meth:`accept`."""
        ...

    def accept(self, clients: Sequence[int], refused: Collection[int] = ()) -> None:
        """Commit the new states of these clients, a subset of those that answered the last :meth:`train`.

        The uploads of the ``refused`` broke a rule; where neither is said of a client, the server's step has failed.
        """
        ...

    def evaluate(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> list[Evaluated]:
        """Personalise and score on each client's own held-out rows; no state changes."""
        ...

    def took_part(self, client: int) -> bool:
        """Return whether an upload of this client was ever accepted."""
        ...

    def sample(self) -> Tree:
        """Return one client's state such as the store keeps, to compare files with it."""
        ...

    def timings(self) -> dict[str, float]:
        """Return the device's seconds by phase, if they are counted."""
        ...


class Inspectable(Protocol):
    """What a simulation offers in addition: a look into its clients, which no server and no method may take."""

    def personal(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> list[Tree]:
        """Return the personal models themselves, one tree per client."""
        ...

    def probe(self, fn: Callable[[Local, Tree, Tree], Tree], clients: Sequence[int], shared: Tree, own: Tree) -> Tree:
        """Map ``fn(local, state, down) -> tree`` over clients and stack: leaves (K, ...)."""
        ...

    def examples(self, client: int, split: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a client's rows of a split in chunks, as its model takes them: x (B, ...), y (B,)."""
        ...

    def states(self) -> dict[int, Tree]:
        """Return the states of the clients that took part, by client; there may be many."""
        ...
