"""Runs that were cut off: by kill -9 at any moment, by a full disk at any write, and lengthened ones.

Run as a program, this file is the driver of the kills: it imports torch once, and every run is a fork of it that
is killed or goes on. ``python test_resume.py FOLDER gate|slow`` prints one line of JSON for each kill.
"""

import contextlib
import errno
import itertools
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import assert_same_result, command, experiment, records, write

import bespoke
from bespoke.clients import BatchedClients, states
from bespoke.errors import UserError
from bespoke.files import temporary_of
from bespoke.runs import execution
from bespoke.runs.checkpoint import load_newest

EVERY = 2  # rounds between checkpoints


def runs():
    """The experiments that are killed: with client states and kept moments, on either backend, and kept on disk."""
    mlp = {"name": "mlp", "hidden": 6}
    data = {"validation": 0.2, "new_clients": 1, "rows": 200}
    common = {"model": mlp, "data": data, "evaluation": {"every": 2}, "rounds": 9}
    return {
        "fedrep": (
            experiment(bespoke.FedRep(head_epochs=2), momentum=0.5, keep_optimizer=True, full_last=True, **common),
            {"backend": "batched"},
        ),
        "ditto": (
            experiment("ditto", optimizer="adam", lr=0.01, keep_optimizer=True, clip=1.0, **common),
            {"backend": "loop", "states": "host"},
        ),
        "disk": (
            experiment("fedper", momentum=0.5, keep_optimizer=True, rounds=7),
            {"backend": "loop", "states": "disk"},
        ),
    }


# --- cutting writes -----------------------------------------------------------------------------------------------


class Cut:
    """A file that was opened for writing: ``at(name, step)`` is called before, in the middle of and after a write."""

    def __init__(self, file, at):
        self._file, self._at = file, at

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        name = Path(self._file.name).name
        name = f".{of}.tmp" if (of := temporary_of(name)) else name  # without its random part
        self._at(name, "before")
        half = len(data) // 2
        done = self._file.write(data[:half])
        self._file.flush()
        self._at(name, "half")
        done += self._file.write(data[half:])
        self._file.flush()
        self._at(name, "written")
        return done


@contextlib.contextmanager
def watched(at):
    """Every file is written through :class:`Cut`; renames and removals call ``at(name, "renamed" or "removed")``."""
    plain_open, plain_replace, plain_unlink = pathlib.Path.open, os.replace, pathlib.Path.unlink

    def opened(self, mode="r", *args, **kwargs):
        file = plain_open(self, mode, *args, **kwargs)
        return Cut(file, at) if set(mode) & set("wax+") else file

    def replaced(source, target):
        plain_replace(source, target)
        at(Path(target).name, "renamed")

    def unlinked(self, *args, **kwargs):
        plain_unlink(self, *args, **kwargs)
        at(self.name, "removed")

    pathlib.Path.open, os.replace, pathlib.Path.unlink = opened, replaced, unlinked
    try:
        yield
    finally:
        pathlib.Path.open, os.replace, pathlib.Path.unlink = plain_open, plain_replace, plain_unlink


class Moments:
    """Counts the moments of a run, and acts at one of them: the n-th of all, or of a name and step."""

    def __init__(self, act=None, name=None, step=None, number=1):
        self.act, self.wanted, self.number, self.seen = act, (name, step), number, []

    def __call__(self, name, step):
        if self.wanted in ((None, None), (name, step)):
            self.seen.append((name, step))
            if self.act and len(self.seen) == self.number:
                self.act()


# --- the driver of the kills --------------------------------------------------------------------------------------


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def fork(work):
    """Run ``work()`` in a child; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def status(pid):
    """0 for a child that finished, -9 for one that was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def go(name, folder, at=None, resume=True):
    spec, how = runs()[name]
    states.SPILL = 0  # whatever is kept on disk is written in every round, not with the checkpoint alone
    with watched(at) if at else contextlib.nullcontext():
        bespoke.run(spec, folder, resume=resume, checkpoint_every=EVERY, **how)


def killed_at(name, folder, moments):
    """The run, killed at a moment that its own writes decide."""
    assert status(fork(lambda: go(name, folder, moments))) == -signal.SIGKILL, f"{moments.wanted} never came"
    return " ".join(map(str, moments.wanted if moments.wanted[0] else ("moment", moments.number)))


