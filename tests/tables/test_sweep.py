"""A sweep: one training for several cells, results that are whole or not there, and nothing run twice."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_runs
import torch
from small_tables import RUN, TABLE, write

from bespoke.errors import UserError
from bespoke.report.summary import Evaluations
from bespoke.runs import api
from bespoke.runs.lock import FolderLock
from bespoke.tables import plan, reading, results, spec, worker
from bespoke.tables.sweep import State, _heard, _longest_first, _seconds_left, _Worker, sweep
from bespoke.tables.worker import Place


def never():
    return False


def carry_out(job, place, stop=never):
    return worker.carry_out(job, place, stop, lambda done, rounds: None)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "results", tmp_path / "work")


@pytest.fixture
def table(tmp_path):
    return spec.read(write(tmp_path))


def of_cell(table, place, id, seed=0):
    return results.of(place.root, table.entry(id))[seed]


# --- what is planned ------------------------------------------------------------------------------------------------


def test_cells_that_differ_only_in_what_is_read_share_a_training(table):
    found = plan.jobs(table.entries, [0, 1])
    assert sorted([entry.id for entry in job.entries] for job in found if job.experiment.seed == 1) == [
        ["a/fedavg"],
        ["a/fedper"],
        ["b/fedavg", "c/fedavg"],
        ["b/fedper"],
    ]
    assert len(found) == len({job.key for job in found}) == 8


def test_methods_and_cells_are_chosen_by_name(table):
    assert [entry.id for entry in plan.chosen([table], ["fedper"])] == ["a/fedper", "b/fedper"]
    assert [entry.id for entry in plan.chosen([table], ["fedavg"], ["c"])] == ["c/fedavg"]
    with pytest.raises(UserError, match=r"has no method 'fedpr' \(did you mean 'fedper'\?\)"):
        plan.chosen([table], ["fedpr"])


def test_a_rows_id_means_that_row_alone_and_a_methods_name_all_its_rows(table):
    def chosen(ids, name):
        rows = tuple(replace(table.rows[0], id=id, algorithm="fedavg") for id in ids)
        return [entry.id for entry in plan.chosen([replace(table, rows=rows, cells=table.cells[:1])], [name])]

    assert chosen(["fedavg", "slow"], "fedavg") == ["a/fedavg"]
    assert chosen(["fedavg", "slow"], "slow") == ["a/slow"]
    assert chosen(["fast", "slow"], "fedavg") == ["a/fast", "a/slow"]


def test_a_name_must_be_in_one_of_several_tables(table):
    first = replace(table, name="other/t1", cells=table.cells[:1])
    found = plan.chosen([first, table], ["fedavg"], ["a", "c"])
    assert [(entry.table, entry.id) for entry in found] == [
        ("other/t1", "a/fedavg"),
        (table.name, "a/fedavg"),
        (table.name, "c/fedavg"),
    ]
    with pytest.raises(UserError, match=rf"other/t1 and {table.name} have no cell 'z'; they have a, b, c"):
        plan.chosen([first, table], [], ["z"])


def test_a_wrong_setting_names_its_cell(tmp_path):
    changed = TABLE.replace("data.alpha=0.1", "data.alfa=0.1", 1)
    with pytest.raises(UserError, match=r"paper/t1: cell b/fedavg: .*alfa"):
        plan.jobs(spec.read(write(tmp_path, changed)).entries, [0])


def test_a_fold_that_is_not_there_is_told_before_anything_is_run(tmp_path):
    changed = TABLE.replace('"data.alpha=0.1"', '"data.folds=2", "data.fold=2"', 1)
    with pytest.raises(UserError, match=r"paper/t1: cell b/fedavg: .*folds = 2, fold = 2"):
        plan.jobs(spec.read(write(tmp_path, changed)).entries, [0])


# --- what is written ------------------------------------------------------------------------------------------------


def test_a_result_holds_what_the_run_recorded(table, place, tmp_path):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["b", "c"]), [3])
    assert carry_out(job, place) == worker.DONE
    run = api.run(job.experiment, tmp_path / "plain")
    b, c = (of_cell(table, place, id, 3) for id in ("b/fedavg", "c/fedavg"))
    assert b.value(table.entry("b/fedavg")) == pytest.approx(run.metric("accuracy", "pooled"), rel=1e-6)
    assert c.value(table.entry("c/fedavg")) == pytest.approx(run.metric("accuracy", "mean"), rel=1e-6)
    assert b.content["settings"] == json.loads(json.dumps(job.experiment.tables()))
    assert (b.content["round"], b.content["curve"]["round"]) == (4, [2, 4])
    assert b.content["shared_with"] == ["c/fedavg"] and b.same_source
    expected = Evaluations(run.folder).scores("personal", "accuracy", 2).pooled()
    assert b.content["curve"]["pooled"][0] == pytest.approx(expected, rel=1e-6)
    assert not any(place.work.iterdir())  # the run's folder is gone once its results are written
    assert not plan.unfinished([job], place.root)


def test_a_result_of_other_settings_is_kept_as_a_try_and_run_again(table, place, tmp_path):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    carry_out(job, place)
    entry = table.entry("a/fedavg")
    other = spec.read(write(tmp_path, run=RUN.replace("lr = 0.3", "lr = 0.1")))
    (again,) = plan.jobs(plan.chosen([other], ["fedavg"], ["a"]), [0])
    assert plan.unfinished([again], place.root)
    carry_out(again, place)
    (tried,) = results.tries(place.root, entry, [])
    assert tried.content["settings"]["training"]["lr"] == 0.3
    assert of_cell(other, place, "a/fedavg").content["settings"]["training"]["lr"] == 0.1
    assert not plan.unfinished([again], place.root)


def test_a_result_of_older_settings_is_known_by_the_defaults_of_newer_ones(table, place):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    carry_out(job, place)
    path = of_cell(table, place, "a/fedavg").path
    content = json.loads(path.read_text())
    del content["settings"]["training"]["trim"]
    path.write_text(json.dumps(content))
    assert not plan.unfinished([job], place.root)
    content["settings"]["training"]["gone"] = 1
    path.write_text(json.dumps(content))
    assert plan.unfinished([job], place.root)


def test_a_changed_method_marks_its_results(table, place):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    carry_out(job, place)
    result = of_cell(table, place, "a/fedavg")
    assert result.same_source
    result.content["source"]["method"] = "0" * 12
    assert not result.same_source
    assert "bespoke.maths.gaussian" in results.modules_of("bespoke.algorithms.pfedfda")


def test_another_tables_result_of_the_same_training_is_taken(table, place, tmp_path):
    (job,) = plan.jobs(plan.chosen([table], ["fedper"], ["b"]), [0])
    carry_out(job, place)
    path = write(tmp_path)
    other = spec.read(path.rename(path.with_name("t9.toml")))
    state = sweep(plan.jobs(plan.chosen([other], ["fedper"], ["b"]), [0]), place)
    assert (state.adopted, state.done, state.total) == (1, 1, 1)
    assert of_cell(other, place, "b/fedper").content["adopted_from"] == "paper/t1:b/fedper"


@pytest.mark.parametrize("text", ["{", "[]", '{"status": "done"}'])
def test_a_damaged_result_is_told_and_made_again(table, place, text):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    carry_out(job, place)
    path = of_cell(table, place, "a/fedavg").path
    path.write_text(text)
    with pytest.raises(UserError, match=r"0\.json: is no result of a table"):
        of_cell(table, place, "a/fedavg")
    assert carry_out(job, place) == worker.DONE and of_cell(table, place, "a/fedavg").done


def test_a_result_that_an_entry_cannot_read_is_not_taken(table, place, tmp_path):
    carry_out(plan.job_of(table.entry("b/fedavg"), 0), place)
    other = spec.read(write(tmp_path, TABLE.replace('statistic = "mean"', 'metric = "recall"')))
    job = plan.job_of(other.entry("c/fedavg"), 0)
    assert plan.adoptable([job], results.everything(place.root)) == ([], [job])


def test_a_stopped_training_is_resumed(table, place):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    asked = iter([False, True])
    assert carry_out(job, place, lambda: next(asked, True)) == worker.STOPPED
    assert not list(place.root.rglob("*.json"))
    rounds = []
    assert worker.carry_out(job, place, never, lambda done, _: rounds.append(done)) == worker.DONE
    assert rounds[0] == 0 and rounds[1] > 1 and rounds[-1] == 4  # the start of training is told, then each round
    again = replace(place, root=place.root.with_name("again"))
    carry_out(job, again)
    first, second = (of_cell(table, where, "a/fedavg").content for where in (place, again))
    assert first["clients"] == second["clients"]


def test_a_damaged_folder_is_begun_again(table, place):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    carry_out(job, place, lambda: True)
    (place.work / job.key / "run" / "config.toml").write_text("no TOML")
    assert carry_out(job, place) == worker.DONE


def test_notes_of_a_result_do_not_say_where_it_ran(table, place):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    asked = iter([False, True])
    assert carry_out(job, place, lambda: next(asked, True)) == worker.STOPPED
    shutil.rmtree(place.work / job.key / "run" / "checkpoints")
    assert carry_out(job, place) == worker.DONE
    notes = of_cell(table, place, "a/fedavg").content["notes"]
    assert "the run's folder holds no intact checkpoint: started again from round 1" in notes
    assert not any(str(place.work) in note for note in notes)


@pytest.mark.parametrize("where", ["work", "results/.running"])
def test_a_training_that_another_process_is_at_is_left_alone(table, place, where, tmp_path):
    """It may be of a sweep that works in another folder, for the same results."""
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    claim = tmp_path / where / job.key
    claim.mkdir(parents=True)
    lock = FolderLock(claim)
    with pytest.raises(worker.Busy):
        carry_out(job, place)
    lock.close()
    assert carry_out(job, place) == worker.DONE
    assert carry_out(job, place) == worker.ELSEWHERE  # it is done, and not done twice
    assert not list((tmp_path / "results/.running").iterdir())


def test_a_result_of_a_training_elsewhere_is_taken_once_it_is_there(table, place, tmp_path):
    """Another sweep was at the same training for a table of its own."""
    path = write(tmp_path)
    other = spec.read(path.rename(path.with_name("t9.toml")))

    (job,) = plan.jobs(plan.chosen([other], ["fedavg"], ["a"]), [0])
    claim = place.root / worker.RUNNING / job.key
    claim.mkdir(parents=True)
    lock = FolderLock(claim)

    def show(state):
        if state.elsewhere:
            lock.close()
            carry_out(plan.job_of(table.entry("a/fedavg"), 0), place)

    state = sweep([job], place, show=show)
    assert (state.adopted, state.done, state.elsewhere) == (1, 1, [])


def test_cells_whose_time_is_read_run_alone_and_say_so(tmp_path, place):
    changed = TABLE.replace('id = "a"', 'id = "a"\nalone = true')
    table = spec.read(write(tmp_path, changed))
    jobs = plan.jobs(plan.chosen([table], ["fedavg"]), [0])
    waiting = _longest_first(jobs, plan.Clock())
    assert [job.alone for job in waiting] == [False, True]
    seen = []
    state = sweep(
        jobs, place, processes=3, show=lambda state: seen.append([job.alone for job, _ in state.running.values()])
    )
    assert state.done == 3 and all(len(running) == 1 or not any(running) for running in seen)
    assert [True] in seen and [False] in seen
    found = [of_cell(table, place, f"{id}/fedavg").content["environment"]["side_by_side"] for id in ("a", "b")]
    assert found == [1, 3] and not plan.unfinished(jobs, place.root)
    path = of_cell(table, place, "a/fedavg").path
    path.write_text(path.read_text().replace('"side_by_side": 1', '"side_by_side": 2'))
    assert [job.alone for job in plan.unfinished(jobs, place.root)] == [True]
    assert [job.alone for job in plan.jobs(plan.chosen([table], ["fedavg"]), [1])] == [False, False]  # no time is read
    with pytest.raises(UserError, match="alone must be true or false, not 1"):
        spec.read(write(tmp_path, changed.replace("alone = true", "alone = 1")))


def test_while_another_sweep_trains_a_training_whose_time_is_read_is_left_for_a_later_call(tmp_path, place):
    """Beside another its time would count for nothing."""
    table = spec.read(write(tmp_path, TABLE.replace('id = "a"', 'id = "a"\nalone = true')))
    jobs = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0, 1])
    folder = place.root / worker.RUNNING / "another"
    folder.mkdir(parents=True)
    with contextlib.closing(FolderLock(folder)):
        state = sweep(jobs, place)
        assert (state.done, [job.experiment.seed for job in state.elsewhere]) == (1, [0])
    assert sweep(jobs, place).done == 2


def test_another_sweep_that_only_looks_at_a_training_does_not_keep_it(table, place, monkeypatch):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    folder = place.root / worker.RUNNING / job.key
    folder.mkdir(parents=True)
    looking = FolderLock(folder)
    monkeypatch.setattr(worker.time, "sleep", lambda seconds: looking.close())
    assert carry_out(job, place) == worker.DONE


def test_trainings_of_other_sweeps_are_company(table, place):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    for name, held in (("ended", False), ("going on", True)):
        folder = place.root / worker.RUNNING / name
        folder.mkdir(parents=True)
        lock = FolderLock(folder)
        if not held:
            lock.close()
    carry_out(job, place)
    assert of_cell(table, place, "a/fedavg").content["environment"]["side_by_side"] == 2
    lock.close()


# --- a whole sweep --------------------------------------------------------------------------------------------------


def test_a_failing_cell_is_recorded_and_the_others_go_on(tmp_path, place):
    changed = TABLE.replace('id = "fedper"', 'id = "fedper"\nview = "none"')
    table = spec.read(write(tmp_path, changed))
    (place.root / "paper" / "t1").mkdir(parents=True)
    state = sweep(plan.jobs(table.entries, [0]), place, processes=1)
    assert state.done == 3 and len(state.failed) == 2 and not state.left
    failed = of_cell(table, place, "a/fedper")
    assert not failed.done and "no view 'none'" in failed.content["error"]
    assert of_cell(table, place, "b/fedavg").done
    assert [job.entries[0].id for job in plan.unfinished(plan.jobs(table.entries, [0]), place.root)] == [
        "a/fedper",
        "b/fedper",
    ]


def test_a_sweep_without_time_leaves_all_for_later(table, place):
    state = sweep(plan.jobs(table.entries, [0]), place, budget=1.0)
    assert state.out_of_time and state.left == 5 and not state.failed


def test_a_round_is_timed_from_when_training_began(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("bespoke.tables.sweep.time", SimpleNamespace(monotonic=lambda: now[0]))
    each, found = _Worker(None, None), []
    for seconds in (30.0, 8.0, 1.0, 3.0, 1.0):  # starting the process, the first round, and others
        now[0] += seconds
        found.append(each.round_seconds)
        each.hear()
    assert found == [0.0, 8.0, 1.0, 3.0, 3.0]


def test_a_budget_leaves_time_for_a_round_to_end(table, place, monkeypatch):
    """Ten minutes are no time for rounds of a quarter of an hour: training is told to stop at once, and is saved."""
    monkeypatch.setattr(_Worker, "round_seconds", 900.0)
    state = sweep(plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0]), place, budget=600.0)
    assert state.out_of_time and (state.left, state.cut) == (1, 0)
    assert list(place.work.glob("*/run/checkpoints/*.json"))


def test_a_cell_that_cannot_be_written_fails_alone(table, place):
    (place.root / "paper" / "t1" / "a").mkdir(parents=True)
    (place.root / "paper" / "t1" / "a" / "fedavg").touch()
    state = sweep(plan.jobs(plan.chosen([table], ["fedavg"]), [0]), place)
    assert state.done == 2 and [job.entries[0].id for job, _ in state.failed] == ["a/fedavg"]


LONG = RUN.replace("rounds = 4", "rounds = 60").replace("every = 2", "every = 30")


def command(folder, *options):
    words = [sys.executable, "-m", "bespoke", "sweep", str(folder / "paper/tables/t1.toml"), "--methods", "fedavg"]
    places = ["--results", str(folder / "results"), "--work", str(folder / "work"), "--jobs", "1", "--json", *options]
    return subprocess.Popen([*words, *places], stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_killed_sweep_loses_no_finished_cell_and_counts_no_half_done_one(tmp_path):
    """kill -9 to all its processes once the second training has a checkpoint: then the first cell's result is there."""
    table = spec.read(write(tmp_path, run=LONG))
    running = command(tmp_path)
    for _ in range(1200):
        time.sleep(0.05)
        if list(tmp_path.glob("results/*/*/*/*/*.json")) and list(tmp_path.glob("work/*/run/checkpoints/*.json")):
            break
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    found = list(tmp_path.glob("results/*/*/*/*/*.json"))
    before = {path: path.read_bytes() for path in found}
    assert found and all(results.read(path).content["round"] == 60 for path in found)
    left = plan.unfinished(plan.jobs(plan.chosen([table], ["fedavg"]), [0]), tmp_path / "results")
    assert left
    again = command(tmp_path)
    told = json.loads(again.communicate(timeout=120)[0])
    assert again.returncode == 0 and told["done"] == told["cells"] == 3 and told["before"] == len(before)
    assert {path: path.read_bytes() for path in found} == before
    place = Place(tmp_path / "fresh", tmp_path / "fresh_work")
    for job in left:
        carry_out(job, place)
        for entry in job.entries:
            resumed, straight = (results.of(root, entry)[0] for root in (tmp_path / "results", place.root))
            assert resumed.content["clients"] == straight.content["clients"]


