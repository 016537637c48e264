"""Class-conditional Gaussians with one covariance, which is sent as its lower triangle."""

import numpy as np

from golden.common import BODY, mean, some


def pack(cov):
    return np.concatenate([cov[i, : i + 1] for i in range(len(cov))])


def unpack(flat, d):
    low = np.zeros((d, d))
    low[np.tril_indices(d)] = flat
    return low + np.tril(low, -1).T


def log_prior(y, classes, smooth):
    share = np.array([np.mean(y == c) for c in range(classes)]) + smooth
    return np.log(share / share.sum())


def class_means(z, y, fallback):
    return np.stack([z[y == c].mean(axis=0) if (y == c).any() else row for c, row in enumerate(fallback)])


def covariance(z, y, centre, ridge, less=1):
    total = sum((np.outer(row - centre[c], row - centre[c]) for row, c in zip(z, y, strict=True)), np.zeros([1, 1]))
    return total / max(len(y) - less, 1) + ridge * np.eye(z.shape[1])


def shrink(cov, amount):
    return (1.0 - amount) * cov + amount * np.trace(cov) / len(cov) * np.eye(len(cov))


def lda(mu, cov, prior, amount):
    """Weights and bias of the classifier that Gaussians imply."""
    weight = mu @ np.linalg.inv(shrink(cov, amount))
    return weight, prior - 0.5 * np.einsum("cd,cd->c", mu, weight)


def repaired(cov, floor=1e-15):
    """Clip the eigenvalues of the correlation matrix, make its diagonal 1 again, give back the variances."""
    std = np.sqrt(np.clip(np.diag(cov), 0, None))
    safe = np.where(std > 0, std, 1.0)
    values, vectors = np.linalg.eigh(cov / np.outer(safe, safe))
    if (values > floor).all():
        return cov
    corr = vectors @ np.diag(np.maximum(values, floor)) @ vectors.T
    scale = np.sqrt(np.diag(corr))
    return corr / np.outer(scale, scale) * np.outer(std, std)


def averaged(problem, cohort, ups, twist):
    """The server's next body, means and packed covariance, weighted alike."""
    parts = [ups[k]["body"] | {"mean": ups[k]["mean"], "cov": ups[k]["cov"]} for k in cohort]
    total = mean(problem, cohort, parts, twist)
    return {"body": some(total, BODY), "mean": total["mean"], "cov": total["cov"]}
