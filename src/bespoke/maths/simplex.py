"""The probability simplex: projection onto it, and batches of quadratic programmes over it."""

import torch
from torch import Tensor

ON_HOST = 64  # programmes of at most this many weights are solved on the host


def project(v: Tensor) -> Tensor:
    """Return the nearest point (..., m) of the simplex {a >= 0, sum a = 1} to each v (..., m).

    It is max(v - t, 0) with the t that makes it sum to one; sorting finds which entries stay above it.
    """
    high = v.sort(dim=-1, descending=True).values
    count = torch.arange(1, v.shape[-1] + 1, dtype=v.dtype, device=v.device)
    level = (high.cumsum(dim=-1) - 1.0) / count
    kept = (high > level).sum(dim=-1, keepdim=True).clamp(min=1)
    return (v - level.gather(-1, kept - 1)).clamp(min=0.0)


def minimise(quadratic: Tensor, linear: Tensor, steps: int = 1000) -> Tensor:
    """Minimise a' Q a / 2 - b' a over a on the simplex, for each row b of ``linear`` (K, m): (K, m), float64.

    ``quadratic`` Q (m, m) is positive definite and the same for all. Projected gradient with Nesterov's momentum, which
    is dropped whenever it points uphill: a fixed number of steps for all programmes.
    """
    # Thousands of launches cost a GPU more than small matrices cost the host.
    device = torch.device("cpu") if len(quadratic) <= ON_HOST else linear.device
    q, b = quadratic.double().to(device), linear.double().to(device)
    largest = q.abs().sum(dim=-1).amax()  # no eigenvalue exceeds the largest row sum
    a = ahead = torch.full_like(b, 1.0 / len(q))
    pace = torch.ones_like(b[:, :1])
    for _ in range(steps):
        new = project(ahead - (ahead @ q - b) / largest)
        uphill = ((ahead - new) * (new - a)).sum(dim=-1, keepdim=True) > 0
        pace = pace.masked_fill(uphill, 1.0)
        faster = 0.5 * (1.0 + (1.0 + 4.0 * pace.square()).sqrt())
        ahead = new + (pace - 1.0) / faster * (new - a)
        a, pace = new, faster
    return a.to(linear.device)


def mixtures(variance: Tensor, vectors: Tensor, smallest: float) -> Tensor:
    """Return for each of K clients the convex mixture of all estimates with the least expected error: (K, K), float64.

    Row i minimises sum_j a_j^2 variance_j + |vectors_i - sum_j a_j vectors_j|^2 for ``variance`` (K,) and ``vectors``
    (K, n). Weights up to ``smallest`` then become 0 (the largest never does), and each row sums to one again.
    """
    centred = vectors.double() - vectors.double().mean(dim=0)  # only differences matter
    gram = centred @ centred.T
    q = gram + torch.diag(variance.double())
    ridge = 1e-8 * torch.trace(q) / len(q) + 1e-30  # so that the answer is unique even where nothing varies
    a = minimise(q + ridge * torch.eye(len(q), dtype=q.dtype, device=q.device), gram)
    a = torch.where((a > smallest) | (a == a.amax(dim=1, keepdim=True)), a, 0.0)
    return a / a.sum(dim=1, keepdim=True)