@pytest.mark.slow
def test_two_sweeps_side_by_side_run_no_cell_twice(tmp_path):
    write(tmp_path, run=LONG)
    both = [command(tmp_path, "--seeds", "0", "1") for _ in range(2)]
    told = [json.loads(each.communicate(timeout=180)[0]) for each in both]
    assert [each.returncode for each in both] == [0, 0]
    ran = [each["done"] - each["before"] - each["adopted"] for each in told]
    assert sum(ran) == 6 and len(list((tmp_path / "results").rglob("*.json"))) == 6


def test_the_dead_are_reported_and_replaced(table, place, monkeypatch):
    """A worker that is gone without a word, as after a lack of memory, costs its own cell alone."""
    state, clock = State(), plan.Clock()
    job = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])[0]

    class Dead:
        exitcode = -9

        def join(self, timeout=None):
            pass

        def is_alive(self):
            return False

    class Closed:
        def recv(self):
            raise EOFError

        def close(self):
            pass

    state.running[job.key] = job, 0.0
    assert not _heard(_Worker(Dead(), Closed(), job), state, clock, place.root)
    assert [why for _, why in state.failed] == ["its process was ended by signal 9"]
    assert "signal 9" in of_cell(table, place, "a/fedavg").content["error"]


def test_a_failed_worker_gets_no_other_job(table, place):
    """It may take a while to leave its device."""

    class Slow:
        alive = True

        def join(self, timeout=None):
            pass

        def is_alive(self):
            return self.alive

        def kill(self):
            self.alive = False

    class Pipe:
        def __init__(self, what):
            self.what = what

        def recv(self):
            return self.what, "no memory"

        def close(self):
            pass

    job = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])[0]
    for what, lives in ((worker.FAILED, False), (worker.UNREAD, True)):
        state, process = State(running={job.key: (job, 0.0)}), Slow()
        assert _heard(_Worker(process, Pipe(what), job), state, plan.Clock(), place.root) == lives
        assert process.is_alive() == lives and state.failed == [(job, "no memory")]


