"""Checkpoints: saved whole, verified when read, and skipped when damaged."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from small_runs import assert_same_result, command, experiment, stored, write

import bespoke
from bespoke.clients import StateStore
from bespoke.clients.states import KINDS
from bespoke.core import tree
from bespoke.errors import UserError
from bespoke.runs.checkpoint import Checkpoint, load_newest, save

OFFSETS = {"rounds.jsonl": 120, "clients.jsonl": 0, "timing.jsonl": 7}


def equal(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(a[n], b[n]) for n in a
    )


def written(folder, clients, kind="device"):
    """States by client, in files of their own; returns what a manifest says of them."""
    store = StateStore(kind, "cpu")
    store.open(folder, owner="cafe")
    if clients:
        store.put(list(clients), tree.stack(list(clients.values())))
    return store.flush()


def a_server(number):
    return {"model": {"fc.weight": torch.full((2, 3), float(number)), "fc.bias": torch.tensor(0.1)}}


def a_state(client):
    return {"state": {"v": torch.arange(3.0) + client}, "moments": {}}


def saved(folder, *rounds):
    for number in rounds:
        states = written(folder, {c: a_state(c) for c in (0, 3)})
        save(folder, Checkpoint(number, a_server(number), states, OFFSETS), "cafe")
    return folder


STATES = {
    "empty states": ({"model": {"w": torch.zeros(2)}}, {0: {"state": {}, "moments": {}}}),
    "empty server": ({}, {4: {"state": {"model": {"w": torch.ones(2, 2)}}, "moments": {}}}),
    "nothing at all": ({}, {}),
    "nobody took part": ({"model": {"w": torch.zeros(2)}}, {}),
    "empty branches": ({"a": {"b": {}}, "c": {"d": torch.ones(1), "e": {}}}, {1: {"state": {"x": {}}, "moments": {}}}),
    "0-d and integer leaves": (
        {"t": torch.tensor(3), "on": torch.tensor(True), "half": torch.tensor(1.5, dtype=torch.float16)},
        {7: {"state": {"n": torch.tensor(2**40), "u": torch.tensor([1, 2], dtype=torch.uint8)}, "moments": {}}},
    ),
    "float64 and bfloat16": (
        {"d": torch.tensor([0.1], dtype=torch.float64), "b": torch.tensor([0.1], dtype=torch.bfloat16)},
        {},
    ),
    "leaves without elements": ({"none": torch.empty(0, 3)}, {0: {"state": {"none": torch.empty(0)}, "moments": {}}}),
    "not contiguous": ({"w": torch.arange(6.0).reshape(2, 3).T}, {}),
    "not finite": ({"w": torch.tensor([float("nan"), float("inf")]).nan_to_num(nan=float("inf"))}, {}),
    "shared memory": ({"a": (shared := torch.ones(3)), "b": shared, "c": shared[1:]}, {}),
    "moments": (
        {"m": torch.ones(1)},
        {
            c: {"state": {"h": torch.ones(2) * c}, "moments": {"0": {"m": {"h": torch.ones(2)}, "t": torch.tensor(c)}}}
            for c in (2, 10, 1)
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STATES)
def test_what_is_saved_is_loaded(name, kind, tmp_path):
    server, clients = STATES[name]
    save(tmp_path, Checkpoint(12, server, written(tmp_path, clients, kind), OFFSETS), "cafe")
    found, damaged = load_newest(tmp_path)
    assert not damaged
    assert (found.round, found.offsets) == (12, OFFSETS)
    assert equal(found.server, server)
    for reader in KINDS:
        states = stored(tmp_path, found.states, reader)
        assert states.keys() == clients.keys()
        assert all(equal(states[c], clients[c]) for c in clients)


def test_what_is_loaded_can_be_changed_without_changing_the_rest(tmp_path):
    saved(tmp_path, 1)
    found, _ = load_newest(tmp_path)
    found.server["model"]["fc.weight"].zero_()
    assert found.server["model"]["fc.bias"] == 0.1


def test_names_keep_their_order(tmp_path):
    server = {"z": torch.ones(1), "b": {"y": torch.ones(1), "x": torch.ones(1)}, "a": torch.ones(1)}
    save(tmp_path, Checkpoint(1, server, [], OFFSETS), "cafe")
    found, _ = load_newest(tmp_path)
    assert list(tree.flatten(found.server)) == ["z", "b/y", "b/x", "a"]


def test_a_folder_without_checkpoints(tmp_path):
    assert load_newest(tmp_path / "none") == (None, [])


def test_the_manifest_is_plain_json(tmp_path):
    saved(tmp_path, 1)
    manifest = json.loads((tmp_path / "000001.json").read_text())
    assert manifest.keys() == {
        "round",
        "experiment",
        "tensors",
        "states",
        "offsets",
        "sums",
        "recent",
        "names",
        "manifest",
    }
    assert (manifest["round"], manifest["experiment"], manifest["offsets"]) == (1, "cafe", OFFSETS)
    assert [entry["file"] for entry in manifest["states"]] == ["states-000001.safetensors"]


# --- which are kept -----------------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def files(*rounds, states):
    """The names of checkpoints of these rounds and of states with these numbers."""
    checkpoints = [f"{number:06d}.{suffix}" for number in rounds for suffix in ("json", "safetensors")]
    return checkpoints + [f"states-{number:06d}.safetensors" for number in states]


def test_the_last_two_are_kept(tmp_path):
    saved(tmp_path, 1, 2, 9, 10, 11)
    assert names(tmp_path) == files(10, 11, states=(4, 5))
    assert load_newest(tmp_path)[0].round == 11


def test_a_new_checkpoint_is_never_removed_for_the_sake_of_damaged_ones_ahead_of_it(tmp_path):
    saved(tmp_path, 10, 20)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"damaged")
    assert load_newest(tmp_path)[0] is None
    saved(tmp_path, 4)  # the run has started over
    assert load_newest(tmp_path)[0].round == 4
    saved(tmp_path, 8)
    assert names(tmp_path) == files(4, 8, states=(3, 4))


def test_tensors_whose_manifest_was_never_written_are_no_checkpoint(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "000003.safetensors").write_bytes((tmp_path / "000002.safetensors").read_bytes())
    found, damaged = load_newest(tmp_path)
    assert found.round == 2 and not damaged
    saved(tmp_path, 4)
    assert names(tmp_path) == files(2, 4, states=(2, 3))


def test_states_are_kept_as_long_as_a_checkpoint_needs_them(tmp_path):
    store = StateStore("disk", "cpu")
    store.open(tmp_path)

    def at(number, *clients):
        store.put(clients, tree.stack([a_state(c) for c in clients]))
        save(tmp_path, Checkpoint(number, a_server(number), store.flush(), OFFSETS), "cafe")

    at(1, *range(9))
    at(2, 1)  # little has changed: a file of its own
    assert names(tmp_path) == files(1, 2, states=(1, 2))
    at(3, *range(5))  # the second is merged into the third, then the first as well
    assert names(tmp_path) == files(2, 3, states=(1, 2, 3))
    at(4, 7)
    assert names(tmp_path) == files(3, 4, states=(3, 4))
    assert stored(tmp_path, load_newest(tmp_path)[0].states).keys() == set(range(9))


def test_states_whose_manifest_was_never_written_are_removed_by_the_next(tmp_path):
    saved(tmp_path, 1)
    written(tmp_path, {5: a_state(5)})
    found, damaged = load_newest(tmp_path)
    assert stored(tmp_path, found.states).keys() == {0, 3} and not damaged
    saved(tmp_path, 2)
    assert names(tmp_path) == files(1, 2, states=(1, 3))


def test_temporary_files_are_no_checkpoints(tmp_path):
    saved(tmp_path, 1)
    for name in ("000001.json", "000001.safetensors"):
        (tmp_path / f".{name.replace('1', '5')}.tmp").write_bytes((tmp_path / name).read_bytes()[:20])
    found, damaged = load_newest(tmp_path)
    assert found.round == 1 and not damaged


# --- damage -------------------------------------------------------------------------------------------------------


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place if place >= 0 else len(content) + place] ^= 0x01
    path.write_bytes(content)


DAMAGE = {
    "first byte of the tensors": lambda j, t: flip(t, 0),
    "a byte in the middle of the tensors": lambda j, t: flip(t, t.stat().st_size // 2),
    "last byte of the tensors": lambda j, t: flip(t, -1),
    "tensors cut short": lambda j, t: os.truncate(t, t.stat().st_size - 1),
    "empty tensors": lambda j, t: os.truncate(t, 0),
    "tensors missing": lambda j, t: t.unlink(),
    "tensors of another checkpoint": lambda j, t: t.write_bytes(t.with_stem("000001").read_bytes()),
    **{
        f"{what} of the states": lambda j, t, harm=harm: harm(t.with_name("states-000002.safetensors"))
        for what, harm in {
            "first byte": lambda s: flip(s, 0),
            "a byte in the middle": lambda s: flip(s, s.stat().st_size // 2),
            "last byte": lambda s: flip(s, -1),
            "a last byte missing": lambda s: os.truncate(s, s.stat().st_size - 1),
            "nothing": lambda s: os.truncate(s, 0),
            "no file": lambda s: s.unlink(),
            "another file": lambda s: s.write_bytes(s.with_stem("000002").read_bytes()),
        }.items()
    },
    "a folder for tensors": lambda j, t: (t.unlink(), t.mkdir()),
    "manifest cut short": lambda j, t: os.truncate(j, j.stat().st_size // 2),
    "empty manifest": lambda j, t: os.truncate(j, 0),
    "manifest that is not JSON": lambda j, t: j.write_text("not JSON"),
    "manifest that is not text": lambda j, t: j.write_bytes(b"\xff\xfe\x80"),
    "manifest that is null": lambda j, t: j.write_text("null"),
    "manifest that is a list": lambda j, t: j.write_text("[1, 2]"),
    "manifest that is a number": lambda j, t: j.write_text("7"),
    "empty manifest object": lambda j, t: j.write_text("{}"),
    "another round": lambda j, t: j.write_text(j.read_text().replace('"round": 2', '"round": 3')),
    "other offsets": lambda j, t: j.write_text(j.read_text().replace("120", "121")),
    "manifest missing its checksum": lambda j, t: j.write_text(
        json.dumps({k: v for k, v in json.loads(j.read_text()).items() if k != "manifest"})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(damage, tmp_path):
    saved(tmp_path, 1, 2)
    DAMAGE[damage](tmp_path / "000002.json", tmp_path / "000002.safetensors")
    found, notes = load_newest(tmp_path)
    assert found is not None and found.round == 1
    assert equal(found.server, a_server(1))
    assert len(notes) == 1
    assert str(tmp_path / "000002.json") in notes[0] and "damaged" in notes[0] and "\n" not in notes[0]


def test_a_flip_of_any_byte_of_a_manifest_is_noticed(tmp_path):
    saved(tmp_path, 1)
    path = tmp_path / "000001.json"
    sound = path.read_bytes()
    for place in range(len(sound)):
        flip(path, place)
        found, notes = load_newest(tmp_path)
        assert found is None and len(notes) == 1, f"byte {place} of {sound!r}"
        path.write_bytes(sound)
    assert load_newest(tmp_path)[0] is not None


def test_when_all_are_damaged_there_is_none(tmp_path):
    saved(tmp_path, 1, 2)
    for path in tmp_path.glob("*.json"):
        flip(path, 5)
    found, notes = load_newest(tmp_path)
    assert found is None
    assert [("000002" in n, "000001" in n) for n in notes] == [(True, False), (False, True)]


# --- in a run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six rounds, uninterrupted."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    bespoke.run(experiment("ditto", rounds=6, evaluation={"every": 2}), folder, checkpoint_every=2)
    return folder


def half_way(tmp_path):
    """The same run after its fourth round, with the path of its experiment."""
    path = write(tmp_path / "x.toml", algorithm={"name": "ditto"}, training={"rounds": 6}, evaluation={"every": 2})
    done = []
    bespoke.run(
        experiment("ditto", rounds=6, evaluation={"every": 2}),
        tmp_path / "run",
        checkpoint_every=2,
        callbacks=[lambda event: done.append(event.round)],
        stop=lambda: len(done) == 3,
    )
    assert max(path.name for path in (tmp_path / "run" / "checkpoints").glob("*.json")) == "000004.json"
    return path, tmp_path / "run"


@pytest.mark.parametrize("name", ["000004.json", "000004.safetensors", "states-000002.safetensors"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(name, tmp_path, finished):
    path, folder = half_way(tmp_path)
    flip(folder / "checkpoints" / name, 40)
    done = command("run", path, "--out", folder, "--resume", "--checkpoint-every", 2)
    assert done.code == 0, done.err
    assert f"note: checkpoint {folder / 'checkpoints' / '000004.json'} is damaged" in done.err
    assert "started again" not in done.err
    assert "damaged" in json.loads((folder / "environment.json").read_text())["notes"][0]
    assert_same_result(folder, finished)


def test_a_run_without_a_sound_checkpoint_starts_over_and_says_so(tmp_path, finished):
    path, folder = half_way(tmp_path)
    for file in (folder / "checkpoints").glob("*.safetensors"):
        flip(file, 40)
    done = command("run", path, "--out", folder, "--resume", "--checkpoint-every", 2)
    assert done.code == 0, done.err
    assert done.err.count("is damaged") == 2
    assert f"note: {folder} holds no intact checkpoint: started again from round 1" in done.err
    assert_same_result(folder, finished)


def test_a_run_that_was_cut_before_its_first_checkpoint_starts_over_and_says_so(tmp_path, finished):
    path, folder = half_way(tmp_path)
    for file in (folder / "checkpoints").iterdir():
        file.unlink()
    done = command("run", path, "--out", folder, "--resume", "--checkpoint-every", 2)
    assert "holds no intact checkpoint: started again from round 1" in done.err
    assert_same_result(folder, finished)


def test_records_shorter_than_the_checkpoint_says_are_refused(tmp_path):
    path, folder = half_way(tmp_path)
    os.truncate(folder / "rounds.jsonl", 10)
    sentence = command("run", path, "--out", folder, "--resume").sentence
    assert str(folder / "rounds.jsonl") in sentence and "does not fit its checkpoint" in sentence


def test_no_room_for_a_checkpoint_leaves_the_ones_before(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"states-000003.safetensors: No space left on device; make room"):
        saved(tmp_path, 3)
    with pytest.raises(UserError, match=r"/000003.safetensors: No space left on device; make room"):
        save(tmp_path, Checkpoint(3, a_server(3), [], OFFSETS), "cafe")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nothing_is_ever_unpickled():
    sources = list(Path(bespoke.__file__).parent.rglob("*.py"))
    assert sources
    for path in sources:
        found = re.findall(r"import pickle|allow_pickle=True|(?<!safetensors\.)torch\.load\(", path.read_text())
        assert not found, f"{path}: {found}"
