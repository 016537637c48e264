"""``bespoke new``: files to start from, which work as they are written."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import command, write

from bespoke.algorithms import ALGORITHMS
from bespoke.cli import new
from bespoke.runs.experiment import load


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ALGORITHMS, "data", dict(ALGORITHMS.data))  # where a method that ran stays listed


def ok(*words):
    done = command(*words)
    assert done.code == 0, (done.out, done.err)
    return done.out


def files():
    return sorted(path.name for path in Path().iterdir())


def test_a_new_method_keeps_the_contract():
    told = ok("new", "method", "my_first")
    assert told == (
        "wrote my_first.py and test_my_first.py; next: python test_my_first.py, then bespoke run demo --algorithm "
        "my_first:MyFirst\n"
    )
    assert files() == ["my_first.py", "test_my_first.py"]
    runpy.run_path("test_my_first.py")["test_the_contract"]()


def test_a_new_method_runs_by_its_path():
    ok("new", "method", "my_second")
    done = ok("run", write(Path("small.toml")), "--algorithm", "my_second:MySecond", "--set", "algorithm.own_share=1")
    assert done.startswith("my_second:MySecond, seed 0, last round (3), personal model")


def test_a_new_experiment_runs(capsys):
    told = ok("new", "experiment", "mine")
    assert told == "wrote mine.toml and test_mine.py; next: python test_mine.py, then bespoke run mine.toml\n"
    runpy.run_path("test_mine.py", run_name="__main__")
    assert capsys.readouterr().out.startswith("fedrep on digits, seed 0, 1 of 1 rounds\n")


def test_what_is_commented_in_an_experiment_is_valid_too():
    ok("new", "experiment", "mine")
    text = Path("mine.toml").read_text()
    open_keys = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ") and " = " in line]
    assert len(open_keys) == 6
    for line in open_keys:
        text = text.replace(f"# {line}", line)
    Path("mine.toml").write_text(text)
    experiment, _ = load("mine.toml")
    assert experiment.data.new_clients == 2 and experiment.method.head_epochs == 5 and experiment.training.batch == 32


def test_the_written_files_are_formatted():
    ok("new", "method", "half_way")
    ok("new", "experiment", "mine")
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["format", "--diff"], ["check", "--select", "E,F,W,I,D1"]):
        done = subprocess.run([*ruff, *words, "--isolated", "--line-length=120", "."], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["method", "experiment"])
def test_nothing_is_overwritten_and_nothing_half_written(kind):
    Path("test_mine.py").write_text("mine")
    assert command("new", kind, "mine").sentence == (
        "test_mine.py is there already, and is not overwritten: choose another name"
    )
    assert files() == ["test_mine.py"] and Path("test_mine.py").read_text() == "mine"
    Path("gone.py").symlink_to("nowhere")
    Path("gone.toml").symlink_to("nowhere")
    assert "is there already" in command("new", kind, "gone").sentence
    assert not Path("nowhere").exists()


@pytest.mark.parametrize("name", ["Half", "2nd", "a-b", "a.b", "../x", "", "class", "__", "x" * 62, "é"])
def test_a_name_that_is_none(name):
    for kind in ("method", "experiment"):
        assert "use small letters, digits and underscores, as half_way" in command("new", kind, "--", name).sentence
    assert files() == []


def test_a_method_hides_nothing():
    assert command("new", "method", "fedrep").sentence == "fedrep is one of bespoke's own methods: choose another name"
    assert "json is a module that Python has already" in command("new", "method", "json").sentence
    assert files() == []


def test_a_folder_that_cannot_be_written_is_told(monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(new, "open", refused, raising=False)
    assert command("new", "experiment", "mine").sentence == (
        "cannot write mine.toml: Permission denied; start in a folder of your own"
    )
