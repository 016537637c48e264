"""Whose data: a run goes on only with the clients, the order and the rows that it began with."""

import json
import shutil

import numpy as np
import pytest
import torch
from small_runs import arrays, assert_same_result, command, experiment, federated, records

import bespoke
from bespoke.core.data import FederatedData, Rows
from bespoke.errors import UserError
from bespoke.records import FEDERATION, RunFolder
from bespoke.runs import identity


def hospitals(folder, names, rows=24):
    """A file for each hospital; what is in it depends on its name alone."""
    folder.mkdir(exist_ok=True)
    for name in names:
        draw = np.random.default_rng(ord(name))
        y = np.arange(rows) % 3
        x = draw.normal(size=(rows, 4)) + 3 * np.eye(4)[(y + ord(name)) % 3]
        np.savez(folder / f"hospital {name}.npz", x=x.astype(np.float32), y=y)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with hospitals B to E in data/, and in run/ their run of twenty rounds of FedRep."""
    root = tmp_path_factory.mktemp("hospitals")
    hospitals(root / "data", "BCDE")
    data = {"name": "files", "path": "data/*.npz", "partition": "natural"}
    text = bespoke.runs.experiment.to_toml(
        {
            "seed": 0,
            "data": data,
            "model": {"name": "linear"},
            "algorithm": {"name": "fedrep"},
            "training": {"rounds": 20, "batch": 8, "lr": 0.1, "rate": 0.5},
        }
    )
    (root / "x.toml").write_text(text)
    assert command("run", root / "x.toml", "--out", root / "run").code == 0
    return root


@pytest.fixture
def trained(made, tmp_path):
    """The arguments that resume a copy of that run."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return ("run", tmp_path / "x.toml", "--out", tmp_path / "run", "--resume", "--set", "training.rounds=21")


def test_a_new_hospital_is_refused_by_name(trained, tmp_path):
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".bespoke.lock"}
    hospitals(tmp_path / "data", "A")
    sentence = command(*trained).sentence
    assert "the data are not those that the run in" in sentence and "client 'hospital A' is new" in sentence
    assert {p: p.read_bytes() for p in before} == before
    (tmp_path / "data" / "hospital A.npz").unlink()
    assert command(*trained).code == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: (data / "hospital D.npz").unlink(), "client 'hospital D' is gone"),
        (lambda data: (data / "hospital E.npz").rename(data / "hospital A.npz"), "client 'hospital A' is new"),
        (lambda data: hospitals(data, "C", rows=23), "client 'hospital C' has other rows"),
        (lambda data: one_number(data / "hospital C.npz", "x"), "client 'hospital C' has other rows"),
        (lambda data: one_number(data / "hospital E.npz", "y"), "client 'hospital E' has other rows"),
        (lambda data: swapped(data / "hospital B.npz", data / "hospital C.npz"), "client 'hospital B' has other rows"),
    ],
)
def test_other_data_are_refused_with_the_first_client_that_differs(change, words, trained, tmp_path):
    before = records(tmp_path / "run")
    change(tmp_path / "data")
    assert words in command(*trained).sentence
    assert records(tmp_path / "run") == before


def one_number(path, name):
    with np.load(path) as old:
        new = dict(old)
    new[name].flat[5] = 1 - new[name].flat[5] % 2
    np.savez(path, **new)


def swapped(a, b):
    a.rename(a.with_suffix(".tmp"))
    b.rename(a)
    a.with_suffix(".tmp").rename(b)


def test_another_order_is_refused(tmp_path):
    told = identity.described(a_pool())
    run = RunFolder.create(tmp_path)
    run.write_json(FEDERATION, told)
    assert identity.compare(run, told) == []
    order = [1, 0, 2]
    with pytest.raises(UserError, match=r"client '0' is at another place \(0 there, 1 here\)"):
        identity.compare(run, identity.described(a_pool(order)))


def test_the_description_is_written_once(trained, tmp_path):
    path = tmp_path / "run" / "federation.json"
    told = json.loads(path.read_text())
    assert told["names"] == [f"hospital {name}" for name in "BCDE"] and len(set(told["content"])) == 4
    path.write_text(json.dumps(told | {"mine": 1}))
    assert command(*trained).code == 0
    assert json.loads(path.read_text()) == told | {"mine": 1}


def test_runs_from_before_there_were_hashes_go_on_with_a_note(trained, tmp_path):
    path = tmp_path / "run" / "federation.json"
    told = json.loads(path.read_text())
    del told["content"]
    path.write_text(json.dumps(told))
    assert "note: " in (done := command(*trained)).err and "only their names and numbers were compared" in done.err
    hospitals(tmp_path / "data", "C", rows=23)
    assert "client 'hospital C' has other rows" in command(*trained).sentence
    path.unlink()
    assert "federation.json is missing, so the data could not be compared" in command(*trained).err


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"names": [1]}', '{"names": ["a"], "train": 3}', "[" * 5000], ids=range(6)
)
def test_a_damaged_description_is_refused(text, trained, tmp_path):
    (tmp_path / "run" / "federation.json").write_text(text)
    assert "federation.json" in command(*trained).sentence


