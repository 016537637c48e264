"""Partitions: how rows become clients."""
