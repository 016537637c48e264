"""The contract on a CUDA device, where there is one: `make test` on a machine without one reports these as skipped."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from small_runs import last_tensors

from bespoke import contract
from bespoke.algorithms import ALGORITHMS
from bespoke.core import rng
from bespoke.records import RunFolder

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


TWO = """
import sys
import bespoke
experiment = bespoke.Experiment(
    data=bespoke.DataSettings(name="digits", partition="dirichlet", alpha=0.3, clients=8),
    model=bespoke.ModelSettings(name="cnn"),
    algorithm=bespoke.FedRep(head_epochs=1),
    training=bespoke.Training(rounds=3, lr=0.05, rate=0.5),
)
bespoke.run(experiment, sys.argv[1], device="cuda", backend="loop", precision="fp32")
"""


def test_two_processes_gather_over_nccl(tmp_path):
    """Two processes that share a GPU: NCCL lets them if they call themselves two machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    runs = {"one": [{}], "two": [{"WORLD_SIZE": "2", "RANK": r, "NCCL_HOSTID": r} | common for r in "01"]}
    for name, processes in runs.items():
        call = [sys.executable, "-c", TWO, str(tmp_path / name)]
        started = [subprocess.Popen(call, env=os.environ | env) for env in processes]
        assert [process.wait(timeout=200) for process in started] == [0] * len(started)
    one, two = (last_tensors(tmp_path / name) for name in runs)
    assert one.keys() == two.keys() and all(torch.allclose(one[k], two[k], rtol=0, atol=1e-6) for k in one)
    counts = [[(r["client"], r["correct"]) for r in RunFolder(tmp_path / name).clients()] for name in runs]
    assert counts[0] == counts[1] and len(counts[0]) == 8
