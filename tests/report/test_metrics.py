import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bespoke.report.metrics import Scores, aggregate, seed_statistics, t_interval, tenth
from bespoke.report.units import Unit, written


def scores(sums, weights, rows=None, clients=None):
    """Scores of clients 0, 1, ... whose rows are their weights unless said otherwise."""
    rows = [0 if w is None else w for w in weights] if rows is None else rows
    clients = range(len(sums)) if clients is None else clients
    return Scores.of(list(clients), list(rows), list(zip(sums, weights, strict=True)))


# --- one number per client -----------------------------------------------------------------------------------------


def test_three_clients_by_hand():
    result = aggregate(scores([1, 5, 80], [1, 10, 100]))  # 1, 0.5, 0.8
    assert (result.clients, result.excluded) == (3, 0)
    assert result.pooled == 86 / 111
    assert result.mean == pytest.approx(2.3 / 3)
    assert result.std == pytest.approx(0.2516611478)
    assert result.std0 == pytest.approx(0.2054804668)
    assert result.worst10 == 0.5
    assert result.top10_samples == 0.8
    assert result.cv == pytest.approx(0.2652131606)
    assert result.pooled != pytest.approx(result.mean)


def test_the_worst_tenth_of_an_error_has_the_largest_values():
    sums, weights = np.arange(20.0), np.full(20, 10)
    assert aggregate(scores(sums, weights)).worst10 == pytest.approx(0.05)
    assert aggregate(scores(sums, weights), higher=False).worst10 == pytest.approx(1.85)
    up, down = aggregate(scores(sums, weights)).as_dict(), aggregate(scores(sums, weights), higher=False).as_dict()
    assert [key for key in up if up[key] != down[key]] == ["worst10"]


def test_clients_without_weight_are_counted_and_otherwise_absent():
    with_empty = aggregate(scores([None, 1, 5, 0, 80], [0, 1, 10, 0, 100])).as_dict()
    without = aggregate(scores([1, 5, 80], [1, 10, 100])).as_dict()
    assert with_empty.pop("excluded") == 2
    assert without.pop("excluded") == 0
    assert with_empty == without


def test_rows_and_weights_may_differ():
    # a client with rows but no weight (one class only, for an AUROC) is left out; the largest is that with most rows
    result = aggregate(scores([3.0, 0.0, 1.0], [4.0, 0.0, 2.0], rows=[5, 90, 6]))
    assert (result.clients, result.excluded, result.pooled, result.top10_samples) == (2, 1, 4 / 6, 0.5)


def test_undefined_values_are_none():
    nobody = aggregate(scores([0, 0], [0, 0]))
    assert nobody.excluded == 2
    assert {value for key, value in nobody.as_dict().items() if key not in ("clients", "excluded")} == {None}
    assert aggregate(scores([], [])).as_dict() == nobody.as_dict() | {"excluded": 0}
    one = aggregate(scores([3], [4]))
    assert (one.std, one.std0, one.cv) == (None, 0.0, 0.0)
    zero = aggregate(scores([0, 0], [4, 4]))
    assert (zero.pooled, zero.cv) == (0.0, None)
    below = aggregate(scores([-4, -2], [4, 4]))  # as r2 may be
    assert (below.pooled, below.std0, below.cv) == (-0.75, 0.25, None)


def test_a_value_that_is_not_finite_is_not_passed_over():
    for unknown in (scores([1.0, None, 2.0], [4, 4, 4]), scores([1.0, 1.0, 2.0], [4, None, 4], rows=[4, 4, 4])):
        result = aggregate(unknown)
        assert (result.clients, result.excluded) == (3, 0)
        assert {result.pooled, result.mean, result.std, result.std0, result.worst10, result.cv} == {None}
        assert np.isnan(unknown.values()).tolist() == [False, True, False]


def test_cv_of_equal_clients_is_zero():
    assert aggregate(scores([2, 20, 200], [4, 40, 400])).cv == 0.0


@pytest.mark.parametrize(("clients", "k"), [(1, 1), (5, 1), (10, 1), (11, 2), (30, 3), (200, 20), (201, 21)])
def test_a_tenth_is_rounded_up(clients, k):
    assert tenth(clients) == k


def test_deciles_of_five_clients_take_one():
    correct, total = [9, 1, 5, 40, 7], [10, 2, 10, 50, 7]
    assert aggregate(scores(correct, total)).worst10 == 0.5
    assert aggregate(scores(correct, total)).top10_samples == 0.8
    assert aggregate(scores(correct, total, rows=[1, 9, 2, 3, 4])).top10_samples == 0.5


