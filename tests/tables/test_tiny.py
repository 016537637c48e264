"""Every run file and every method of the tables runs, on random rows, few clients and two rounds."""

import pytest

from bespoke.algorithms import ALGORITHMS
from bespoke.tables import plan, results, spec, worker
from bespoke.tables.tiny import tiny
from bespoke.tables.worker import Place

ENTRIES = [entry for path in spec.listed().values() for entry in spec.read(path).entries if entry.runs]


def _some() -> list[spec.Entry]:
    """An entry for each run file, then one for each method that is not among them."""
    files = {entry.base: entry for entry in reversed(ENTRIES)}
    methods = {entry.algorithm: entry for entry in ENTRIES}  # the last tables have the smallest models
    have = {entry.algorithm for entry in files.values()}
    return [*files.values(), *(entry for name, entry in methods.items() if name not in have)]


def _trainings() -> list[list[spec.Entry]]:
    """All entries, those together that are read from one training."""
    groups: dict[tuple, list[spec.Entry]] = {}
    for entry in ENTRIES:
        start = entry.start and entry.start.id
        groups.setdefault((entry.base, entry.algorithm, *entry.overrides(0), start), []).append(entry)
    return [*groups.values()]


def _check(entries, folder):
    (job,) = plan.jobs(entries, [0])
    made, place = tiny(job), Place(folder / "results", folder / "work")
    assert worker.carry_out(made, place, lambda: False, lambda *done: None) == worker.DONE
    for entry in entries:
        (found,) = results.of(place.root, entry).values()
        assert found.done and found.content["clients"]["client"]
        if not entry.cell.evaluate:
            assert found.content["round"] <= made.experiment.training.rounds
        found.value(entry)  # the statistic is there for this group


def _id(entry: spec.Entry) -> str:
    return f"{entry.table}:{entry.id}"


@pytest.mark.parametrize("entry", _some(), ids=_id)
def test_a_tiny_run(entry, tmp_path):
    _check([entry], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("entries", _trainings(), ids=lambda entries: _id(entries[0]))
def test_every_cell(entries, tmp_path):
    _check(entries, tmp_path)


def test_nearly_all_methods_are_in_a_table():
    assert set(ALGORITHMS) - {entry.algorithm for entry in ENTRIES} <= {"fedpa", "fedep", "qlsd", "fedavg"}
