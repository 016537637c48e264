"""Clients one after another: the reference that every faster way must equal."""

import torch

from bespoke.clients.simulated import Call, Mapped, Simulated
from bespoke.core import rng, tree


class SequentialClients(Simulated):
    """Each client alone, with exactly its own rows: nothing is padded and nothing is mapped."""

    name = "loop"

    def _map(self, call: Call) -> Mapped:
        return one_by_one(self, call)


def one_by_one(clients: Simulated, call: Call) -> Mapped:
    """Run a call for one client after another."""
    pool, results, breaks = clients.pool, [], 0
    ids = torch.tensor(list(call.clients), device=clients.root.device)
    keys = rng.stream(clients.root, call.purpose, call.round, ids)
    clock = clients.clock(call.round)
    for i, client in enumerate(call.clients):
        n = pool.train.sizes[client]
        rows, size = pool.train.block([client], call.width or n)
        extra = tree.map(lambda x, c=client: x[c], pool.extra)
        held_out = {}
        for name, lists in clients.held_out().items() if call.held_out else ():
            split_rows, split_size = lists.block([client], max(1, lists.sizes[client]))
            held_out[name] = clients.data(split_rows[0], split_size[0], extra)
        stored = tree.map(lambda x: x[0], clients.stored([client]))
        data = clients.data(rows[0], size[0], extra)
        local = clients.desk(clock, data, keys[i], stored["moments"], n, n)
        down = call.shared | tree.map(lambda x, i=i: x[i], call.own)
        with torch.no_grad():
            results.append(tree.detach(call.fn(local, held_out, stored["state"], down)))
        breaks += local.breaks
    return Mapped(tree.stack(results), 0.0, breaks)
