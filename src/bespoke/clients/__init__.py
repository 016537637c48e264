"""Ways to reach clients: one after another, a cohort at once, and later over a network."""

from bespoke.clients.base import Clients, Evaluated, Simulated, Trained
from bespoke.clients.batched import BatchedClients
from bespoke.clients.loop import LoopClients

__all__ = ["BatchedClients", "Clients", "Evaluated", "LoopClients", "Simulated", "Trained"]
