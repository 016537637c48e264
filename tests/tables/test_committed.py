"""The results that are committed: each belongs to a cell of a table, and has the settings that the table asks for."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from bespoke.tables import plan, results, spec

ROOT = Path(__file__).parents[2] / "results"
EXPERIMENTS = ROOT.parent / "experiments"
COMPARISONS = {f"checks/{path.stem}": path for path in EXPERIMENTS.glob("checks/comparisons/*.toml")}  # of no paper
TABLES = {**spec.listed(), **COMPARISONS}


def test_results_belong_to_a_table():
    there = {path.relative_to(ROOT).parts[:2] for path in ROOT.glob("*/*/*/*/*.json")}
    assert {"/".join(parts) for parts in there} <= {*TABLES}


@pytest.mark.parametrize("name", TABLES)
def test_results_belong_to_a_cell_and_have_its_settings(name):
    table = spec.read(TABLES[name])
    entries = {entry.id: entry for entry in table.entries}
    for folder in {path.parent for path in (ROOT / name).glob("*/*/*.json")}:
        id = folder.relative_to(ROOT / name).as_posix()
        assert id in entries, f"{name} has no cell {id}: rename the folder, or bring the cell back"
        for seed, result in results.of(ROOT, entries[id]).items():
            told = result.content
            assert (told["table"], told["cell"], told["seed"]) == (name, id, seed), result.path
            if result.done and entries[id].runs:
                (job,) = plan.jobs([entries[id]], [seed])
                assert plan.answers(result, job, entries[id]), f"{result.path}: the table asks for other settings"


def test_the_code_of_a_result_is_in_the_history():
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True).stdout

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("this is no checkout with its whole history")
    there = set(git("log", "--format=%H").split())
    named = {result.content["source"]["commit"] for result in results.everything(ROOT) if result.done}
    told = re.findall(r"not in the history, ([0-9a-f]{7})", (ROOT.parent / "docs" / "tables.md").read_text())
    assert sorted(commit[:7] for commit in named - there) == told, (
        "docs/tables.md tells which commits are not in the history"
    )


def test_trainings_of_the_same_settings_gave_the_same_numbers():
    """Several tables may have one: what ran alone for its time, and beside others, is equal in every client's sums."""
    first: dict[str, results.Result] = {}
    compared = 0
    for result in results.everything(ROOT):
        told = result.content
        if not result.done or "clients" not in told or told["environment"]["device"] == "cpu":
            continue
        # What another cell was given, or reads of the same training, is no second one.
        about = [told[key] for key in ("settings", "evaluate", "view", "round", "group")]
        key = json.dumps([*about, told["environment"]["device"], told["source"]["method"]], sort_keys=True)
        before = first.setdefault(key, result).content
        if before["seconds"] != told["seconds"]:
            assert before["clients"]["metrics"] == told["clients"]["metrics"], (first[key].path, result.path)
            compared += 1
    assert compared >= 3