def test_deciles_of_two_hundred_clients_take_twenty():
    assert aggregate(scores(np.arange(200)[::-1], np.full(200, 1000))).worst10 == pytest.approx(0.0095)
    total = np.arange(1, 201)
    found = aggregate(scores(np.where(total > 180, 1, 0), total))
    assert found.top10_samples == 20 / np.arange(181, 201).sum()


def test_the_tenth_is_of_the_clients_that_have_rows():
    correct, total = [1, 3, *[5] * 8], [20, 30, *[10] * 8]
    empty, eleventh = (aggregate(scores([*correct, n], [*total, 2 * n])) for n in (0, 5))
    assert (empty.worst10, empty.top10_samples) == (1 / 20, 3 / 30)  # of ten clients, one
    assert (eleventh.worst10, eleventh.top10_samples) == (
        pytest.approx((1 / 20 + 3 / 30) / 2),
        4 / 50,
    )  # of eleven, two


def test_clients_are_ordered_by_id_and_ties_of_size_go_to_the_lower_one():
    correct = np.where(np.arange(200) < 20, 10, 5)
    assert aggregate(scores(correct, np.full(200, 10))).top10_samples == 1.0
    assert aggregate(scores(correct[::-1], np.full(200, 10))).top10_samples == 0.5
    turned = scores(correct[::-1], np.full(200, 10), clients=range(199, -1, -1))
    assert turned.clients == list(range(200)) and aggregate(turned).top10_samples == 1.0
    assert scores([1, 2, 3], [4, 4, 4], clients=["b", "a", 7]).clients == [7, "a", "b"]


@given(
    st.lists(st.integers(0, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=40),
    st.randoms(use_true_random=False),
)
def test_aggregates_are_ordered_and_blind_to_the_order_of_clients(pairs, random):
    named = list(enumerate(pairs))
    first = scores([c for c, _ in pairs], [n for _, n in pairs])
    result = aggregate(first)
    assert result.clients + result.excluded == len(pairs)
    if result.clients:
        values = first.values()[first.defined]
        assert values.min() <= result.worst10 <= result.mean + 1e-12
        assert values.min() - 1e-12 <= result.pooled <= values.max() + 1e-12
    random.shuffle(named)
    shuffled = scores([c for _, (c, _) in named], [n for _, (_, n) in named], clients=[i for i, _ in named])
    assert aggregate(shuffled) == result


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 50)), min_size=1, max_size=400))
def test_sums_of_one_entry_are_added_as_a_plain_vector_is(pairs):
    sums, weights = np.array([s for s, _ in pairs]), np.array([w for _, w in pairs])
    has = weights > 0
    expected = float(sums[has].sum() / weights.sum()) if has.any() else None
    assert scores(sums, weights).pooled() == expected  # to the bit


def test_merged_clients_are_one_with_all_rows():
    found = scores([None, 1, 5, 80], [0, 1, 10, 100], rows=[7, 1, 10, 100]).merged()
    assert (found.rows.tolist(), found.sums.tolist(), found.weights.tolist()) == ([111], [[86.0]], [[111.0]])
    assert aggregate(found).pooled == aggregate(found).mean == 86 / 111


# --- several numbers per client ------------------------------------------------------------------------------------


def test_vectors_are_summed_by_entry_and_averaged_over_the_entries_that_have_weight():
    # F1 by class, (2 tp, 2 tp + fp + fn); class 2 occurs nowhere, class 1 at the second client alone
    found = scores([[6, 0, 0], [2, 4, 0]], [[8, 0, 0], [4, 5, 0]], rows=[8, 6])
    assert found.values() == pytest.approx([6 / 8, (2 / 4 + 4 / 5) / 2])
    assert found.pooled() == pytest.approx((8 / 12 + 4 / 5) / 2)
    result = aggregate(found)
    assert (result.clients, result.excluded) == (2, 0)
    assert result.mean == pytest.approx((0.75 + 0.65) / 2)
    assert (result.worst10, result.top10_samples) == (pytest.approx(0.65), 0.75)


def test_a_vector_without_any_weight_is_excluded_and_an_unknown_entry_is_not_passed_over():
    found = scores([[0, 0], [1, 1], [1, None]], [[0, 0], [2, 4], [2, 0]], rows=[3, 3, 3])
    result = aggregate(found)
    assert (result.clients, result.excluded) == (2, 1)
    assert result.pooled == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert aggregate(scores([[1, 1], [1, None]], [[2, 4], [2, 4]], rows=[3, 3])).pooled is None


