"""The command line: what it prints, where, with which exit code, and what it leaves behind."""

import contextlib
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from small_runs import assert_same_result, command, experiment, write

import bespoke
from bespoke.cli.main import _spread
from bespoke.records import RunFolder
from bespoke.runs import federation


@pytest.fixture
def path(tmp_path):
    """The small experiment, in a working folder of its own."""
    return write(tmp_path / "small.toml")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ok(*arguments):
    done = command(*arguments)
    assert done.code == 0, (done.out, done.err)
    return done


# --- without torch ------------------------------------------------------------------------------------------------


def test_version_and_help_import_no_torch():
    script = """
import contextlib, io, sys
from bespoke.cli.main import main
for words in (["--version"], ["--help"], ["run", "--help"], ["list", "--help"], ["compare", "-h"], ["demo", "-h"], []):
    sys.argv = ["bespoke", *words]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        main()
    assert out.getvalue(), words
heavy = {"torch", "numpy", "scipy", "sklearn", "matplotlib", "pyarrow", "safetensors"} & set(sys.modules)
print(sorted(heavy))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_version():
    assert ok("--version").out == f"bespoke {bespoke.__version__}\n"


def test_help_names_every_command_and_option():
    text = ok("--help").out
    for name in ("demo", "run", "compare", "list", "--install-completion"):
        assert name in text
    options = (
        "algorithm",
        "set",
        "backend",
        "device",
        "states",
        "seed",
        "seeds",
        "out",
        "save-models",
        "resume",
        "quiet",
        "json",
    )
    for name in options:
        assert f"--{name}" in ok("run", "--help").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("run", ["'EXPERIMENT'", "(see bespoke run --help)"]),
        (
            "run demo --rounds 3",
            ["there is no option --rounds: write --set training.rounds=3 (see bespoke run --help)"],
        ),
        ("run demo --lr=0.1", ["write --set training.lr=0.1 "]),
        ("run demo --weight-decay 1e-3 --seed 1", ["write --set training.weight_decay=1e-3 "]),
        ("run demo --full-last --seed 1", ["write --set training.full_last=VALUE "]),
        ("run demo --alph 3", ["'--alph'", "change the experiment's settings with --set"]),
        ("compare demo --lr 3", ["'--lr'", "(see bespoke compare --help)"]),
        ("run demo --seeds x", ["'--seeds'", "'x'", "integer"]),
        ("run demo --seed 0 1", ["(1)"]),
        ("run demo --checkpoint-every 0", ["'--checkpoint-every'", "1<=x"]),
        ("walk", ["'walk'", "(see bespoke --help)"]),
        ("list", ["'WHAT'"]),
        ("list models datasets", ["'datasets'", "only list settings does"]),
        ("compare", ["'FOLDERS...'"]),
        ("compare . --quiet", ["'--quiet'", "(see bespoke compare --help)"]),
    ],
)
def test_wrong_usage_is_told_in_one_sentence(arguments, words):
    found = command(*arguments.split()).sentence
    for word in words:
        assert word in found


def test_without_a_command_there_is_help():
    done = command()
    assert done.code == 2 and "Usage: bespoke" in done.out and "compare" in done.out


def test_a_name_that_lacks_its_ending_is_completed_by_the_hint(path):
    assert "did you mean 'small.toml'?" in command("run", "small").sentence
    ok("run", path, "--out", "here")
    assert "did you mean 'here/config.toml'?" in command("run", "here").sentence
    ok("run", "here/config.toml", "--out", "there")
    assert_same_result("here", "there")


# --- run ----------------------------------------------------------------------------------------------------------


def test_a_run_prints_one_sentence_and_its_progress_elsewhere(path):
    done = ok("run", path, "--out", "here", "--set", "evaluation.every=1")
    summary = bespoke.summarise("here")["views"]["personal"]["last"]["all"]
    assert done.out == (
        "fedavg, seed 0, last round (3), personal model, all 6 clients with test rows: "
        f"accuracy {100 * summary['pooled']:.2f} % pooled, {100 * summary['mean']:.2f} % mean over clients; "
        "records in here\n"
    )
    lines = done.err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"fedavg: round {r}/3" for r in (1, 2, 3)]
    assert all("train loss" in line and "% (pooled)" in line for line in lines)
    assert "\x1b" not in done.err + done.out  # no colours and no bar in a pipe


def test_progress_shows_the_chosen_metric(path):
    done = ok("run", path, "--out", "here", "--set", "evaluation.metric=mean")
    mean = bespoke.summarise("here")["views"]["personal"]["last"]["all"]["mean"]
    assert f"accuracy {100 * mean:.2f} % (mean)" in done.err.splitlines()[-1]


def test_quiet_prints_the_result_only(path):
    done = ok("run", path, "--quiet")
    assert done.err == "" and done.out.startswith("fedavg, seed 0")
    assert ok("run", path, "-q", "--out", "other").err == ""


def test_json_is_all_that_is_printed(path):
    done = ok("run", path, "--json", "--out", "here")
    found = json.loads(done.out)
    assert done.err == ""
    assert found.pop("folder") == "here" and found.pop("seed") == 0
    assert found == bespoke.summarise("here")


def test_the_folder_has_a_name_of_its_own(path):
    ok("run", path, "--algorithm", "ditto", "--seed", 4)
    assert RunFolder("runs/small-ditto-seed4").holds_run()
    ok("run", "demo", "--set", "model.name=linear", "--set", "model.norm=none", "--set", "training.rounds=1")
    assert RunFolder("runs/demo-fedavg-seed0").holds_run()


def test_several_seeds_are_several_runs(path):
    done = ok("run", path, "--seeds", 0, 1, "--out", "many")
    assert sorted(p.name for p in Path("many").iterdir()) == ["small-fedavg-seed0", "small-fedavg-seed1"]
    assert [line.partition(", last")[0] for line in done.out.splitlines()] == ["fedavg, seed 0", "fedavg, seed 1"]
    assert [RunFolder(p).config()["seed"] for p in sorted(Path("many").iterdir())] == [0, 1]
    assert bespoke.compare("many").rows[0].seeds == (0, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seeds", "2", "0"],
        ["--seeds", "2", "--seeds", "0"],
        ["--seeds=2", "0"],
        ["--seeds", "2", "0", "2"],
    ],
)
def test_the_forms_of_seeds(path, arguments):
    done = ok("run", *arguments, path, "--json", "--set", "training.rounds=1")
    assert [run["seed"] for run in json.loads(done.out)] == [2, 0]


def test_seed_and_seeds_are_refused(path):
    assert command("run", path, "--seed", 1, "--seeds", 2, 3).sentence == "give --seed or --seeds, not both"
    assert not Path("runs").exists()


def test_a_negative_seed_is_refused(path):
    assert "--seed must be a whole number of at least 0, not -1" in command("run", path, "--seed=-1").sentence


def test_backends_give_the_same_counts(path):
    for backend in ("loop", "batched"):
        ok("run", path, "--backend", backend, "--algorithm", "fedrep", "--out", backend)
        assert RunFolder(backend).read_json("environment.json")["backend"] == backend
    one, two = (list(RunFolder(b).clients()) for b in ("loop", "batched"))
    assert [row["metrics"]["accuracy"][0] for row in one] == [row["metrics"]["accuracy"][0] for row in two]


def test_unknown_backend_and_device_are_told(path):
    assert "no backend 'gpu': use one of batched, loop" in command("run", path, "--backend", "gpu").sentence
    assert "no device 'gpu': use cpu, cuda or auto" in command("run", path, "--device", "gpu").sentence
    assert not Path("runs").exists()


def test_states_are_kept_where_they_are_wanted(path):
    for kind in ("device", "disk"):
        ok("run", path, "--states", kind, "--algorithm", "fedrep", "--out", kind)
        assert RunFolder(kind).read_json("environment.json")["states"] == kind
    assert_same_result("disk", "device")
    found = command("run", path, "--states", "tape").sentence
    assert "states cannot be kept on 'tape': use one of device, host, disk" in found


def test_cuda_without_cuda_is_told(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = command("run", path, "--device", "cuda").sentence
    assert found == "device cuda was asked for, but torch sees no CUDA devices here: use cpu or auto"


def test_a_folder_that_holds_a_run_is_refused_without_resume(path):
    ok("run", path, "--out", "here")
    before = {p: p.read_bytes() for p in Path("here").rglob("*") if p.is_file()}
    found = command("run", path, "--out", "here").sentence
    assert found.startswith("here already holds a run: add --resume ") and "choose another folder with --out" in found
    assert {p: p.read_bytes() for p in Path("here").rglob("*") if p.is_file()} == before


def test_a_finished_run_can_be_resumed_and_stays(path):
    first = ok("run", path, "--out", "here")
    before = {p: p.read_bytes() for p in Path("here").rglob("*") if p.is_file()}
    again = ok("run", path, "--out", "here", "--resume")
    assert again.out == first.out and again.err == ""
    assert {p: p.read_bytes() for p in Path("here").rglob("*") if p.is_file()} == before


def test_a_run_is_lengthened(path):
    ok("run", path, "--out", "here")
    ok("run", path, "--out", "here", "--resume", "--set", "training.rounds=6")
    ok("run", path, "--out", "long", "--set", "training.rounds=6", "--set", "evaluation.every=3")
    assert_same_result("here", "long")
    assert RunFolder("here").config()["training"]["rounds"] == 6


def test_resume_where_nothing_is_says_so_and_starts(path):
    done = ok("run", path, "--out", "here", "--resume")
    assert done.err.startswith("note: here holds no run to resume; starting a new one\n")
    assert bespoke.summarise("here")["rounds"] == 3


def test_the_selection_of_the_experiment_is_the_one_that_is_shown(path):
    settings = ("--set", "data.validation=0.3", "--set", "evaluation.every=1", "--set", "training.rounds=6")
    done = ok("run", path, *settings, "--set", "evaluation.select=best_val", "--out", "here")
    best = bespoke.summarise("here")["views"]["personal"]["best_val"]
    assert f"best validation round ({best['round']})" in done.out
    assert f"accuracy {100 * best['all']['pooled']:.2f} % pooled" in done.out
    assert "best validation round" in ok("compare", "here").out
    assert "last round" in ok("compare", "here", "--select", "last").out


def test_notes_are_printed(path):
    ok("run", path, "--out", "here")
    for file in Path("here/checkpoints").iterdir():
        file.write_bytes(b"damaged")
    done = ok("run", path, "--out", "here", "--resume", "--quiet")
    assert done.err.count("note: ") == 2 and "started again from round 1" in done.err


def test_refused_uploads_are_shown(path):
    done = command("run", path, "--set", "training.lr=1e30", "--set", "model.name=mlp", "--set", "training.steps=20")
    assert done.code == 3 and "refused {'" in done.err and "holds NaN or inf" in done.err


# --- models -------------------------------------------------------------------------------------------------------


def test_saved_models_predict_as_those_of_the_run(path):
    ok("run", path, "--algorithm", "ditto", "--out", "here", "--save-models")
    run = bespoke.run(experiment("ditto"))
    files = sorted(Path("here/models").iterdir())
    assert [f.name for f in files] == [f"{i}.safetensors" for i in range(6)]
    x = run.pool.x[:9]
    for file in files:
        saved = safetensors.torch.load_file(file)
        logits = torch.nn.functional.linear(x, saved["head.weight"], saved["head.bias"])
        assert torch.allclose(logits, run.models[file.stem].logits(x), atol=1e-5)
        assert torch.equal(logits.argmax(-1), run.models[file.stem].predict(x))


def test_models_of_a_finished_run_can_be_saved_later(path):
    ok("run", path, "--out", "here")
    assert not Path("here/models").exists()
    ok("run", path, "--out", "here", "--resume", "--save-models")
    assert len(list(Path("here/models").iterdir())) == 6


# --- Ctrl-C -------------------------------------------------------------------------------------------------------


@pytest.fixture
def listening():
    """Ctrl-C is heard: a test run that was started in the background would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupted(listening, monkeypatch):
    """Presses Ctrl-C in the middle of given rounds, counted over all runs."""
    seen = []

    def at(*numbers):
        plain = federation.Federation.cohort

        def cohort(self, round):
            seen.append(round)
            if len(seen) in numbers:
                signal.raise_signal(signal.SIGINT)
            return plain(self, round)

        monkeypatch.setattr(federation.Federation, "cohort", cohort)

    return at


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(path, interrupted):
    ok("run", path, "--set", "training.rounds=5", "--out", "whole one")
    interrupted(3)
    arguments = ["run", path, "--set", "training.rounds=5", "--out", "my run"]
    done = command(*arguments)
    assert done.code == 130 and done.out == ""
    assert "finishing this round, then saving a checkpoint; press Ctrl-C again to stop at once" in done.err
    told = done.err.splitlines()[-1]
    assert told.startswith("stopped after round 3 of 5, all saved; resume with: bespoke run ")
    words = shlex.split(told.partition("resume with: ")[2])
    assert words == ["bespoke", *arguments, "--resume"]
    assert bespoke.summarise("my run")["rounds"] == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ok(*words[1:])
    assert_same_result("my run", "whole one")


