"""The folder of data sets: written whole or not at all, found again, one writer at a time."""

import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from bespoke.data import home
from bespoke.data.examples import Examples
from bespoke.data.sources import store
from bespoke.data.sources.content import hashes
from bespoke.errors import UserError

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def some(n=6):
    x = RNG.integers(0, 256, (n, 1, 4, 4), dtype=np.uint8)
    return Examples(
        x,
        np.arange(n) % 3,
        3,
        official_test=np.arange(n) >= n - 2,
        owner=np.arange(n) % 2,
        owner_names=("a", "é"),
        domain=np.zeros(n, np.int64),
        domain_names=("room",),
    )


def keep(name="set", examples=None, **changes):
    examples = examples or some()
    known = {"source": "a file", "verified": True, "official_order": True} | changes
    with store.locked(name):
        return examples, store.write(name, examples, hashes(examples), **known)


# --- hashes ---------------------------------------------------------------------------------------------------------


def plain_hash(x, y, marks=None, ordered=False):
    """The definition, written again."""
    digests = []
    for i in range(len(y)):
        record = x[i].tobytes() + int(y[i]).to_bytes(8, "little", signed=True)
        for mark in marks[i] if marks else ():
            record += b"\0" + mark.encode()
        digests.append(hashlib.sha256(record).digest())
    return hashlib.sha256(b"".join(digests if ordered else sorted(digests))).hexdigest()


def test_content_hash_is_that_of_its_definition():
    x, y = RNG.integers(0, 256, (9, 3, 5), dtype=np.uint8), RNG.integers(0, 4, 9)
    found = hashes(Examples(x, y, 4))
    assert found.content == plain_hash(x, y) and found.order == plain_hash(x, y, ordered=True)
    marked = Examples(
        x, y, 4, owner=np.arange(9) % 2, owner_names=("a", "b"), domain=y, domain_names=("0", "1", "2", "3")
    )
    marks = [("ab"[i % 2], str(y[i])) for i in range(9)]
    assert hashes(marked).content == plain_hash(x, y, marks)


def test_content_hash_forgets_the_order_and_nothing_else():
    whole = some()
    order = RNG.permutation(len(whole.y))
    moved = replace(whole, x=whole.x[order], y=whole.y[order], owner=whole.owner[order])
    assert hashes(moved).content == hashes(whole).content and hashes(moved).order != hashes(whole).order
    pixel = whole.x.copy()
    pixel[3, 0, 2, 2] ^= 1
    others = [
        replace(whole, x=pixel),
        replace(whole, y=np.roll(whole.y, 1)),
        replace(whole, owner=1 - whole.owner),
        replace(whole, domain_names=("hall",)),
        replace(whole, x=whole.x[1:], y=whole.y[1:], owner=whole.owner[1:], domain=whole.domain[1:]),
    ]
    assert len({hashes(other).content for other in [whole, *others]}) == 6


# --- the folder -----------------------------------------------------------------------------------------------------


def test_the_folder_is_the_variable_or_the_users_cache(monkeypatch, tmp_path):
    assert home.root() == tmp_path / "data"
    monkeypatch.setenv("BESPOKE_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert home.root() == tmp_path / "xdg" / "bespoke"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home.root() == tmp_path / ".cache" / "bespoke"


def test_what_is_written_is_found_again(folder):
    written, manifest = keep()
    found = store.load("set")
    for field in ("x", "y", "official_test", "owner", "domain"):
        array = getattr(found, field)
        assert np.array_equal(array, getattr(written, field)) and isinstance(array, np.memmap)
        assert array.dtype == getattr(written, field).dtype
    assert (found.num_classes, found.owner_names, found.domain_names) == (3, ("a", "é"), ("room",))
    assert manifest == store.manifest("set")
    assert manifest["content_hash"] == hashes(found).content and manifest["rows"] == 6
    assert manifest["bytes"] == sum(path.stat().st_size for path in (folder / "set").glob("*.npy"))
    assert store.holds("set") and not store.holds("other")
    plain = Examples(written.x, written.y, 3)
    keep("plain", plain)
    assert store.load("plain").owner is None and store.load("plain").official_test is None


def test_a_mapped_array_becomes_a_tensor_without_a_copy_or_a_warning(folder):
    keep()
    before = (folder / "set" / "x.npy").read_bytes()
    x = store.load("set").x
    tensor = torch.from_numpy(x)  # a warning would be an error here
    assert tensor.data_ptr() == x.ctypes.data
    tensor[0] += 1
    assert (folder / "set" / "x.npy").read_bytes() == before  # the map is private


def test_arrays_that_are_views_or_larger_than_a_chunk(folder, monkeypatch):
    monkeypatch.setattr(store, "_CHUNK", 100)
    x = RNG.integers(0, 256, (20, 4, 4, 3), dtype=np.uint8)
    keep("view", Examples(x.transpose(0, 3, 1, 2), np.arange(20)[::-1], 20))
    assert np.array_equal(store.load("view").x, x.transpose(0, 3, 1, 2))
    assert store.load("view").y.tolist() == list(range(20))[::-1]


def damage(folder, how):
    if how == "short":
        path = folder / "x.npy"
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "gone":
        (folder / "y.npy").unlink()
    elif how == "swapped":
        np.save(folder / "y.npy", np.arange(6, dtype=np.uint64))
    elif how == "json":
        (folder / "manifest.json").write_text("{")
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))


