"""Quadratic programmes over the probability simplex, solved exactly."""

import numpy as np
import torch
from torch import Tensor


def shortest(quadratic: np.ndarray, first: int = 0) -> np.ndarray:
    """Return the a (m,) of the simplex {a >= 0, sum a = 1} with the least a' Q a, for a positive definite Q (m, m).

    It is x / sum x for the x >= 0 with Q x = 1 where x > 0 and Q x >= 1 elsewhere. Lawson and Hanson's active set finds
    it: the entry that Q x falls short of 1 most joins the positive ones, and whatever would turn negative leaves them.
    ``first`` is the entry to begin with; the nearer it is to the answer, the faster.
    """
    q = quadratic / quadratic.diagonal().mean()
    x, free = np.zeros(len(q)), np.zeros(len(q), dtype=bool)
    joins = first
    for _ in range(100 * len(q)):
        free[joins] = True
        while True:
            want = np.zeros(len(q))
            want[free] = np.linalg.solve(q[np.ix_(free, free)], np.ones(free.sum()))
            falling = free & (want <= 0.0)
            if not falling.any():
                break
            x += (x[falling] / (x[falling] - want[falling])).min() * (want - x)
            free &= ~falling | (x > x[falling].min())
            x[~free] = 0.0
        x = want
        short = np.where(free, 0.0, 1.0 - q @ x)
        joins = int(short.argmax())
        if short[joins] < 1e-9:
            break
    return x / x.sum()


def mixtures(variance: Tensor, vectors: Tensor, smallest: float) -> Tensor:
    """Return for each of K clients the convex mixture of all estimates with the least expected error: (K, K), float64.

    Row i minimises sum_j a_j^2 variance_j + |vectors_i - sum_j a_j vectors_j|^2 for ``variance`` (K,) and ``vectors``
    (K, n). Weights up to ``smallest`` then become 0 (the largest never does), and each row sums to one again.
    """
    centred = vectors.double() - vectors.double().mean(dim=0)  # only differences matter
    gram, spread = (centred @ centred.T).cpu().numpy(), variance.double().cpu().numpy()
    ridge = 1e-8 * (gram.diagonal() + spread).mean() + 1e-30  # so that the answer is unique even where nothing varies
    rows = []
    for i, own in enumerate(gram):
        bias = gram - own - own[:, None] + own[i]  # products of the differences to the client's own vector
        rows.append(shortest(bias + np.diag(spread + ridge), first=i))
    a = torch.from_numpy(np.stack(rows)).to(vectors.device)
    a = torch.where((a > smallest) | (a == a.amax(dim=1, keepdim=True)), a, 0.0)
    return a / a.sum(dim=1, keepdim=True)