def test_sigterm_ends_like_ctrl_c(path, monkeypatch):
    plain = federation.Federation.cohort

    def cohort(self, round):
        if round == 2:
            signal.raise_signal(signal.SIGTERM)
        return plain(self, round)

    monkeypatch.setattr(federation.Federation, "cohort", cohort)
    done = command("run", path, "--set", "training.rounds=5", "--out", "here")
    assert done.code == 143 and "stopped after round 2 of 5, all saved; resume with: bespoke run " in done.err
    assert bespoke.summarise("here")["rounds"] == 2
    monkeypatch.setattr("bespoke.cli.demo.METHODS", ("fedavg",))
    done = command("demo", "--out", "demo", "--quiet")
    assert done.code == 143 and "resume with: bespoke demo --out demo" in done.err


def test_ctrl_c_with_several_seeds_goes_on_with_the_same_command(path, interrupted):
    interrupted(5)  # the second round of the second seed
    done = command("run", path, "--seeds", 0, 1, 2, "--out", "many")
    assert done.code == 130
    words = shlex.split(done.err.splitlines()[-1].partition("resume with: ")[2])
    again = ok(*words[1:])
    assert [line.partition(", last")[0] for line in again.out.splitlines()] == [f"fedavg, seed {s}" for s in (0, 1, 2)]
    assert sorted(p.name for p in Path("many").iterdir()) == [f"small-fedavg-seed{s}" for s in (0, 1, 2)]
    assert bespoke.compare("many").rows[0].rounds == (3, 3, 3)