class OneJob:
    """A worker's end of a pipe, through which one job comes."""

    def __init__(self, job):
        self.jobs, self.told = [job], []

    def recv(self):
        return self.jobs.pop()

    def send(self, told):
        self.told.append(told)


def as_a_worker(monkeypatch):
    """Let a worker's work go on in this process, and leave its signals and threads as they are."""
    monkeypatch.setattr(worker.signal, "signal", lambda *given: None)
    monkeypatch.setattr(worker.torch, "set_num_threads", lambda number: None)


def test_the_sentence_of_a_failure_does_not_say_where_it_happened(table, place, monkeypatch):
    def odd(experiment, parts, folder, **options):
        raise UserError(f"{folder}/config.toml is odd, as {folder}, {place.work}/starts and {place.root}/a.json are")

    as_a_worker(monkeypatch)
    monkeypatch.setattr(worker, "run_built", odd)
    job = plan.jobs(plan.chosen([table], ["fedavg"], ["b"]), [0])[0]
    with pytest.raises(SystemExit):
        worker.main(OneJob(job), place, threading.Event())
    told = of_cell(table, place, "b/fedavg").content["error"]
    assert told == "config.toml is odd, as the run's folder, starts and a.json are"


@pytest.mark.parametrize("folder", [".", "r", "results"])
def test_only_whole_paths_are_taken_out_of_a_sentence(folder):
    text = "lr = 0.1 is too large. Look at /home/u/results/data/train.npz, ./results2 and r-5."
    assert reading.without(text, Path("/scratch/run"), Path(folder)) == text
    assert (
        reading.without("no room in /scratch/run.", Path("/scratch/run"), Path(folder))
        == "no room in the run's folder."
    )


