"""The command `table`: one table in each form, the state of all, and the pages that it writes."""

import json
import subprocess
import sys
from pathlib import Path

import paper_tables
import pytest
from small_runs import command

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results with one number of pFedFDA's Table 2."""
    from bespoke.tables import spec

    monkeypatch.chdir(tmp_path)
    paper_tables.put(tmp_path / "results", spec.find("pfedfda/t2"), "cifar10_dir0.5/ditto", 0, 73.0)
    return tmp_path / "results"


def ok(*arguments):
    done = command("table", *arguments)
    assert done.code == 0, done.err
    return done.out


def test_a_table_in_each_form(results):
    assert ok("pfedfda/t2").startswith("pfedfda/t2: pFedFDA, Table 2: ")
    assert "73.6 → 73.0" in ok("pfedfda/t2", "--results", "results")
    assert "| 73.6 → 73.0<br>-0.6, 1→1 |" in ok("pfedfda/t2", "--markdown")
    told = json.loads(ok("pfedfda/t2", "--json"))
    column = next(column for column in told["columns"] if column["id"] == "cifar10_dir0.5")
    assert next(row for row in column["rows"] if row["id"] == "ditto")["ours"] == pytest.approx(73.0)


def test_the_state_of_all(results):
    line = next(line.split() for line in ok().splitlines() if line.startswith("pfedfda/t2 "))
    assert line[1:3] == ["84", "36"] and line[4:7] == ["1", "of", "48"]
    assert json.loads(ok("--json"))["tables"]["pfedfda/t2"]["within_1"] == 1


def test_pages_are_written(results):
    done = command("table", "--write", "pages")
    assert done.code == 0 and "written: pages/pfedfda.md" in done.err
    assert "73.6 → 73.0" in Path("pages/pfedfda.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pfedfda/t22"], "there is no table or figure 'pfedfda/t22' (did you mean"),
        (["pfedfda/t2", "--markdown", "--json"], "give --markdown or --json, not both"),
        (["--markdown"], "--markdown shows one table"),
        (["pfedfda/t2", "--write", "pages"], "--write writes pages of all tables: name none"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_sentence(results, arguments, sentence):
    assert command("table", *arguments).sentence.startswith(sentence)


def test_a_result_that_is_none_is_told(results):
    (results / "pfedfda/t2/cifar10_dir0.5/ditto/1.json").write_text("{}")
    assert command("table", "pfedfda/t2").sentence.endswith("is no result of a table: remove it, and sweep again")


def test_a_damaged_result_of_another_table_is_not_read(results):
    (results / "pfedfda/t2/cifar10_dir0.5/ditto/1.json").write_text("{}")
    assert "pfedfda/t6" in ok("pfedfda/t6")


def test_a_mistyped_folder_of_results_is_told(results, tmp_path, monkeypatch):
    assert command("table", "pfedfda/t2", "--results", "nosuch").sentence.startswith("there is no folder nosuch")
    assert command("table", "--results", "nosuch").sentence.startswith("there is no folder nosuch")
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")  # as a fresh checkout, which has no folder of results
    assert "None of it has been run yet" in ok("pfedfda/t2") and "0 of 48" in ok()


def test_a_table_without_results_is_shown_without_torch(results):
    code = "import sys; from bespoke.cli.main import app; app(['table', 'pfedfda/t1'], standalone_mode=False)"
    code += "; assert not {'torch', 'scipy', 'sklearn', 'matplotlib'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "None of it has been run yet" in done.stdout


def test_results_with_other_settings_are_left_out(results, tmp_path):
    from bespoke.tables import spec

    table, id = spec.find("pfedfda/t2"), "cifar10_dir0.5/ditto"
    paper_tables.put(results, table, id, 0, 71.0, settings=paper_tables.other_settings(table, id))
    shown = ok("pfedfda/t2")
    assert "73.6 → 7" not in shown and "1 result was made with other settings than the table has now" in shown
