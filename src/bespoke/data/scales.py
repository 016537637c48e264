"""Whether a client's inputs are in other units than those of the others."""

import torch
from torch import Tensor

from bespoke.core.data import FederatedData
from bespoke.errors import listed

FAR = 100.0  # times the median client
NEAR = 10.0  # times the median: clients whose features differ less agree on the unit
ROWS, NUMBERS = 64, 2**15  # of a client to look at: so many rows; of pictures and the like fewer, at least four
PIECE = 2**22  # numbers squared at once
NAMED = 5  # clients in one note


def odd_scales(pool: FederatedData) -> list[str]:
    """Return a note that names the clients whose inputs are far larger or smaller than the median client's.

    The size of a client's inputs is their root mean square over its first train rows: of all numbers, and, for rows of
    numbers (N, F), of each feature on whose size all clients but one agree, where only larger ones count. Of two
    clients both are named.
    """
    if len(pool.train.sizes) < 2 or not (pool.x.is_floating_point() or pool.x.dtype == torch.uint8):
        return []
    found = _root_mean_squares(pool)  # (clients, F)
    whole = found.square().mean(dim=1).sqrt()
    usual, usual_whole = found.median(dim=0).values, whole.median()
    if float(usual_whole) == 0.0:
        return []
    times = torch.where(usual > 0.0, found / usual, 0.0)
    ordered = times.sort(dim=0).values
    agreed = (ordered[0] >= 1.0 / NEAR) & (ordered[-2] <= NEAR)  # by all clients but the largest
    by_feature = torch.where(agreed, times, 1.0).amax(dim=1)
    ratios = torch.where(by_feature > FAR, by_feature, whole / usual_whole).tolist()
    odd = [c for c, ratio in enumerate(ratios) if not 1.0 / FAR <= ratio <= FAR and pool.train.sizes[c]]
    if odd and len(ratios) == 2:
        return [f"inputs of {pool.names[0]} and {pool.names[1]} seem to be in different units: check the data"]
    names = [f"{pool.names[c]} ({ratios[c]:.3g} times the median client's)" for c in odd]
    return [f"inputs seem to be in other units on {listed(names, NAMED)}: check the data"] if odd else []


def _root_mean_squares(pool: FederatedData) -> Tensor:
    """Return the root mean square of each client's first train rows: by feature, or of all numbers, (clients, F)."""
    features, sizes = pool.x.shape[1] if pool.x.ndim == 2 else 1, torch.tensor(pool.train.sizes)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    place = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner]
    most = min(ROWS, max(4, NUMBERS // max(1, pool.x[0].numel()))) if pool.x.ndim > 2 else ROWS
    chosen, owner = pool.train.index[place < most], owner[place < most]
    sums = torch.zeros(len(sizes), features, dtype=torch.float64)
    piece = max(1, PIECE // max(1, pool.x[0].numel()))
    for rows, clients in zip(chosen.split(piece), owner.split(piece), strict=True):
        squares = pool.x[rows].float().square().reshape(len(rows), features, -1).mean(dim=2)
        sums.index_add_(0, clients, squares.double())
    return (sums / sizes.clamp(1, most)[:, None]).sqrt()
