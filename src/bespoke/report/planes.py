"""Vectors in the plane: principal components, and t-SNE with a fixed seed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SAME = 1e-20  # vectors that are no further apart are the same; scikit-learn's t-SNE does not end well with them
MOST = 30.0  # perplexity of t-SNE for many vectors


def principal(vectors: ArrayLike, dims: int = 2) -> NDArray[np.float64]:
    """Return vectors (N, D) in at most `dims` principal components: (N, min(dims, N, D))."""
    from sklearn.decomposition import PCA

    found = np.asarray(vectors, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # of vectors that are all the same
        return np.asarray(PCA(min(dims, *found.shape), svd_solver="full").fit_transform(found))


def perplexity(vectors: int) -> float:
    """Return t-SNE's perplexity for this many vectors: a third of them, at least 2 and at most 30."""
    return float(np.clip(round((vectors - 1) / 3), 2, MOST))


def tsne(vectors: ArrayLike) -> NDArray[np.float64]:
    """Return vectors (N, D), N > 2, in two dimensions by t-SNE, begun at the principal components: (N, 2)."""
    from sklearn.manifold import TSNE

    found = np.asarray(vectors, dtype=np.float64)
    if len(found) < 4 or found.shape[1] < 2 or np.ptp(found, axis=0).max() < _SAME:
        return plane(found)  # too few to have neighbours, on a line, or all the same
    settings: dict[str, Any] = {"init": "pca", "random_state": 0, "method": "barnes_hut", "learning_rate": "auto"}
    return np.asarray(TSNE(2, perplexity=perplexity(len(found)), **settings).fit_transform(found), dtype=np.float64)


def plane(vectors: ArrayLike) -> NDArray[np.float64]:
    """Return the first two principal components of vectors (N, D): (N, 2), 0 where there is only one."""
    found = principal(vectors)
    return np.pad(found, ((0, 0), (0, 2 - found.shape[1])))