def test_the_sentence_of_a_result_that_cannot_be_read_does_not_say_where_it_is(table, place, monkeypatch):
    def odd(job, entry, run, *others):
        raise UserError(f"{run.folder.path}/clients.jsonl is odd")

    monkeypatch.setattr(reading, "result", odd)
    job = plan.jobs(plan.chosen([table], ["fedavg"], ["b"]), [0])[0]
    with pytest.raises(worker.Unread):
        carry_out(job, place)
    assert of_cell(table, place, "b/fedavg").content["error"] == "clients.jsonl is odd"


def test_what_runs_out_of_memory_beside_others_goes_on_alone(table, place, monkeypatch):
    """A result may not depend on what others leave; alone, memory that runs out is a failure."""
    halved = []

    def scarce(*args, halve, **options):
        halved.append(halve)
        raise torch.OutOfMemoryError("not enough")

    monkeypatch.setattr(worker, "run_built", scarce)
    as_a_worker(monkeypatch)
    job = plan.jobs(plan.chosen([table], ["fedavg"], ["b"]), [0])[0]
    for processes, what in ((3, worker.CROWDED), (1, worker.FAILED)):
        pipe = OneJob(job)
        with pytest.raises(SystemExit):
            worker.main(pipe, replace(place, processes=processes), threading.Event())
        assert pipe.told[-1][0] == what and halved.pop() == (processes == 1)
        failed = results.of(place.root, table.entry("b/fedavg"))
        assert bool(failed) == (processes == 1)


