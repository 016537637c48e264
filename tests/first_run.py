"""Two rounds on CUDA in a process of their own, with or without a rehearsal: what is compiled, and when.

``python first_run.py with|without FILE`` writes the server's tensors to FILE and prints as JSON the kernels compiled
before the end of each rehearsal and of each round.
"""

import json
import sys

import torch
import triton
from toy import data_of

from bespoke.algorithms.fedavg import FedAvg
from bespoke.clients import BatchedClients
from bespoke.core import rng, tree
from bespoke.core.settings import Training
from bespoke.engine import graphs
from bespoke.models import ModelSettings, build_task
from bespoke.runs.federation import Federation

SIZES = (60, 44, 40, 21, 9)  # few of them finish at the same time: most numbers of lanes occur


def main(how, file):
    compiled, rehearsed, rounds = [], [], []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled.append(src.name)
    rehearse = graphs.rehearse

    def counted(work):
        if how == "with":
            rehearse(work)
        rehearsed.append(list(compiled))

    graphs.rehearse = counted
    task = build_task(ModelSettings("cnn", width=8, hidden=16), (3, 16, 16), 4, "cuda", precision="bf16")
    total, draw = sum(SIZES), torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (total, 3, 16, 16), dtype=torch.uint8, generator=draw)
    data = data_of(x, torch.arange(total) % 4, torch.arange(total).split(SIZES), classes=4)
    training = Training(rounds=2, epochs=2, batch=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
    clients = BatchedClients(FedAvg(), task, task.init(rng.key(0)), data, training, seed=3)
    for done in Federation.simulated(clients, seed=3).rounds(cohort=lambda number: list(range(len(SIZES)))):
        assert not done.refused
        rounds.append(list(compiled))
    torch.save(tree.flatten(tree.to(done.server, "cpu")), file)
    print(json.dumps({"rehearsed": rehearsed, "rounds": rounds, "notes": clients.notes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
