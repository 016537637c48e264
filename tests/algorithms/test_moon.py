"""MOON: without its term it is FedAvg, and its clients can be tested with what they just trained."""

import pytest
from golden.common import LATE_CLASS, loss_sum
from golden.complex_step import classify, features
from golden_runs import arrays, minibatches, problem, run, training
from toy import BACKENDS, same_bits

from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.moon import MOON

pytestmark = pytest.mark.xdist_group("moon")


@pytest.mark.parametrize("backend", BACKENDS)
def test_moon_without_its_term_is_fedavg_to_the_bit(backend):
    plain, moon = (minibatches(method, backend, LATE_CLASS) for method in (FedAvg(), MOON(mu=0.0)))
    assert all(same_bits(a, b) for a, b in zip(plain.server, moon.server, strict=True))
    assert plain.records.clients() == moon.records.clients()
    contrast = minibatches(MOON(mu=5.0), backend, LATE_CLASS).server
    assert same_bits(plain.server[0], contrast[0])  # nobody has a model before the first round
    assert not same_bits(plain.server[1], contrast[1])


def test_moon_tested_before_averaging_is_what_each_client_trained():
    ran = run(MOON(), training("plain"), "batched", seed=LATE_CLASS, when="local", inspect=False)
    scores, given = ran.scores(round=3), problem("plain")
    scores = [score for score in scores if score.client < 4]  # the last client is new, and has its own evaluation
    assert [score.client for score in scores] == ran.rounds()[-1]["cohort"]
    for score in scores:
        model = arrays(ran.states[-1][score.client]["previous"])
        logits = classify(model, features(model, given.x_test[score.client]))
        assert score.loss_sum == pytest.approx(loss_sum(logits, given.y_test[score.client]), abs=1e-10)
