"""The commands of ``bespoke data``: what they print, and what they refuse."""

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace

import numpy as np
import official_files as official
import pytest

from bespoke.cli import data
from bespoke.data.examples import Examples
from bespoke.data.sources import catalogue, store
from bespoke.data.sources.catalogue import CATALOGUE
from bespoke.data.sources.content import hashes
from bespoke.data.sources.entry import File
from bespoke.errors import UserError

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def rows(monkeypatch):
    """Six rows, and the entry of MNIST made to fit them."""
    x, y = RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8), np.arange(6, dtype=np.uint8)
    found = hashes(Examples(x[:, None], y.astype(np.int64), 10))
    known = {"content_hash": found.content, "order_hash": found.order}
    entry = replace(CATALOGUE["mnist"], sizes=((4, 2),), counts=(1,) * 6 + (0,) * 4, **known)
    monkeypatch.setitem(CATALOGUE, "mnist", entry)
    return x, y


@pytest.fixture
def run(capsys):
    def call(*words):
        data.app([str(word) for word in words], standalone_mode=False)
        return capsys.readouterr()

    return call


def npz(path, x, y):
    np.savez(path, x_train=x[:4], y_train=y[:4], x_test=x[4:], y_test=y[4:])
    return path


def test_import_of_a_ready_archive_and_of_the_official_files(run, rows, tmp_path, folder):
    x, y = rows
    printed = run("import", "mnist", npz(tmp_path / "mnist.npz", x, y))
    assert printed.out == "mnist: 6 rows, 10 classes, 0.0 MB, verified\n" and printed.err == ""
    again = run("import", "mnist", tmp_path / "mnist.npz")
    assert again.out == printed.out and "is already here" in again.err
    for file in (folder / "mnist").iterdir():
        file.unlink()
    (folder / "mnist").rmdir()
    files = official.mnist_files(tmp_path / "idx", x[:4], y[:4], x[4:], y[4:])
    assert run("import", "mnist", *files).out == printed.out
    assert np.array_equal(store.load("mnist").x[:, 0], x)


def test_import_notes_another_order(run, rows, tmp_path):
    x, y = rows
    order = [1, 0, 2, 3, 4, 5]
    printed = run("import", "mnist", npz(tmp_path / "m.npz", x[order], y[order]))
    assert "the rows of mnist are not in the official order" in printed.err


def test_import_with_trust(run, rows, tmp_path, monkeypatch):
    trust = CATALOGUE["mnist"].content_hash
    monkeypatch.setitem(CATALOGUE, "mnist", replace(CATALOGUE["mnist"], content_hash=None))
    path = npz(tmp_path / "m.npz", *rows)
    with pytest.raises(UserError, match=f"--trust {trust}$"):
        run("import", "mnist", path)
    assert run("import", "mnist", path, "--trust", trust).out.endswith("trusted, not verified\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["import", "minst", "a.npz"], "no data set 'minst' to fetch or import (did you mean 'mnist'?)"),
        (["import", "mnist", "none.npz"], "there is no file none.npz"),
        (["import", "digit5", "a.npz"], "digit5 is made of mnist, svhn, usps, syn_digits, mnist_m: import these"),
        (["fetch", "syn_digits_12k"], "syn_digits_12k cannot be downloaded: it needs an account"),
        (["fetch", "nothing at all"], "no data set 'nothing at all'"),
    ],
)
def test_mistakes(run, words, sentence):
    with pytest.raises(UserError) as caught:
        run(*words)
    assert sentence in str(caught.value)


def test_a_failed_fetch_names_the_file_the_address_and_the_other_way(run, monkeypatch):
    files = (File("a.gz", ("http://127.0.0.1:9/a.gz",)),)
    monkeypatch.setitem(CATALOGUE, "mnist", replace(CATALOGUE["mnist"], files=files))
    with pytest.raises(UserError, match=r"a\.gz from http://127\.0\.0\.1:9/a\.gz: .*bespoke data import mnist FILE"):
        run("fetch", "mnist")


