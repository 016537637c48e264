"""The contract on a CUDA device, where there is one: `make test` on a machine without one reports these as skipped."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import pytest
import torch
from small_runs import last_tensors

from bespoke import contract
from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.ditto import Ditto
from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedpac import FedPAC
from bespoke.algorithms.fedpce import FedPCE
from bespoke.algorithms.fedrep import FedRep
from bespoke.algorithms.pfedfda import PFedFDA
from bespoke.algorithms.pfedvmp import PFedVMP
from bespoke.clients import BatchedClients, SequentialClients
from bespoke.clients.simulated import Call
from bespoke.clients.work import Work
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import FederatedData, Rows
from bespoke.core.settings import Training
from bespoke.models import ModelSettings, build_task
from bespoke.records import RunFolder
from bespoke.runs.federation import Federation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_contract_on_cuda(name):
    assert contract.check_method(ALGORITHMS[name](), device="cuda", tolerance=1e-8) == list(contract.CHECKS)


@pytest.mark.parametrize("name", ["ditto", "fedavg", "fedrep", "pfedfda"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_contract_on_cuda_with_kept_moments_and_without_clipping(name, optimizer, monkeypatch):
    monkeypatch.setattr(contract, "ADAM", replace(contract.ADAM, optimizer=optimizer, clip=0.0))
    subject = contract.Subject(ALGORITHMS[name](), "cuda", 1e-8)
    contract.loop_equals_batched_with_kept_moments(subject)


@pytest.mark.parametrize("name", ["pfedme", "per_fedavg", "pfedbred"])
def test_a_methods_own_gradient_under_the_optimiser_on_cuda(name):
    method = ALGORITHMS[name](optimizer="training")
    assert contract.check_method(method, device="cuda", tolerance=1e-8) == list(contract.CHECKS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_cuda_equals_the_cpu(name):
    method = ALGORITHMS[name]()
    cpu, cuda = (contract.trial(contract.Subject(method, device)) for device in ("cpu", "cuda"))
    for here, there in zip(cpu.evaluated, cuda.evaluated, strict=True):
        assert (here[:4], here.metrics["accuracy"]) == (there[:4], there.metrics["accuracy"]) and abs(
            here.metrics["loss"][0] - there.metrics["loss"][0]
        ) < 1e-6


def test_integers_and_uniforms_are_equal_to_the_bit():
    counters = torch.arange(10_000)
    here, there = rng.key(2**40 + 3), rng.key(2**40 + 3, "cuda")
    assert torch.equal(rng.bits(here, counters), rng.bits(there, counters.cuda()).cpu())
    assert torch.equal(rng.uniform(here, (1000,)), rng.uniform(there, (1000,)).cpu())
    assert torch.equal(rng.shuffle(here, 999, 700), rng.shuffle(there, 999, 700).cpu())
    assert torch.allclose(rng.normal(here, (1000,)), rng.normal(there, (1000,)).cpu(), rtol=0, atol=1e-6)


# --- recorded graphs --------------------------------------------------------------------------------------------

GROWING = (40, 44, 48, 52, 56, 60, 20, 9)  # cohorts whose largest client grows within one recorded shape


def small_pool(side=16):
    total = 2 * sum(GROWING)
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (total, 3, side, side), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, 4, (total,), generator=draw)
    rows = list(torch.arange(total).split([n for n in GROWING for _ in range(2)]))
    none = Rows.of([[]] * len(GROWING))
    return FederatedData(x, y, Rows.of(rows[::2]), Rows.of(rows[1::2]), none, 4, len(GROWING), tuple("abcdefgh"))


COHORTS = ([6, 0], [6, 1], [7, 2, 6], [7, 3, 6], [0, 1, 4, 5], [2, 3, 4, 5], [5, 6], [5, 6])


SGD = Training(rounds=8, epochs=2, batch=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
SMALL = ModelSettings("cnn", width=8, hidden=16)


def played(method, precision="fp32", training=SGD, model=SMALL, backend=BatchedClients, **options):
    """Server, counts and clients after a round for each cohort and two evaluations."""
    side = 32 if model.name == "fedpce_resnet18" else 16  # it needs the larger ones
    task = build_task(model, (3, side, side), 4, "cuda", precision=precision)
    params = task.init(rng.key(0))
    clients = backend(method, task, params, small_pool(side), training, seed=3, **options)
    federation, breaks = Federation.simulated(clients, seed=3), 0
    for done in federation.rounds(cohort=lambda number: COHORTS[number - 1]):
        assert not done.refused
        breaks += done.trained.host_breaks
    counts = [federation.evaluate(done) for _ in range(3)]
    return done.server, counts, clients, breaks


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", [FedAvg(), Ditto(), PFedFDA(), PFedVMP(xi=1.0)], ids=lambda m: type(m).__name__)
def test_recorded_equals_eager_to_the_bit(method, precision):
    eager, eager_counts, _, _ = played(method, precision, graphs=False)
    server, counts, clients, _ = played(method, precision)
    assert clients.notes == []
    assert len(clients.runner._plans) > 0
    seconds = clients.runner.timings()
    assert {"recording", "steps", "update"} < seconds.keys() and min(seconds.values()) > 0
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(eager), tree.leaves(server), strict=True))
    assert counts == eager_counts


ADAM = replace(SGD, optimizer="adam", lr=1e-3, momentum=0.0, keep_optimizer=True)
OTHERS = {
    "Adam": (ADAM, SMALL),
    "AdamW": (replace(ADAM, optimizer="adamw", keep_optimizer=False), SMALL),
    "AdamW, kept": (replace(ADAM, optimizer="adamw"), SMALL),
    "WRN-16-2": (SGD, ModelSettings("wrn16_2")),
    "ResNet-18": (replace(SGD, lr=0.01), ModelSettings("resnet18", stem="cifar", width=16, norm="group")),
    "FedPCE's ResNet-18": (ADAM, ModelSettings("fedpce_resnet18", width=16)),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OTHERS)
def test_recorded_equals_eager_for_other_optimisers_and_nets(name, precision):
    training, model = OTHERS[name]
    method = FedPCE() if "FedPCE" in name else FedAvg()
    eager, eager_counts, _, _ = played(method, precision, training, model, graphs=False)
    server, counts, clients, _ = played(method, precision, training, model)
    assert clients.notes == [] and len(clients.runner._plans) > 0
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(eager), tree.leaves(server), strict=True))
    assert counts == eager_counts


@pytest.mark.parametrize("name", ["Adam", "AdamW", "WRN-16-2", "ResNet-18"])
def test_a_cohort_at_once_trains_as_one_after_another(name, monkeypatch):
    """In float32 on CUDA, where a cohort's optimiser is a kernel; few steps, since deep nets double every rounding."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    training, model = OTHERS[name]
    training = replace(training, rounds=1, steps=3)
    start, alone, together = (
        played(FedAvg(), "fp32", replace(training, lr=lr), model, backend)[0]
        for lr, backend in ((1e-12, BatchedClients), (1e-3, SequentialClients), (1e-3, BatchedClients))
    )
    moved = sum((a - b).square().sum() for a, b in zip(tree.leaves(alone), tree.leaves(start), strict=True)).sqrt()
    apart = sum((a - b).square().sum() for a, b in zip(tree.leaves(alone), tree.leaves(together), strict=True)).sqrt()
    assert moved > 1e-3 and apart < 0.01 * moved, (moved.item(), apart.item())


