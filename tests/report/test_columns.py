"""A run's clients and curves as tables, from its records alone."""

import json
import shutil
from pathlib import Path

import pytest
from small_runs import arrays, experiment, federated

import bespoke
from bespoke.records import CLIENTS, FEDERATION, ROUNDS, RunFolder
from bespoke.report import Columns, client_table, curve_table, summarise

OLD = Path(__file__).parent / "old_run" / "fedrod"
ROWS = ("train_rows", "val_rows", "test_rows")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    data = {"clients": 8, "new_clients": 2, "validation": 0.2}  # of six, at most five take part
    settings = experiment("fedrod", data=data, evaluation={"every": 2}, rounds=5, rate=0.2)
    return bespoke.run(settings, tmp_path_factory.mktemp("runs") / "fedrod")


def test_every_client_has_a_row_with_its_sizes_and_metrics(run):
    table, pool = run.clients, run.pool
    assert list(table) == ["name", "group", *ROWS, "round", "accuracy", "loss", "global_accuracy", "global_loss"]
    assert table["name"] == list(pool.names) and table["group"][-2:] == ["new", "new"]
    assert {"train", "unseen"} == set(table["group"][:-2])
    assert [table[column] for column in ROWS] == [list(rows.sizes) for rows in (pool.train, pool.val, pool.test)]
    assert table["round"] == [5] * pool.total_clients
    for i, row in enumerate(table.rows()):
        x, y = (values[pool.test.client(i)] for values in (pool.x, pool.y))
        assert row["accuracy"] == pytest.approx(run.models[row["name"]].score(x, y)), row


def test_the_table_agrees_with_the_summary(run):
    rows = [row for row in run.clients.rows() if row["group"] != "new"]
    for column, view in (("accuracy", "personal"), ("global_accuracy", "global"), ("loss", "personal")):
        pooled = sum(row[column] * row["test_rows"] for row in rows) / sum(row["test_rows"] for row in rows)
        assert pooled == pytest.approx(run.metric(column.removeprefix("global_"), view=view))


def test_the_records_alone_are_enough(run, tmp_path):
    for name in (ROUNDS, CLIENTS, FEDERATION):
        shutil.copy(run.folder.path / name, tmp_path)
    assert client_table(RunFolder(tmp_path)) == run.clients
    assert curve_table(RunFolder(tmp_path)) == run.curves()


