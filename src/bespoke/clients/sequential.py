"""Clients one after another: the reference that every faster way must match."""

import torch

from bespoke.clients.simulated import Call, Mapped, Simulated
from bespoke.clients.work import desk_alone
from bespoke.core import rng, tree
from bespoke.core.local import collected
from bespoke.core.tree import Tree


class SequentialClients(Simulated):
    """Each client alone, with exactly its own rows: nothing is padded and nothing is mapped."""

    name = "loop"

    def _map(self, call: Call) -> Mapped:
        return one_by_one(self, call)


def one_by_one(clients: Simulated, call: Call) -> Mapped:
    """Run a call for one client after another."""
    results, breaks = list[Tree](), 0
    ids = torch.tensor(list(call.clients), device=clients.root.device)
    keys = rng.stream(clients.root, call.purpose, call.round, ids)
    time = clients.clock(call)
    for i, client in enumerate(call.clients):
        try:
            out, broke = _one(clients, call.part([i]), keys[i], time)
        except Exception as error:
            method, name = type(clients.algorithm).__name__, clients.pool.names[client]
            error.add_note(f"This happened in {method}, client {client} ({name}), round {call.round}.")
            raise
        results.append(out)
        breaks += broke
    return Mapped(tree.stack(results), 0.0, breaks)


def _one(clients: Simulated, call: Call, key: torch.Tensor, time: Tree) -> tuple[Tree, int]:
    client = call.clients[0]
    n = clients.pool.train.sizes[client]
    splits = clients.held_out() if call.held_out else {}
    held_out = {name: clients.rows_of(lists, client) for name, lists in splits.items()}
    own, kept = (tree.map(lambda x: x[0], part) for part in (call.own, clients.kept(call)))
    rows = clients.rows_of(clients.pool.train, client, call.width)
    local = desk_alone(clients.task, clients.training, rows, n, key, time, kept["moments"])
    with torch.no_grad():
        out = tree.detach(call.fn(clients.work, local, held_out, kept["state"], call.shared | own))
    return out, collected(local).breaks
