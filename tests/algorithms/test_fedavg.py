"""FedAvg under its two names."""

from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.fedavg import FedAvg


def test_the_fine_tuned_name_is_fedavg_with_five_epochs():
    assert ALGORITHMS["fedavg_ft"]() == FedAvg(finetune_epochs=5)
    assert ALGORITHMS["fedavg"]() == FedAvg(finetune_epochs=0)
