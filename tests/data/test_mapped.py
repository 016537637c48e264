"""Rows too many for memory: they stay in files, and a run on them is the run on the same rows in memory."""

import itertools
import mmap
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bespoke
from bespoke.data import from_arrays, from_csv, from_image_folder, from_parquet, mapped
from bespoke.data.settings import DataSettings
from bespoke.data.sources import built_in, tables
from bespoke.errors import UserError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A machine without memory for rows."""
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "home"))
    monkeypatch.setattr(mapped, "SHARE", 1e15)
    monkeypatch.setattr(mapped, "SMALL", 0)
    return tmp_path


def in_a_file(values):
    """Return whether the system maps a tensor's memory from a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        first, last = (int(each, 16) for each in span.split("-"))
        if first <= values.data_ptr() < last:
            return inode != "0"
    raise AssertionError("it is nowhere")


LIMITED = """
import resource, sys
import numpy as np
import torch
import bespoke
from bespoke.runs import identity

identity.THREADS = 1  # each takes some 30 MB
x = np.load(sys.argv[1], mmap_mode="r")
rows = len(x) // 4
clients = {str(i): (x[i * rows : (i + 1) * rows], np.arange(rows) % 2) for i in range(4)}
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(x.shape[1], 2))
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 3 * x.nbytes // 4, -1))  # of memory that is no file's
options = {"rounds": 1, "batch": 20, "backend": "loop", "device": "cpu"}
print(len(bespoke.federate(clients, model, "1", **options).models))
try:
    np.ones_like(x)
except MemoryError:
    print("and no room for a copy")
"""


def test_a_run_needs_less_memory_than_its_rows(tmp_path):
    path = tmp_path / "x.npy"
    np.lib.format.open_memmap(path, "w+", np.float32, (800, 2**16))[::7, :3] = 1.0  # 200 MiB, mostly holes
    done = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["4", "and no room for a copy"], done.stderr