def killed_after(name, folder, seconds):
    """The run, killed at a random time of at most ``seconds``."""
    while True:
        after = random.SystemRandom().uniform(0.0, seconds)
        pid = fork(lambda: go(name, folder))
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
        if status(pid) == -signal.SIGKILL:
            return f"{after:.3f} s"
        seconds /= 2  # it was faster this time
        shutil.rmtree(folder)


def drive(root, much):
    root = Path(root)
    bespoke.run(experiment("fedrep", rounds=2))  # what torch loads when it is first used is loaded once
    length, count = {}, {}
    for name in runs():
        start = time.monotonic()
        assert status(fork(lambda name=name: go(name, root / name))) == 0
        length[name] = time.monotonic() - start
        tally = root / f"{name}.moments"

        def counted(name=name, tally=tally):
            moments = Moments()
            go(name, root / f"{name}-counted", moments)
            tally.write_text(str(len(moments.seen)))

        assert status(fork(counted)) == 0
        count[name] = int(tally.read_text())

    def cut(name, step, number=1):
        return lambda run, folder: killed_at(run, folder, Moments(kill_myself, name, step, number))

    def any_moment(run, folder):
        number = random.SystemRandom().randint(1, count[run])
        return killed_at(run, folder, Moments(kill_myself, number=number))

    def any_time(run, folder):
        return killed_after(run, folder, length[run])

    if much:
        kills = [(name, how) for name in runs() for how in (any_moment, any_time) for _ in range(5)]
    else:
        kills = [
            ("fedrep", cut(".000004.safetensors.tmp", "half")),  # inside the writing of a checkpoint
            ("ditto", cut("000006.safetensors", "renamed")),  # between its tensors and its manifest
            ("fedrep", cut("clients.jsonl", "half", 3)),  # inside a line of the records
            ("ditto", any_time),
            ("fedrep", any_moment),
            ("disk", cut(".states-000003.safetensors.tmp", "half")),  # inside the writing of states, ahead of need
            ("disk", cut("states-000004.safetensors", "renamed")),  # between states and the manifest that names them
            ("disk", cut("000006.json", "renamed")),  # after the manifest, before what it replaces is removed
            ("disk", cut("states-000002.safetensors", "removed")),  # of what the first checkpoint named
            ("disk", any_moment),
        ]
    for i, (name, how) in enumerate(kills):
        folder = root / f"kill{i}"
        when = how(name, folder)
        problem = "; ".join(load_newest(folder / "checkpoints")[1])  # what was committed must be there, and sound
        if i % 2:  # every other run is killed once more while it goes on
            seconds = length[name] / 2
            pid = fork(lambda name=name, folder=folder: go(name, folder))
            time.sleep(random.SystemRandom().uniform(0.0, seconds))
            os.kill(pid, signal.SIGKILL)
            status(pid)
        if status(fork(lambda name=name, folder=folder: go(name, folder))):
            problem = "it did not go on"
        else:
            try:
                assert_same_result(folder, root / name)
            except AssertionError as error:
                problem = f"another result: {error}"
        print(json.dumps({"run": name, "when": when, "problem": problem}), flush=True)


def kills(folder, much):
    """The driver's lines. One thread and no GPU, so that forks of the process can work."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, __file__, str(folder), much], env=env, capture_output=True, text=True, timeout=1000
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_ten_kills_end_with_the_same_bits(tmp_path):
    found, errors = kills(tmp_path, "gate")
    assert len(found) == 10
    assert not [line for line in found if line["problem"]], f"{found}\n{errors}"


@pytest.mark.slow
def test_thirty_kills_end_with_the_same_bits(tmp_path):
    found, errors = kills(tmp_path, "slow")
    assert len(found) == 30
    assert not [line for line in found if line["problem"]], f"{found}\n{errors}"


# --- a full disk --------------------------------------------------------------------------------------------------

WRITES = [  # of the small run of three rounds with a checkpoint every two, in their order
    ".config.toml.tmp",
    *(".federation.json.tmp", ".start.safetensors.tmp"),
    ".environment.json.tmp",
    *("rounds.jsonl", "timing.jsonl"),
    *("rounds.jsonl", "clients.jsonl", "timing.jsonl"),
    *(".states-000001.safetensors.tmp", ".000002.safetensors.tmp", ".000002.json.tmp"),
    *("rounds.jsonl", "clients.jsonl", "timing.jsonl"),
    *(".states-000002.safetensors.tmp", ".000003.safetensors.tmp", ".000003.json.tmp"),
    ".environment.json.tmp",
    ".summary.json.tmp",
    ".rounds.parquet.tmp",
    ".clients.parquet.tmp",
]


def no_room():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An experiment file and the folder of its uninterrupted run."""
    root = tmp_path_factory.mktemp("small")
    path = write(root / "x.toml", algorithm={"name": "ditto"}, evaluation={"every": 2})
    moments = Moments()
    with watched(moments):
        done = command("run", path, "--out", root / "run", "--checkpoint-every", 2)
    assert done.code == 0, done.err
    writes = (name for name, step in moments.seen if step == "half")
    return path, root / "run", [name for name, _ in itertools.groupby(writes)]  # states are written in pieces