def test_a_run_cut_off_before_its_description_starts_over_without_a_word(tmp_path):
    bespoke.run(experiment(), tmp_path / "whole")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_bytes((tmp_path / "whole" / "config.toml").read_bytes())
    run = bespoke.run(experiment(), tmp_path / "run", resume=True)
    assert not [note for note in run.notes if "federation" in note]
    assert_same_result(tmp_path / "run", tmp_path / "whole")


def test_one_s_own_arrays_go_on_with_the_same_ones(tmp_path):
    federated(arrays(), out=tmp_path)
    federated(arrays(), out=tmp_path, resume=True, rounds=3)
    with pytest.raises(UserError, match="client '0' has other rows"):
        federated(arrays(seed=1), out=tmp_path, resume=True)


# --- the hashes ---------------------------------------------------------------------------------------------------


def a_pool(order=(0, 1, 2), **changes):
    x = torch.arange(40.0).reshape(10, 4)
    rows = {
        "train": ([0, 1], [2], [5, 6, 7]),
        "val": ([], [3], [8]),
        "test": ([4], [], [9]),
    } | changes.pop("rows", {})
    lists = {name: Rows.of([part[i] for i in order]) for name, part in rows.items()}
    values = {"x": x, "y": torch.arange(10) % 3, "extra": {"level": torch.arange(3)}} | changes
    return FederatedData(num_classes=3, num_clients=3, names=tuple(str(i) for i in order), **lists, **values)


def test_a_hash_is_of_one_client_s_rows_in_their_order():
    plain = identity.content_hashes(a_pool())
    assert len(set(plain)) == 3 and plain == identity.content_hashes(a_pool())
    other = {
        "order": a_pool(rows={"train": ([1, 0], [2], [5, 6, 7])}),
        "split": a_pool(rows={"train": ([0], [2], [5, 6, 7]), "val": ([1], [3], [8])}),
        "constants": a_pool(extra={"level": torch.tensor([9, 1, 2])}),
        "label": a_pool(y=(torch.arange(10) % 3).index_fill(0, torch.tensor(4), 0)),
    }
    for what, pool in other.items():
        found = identity.content_hashes(pool)
        assert found[0] != plain[0] and found[1:] == plain[1:], what
    assert not set(plain) & set(identity.content_hashes(a_pool(x=torch.arange(40.0).double().reshape(10, 4))))


@pytest.mark.parametrize("piece", [1, 40, 100])
def test_the_size_of_a_piece_changes_nothing(piece, monkeypatch):
    whole = identity.content_hashes(a_pool())
    monkeypatch.setattr(identity, "PIECE", piece)
    assert identity.content_hashes(a_pool()) == whole


def test_an_empty_federation_s_rows_and_any_type_have_a_hash():
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.int64):
        assert len(set(identity.content_hashes(a_pool(x=torch.arange(40).reshape(10, 2, 2).to(dtype))))) == 3
    none = {"train": ([], [], []), "val": ([], [], []), "test": ([], [], [])}
    assert len(identity.content_hashes(a_pool(rows=none))) == 3


@pytest.mark.parametrize("threads", [2, 5, 8])
def test_threads_do_not_change_the_hashes(threads, monkeypatch):
    draw = np.random.default_rng(0)
    lists = [np.arange(start, stop) for start, stop in ((0, 7), (7, 8), (8, 8), (8, 31), (31, 40), (40, 60))]
    x, y = torch.from_numpy(draw.normal(size=(60, 3)).astype(np.float32)), torch.arange(60) % 3
    train, none = Rows.of(lists), Rows.of([[]] * 6)
    pool = FederatedData(x, y, train, none, Rows.of([rows[:1] for rows in lists]), 3, 6, tuple("abcdef"))
    monkeypatch.setattr(identity, "PIECE", 100)
    found = []
    for number in (1, threads):
        monkeypatch.setattr(identity, "cores", lambda number=number: number)
        found.append(identity.content_hashes(pool))
    assert found[0] == found[1] and len(set(found[0])) == 6


def test_classes_are_counted_by_client_on_train_rows():
    x, y = torch.zeros(7, 2), torch.tensor([0, 0, 2, 1, 1, 1, 0])
    train, rest, none = Rows.of([[0, 1, 2], [3, 4], []]), Rows.of([[5], [6], []]), Rows.of([[]] * 3)
    told = identity.described(FederatedData(x, y, train, rest, none, 3, 3, ("a", "b", "c")))
    assert told["class_counts"] == [{"0": 2, "2": 1}, {"1": 2}, {}] and told["classes"] == [2, 1, 0]
