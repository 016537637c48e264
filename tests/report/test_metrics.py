import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bespoke.report.metrics import (
    accuracies,
    aggregate,
    paired_difference,
    pooled_accuracy,
    seed_statistics,
    tenth,
    top10_samples,
    worst10,
)


def test_three_clients_by_hand():
    result = aggregate([1, 5, 80], [1, 10, 100], [2.0, 10.0, 99.0])  # A = 1, 0.5, 0.8
    assert (result.clients, result.excluded) == (3, 0)
    assert result.pooled == 86 / 111
    assert result.mean == pytest.approx(2.3 / 3)
    assert result.std == pytest.approx(0.2516611478)
    assert result.std0 == pytest.approx(0.2054804668)
    assert result.worst10 == 0.5
    assert result.top10_samples == 0.8
    assert result.cv == pytest.approx(0.2652131606)
    assert result.loss == 1.0
    assert result.pooled != pytest.approx(result.mean)


def test_clients_without_rows_are_counted_and_otherwise_absent():
    with_empty = aggregate([0, 1, 5, 0, 80], [0, 1, 10, 0, 100], [np.nan, 2, 10, 0, 99]).as_dict()
    without = aggregate([1, 5, 80], [1, 10, 100], [2, 10, 99]).as_dict()
    assert with_empty.pop("excluded") == 2
    assert without.pop("excluded") == 0
    assert with_empty == without


def test_undefined_values_are_none():
    nobody = aggregate([0, 0], [0, 0], [0.0, 0.0])
    assert nobody.excluded == 2
    assert {value for key, value in nobody.as_dict().items() if key not in ("clients", "excluded")} == {None}
    one = aggregate([3], [4])
    assert (one.std, one.std0, one.cv, one.loss) == (None, 0.0, 0.0, None)
    wrong = aggregate([0, 0], [4, 4], [1.0, np.nan])
    assert (wrong.pooled, wrong.cv, wrong.loss) == (0.0, None, None)


def test_cv_of_equal_clients_is_zero():
    assert aggregate([2, 20, 200], [4, 40, 400]).cv == 0.0


@pytest.mark.parametrize(("clients", "k"), [(1, 1), (5, 1), (10, 1), (11, 2), (30, 3), (200, 20), (201, 21)])
def test_a_tenth_is_rounded_up(clients, k):
    assert tenth(clients) == k


def test_deciles_of_five_clients_take_one():
    correct, total = [9, 1, 5, 40, 7], [10, 2, 10, 50, 7]
    assert worst10(correct, total) == 0.5
    assert top10_samples(correct, total) == 0.8
    assert top10_samples(correct, total, sizes=[1, 9, 2, 3, 4]) == 0.5


def test_deciles_of_two_hundred_clients_take_twenty():
    assert worst10(np.arange(200)[::-1], np.full(200, 1000)) == pytest.approx(0.0095)
    total = np.arange(1, 201)
    assert top10_samples(np.where(total > 180, 1, 0), total) == 20 / np.arange(181, 201).sum()


def test_ties_of_size_go_to_the_lower_id():
    correct = np.where(np.arange(200) < 20, 10, 5)
    assert top10_samples(correct, np.full(200, 10)) == 1.0
    assert top10_samples(correct[::-1], np.full(200, 10)) == 0.5


@pytest.mark.parametrize(
    ("correct", "total", "words"),
    [
        ([1, 2], [3], "one length"),
        ([[1]], [[2]], "vectors"),
        ([0.5], [1.0], "integers"),
        ([3], [2], "0 <= correct <= total"),
        ([-1], [2], "0 <= correct <= total"),
    ],
)
def test_impossible_counts_are_refused(correct, total, words):
    with pytest.raises(ValueError, match=words):
        aggregate(correct, total)


@given(
    st.lists(st.integers(0, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=40),
    st.randoms(use_true_random=False),
)
def test_aggregates_are_ordered_and_blind_to_the_order_of_clients(pairs, random):
    correct, total = [c for c, _ in pairs], [n for _, n in pairs]
    result = aggregate(correct, total)
    assert result.clients + result.excluded == len(pairs)
    if result.clients:
        a = accuracies(correct, total)
        assert a.min() <= result.worst10 <= result.mean + 1e-12
        assert a.min() - 1e-12 <= result.pooled <= a.max() + 1e-12
    random.shuffle(pairs)
    assert pooled_accuracy([c for c, _ in pairs], [n for _, n in pairs]) == result.pooled
    assert worst10([c for c, _ in pairs], [n for _, n in pairs]) == result.worst10


def test_paired_difference_by_hand():
    mean, low, high = paired_difference([0.6, 0.7, 0.9], [0.5, 0.5, 0.6])
    assert mean == pytest.approx(0.2)
    assert high - mean == pytest.approx(4.302652730 * 0.1 / np.sqrt(3))
    assert mean - low == pytest.approx(high - mean)


def test_paired_difference_agrees_with_a_t_test():
    a, b = np.random.default_rng(0).uniform(size=(2, 30))
    expected = stats.ttest_rel(a, b).confidence_interval(0.9)
    assert paired_difference(a, b, confidence=0.9)[1:] == pytest.approx((expected.low, expected.high))


def test_degenerate_differences():
    assert paired_difference([0.75], [0.5]) == (0.25, None, None)
    assert paired_difference([0.5, 0.75], [0.5, 0.75]) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="non-empty"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="one length"):
        paired_difference([0.1, 0.2], [0.1])
    with pytest.raises(ValueError, match="confidence"):
        paired_difference([0.1, 0.2], [0.1, 0.3], confidence=95)


def test_seed_statistics():
    assert seed_statistics([0.5]) == (0.5, None, None)
    mean, std, se = seed_statistics([0.1, 0.2, 0.3])
    assert (mean, std, se) == pytest.approx((0.2, 0.1, 0.1 / np.sqrt(3)))
    with pytest.raises(ValueError, match="non-empty"):
        seed_statistics([])