def test_a_client_twice_in_a_round_is_refused(run, tmp_path):
    shutil.copytree(run.folder.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    folder.append(CLIENTS, [line for line in run.folder.clients() if line["round"] == 5][:1])
    with pytest.raises(bespoke.UserError, match="holds client 0 twice in round 5"):
        client_table(folder)


def test_a_client_keeps_its_last_evaluation(tmp_path):
    """Where only a round's participants are evaluated, the others' last values are of earlier rounds."""
    done = bespoke.run(experiment(evaluation={"every": 1, "when": "local"}, rounds=4, rate=0.3), tmp_path / "run")
    last = {row["client"]: row["round"] for row in done.folder.clients()}
    assert len(set(last.values())) > 1
    assert done.clients["round"] == [last.get(i) for i in range(done.pool.total_clients)]
    unknown = [i for i in range(done.pool.total_clients) if i not in last]
    assert [done.clients["accuracy"][i] for i in unknown] == [None] * len(unknown)


def test_clients_without_test_rows_have_no_metrics():
    table = federated(test=0.0).clients
    assert table["train_rows"] == [30] * 4 and table["group"] == ["train"] * 4 and table["round"] == [None] * 4
    assert "accuracy" not in table and "-" in repr(table)


def test_names_and_conditions_are_shown(tmp_path):
    table = federated(clients=dict(zip("abcd", arrays(), strict=True))).clients
    assert table["name"] == ["a", "b", "c", "d"] and "condition" not in table
    told = {"clients": 1, "names": ["<b>x"], "train": [3], "val": [0], "test": [2], "conditions": ["fog:3"]}
    (tmp_path / "federation.json").write_text(json.dumps(told))
    found = client_table(RunFolder(tmp_path))
    assert found["condition"] == ["fog:3"] and "<td>&lt;b&gt;x</td>" in found._repr_html_()


@pytest.mark.parametrize("damage", [{"train": [3, 4]}, {"test": None}, {"names": "x"}, {"clients": -1}, {"val": ["a"]}])
def test_a_damaged_description_is_named(damage, tmp_path):
    told = {"clients": 1, "names": ["a"], "train": [3], "val": [0], "test": [2]}
    (tmp_path / "federation.json").write_text(json.dumps(told | damage))
    with pytest.raises(bespoke.UserError, match=r"federation\.json is damaged"):
        client_table(RunFolder(tmp_path))


def test_old_records_have_a_table_too():
    table, last = client_table(RunFolder(OLD)), summarise(OLD)["views"]["personal"]["last"]
    own = [value for value, group in zip(table["accuracy"], table["group"], strict=True) if group != "new"]
    assert sum(own) / len(own) == pytest.approx(last["all"]["mean"])


# --- curves ---


def test_curves_have_a_row_for_each_evaluated_round(run):
    curves = run.curves()
    assert list(curves) == ["round", "train_loss", "accuracy", "loss", "global_accuracy", "global_loss"]
    assert curves["round"] == [2, 4, 5]
    assert curves["train_loss"] == [row["train_loss"] for row in run.folder.rounds() if row["round"] in (2, 4, 5)]
    assert curves["accuracy"][-1] == run.accuracy and curves["global_loss"][-1] == run.metric("loss", view="global")
    assert run.curves("worst10", group="new")["loss"][-1] == run.metric("loss", "worst10", group="new")
    assert run.curves(split="val")["accuracy"] != curves["accuracy"]


def test_what_no_curve_has_is_refused_by_name(run):
    for wrong in ({"statistic": "median"}, {"split": "train"}, {"group": "old"}):
        (word,) = wrong.values()
        with pytest.raises(bespoke.UserError, match=f"there is no .*{word!r}; use one of"):
            run.curves(**wrong)


# --- how tables show themselves ---


def test_a_table_is_a_dict_of_columns():
    table = Columns(name=["a", "b"], value=[0.123456, None])
    assert table.rows() == [{"name": "a", "value": 0.123456}, {"name": "b", "value": None}]
    assert str(table).splitlines() == ["name   value", "a     0.1235", "b          -"]
    assert "<td>0.1235</td>" in table._repr_html_()


def test_a_long_table_shows_its_beginning():
    table = Columns(round=list(range(1000)))
    assert len(str(table).splitlines()) == 22 and str(table).endswith("... and 980 more rows")
    assert table._repr_html_().count("<tr>") == 21


def test_a_run_shows_itself_in_a_notebook(run):
    shown = run._repr_html_()
    assert shown.startswith("<b>fedrod on gaussian, seed 0, 5 of 5 rounds</b><br>")
    assert "<th>global_accuracy</th>" in shown and f"records: {run.folder.path}" in shown
    run.notes.append("a < b")
    assert "note: a &lt; b<br>" in run._repr_html_()


def test_runs_are_compared_as_folders_are(run):
    other = federated(rounds=1)  # in no folder of its own
    assert bespoke.compare(run).rows[0].label == "fedrod"
    assert [row.label for row in bespoke.compare([other, run.folder.path]).rows] == ["fedavg", "fedrod"]
    assert bespoke.compare([run, other]).rows[1].mean.mean == other.metric(statistic="mean")


def test_a_comparison_shows_itself_in_a_notebook(run):
    comparison = bespoke.compare(run.folder.path)
    shown = comparison._repr_html_()
    header, (row,) = comparison.cells()
    assert shown.startswith(f"<p><b>{comparison.title}</b></p>") and f"<p>{comparison.caption}</p>" in shown
    assert "".join(f"<th>{name}</th>" for name in header) in shown
    assert f"<td>{row[0]}</td><td><b>{row[1]}</b></td>" in shown