def adapted(method, adapt_rounds, graphs=True):
    """Two evaluations and the personal models of six new clients after a round of two others, and the clients."""
    settings = ModelSettings("cnn", width=8, hidden=16, norm="group")
    task = build_task(settings, (3, 16, 16), 4, "cuda", precision="fp32")
    training = Training(rounds=2, steps=5, batch=8, optimizer="adam", lr=1e-2, schedule="cosine", keep_optimizer=True)
    pool, new = replace(small_pool(), num_clients=2), range(2, len(GROWING))
    options = {"adapt_rounds": adapt_rounds, "graphs": graphs}
    clients = BatchedClients(method, task, task.init(rng.key(0)), pool, training, seed=3, **options)
    federation = Federation.simulated(clients, seed=3)
    server = next(federation.rounds()).server
    down = federation.down(server, new)
    rows = [clients.evaluate(1, new, *down) for _ in range(2)]
    assert clients.notes == [] and rows[0] == rows[1]
    return rows[0], clients.personal(1, new, *down), clients


@pytest.mark.parametrize(
    "method",
    [FedPCE(), FedRep(head_epochs=1), Ditto(), PFedFDA(test_statistics="trained"), FedPAC()],
    ids=lambda m: type(m).__name__,
)
def test_all_rounds_of_adaptation_share_one_recording(method):
    eager_rows, eager_models, _ = adapted(method, 6, graphs=False)
    rows, models, clients = adapted(method, 6)
    assert rows == eager_rows
    for one, two in zip(models, eager_models, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(one), tree.leaves(two), strict=True))
    runner, fewer = clients.runner, adapted(method, 3)[2].runner
    assert any(name.startswith("adapt") for name, *_ in runner._plans) and "adapt" in runner.timings()
    assert len(runner._plans) == len(fewer._plans) and len(runner._programs) == len(fewer._programs)


