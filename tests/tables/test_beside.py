"""Ours beside the paper's: values over seeds, marks, ranks, agreement, and what is derived from other numbers."""

import json
import re
from pathlib import Path

import numpy as np
import paper_tables
import pytest
from scipy.stats import kendalltau

from bespoke.errors import UserError
from bespoke.tables.beside import Reader, kendall


@pytest.fixture
def table(tmp_path):
    return paper_tables.make(tmp_path)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "results"


def number(root, table, id):
    return next(number for number in Reader(root).beside(table).numbers if number.entry.id == id)


# --- one number -----------------------------------------------------------------------------------------------------


def test_a_number_is_the_mean_over_seeds_in_percent(root, table):
    for seed, values in enumerate(([60.0, 64.0], [61.0, 67.0], [70.0, 62.0])):
        paper_tables.put(root, table, "easy/fedavg", seed, *values)
    found = number(root, table, "easy/fedavg")
    assert found.ours == {0: pytest.approx(62.0), 1: pytest.approx(64.0), 2: pytest.approx(66.0)}
    assert found.mean == pytest.approx(64.0)
    assert found.statistics.std == pytest.approx(2.0)  # ddof 1
    assert found.difference == pytest.approx(1.5)


def test_one_seed_has_no_deviation(root, table):
    paper_tables.put(root, table, "easy/fedavg", 0, 60.0)
    assert number(root, table, "easy/fedavg").statistics.std is None


@pytest.mark.parametrize(
    ("id", "value", "marked"),
    [
        ("easy/fedavg", 64.0, False),  # exactly 1.5 points
        ("easy/fedavg", 64.1, True),
        ("easy/fedavg", 60.9, True),
        ("easy/ditto", 77.6, False),  # twice the published deviation of 2.0
        ("easy/ditto", 77.7, True),
    ],
)
def test_a_mark_stands_beyond_the_points_and_the_published_deviation(root, table, id, value, marked):
    paper_tables.put(root, table, id, 0, value)
    assert number(root, table, id).marked is marked


def test_from_three_seeds_on_our_own_deviation_counts(root, table):
    for seed, value in enumerate((75.0, 77.6, 80.2)):  # deviation 2.6, so 5.2 points are allowed
        paper_tables.put(root, table, "easy/fedavg", seed, value - 10.0)
        paper_tables.put(root, table, "easy/ditto", seed, value + 1.3)  # 5.3 above
    assert not number(root, table, "easy/fedavg").marked
    found = number(root, table, "easy/ditto")
    assert found.allowed == pytest.approx(5.2) and found.marked
    (root / "maker/t1/easy/ditto/2.json").unlink()
    assert number(root, table, "easy/ditto").allowed == pytest.approx(4.0)


def test_a_stand_in_is_never_held_against_the_paper(root, table):
    paper_tables.put(root, table, "other/ditto", 0, 90.0)
    found = number(root, table, "other/ditto")
    assert found.mean == pytest.approx(90.0) and found.stand_in == "digits instead of letters"
    assert not found.counted and not found.marked


def test_a_failed_seed_is_told_and_left_out(root, table):
    paper_tables.put(root, table, "easy/ours", 0, 70.0)
    paper_tables.fail(root, table, "easy/ours", 1, "the memory is too small")
    found = number(root, table, "easy/ours")
    assert found.ours == {0: pytest.approx(70.0)}
    assert found.failed == ("easy/ours, seed 1: the memory is too small",)


def test_a_result_that_lacks_the_metric_is_told(root, tmp_path):
    table = paper_tables.make(tmp_path, paper_tables.TABLE.replace('label = "Easy"', 'metric = "auroc"'))
    paper_tables.put(root, table, "easy/ours", 0, 70.0)
    (sentence,) = number(root, table, "easy/ours").failed
    assert sentence.startswith("easy/ours, seed 0: maker/t1/easy/ours/0.json holds no auroc")


