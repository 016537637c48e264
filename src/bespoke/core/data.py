"""The federation's data: one pool of examples, and for each client the rows that are its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bespoke.core import tree
from bespoke.core.tree import Tree

# transform(key, x, extra, train) -> x: applied to every gathered batch; `extra` are the client's own constants.
Transform = Callable[[Tensor, Tensor, Tree, bool], Tensor]


def on_device(values: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device, without waiting for the device."""
    if torch.device(device).type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class Batch(NamedTuple):
    """A minibatch of one client; where ``mask`` is 0 there is only padding."""

    x: Tensor  # (B, ...)
    y: Tensor  # (B,) int64 class numbers; or (B,) or (B, T) floating targets
    mask: Tensor  # (B,) 1.0 for a real row, 0.0 for padding
    positions: Tensor  # (B,) in the client's own list of rows: serves caches
    step: Tensor  # () int64, counted within the fold
    key: Tensor  # (2,) for dropout, augmentation, noise


@dataclass(frozen=True)
class Rows:
    """Index lists of all clients, one after another, so that memory follows the data and not the largest client."""

    index: Tensor  # (sum of n,) int64 into the pool
    sizes: tuple[int, ...]  # n of each client

    @staticmethod
    def of(lists: Sequence[Any]) -> "Rows":
        """From one list of pool rows for each client."""
        parts = [torch.as_tensor(rows, dtype=torch.int64).reshape(-1) for rows in lists]
        return Rows(torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64), tuple(len(p) for p in parts))

    def __post_init__(self) -> None:
        ends = torch.tensor((0, *self.sizes), dtype=torch.int64).cumsum(0)
        object.__setattr__(self, "_start", ends[:-1].tolist())

    def client(self, client: int) -> Tensor:
        """The pool rows of one client: int64 (n,)."""
        start: int = self._start[client]  # type: ignore[attr-defined]
        return self.index[start : start + self.sizes[client]]

    def block(self, clients: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
        """Padded rows (K, width) and true sizes (K,); padding repeats a client's first row (without rows: pool row 0).

        What is computed on padding is masked, but NaN times zero is NaN: another client's row could do harm.
        """
        if any(self.sizes[c] > width for c in clients):
            raise ValueError(f"{width} places are too few for clients of {[self.sizes[c] for c in clients]} rows")
        device = self.index.device
        first = [self._start[c] for c in clients]  # type: ignore[attr-defined]
        bounds = on_device(torch.tensor([first, [self.sizes[c] for c in clients]], dtype=torch.int64), device)
        start, n = bounds[0], bounds[1]
        place = torch.arange(width, device=device)
        place = torch.where(place < n[:, None], place, 0) + start[:, None]
        if not len(self.index):
            return torch.zeros_like(place), n
        rows = self.index[place.clamp(max=len(self.index) - 1)]
        return torch.where(n[:, None] > 0, rows, 0), n


@dataclass(frozen=True)
class FederatedData:
    """The whole federation: examples, and each client's train, validation and test rows.

    The first ``num_clients`` clients are the training population; the rest are new clients, met only
    in evaluation.
    """

    x: Tensor  # (N, ...) uint8 or floating, or integer tokens
    y: Tensor  # (N,) int64 class numbers; or (N,) or (N, T) floating targets
    train: Rows
    test: Rows
    val: Rows
    num_classes: int  # 0 where the targets are no classes
    num_clients: int
    names: tuple[str, ...]
    extra: Tree = field(default_factory=dict)  # leaves (clients, ...)
    transform: Transform | None = None

    @property
    def total_clients(self) -> int:
        """Training population and new clients."""
        return len(self.train.sizes)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "FederatedData":
        """The pool on a device, floating examples and targets in ``dtype``; done once."""
        x, y = (t.to(device, dtype if t.is_floating_point() else t.dtype) for t in (self.x, self.y))
        return replace(
            self,
            x=x,
            y=y,
            train=replace(self.train, index=self.train.index.to(device)),
            test=replace(self.test, index=self.test.index.to(device)),
            val=replace(self.val, index=self.val.index.to(device)),
            extra=tree.to(self.extra, device),
        )