def test_vectors_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="inhomogeneous"):
        scores([[1, 2], [1]], [[1, 2], [1]], rows=[1, 1])


def test_scores_of_lines_take_those_that_have_the_metric():
    lines = [
        {"client": 2, "total": 4, "metrics": {"mse": [1.0, 4]}},
        {"client": 1, "total": 5, "metrics": {"mse": [10.0, 5], "mae": [5.0, 5]}},
    ]
    assert Scores.of_lines(lines, "mse").clients == [1, 2]
    assert Scores.of_lines(lines, "mse").values().tolist() == [2.0, 0.25]
    assert Scores.of_lines(lines, "mae").clients == [1]
    assert Scores.of_lines(lines, "r2").pooled() is None


# --- intervals and seeds -------------------------------------------------------------------------------------------


def test_interval_of_three_seeds_by_hand():
    mean, low, high = t_interval([70.2, 68.7, 40.4])
    assert (mean, low, high) == pytest.approx((59.8, 18.1, 101.5), abs=0.05)
    assert high - mean == pytest.approx(4.302652730 * np.std([70.2, 68.7, 40.4], ddof=1) / np.sqrt(3))
    assert mean - low == pytest.approx(high - mean)


def test_interval_agrees_with_a_t_test():
    values = np.random.default_rng(0).uniform(size=30)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert t_interval(values, confidence=0.9)[1:] == pytest.approx((expected.low, expected.high))


def test_degenerate_intervals():
    assert t_interval([0.25]) == (0.25, None, None)
    assert t_interval([0.0, 0.0]) == (0.0, 0.0, 0.0)
    for wrong in ([], [[0.1, 0.2]]):
        with pytest.raises(ValueError, match="non-empty vector"):
            t_interval(wrong)
    with pytest.raises(ValueError, match="confidence"):
        t_interval([0.1, 0.2], confidence=95)


def test_seed_statistics():
    assert seed_statistics([0.5]) == (0.5, None, None)
    mean, std, se = seed_statistics([0.1, 0.2, 0.3])
    assert (mean, std, se) == pytest.approx((0.2, 0.1, 0.1 / np.sqrt(3)))
    assert seed_statistics([0.1, None]) == (None, None, None)
    with pytest.raises(ValueError, match="at least one"):
        seed_statistics([])


# --- how values are written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("accuracy", 0.94117, "accuracy 94.12 %"),
        ("balanced_accuracy", 0.5, "balanced_accuracy 50.00 %"),
        ("macro_f1", 0.123, "macro_f1 12.30 %"),
        ("auroc", 1.0, "auroc 100.00 %"),
        ("mse", 3021.46, "mse 3021"),
        ("mse", 0.012345, "mse 0.01235"),
        ("r2", -0.25, "r2 -0.2500"),
        ("loss", 0.0, "loss 0.000"),
        ("loss", 1e-7, "loss 1.000e-07"),
        ("loss", 2.5e9, "loss 2.500e+09"),
        ("inaccuracy_of_mine", 0.5, "inaccuracy_of_mine 0.5000"),
    ],
)
def test_shares_are_percent_and_everything_else_has_four_digits(metric, value, text):
    assert written(metric, value) == text


def test_a_unit_serves_a_whole_column():
    unit = Unit.of("mse", [0.5, 12.0, None, float("nan")])
    assert [unit.text(value) for value in (0.5, 12.0, None)] == ["0.50", "12.00", "-"]
    assert unit.text(0.5, plus=True) == "+0.50"
    assert (unit.name, Unit.of("accuracy", []).name) == ("", " in %")


def test_what_overflows_is_unknown_and_no_warning():
    """Sums, squares and ratios beyond any number, in this order; warnings are errors here."""
    found = aggregate(Scores.of([0, 1, 2], [1, 1, 1], [[1e308, 1], [1e308, 1], [-1e308, 1]]))
    assert (found.pooled, found.std, found.std0, found.worst10) == (None, None, None, -1e308)
    assert aggregate(Scores.of([0, 1], [1, 1], [[1.0, 5e-324], [1.0, 1.0]])).mean is None
    assert seed_statistics([1.7e308, 1.7e308]) == (None, None, None)
    assert t_interval([1e308, -1e308]) == (0.0, None, None)
