"""Whether a client's inputs are in other units than those of the others."""

import torch
from torch import Tensor

from bespoke.core.data import FederatedData

FAR = 100.0  # times the median client
FEWEST = 3  # clients whose median says what is usual
ROWS = 64  # of a client to look at
PIECE = 2**22  # numbers squared at once
NAMED = 5  # clients in one note


def odd_scales(pool: FederatedData) -> list[str]:
    """Return a note that names the clients whose inputs are far larger or smaller than the median client's.

    The size of a client's inputs is their root mean square over its first train rows: of all numbers, and, for rows of
    numbers (N, F), of each feature, where only larger ones count, since rare features are small on most clients.
    """
    if len(pool.train.sizes) < FEWEST or not (pool.x.is_floating_point() or pool.x.dtype == torch.uint8):
        return []
    found = _root_mean_squares(pool)  # (clients, F)
    whole = found.square().mean(dim=1, keepdim=True).sqrt()
    usual, usual_whole = _median(found), _median(whole)
    ratio = whole[:, 0] / usual_whole if float(usual_whole) > 0.0 else torch.ones_like(whole[:, 0])
    by_feature = torch.where(usual > 0.0, found / usual, 1.0).amax(dim=1)
    odd = [
        f"{pool.names[client]} ({value:.3g} times the median client's)"
        for client, value in enumerate(torch.where(by_feature > FAR, by_feature, ratio).tolist())
        if (value > FAR or value < 1.0 / FAR) and pool.train.sizes[client]
    ]
    if not odd:
        return []
    more = f" and {len(odd) - NAMED} more" if len(odd) > NAMED else ""
    return [f"inputs seem to be in other units on {', '.join(odd[:NAMED])}{more}: check the data"]


def _median(found: Tensor) -> Tensor:
    return found.median(dim=0).values


def _root_mean_squares(pool: FederatedData) -> Tensor:
    """Return the root mean square of each client's first train rows: by feature, or of all numbers, (clients, F)."""
    features, sizes = pool.x.shape[1] if pool.x.ndim == 2 else 1, torch.tensor(pool.train.sizes)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    place = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]
    chosen, owner = pool.train.index[place < ROWS], owner[place < ROWS]
    sums = torch.zeros(len(sizes), features, dtype=torch.float64)
    piece = max(1, PIECE // max(1, pool.x[0].numel()))
    for rows, clients in zip(chosen.split(piece), owner.split(piece), strict=True):
        squares = pool.x[rows].float().square().reshape(len(rows), features, -1).mean(dim=2)
        sums.index_add_(0, clients, squares.double())
    return (sums / sizes.clamp(1, ROWS)[:, None]).sqrt()