def test_every_write_of_a_run_is_known(small):
    assert small[2] == WRITES


@pytest.mark.parametrize("number", range(len(WRITES)), ids=lambda i: f"{i}-{WRITES[i].strip('.')}")
def test_a_disk_that_is_full_at_any_write_loses_nothing(number, small, tmp_path):
    path, reference, _ = small
    folder, name = tmp_path / "run", WRITES[number]
    moments = Moments(no_room, name, "half", 1 + WRITES[:number].count(name))
    arguments = ("run", path, "--out", folder, "--checkpoint-every", 2)
    with watched(moments):
        sentence = command(*arguments).sentence
    target = name.removeprefix(".").removesuffix(".tmp")
    assert sentence.startswith("cannot write ") and target in sentence
    assert "No space left on device" in sentence and "--resume" in sentence
    assert not list(folder.rglob("*.tmp"))
    for record, content in records(reference).items():  # what is there is a part of the whole
        assert not (folder / record).exists() or content.startswith((folder / record).read_bytes())
    again = command(*arguments, "--resume")
    assert again.code == 0, again.err
    assert_same_result(folder, reference)
    assert (folder / "clients.parquet").read_bytes() == (reference / "clients.parquet").read_bytes()


def test_a_disk_that_is_full_while_models_are_saved(small, tmp_path):
    path, _, _ = small
    arguments = ("run", path, "--out", tmp_path / "run", "--save-models")
    with watched(Moments(no_room, ".3.safetensors.tmp", "half")):
        sentence = command(*arguments).sentence
    assert "3.safetensors: No space left on device" in sentence
    assert command(*arguments, "--resume").code == 0
    assert len(list((tmp_path / "run" / "models").glob("*.safetensors"))) == 6


def test_a_disk_that_is_full_while_the_folder_is_made(small, tmp_path, monkeypatch):
    monkeypatch.setattr(pathlib.Path, "mkdir", lambda *args, **kwargs: no_room())
    sentence = command("run", small[0], "--out", tmp_path / "run").sentence
    assert sentence.startswith(f"cannot write to the folder {tmp_path / 'run'}: No space left on device")


def test_no_room_for_temporary_files_is_told(monkeypatch):
    monkeypatch.setattr("tempfile.mkdtemp", lambda **kwargs: no_room())
    assert "No space left on device" in command("demo").sentence


