"""One run over several processes of this machine: the same bits, one voice, one writer, and no process left over."""

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import final

import pytest
import torch
from small_runs import arrays, assert_same_result, command, experiment, federated, write

import bespoke
from bespoke.clients import SequentialClients, processes
from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.errors import UserError
from bespoke.runs import api, spreading

COMMON = {
    "data": {"validation": 0.2, "clients": 9, "new_clients": 2, "rows": 300},
    "model": {"name": "mlp", "hidden": 6},
    "evaluation": {"every": 2},
    "rate": 0.6,
}


@final
@dataclass(frozen=True)
class Failing(Algorithm):
    """FedAvg, but for what happens to client 3, who is at home in the second process."""

    how: str = "raises"

    def client_init(self, task, params, client):
        return {"id": client}

    def client_update(self, local, state, down):
        if int(state["id"]) == 3 and processes.world() > 1:
            if self.how == "raises":
                raise ArithmeticError("client 3 cannot count")
            if self.how == "refuses":
                raise UserError("client 3 has no rows: give it some")
            os.kill(os.getpid(), signal.SIGKILL)
        return state, {"model": local.sgd(local.task.loss, down["model"])}

    def personalize(self, local, state, down):
        return down["model"]


def children():
    """The processes that this one has started and that are not gone."""
    tasks = Path("/proc/self/task").glob("*/children")
    return sorted(pid for task in tasks for pid in task.read_text().split())


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = children()  # of other tests, such as multiprocessing's
    yield
    assert children() == before and processes.world() == 1


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "pfedfda"])
def test_two_processes_give_the_bits_of_one(method, tmp_path, capfd):
    made = experiment(method, rounds=4, momentum=0.5, keep_optimizer=True, **COMMON)
    called = []
    one = bespoke.run(made, tmp_path / "one", device="cpu")
    two = bespoke.run(made, tmp_path / "two", device="cpu", processes=2, callbacks=[lambda e: called.append(e.round)])
    assert_same_result(tmp_path / "one", tmp_path / "two")
    assert called == [1, 2, 3, 4] and two.folder.read_json("environment.json")["world_size"] == 2
    assert one.models.keys() == two.models.keys()
    for name, model in one.models.items():
        assert all(map(torch.equal, tree.leaves(model.personal), tree.leaves(two.models[name].personal)))
    assert isinstance(two.federation.clients, SequentialClients)
    assert capfd.readouterr() == ("", "")


def test_a_run_may_go_on_with_more_processes_or_fewer(tmp_path):
    made, asked = experiment("fedrep", rounds=4, **COMMON), iter([False, True])
    bespoke.run(made, tmp_path / "one", device="cpu")
    bespoke.run(made, tmp_path / "cut", device="cpu", processes=3, stop=lambda: next(asked, True))
    done = bespoke.run(made, tmp_path / "cut", device="cpu", processes=2, resume=True)
    assert_same_result(tmp_path / "one", tmp_path / "cut")
    assert done.last_round == 4 and done.save_models().is_dir()


def test_own_data_and_models_need_no_folder():
    one, two = (federated(arrays(clients=5), algorithm="fedrep", rounds=3, device="cpu", processes=n) for n in (1, 2))
    assert one.accuracy == two.accuracy and one.models.keys() == two.models.keys()


@pytest.mark.parametrize(
    ("how", "kind", "sentence"),
    [
        ("raises", RuntimeError, "(?s)ArithmeticError: client 3 cannot count.*client 3 .*round 1"),
        ("refuses", UserError, "client 3 has no rows: give it some"),
        ("dies", UserError, "lost another process of this run, which ended without a message"),
    ],
)
def test_what_goes_wrong_in_another_process_is_raised_here(how, kind, sentence, tmp_path):
    made, threads = experiment(Failing(how), **(COMMON | {"rate": 1.0})), torch.get_num_threads()
    with pytest.raises(kind, match=sentence):
        bespoke.run(made, tmp_path / "run", device="cpu", processes=2)
    assert torch.get_num_threads() == threads
    bespoke.run(made, tmp_path / "run", device="cpu")  # the folder is free


def test_a_process_that_never_begins_is_not_waited_for(monkeypatch):
    parent = os.getpid()
    monkeypatch.setattr(processes, "_as_fork", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match="ended before it began"):
        processes.together(2, lambda: pytest.fail("begun alone"))
    assert os.getpid() == parent


def test_a_process_that_ends_before_all_have_met_is_not_waited_for_for_long(monkeypatch):
    meet = processes._meet

    def killed(place, turn, number):
        if turn:
            os.kill(os.getpid(), signal.SIGKILL)
        meet(place, turn, number)

    monkeypatch.setattr(processes, "_meet", killed)
    monkeypatch.setattr(processes, "_MEETING", timedelta(seconds=1))
    with pytest.raises(UserError, match="ended before it began"):
        processes.together(2, lambda: pytest.fail("begun alone"))
    assert processes.world() == 1