@pytest.mark.parametrize("how", ["short", "gone", "swapped", "json", "format"])
def test_a_damaged_set_is_told_in_one_sentence(folder, how):
    keep()
    damage(folder / "set", how)
    with pytest.raises(UserError, match=r"the data set in .*set is damaged .*: remove that folder and import it again"):
        store.load("set")


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_nothing(folder, monkeypatch):
    def full(path, pieces):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_whole", full)
        with pytest.raises(
            UserError, match=r"cannot write the data set set below .*No space left on device; make room"
        ):
            keep()
    assert [path.name for path in folder.iterdir()] == [".set.lock"]
    keep()
    assert store.load("set").x.shape == (6, 1, 4, 4)


LIMITED = """
import resource, sys
import numpy as np
from bespoke.data.sources import store
from bespoke.data.sources.content import Hashes
from bespoke.data.examples import Examples
from bespoke.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
rows = Examples(np.zeros((1000, 1, 28, 28), np.uint8), np.zeros(1000, np.int64), 10)
try:
    store.write("big", rows, Hashes("a", "b"), "a file", True, True)
except UserError as error:
    print(error)
"""


def test_a_disk_that_fills_up_is_told_in_one_sentence(folder):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] != 0
    folder.mkdir()
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert "cannot write the data set big" in done.stdout and "File too large; make room, or set" in done.stdout
    assert done.stdout.count("\n") == 1 and list(folder.iterdir()) == []


def test_what_a_killed_process_left_is_cleared_away(folder):
    left = folder / ".set.tmp"
    left.mkdir(parents=True)
    (left / "x.npy").write_bytes(b"half")
    keep()
    assert not left.exists() and store.load("set").num_classes == 3


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "file" / "data"))
    with pytest.raises(UserError, match=r"cannot write .*set BESPOKE_DATA to another folder"), store.locked("set"):
        pass


# --- two at once ----------------------------------------------------------------------------------------------------


def test_the_second_waits_for_the_first():
    waited, order = [], []

    def second():
        with store.locked("set", lambda: waited.append(True)):
            order.append("second")

    with store.locked("set"):
        thread = threading.Thread(target=second)
        thread.start()
        while not waited:
            time.sleep(0.001)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    with store.locked("set", lambda: pytest.fail("nobody holds it")), store.locked("other"):
        pass


IMPORT = """
import sys
from pathlib import Path
from bespoke.data.sources import acquire, catalogue
done = acquire.import_files(catalogue.find("usps"), [Path(sys.argv[1])], sys.argv[2], tell=lambda text: print(text))
print(done["content_hash"])
"""


def test_two_processes_that_import_at_once_agree(folder, tmp_path):
    counts = (1553, 1269, 929, 824, 852, 716, 834, 792, 708, 821)
    y = np.repeat(np.arange(10), counts)
    x = RNG.integers(0, 256, (len(y), 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "u.npz", x=x, y=y)
    trust = plain_hash(x, y)
    command = [sys.executable, "-c", IMPORT, str(tmp_path / "u.npz"), trust]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(output.endswith(f"{trust}\n") for output in outputs)
    assert sum("is already here" in output for output in outputs) == 1
    assert np.array_equal(store.load("usps").x[:, 0], x) and not store.manifest("usps")["verified"]
