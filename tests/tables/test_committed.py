"""The results that are committed: each belongs to a cell of a table, and has the settings that the table asks for."""

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
