"""The contract on a CUDA device, where there is one: `make test` on a machine without one reports these as skipped."""

import pytest
import torch

from bespoke import contract
from bespoke.algorithms import ALGORITHMS
from bespoke.core import rng

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_contract_on_cuda(name):
    assert contract.check_method(ALGORITHMS[name](), device="cuda", tolerance=1e-8) == list(contract.CHECKS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_cuda_equals_the_cpu(name):
    method = ALGORITHMS[name]()
    cpu, cuda = (contract.trial(contract.Subject(method, device)) for device in ("cpu", "cuda"))
    for here, there in zip(cpu.evaluated, cuda.evaluated, strict=True):
        assert here[:5] == there[:5] and abs(here.loss_sum - there.loss_sum) < 1e-6


def test_integers_and_uniforms_are_equal_to_the_bit():
    counters = torch.arange(10_000)
    here, there = rng.key(2**40 + 3), rng.key(2**40 + 3, "cuda")
    assert torch.equal(rng.bits(here, counters), rng.bits(there, counters.cuda()).cpu())
    assert torch.equal(rng.uniform(here, (1000,)), rng.uniform(there, (1000,)).cpu())
    assert torch.equal(rng.shuffle(here, 999, 700), rng.shuffle(there, 999, 700).cpu())
    assert torch.allclose(rng.normal(here, (1000,)), rng.normal(there, (1000,)).cpu(), rtol=0, atol=1e-6)