def run(x, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))
    clients = {"a": (x[:16], Y[:16]), "b": (x[16:], Y[16:])}
    return bespoke.federate(clients, model, "1", rounds=2, batch=4, device="cpu", backend="loop", **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_memory_mapped_arrays_give_the_same_run(dtype, home, monkeypatch):
    np.save(home / "x.npy", X.astype(dtype))
    x = np.load(home / "x.npy", mmap_mode="r")
    steps = [bespoke.data.Normalise((0.5,), (2.0,))]
    there = run(x, transform=steps)
    monkeypatch.setattr(mapped, "SHARE", 4)
    here = run(X.astype(dtype), transform=steps)
    assert in_a_file(there.pool.x) and not in_a_file(here.pool.x)
    assert there.experiment.hash() == here.experiment.hash()
    assert all(map(torch.equal, bespoke.tree.leaves(there.server), bespoke.tree.leaves(here.server)))


def test_parts_of_one_file_are_not_copied_and_others_are(home):
    np.save(home / "x.npy", X)
    np.save(home / "other.npy", X)
    x, other = (np.load(home / name, mmap_mode="r") for name in ("x.npy", "other.npy"))
    pool = from_arrays({"a": (x[:16], Y[:16]), "b": (x[16:], Y[16:])})
    assert pool.x.data_ptr() == x.ctypes.data and torch.equal(pool.x, torch.tensor(X))
    for odd in ({"a": (x, Y), "b": (other, Y)}, {"a": (x[16:], Y[16:]), "b": (x[:16], Y[:16])}):
        pool = from_arrays(odd)
        assert in_a_file(pool.x)
        assert torch.equal(pool.x, torch.tensor(np.concatenate([values for values, _ in odd.values()])))
    assert list((home / "home").iterdir()) == []  # the file has no name


def test_files_that_are_mapped_side_by_side_are_two_files(home):
    for i in range(20):
        (home / str(i)).write_bytes(np.full(mmap.PAGESIZE, i, np.uint8).tobytes())
    found = [np.memmap(home / str(i), np.uint8, "r").reshape(-1, 4) for i in range(20)]
    found.sort(key=lambda each: each.ctypes.data)
    low, high = next(
        pair for pair in itertools.pairwise(found) if np.lib.array_utils.byte_bounds(pair[0])[1] == pair[1].ctypes.data
    )
    whole = mapped.joined([low, high])
    assert np.array_equal(whole, np.concatenate([low, high]))
    assert not np.shares_memory(whole, high)  # which the first file's mapping does not keep


def test_a_joined_array_keeps_its_file_and_cannot_be_written(home):
    np.save(home / "x.npy", X)
    x = np.load(home / "x.npy", mmap_mode="r+")
    whole = mapped.joined([x[3:16], x[16:]])
    assert whole.ctypes.data == x[3:].ctypes.data and mapped.mapping(whole) is mapped.mapping(x)
    del x
    assert np.array_equal(whole, X[3:]) and not whole.flags.writeable


def test_small_files_are_copied_to_memory(tmp_path):
    np.save(tmp_path / "x.npy", X)
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert not in_a_file(from_arrays([(x[20:], Y[20:]), (x[:20], Y[:20])]).x)


def test_rows_without_a_number_are_found_in_a_file(home, monkeypatch):
    monkeypatch.setattr(mapped, "PIECE", 24)  # two rows
    x = X.copy()
    x[33, 1] = np.nan
    np.save(home / "x.npy", x)
    x = np.load(home / "x.npy", mmap_mode="r")
    with pytest.raises(UserError, match=r"client 'b' has NaN"):
        from_arrays({"a": (x[:16], Y[:16]), "b": (x[16:], Y[16:])})


# --- readers --------------------------------------------------------------------------------------------------------


def compared(read, home, monkeypatch):
    """Return what is read by a machine without memory for rows, which must be what others read."""
    small = read()
    monkeypatch.setattr(mapped, "SHARE", 4)
    large = read()
    assert list(small) == list(large) and small.contract == large.contract and small.notes == large.notes
    for name in small:
        assert mapped.mapping(small[name][0]) and not mapped.mapping(large[name][0])
        assert np.array_equal(small[name][0], large[name][0]) and np.array_equal(small[name][1], large[name][1])
    parts = [x for x, _ in small.values()]
    assert from_arrays(small).x.data_ptr() == parts[0].ctypes.data  # one file, used as it is
    return small


def lines(rows):
    return [f"{i}.25,{'FM'[i % 2]},{i // 2},{'yes' if i % 3 else 'no'},{i % 2}" for i in rows]


@pytest.mark.parametrize("client", [None, "ward"])
def test_csv_files(client, home, monkeypatch):
    for name, rows in (("a", range(5000)), ("b", range(5000, 5100))):
        (home / f"{name}.csv").write_text("\n".join(["age,sex,n,ill,ward", *lines(rows)]))
    found = compared(lambda: from_csv(home / "*.csv", label="ill", client=client), home, monkeypatch)
    assert list(found) == (["0", "1"] if client else ["a", "b"])
    x = found["1" if client else "b"][0]
    assert x[-1].tolist() == [5099.25, 0.0, 1.0, 2549.0, *([] if client else [1.0])]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_table_takes_the_room_of_its_rows(end, tmp_path, monkeypatch):
    grids, cell = [], "0." + 50 * "1"
    monkeypatch.setattr(tables, "PIECE", 7)  # bytes, so that some end inside a line's end
    monkeypatch.setattr(tables, "Grid", lambda *args: grids.append(mapped.Grid(*args)) or grids[-1])
    (tmp_path / "a.csv").write_bytes(end.join(["a,b,y", *[f"{cell},{i},{i % 2}" for i in range(20)]]).encode())
    assert len(from_csv(tmp_path / "a.csv", label="y")["a"][0]) == 20 == grids[0].rows


def test_a_word_in_a_later_block_of_a_large_file(home):
    (home / "a.csv").write_text("\n".join(["age,sex,n,ill,ward", *lines(range(5000)), "old,F,1,no,1"]))
    with pytest.raises(UserError, match=r"number '0.25' \(line 2 of .*a.csv\) and the word 'old' \(line 5002 of"):
        from_csv(home / "a.csv", label="ill")
    with pytest.raises(UserError, match=r"column 'n' has no value in line 5002 of"):
        (home / "a.csv").write_text("\n".join(["age,sex,n,ill,ward", *lines(range(5000)), "1,F,,no,1"]))
        from_csv(home / "a.csv", label="ill")


def test_parquet_files(home, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = 70_000  # more than are read at once
    table = {"v": np.arange(rows) / 2, "w": np.where(np.arange(rows) % 3, "x", "y"), "ill": np.arange(rows) % 2}
    parquet.write_table(arrow.table(table), home / "a.parquet")
    found = compared(lambda: from_parquet(home / "*.parquet", label="ill"), home, monkeypatch)
    assert np.array_equal(found["a"][0][:, 0], np.arange(rows, dtype=np.float32) / 2)
    assert np.array_equal(found["a"][0][:, 1], np.arange(rows) % 3 > 0)


def test_columns_of_a_parquet_file_that_are_left_out_do_not_count(home, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {name: np.arange(1000) % 2 for name in ("v", "y", *map(str, range(98)))}
    parquet.write_table(arrow.table(columns), home / "a.parquet")
    monkeypatch.setattr(mapped, "SHARE", 4)
    monkeypatch.setattr(mapped.memory, "free", lambda: 80_000.0)  # bytes, of which a quarter holds 2,500 numbers
    grids = []
    monkeypatch.setattr(tables, "Grid", lambda *args: grids.append(args) or mapped.Grid(*args))
    for features in (["v"], []):
        from_parquet(home / "a.parquet", label="y", features=features)
    assert grids == [(2, 1000, False), (100, 1000, True)]


def test_pictures(home, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    for client in "ab":
        for label in ("clear", "shadow"):
            (home / f"scans/{client}/{label}").mkdir(parents=True)
            for i in range(3):
                pixels = RNG.integers(0, 256, (8, 8, 3), np.uint8)
                image.fromarray(pixels).save(home / f"scans/{client}/{label}/{i}.png")
    found = compared(lambda: from_image_folder(home / "scans"), home, monkeypatch)
    assert found["b"][0].shape == (6, 3, 8, 8)


def test_archives(home):
    for name, rows in (("a", slice(0, 16)), ("b", slice(16, 40))):
        np.savez(home / f"{name}.npz", x=X[rows], y=Y[rows], x_test=X[:4], y_test=Y[:4])
    found = built_in.files(np.random.default_rng(0), str(home / "*.npz"), 0, 0.2)
    assert mapped.mapping(found.x) and found.owner_names == ("a", "b") and found.official_test.sum() == 8
    assert np.array_equal(found.x, np.concatenate([X[:16], X[:4], X[16:], X[:4]]))


def test_the_classes_that_are_kept_stay_in_a_file(home):
    for name in "ab":
        np.savez(home / f"{name}.npz", x=X, y=np.arange(40) % 3)
    settings = DataSettings("files", str(home / "*.npz"), classes=(2, 0))
    pool = bespoke.data.federate_data(settings, 0)
    assert in_a_file(pool.x) and torch.equal(pool.x, torch.tensor(X[np.arange(40) % 3 != 1]).repeat(2, 1))


def test_a_data_folder_that_cannot_be_made_is_told_in_a_sentence(home, monkeypatch):
    (home / "home").write_text("a file where the data folder should be")
    for name in "ab":
        np.save(home / f"{name}.npy", X)
    with pytest.raises(UserError, match=r"cannot write rows that are too many for memory below .*BESPOKE_DATA"):
        from_arrays([(np.load(home / f"{name}.npy", mmap_mode="r"), Y) for name in "ab"])


def test_a_write_that_ends_early_is_told_in_a_sentence(home):
    grid, limits = mapped.Grid(1, 100_000, mapped=True), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as on a disk that is full beyond
    try:
        with pytest.raises(UserError, match=r"cannot write rows .*make room, or set BESPOKE_DATA"):
            grid.put(0, 0, np.ones(100_000))
            grid.column(0, 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("in_file", [True, False])
def test_rows_beyond_a_column_s_end_are_refused(in_file, home):
    grid = mapped.Grid(2, 5, in_file)
    grid.put(1, 0, np.zeros(5))
    with pytest.raises(ValueError, match="more than the 5 rows"):
        grid.put(0, 3, np.ones(3))
    assert grid.column(1, 5).tolist() == [0.0] * 5
