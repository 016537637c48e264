"""A table's file: what it says, and what it is refused for."""

import subprocess
import sys

import pytest
from small_tables import RUN, TABLE, write

from bespoke.errors import UserError
from bespoke.tables import spec


def read(folder, table):
    return spec.read(write(folder, table))


def test_a_table_has_an_entry_for_each_row_of_each_cell(tmp_path):
    table = read(tmp_path, TABLE)
    assert table.name == "paper/t1" and table.doc == "Paper, Table 1: Accuracy"
    assert [entry.id for entry in table.entries] == ["a/fedavg", "a/fedper", "b/fedavg", "b/fedper", "c/fedavg"]
    first, last = table.entries[0], table.entry("c/fedavg")
    assert (first.published, first.statistic, first.selection, first.group) == (62.5, "pooled", "last", "all")
    assert last.published is None and last.statistic == "mean"
    assert first.base == tmp_path.resolve() / "paper" / "small.toml"


def test_what_is_said_of_a_row_in_a_cell_comes_before_the_row_and_the_cell(tmp_path):
    changed = TABLE.replace('label = "FedAvg"', 'label = "FedAvg"\nview = "global"\nset = ["training.lr=0.2"]')
    changed += 'by_seed = { "data.replay" = 42 }\nview = "personal"\n[cell.methods.fedavg]\nset = ["training.lr=0.1"]\n'
    assert read(tmp_path, changed).entry("c/fedavg").view == "global"
    entry = read(tmp_path, changed + 'view = "third"\n').entry("c/fedavg")
    assert entry.view == "third"
    assert entry.overrides(2) == ["data.alpha=0.1", "data.replay=44", "training.lr=0.2", "training.lr=0.1"]


def test_a_cell_whose_data_are_missing_is_not_run(tmp_path):
    table = read(tmp_path, TABLE + 'missing = "not at hand"\n')
    assert [entry.runs for entry in table.entries] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('title = "Accuracy"\n', "", ["t1.toml", "no title"]),
        ('title = "Accuracy"', 'titel = "Accuracy"', ["titel", "did you mean 'title'"]),
        ('id = "fedper"', 'id = "fedavg"', ["two rows", "fedavg"]),
        ('id = "b"', 'id = "a"', ["two cells", "'a'"]),
        ('id = "b"', 'id = "../b"', ["[[cell]]", "'../b'"]),
        ('id = "b"', "id = 3", ["[[cell]]", "3"]),
        ('base = "small"', 'base = "smal"', ["cell a", "no run file smal"]),
        ('base = "small"\n', "", ["cell a", "no run file: add base"]),
        ("fedavg = 62.5", 'fedavg = "62.5"', ["cell", "published.fedavg must be a number", "'62.5'"]),
        ("fedavg = 62.5", "fedawg = 62.5", ["cell a: published", "fedawg"]),
        ("fedavg = 62.5", "fedavg = nan", ["cell]] a: published.fedavg must be finite, not nan"]),
        ("fedavg = 62.5", "fedavg = -inf", ["cell]] a: published.fedavg must be finite, not -inf"]),
        ("fedavg = 62.5", f"fedavg = 1{'0' * 400}", ["cell]] a: published.fedavg must be finite"]),
        ('rows = ["fedavg"]', "deviation = { fedavg = -0.1 }", ["deviation.fedavg must be finite and not negative"]),
        ('rows = ["fedavg"]', "deviation = { fedavg = inf }", ["deviation.fedavg must be finite and not negative"]),
        ('rows = ["fedavg"]', 'probe = "norm"', ["cell c: probe: 'norm' is none of", "(did you mean 'norms'?)"]),
        ('rows = ["fedavg"]', 'form = "b"', ["unknown key 'form'", "(did you mean 'from'?)", "of, from"]),
        ('rows = ["fedavg"]', 'sources = { fedavg = "b/fedavg" }', ["unknown key 'sources'"]),
        ('statistic = "mean"', 'statistic = "media"', ["c/fedavg: statistic", "media", "pooled"]),
        ('rows = ["fedavg"]', "rows = 3", ["rows must be a list", "3"]),
        ('rows = ["fedavg"]', 'kind = "derived"', ["cell c", "how"]),
        ('rows = ["fedavg"]', 'kind = "walk"', ["kind", "walk"]),
        ('source = "Table 1"', 'source = "Table 1"\nkind = "figure"', ["figure = "]),
        ("[[row]]", "[row", ["not valid TOML"]),
        ('rows = ["fedavg"]', 'group = "nobody"', ["c/fedavg: group", "nobody"]),
        ('rows = ["fedavg"]', "[cell.from]\nfedavg = 3", ["from", "must be a list"]),
        ('rows = ["fedavg"]', "[cell.methods.fedavg]\nset = 3", ["methods.fedavg.set must be a list"]),
        ('rows = ["fedavg"]', '[cell.methods.fedavg]\nset = "a.b=1"', ["methods.fedavg.set must be a list"]),
        ('title = "Accuracy"', 'title = "Accuracy"\nabout = 3', ["about must be a string"]),
        ('title = "Accuracy"', 'title = "Accuracy"\noptions = "x"', ["options must be a table"]),
        ('title = "Accuracy"', 'title = "Accuracy"\nseed = "x"', ["seed must be a whole number"]),
        ('title = "Accuracy"', 'title = "Accuracy"\nseed = -1', ["seed must not be negative"]),
    ],
)
def test_a_mistake_is_told_in_a_sentence_that_names_the_place(tmp_path, old, new, words):
    assert old in TABLE
    with pytest.raises(UserError) as error:
        read(tmp_path, TABLE.replace(old, new, 1))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_an_unknown_table_or_cell_is_told_with_the_closest(tmp_path):
    with pytest.raises(UserError, match="there is no table or figure 'nothing/t1'"):
        spec.find("nothing/t1")
    with pytest.raises(UserError, match="its parts are self_fl/f1a, self_fl/f1b"):
        spec.find("self_fl/f1")
    with pytest.raises(UserError, match=r"paper/t1 has no cell 'a/fedawg' \(did you mean 'a/fedavg'\?\)"):
        read(tmp_path, TABLE).entry("a/fedawg")


def test_tables_and_results_are_read_without_torch(tmp_path):
    path = write(tmp_path, TABLE, RUN)
    script = f"""
import pathlib, sys
from bespoke.tables import results, spec
table = spec.read(pathlib.Path({str(path)!r}))
assert results.of(pathlib.Path({str(tmp_path)!r}), table.entries[0]) == {{}}
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