def test_fetch_of_a_union_fetches_what_is_missing_and_makes_it(run, monkeypatch):
    small = Examples(RNG.integers(0, 256, (30, 1, 16, 16), dtype=np.uint8), np.arange(30) % 10, 10)
    for name in ("mnist", "usps"):
        with store.locked(name):
            store.write(name, small, hashes(small), "a test", True, True)
    entry = replace(CATALOGUE["digits4"], parts=("mnist", "usps"), domains=("mnist", "usps"))
    monkeypatch.setitem(CATALOGUE, "digits4", replace(entry, build=lambda parts: two(parts)))
    assert run("fetch", "digits4").out == "digits4: 60 rows, 10 classes, 0.2 MB, verified\n"
    monkeypatch.setitem(CATALOGUE, "audiomnist_wake", replace(CATALOGUE["audiomnist_wake"], parts=("mnist",)))
    assert run("fetch", "audiomnist_wake").out == "audiomnist_wake: built from mnist each time it is used\n"


def two(parts):
    from bespoke.data.sources.unions import resized

    x, y = np.concatenate([resized(p.x) for p in parts]), np.concatenate([p.y for p in parts])
    domain = np.repeat([0, 1], [len(p.y) for p in parts])
    return Examples(x, y, 10, domain=domain, domain_names=("mnist", "usps"))


def test_list_shows_every_set_and_what_is_here(run, rows, tmp_path):
    run("import", "mnist", npz(tmp_path / "mnist.npz", *rows))
    lines = run("list").out.splitlines()
    assert lines[0].split() == ["name", "here", "size", "rows", "classes", "checked", "source"]
    words = {line.split()[0]: line.split() for line in lines[1:]}
    generated = {"gaussian", "synthetic_hierarchy", "synthetic_homogeneous", "random"}
    assert set(words) == {*CATALOGUE, "digits", "files", "csv", "parquet", "hf", "image_folder", *generated}
    assert words["mnist"] == ["mnist", "yes", "0.0", "MB", "6", "10", "verified", "mnist.npz"]
    assert words["svhn"] == ["svhn", "no", "10", "not", "verified", "bespoke", "data", "fetch"]
    assert words["digits"][1] == "yes" and words["digits"][-3:] == ["comes", "with", "bespoke"]
    assert words["digits4"][1] == "no" and "made of mnist, usps" in lines[1 + list(words).index("digits4")]


def test_list_as_json(run, rows, tmp_path):
    run("import", "mnist", npz(tmp_path / "mnist.npz", *rows))
    found = {row["name"]: row for row in json.loads(run("list", "--json").out)}
    assert found["mnist"]["here"] and found["mnist"]["verified"] and found["mnist"]["rows"] == 6
    assert found["mnist"]["content_hash"] == CATALOGUE["mnist"].content_hash and found["mnist"]["source"] == "mnist.npz"
    assert (
        not found["svhn"]["here"] and found["svhn"]["rows"] is None and found["svhn"]["addresses"][0].startswith("http")
    )
    assert found["digits"]["here"] and set(found["digits"]) == set(found["mnist"])


def test_list_escapes_what_could_steer_a_terminal(run, rows, tmp_path):
    run("import", "mnist", npz(tmp_path / "a\x1b[2J.npz", *rows))
    assert "a\\x1b[2J.npz" in run("list").out and "\x1b" not in run("list").out


def test_list_on_a_terminal_is_a_table():
    main, child = pty.openpty()
    code = "from bespoke.cli.data import app; app(['list'], standalone_mode=False)"
    environment = os.environ | {"COLUMNS": "200", "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", code], stdout=child, env=environment, timeout=120, check=True)
    os.close(child)
    shown = b""
    with pytest.raises(OSError, match="Input/output error"):  # the end of a terminal
        while True:
            shown += os.read(main, 65536)
    os.close(main)
    assert done.returncode == 0 and b"\x1b[1m" in shown and b"synthetic_hierarchy" in shown


def test_the_progress_bar_is_of_poochs_form(capsys):
    bar = data._bar("file.gz")
    bar.total = 100
    bar.update(60)
    assert bar.total == 100 and bar.progress.tasks[0].completed == 60
    bar.reset()
    bar.update(100)
    bar.close()
    assert bar.progress.tasks[0].completed == 100 and bar.progress.finished


def test_nothing_heavy_is_imported_for_help():
    code = "import sys; import bespoke.cli.data; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_missing_names_every_part_that_is_not_here():
    assert catalogue.missing("digits4") == ["mnist", "usps", "svhn", "syn_digits_12k"]
    assert catalogue.missing("svhn") == ["svhn"]
