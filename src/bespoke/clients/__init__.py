"""Ways to reach clients: one after another, a cohort at once, or spread over processes; `network` has another."""

from bespoke.clients.batched import BatchedClients
from bespoke.clients.protocol import Clients, Evaluated, Inspectable, Trained
from bespoke.clients.sequential import SequentialClients
from bespoke.clients.sharded import ShardedClients
from bespoke.clients.simulated import Simulated
from bespoke.clients.states import StateStore

__all__ = [
    "BatchedClients",
    "Clients",
    "Evaluated",
    "Inspectable",
    "SequentialClients",
    "ShardedClients",
    "Simulated",
    "StateStore",
    "Trained",
]
