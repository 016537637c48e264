"""The federation's data: one pool of examples, and each client's own rows of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bespoke.core import tree
from bespoke.core.inputs import InputContract
from bespoke.core.tree import Tree

# transform(key, x, extra, train) -> x: applied to every gathered batch; `extra` are the client's own constants.
Transform = Callable[[Tensor, Tensor, Tree, bool], Tensor]


def on_device(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor from the host to a device without waiting for the device."""
    if torch.device(device).type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class Batch(NamedTuple):
    """One client's minibatch; rows where ``mask`` is 0 are padding."""

    x: Tensor  # (B, ...)
    y: Tensor  # (B,) int64 class numbers; or (B,) or (B, T) floating targets
    mask: Tensor  # (B,) 1.0 for a real row, 0.0 for padding
    positions: Tensor  # (B,) in the client's own list of rows, for caches
    step: Tensor  # () int64, counted within the fold
    key: Tensor  # (2,) for dropout, augmentation, noise


@dataclass(frozen=True)
class Rows:
    """The index lists of all clients, concatenated, so that memory grows with the data, not with the largest client."""

    index: Tensor  # (sum of n,) int64 into the pool
    sizes: tuple[int, ...]  # n of each client

    @staticmethod
    def of(lists: Sequence[Any]) -> "Rows":
        """Make them from one list of pool rows per client."""
        parts = [torch.as_tensor(rows, dtype=torch.int64).reshape(-1) for rows in lists]
        return Rows(torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64), tuple(len(p) for p in parts))

    def __post_init__(self) -> None:
        ends = torch.tensor((0, *self.sizes), dtype=torch.int64).cumsum(0)
        object.__setattr__(self, "_start", ends[:-1].tolist())

    def client(self, client: int) -> Tensor:
        """Return the pool rows of one client: int64 (n,)."""
        start: int = self._start[client]  # type: ignore[attr-defined]
        return self.index[start : start + self.sizes[client]]

    def block(self, clients: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
        """Return padded rows (K, width) and true sizes (K,); padding repeats a client's first row (or pool row 0).

        Results on padding are masked, but NaN times zero is NaN, so another client's row could do harm.
        """
        if any(self.sizes[c] > width for c in clients):
            raise ValueError(f"width {width} is too small for clients with {[self.sizes[c] for c in clients]} rows")
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
    num_classes: int  # 0 if the targets are not classes
    num_clients: int
    names: tuple[str, ...]
    extra: Tree = field(default_factory=dict)  # leaves (clients, ...)
    transform: Transform | None = None
    contract: InputContract | None = None  # the names of features and classes, where the data gave any
    notes: tuple[str, ...] = ()  # what the record says of the data

    @property
    def total_clients(self) -> int:
        """The number of clients, new ones included."""
        return len(self.train.sizes)

    @property
    def inputs(self) -> InputContract:
        """The form of the examples as they are stored, with the names that the data gave."""
        return self.contract or InputContract(tuple(self.x.shape[1:]), str(self.x.dtype).removeprefix("torch."))

    def without_test(self) -> "FederatedData":
        """Return the data without any test row, for choosing settings."""
        return replace(self, test=replace(self.test, index=self.test.index[:0], sizes=(0,) * self.total_clients))

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "FederatedData":
        """Return the data on a device, with floating examples and targets in ``dtype``; done once.

        On the CPU the examples keep their type, since they may be memory-mapped: minibatches are converted.
        """

        def placed(values: Tensor) -> Tensor:
            return values.to(device, dtype if values.is_floating_point() else values.dtype)

        return replace(
            self,
            x=self.x.to(device) if torch.device(device).type == "cpu" else placed(self.x),
            y=placed(self.y),
            train=replace(self.train, index=self.train.index.to(device)),
            test=replace(self.test, index=self.test.index.to(device)),
            val=replace(self.val, index=self.val.index.to(device)),
            extra=tree.to(self.extra, device),
        )