def test_a_crowded_training_waits_for_the_others(table, place):
    first, second = plan.jobs(plan.chosen([table], ["fedavg"]), [0])

    class Pipe:
        def recv(self):
            return worker.CROWDED, "not enough"

        def close(self):
            pass

    state = State(running={first.key: (first, 0.5)}, waiting=[second])
    process = SimpleNamespace(join=lambda timeout=None: None, is_alive=lambda: False)
    assert not _heard(_Worker(process, Pipe(), first), state, plan.Clock(), place.root)
    assert [job.key for job in state.waiting] == [second.key, first.key] and not state.failed
    assert [job.alone for job in state.waiting] == [False, True]


def test_a_failure_never_takes_the_place_of_a_result(table, place):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    carry_out(job, place)
    entry, before = table.entry("a/fedavg"), of_cell(table, place, "a/fedavg").content
    results.write(place.root, entry, reading.failure(job, entry, "no memory") | {"view": before["view"]})
    assert not of_cell(table, place, "a/fedavg").done
    assert [kept.content for kept in results.tries(place.root, entry, [])] == [before]


def test_a_training_whose_reading_failed_is_kept(tmp_path, place):
    wrong = TABLE.replace('id = "fedper"', 'id = "fedper"\nview = "none"')
    job = plan.job_of(spec.read(write(tmp_path, wrong)).entry("a/fedper"), 0)
    with pytest.raises(worker.Unread, match="no view 'none'"):
        carry_out(job, place)
    right = plan.job_of(spec.read(write(tmp_path)).entry("a/fedper"), 0)
    rounds = []
    assert worker.carry_out(right, place, never, lambda done, _: rounds.append(done)) == worker.DONE
    assert rounds == [0]  # nothing was trained again


