"""A run's folder: one writer, only in an empty folder or its own, and nothing of anybody else is touched."""

import errno
import fcntl
import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import assert_same_result, command, experiment, write

import bespoke
from bespoke.clients import processes
from bespoke.errors import UserError
from bespoke.files import temporary_of, write_atomic
from bespoke.runs import execution
from bespoke.runs.lock import LOCK, FolderLock
from bespoke.runs.results import file_names

RACES = Path(__file__).parents[2] / "benchmarks" / "races.py"


def everything(folder):
    """The bytes of every file below a folder but the lock."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != LOCK}


# --- one writer ---------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_told_who_is_there(tmp_path):
    held = FolderLock(tmp_path)
    with pytest.raises(UserError) as caught:
        bespoke.run(experiment(), tmp_path)
    assert str(caught.value).startswith(f"{tmp_path} is in use by another process (host {socket.gethostname()}, pid ")
    assert f"pid {os.getpid()})" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [LOCK]
    held.close()
    bespoke.run(experiment(), tmp_path)


def test_the_folder_is_held_during_a_run_and_not_by_its_result(tmp_path):
    refused = []

    def second(event):
        with pytest.raises(UserError, match="is in use by another process"):
            bespoke.run(experiment(), tmp_path, resume=True)
        refused.append(event.round)

    run = bespoke.run(experiment(), tmp_path, callbacks=[second])
    assert refused == [1, 2, 3]
    FolderLock(tmp_path).close()
    held = FolderLock(tmp_path)
    with pytest.raises(UserError, match="is in use by another process"):
        run.save_models()
    held.close()
    run.save_models()


def test_a_run_that_fails_lets_go(tmp_path):
    def fail(event):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bespoke.run(experiment(), tmp_path / "run", callbacks=[fail])
    bespoke.run(experiment(), tmp_path / "run", resume=True)
    bespoke.run(experiment(), tmp_path / "whole")
    assert_same_result(tmp_path / "run", tmp_path / "whole")


def test_processes_of_one_run_share_the_lock_and_keep_others_out(tmp_path):
    first = FolderLock(tmp_path)
    with pytest.raises(UserError, match="in use"):
        FolderLock(tmp_path, join=True)
    first.share()
    second = FolderLock(tmp_path, join=True)
    first.close()
    with pytest.raises(UserError, match="in use"):
        FolderLock(tmp_path)
    second.close()
    FolderLock(tmp_path).close()


def test_a_program_started_meanwhile_does_not_inherit_the_lock(tmp_path):
    held = FolderLock(tmp_path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as other:
        held._closed = True
        for descriptor in (held._descriptor, held._folder):  # without unlocking, as when the process is killed
            os.close(descriptor)
        try:
            FolderLock(tmp_path).close()
        finally:
            other.kill()


def test_a_holder_that_signs_a_moment_later_is_named(tmp_path):
    lock = FolderLock(tmp_path)
    (tmp_path / LOCK).write_text("")
    timer = threading.Timer(0.05, lock._sign)
    timer.start()
    with pytest.raises(UserError, match=f"pid {os.getpid()}"):
        FolderLock(tmp_path)
    timer.join()
    lock.close()


def test_removing_the_lock_file_does_not_let_a_second_run_in(tmp_path):
    held = FolderLock(tmp_path)
    (tmp_path / LOCK).unlink()
    with pytest.raises(UserError, match="is in use by another process"):
        FolderLock(tmp_path)
    held.close()
    FolderLock(tmp_path).close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_where_there_are_no_locks_a_note_says_so(number, tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    run = bespoke.run(experiment(), tmp_path)
    assert run.notes == [f"{tmp_path} cannot be locked here: start no second run in it while this one goes on"]
    assert json.loads((tmp_path / "environment.json").read_text())["notes"] == run.notes


@pytest.mark.parametrize("what", ["text", "link", "folder", "pipe"])
def test_a_lock_file_of_somebody_else_is_refused(what, tmp_path):
    lock, target = tmp_path / "run" / LOCK, tmp_path / "target"
    lock.parent.mkdir()
    {
        "text": lambda: lock.write_text("mine"),
        "link": lambda: lock.symlink_to(target),
        "folder": lock.mkdir,
        "pipe": lambda: os.mkfifo(lock),
    }[what]()
    with pytest.raises(UserError, match=r"\.bespoke\.lock is not the lock of a run: move it away"):
        bespoke.run(experiment(), lock.parent)
    assert not target.exists() and (what != "text" or lock.read_text() == "mine")


def races(count, rounds):
    command = [sys.executable, str(RACES), str(count), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    return [json.loads(line) for line in done.stdout.splitlines()], done


def test_of_two_processes_one_wins_and_the_run_is_intact(tmp_path):
    found, done = races(2, rounds=4)
    assert len(found) == 2 and not [line for line in found if line["problem"]], done
    assert done.returncode == 0


@pytest.mark.slow
def test_twenty_four_races_are_won_by_one(tmp_path):
    found, done = races(24, rounds=20)
    assert len(found) == 24 and not [line for line in found if line["problem"]], done


def test_processes_whose_launcher_is_gone_stop_with_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_launcher", os.getppid())

    def gone(event):
        if event.round == 2:
            monkeypatch.setattr(processes, "_launcher", os.getppid() + 1)

    with pytest.raises(UserError, match=r"has ended, so they stopped after round 3, with all saved: .*--resume"):
        bespoke.run(experiment(rounds=6), tmp_path / "run", callbacks=[gone])
    monkeypatch.setattr(processes, "_launcher", None)
    bespoke.run(experiment(rounds=6), tmp_path / "run", resume=True)
    bespoke.run(experiment(rounds=6), tmp_path / "whole")
    assert_same_result(tmp_path / "run", tmp_path / "whole")


# --- an empty folder, or its own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", ".hidden", ".probe.tmp", "summary.txt", "models/a.safetensors"])
def test_a_folder_with_anything_in_it_is_refused_and_left_alone(name, resume, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError) as caught:
        bespoke.run(experiment(), tmp_path, resume=resume)
    assert re.search(rf"is not empty \(it holds '{name.split('/')[0]}'\): empty it, or .*--out", str(caught.value))
    assert everything(tmp_path) == {Path(name): b"mine"} and not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", ["rounds.jsonl", "summary.json", "checkpoints"])
def test_records_without_their_experiment_are_refused(left, resume, tmp_path):
    bespoke.run(experiment(), tmp_path / "run")
    for path in (tmp_path / "run").iterdir():
        if path.name != left and path.is_file():
            path.unlink()
    if left != "checkpoints":
        (tmp_path / "run" / "checkpoints").rename(tmp_path / "away")
    before = everything(tmp_path)
    with pytest.raises(UserError, match=r"holds records but no config.toml: restore it, or choose another folder"):
        bespoke.run(experiment(), tmp_path / "run", resume=resume)
    assert everything(tmp_path) == before


def test_a_run_that_fails_before_its_first_write_blocks_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("bespoke.runs.execution.environment_of", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bespoke.run(experiment(), tmp_path)
    (tmp_path / ".config.toml.0123456789abcdef.tmp").write_text("cut sh")  # by a kill, before the folder held a run
    bespoke.run(experiment(), tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_run_that_fails_before_its_first_round_blocks_nothing(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("bespoke.runs.federation.Federation.cohort", lambda self, round: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bespoke.run(experiment(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [LOCK]
    assert bespoke.run(experiment(), tmp_path).summary["rounds"] == 3


def test_files_of_others_are_left_alone_when_a_run_goes_on(tmp_path):
    bespoke.run(experiment("ditto", rounds=4), tmp_path / "run", checkpoint_every=1)
    foreign = [
        *("notes.txt", ".rounds.jsonl.tmp", ".mine.0123456789abcdef.tmp", "checkpoints/package.json"),
        *("checkpoints/states-abc.safetensors", "checkpoints/states-000900.safetensors", "checkpoints/0.json"),
        *("checkpoints/000099.safetensors", "checkpoints/best.safetensors", "checkpoints/000098.json"),
    ]
    for name in foreign:
        (tmp_path / "run" / name).write_text("mine")
    (tmp_path / "run" / "checkpoints" / ".000004.json.0123456789abcdef.tmp").write_text("left by a kill")
    run = bespoke.run(experiment("ditto", rounds=8), tmp_path / "run", resume=True, checkpoint_every=1)
    assert [note for note in run.notes if "000098.json is damaged" in note]
    assert {name: (tmp_path / "run" / name).read_text() for name in foreign} == dict.fromkeys(foreign, "mine")
    assert not list((tmp_path / "run" / "checkpoints").glob(".0*.tmp"))
    own = {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()} - {Path(name).name for name in foreign}
    assert {name for name in own if name[0] == "0"} == {
        f"00000{i}.{end}" for i in (7, 8) for end in ("json", "safetensors")
    }


# --- temporary files ----------------------------------------------------------------------------------------------


def test_a_temporary_name_cannot_be_foretold_and_follows_no_link(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".a.tmp").symlink_to(victim)
    (tmp_path / ".a.00.tmp").symlink_to(victim)
    write_atomic(tmp_path / "a", "new")
    monkeypatch.setattr("secrets.token_hex", lambda n: "00")
    with pytest.raises(UserError, match="File exists"):
        write_atomic(tmp_path / "a", "newer")
    assert (victim.read_text(), (tmp_path / "a").read_text()) == ("mine", "new")
    assert (tmp_path / ".a.00.tmp").is_symlink()


def test_a_file_has_the_mode_of_any_other_and_the_longest_name_fits(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / ("é" * 127), "")
    finally:
        os.umask(before)
    (made,) = tmp_path.iterdir()
    assert stat.S_IMODE(made.stat().st_mode) == 0o640
    assert temporary_of(f".x.{'0f' * 8}.tmp") == "x" and temporary_of(".x.tmp") is None


def test_only_a_run_s_files_speak_of_resuming(tmp_path):
    bespoke.run(experiment(), tmp_path / "run")
    (tmp_path / "x.png").mkdir()
    sentence = command("compare", tmp_path / "run", "--chart", tmp_path / "x.png").sentence
    assert "x.png: Is a directory; fix the problem" in sentence and "resume" not in sentence


# --- models -------------------------------------------------------------------------------------------------------


def test_every_client_has_a_file_name_that_every_system_takes():
    odd = [
        "..",
        ".",
        "",
        "CON",
        "con.txt",
        "a/b",
        "a%2Fb",
        "a" * 300,
        "a" * 301,
        "é" * 200,
        "\ud800",
        "x\n",
        "com1",
        "~",
    ]
    same = ["hospital", "Hospital", "HOSPITAL", "hospital~", "%7E", "é", "É"]
    names = file_names([*odd, *same])
    assert len({name.lower() for name in names}) == len(odd) + len(same)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9 _\-%~][A-Za-z0-9 _.\-%~]*", name) and len(name) <= 200
        assert name.lower().partition(".")[0] not in ("con", "com1", "")
    assert file_names(["client 1", "a/b", "Ward_3.v2"]) == ["client 1", "a%2Fb", "Ward_3.v2"]


def test_models_of_odd_clients_are_saved_and_foreign_files_stay(tmp_path):
    from small_runs import arrays, federated

    clients = dict(zip(("x" * 400, "..", "Ann", "ann"), arrays(), strict=True))
    run = federated(clients, out=tmp_path)
    folder = run.save_models()
    assert len(list(folder.iterdir())) == 4
    run.save_models()  # its own are overwritten
    mine = folder / f"{file_names(list(clients))[1]}.safetensors"
    mine.write_text("mine")
    with pytest.raises(UserError, match="is no model of this run: move it away"):
        run.save_models()
    assert mine.read_text() == "mine"


# --- sentences ----------------------------------------------------------------------------------------------------


def test_of_several_changes_the_one_that_matters_is_blamed(tmp_path):
    bespoke.run(experiment(), tmp_path)
    with pytest.raises(UserError, match=r"training.lr is 0.1 there and 0.2 here"):
        bespoke.run(experiment(rounds=9, lr=0.2), tmp_path, resume=True)


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    path = write(tmp_path / "x.toml")
    done = command("run", path, "--out", tmp_path / "a", "--set", "data.name=\x1b]0;owned\x07\x1b[31m")
    assert "\x1b" not in done.err and "\\x1b" in done.sentence


def test_a_second_start_beside_a_living_run_is_told_who_runs_there(tmp_path):
    path, told = write(tmp_path / "x.toml"), []

    def second(event):
        told.append(told or command("run", path, "--out", str(tmp_path / "run"), "--quiet").sentence)

    bespoke.run(bespoke.runs.experiment.load(path)[0], tmp_path / "run", callbacks=[second])
    assert f"pid {os.getpid()}" in told[0]


def test_files_of_others_with_the_names_of_checkpoints_are_moved_aside(tmp_path):
    bespoke.run(experiment(rounds=1), tmp_path / "run")
    for name in ("000002.json", "000002.safetensors"):
        (tmp_path / "run" / "checkpoints" / name).write_text("mine")
    bespoke.run(experiment(rounds=2), tmp_path / "run", resume=True)
    aside = list((tmp_path / "run" / "checkpoints").glob("000002.*.aside"))
    assert len(aside) == 2 and {path.read_text() for path in aside} == {"mine"}


def test_a_client_that_is_mostly_refused_is_named_at_the_end():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    clients = {name: (x, torch.arange(40) % 2) for name in ("anna", "berta", "carla", "dora", "emil")}
    clients["dora"] = (x * 1e30, torch.arange(40) % 2)
    run = bespoke.federate(clients, torch.nn.Sequential(torch.nn.Linear(4, 2)), "0", rounds=2)
    assert any(note.startswith("2 of 2 uploads of dora were refused: ") for note in run.notes)
    assert not any("anna" in note for note in run.notes)


@pytest.mark.parametrize(("changes", "told"), [("", "abc"), (" M src/x.py\n", "abc-dirty")])
def test_the_commit_of_a_changed_checkout_says_so(changes, told, monkeypatch):
    answers = {"rev-parse": "abc\n", "status": changes}
    asked = SimpleNamespace(run=lambda words, **how: SimpleNamespace(stdout=answers[words[3]]))
    monkeypatch.setattr(execution, "subprocess", SimpleNamespace(SubprocessError=OSError, **vars(asked)))
    monkeypatch.setattr(execution.Path, "exists", lambda path: True)
    monkeypatch.delenv("BESPOKE_COMMIT", raising=False)
    assert execution.code_commit() == told
    monkeypatch.setenv("BESPOKE_COMMIT", "def")
    assert execution.code_commit() == "def"
