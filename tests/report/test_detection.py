"""False accepts at equal false rejects: by hand, and against the raw scores."""

import numpy as np
import pytest

from bespoke.errors import UserError
from bespoke.report import relative_false_accepts
from bespoke.report.metrics import Scores

THRESHOLDS = np.linspace(-2, 2, 5)  # even odds in the middle


def curves(*clients, thresholds=THRESHOLDS):
    """Scores of clients (positives, negatives), each a list of log-odds, as the metric records them."""
    pairs = []
    for positives, negatives in clients:
        accepts = (np.array(negatives)[:, None] > thresholds).sum(axis=0)
        rejects = (np.array(positives)[:, None] <= thresholds).sum(axis=0)
        weights = np.repeat([len(negatives), len(positives)], len(thresholds))
        pairs.append([[*accepts.tolist(), *rejects.tolist()], weights.tolist()])
    rows = [len(positives) + len(negatives) for positives, negatives in clients]
    return Scores.of(list(range(len(clients))), rows, pairs)


# At thresholds -2 .. 2: rejects 0 0 1 2 4 of 4, accepts 8 6 4 1 0 of 8.
BASELINE = ([-0.5, 0.5, 1.5, 1.5], [-1.5, -1.5, -0.5, -0.5, 0.5, 0.5, 0.5, 1.5])
# Rejects 0 2 2 2 4 of 4, accepts 8 4 3 2 0 of 8.
OTHER = ([-1.5, -1.5, 1.5, 1.5], [-1.5, -1.5, -1.5, -1.5, -0.5, 0.5, 1.5, 1.5])


def test_values_by_hand():
    baseline, other = curves(BASELINE), curves(OTHER)
    # The baseline rejects a quarter at even odds and accepts 4/8 there. The other one rejects a quarter halfway
    # between the thresholds -2 and -1, where it accepts between 8/8 and 4/8.
    assert relative_false_accepts(other, baseline).tolist() == [0.75 / 0.5]
    # At a half the baseline accepts 1/8; of the other's three thresholds that reject a half, the last accepts 2/8.
    assert relative_false_accepts(other, baseline, 0.5).tolist() == [2.0]
    # Three quarters: halfway between a half and all.
    assert relative_false_accepts(other, baseline, 0.75).tolist() == [(1 / 8) / (0.5 / 8)]
    assert relative_false_accepts(other, baseline, 0.0).tolist() == [(8 / 8) / (6 / 8)]


@pytest.mark.parametrize("rate", [None, 0.0, 0.1, 0.5, 0.9])
def test_the_baseline_against_itself_is_one(rate):
    draw = np.random.default_rng(0)
    clients = [(draw.normal(1, 1, 9), draw.normal(-1, 1, 30)), (draw.normal(9, 1, 9), draw.normal(-9, 1, 30)), BASELINE]
    found = curves(*clients)
    assert relative_false_accepts(found, found, rate).tolist() == [1.0, 1.0, 1.0]
    assert relative_false_accepts(found.merged(), found.merged(), rate).tolist() == [1.0]


def test_beside_a_baseline_that_rejects_every_positive_nothing_is_known():
    """A model that never says yes accepts nobody; so does everyone else at its rate."""
    baseline = curves(BASELINE, ([-1.5] * 4, [-1.5] * 8))
    found = relative_false_accepts(curves(OTHER, OTHER), baseline)
    assert found[0] == 1.5 and np.isnan(found[1])
    assert np.isfinite(relative_false_accepts(curves(OTHER, OTHER), baseline, 0.5)).all()


def test_a_baseline_without_false_accepts_counts_as_half_a_negative():
    perfect = curves(([1.5] * 4, [-1.5] * 8))
    assert relative_false_accepts(curves(OTHER), perfect).tolist() == [(8 / 8 + 1 / 16) / (1 / 16)]
    assert relative_false_accepts(perfect, curves(OTHER)).tolist() == [0.0]


def test_many_scores_agree_with_those_that_were_not_binned():
    draw = np.random.default_rng(1)
    clients = [(draw.normal(3, 2, 4000), draw.normal(-1, 2, 4000)), (draw.normal(2, 2, 4000), draw.normal(-1, 3, 4000))]
    fine = np.linspace(-30, 30, 241)
    binned = [curves(client, thresholds=fine) for client in clients]
    (positives, negatives), (own_positives, own_negatives) = clients
    rate = (positives <= 0).mean()
    threshold = np.quantile(own_positives, rate)
    want = (own_negatives > threshold).mean() / (negatives > 0).mean()
    assert relative_false_accepts(binned[1], binned[0]) == pytest.approx(want, rel=0.01)
    assert want > 1.5  # the two differ


def test_clients_are_read_apart_and_one_class_alone_gives_no_value():
    ours = curves(OTHER, BASELINE, ([], [0.5, 1.5]), ([0.5], []))
    theirs = curves(BASELINE, BASELINE, ([], [0.5, 0.5]), ([1.5], []))
    assert relative_false_accepts(ours, theirs).tolist()[:2] == [1.5, 1.0]
    assert np.isnan(relative_false_accepts(ours, theirs)[2:]).all()
    pooled = relative_false_accepts(ours.take(np.arange(2)).merged(), theirs.take(np.arange(2)).merged())
    # together: rejects 0 2 3 4 8 of 8 and accepts 16 10 7 3 0 of 16 against 0 0 2 4 8 and 16 12 8 2 0
    assert pooled.tolist() == [10 / 8]


def test_what_cannot_be_compared_is_refused():
    baseline = curves(BASELINE)
    for wrong in (curves(BASELINE, BASELINE), curves(([1.0], [1.0]))):
        with pytest.raises(UserError, match="tested on different clients or rows"):
            relative_false_accepts(wrong, baseline)
    accuracy = Scores.of([0], [4], [[3, 4]])
    with pytest.raises(UserError, match="record the metric detection_CLASS"):
        relative_false_accepts(accuracy, accuracy)
    with pytest.raises(UserError, match="from 0 to below 1, not 2"):
        relative_false_accepts(baseline, baseline, 2)