def test_a_training_that_fails_in_a_round_is_not_begun_again(table, place):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    rounds = []

    def told(done, _):
        rounds.append(done)
        if done:
            raise UserError("the disk is full")

    for _ in range(2):
        with pytest.raises(UserError, match="disk"):
            worker.carry_out(job, place, never, told)
    assert rounds == [0, 1, 0, 1] and (place.work / job.key / "run").is_dir()


def test_a_folder_that_cannot_be_locked_is_told(table, place):
    (job,) = plan.jobs(plan.chosen([table], ["fedavg"], ["a"]), [0])
    (place.work / job.key / ".bespoke.lock").mkdir(parents=True)
    with pytest.raises(UserError, match="is not the lock of a run"):
        carry_out(job, place)


def test_a_stopped_start_is_no_start(tmp_path, place):
    table = spec.read(write(tmp_path, TABLE.replace('id = "b"', 'id = "b"\nstart = "a/fedavg"')))
    job = plan.job_of(table.entry("b/fedavg"), 0)
    asked = iter([False, False])
    assert carry_out(job, place, lambda: next(asked, True)) == worker.STOPPED
    assert not list(place.work.glob("starts/*.safetensors"))


def test_seconds_are_guessed_from_what_has_run(table, tmp_path):
    found = {job.entries[0].id: job for job in plan.jobs(table.entries, [0])}
    clock = plan.Clock()
    other = plan.jobs(spec.find("pfedvmp/t1").entries[:2], [0])  # of another file: FedAvg and one more
    clock.learn(other[0], 10.0)
    assert clock.guess(found["a/fedavg"]) is None
    clock.learn(found["a/fedavg"], 5.0)
    assert clock.guess(found["a/fedavg"]) == clock.guess(found["b/fedavg"]) == 5.0
    assert clock.guess(found["a/fedper"]) == 5.0  # as the file's others
    longer = spec.read(write(tmp_path, TABLE.replace('"data.alpha=0.1"', '"training.rounds=40"')))
    assert clock.guess(plan.job_of(longer.entry("b/fedavg"), 0)) == pytest.approx(50.0)
    tuned = spec.read(
        write(tmp_path, TABLE.replace('id = "fedper"', 'id = "fedper"\nset = ["algorithm.new_head_epochs=7"]'))
    )
    fedper = plan.job_of(longer.entry("b/fedper"), 0)
    elsewhere = dataclasses.replace(fedper, entries=(dataclasses.replace(fedper.entries[0], table="paper2/t1"),))
    clock.learn(dataclasses.replace(elsewhere, experiment=found["a/fedavg"].experiment), 2.0)
    clock.learn(dataclasses.replace(elsewhere, experiment=found["a/fedper"].experiment), 6.0)
    assert clock.guess(found["a/fedper"]) == pytest.approx(5.0 * 6.0 / 4.0)  # dearer than its file's others there
    dear = plan.job_of(tuned.entry("a/fedper"), 0)
    clock.learn(dear, 90.0)
    assert clock.guess(found["a/fedper"]) == clock.guess(dear) == 90.0  # the method's only one here
    clock.learn(found["a/fedper"], 5.0)
    assert (clock.guess(found["a/fedper"]), clock.guess(dear)) == (5.0, 90.0)  # settings of its own tell more


