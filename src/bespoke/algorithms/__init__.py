"""The table of methods: name -> factory. A factory called without arguments gives the method's defaults."""

import functools
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from bespoke.algorithms.apfl import APFL
from bespoke.algorithms.ditto import Ditto
from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedbabu import FedBABU
from bespoke.algorithms.fedbn import FedBN
from bespoke.algorithms.fedcp import FedCP
from bespoke.algorithms.fedlda import FedLDA
from bespoke.algorithms.fedpac import FedPAC
from bespoke.algorithms.fedpce import FedPCE
from bespoke.algorithms.fedper import FedPer
from bespoke.algorithms.fedproto import FedProto
from bespoke.algorithms.fedprox import FedProx
from bespoke.algorithms.fedrep import FedRep
from bespoke.algorithms.fedrod import FedRoD
from bespoke.algorithms.gpfl import GPFL
from bespoke.algorithms.lg_fedavg import LGFedAvg
from bespoke.algorithms.local import LocalOnly
from bespoke.algorithms.moon import MOON
from bespoke.algorithms.per_fedavg import PerFedAvg
from bespoke.algorithms.pfedfda import PFedFDA
from bespoke.algorithms.pfedme import PFedMe
from bespoke.algorithms.pfedvmp import PFedVMP
from bespoke.algorithms.self_fl import SelfFL
from bespoke.core.algorithm import Algorithm

Factory = Callable[..., Algorithm]

ALGORITHMS: dict[str, Factory] = {
    "local": LocalOnly,
    "fedavg": FedAvg,
    "fedavg_ft": functools.partial(FedAvg, finetune_epochs=5),
    "fedprox": FedProx,
    "fedper": FedPer,
    "fedrep": FedRep,
    "lg_fedavg": LGFedAvg,
    "ditto": Ditto,
    "pfedfda": PFedFDA,
    "self_fl": SelfFL,
    "fedlda": FedLDA,
    "fedpce": FedPCE,
    "pfedvmp": PFedVMP,
    "apfl": APFL,
    "pfedme": PFedMe,
    "per_fedavg": PerFedAvg,
    "fedrod": FedRoD,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "fedpac": FedPAC,
    "fedproto": FedProto,
    "moon": MOON,
    "fedcp": FedCP,
    "gpfl": GPFL,
}


def register(name: str, factory: Factory) -> None:
    """Add a method of one's own under a name, for experiments and the command line."""
    made = factory()
    if not isinstance(made, Algorithm):
        raise TypeError(f"register({name!r}): the factory gives {type(made).__name__}, not a bespoke Algorithm")
    if name in ALGORITHMS and ALGORITHMS[name] is not factory:
        raise ValueError(f"register({name!r}): the name is taken; choose another")
    ALGORITHMS[name] = factory


def method_class(name: str) -> type[Any]:
    """The dataclass behind a name."""
    factory = ALGORITHMS[name]
    return factory.func if isinstance(factory, functools.partial) else factory  # type: ignore[return-value]


def load_plugins() -> None:
    """Register the methods that installed packages offer in the entry-point group ``bespoke.algorithms``."""
    for entry in entry_points(group="bespoke.algorithms"):
        if entry.name not in ALGORITHMS:
            register(entry.name, entry.load())
