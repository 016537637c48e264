"""Trainings side by side: how many, and NVIDIA's service for them, here a script of its control program's name."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import command
from small_tables import write

from bespoke.tables import mps, plan, spec
from bespoke.tables import sweep as sweeping
from bespoke.tables.worker import Place

# It notes what it was told and where; told a word, it fails unless it was started in the same folder.
FAKE = """#!/bin/sh
word=$([ "$1" = -d ] && echo start || cat)
echo "$word $CUDA_MPS_PIPE_DIRECTORY $CUDA_VISIBLE_DEVICES" >> {log}
[ "$1" = -d ] && touch "$CUDA_MPS_PIPE_DIRECTORY/started" && exit {code}
[ -e "$CUDA_MPS_PIPE_DIRECTORY/started" ]
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Install a control program that starts with an exit code; its ``told()`` returns the words and folders."""
    log, folder = tmp_path / "log", tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(mps, "_TRIAL", "")

    def install(code=0):
        (folder / mps.CONTROL).write_text(FAKE.format(log=log, code=code))
        (folder / mps.CONTROL).chmod(0o755)

    def told():
        return [line.split(" ") for line in log.read_text().splitlines()] if log.exists() else []

    return SimpleNamespace(install=install, told=told, log=log)


def words(control):
    return [word for word, *_ in control.told()]


def test_a_service_of_our_own_has_a_folder_of_its_own_and_ends(control):
    control.install()
    with mps.service() as shared:
        assert shared.words == "with NVIDIA's MPS"
        pipe, log = map(Path, shared.environment.values())
        assert list(shared.environment) == ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"]
        assert pipe.is_dir() and log.is_dir() and pipe != log
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
        assert words(control) == ["get_server_list", "start"]
    assert control.told() == [["get_server_list", "", "3"], ["start", str(pipe), ""], ["quit", str(pipe), "3"]]
    assert not pipe.parent.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_it_ends_on_errors_too(control, error):
    control.install()
    with pytest.raises(error), mps.service():
        raise error
    assert words(control) == ["get_server_list", "start", "quit"]


def test_one_that_does_not_start_is_done_without(control):
    control.install(code=1)
    with mps.service() as shared:
        assert shared.words.startswith("without NVIDIA's MPS, under which") and not shared.environment
        assert words(control) == ["get_server_list", "start", "quit"]  # whatever had begun is over by now


def test_a_failed_trial_is_done_without(control, monkeypatch):
    control.install()
    monkeypatch.setattr(
        mps, "_TRIAL", "import os; raise SystemExit(os.path.isdir(os.environ['CUDA_MPS_PIPE_DIRECTORY']))"
    )
    with mps.service() as shared:
        assert shared.words.startswith("without NVIDIA's MPS, under which") and not shared.environment
        assert words(control)[-1] == "quit"
    assert words(control).count("quit") == 1


def test_one_that_runs_is_used_and_left_alone(control, tmp_path, monkeypatch):
    control.install()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "started").touch()
    with mps.service() as shared:
        assert shared == ("with the NVIDIA MPS that runs here", {})
    assert words(control) == ["get_server_list"]


def test_where_it_is_not_installed_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with mps.service() as shared:
        assert shared == ("without NVIDIA's MPS, which is not installed here", {})


# --- in a sweep -----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A sweep that takes the device for a GPU, while its workers compute on the CPU."""
    monkeypatch.setattr(sweeping, "pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(sweeping, "needed", lambda jobs, root, device: plan.needed(jobs, root, torch.device("cpu")))


@pytest.fixture
def jobs(tmp_path):
    return plan.jobs(spec.read(write(tmp_path)).entries, [0])


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "results", tmp_path / "work", device="cpu")


def test_a_sweep_starts_it_for_its_workers_alone(control, on_a_gpu, jobs, place, monkeypatch):
    control.install()
    seen = []
    monkeypatch.setattr(sweeping, "_work", lambda state, place, *_, alone: seen.append((alone, place, words(control))))
    assert sweeping.sweep(jobs, place, processes=2).how == "2 trainings side by side, with NVIDIA's MPS"
    (shared, own, before), (apart, without, after) = seen
    assert (
        (shared, apart) == (False, True)
        and own.processes == 2
        and own.environment["CUDA_MPS_PIPE_DIRECTORY"] == control.told()[1][1]
    )
    assert before == ["get_server_list", "start"] and words(control) == [*before, "quit"]
    # What runs alone, since its time is read, runs without.
    assert after[-1] == "quit" and (without.processes, without.environment) == (1, {})
    control.log.unlink()
    assert sweeping.sweep([], place, processes=2).how == "" and words(control) == []  # nothing is left to run


def test_an_interrupted_sweep_leaves_no_service(control, on_a_gpu, jobs, place, monkeypatch):
    control.install()

    def work(*_, alone):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeping, "_work", work)
    with pytest.raises(KeyboardInterrupt):
        sweeping.sweep(jobs, place, processes=2)
    assert words(control) == ["get_server_list", "start", "quit"]


def test_a_worker_takes_the_environment_of_its_place(tmp_path, monkeypatch):
    """Its pipe is closed before any job comes."""
    from bespoke.tables import worker

    class Closed:
        def recv(self):
            raise EOFError

    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "other")
    worker.main(Closed(), Place(tmp_path, tmp_path, environment={"CUDA_MPS_PIPE_DIRECTORY": "mine"}), None)
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "mine"


def test_one_training_needs_no_service(control, on_a_gpu, jobs, place, monkeypatch):
    control.install()
    monkeypatch.setattr(sweeping, "_work", lambda *_, alone: None)
    assert sweeping.sweep(jobs, place, processes=1).how == "" and words(control) == []


def test_the_command_says_once_what_runs_side_by_side(control, tmp_path, monkeypatch):
    """On the CPU, which needs no service."""
    control.install()

    def work(state, place, clock, deadline, stopped, show, alone):
        for _ in range(2):
            show(state)
        state.waiting.clear()

    monkeypatch.setattr(sweeping, "_work", work)
    monkeypatch.setattr(sweeping, "cores", lambda: 3)
    table = write(tmp_path)
    for jobs, number in (("auto", 3), ("2", 2)):
        done = command(
            "sweep", table, "--jobs", jobs, "--device", "cpu", "--results", tmp_path / "r", "--work", tmp_path
        )
        assert done.code == 0 and done.err.splitlines().count(f"{number} trainings side by side") == 1
    assert words(control) == []
    assert command("sweep", table, "--jobs", "0").sentence == "--jobs takes auto or a number from 1 to 256, not '0'"


@pytest.mark.parametrize(
    ("device", "trainings", "cores", "memory", "expected"),
    [
        ("cuda", 100, 64, 140e9, sweeping._ON_ONE_GPU),
        ("cuda", 2, 64, 140e9, 2),
        ("cuda", 100, 2 * sweeping._CORES_EACH, 140e9, 2),
        ("cuda", 100, 1, 140e9, 1),
        ("cuda", 100, 64, 2.5 * sweeping._GPU_MEMORY, 2),
        ("cpu", 100, 7, 1e12, 7),
        ("cpu", 3, 7, 1e12, 3),
        ("cpu", 100, 7, 2.5 * sweeping._CPU_MEMORY, 2),
        ("cpu", 0, 7, 0.0, 1),
    ],
)
def test_as_many_as_cores_and_memory_carry(device, trainings, cores, memory, expected, monkeypatch):
    monkeypatch.setattr(sweeping, "cores", lambda: cores)
    monkeypatch.setattr(sweeping.memory, "free", lambda: memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
    assert sweeping.side_by_side(torch.device(device), trainings) == expected
