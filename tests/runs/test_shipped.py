"""What is shipped: the experiments, the wheel that holds them, and the demonstration."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tomllib
import webbrowser
import zipfile
from functools import cache
from pathlib import Path

import pytest
from small_runs import command

import bespoke
from bespoke.cli import demo
from bespoke.data.federate import check_settings
from bespoke.data.sources.catalogue import CATALOGUE
from bespoke.models import build_task
from bespoke.runs import federation
from bespoke.runs.experiment import experiments_folder, from_tables, load, shipped

ROOT = Path(__file__).parents[2]
FILES = {
    path.relative_to(experiments_folder()).as_posix(): path for path in sorted(experiments_folder().rglob("*.toml"))
}
SHAPES = {"digits": ((1, 8, 8), 10), "synthetic_hierarchy": ((1,), 1)}  # of a row, and the outputs
PRESETS = [name for name, path in FILES.items() if path.parent.name == "algorithms"]


build = cache(build_task)  # many experiments have one model


# --- experiments --------------------------------------------------------------------------------------------------


def test_the_checkouts_own_folder_is_found():
    assert experiments_folder() == ROOT / "experiments"
    assert FILES


@pytest.mark.parametrize("name", list(shipped()))
def test_every_experiment_loads_by_name_and_by_path_and_survives_the_round_trip(name):
    loaded, source = load(name)
    assert source == str(FILES[f"{name}.toml"])
    assert load(FILES[f"{name}.toml"])[0] == loaded
    assert from_tables(tomllib.loads(loaded.toml()), "copy") == loaded


@pytest.mark.parametrize("name", list(shipped()))
def test_every_key_of_an_experiment_means_something(name):
    loaded, _ = load(name)
    check_settings(loaded.data)
    build(loaded.model, *(SHAPES.get(loaded.data.name) or (CATALOGUE[loaded.data.name].shapes[0], 10)))


@pytest.mark.parametrize("name", list(shipped()))
def test_every_experiment_says_what_it_is(name):
    first = FILES[f"{name}.toml"].read_text().splitlines()[0]
    assert first.startswith("# ") and len(first) > 20


@pytest.mark.parametrize("name", list(shipped()))
def test_every_experiment_takes_every_method(name):
    path, own = FILES[f"{name}.toml"], load(name)[0].algorithm_name
    for algorithm in bespoke.ALGORITHMS:
        loaded, source = load(name, algorithm)
        assert loaded.algorithm_name == algorithm
        preset = path.parent / "algorithms" / f"{algorithm}.toml"
        file = str(preset) if preset.is_file() else str(path) if algorithm == own else "the method's defaults"
        assert source == file, algorithm


def test_tables_and_presets_are_no_experiments():
    assert {"tables", "algorithms"} <= {path.parent.name for path in FILES.values()}
    assert not {"tables", "algorithms"} & {path.parent.name for path in shipped().values()}


def test_presets_belong_to_a_method():
    assert all(Path(name).stem in bespoke.ALGORITHMS for name in PRESETS)


# --- the wheel ----------------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_experiments_and_they_are_found_there(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    inside = tmp_path / "site" / "bespoke" / "experiments"
    assert {p.relative_to(inside).as_posix() for p in inside.rglob("*.toml")} == set(FILES)
    assert (tmp_path / "site" / "bespoke" / "py.typed").exists() == (ROOT / "src" / "bespoke" / "py.typed").exists()
    script = "import bespoke.runs.experiment as e, json; print(json.dumps({k: str(v) for k, v in e.shipped().items()}))"
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: str(inside / f"{name}.toml") for name in shipped()}


# --- the demonstration --------------------------------------------------------------------------------------------


def mean_of(folder):
    return 100 * bespoke.summarise(folder)["views"]["personal"]["last"]["all"]["mean"]


@pytest.mark.xdist_group("browser")
def test_the_demonstration_compares_eight_methods_and_says_what_it_shows(demonstrated):
    done, folder = demonstrated
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "Test accuracy, last round"
    assert [line.split()[0] for line in lines[2:10]] == list(demo.METHODS)
    assert demo.METHODS == ("local", "fedavg", "fedavg_ft", "pfedfda", "self_fl", "fedlda", "fedpce", "pfedvmp")
    assert lines[-1] == f"report: {folder / 'report.html'}"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    means = {name: mean_of(folder / name) for name in demo.METHODS}
    best = max(means, key=means.get)
    for number in (means["fedavg"], means["local"], means[best]):
        assert f"{number:.1f} %" in lines[-2]
    assert lines[-2].endswith(f"({best}).")
    assert [line.partition(":")[0] for line in done.err.splitlines() if "round 2/2" in line] == list(demo.METHODS)


@pytest.mark.xdist_group("browser")
def test_the_demonstration_in_the_same_folder_shows_what_is_there(short_demo, demonstrated):
    first, folder = demonstrated
    again = command("demo", "--out", folder, "--quiet", "--no-open")
    assert (again.out, again.err, again.code) == (first.out, "", 0)


@pytest.mark.parametrize(
    ("change", "opened"),
    [
        ({}, True),
        ({"CI": "1"}, False),
        ({"SSH_CONNECTION": "1.2.3.4 5 6.7.8.9 22"}, False),
        ({"PYTEST_CURRENT_TEST": "this"}, False),
        ({"DISPLAY": None}, False),
        ({"DISPLAY": None, "WAYLAND_DISPLAY": "wayland-0"}, True),
    ],
)
def test_the_report_is_opened_where_somebody_sits_at_a_screen(change, opened, tmp_path, monkeypatch):
    class Browser(webbrowser.BaseBrowser):
        def open(self, url, new=0, autoraise=True):
            asked.append(url)
            return True

    asked = []
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr(webbrowser, "get", Browser)
    for name in (*demo.UNSEEN, "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"DISPLAY": ":0"} | change).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert demo.show(tmp_path / "a b.html") is opened
    assert asked == ([(tmp_path / "a b.html").as_uri()] if opened else [])
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert not demo.show(tmp_path / "a b.html") and len(asked) == opened


def test_no_browser_takes_the_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    for name in demo.UNSEEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("false"))
    assert demo.show(tmp_path / "a.html") is False

    def none():
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "get", none)
    assert demo.show(tmp_path / "a.html") is False


def test_the_demonstration_is_the_shipped_experiment():
    loaded, _ = load("demo")
    assert (loaded.data.name, loaded.data.clients, loaded.data.partition, loaded.data.alpha) == (
        "digits",
        20,
        "dirichlet",
        0.1,
    )
    assert loaded.model.norm == "group"
    assert load("demo", "pfedvmp")[0].method == bespoke.PFedVMP(xi=1.0)


def test_ctrl_c_in_the_demonstration_says_how_to_go_on(short_demo, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "METHODS", ("local", "fedavg"))
    plain = federation.Federation.cohort
    rounds = []

    def cohort(self, round):
        rounds.append(round)
        if len(rounds) == 3:
            signal.raise_signal(signal.SIGINT)
        return plain(self, round)

    monkeypatch.setattr(federation.Federation, "cohort", cohort)
    done = command("demo", "--out", tmp_path / "demo")
    assert done.code == 130 and done.out == ""
    assert done.err.splitlines()[-1] == f"stopped; resume with: bespoke demo --out {tmp_path / 'demo'}"
    assert len(rounds) == 3
    assert command("demo", "--out", tmp_path / "demo").code == 0


@pytest.mark.xdist_group("browser")
def test_the_lesson_is_made_of_the_tables_own_numbers(demonstrated):
    table = bespoke.compare([demonstrated[1] / name for name in demo.METHODS])

    def with_means(**means):
        rows = [dataclasses.replace(r, mean=r.mean._replace(mean=means.get(r.label, 0.1))) for r in table.rows]
        return demo.lesson(dataclasses.replace(table, rows=tuple(rows)))

    found = with_means(fedavg=0.701, local=0.655, self_fl=0.912)
    for part in ("70.1 %", "65.5 %", "91.2 % (self_fl)"):
        assert part in found
    assert "no personal model beat" in with_means(fedavg=0.95, local=0.2) and "95.0 %" in with_means(fedavg=0.95)


@pytest.mark.slow
def test_the_whole_demonstration_shows_that_personal_models_help(tmp_path):
    done = command("demo", "--out", tmp_path)
    assert done.code == 0, done.err
    means = {name: mean_of(tmp_path / name) for name in demo.METHODS}
    for name in ("fedavg_ft", "pfedfda", "self_fl", "fedlda", "pfedvmp"):
        assert means[name] > max(means["fedavg"], means["local"]) + 2, name
    assert means["fedpce"] > 50  # after so few rounds its clients hardly differ, and it is where FedAvg is
    assert "personal models that learn from the other clients reach" in done.out