def test_ctrl_c_in_the_last_round_comes_too_late(path, interrupted):
    interrupted(3)
    done = ok("run", path, "--out", "here")
    assert "last round (3)" in done.out


def test_ctrl_c_twice_stops_at_once(path, listening, monkeypatch):
    def twice(self, round):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(federation.Federation, "cohort", twice)
        done = command("run", path, "--out", "here")
    assert done.code == 130
    assert "stopped at once; rounds after the last checkpoint are lost" in done.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert command("run", path, "--out", "here", "--resume").code == 0


# --- on a terminal ------------------------------------------------------------------------------------------------


def on_a_terminal(*arguments):
    """The exit code of a command on a terminal of 90 columns, and what it wrote there."""
    terminal, inside = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "90", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "bespoke", *map(str, arguments)]
    with subprocess.Popen(line, stdin=inside, stdout=inside, stderr=inside, env=env) as process:
        os.close(inside)
        raw = b""
        with contextlib.suppress(OSError):  # the other side is closed
            while part := os.read(terminal, 65536):
                raw += part
    os.close(terminal)
    return process.returncode, raw.decode()


def test_a_terminal_shows_a_bar_that_goes_away(path):
    code, raw = on_a_terminal("run", path, "--out", "here", "--set", "evaluation.every=1", "--set", "training.rounds=8")
    assert code == 0, raw
    assert "━" in raw and "8/8" in raw and "rounds" in raw and "left" in raw
    assert "accuracy" in raw and "(pooled)" in raw
    last = raw.rstrip().rpartition("\x1b[2K")[2]
    assert "fedavg, seed 0, last round (8)" in last and "━" not in last


