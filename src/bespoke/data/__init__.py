"""Data sets, partitions, and federations made from them or from your own arrays."""

from bespoke.data.examples import Examples
from bespoke.data.federate import DATASETS, federate_data, from_arrays, partitioned, register_dataset
from bespoke.data.partition.basic import Partition
from bespoke.data.partition.schemes import PARTITIONS, register_partition
from bespoke.data.pool import pool_of
from bespoke.data.scales import odd_scales
from bespoke.data.settings import DataSettings
from bespoke.data.sources.own import (
    OwnClients,
    from_csv,
    from_hf,
    from_image_folder,
    from_parquet,
    read_rows,
    read_test_rows,
)
from bespoke.data.transforms import Crop, Flip, Normalise

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Crop",
    "DataSettings",
    "Examples",
    "Flip",
    "Normalise",
    "OwnClients",
    "Partition",
    "federate_data",
    "from_arrays",
    "from_csv",
    "from_hf",
    "from_image_folder",
    "from_parquet",
    "odd_scales",
    "partitioned",
    "pool_of",
    "read_rows",
    "read_test_rows",
    "register_dataset",
    "register_partition",
]
