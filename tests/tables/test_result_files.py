"""Result files: what is refused when they are read, and what damaged ones do not stop."""

import json
import os

import paper_tables
import pytest

from bespoke.errors import UserError
from bespoke.tables import results


@pytest.fixture
def table(tmp_path):
    cell = '[[cell]]\nid = "size"\nkind = "benchmark"\nhow = "parameters"\n'
    return paper_tables.make(tmp_path, paper_tables.TABLE + cell)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "results"


def write(path, content):
    path.write_text(json.dumps(content))


def inside(content, place):
    """Return the table in which a place such as "clients.rows" is, and its last key."""
    *tables, last = place.split(".")
    for key in tables:
        content = content[key]
    return content, last


ALL = ("table", "cell", "seed", "status", "settings", "evaluate", "view", "source", "seconds")
RUN = ("environment", "headline", "selection", "group", "metric", "higher", "totals", "curve", "clients")
INNER = ("settings.algorithm", "settings.algorithm.name", "environment.device", "source.modules", "source.method")
COLUMNS = ("client", "group", "condition", "rows", "metrics", "logged", "metrics.accuracy.sum", "metrics.loss.weight")
VECTORS = {
    "clients": [0, 1],
    "conditions": ["noise 1", "noise 2"],
    "vectors": [[0.1, 0.2], [0.3, 0.4]],
    "silhouette": None,
}
LAYER = VECTORS | {"layer": 1, "name": "norm1"}
ODD_VECTORS = (
    *((key, value) for key in ("clients", "conditions", "vectors") for value in (None, [], "ab", [["ab"], ["cd"]])),
    ("vectors", [[0.1, 0.2]]),
    ("vectors", [[0.1, 0.2], [0.3]]),
    ("vectors", [[0.1, None], [0.3, 0.4]]),
    ("silhouette", []),
)


@pytest.mark.parametrize(
    "place",
    [
        *ALL,
        *RUN,
        *INNER,
        "curve.round",
        "curve.pooled",
        "curve.mean",
        "higher.loss",
        *(f"clients.{column}" for column in COLUMNS),
    ],
)
def test_a_result_without_what_is_used_of_it_is_refused(root, table, place):
    path = paper_tables.put(root, table, "easy/ditto", 0, 70.0, 80.0)
    content = json.loads(path.read_text())
    assert results.read(path).content == content
    own, last = inside(content, place)
    del own[last]
    write(path, content)
    with pytest.raises(UserError, match=r"0\.json: is no result of a table: remove it, and sweep again"):
        results.read(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("status", "half"),
        ("seed", False),
        ("seed", "0"),
        ("seconds", "9"),
        ("evaluate", [3]),
        ("source.modules", [3]),
        ("higher.accuracy", 1),
        ("totals.bytes_up", "many"),
        ("probe", {"norms": 3}),
        ("curve.loss", [0.5, 0.5]),
        ("curve.pooled", ["high"]),
        ("clients.client", [0]),
        ("clients.group", ["train"]),
        ("clients.group", ["train", 3]),
        ("clients.rows", [100, 100.5]),
        ("clients.condition", ["clean"]),
        ("clients.condition", ["clean", 3]),
        ("clients.logged.beta_mean", [0.5]),
        ("clients.logged.beta_mean", [0.5, "high"]),
        ("clients.metrics.accuracy.sum", [70]),
        ("clients.metrics.accuracy.sum", [70, "80"]),
        ("clients.metrics.accuracy.weight", [100, 100, 100]),
        ("clients.metrics.accuracy.sum", [70, [80]]),
        ("clients.metrics.accuracy.sum", [[70, 70], [80, "80"]]),
        ("clients.metrics.accuracy.sum", [[70, 70], [80, 80]]),  # the weights are numbers
        ("clients.metrics.accuracy.sum", [70, float("nan")]),
        ("clients.metrics.accuracy.sum", [70, float("inf")]),
        ("clients.metrics.accuracy.sum", [70, 10**400]),
        ("clients.client", [3, 3]),
        ("clients.metrics.accuracy.sum", [70, 81]),  # the curve says 75 %
        ("clients.group", ["train", "new"]),  # the curve is of both
        ("group", "alien"),
        ("curve.pooled", [0.75001]),
        ("totals.rounds", 150),  # the curve goes on
        ("source.commit", 5),
        ("higher.accuracy", False),
        ("higher.loss", True),
        ("round", 190),
        ("settings.seed", 1),
        ("seconds", -1.0),
        ("environment.side_by_side", 0),
        ("environment.side_by_side", 0.9),
        ("environment.side_by_side", "five"),
        ("metric", "loss"),  # which is not what the run recorded first
        *(("probe.embeddings", VECTORS | {key: value}) for key, value in ODD_VECTORS),
        *(("probe.norms", {"layers": [LAYER | {key: value}]}) for key, value in ODD_VECTORS),
        ("probe.norms", {"layers": [LAYER | {"layer": "first"}]}),
        ("probe.norms", {"layers": []}),
        ("probe.norms", {"layers": [LAYER | {"vectors": [[], []]}]}),
        ("probe.features", {"vectors": [[1]], "clients": [0], "classes": [3], "kept": None, "scatter": {}}),
        ("probe.features", {"vectors": [[1]], "clients": [0], "classes": [3], "kept": 1, "scatter": {"a": "b"}}),
        ("probe.gaussianity", {"round": [0, 1]}),
        ("probe.hierarchy", {"paper": "low"}),
        ("probe.features", {"vectors": [[0.1], [0.2]], "clients": [0, 1], "classes": [3], "kept": 1, "scatter": {}}),
        ("probe.gaussianity", {"round": [0, 1], "train": {"nll": ["low"]}}),
    ],
)
def test_a_result_with_a_value_of_another_kind_is_refused(root, table, place, value):
    path = paper_tables.put(root, table, "easy/ditto", 0, 70.0, 80.0)
    content = json.loads(path.read_text()) | {"probe": {"embeddings": VECTORS, "norms": {"layers": [LAYER]}}}
    write(path, content)
    assert results.read(path).done
    own, last = inside(content, place)
    own[last] = value
    write(path, content)
    with pytest.raises(UserError, match="is no result of a table"):
        results.read(path)