# --- compare ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Runs of two methods and two seeds."""
    root = tmp_path_factory.mktemp("several")
    for name in ("fedavg", "fedrep"):
        for seed in (0, 1):
            bespoke.run(
                experiment(name, seed=seed, rounds=2, rate=1.0, data={"new_clients": 1}), root / f"{name}{seed}"
            )
    return root


def test_compare_prints_a_table(several):
    done = ok("compare", several)
    lines = done.out.splitlines()
    assert lines[0] == "Test accuracy, last round"
    assert lines[1].split()[:3] == ["method", "mean", "(std)"]
    assert [line.split()[0] for line in lines[2:4]] == ["fedavg", "fedrep"]
    assert "seeds 0 1" in done.out and "baseline" in lines[2]
    assert done.err == ""


def test_compare_takes_folders_one_by_one(several):
    done = ok("compare", several / "fedrep0", several / "fedavg0", "--baseline", "fedrep")
    assert "minus fedrep" in done.out


def test_compare_as_markdown(several):
    lines = ok("compare", several, "--markdown").out.splitlines()
    assert lines[0].startswith("| method | mean (std) |") and lines[1].startswith("| --- | ---: |")


def test_compare_as_json(several):
    found = json.loads(ok("compare", several, "--json").out)
    assert [row["label"] for row in found["rows"]] == ["fedavg", "fedrep"]
    assert found["rows"][0]["seeds"] == [0, 1]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_compare_draws_a_chart(several, suffix):
    done = ok("compare", several, "--chart", f"chart.{suffix}")
    assert done.err == f"chart: chart.{suffix}\n"
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert Path(f"chart.{suffix}").read_bytes().startswith(start)