def test_where_ends_of_processes_are_not_waited_for_all_is_tidied_up():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert processes.together(3, lambda: processes.world()) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_signal_at_the_moment_of_a_fork_stays_with_this_process(monkeypatch, tmp_path):
    """The fork is gone before the place where they meet is removed: if it still wrote there, that would fail."""
    fork, wait, there = os.fork, os.waitpid, []

    def interrupted():
        pid = fork()
        os.kill(os.getpid(), signal.SIGINT)
        return pid

    def waited(*given):
        there.append(any(tmp_path.iterdir()))
        return wait(*given)

    monkeypatch.setattr(os, "fork", interrupted)
    monkeypatch.setattr(os, "waitpid", waited)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        processes.together(2, lambda: None)
    assert there == [True] and not any(tmp_path.iterdir())


def test_a_long_error_of_another_process_arrives_cut():
    def work():
        if processes.rank():
            raise ValueError("é" * 30_000)
        processes.wait()

    with pytest.raises(RuntimeError, match=r"^é{1000}"):
        processes.together(2, work)


def test_forks_print_nothing_wherever_words_go(capsys):
    print("before")
    processes.together(2, lambda: print(processes.rank()))
    assert capsys.readouterr().out == "before\n0\n"


def test_no_place_to_meet_is_told_in_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(UserError, match="cannot start 2 processes: No such file or directory; use --processes 1"):
        processes.together(2, lambda: None)


def test_more_processes_than_clients_change_nothing(tmp_path):
    made = experiment(data={"clients": 3}, rounds=2)
    for number in (1, 5):
        bespoke.run(made, tmp_path / str(number), device="cpu", processes=number)
    assert_same_result(tmp_path / "1", tmp_path / "5")


def test_an_error_of_this_process_ends_the_others(tmp_path):
    def broken(event):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bespoke.run(experiment(**COMMON), tmp_path / "run", device="cpu", processes=3, callbacks=[broken])


def test_a_missing_file_in_the_run_is_no_failure_to_start(tmp_path):
    def broken(event):
        (tmp_path / "none").read_text()

    with pytest.raises(FileNotFoundError, match="none"):
        bespoke.run(experiment(**COMMON), tmp_path / "run", device="cpu", processes=2, callbacks=[broken])


ORPHANS = """
import os, signal, sys, time
from bespoke.clients import processes

def never(place, turn, number):  # a fork waits at the meeting, and nobody comes
    if turn:
        print(os.getpid(), file=open(sys.argv[1], "a"), flush=True)
        time.sleep(60)
    while len(open(sys.argv[1]).readlines()) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

processes._meet = never
processes.together(3, lambda: None)
"""


