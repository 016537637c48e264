"""Polya-Gamma variables PG(1, c): given them, a logistic likelihood is Gaussian."""

import math

import torch
from torch import Tensor

from bespoke.core import rng


def mean(c: Tensor) -> Tensor:
    """Return E[PG(1, c)] = tanh(c / 2) / (2 c), elementwise; 1/4 at 0."""
    c = c.abs().clamp(min=1e-6)
    return torch.tanh(0.5 * c) / (2.0 * c)


def draw(c: Tensor, key: Tensor, terms: int = 64) -> Tensor:
    """Draw PG(1, c) for each entry of c (T, n) float64, with its row's own key: padding changes no draw.

    Takes the first ``terms`` of the sum of exponentials that defines the variable, and replaces the rest by their mean;
    their variance, which is lost, is below 1e-5 of the whole for c up to 10.
    """
    rows, places = torch.arange(c.shape[0], device=c.device), torch.arange(terms, device=c.device)
    keys = rng.fold_in(rng.fold_in(key, rows), places[:, None])  # (terms, T, 2)
    exponential = -torch.log1p(-rng.uniform(keys[..., None, :], (c.shape[1],), c.dtype))
    weight = 1.0 / ((places[:, None, None] + 0.5) ** 2 + (c / (2.0 * math.pi)).square()) / (2.0 * math.pi**2)
    return mean(c) + (weight * (exponential - 1.0)).sum(dim=0)
