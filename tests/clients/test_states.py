"""The store of clients' states: the same answers wherever they are kept, few files, and memory that stays bounded."""

import hashlib
import itertools
import json
import random

import pytest
import safetensors.torch
import torch
from small_runs import experiment, stored

import bespoke
from bespoke.clients import StateStore, states
from bespoke.clients.states import KINDS
from bespoke.core import tree
from bespoke.runs import federation


def a_state(clients, version):
    """States (K, ...) of these clients that say whose and which they are, with leaves of many kinds."""
    own = torch.tensor([1000.0 * c + version for c in clients], dtype=torch.float64)
    return {
        "state": {
            "flag": own % 2 == 0,
            "head": {"weight": own[:, None, None] + torch.arange(6.0).reshape(2, 3), "bias": own.bfloat16()},
            "nothing": {},
        },
        "moments": {"0": {"m": own.float()[:, None], "t": own.long()}},
    }


def same(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    return list(a) == list(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def opened(kind, folder, files=()):
    store = StateStore(kind, "cpu")
    store.open(folder, files)
    return store


@pytest.mark.parametrize("spill", [0, 700, 2**28])
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_gives_back_what_was_put_last(kind, spill, tmp_path, monkeypatch):
    """Against a plain dict: puts, gets, flushes and new starts in any order."""
    monkeypatch.setattr(states, "SPILL", spill)
    monkeypatch.setattr(states, "PIECE", 200)  # bytes: files are written and read in several pieces
    draw, store, last, files = random.Random(5), opened(kind, tmp_path), {}, []
    committed = {}
    for version in range(60):
        clients = draw.sample(range(30), draw.randint(1, 6))
        store.put(clients, a_state(clients, version))
        last |= dict.fromkeys(clients, version)
        if draw.random() < 0.4:
            files, committed = store.flush(), dict(last)
        if draw.random() < 0.1:  # killed: what was not committed is gone
            store, last = opened(draw.choice(KINDS), tmp_path, files), dict(committed)
        assert store.ids() == sorted(last)
        wanted = draw.sample(sorted(last), draw.randint(0, min(5, len(last))) or 1) if last else []
        if wanted:
            expected = tree.concat([a_state([c], last[c]) for c in wanted])
            assert same(store.get(wanted), expected)
        assert all((c in store) == (c in last) for c in range(30))
    assert len(committed) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_given_out_can_be_changed(kind, tmp_path):
    store = opened(kind, tmp_path)
    mine = a_state([1, 2], 0)
    store.put([1, 2], mine)
    for _ in range(2):
        for taken in (mine, store.get([1, 2]), store.get([2])):
            for leaf in tree.leaves(taken):
                leaf.zero_()
        assert same(store.get([1, 2]), a_state([1, 2], 0))
        store.flush()


def test_a_layout_is_kept():
    store = StateStore("device", "cpu")
    store.put([0], {"a": torch.zeros(1, 2), "b": torch.zeros(1)})
    for other in (
        {"a": torch.zeros(1, 2)},
        {"a": torch.zeros(1, 2), "b": torch.zeros(1), "c": torch.zeros(1)},
        {"a": torch.zeros(1, 3), "b": torch.zeros(1)},
        {"a": torch.zeros(1, 2), "b": torch.zeros(1, dtype=torch.int64)},
    ):
        with pytest.raises(ValueError, match="a client's state must keep its names, shapes and types, but '"):
            store.put([1], other)
    assert store.ids() == [0]
    store.put([1], {"b": torch.ones(1), "a": torch.ones(1, 2)})  # in any order
    assert list(store.get([1, 0])) == ["a", "b"]


def test_a_store_without_a_folder_writes_nothing():
    store = StateStore("disk", "cpu")
    store.put([0], {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="before it has a folder"):
        store.flush()


# --- files --------------------------------------------------------------------------------------------------------


def test_a_generation_is_a_safetensors_file(tmp_path):
    store = opened("disk", tmp_path)
    expected = a_state([7, 3], 1)
    store.put([7, 3], expected)
    (entry,) = store.flush()
    path = tmp_path / entry["file"]
    assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    found = safetensors.torch.load_file(path)
    assert found.pop("ids").tolist() == [3, 7]
    assert found.pop("clients/state/nothing/").shape == (2, 0)
    flat = {name: leaf for name, leaf in tree.flatten(expected).items() if not name.endswith("/")}
    assert found.keys() == {f"clients/{name}" for name in flat}
    assert all(torch.equal(found[f"clients/{name}"], leaf.flip(0)) for name, leaf in flat.items())
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + length) % 64 == 0
    names = list(json.loads(path.read_bytes()[8 : 8 + length]))
    assert names[1:3] == ["clients/state/flag", "clients/state/head/weight"]  # as in the tree


def rows(folder, files):
    return [len(safetensors.torch.load_file(folder / entry["file"])["ids"]) for entry in files]


@pytest.mark.parametrize("kind", KINDS)
def test_files_stay_few_and_mostly_alive(kind, tmp_path):
    """Each file has more than twice the rows of the next: at most log2(M) + 1 files with less than 2 M rows."""
    draw, store, written, steps, cohort = random.Random(0), opened(kind, tmp_path), 0, 200, 5
    before = set()
    for step in range(steps):
        clients = draw.sample(range(256), cohort)
        store.put(clients, {"v": torch.full((cohort,), step)})
        files = store.flush()
        counts = rows(tmp_path, files)
        assert all(a > 2 * b for a, b in itertools.pairwise(counts))
        assert len(counts) <= 9 and sum(counts) < 2 * 256
        new = [count for entry, count in zip(files, counts, strict=True) if entry["file"] not in before]
        written += sum(new)
        before |= {entry["file"] for entry in files}
    assert len(store.ids()) > 240
    assert written / (steps * cohort) < 8  # how often a state is written again, on average


def test_nothing_is_written_where_nothing_changed(tmp_path):
    store = opened("disk", tmp_path)
    assert store.flush() == []
    store.put([1], {"v": torch.ones(1)})
    files = store.flush()
    assert store.flush() == files == opened("disk", tmp_path, files).flush()
    assert [path.name for path in tmp_path.iterdir()] == ["states-000001.safetensors"]


def test_a_new_start_overwrites_no_file(tmp_path):
    """What a checkpoint names must stay as it is, also where a later file was never named."""
    store = opened("disk", tmp_path)
    store.put([1], {"v": torch.ones(1)})
    files = store.flush()
    store.put([1], {"v": torch.zeros(1)})
    store.flush()
    again = opened("disk", tmp_path, files)
    again.put([2], {"v": torch.ones(1)})
    again.flush()
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["states-000001", "states-000002", "states-000003"]
    assert {c: s["v"].item() for c, s in stored(tmp_path, files).items()} == {1: 1.0}


def test_states_on_disk_are_not_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "SPILL", 4 * 1000)
    store, held = opened("disk", tmp_path), []
    for start in range(0, 100, 5):
        store.put(range(start, start + 5), {"v": torch.ones(5, 100)})  # 400 bytes a client
        held.append(sum(leaf.nbytes for leaf in store._memory.values()))
    assert max(held) <= 3 * 4 * 1000  # twice what is allowed and a cohort, since memory grows by doubling
    assert len(store.ids()) == 100 and torch.equal(store.get(range(100))["v"], torch.ones(100, 100))


# --- in a run -----------------------------------------------------------------------------------------------------


def test_evaluation_in_parts_is_the_whole(monkeypatch):
    spec = experiment("fedper", rounds=2, data={"validation": 0.2, "new_clients": 1})
    whole = list(bespoke.run(spec).folder.clients())
    monkeypatch.setattr(federation, "EVALUATED_AT_ONCE", 4)
    assert list(bespoke.run(spec).folder.clients()) == whole