def test_another_source_and_earlier_settings_are_noticed(root, table):
    assert not number(root, table, "easy/ours").changed
    told = {"bespoke": "0", "commit": None, "modules": ["bespoke.algorithms.ditto"], "method": "another"}
    paper_tables.put(root, table, "easy/ours", 0, 70.0, settings=paper_tables.other_settings(table, "easy/ours"))
    paper_tables.put(root, table, "easy/ours", 0, 71.0, source=told)
    found = number(root, table, "easy/ours")
    assert found.ours == {0: pytest.approx(71.0)} and found.changed and found.tries == 1


@pytest.mark.parametrize(
    ("cell", "run"),
    [
        ("", "[training]\nlr = 0.7\n"),
        ('view = "global"\n', ""),
        ('selection = "best_test"\n', ""),
        ('group = "new"\n', ""),
        ('evaluate = ["data.keep=0.5"]\n', ""),
        ('probe = "norms"\n', ""),
        ('set = ["algorithm.lam=0.7"]\nrows = ["ditto"]\n', ""),
    ],
)
def test_a_result_with_other_settings_than_the_table_has_now_is_left_out(root, table, tmp_path, cell, run):
    for seed in (0, 2):
        paper_tables.put(root, table, "easy/ditto", seed, 70.0)
    text = paper_tables.TABLE.replace("[cell.published]\nfedavg = 62.5\nditto = 73.6\nours = 76.3", cell, 1)
    now = paper_tables.make(tmp_path, text)
    with (tmp_path / "experiments/maker/easy.toml").open("a") as file:
        file.write(run)
    found = number(root, now, "easy/ditto")
    assert not found.ours and not found.failed
    assert found.outdated == (("maker/t1", "easy/ditto", 0), ("maker/t1", "easy/ditto", 2))


def test_only_what_was_run_is_held_against_the_settings(root, table, tmp_path):
    cell = '[[cell]]\nid = "size"\nkind = "benchmark"\nhow = "parameters"\n'
    table = paper_tables.make(tmp_path, paper_tables.TABLE + cell)
    paper_tables.put(root, table, "size/ditto", 0, value=1014, settings={"another": 1})
    paper_tables.fail(root, table, "easy/ditto", 0, "the memory is too small", settings={"another": 1})
    assert number(root, table, "size/ditto").ours == {0: 1014.0}
    found = number(root, table, "easy/ditto")
    assert found.failed == ("easy/ditto, seed 0: the memory is too small",) and not found.outdated


def test_a_counted_result_of_a_cell_that_is_now_run_is_left_out(root, table):
    path = paper_tables.put(root, table, "easy/ditto", 0, 70.0, value=3)
    told = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in told.items() if key != "clients"}))
    assert number(root, table, "easy/ditto").outdated


def test_a_derived_number_tells_what_was_left_out_of_its_sources(tmp_path, root):
    table = paper_tables.make(tmp_path, paper_tables.TABLE + DERIVED.format(how="mean", of='["easy", "hard"]', more=""))
    paper_tables.put(root, table, "easy/ditto", 0, 70.0)
    paper_tables.put(root, table, "hard/ditto", 0, 70.0, settings=paper_tables.other_settings(table, "hard/ditto"))
    found = number(root, table, "derived/ditto")
    assert not found.ours and found.outdated == (("maker/t1", "hard/ditto", 0),)


