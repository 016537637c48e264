"""A federation over Flower's deployment engine, the only place that imports flwr, which is an optional extra."""

import os

# Flower reads both when it is imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
