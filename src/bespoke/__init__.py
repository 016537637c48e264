"""bespoke: personalised federated learning, a model for every client.

Public names are imported on first use, so that ``import bespoke`` and the command line's help need no torch.
"""

from importlib import import_module
from typing import Any

from bespoke._version import __version__

_NAMES = {
    "Algorithm": "bespoke.core.algorithm",
    "Uploads": "bespoke.core.algorithm",
    "Local": "bespoke.core.local",
    "Batch": "bespoke.core.data",
    "Task": "bespoke.core.task",
    "Objective": "bespoke.core.objective",
    "ObjectiveSettings": "bespoke.core.objective",
    "Metric": "bespoke.core.objective",
    "OBJECTIVES": "bespoke.core.objective",
    "METRICS": "bespoke.core.objective",
    "Training": "bespoke.core.settings",
    "knob": "bespoke.core.settings",
    "tree": "bespoke.core.tree",
    "data": "bespoke.data",
    "models": "bespoke.models",
    "report": "bespoke.report",
    "analysis": "bespoke.analysis",
    "rng": "bespoke.core.rng",
    "ALGORITHMS": "bespoke.algorithms",
    "register": "bespoke.algorithms",
    "register_model": "bespoke.models",
    "register_dataset": "bespoke.data",
    "register_partition": "bespoke.data",
    "register_objective": "bespoke.core.objective",
    "LocalOnly": "bespoke.algorithms",
    "FedAvg": "bespoke.algorithms",
    "FedProx": "bespoke.algorithms",
    "FedPer": "bespoke.algorithms",
    "FedRep": "bespoke.algorithms",
    "LGFedAvg": "bespoke.algorithms",
    "Ditto": "bespoke.algorithms",
    "PFedFDA": "bespoke.algorithms",
    "SelfFL": "bespoke.algorithms",
    "FedLDA": "bespoke.algorithms",
    "FedPCE": "bespoke.algorithms",
    "PFedVMP": "bespoke.algorithms",
    "APFL": "bespoke.algorithms",
    "PFedMe": "bespoke.algorithms",
    "PerFedAvg": "bespoke.algorithms",
    "FedRoD": "bespoke.algorithms",
    "FedBABU": "bespoke.algorithms",
    "FedBN": "bespoke.algorithms",
    "FedPAC": "bespoke.algorithms",
    "FedProto": "bespoke.algorithms",
    "MOON": "bespoke.algorithms",
    "FedCP": "bespoke.algorithms",
    "GPFL": "bespoke.algorithms",
    "FedPA": "bespoke.algorithms",
    "FedEP": "bespoke.algorithms",
    "QLSD": "bespoke.algorithms",
    "PFedGP": "bespoke.algorithms",
    "PFedBreD": "bespoke.algorithms",
    "FedOpt": "bespoke.algorithms",
    "Scaffold": "bespoke.algorithms",
    "FedDyn": "bespoke.algorithms",
    "FedALA": "bespoke.algorithms",
    "Experiment": "bespoke.runs.experiment",
    "Evaluation": "bespoke.runs.federation",
    "FederationSettings": "bespoke.network.settings",
    "DataSettings": "bespoke.data",
    "ModelSettings": "bespoke.models",
    "run": "bespoke.runs.api",
    "federate": "bespoke.runs.api",
    "Run": "bespoke.runs.results",
    "PersonalModel": "bespoke.runs.personal",
    "load_model": "bespoke.runs.personal",
    "open_run": "bespoke.runs.opened",
    "check_method": "bespoke.contract",
    "compare": "bespoke.report",
    "summarise": "bespoke.report",
    "UserError": "bespoke.errors",
}

__all__ = ["__version__", *sorted(_NAMES)]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'bespoke' has no attribute {name!r}")
    module = import_module(_NAMES[name])
    return module if _NAMES[name].endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return list(__all__)