@pytest.mark.parametrize("share", [0.01, 0.6, 0.99])
def test_the_systems_own_limit_on_files_is_told(share, small, tmp_path):
    path, reference, _ = small
    limit = int(share * max(p.stat().st_size for p in reference.rglob("*")))
    arguments = ("run", path, "--out", tmp_path / "run", "--checkpoint-every", 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        done = command(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large; make room" in done.sentence
    assert command(*arguments, "--resume").code == 0
    assert_same_result(tmp_path / "run", reference)


# --- going on and on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["loop", "batched"])
@pytest.mark.parametrize("algorithm", ["fedavg", "local", "lg_fedavg"])
def test_a_lengthened_run_equals_a_long_one(algorithm, backend, tmp_path):
    def ran(rounds, folder, resume=False):
        spec = experiment(algorithm, rounds=rounds, momentum=0.5, keep_optimizer=True, evaluation={"every": 1})
        return bespoke.run(spec, folder, backend=backend, resume=resume)

    ran(5, tmp_path / "long")
    ran(2, tmp_path / "run")
    longer = ran(5, tmp_path / "run", resume=True)
    assert_same_result(tmp_path / "run", tmp_path / "long")
    assert longer.summary["rounds"] == 5


@pytest.mark.parametrize("what", ["update", "evaluate"])
def test_that_memory_ran_out_is_told_after_a_resume_too(what, tmp_path, monkeypatch):
    """Smaller blocks round differently, so whoever compares the run must know; the process that noted it is gone."""
    block = BatchedClients._block

    def small(self, call):
        if call.name == what and len(call.clients) > 1:
            raise torch.OutOfMemoryError("not enough")
        return block(self, call)

    def killed(event):
        if event.round == 2:
            raise KeyboardInterrupt

    spec, how = {"rate": 1.0, "evaluation": {"every": 1}}, {"backend": "batched", "checkpoint_every": 1}
    monkeypatch.setattr(BatchedClients, "_block", small)
    with pytest.raises(KeyboardInterrupt):
        bespoke.run(experiment(rounds=3, **spec), tmp_path, callbacks=[killed], **how)
    monkeypatch.setattr(BatchedClients, "_block", block)
    for rounds in (3, 4):
        done = bespoke.run(experiment(rounds=rounds, **spec), tmp_path, resume=True, **how)
        assert done.notes.count("memory ran out: at most 1 clients run at once") == 1


def test_the_other_backend_may_go_on(tmp_path):
    spec = experiment("fedper", rounds=4)
    bespoke.run(experiment("fedper", rounds=2), tmp_path, backend="batched")
    done = bespoke.run(spec, tmp_path, backend="loop", resume=True)
    assert [row["round"] for row in done.folder.rounds()] == [1, 2, 3, 4]
    assert done.folder.read_json("environment.json")["backend"] == "loop"


@pytest.mark.parametrize("backend", ["loop", "batched"])
def test_states_may_be_kept_elsewhere_from_run_to_run(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(states, "SPILL", 300)  # bytes: some rounds write ahead of the checkpoint, others do not
    spec = {"algorithm": "fedper", "momentum": 0.5, "keep_optimizer": True, "evaluation": {"every": 1}}
    for kind in states.KINDS:
        done = bespoke.run(experiment(rounds=4, **spec), tmp_path / kind, backend=backend, states=kind)
        assert done.folder.read_json("environment.json")["states"] == kind
        assert_same_result(tmp_path / kind, tmp_path / "device")
    for rounds, kind in ((1, "disk"), (2, "device"), (3, "host"), (4, "disk")):
        bespoke.run(experiment(rounds=rounds, **spec), tmp_path / "run", backend=backend, states=kind, resume=True)
    assert_same_result(tmp_path / "run", tmp_path / "device")


def test_a_finished_run_is_left_as_it_is(tmp_path):
    spec = experiment("fedrep")
    first = bespoke.run(spec, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    second = bespoke.run(spec, tmp_path, resume=True)
    after = {p.name: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert after == before
    assert second.summary == first.summary and second.accuracy == first.accuracy
    x = second.pool.x[:7]
    assert all(torch.equal(second.models[n].logits(x), first.models[n].logits(x)) for n in first.models)


def test_a_run_is_not_shortened_below_what_it_has_done(tmp_path):
    bespoke.run(experiment(rounds=3), tmp_path)
    with pytest.raises(UserError, match=r"has already done 3 rounds: set training.rounds to 3 or more"):
        bespoke.run(experiment(rounds=2), tmp_path, resume=True)
    assert bespoke.run(experiment(rounds=3), tmp_path, resume=True).summary["rounds"] == 3


def test_a_run_that_ended_with_all_clients_is_not_lengthened(tmp_path):
    bespoke.run(experiment(rounds=2, full_last=True), tmp_path)
    with pytest.raises(UserError, match="finished with a last round of all clients, so it cannot be extended"):
        bespoke.run(experiment(rounds=4, full_last=True), tmp_path, resume=True)


def test_a_run_with_full_last_that_was_stopped_before_may_be_lengthened(tmp_path):
    stops = iter([False, True])
    bespoke.run(experiment(rounds=4, full_last=True), tmp_path / "run", stop=lambda: next(stops))
    bespoke.run(experiment(rounds=6, full_last=True), tmp_path / "run", resume=True)
    bespoke.run(experiment(rounds=6, full_last=True), tmp_path / "long")
    assert_same_result(tmp_path / "run", tmp_path / "long")


def test_a_schedule_over_all_rounds_is_not_lengthened(tmp_path):
    bespoke.run(experiment(rounds=2, schedule="cosine"), tmp_path)
    with pytest.raises(UserError, match=r"another experiment .*training.rounds is 2 there and 4 here"):
        bespoke.run(experiment(rounds=4, schedule="cosine"), tmp_path, resume=True)
    bespoke.run(experiment(rounds=4, schedule="cosine", schedule_rounds=2), tmp_path, resume=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"data": {"alpha": 0.5}}, "data.alpha is 0.3 there and 0.5 here"),
        ({"model": {"name": "mlp"}}, "model.name is 'linear' there and 'mlp' here"),
        ({"algorithm": "fedprox"}, "algorithm.name is 'fedavg' there and 'fedprox' here"),
        ({"lr": 0.2}, "training.lr is 0.1 there and 0.2 here"),
    ],
)
def test_another_experiment_is_refused_with_both_hashes(changes, words, tmp_path):
    one, two = experiment(rounds=1), experiment(rounds=1, **changes)
    bespoke.run(one, tmp_path)
    before = records(tmp_path)
    with pytest.raises(UserError) as caught:
        bespoke.run(two, tmp_path, resume=True)
    for word in (one.hash(), two.hash(), words, str(tmp_path), "--out"):
        assert word in str(caught.value)
    assert records(tmp_path) == before


def test_evaluation_and_backend_may_change(tmp_path):
    bespoke.run(experiment(rounds=2), tmp_path)
    done = bespoke.run(experiment(rounds=4, evaluation={"every": 1}), tmp_path, resume=True)
    assert sorted({row["round"] for row in done.folder.clients()}) == [2, 3, 4]


def test_an_early_stop_is_the_same_after_resume(tmp_path):
    spec = experiment(rounds=30, lr=0.01, data={"validation": 0.3}, evaluation={"every": 1, "patience": 2})
    whole = bespoke.run(spec, tmp_path / "whole", checkpoint_every=1)
    last = whole.summary["rounds"]
    assert 3 <= last < 30
    for stop_after in (1, last - 1):
        folder = tmp_path / f"run{stop_after}"
        calls = []
        bespoke.run(
            spec, folder, checkpoint_every=1, stop=lambda calls=calls, n=stop_after: calls.append(0) or len(calls) == n
        )
        assert bespoke.run(spec, folder, resume=True, checkpoint_every=1).summary["rounds"] == last
        assert_same_result(folder, tmp_path / "whole")
    again = bespoke.run(spec, tmp_path / "whole", resume=True)
    assert again.summary["rounds"] == last


# --- how often ------------------------------------------------------------------------------------------------------


def checkpoints_of(monkeypatch, folder, seconds, each=1.0, **options):
    """The rounds after which checkpoints were written, where one takes so many seconds, and a round ``each``."""
    now, rounds = [0.0], list[int]()

    def save(*args):
        rounds.append(args[1].round)
        now[0] += seconds
        return written(*args)

    def next_round(event):
        now[0] += each

    written = execution.save
    monkeypatch.setattr(execution, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(execution, "save", save)
    spec = experiment(rounds=85, rate=0.2)
    return rounds, bespoke.run(spec, folder, device="cpu", callbacks=[next_round], **options).notes


def test_large_checkpoints_are_written_less_often_and_a_note_says_so(monkeypatch, tmp_path):
    rounds, notes = checkpoints_of(monkeypatch, tmp_path / "run", 3.0)
    assert rounds == [10, 40, 70, 85]  # 3 s are a tenth of 30
    assert notes == [
        "a checkpoint took 3.0 s, so 5 of those after every 10 rounds were left out; --checkpoint-every N "
        "(checkpoint_every=N in Python) writes them all"
    ]


def test_of_long_rounds_at_most_a_minute_is_lost(monkeypatch, tmp_path):
    rounds, _ = checkpoints_of(monkeypatch, tmp_path / "run", 0.5, each=25.0)
    assert rounds[:6] == [4, 7, 10, 13, 16, 19]


def test_small_checkpoints_and_those_asked_for_are_all_written(monkeypatch, tmp_path):
    assert checkpoints_of(monkeypatch, tmp_path / "small", 0.9) == ([10, 20, 30, 40, 50, 60, 70, 80, 85], [])
    monkeypatch.undo()
    assert checkpoints_of(monkeypatch, tmp_path / "asked", 30.0, checkpoint_every=20) == ([20, 40, 60, 80, 85], [])


if __name__ == "__main__":
    drive(sys.argv[1], sys.argv[2] == "slow")