@pytest.mark.parametrize(
    "curve",
    [
        {"round": [100, 100, 200], "pooled": [0.7, 0.7, 0.75], "mean": [0.7, 0.7, 0.75]},
        {"round": [100, 200], "pooled": [0.7, 0.75], "mean": [9.99, 0.75]},
        {"round": [100, 200], "pooled": [-5, 0.75], "mean": [0.7, 0.75]},
    ],
)
def test_a_curve_of_accuracy_that_cannot_be_is_refused(root, table, curve):
    path = paper_tables.put(root, table, "easy/ditto", 0, 70.0, 80.0)
    content = json.loads(path.read_text())
    write(path, content | {"curve": curve})
    with pytest.raises(UserError, match="is no result of a table"):
        results.read(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("metrics.accuracy.sum", [70, 101]),
        ("metrics.accuracy.sum", [-1, 80]),
        ("metrics.accuracy.weight", [100, 79]),
        ("metrics.accuracy.weight", [100, 200]),  # it has 100 rows
        ("group", ["train", "alien"]),
    ],
)
def test_clients_that_cannot_be_are_refused_whatever_the_curve_says(root, table, place, value):
    path = paper_tables.put(root, table, "easy/ditto", 0, 70.0, 80.0)
    content = json.loads(path.read_text())
    own, last = inside(content["clients"], place)
    own[last] = value
    write(path, paper_tables.agreeing(content))
    with pytest.raises(UserError, match="is no result of a table"):
        results.read(path)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "curve": {"round": [180], "pooled": [0.75], "mean": [0.75]},
            "round": 180,
        },  # of 200, but nobody was there later
        {"curve": {"round": [1], "pooled": [0.5], "mean": [0.5]}, "group": "unseen"},  # nobody is by the last round
        {"curve": {"round": [], "pooled": [], "mean": []}},
        {"curve": {"round": [200], "pooled": [0.7500004], "mean": [0.75]}},  # seven digits
        {"curve": {"round": [200], "pooled": [None], "mean": [None]}},
        {"environment": {"device": "cpu", "side_by_side": 1.4}},  # an estimate
    ],
)
def test_results_that_can_be_are_read(root, table, changes):
    path = paper_tables.put(root, table, "easy/ditto", 0, 70.0, 80.0)
    write(path, json.loads(path.read_text()) | changes)
    assert results.read(path).done


@pytest.mark.parametrize(
    ("metric", "sums", "pooled"),
    [
        ("loss", [2708.123, 4513.987], 36.11055),
        ("macro_f1", [[50, 30], [60, 80]], 0.55),
        ("mae", [142100.1, 1e5], 1210.5),
    ],
)
def test_the_curve_may_be_of_any_metric(root, table, metric, sums, pooled):
    path = paper_tables.put(root, table, "easy/ditto", 0, 70.0, 80.0)
    content = json.loads(path.read_text())
    weight = [[100, 100], [100, 100]] if metric == "macro_f1" else [100, 100]
    content["clients"]["metrics"][metric] = {"sum": sums, "weight": weight}
    content["higher"][metric] = metric == "macro_f1"
    for told, fits in ((pooled, True), (pooled * 1.001, False)):
        write(path, content | {"curve": content["curve"] | {"pooled": [told]}})
        if fits:
            assert results.read(path).done
        else:
            with pytest.raises(UserError, match="is no result of a table"):
                results.read(path)


