"""FedPA: with one sample, or in warm rounds, it is FedAvg."""

import pytest
from golden_runs import ROUNDS, run, training
from toy import BACKENDS, gap, same_bits

from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedpa import FedPA

pytestmark = pytest.mark.xdist_group("fedpa")
PLAIN = {"server_lr": 1.0, "server_momentum": 0.0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedpa_with_one_sample_is_fedavg(backend):
    def models(method):
        return [server["model"] for server in run(method, training("momentum", batch=4, epochs=2), backend).server]

    plain, one = models(FedAvg()), models(FedPA(samples=1, **PLAIN))
    assert max(gap(a, b) for a, b in zip(one, plain, strict=True)) < 1e-14
    assert same_bits(models(FedPA(warm_rounds=ROUNDS, **PLAIN))[-1], one[-1])
    assert gap(models(FedPA(**PLAIN))[-1], plain[-1]) > 1e-3


def test_the_fine_tuned_name_is_the_plain_one_with_five_epochs():
    assert ALGORITHMS["fedpa"]() == FedPA() == FedPA(finetune_epochs=0)
    assert ALGORITHMS["fedpa_ft"]() == FedPA(finetune_epochs=5)