def test_a_host_function_breaks_the_recording_and_is_counted():
    method = PFedFDA(repair=True)
    eager, *_ = played(method, graphs=False)
    server, _, clients, breaks = played(method)
    assert clients.notes == [] and breaks == len(COHORTS)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(eager), tree.leaves(server), strict=True))


@final
@dataclass(frozen=True)
class Decomposing(Algorithm):
    """Uses an operation that cannot be recorded, and says nothing of it."""

    def client_update(self, local, state, down):
        model = local.sgd(local.task.loss, down["model"])
        spread = torch.linalg.eigvalsh(torch.outer(model["head.bias"], model["head.bias"]))
        local.log(spread=spread.sum())
        return state, {"model": model}

    def personalize(self, local, state, down):
        return down["model"]


def test_what_cannot_be_recorded_runs_eagerly_with_a_note():
    eager, *_ = played(Decomposing(), graphs=False)
    server, _, clients, _ = played(Decomposing())
    assert len(clients.notes) == 1 and "update runs without a recorded graph" in clients.notes[0]
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(eager), tree.leaves(server), strict=True))
    after, *_ = played(FedAvg())  # a spoilt recording leaves nothing behind
    again, *_ = played(FedAvg(), graphs=False)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(after), tree.leaves(again), strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("method", [FedAvg(), PFedFDA(), PFedFDA(train_statistics="epochs")], ids=str)
def test_clients_work_without_waiting_for_the_device(method):
    server, _, clients, _ = played(method)
    call = Call(Work.update, [5, 6], rng.TRAIN, 9, method.broadcast(server), {}, name="update")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        clients._run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_first_run_compiles_in_a_rehearsal_and_has_the_same_bits(tmp_path):
    """Each run is a process of its own with an empty cache; one is without a rehearsal."""
    script, found, servers = Path(__file__).parents[1] / "first_run.py", {}, {}
    for how in ("with", "without"):
        cache = {
            "TRITON_CACHE_DIR": str(tmp_path / f"{how}_cache"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        call = [sys.executable, str(script), how, str(tmp_path / how)]
        done = subprocess.run(call, env=os.environ | cache, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        found[how] = json.loads(done.stdout.splitlines()[-1])
        servers[how] = torch.load(tmp_path / how, weights_only=True)
        assert found[how]["notes"] == [] and len(found[how]["rehearsed"]) == 1
    layers = {"_pack_maps", "_pack_weight", "_forward", "_weight_gradient", "_sum_parts", "_input_gradient"}
    wanted = layers | {"_threefry", "_sgd"}
    rehearsed, alone = found["with"]["rehearsed"][0], found["without"]["rehearsed"][0]
    assert wanted <= set(rehearsed) and not layers & set(alone)
    assert found["with"]["rounds"] == [rehearsed, rehearsed]  # the work itself compiled nothing more,
    assert sorted(rehearsed) == sorted(found["without"]["rounds"][-1])  # and nothing was compiled in vain
    with_it, without = servers["with"], servers["without"]
    assert with_it.keys() == without.keys() and all(torch.equal(with_it[k], without[k]) for k in with_it)


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
    counts = [
        [(r["client"], r["metrics"]["accuracy"][0]) for r in RunFolder(tmp_path / name).clients()] for name in runs
    ]
    assert counts[0] == counts[1] and len(counts[0]) == 8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_is_found_on_the_device(bad):
    leaf = torch.ones(1000, 37, device="cuda")
    assert tree.finite({"a": {"b": leaf}})
    leaf[999, 36] = bad
    assert not tree.finite({"a": {"b": leaf}})
