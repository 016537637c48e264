"""What ``flwr run`` runs: the apps of the installed package, no code of their own."""

from bespoke.flower.client_app import app as client
from bespoke.flower.server_app import app as server

__all__ = ["client", "server"]
