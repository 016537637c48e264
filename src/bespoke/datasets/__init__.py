"""Data sets, partitions, and federations made of them or of one's own arrays."""

from bespoke.datasets.examples import Examples, Loader
from bespoke.datasets.federate import DATASETS, federate_data, from_arrays, partitioned
from bespoke.datasets.partition import Partition
from bespoke.datasets.pool import pool_of
from bespoke.datasets.schemes import PARTITIONS
from bespoke.datasets.settings import DataSettings

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "DataSettings",
    "Examples",
    "Loader",
    "Partition",
    "federate_data",
    "from_arrays",
    "partitioned",
    "pool_of",
]