def test_a_killed_parent_leaves_no_fork(tmp_path):
    (tmp_path / "pids").touch()
    done = subprocess.run([sys.executable, "-c", ORPHANS, tmp_path / "pids"], capture_output=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    forks = [Path("/proc") / line for line in (tmp_path / "pids").read_text().split()]
    end = time.monotonic() + 20
    while any(fork.exists() and "(zombie)" not in (fork / "status").read_text() for fork in forks):
        assert time.monotonic() < end, "a fork outlives its parent"
        time.sleep(0.05)
    assert len(forks) == 2


@pytest.mark.parametrize("number", [0, 1025, 10**6, 2.0, True, "2"])
def test_absurd_numbers_of_processes_are_refused(number):
    with pytest.raises(UserError, match=r"run\(processes=...\) takes a number from 1 to 1024, or auto, not"):
        bespoke.run(experiment(), device="cpu", processes=number)


# --- how many -------------------------------------------------------------------------------------------------------


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.fixture
def how(monkeypatch, four_cores):
    """How a run is carried out whose clients take so many seconds, one after another and in blocks."""

    def chosen(alone, block=10.0, backend="auto", **training):
        def seconds(federation, count):
            return block if federation.clients.name == "batched" else alone

        monkeypatch.setattr(spreading, "_client_seconds", seconds)
        made = experiment(**(COMMON | {"data": {"clients": 20, "rows": 400}, "rounds": 20, "rate": 1.0} | training))
        parts = api.built(made, "cpu", "auto")
        make = functools.partial(api.assemble, made, parts, states="device")
        options = {"processes": "auto", "backend": backend, "resume": False}
        return spreading.choose(options, None, parts.task.device, make)[:2]

    return chosen


def test_auto_takes_all_cores_where_that_pays(how):
    assert how(1.0) == ("auto", 4)
    assert how(1.0, rate=0.1) == ("auto", 2)  # no more than a round has clients
    assert how(0.02) == ("auto", 1)  # the exchange would cost as much as it saves
    assert how(1.0, rounds=1) == ("auto", 4) and how(0.1, rounds=1) == ("auto", 1)  # over before they have started


def test_auto_takes_blocks_where_clients_are_small_and_blocks_are_much_faster(how):
    long = {"rounds": 200}
    assert how(0.02, 0.005, **long) == ("batched", 1)
    assert how(0.02, 0.011, **long) == ("auto", 1)  # not twice as fast
    assert how(0.04, 0.011, **long) == ("auto", 4)  # four processes are faster than blocks, with the bits of one
    assert how(0.04, 0.009, **long) == ("batched", 1)
    assert how(0.02, 0.005, rounds=10) == ("auto", 1)  # too short to pay
    assert how(0.02, 0.005, rate=0.5, **long) == ("auto", 1)  # too few clients for a block
    assert how(0.02, 0.0, **long) == ("auto", 1)  # the method fails in blocks
    assert how(0.02, 0.005, backend="loop", **long) == ("loop", 1)  # as was asked for


def test_auto_keeps_one_process_where_several_cannot_start(how, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert how(1.0) == ("auto", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert how(1.0, backend="batched") == ("batched", 1)  # other bits
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert how(1.0) == ("auto", 1)
    with pytest.raises(UserError, match=r"--processes 2 .*cannot start where torch sees a GPU"):
        bespoke.run(experiment(), device="cpu", processes=2)


def test_notes_say_what_was_chosen_and_a_run_goes_on_as_it_began(monkeypatch, four_cores, tmp_path):
    made = experiment(**(COMMON | {"data": {"clients": 20, "rows": 400}, "rounds": 6, "rate": 1.0}))
    monkeypatch.setattr(spreading, "_client_seconds", lambda federation, count: 1.0)
    done = bespoke.run(made, tmp_path / "run", device="cpu", processes="auto")
    assert [note for note in done.notes if "spread over 4 processes of one thread each" in note]
    told = done.folder.read_json("environment.json")
    assert told["notes"] == done.notes and (told["backend"], told["world_size"]) == ("loop", 4)

    monkeypatch.setattr(spreading, "_RUN", 0.0)
    monkeypatch.setattr(spreading, "_client_seconds", lambda federation, count: 0.01 / count)
    asked = iter([False, True])
    done = bespoke.run(made, tmp_path / "blocks", device="cpu", processes="auto", stop=lambda: next(asked, True))
    assert [note for note in done.notes if "16.0 times faster in blocks" in note]
    monkeypatch.setattr(spreading, "_client_seconds", lambda federation, count: 1.0)
    for number in ("auto", 1):
        shutil.copytree(tmp_path / "blocks", tmp_path / f"blocks {number}")
        done = bespoke.run(made, tmp_path / f"blocks {number}", device="cpu", processes=number, resume=True)
        assert done.folder.read_json("environment.json")["backend"] == "batched"
        assert [note for note in done.notes if "began with clients in blocks and goes on so" in note]
    bespoke.run(made, tmp_path / "loop", device="cpu", backend="loop", stop=lambda: True)
    monkeypatch.setattr(spreading, "_client_seconds", lambda federation, count: 0.01 / count)
    done = bespoke.run(made, tmp_path / "loop", device="cpu", processes="auto", resume=True)
    assert done.folder.read_json("environment.json")["backend"] == "loop"


def test_the_seconds_of_a_client_are_measured_and_change_nothing():
    for backend, count in (("loop", 1), ("batched", 4)):
        found = spreading._client_seconds(made := _federation("fedavg", backend), count)
        assert 0.0 < found < 10.0 and not made.clients.states()
    assert spreading._client_seconds(_federation(Broken(), "loop"), 1) == 0.0  # the run itself will tell


@pytest.mark.parametrize(
    ("times", "least"),
    [([3.0, 0.2, 0.3], 0.2), ([0.2, 0.3, 0.1], 0.1), ([4.0, 2.0], 2.0), ([6.0], 6.0)],
    ids=["a cold start", "a busy machine", "large clients", "very large clients"],
)
def test_the_least_of_some_times_counts(times, least, monkeypatch):
    clock = itertools.accumulate([0.0, *(part for seconds in times for part in (seconds, 7.0))])
    monkeypatch.setattr(spreading.time, "process_time", lambda: next(clock))
    assert spreading._client_seconds(_federation("fedavg", "loop"), 1) == pytest.approx(least)
    assert len(list(clock)) == 1  # it was not asked more often


@final
@dataclass(frozen=True)
class Broken(Algorithm):
    """Cannot train."""

    def client_update(self, local, state, down):
        raise ArithmeticError

    def personalize(self, local, state, down):
        return down["model"]


def _federation(method, backend):
    made = experiment(method, **COMMON)
    return api.assemble(made, api.built(made, "cpu", "auto"), backend, "device")


def test_the_command_takes_a_number_or_auto(tmp_path):
    path = write(tmp_path / "x.toml")
    said = command("run", path, "--out", tmp_path / "a", "--processes", "two").sentence
    assert said == "--processes takes auto or a number from 1 to 1024, not 'two'"
    assert command("run", path, "--out", tmp_path / "b", "--processes", "2", "--quiet").code == 0
    assert command("run", path, "--out", tmp_path / "c", "--quiet").code == 0
    assert_same_result(tmp_path / "b", tmp_path / "c")
