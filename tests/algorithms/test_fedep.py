"""FedEP: the product of all factors, and where the rounds lead."""

import numpy as np
import pytest
import toy
from golden_runs import library, run, training
from toy import BACKENDS, CLASSES, POPULATION, TRAIN_ROWS, gap

from bespoke.algorithms import ALGORITHMS
from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.fedep import FedEP
from bespoke.core import tree

pytestmark = pytest.mark.xdist_group("fedep")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_product_of_all_factors_is_q_whoever_takes_part(backend):
    ran = library("fedep", "plain", backend)
    assert any(len(row["cohort"]) < POPULATION for row in ran.rounds())
    for server, states in zip(ran.server, ran.states, strict=True):
        product = server["first"]  # the factors start as powers of q, which multiply to q
        for k in range(POPULATION):
            if k in states:
                gained = tree.add(states[k]["site"], states[k]["pending"], server["damping"][k])
                product = tree.add(product, gained)
        assert gap(product, server["model"]) < 1e-12
    assert gap(ran.server[-1]["first"], ran.server[-1]["model"]) > 1e-2


def minimiser(by_rows):
    """Of the sum of the clients' quadratic losses, by rows or each client alike."""
    top = bottom = 0.0
    for rows, n in zip(toy.arrays()[0][:POPULATION], TRAIN_ROWS, strict=False):
        x, weight = rows[:n, :CLASSES], n if by_rows else 1.0
        curvature = 0.3 + (x**2).mean(axis=0)
        top, bottom = top + weight * curvature * x.mean(axis=0), bottom + weight * curvature
    return top / bottom


def settled(method, rounds):
    """Where the mean of q ends with everyone taking part."""
    settings, everyone = training("plain", epochs=4, lr=0.2, rounds=rounds), [list(range(POPULATION))]
    ran = run(method, settings, "loop", task=toy.task(toy.OwnQuadratic), cohorts=everyone * rounds, inspect=False)
    return ran.server[-1]["model"]["head.bias"].numpy()


def test_factors_lead_to_the_minimiser_of_the_sum_of_losses_and_powers_do_not():
    """The fixed point of EP is exact; the shared pull of SEP, like FedProx's, leaves a bias."""
    want = minimiser(by_rows=True)
    assert np.abs(settled(FedEP(precision=0.3), 120) - want).max() < 1e-4
    assert np.abs(settled(FedEP(precision=0.3, variant="sep"), 40) - want).max() > 1e-2
    assert np.abs(minimiser(by_rows=False) - want).max() > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedep_whose_rows_have_no_precision_is_an_unweighted_fedavg(backend):
    def last(method):
        return run(method, training("plain", epochs=1, weighting="uniform"), backend).server[-1]["model"]

    plain = last(FedAvg())
    assert gap(last(FedEP(precision=1e-12)), plain) < 1e-10
    assert gap(last(FedEP(precision=0.5)), plain) > 1e-3


def test_the_fine_tuned_name_is_the_plain_one_with_five_epochs():
    assert ALGORITHMS["fedep"]() == FedEP() == FedEP(finetune_epochs=0)
    assert ALGORITHMS["fedep_ft"]() == FedEP(finetune_epochs=5)
