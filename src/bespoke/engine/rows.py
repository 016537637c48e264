"""One client's rows of a pool: how its examples and labels are read."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bespoke.core import rng
from bespoke.core.data import Batch, Transform
from bespoke.core.tree import Tree

CHUNK = 256  # rows read at once when all of a client's rows are needed


def fetch(
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    key: Tensor,
    extra: Tree,
    transform: Transform | None,
    dtype: torch.dtype,
    train: bool,
) -> tuple[Tensor, Tensor]:
    """Return the examples (B, ...) and labels (B,) at ``rows`` (B,) of a pool, as a model takes them."""
    examples = _floating_as(x[rows], dtype)
    if transform is not None:
        examples = transform(key, examples, extra, train)
    elif x.dtype == torch.uint8:  # the division converts to torch's default type
        examples = (examples if dtype == torch.get_default_dtype() else examples.to(dtype)) / 127.5 - 1.0
    return _floating_as(examples, dtype), y[rows]


def _floating_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


@dataclass(frozen=True)
class ClientRows:
    """A pool, one client's rows of it (padded), and how many of them are real."""

    x: Tensor  # (N, ...) the pool; a client on its own machine brings its own
    y: Tensor  # (N,) or (N, T)
    rows: Tensor  # (width,) int64; beyond n they repeat a valid row
    n: Tensor  # () int64
    extra: Tree = field(default_factory=dict)
    transform: Transform | None = None
    dtype: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        """The padded number of rows."""
        return self.rows.shape[-1]

    def mask(self) -> Tensor:
        """Return 1.0 for each real row and 0.0 for padding: (width,)."""
        return (torch.arange(self.width, device=self.rows.device) < self.n).to(self.dtype)

    def labels(self) -> tuple[Tensor, Tensor]:
        """Return the labels of all rows, padding included, and the mask: (width, ...) and (width,)."""
        return self.y[self.rows], self.mask()

    def gather(self, positions: Tensor, key: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        """Return the examples (B, ...) and labels (B,) at ``positions`` (B,) of the client's list."""
        return fetch(self.x, self.y, self.rows[positions], key, self.extra, self.transform, self.dtype, train)

    def chunks(self, key: Tensor) -> Iterator[Batch]:
        """Yield all rows, padding included, in the order of the client's list and without augmentation."""
        mask = self.mask()
        for i, positions in enumerate(torch.arange(self.width, device=key.device).split(CHUNK)):
            own = rng.fold_in(key, i)
            x, y = self.gather(positions, own, train=False)
            yield Batch(x, y, mask[positions], positions, torch.full_like(self.n, i), own)
