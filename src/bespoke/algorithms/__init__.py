"""The table of methods: name -> factory. Called without arguments, a factory gives the defaults."""

import functools
from collections.abc import Callable
from typing import Any

from bespoke.algorithms.apfl import APFL
from bespoke.algorithms.ditto import Ditto
from bespoke.algorithms.fedala import FedALA
from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedbabu import FedBABU
from bespoke.algorithms.fedbn import FedBN
from bespoke.algorithms.fedcp import FedCP
from bespoke.algorithms.feddyn import FedDyn
from bespoke.algorithms.fedep import FedEP
from bespoke.algorithms.fedlda import FedLDA
from bespoke.algorithms.fedopt import FedOpt
from bespoke.algorithms.fedpa import FedPA
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
from bespoke.algorithms.pfedbred import PFedBreD
from bespoke.algorithms.pfedfda import PFedFDA
from bespoke.algorithms.pfedgp import PFedGP
from bespoke.algorithms.pfedme import PFedMe
from bespoke.algorithms.pfedvmp import PFedVMP
from bespoke.algorithms.qlsd import QLSD
from bespoke.algorithms.scaffold import Scaffold
from bespoke.algorithms.self_fl import SelfFL
from bespoke.core.algorithm import Algorithm
from bespoke.errors import UserError, reason
from bespoke.registry import Registry

Factory = Callable[..., Algorithm]

_SHIPPED: dict[str, Factory] = {
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
    "fedpa": FedPA,
    "fedpa_ft": functools.partial(FedPA, finetune_epochs=5),
    "fedep": FedEP,
    "fedep_ft": functools.partial(FedEP, finetune_epochs=5),
    "qlsd": QLSD,
    "qlsd_ft": functools.partial(QLSD, finetune_epochs=5),
    "pfedgp": PFedGP,
    "pfedbred": PFedBreD,
    "fedavgm": FedOpt,
    "fedadam": functools.partial(FedOpt, rule="adam", server_lr=0.1),
    "fedyogi": functools.partial(FedOpt, rule="yogi", server_lr=0.1),
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "fedala": FedALA,
}


def _factory(thing: Any, where: str) -> Factory:
    """Check that ``thing`` makes a method when called without arguments."""
    if isinstance(thing, Algorithm):
        raise UserError(f"{where}: give the class {type(thing).__name__} itself, without ()")
    if not callable(thing):
        raise UserError(f"{where}: {thing!r} is not a method: give a subclass of bespoke.Algorithm")
    name = getattr(thing, "__name__", repr(thing))
    try:
        made = thing()
    except Exception as error:  # a user's class may fail in any way
        raise UserError(
            f"{where}: {name}() fails ({reason(error)}): give every field a default that is allowed"
        ) from error
    if not isinstance(made, Algorithm):
        raise UserError(
            f"{where}: {name} gives a {type(made).__name__}, not a bespoke.Algorithm: "
            "derive your class from it"
        )
    return thing


ALGORITHMS: Registry[Factory] = Registry("method", _SHIPPED, _factory, "bespoke.algorithms")


def register(name: str, factory: Factory) -> None:
    """Add your own subclass of :class:`Algorithm`, for experiments and the command line.

    Registering your own name again replaces the method.
    """
    ALGORITHMS.register(name, factory, "register")


def method_class(name: str) -> type[Algorithm]:
    """Return the dataclass behind a name."""
    return type(ALGORITHMS[name]())