def test_compare_of_a_group(several):
    assert "new clients" in ok("compare", several, "--group", "new").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["."], "no run"),
        (["SEVERAL", "--select", "first"], "unknown select 'first'; use one of last, best_val, best_test"),
        (["SEVERAL", "--select", "best_val"], "has no best validation round"),
        (["SEVERAL", "--group", "old"], "there is no group 'old'"),
        (["SEVERAL", "--group", "unseen"], "has no test rows"),
        (["SEVERAL", "--view", "global"], "has no view 'global'; it has personal"),
        (["SEVERAL", "--baseline", "ditto"], "no runs of the baseline 'ditto'; use one of fedavg, fedrep"),
        (["SEVERAL", "--chart", "chart.gif"], "must end in .png, .svg or .pdf"),
        (["SEVERAL", "--chart", "nowhere/chart.png"], "cannot write nowhere/chart.png"),
    ],
)
def test_what_cannot_be_compared(several, arguments, words):
    arguments = [several if word == "SEVERAL" else word for word in arguments]
    assert words in command("compare", *arguments).sentence


def test_a_run_without_evaluation_cannot_be_compared_yet(path, interrupted):
    interrupted(1)
    assert command("run", path, "--out", "here").code == 130
    assert "holds no evaluation; finish it with --resume" in command("compare", "here").sentence


# --- list ---------------------------------------------------------------------------------------------------------

LISTS = {
    "algorithms": ["local", "fedavg", "fedavg_ft", "fedprox", "fedper", "fedrep", "lg_fedavg", "ditto"],
    "models": ["linear", "mlp", "cnn"],
    "datasets": ["digits", "gaussian", "files"],
    "partitions": ["iid", "dirichlet", "pathological"],
    "transforms": ["normalise", "flip", "crop"],
    "experiments": ["demo"],
}


@pytest.mark.parametrize("what", LISTS)
def test_lists(what):
    found = json.loads(ok("list", what, "--json").out)
    assert set(LISTS[what]) <= set(found)
    own = {name for name in found if ":" in name}  # what other tests in this process named by its module
    assert all(text and "\n" not in text for name, text in found.items() if name not in own)
    lines = ok("list", what).out.splitlines()
    assert [line.split()[0] for line in lines] == list(found)
    assert all(line.endswith(text) for line, text in zip(lines, found.values(), strict=True))


def test_a_list_of_something_else():
    assert command("list", "clients").sentence.startswith(
        "there is no list of 'clients': use one of algorithms, models"
    )


# --- pipes --------------------------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_error():
    script = "import sys; from bespoke.cli.main import main; sys.argv = ['bespoke', 'list', 'partitions']; main()"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("demo --set a.b=1 c.d=x=2", "demo --set a.b=1 --set c.d=x=2"),
        ("--set a.b=1 demo", "--set a.b=1 demo"),
        ("--set=a.b=1 c.d=2 --seeds 0 1", "--set=a.b=1 --set c.d=2 --seeds 0 --seeds 1"),
        ("--methods a b --seeds 0 demo", "--methods a --methods b --seeds 0 demo"),
    ],
)
def test_options_that_take_several_words(given, read):
    assert _spread(given.split()) == read.split()
