"""Every run file and every method runs, on random rows, few clients and two rounds."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import small_tables
from small_runs import command

from bespoke.algorithms import ALGORITHMS
from bespoke.files import experiments_folder
from bespoke.runs.experiment import load
from bespoke.tables import plan, results, spec, worker
from bespoke.tables.tiny import tiny
from bespoke.tables.worker import Place

ENTRIES = [entry for path in spec.listed().values() for entry in spec.read(path).entries if entry.runs]
FILES = sorted(path for path in experiments_folder().glob("*/*.toml") if path.parent.name != "algorithms")


def _of_no_table(file: Path, method: str) -> spec.Entry:
    """A method on a run file of which no table has a run."""
    row, cell = spec.Row(method), spec.Cell(file.stem, base=file.stem)
    path = file.parent / "tables" / "none.toml"
    return spec.Table(f"{file.parent.name}/none", path, "", "", "", rows=(row,), cells=(cell,)).entries[0]


def _some() -> list[spec.Entry]:
    """An entry for each run file, of as many methods as possible, then one for each method that is not among them."""
    of_file: dict[Path, list[spec.Entry]] = defaultdict(list)
    for entry in ENTRIES:
        of_file[entry.base].append(entry)
    methods = {file: {entry.algorithm for entry in entries} for file, entries in of_file.items()}
    places = Counter(method for there in methods.values() for method in there)
    left, chosen = set(ALGORITHMS), []
    for file in sorted(of_file, key=lambda file: len(methods[file])):  # the one with the least choice first
        entry = min(of_file[file], key=lambda entry: (entry.algorithm not in left, places[entry.algorithm]))
        chosen.append(entry)
        left.discard(entry.algorithm)
    for file in FILES:
        if file not in of_file:
            own = load(file)[0]
            method = own.algorithm_name
            if left and own.evaluation.when == "aggregated":  # else not every method can be evaluated
                method = min(left, key=lambda method: (places[method], method))
            chosen.append(_of_no_table(file, method))
            left.discard(method)
    last = {method: _of_no_table(FILES[0], method) for method in left}  # for those in no table
    last |= {entry.algorithm: entry for entry in ENTRIES}  # the last tables have the smallest models
    return [*chosen, *(last[method] for method in sorted(left))]


SOME = _some()


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


@pytest.mark.parametrize("entry", SOME, ids=_id)
def test_a_tiny_run(entry, tmp_path):
    _check([entry], tmp_path)


def test_cells_that_become_the_same_tiny_training_share_it():
    wanted = plan.jobs([entry for entry in spec.find("pfedfda/f4").entries if entry.runs], [0])
    made = plan.merged(map(tiny, wanted))
    assert len(made) < len(wanted)
    assert sum(len(job.entries) for job in made) == sum(len(job.entries) for job in wanted)


def test_every_run_file_and_every_method_is_tried():
    assert {entry.base for entry in SOME} == {*FILES}
    assert {entry.algorithm for entry in SOME} == {*ALGORITHMS}


@pytest.mark.slow
@pytest.mark.parametrize("entries", _trainings(), ids=lambda entries: _id(entries[0]))
def test_every_cell(entries, tmp_path):
    _check(entries, tmp_path)


def test_the_command_tries_a_table_without_its_data_and_keeps_nothing(tmp_path, monkeypatch):
    """400 rounds on CIFAR-10, which is not at hand here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "nothing"))
    run = small_tables.RUN.replace('"gaussian"\nrows = 240\ndim = 3\nnum_classes = 3', '"cifar10"')
    table = small_tables.write(tmp_path, run=run.replace("rounds = 4", "rounds = 400"))
    done = command("sweep", table, "--tiny", "--device", "cpu", "--json")
    told = json.loads(done.out)
    assert done.code == 0 and (told["cells"], told["done"], told["failed"]) == (5, 5, [])
    assert {path.name for path in tmp_path.iterdir()} == {"paper"}
