"""``bespoke doctor``: what is here, what is missing, what is broken."""

import json
import os
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import command

from bespoke.cli import doctor


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "data"))


def found():
    return {each.name: each for each in doctor.findings()}


def told(code=0):
    done = command("doctor")
    assert done.code == code and done.err == "", (done.out, done.err)
    return done.out


def test_a_sound_machine(tmp_path):
    lines = told().splitlines()
    assert lines[0].startswith("ok      bespoke ")
    here = found()
    assert here["torch"].state == "ok" and torch.__version__ in here["torch"].text
    assert here["data"].text.startswith(f"{tmp_path / 'data'} (0 of ")
    assert here["this folder"].state == here["temporary files"].state == here["packages"].state == "ok"
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
    assert [each["name"] for each in json.loads(command("doctor", "--json").out)] == list(here)


@pytest.mark.parametrize("error", [ImportError("libcudart.so.12: cannot open\nmore"), OSError("no room")])
def test_a_torch_that_cannot_be_imported_is_one_sentence(error, monkeypatch):
    imported = doctor.importlib.import_module

    def damaged(name):
        if name == "torch":
            raise error
        return imported(name)

    monkeypatch.setattr(doctor.importlib, "import_module", damaged)
    out = told(code=1)
    first = str(error).splitlines()[0]
    assert f"broken  torch              cannot be imported: {first}; install it as README.md says" in out
    assert "GPU" not in out and "more" not in out


def gpus(monkeypatch, count=1, error=None):
    def properties(number):
        if error:
            raise error
        return SimpleNamespace(name="NVIDIA H200", total_memory=139 * 2**30)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_a_gpu_with_and_without_what_compiles_its_kernels(monkeypatch):
    gpus(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.5"))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}" if name == "clang" else None)
    here = found()
    assert (here["GPU"].state, here["GPU"].text) == ("ok", "NVIDIA H200 with 139 GiB")
    assert (here["Triton"].text, here["C compiler"].text.split(",")[0]) == ("3.5", "/bin/clang")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert found()["C compiler"].state == "missing" and "install gcc" in found()["C compiler"].text
    monkeypatch.setitem(sys.modules, "triton", None)
    here = found()
    assert here["Triton"].state == "missing" and "faster kernels" in here["Triton"].text and "C compiler" not in here
    told()


def test_no_gpu_or_one_that_fails_is_no_mistake(monkeypatch):
    gpus(monkeypatch, count=0)
    assert "torch sees none" in found()["GPU"].text and "Triton" not in found()
    gpus(monkeypatch, error=RuntimeError("the driver is too old"))
    assert found()["GPU"].text == "torch cannot use it: the driver is too old; runs use the CPU"
    told()


def test_packages_and_extras_follow_the_metadata(monkeypatch):
    lines = ["torch>=2.11,<3", 'flwr==1.41.0; extra == "flower"', "optuna>=4 ; extra == 'tune'", "no-such-package>=1"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: lines)
    here = found()
    assert here["packages"].state == "broken" and here["packages"].text.startswith("without no-such-package: ")
    assert here["extra tune"].state == "ok" and "extra onnx" not in here
    told(code=1)
    lines[:] = ["torch>=99.1", *lines[1:3]]
    assert found()["packages"].text.startswith(f"without torch {metadata.version('torch')} (older than 99.1): ")
    monkeypatch.setattr(doctor, "_lacks", lambda name, oldest: name)
    assert found()["extra tune"].text == 'pip install "bespoke-fl[tune]" would give bespoke tune (it lacks optuna)'


def test_a_source_tree_without_metadata(monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", none)
    here = found()
    assert here["packages"].state == "missing" and not any(name.startswith("extra") for name in here)


def test_every_extra_says_what_it_gives():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["name"] == doctor.PACKAGE
    assert doctor.GIVES.keys() == project["optional-dependencies"].keys() - {"dev"}


def test_folders_that_cannot_be_written(monkeypatch, tmp_path):
    def refused(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    here = found()
    assert here["this folder"].state == "missing" and here["temporary files"].state == "broken"
    assert here["this folder"].text.startswith(f"{tmp_path} cannot be written (Permission denied): ")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert found()["data"].state == "missing"
    told(code=1)


def test_a_working_folder_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert found()["this folder"].state == "missing"
