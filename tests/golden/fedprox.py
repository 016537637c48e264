"""FedProx: FedAvg with mu/2 |w - w_t|^2 added to the local loss."""

from golden.common import BOTH, Case, mistakes
from golden.fedavg import fedavg


def fedprox(problem, mu, finetune_epochs=0, finetune_part="all", twist=""):
    return fedavg(problem, finetune_epochs, finetune_part, mu=mu, twist=twist)


CASES = {
    "fedprox": Case({"mu": 0.7}),
    "fedprox/ft": Case({"mu": 0.7, "finetune_epochs": 2, "finetune_part": "head"}),
}

MISTAKES = [
    *mistakes(
        "fedprox",
        "other weighting",
        "no proximal term",
        "mu instead of mu/2",
        "anchored to itself",
        "anchored to the first model",
        variants=BOTH,
    ),
    *mistakes("fedprox/ft", "no fine-tuning", "fine-tunes the other part", variants=BOTH, late=True),
    *mistakes(CASES, "no momentum", "no weight decay", variants=("momentum",)),
]
