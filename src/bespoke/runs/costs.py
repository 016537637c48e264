"""What a run would take of the memory, estimated before it starts."""

import torch

from bespoke.clients import Simulated, processes
from bespoke.core import memory, rng, tree
from bespoke.core.data import FederatedData
from bespoke.runs.experiment import Experiment

_PER_ROW = 32  # bytes at least, to lay out one row of one minibatch


def check_costs(experiment: Experiment, pool: FederatedData, clients: Simulated) -> None:
    """Refuse a run whose minibatches or whose clients' states do not fit into memory."""
    check_passes(experiment, max(pool.train.sizes))
    _check_states(experiment, pool.num_clients, clients)


def check_passes(experiment: Experiment, rows: int) -> None:
    """Refuse a pass that is too long: its minibatches are laid out before its first step.

    Every setting named ``...epochs`` counts passes over a client's rows, every ``...steps`` minibatches.
    """
    tables = experiment.tables()
    for table in ("training", "evaluation", "algorithm"):
        for key, value in tables[table].items():
            each = rows if key.endswith("epochs") else min(rows, experiment.training.batch)
            if key.endswith(("epochs", "steps")) and isinstance(value, int):
                what = f"[{table}] {key} = {value} on a client of {rows:,} rows"
                memory.require(_PER_ROW * each * value, what, "lower it")


def _check_states(experiment: Experiment, number: int, clients: Simulated) -> None:
    """Refuse states of so many clients that do not fit into this machine's memory, where they are kept there."""
    store, training = clients.store, experiment.training
    if store.kind == "disk" or (store.kind == "device" and clients.task.device.type != "cpu"):
        return
    drawn = training.rounds * rng.cohort_size(number, training.rate)
    kept = number if training.full_last else min(number, drawn)
    kept = kept * processes.on_this_machine() // processes.world()
    one = tree.nbytes(clients.work.first(clients.params, torch.tensor(-1, device=clients.task.device)))
    memory.require(
        kept * one, f"the states of {kept:,} clients, {memory.in_words(one)} each,", "keep the states on disk"
    )
