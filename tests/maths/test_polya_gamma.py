"""Polya-Gamma draws against the moments of the closed form."""

import pytest
import torch

from bespoke.core import rng
from bespoke.maths import polya_gamma


def test_polya_gamma_draws_have_the_mean_and_variance_of_the_closed_form():
    c = torch.tensor([0.01, 0.5, 2.0, 5.0, 10.0], dtype=torch.float64)
    draws = 10_000
    found = polya_gamma.draw(c[:, None].expand(-1, draws), rng.key(4))
    mean = torch.tanh(c / 2.0) / (2.0 * c)
    variance = (torch.sinh(c) - c) / (4.0 * c**3 * torch.cosh(c / 2.0) ** 2)
    assert ((found.mean(dim=1) - mean).abs() < 5.0 * (variance / draws).sqrt()).all()
    assert (found.var(dim=1) / variance - 1.0).abs().max() < 0.1
    assert (found > 0).all()
    assert torch.allclose(polya_gamma.mean(c), mean, rtol=1e-14)
    assert polya_gamma.mean(torch.zeros(1, dtype=torch.float64)).item() == pytest.approx(0.25, abs=1e-12)
    short = polya_gamma.draw(c[:, None].expand(-1, 7), rng.key(4))
    assert torch.allclose(short, found[:, :7], rtol=1e-13)  # more entries change no draw