@pytest.mark.parametrize(
    ("running", "waiting", "alone", "processes", "seconds"),
    [
        ([], [], [], 2, 0.0),
        ([(100.0, 0.25)], [], [], 2, 75.0),  # a long one that is left alone
        ([(100.0, 0.5), (10.0, 0.5)], [30.0, 20.0], [], 2, 55.0),  # 50 on one, 5 + 30 + 20 on the other
        ([(8.0, 0.0)], [], [7.0, 5.0], 4, 20.0),  # after all others
        ([(8.0, 0.0)], [None], [], 1, 16.0),  # as long as those that are known
        ([], [None], [], 1, None),
    ],
)
def test_what_is_left_takes_as_long_as_the_last_process(running, waiting, alone, processes, seconds):
    told, state = {}, State()

    def job(guess, alone=False):
        key = str(len(told))
        told[key] = guess
        return SimpleNamespace(key=key, alone=alone)

    state.running = {each.key: (each, share) for each, share in ((job(guess), share) for guess, share in running)}
    state.waiting = [*map(job, waiting), *(job(guess, alone=True) for guess in alone)]
    clock = SimpleNamespace(guess=lambda job: told[job.key])
    assert _seconds_left(state, clock, processes) == seconds


def test_seconds_of_another_device_tell_nothing(table, place):
    job = plan.job_of(table.entry("a/fedavg"), 0)
    carry_out(job, place)
    there = [*results.everything(place.root)]
    assert plan.Clock(there).guess(job) == there[0].content["seconds"]
    assert plan.Clock(there, cpu=False).guess(job) is None


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["--precision", "fp8"], "there is no precision 'fp8': use one of fp32, tf32, bf16"),
        (["--backend", "fast"], "there is no backend 'fast': use one of batched, loop or auto"),
        (["--budget", "nan"], "--budget takes seconds, not nan"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_run(option, sentence, tmp_path):
    path = write(tmp_path)
    assert small_runs.command("sweep", path, "--results", tmp_path / "results", *option).sentence == sentence
    assert not (tmp_path / "results").exists()


def test_nothing_to_run_is_said(tmp_path):
    write(tmp_path)
    shutil.rmtree(tmp_path / "results", ignore_errors=True)
    words = ["sweep", str(tmp_path / "paper/tables/t1.toml"), "--dry", "--results", str(tmp_path / "none")]
    done = subprocess.run([sys.executable, "-m", "bespoke", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.endswith("4 trainings for 5 cells\n"), done.stderr
    assert not (tmp_path / "none").exists() and not Path(tmp_path / "runs").exists()


def test_every_table_is_swept_with_its_own_seed(tmp_path):
    with_seed = TABLE.replace('title = "Accuracy"', 'title = "Accuracy"\nseed = 10')
    tables = [write(tmp_path / "one"), write(tmp_path / "other", with_seed)]

    def planned(*options):
        done = small_runs.command("sweep", *tables, "--dry", "--results", tmp_path / "none", *options)
        return {int(line.partition(", seed ")[2].partition(":")[0]) for line in done.out.splitlines() if "seed" in line}

    assert planned() == {0, 10} and planned("--seeds", "3") == {3}


def test_a_cell_may_start_from_the_model_of_another(tmp_path, place):
    changed = TABLE.replace('id = "b"', 'id = "b"\nstart = "a/fedavg"')
    table = spec.read(write(tmp_path, changed))
    job = plan.job_of(table.entry("b/fedavg"), 0)
    assert carry_out(job, place) == worker.DONE
    first = api.run(plan.job_of(table.entry("a/fedavg"), 0).experiment)
    first.save_start(tmp_path / "start.safetensors")
    own = plan.experiment_of(table.entry("b/fedavg"), 0)[0]
    straight = api.run(replace(own, model=replace(own.model, start=str(tmp_path / "start.safetensors"))))
    found = of_cell(table, place, "b/fedavg")
    assert found.aggregates("loss").pooled == pytest.approx(straight.metric("loss"), rel=1e-5)
    assert found.aggregates("loss").pooled != pytest.approx(api.run(own).metric("loss"), rel=1e-5)
    assert found.content["settings"]["model"]["start"] == job.experiment.model.start
    assert not plan.unfinished([job], place.root)
    with pytest.raises(UserError, match="cell b: start"):
        spec.read(write(tmp_path, changed.replace("a/fedavg", "b/fedavg")))
