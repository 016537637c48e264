"""APFL: at the ends of alpha it is FedAvg and local training."""

import pytest
import toy
from golden_runs import ROUNDS, SWITCHED, undecayed
from toy import BACKENDS, same_bits

from bespoke.algorithms.apfl import APFL
from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.local import LocalOnly
from bespoke.contract import CHECKS, Subject

pytestmark = pytest.mark.xdist_group("apfl")


def headline(ran, **fields):
    return [(s.round, s.client, s.correct, s.loss_sum) for s in ran.scores(view="personal", **fields)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_apfl_with_alpha_zero_is_fedavg_to_the_bit(backend):
    none, plain = undecayed(APFL(alpha=0.0), backend), undecayed(FedAvg(), backend)
    assert all(same_bits(a, b) for a, b in zip(none.server, plain.server, strict=True))
    for found, want in zip(headline(none), headline(plain), strict=True):
        assert found[:3] == want[:3] and found[3] == pytest.approx(want[3], abs=1e-12)
    assert all(same_bits(s["personal"], toy.start()) for s in none.states[-1].values())  # v never moves
    assert headline(undecayed(APFL(alpha=0.1), backend)) != headline(plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_apfl_with_alpha_one_is_local_training_to_the_bit(backend):
    alone, local = undecayed(APFL(alpha=1.0), backend), undecayed(LocalOnly(), backend)
    for client, state in alone.states[-1].items():
        assert same_bits(state["personal"], local.states[-1][client]["model"])
    last = [[row for row in headline(ran, round=ROUNDS) if row[1] in alone.states[-1]] for ran in (alone, local)]
    assert last[0] == last[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_apfls_alpha_stays_in_its_interval_and_w_moves_as_in_fedavg(backend):
    plain = undecayed(FedAvg(), backend)
    for alpha in (0.02, 0.5, 0.98):
        ran = undecayed(APFL(alpha=alpha, adaptive=True), backend)
        assert all(same_bits(a, b) for a, b in zip(ran.server, plain.server, strict=True))
        found = [float(s["alpha"]) for s in ran.states[-1].values()]
        assert all(0.0 <= a <= 1.0 for a in found) and any(a != alpha for a in found)


@pytest.mark.parametrize("check", SWITCHED)
def test_the_contract_holds_for_the_variants_too(check):
    CHECKS[check](Subject(APFL(adaptive=True, mix="logits")))