def test_a_result_that_is_no_file_is_refused(root, table):
    path = paper_tables.put(root, table, "easy/ditto", 0, 70.0)
    path.unlink()
    os.mkfifo(path)  # whoever opened it would wait for ever
    with pytest.raises(UserError, match=r"0\.json: is no file: remove it, and sweep again"):
        results.of(root, table.entry("easy/ditto"))


def test_numbers_beyond_all_bounds_and_deep_nesting_are_refused(root, table):
    path = paper_tables.put(root, table, "easy/ditto", 0, 70.0)
    text = path.read_text()
    for old, new in (("70", "1e999"), ("70", "NaN"), ('"logged": {}', f'"logged": {"[" * 10**5}')):
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(UserError, match="is no result of a table"):
            results.read(path)


def test_unknown_numbers_and_curves_are_read(root, table):
    clients = paper_tables.content(table.entry("easy/ditto"), 0, [70.0, 80.0])["clients"]
    clients["metrics"]["accuracy"]["sum"][1] = None
    clients["metrics"]["loss"] = {"sum": [[1, None], [2, 3]], "weight": [[5, 5], [5, 5]]}
    path = paper_tables.put(root, table, "easy/ditto", 0, clients=clients, probe={"norms": {"layers": [LAYER]}})
    assert results.read(path).done


@pytest.mark.parametrize("key", ["error", "source", "settings"])
def test_a_failed_result_says_why_it_failed(root, table, key):
    path = paper_tables.fail(root, table, "easy/ditto", 0, "the memory is too small")
    content = json.loads(path.read_text())
    assert not results.read(path).done
    without = {name: value for name, value in content.items() if name != key}
    for told in (without, content | {"error": " "}):
        write(path, told)
        with pytest.raises(UserError, match="is no result of a table"):
            results.read(path)


@pytest.mark.parametrize("value", ["many", [3]])
def test_a_counted_result_has_a_number(root, table, value):
    assert results.read(paper_tables.put(root, table, "size/ditto", 0, value=3)).done
    path = paper_tables.put(root, table, "size/ditto", 0, value=value)
    with pytest.raises(UserError, match="is no result of a table"):
        results.read(path)


@pytest.mark.parametrize("name", ["1.json", "00.json", "1-0123abcd.json", "../ours/0.json"])
def test_the_file_of_another_seed_or_cell_is_refused(root, table, name):
    path = paper_tables.put(root, table, "easy/ditto", 0, 70.0)
    paper_tables.put(root, table, "easy/ours", 0, 70.0)
    other = path.parent / name
    other.write_text(path.read_text())
    with pytest.raises(UserError, match="is the result of 'maker/t1', cell 'easy/ditto', seed 0: it belongs elsewhere"):
        results.read(other)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("selection", ["best_test", "best_val", "last"]),
        ("group", ["all", "new", "train"]),
        ("view", ["global", "local", "personal"]),
    ],
)
def test_results_that_were_read_otherwise_are_kept_apart(root, table, key, values):
    for value in values:
        paper_tables.put(root, table, "easy/ditto", 0, 70.0, **{key: value})
    kept = [*results.of(root, table.entry("easy/ditto")).values(), *results.tries(root, table.entry("easy/ditto"), [])]
    assert sorted(result.content[key] for result in kept) == values


def test_a_copy_of_a_result_is_no_earlier_one(root, table):
    path = paper_tables.put(root, table, "easy/ditto", 0, 70.0)
    (path.parent / "0-copy.json").write_text(path.read_text())
    assert results.tries(root, table.entry("easy/ditto"), [results.read(path)]) == []
    (path.parent / "0-another.json").write_text(path.read_text())
    assert len(results.tries(root, table.entry("easy/ditto"), [])) == 1


def test_a_damaged_file_does_not_stop_what_others_are_read_for(root, table):
    paper_tables.put(root, table, "easy/ditto", 0, 70.0)
    damaged = paper_tables.put(root, table, "hard/ditto", 0, 70.0)
    content = json.loads(damaged.read_text())
    del content["environment"]
    write(damaged, content)
    assert [found.content["cell"] for found in results.everything(root)] == ["easy/ditto"]
    assert [*results.of(root, table.entry("easy/ditto"))] == [0]
    assert results.at(root, table.entry("hard/ditto"), 0) is None


def test_numbers_beyond_a_floats_whole_ones_are_written_so_that_they_can_be_read(root, table):
    told = paper_tables.content(table.entry("easy/ditto"), 0, [70.0])
    told["clients"]["metrics"]["loss"]["sum"] = [2.3e30]  # of a run that diverged
    path = results.write(root, table.entry("easy/ditto"), told)
    assert results.read(path).content["clients"]["metrics"]["loss"]["sum"] == [2.3e30]
