"""The version of bespoke, written here and nowhere else."""

__version__ = "0.1.0"