def test_a_folder_that_is_not_there_is_told(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").rmdir()
    with pytest.raises(UserError, match="there is no folder nosuch: name that of the results"):
        Reader(Path("nosuch")).beside(table)
    assert not any(found.ours for found in Reader(Path("results")).beside(table).numbers)  # it comes with a sweep


def test_other_metrics_keep_their_scale(root, tmp_path):
    text = paper_tables.TABLE.replace('id = "easy"\n', 'id = "easy"\nmetric = "loss"\n', 1).replace("62.5", "0.4")
    table = paper_tables.make(tmp_path, text)
    paper_tables.put(root, table, "easy/fedavg", 0, 59.0)
    found = number(root, table, "easy/fedavg")
    assert found.mean == pytest.approx(0.41) and not found.higher and not found.percent
    assert found.allowed == pytest.approx(0.006) and found.marked  # 1.5 % of the published number


# --- a column -------------------------------------------------------------------------------------------------------


def column(root, table, id):
    return next(column for column in Reader(root).beside(table).columns if column.cell.id == id)


def test_ranks_and_the_best_method(root, table):
    for row, value in {"fedavg": 49.0, "ditto": 59.0, "ours": 61.0}.items():
        paper_tables.put(root, table, f"hard/{row}", 0, value)
    found = column(root, table, "hard")
    assert found.ranks == {"fedavg": (3, 3), "ditto": (1, 2), "ours": (2, 1)}
    assert found.tau == pytest.approx(1 / 3)
    assert found.winners == (("Ditto",), ("Ours",)) and found.winner_kept is False
    assert found.behind.mean == pytest.approx(2.0) and found.behind.std is None
    paper_tables.put(root, table, "hard/ours", 2, 99.0)  # a seed that the other lacks does not count
    paper_tables.put(root, table, "hard/ditto", 1, 60.0)
    paper_tables.put(root, table, "hard/ours", 1, 66.0)
    behind = column(root, table, "hard").behind
    assert behind.mean == pytest.approx(4.0) and behind.std == pytest.approx(8**0.5)
    for seed in (1, 2):
        paper_tables.put(root, table, "hard/ours", seed, 61.0)
    paper_tables.put(root, table, "hard/ditto", 1, 63.0)  # mean 61: both are best
    assert column(root, table, "hard").winner_kept is True and column(root, table, "hard").behind is None


def test_a_lead_within_two_standard_deviations_does_not_tell_methods_apart(root, table):
    for seed, (ditto, ours) in enumerate(((60.0, 61.0), (62.0, 62.5), (59.0, 61.5))):  # 1, 0.5, 2.5 points
        paper_tables.put(root, table, "hard/ditto", seed, ditto)
        paper_tables.put(root, table, "hard/ours", seed, ours)
        found = column(root, table, "hard")
        assert found.winner_kept is False and not found.lost
    paper_tables.put(root, table, "hard/ours", 1, 64.0)
    assert column(root, table, "hard").lost and not column(root, table, "hard").certain


def test_on_few_seeds_a_lead_of_more_than_the_marks_points_tells_methods_apart(root, table):
    paper_tables.put(root, table, "hard/ditto", 0, 60.0)
    for ours, apart in ((61.4, False), (61.6, True)):
        paper_tables.put(root, table, "hard/ours", 0, ours)
        assert column(root, table, "hard").lost == apart
    paper_tables.put(root, table, "hard/ditto", 0, 65.0)
    for ours, apart in ((63.6, False), (63.4, True)):
        paper_tables.put(root, table, "hard/ours", 0, ours)
        found = column(root, table, "hard")
        assert found.winner_kept is True and found.certain == apart and not found.lost


def test_a_method_that_leads_on_other_seeds_alone_is_not_ahead(root, table):
    paper_tables.put(root, table, "hard/ditto", 0, 60.0)
    paper_tables.put(root, table, "hard/ours", 0, 59.0)
    paper_tables.put(root, table, "hard/ours", 1, 70.0)
    found = column(root, table, "hard")
    assert found.ranks == {"ditto": (1, 2), "ours": (2, 1)}  # of means over other seeds
    assert found.winner_kept and found.behind is None
    paper_tables.put(root, table, "hard/ditto", 1, 66.0)
    assert column(root, table, "hard").behind.mean == pytest.approx(1.5)


def test_beside_equal_published_numbers_the_one_that_is_better_with_us_counts(root, tmp_path):
    text = paper_tables.TABLE.replace("fedavg = 50.0\nditto = 60.0", "fedavg = 60.0\nditto = 60.0")
    table = paper_tables.make(tmp_path, text)
    for row, value in {"fedavg": 50.0, "ditto": 69.0, "ours": 70.0}.items():
        paper_tables.put(root, table, f"hard/{row}", 0, value)
    found = column(root, table, "hard")
    assert found.winners == (("Ditto", "FedAvg"), ("Ours",))
    assert found.behind.mean == pytest.approx(1.0) and not found.lost


def test_rows_of_one_label_are_not_mixed_up(root, tmp_path):
    table = paper_tables.make(tmp_path, paper_tables.TABLE.replace('"Ours"', '"Ditto"'))
    paper_tables.put(root, table, "hard/ditto", 0, 60.0)
    paper_tables.put(root, table, "hard/ours", 0, 70.0)
    found = column(root, table, "hard")
    assert found.winner_kept is False and found.lost and found.behind.mean == pytest.approx(10.0)


def test_means_that_differ_by_rounding_alone_are_equal(root, table):
    for seed, (ditto, ours) in enumerate(((63.4, 63.7), (74.5, 74.2), (79.5, 79.5))):
        paper_tables.put(root, table, "hard/ditto", seed, ditto)
        paper_tables.put(root, table, "hard/ours", seed, ours)
    found = column(root, table, "hard")
    assert found.winners == (("Ditto",), ("Ditto", "Ours")) and found.winner_kept is True


def test_of_a_lower_metric_the_least_is_best(root, tmp_path):
    table = paper_tables.make(tmp_path, paper_tables.TABLE.replace('id = "hard"\n', 'id = "hard"\nmetric = "loss"\n'))
    for row, value in {"fedavg": 51.0, "ditto": 59.0, "ours": 55.0}.items():
        paper_tables.put(root, table, f"hard/{row}", 0, value)
    found = column(root, table, "hard")
    assert found.ranks == {"fedavg": (1, 3), "ditto": (3, 1), "ours": (2, 2)} and found.behind.mean > 0


def test_whether_the_best_is_kept_is_open_until_it_was_run(root, table):
    paper_tables.put(root, table, "hard/fedavg", 0, 49.0)
    paper_tables.put(root, table, "hard/ours", 0, 59.0)
    found = column(root, table, "hard")
    assert found.winner_kept is None and found.tau == pytest.approx(1.0)
    assert column(root, table, "easy").tau is None


@pytest.mark.parametrize("seed", range(5))
def test_kendall_is_that_of_scipy(seed):
    first, second = np.random.default_rng(seed).integers(0, 6, size=(2, 12)).tolist()
    assert kendall(first, second) == pytest.approx(kendalltau(first, second).statistic)


def test_kendall_of_a_constant_is_unknown():
    assert kendall([1.0, 1.0], [1.0, 2.0]) is None
    assert kendall([1.0], [1.0]) is None


# --- derived numbers ------------------------------------------------------------------------------------------------

DERIVED = """
[[cell]]
id = "derived"
label = "Derived"
kind = "derived"
how = "{how}"
of = {of}
rows = ["ditto"]
{more}
"""


def derived(tmp_path, how, of='["easy", "hard"]', more=""):
    table = paper_tables.make(tmp_path, paper_tables.TABLE + DERIVED.format(how=how, of=of, more=more))
    root = tmp_path / "results"
    for seed in (0, 1):
        paper_tables.put(root, table, "easy/ditto", seed, 70.0 + seed, 90.0 + seed)
    paper_tables.put(root, table, "easy/ours", 0, 75.0)
    paper_tables.put(root, table, "hard/ditto", 0, 60.0, totals={"round_seconds": 0.4, "bytes_up": 7, "bytes_down": 9})
    return number(root, table, "derived/ditto")


@pytest.mark.parametrize(
    ("how", "expected"), [("best", {0: 80.0}), ("mean", {0: 70.0}), ("difference", {0: 20.0}), ("overhead", {0: 25.0})]
)
def test_of_several_cells_seed_by_seed(tmp_path, how, expected):
    found = derived(tmp_path, how)
    assert found.ours == pytest.approx(expected)
    assert found.timed is (how == "overhead") and found.percent is (how != "overhead")


def test_the_best_of_losses_is_the_least(tmp_path):
    text = paper_tables.TABLE.replace('source = "Table 1"', 'source = "Table 1"\nstatistic = "std"')
    table = paper_tables.make(tmp_path, text + DERIVED.format(how="best", of='["easy", "hard"]', more=""))
    root = tmp_path / "results"
    paper_tables.put(root, table, "easy/ditto", 0, 70.0, 80.0)
    paper_tables.put(root, table, "hard/ditto", 0, 70.0, 72.0)
    assert number(root, table, "derived/ditto").ours == {0: pytest.approx(2**0.5)}


@pytest.mark.parametrize(
    ("how", "value", "timed"),
    [("seconds", 100.0, True), ("minutes", 100 / 60, True), ("round_seconds", 0.5, True), ("bytes_up", 1000.0, False)],
)
def test_costs_of_a_run(tmp_path, how, value, timed):
    found = derived(tmp_path, how, '"easy"')
    assert found.ours == pytest.approx({0: value, 1: value}) and found.metric == how
    assert found.timed is timed and not found.percent and not found.higher


def test_of_a_cell_whose_times_are_read_only_those_count_that_were_taken_alone(tmp_path):
    text = paper_tables.TABLE.replace('id = "easy"', 'id = "easy"\nalone = true')
    for how, seeds in (("round_seconds", {0, 2}), ("bytes_up", {0, 1, 2})):
        table = paper_tables.make(tmp_path, text + DERIVED.format(how=how, of='"easy"', more=""))
        for seed, together in enumerate((1, 6, 1)):
            where = {"device": "NVIDIA H200", "precision": "bf16", "side_by_side": together}
            paper_tables.put(tmp_path / "results", table, "easy/ditto", seed, 70.0, 90.0, environment=where)
        paper_tables.fail(tmp_path / "results", table, "easy/ditto", 3, "no memory")
        found = number(tmp_path / "results", table, "derived/ditto")
        assert {*found.ours} == seeds and found.failed == ("easy/ditto, seed 3: no memory",)


def test_another_statistic_of_the_same_run(tmp_path):
    found = derived(tmp_path, "statistic", '"easy"', 'statistic = "std"\n[cell.published]\nditto = 14.0')
    assert found.ours == {0: pytest.approx(200**0.5), 1: pytest.approx(200**0.5)}
    assert not found.higher and found.percent and not found.marked


def test_a_derived_number_is_told_as_its_source_is_read(tmp_path):
    keys = {"selection": "best_test", "group": "new", "statistic": "std"}
    text = paper_tables.TABLE.replace(
        'id = "easy"', 'id = "easy"\n' + "".join(f'{k} = "{v}"\n' for k, v in keys.items())
    )
    table = paper_tables.make(tmp_path, text + DERIVED.format(how="statistic", of='"easy"', more=""))
    assert all(getattr(table.entry("derived/ditto"), key) != value for key, value in keys.items())
    found = number(tmp_path / "results", table, "derived/ditto").entry
    assert {key: getattr(found, key) for key in keys} == keys


def test_another_view_is_not_in_the_same_result(tmp_path):
    with pytest.raises(UserError, match="easy/ditto is of another view: derive it from a row of that view"):
        derived(tmp_path, "statistic", '"easy"', 'view = "global"')


def test_false_accepts_beside_a_baseline(tmp_path, root):
    more = 'metric = "detection_1"\n[cell.from]\nditto = ["easy/ditto", "easy/fedavg"]'
    table = paper_tables.make(tmp_path, paper_tables.TABLE + DERIVED.format(how="relative_fa", of='"easy"', more=more))

    def curves(accepts):  # at three thresholds: of 100 negatives, then of 10 positives
        weight = [[100, 100, 100, 10, 10, 10]] * 2
        told = {"accuracy": {"sum": [100, 100], "weight": [110, 110]}}
        told |= {"detection_1": {"sum": [[*accepts, 0, 2, 5]] * 2, "weight": weight}}
        columns = {"client": [0, 1], "group": ["train"] * 2, "condition": None, "rows": [110] * 2, "logged": {}}
        return {"clients": columns | {"metrics": told}, "higher": {"accuracy": True, "detection_1": False}}

    paper_tables.put(root, table, "easy/ditto", 0, **curves([60, 10, 0]))
    assert number(root, table, "derived/ditto").failed == ("easy/ditto, seed 0: there is no baseline of this seed",)
    paper_tables.put(root, table, "easy/fedavg", 0, **curves([80, 40, 4]))
    found = number(root, table, "derived/ditto")
    assert found.ours == {0: pytest.approx(0.25)} and found.metric == "relative_fa"
    assert not found.higher and not found.percent
    silent = curves([0, 0, 0])
    silent["clients"]["metrics"]["detection_1"]["sum"] = [[0, 0, 0, 10, 10, 10]] * 2
    paper_tables.put(root, table, "easy/fedavg", 0, **silent)
    found = number(root, table, "derived/ditto")
    assert not found.ours and "the baseline accepts no positive at even odds" in found.failed[0]


def test_a_table_names_the_others_from_which_its_numbers_are_derived(tmp_path):
    more = '[cell.from]\nditto = ["maker/t9:easy/ours", "easy/ditto"]'
    for of, others in (("[]", ["maker/t9"]), ('["maker/t8:easy", "easy"]', ["maker/t8", "maker/t9"])):
        text = paper_tables.TABLE + DERIVED.format(how="difference", of=of, more=more)
        assert paper_tables.make(tmp_path, text).derived_from == others


def test_rows_of_their_own(tmp_path):
    found = derived(tmp_path, "difference", "[]", '[cell.from]\nditto = ["easy/ours", "easy/ditto"]')
    assert found.ours == {0: pytest.approx(-5.0)}


def test_a_number_of_another_table(tmp_path, root):
    paper_tables.make(tmp_path)
    other = paper_tables.make(tmp_path, paper_tables.TABLE, "maker/t2")
    text = paper_tables.TABLE + DERIVED.format(how="mean", of='"maker/t2:easy"', more="")
    table = paper_tables.make(tmp_path, text)
    paper_tables.put(root, other, "easy/ditto", 0, 70.0)
    reader = Reader(root)
    reader.beside(other)
    assert reader.beside(table).columns[-1].numbers[0].ours == {0: pytest.approx(70.0)}


def test_a_stand_in_passes_on(tmp_path, root):
    table = paper_tables.make(tmp_path, paper_tables.TABLE + DERIVED.format(how="mean", of='["other"]', more=""))
    assert number(root, table, "derived/ditto").stand_in == "digits instead of letters"


@pytest.mark.parametrize(
    ("how", "of", "sentence"),
    [
        ("difference", '["easy"]', "how = 'difference' takes two cells, not 1"),
        ("median", '["easy"]', "how = 'median' is none of best, mean"),
        ("best", '["eesy"]', "maker/t1 has no cell 'eesy/ditto'"),
        ("best", "[]", "does not say what it is derived from"),
        ("best", '["derived"]', "is derived from itself"),
    ],
)
def test_what_cannot_be_derived_is_refused(tmp_path, how, of, sentence):
    with pytest.raises(UserError, match=f"maker/t1: cell derived/ditto: .*{re.escape(sentence)}"):
        derived(tmp_path, how, of)


def test_a_benchmark_holds_its_value(tmp_path, root):
    cell = (
        '[[cell]]\nid = "size"\nkind = "benchmark"\nhow = "parameters"\n[cell.published]\nditto = 1000\nours = 1000\n'
    )
    table = paper_tables.make(tmp_path, paper_tables.TABLE + cell)
    paper_tables.put(root, table, "size/ditto", 0, value=1014)
    paper_tables.put(root, table, "size/ours", 0, value=1016)
    found = Reader(root).beside(table).columns[-1]
    assert [n.marked for n in found.numbers] == [False, False, True]
    assert not found.ranks and found.tau is None and found.winner_kept is None  # its rows need not be methods


def test_a_row_may_be_the_best_of_others(tmp_path, root):
    text = paper_tables.TABLE.replace('label = "Ours"', 'label = "Ours"\nbest_of = ["fedavg", "ditto"]')
    table = paper_tables.make(tmp_path, text)
    for seed, (a, b) in enumerate(((70.0, 60.0), (50.0, 80.0))):
        paper_tables.put(root, table, "easy/fedavg", seed, a)
        paper_tables.put(root, table, "easy/ditto", seed, b)
    assert number(root, table, "easy/ours").ours == {0: pytest.approx(70.0), 1: pytest.approx(80.0)}
