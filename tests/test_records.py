import errno
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bespoke.errors import UserError
from bespoke.files import temporary_of, write_atomic
from bespoke.records import CLIENTS, COLUMNS, ROUNDS, TIMING, RunFolder


def timing(number=1, train=0.5):
    return {"round": number, "train": train, "aggregate": 0.25, "evaluate": 0.0, "checkpoint": 1e-05}


def client(number=1, who=0, **changes):
    row = {"round": number, "client": who, "group": "train", "split": "test", "view": "personal"}
    return row | {"total": 4, "metrics": {"accuracy": [3, 4], "loss": [1.5, 4]}, "logged": {}} | changes


def old_client(number=1, who=0, **changes):
    """A line in the form used before metrics had names."""
    row = {"round": number, "client": who, "group": "train", "split": "test", "view": "personal"}
    return row | {"correct": 3, "total": 4, "loss_sum": 1.5, "logged": {}} | changes


EVALUATED = {"view": "personal", "metric": "accuracy", "higher": {"accuracy": True, "loss": False}}


def a_round(number=1, **changes):
    row = {
        "round": number,
        "cohort": [0, 2],
        "refused": {},
        "train_loss": 0.5,
        "bytes_down": 8,
        "bytes_up": 4,
    }
    return row | {"padding_waste": 0.0, "host_breaks": 0, "logged": {}} | changes


@contextmanager
def file_size_limit(limit):
    """No file may grow beyond `limit` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_are_compact_json_in_the_order_given(tmp_path):
    folder = RunFolder.create(tmp_path / "deep" / "run")
    folder.append(TIMING, [timing(1, 0.1), timing(2, 1 / 3)])
    assert (folder.path / TIMING).read_text() == (
        '{"round":1,"train":0.1,"aggregate":0.25,"evaluate":0.0,"checkpoint":1e-05}\n'
        '{"round":2,"train":0.3333333333333333,"aggregate":0.25,"evaluate":0.0,"checkpoint":1e-05}\n'
    )
    assert folder.timing() == [timing(1, 0.1), timing(2, 1 / 3)]


def test_what_json_cannot_hold_becomes_null_and_arrays_become_lists(tmp_path):
    folder = RunFolder(tmp_path)
    logged = {"beta": [np.float32(0.5), math.nan, -math.inf], "n": np.arange(2)}
    folder.append(ROUNDS, [a_round(np.int64(3), train_loss=math.inf, refused={7: "NaN"}, logged=logged)])
    expected = a_round(3, train_loss=None, refused={"7": "NaN"}, logged={"beta": [0.5, None, None], "n": [0, 1]})
    assert folder.rounds() == [expected]
    assert "nan" not in (tmp_path / ROUNDS).read_text().replace("NaN", "", 1).lower()
    folder.write_json("summary.json", {"a": math.nan, "b": (1, np.float64(0.1))})
    assert folder.read_json("summary.json") == {"a": None, "b": [1, 0.1]}


def test_rows_must_have_the_documented_columns(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="extra"):
        folder.append(TIMING, [timing() | {"extra": 1}])
    short = a_round()
    del short["bytes_up"]
    with pytest.raises(ValueError, match="bytes_up"):
        folder.append(ROUNDS, [short])
    with pytest.raises(ValueError, match=r"rounds\.jsonl"):
        folder.append("rounds", [a_round()])
    assert list(tmp_path.iterdir()) == []
    folder.append(ROUNDS, [a_round(missing={"1": "offline"}, note="runs in the loop", evaluated=EVALUATED)])
    assert list(folder.rounds()[0]) == list(COLUMNS[ROUNDS])
    with pytest.raises(ValueError, match="correct, loss_sum, metrics"):
        folder.append(CLIENTS, [old_client()])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("total", -1),
        ("total", 1.5),
        ("metrics", [1, 2]),
        ("metrics", {"accuracy": 0.5}),
        ("metrics", {"accuracy": [1, 2, 3]}),
        ("metrics", {"accuracy": ["1", 2]}),
        ("metrics", {"accuracy": [True, 2]}),
        ("metrics", {"accuracy": [1, -2]}),
        ("metrics", {"f1": [[1, 2], [3]]}),
        ("metrics", {"f1": [[1, 2], 3]}),
        ("metrics", {"f1": [1, [2, 3]]}),
        ("metrics", {"f1": [[[1]], [[2]]]}),
        ("logged", [1]),
        ("logged", {"beta": 2**63}),
        ("cohort", 3),
        ("cohort", [2, -1]),
        ("cohort", [2**63, 0]),
        ("cohort", [0, True]),
        ("cohort", ["ann", 0.5]),
        ("evaluated", {"view": "personal"}),
        ("evaluated", EVALUATED | {"metric": "mse"}),
        ("evaluated", EVALUATED | {"higher": {"accuracy": 1}}),
        ("evaluated", EVALUATED | {"view": 0}),
    ],
)
def test_malformed_columns_are_neither_written_nor_read(tmp_path, column, value):
    name, row = (ROUNDS, a_round()) if column in ("cohort", "evaluated") else (CLIENTS, client())
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match=f"a row of {name} is malformed: {column} is "):
        folder.append(name, [row | {column: value}])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / name).write_text(json.dumps(row | {column: value}) + "\n")
    with pytest.raises(UserError, match=f"{name} is damaged at line 1"):
        list(folder.clients()) if name == CLIENTS else folder.rounds()


def test_metrics_are_kept_as_they_are_but_for_what_is_not_finite(tmp_path):
    folder = RunFolder(tmp_path)
    metrics = {"mse": [np.float64(0.1), 4], "f1": [np.array([1.0, math.nan]), [2.0, 0]], "own": [math.inf, math.nan]}
    folder.append(CLIENTS, [client(metrics=metrics)])
    [row] = folder.clients()
    assert row["metrics"] == {"mse": [0.1, 4], "f1": [[1.0, None], [2.0, 0]], "own": [None, None]}


def test_lines_without_names_of_metrics_are_read_as_accuracy_and_loss(tmp_path):
    lines = [old_client(), old_client(who=1, loss_sum=None, logged={"beta": 0.5}), client(who=2)]
    (tmp_path / CLIENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(RunFolder(tmp_path).clients())
    unknown = {"accuracy": [3, 4], "loss": [None, 4]}
    assert found == [client(), client(who=1, metrics=unknown, logged={"beta": 0.5}), client(who=2)]
    assert all(list(row) == list(COLUMNS[CLIENTS]) for row in found)


texts = st.text(max_size=5)
floats = st.floats(allow_nan=False, allow_infinity=False) | st.none()
weights = st.floats(0, 1e9) | st.integers(0, 9) | st.none()
pairs = st.tuples(floats, weights) | st.integers(0, 3).flatmap(
    lambda n: st.tuples(st.lists(floats, min_size=n, max_size=n), st.lists(weights, min_size=n, max_size=n))
)
pairs = pairs.map(list)
rows = st.builds(
    client,
    st.integers(1, 9),
    st.integers(0, 99) | texts,
    view=texts,
    metrics=st.dictionaries(texts, pairs, max_size=2),
    logged=st.dictionaries(texts, floats, max_size=2),
)
batches = st.lists(st.lists(rows, max_size=3), max_size=5)


@given(batches, st.data())
@settings(deadline=None, max_examples=50)
def test_append_truncate_read_round_trip(parts, data):
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(path)
        offsets = [folder.offsets()]
        for part in parts:
            folder.append(CLIENTS, part)
            offsets.append(folder.offsets())
        assert list(folder.clients()) == [row for part in parts for row in part]
        keep = data.draw(st.integers(0, len(parts)))
        folder.truncate(offsets[keep])
        assert list(folder.clients()) == [row for part in parts[:keep] for row in part]
        for part in parts[keep:]:
            folder.append(CLIENTS, part)
        assert folder.offsets() == offsets[-1]
        assert list(folder.clients()) == [row for part in parts for row in part]


@given(st.lists(rows, min_size=1, max_size=4), st.data())
@settings(deadline=None, max_examples=50)
def test_a_file_cut_anywhere_reads_as_its_whole_lines_and_can_be_continued(part, data):
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(path)
        folder.append(CLIENTS, part)
        content = (folder.path / CLIENTS).read_bytes()
        cut = content[: data.draw(st.integers(0, len(content)))]
        (folder.path / CLIENTS).write_bytes(cut)
        whole = part[: cut.count(b"\n")]
        assert list(folder.clients()) == whole
        folder.append(CLIENTS, part[:1])
        assert list(folder.clients()) == [*whole, part[0]]


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00\x00\x00\n",
        b'{"round":1,"client"\n',
        b"[1]\n",
        b"7\n",
        b"\n",
        b"\xff\xfe\n",
        b'{"round":1,"client":0}\n',
        json.dumps(old_client(correct=5, total=4)).encode() + b"\n",
        json.dumps(old_client(correct="x")).encode() + b"\n",
        json.dumps({key: value for key, value in old_client().items() if key != "loss_sum"}).encode() + b"\n",
        json.dumps(client(logged=[1])).encode() + b"\n",
        json.dumps(client(metrics={"loss": [math.nan, 1]})).encode() + b"\n",
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_a_damaged_line_is_named(tmp_path, damage, last):
    good = json.dumps(client()).encode() + b"\n"
    (tmp_path / CLIENTS).write_bytes(good + damage + (b"" if last else good))
    with pytest.raises(UserError, match=r"clients\.jsonl is damaged at line 2"):
        list(RunFolder(tmp_path).clients())


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_what_is_no_regular_file_is_named_and_not_read(tmp_path, what):
    folder = RunFolder(tmp_path)
    for name, read in {
        ROUNDS: folder.rounds,
        CLIENTS: lambda: list(folder.clients()),
        TIMING: folder.timing,
        "federation.json": folder.federation,
        "environment.json": lambda: folder.read_json("environment.json"),
        "config.toml": folder.config,
    }.items():
        path = tmp_path / name
        os.mkfifo(path) if what == "pipe" else path.symlink_to("/dev/zero")
        with pytest.raises(UserError, match=f"^cannot read {path}: it is no regular file; [^\n]+$"):
            read()


def test_a_line_or_a_file_without_end_is_refused(tmp_path):
    """Files with holes, which take no room; a torn last line of ordinary length is skipped as ever."""
    folder = RunFolder(tmp_path)
    folder.append(TIMING, [timing(1), timing(2)])
    os.truncate(tmp_path / TIMING, 2**20)
    assert folder.timing() == [timing(1), timing(2)]
    os.truncate(tmp_path / TIMING, 2**40)
    with pytest.raises(UserError, match=rf"{TIMING} is damaged at line 3; restore it"):
        folder.timing()
    (tmp_path / "federation.json").touch()
    os.truncate(tmp_path / "federation.json", 2**40)
    with pytest.raises(UserError, match=r"federation\.json: it has more than 1,073,741,824 bytes; restore it"):
        folder.federation()


def test_half_a_character_is_no_text(tmp_path):
    (tmp_path / "environment.json").write_text(r'{"device": "\ud83d"}')
    with pytest.raises(UserError, match=r"environment\.json: it holds half a character; restore it"):
        RunFolder(tmp_path).read_json("environment.json")
    (tmp_path / "environment.json").write_text(r'{"device": "\ud83d\ude00"}')
    assert RunFolder(tmp_path).read_json("environment.json") == {"device": "\U0001f600"}


def test_readers_of_a_folder_without_records(tmp_path):
    folder = RunFolder(tmp_path)
    assert (folder.rounds(), folder.timing(), list(folder.clients())) == ([], [], [])
    assert folder.offsets() == {ROUNDS: 0, CLIENTS: 0, TIMING: 0}
    with pytest.raises(UserError, match="there is no run folder"):
        RunFolder(tmp_path / "absent").rounds()
    (tmp_path / ROUNDS).mkdir()
    with pytest.raises(UserError, match=r"cannot read .*rounds\.jsonl"):
        folder.rounds()


def test_offsets_that_do_not_fit_change_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append(TIMING, [timing(1), timing(2)])
    folder.append(ROUNDS, [a_round(1)])
    before = folder.offsets()
    for wrong in (before[ROUNDS] + 1, before[ROUNDS] - 1, -1):
        with pytest.raises(UserError, match=r"rounds\.jsonl does not fit its checkpoint"):
            folder.truncate({TIMING: 0, ROUNDS: wrong, CLIENTS: 0})
    with pytest.raises(ValueError, match=r"config\.toml"):
        folder.truncate({"config.toml": 0})
    assert folder.offsets() == before


@pytest.mark.parametrize("room", [0, 1, 40, 100])
def test_a_full_disk_leaves_whole_lines_and_says_how_to_go_on(tmp_path, room):
    folder = RunFolder(tmp_path)
    folder.append(TIMING, [timing(1)])
    before = (tmp_path / TIMING).read_bytes()
    with file_size_limit(len(before) + room), pytest.raises(UserError) as caught:
        folder.append(TIMING, [timing(2), timing(3)])
    assert (tmp_path / TIMING).read_bytes() == before
    sentence = str(caught.value)
    assert all(word in sentence for word in (str(tmp_path / TIMING), "File too large", "make room", "--resume"))
    folder.append(TIMING, [timing(2)])
    assert folder.timing() == [timing(1), timing(2)]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_fsync_or_an_interrupt_leaves_no_half_batch(tmp_path, monkeypatch, failure):
    folder = RunFolder(tmp_path)
    folder.append(TIMING, [timing(1)])

    def fsync(_):
        raise failure

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError if isinstance(failure, OSError) else KeyboardInterrupt):
        folder.append(TIMING, [timing(2)])
    assert folder.timing() == [timing(1)]


def test_each_append_is_fsynced_once_and_a_new_file_s_folder_too(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    folder = RunFolder(tmp_path)
    folder.append(CLIENTS, [client(who=i) for i in range(5)])
    assert synced == [str(tmp_path / CLIENTS), str(tmp_path)]
    folder.append(CLIENTS, [client(2, who=i) for i in range(5)])
    assert synced[2:] == [str(tmp_path / CLIENTS)]


def test_write_atomic_replaces_whole_or_not_at_all(tmp_path):
    path = tmp_path / "summary.json"
    write_atomic(path, "old")
    with file_size_limit(10), pytest.raises(UserError, match=r"cannot write .*summary\.json: File too large"):
        write_atomic(path, b"x" * 100)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    write_atomic(path, "é")
    assert path.read_bytes() == b"\xc3\xa9"


def test_write_atomic_is_durable_before_the_new_name_is_visible(tmp_path, monkeypatch):
    events = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("rename"), replace(a, b)))
    write_atomic(tmp_path / "a", b"1")
    assert temporary_of(events.pop(0)) == "a"
    assert events == ["rename", tmp_path.name]


def test_an_output_below_a_plain_file_or_not_writable_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(UserError, match=r"cannot write to the folder .*choose another output"):
            RunFolder.create(path)
    with pytest.raises(UserError, match=r"cannot write .*Not a directory; fix the problem"):
        write_atomic(tmp_path / "file" / "x", "")

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="Permission denied"):
        RunFolder.create(tmp_path / "run")


def test_create_keeps_what_a_folder_holds(tmp_path):
    folder = RunFolder.create(tmp_path)
    folder.append(TIMING, [timing()])
    assert not folder.holds_run()
    write_atomic(tmp_path / "config.toml", "seed = 3")
    again = RunFolder.create(tmp_path)
    assert again.holds_run()
    assert (again.timing(), again.config()) == ([timing()], {"seed": 3})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.toml", TIMING]


def test_unreadable_json_and_toml_are_named(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "environment.json").write_text('{"a": NaN}')
    (tmp_path / "config.toml").write_text("seed = ")
    for read in (
        lambda: folder.read_json("environment.json"),
        lambda: folder.read_json("absent.json"),
        folder.config,
    ):
        with pytest.raises(UserError, match=f"cannot read {tmp_path}"):
            read()


def test_parquet_export(tmp_path):
    folder = RunFolder(tmp_path)
    refused = {"2": "NaN in body"}
    folder.append(ROUNDS, [a_round(1, refused=refused, logged={"loss": [0.5, None]}, evaluated=EVALUATED)])
    folder.append(ROUNDS, [a_round(2, note="loop")])
    unknown = {"accuracy": [1, 4], "loss": [None, 4], "f1": [[0.5, 1.5], [2, None]]}
    folder.append(CLIENTS, [client(who=0, logged={"beta": 0.5}), client(who=2, metrics=unknown)])
    rounds, clients = (pq.read_table(path) for path in folder.export_parquet())
    assert [path.name for path in sorted(tmp_path.glob("*.parquet"))] == ["clients.parquet", "rounds.parquet"]
    first, second = rounds.to_pylist()
    assert first["cohort"] == [0, 2]
    assert (first["refused"], first["reasons"]) == (["2"], ["NaN in body"])
    assert (first["logged.loss"], second["logged.loss"]) == ([0.5, None], None)
    assert (first["note"], second["note"]) == (None, "loop")
    assert (first["evaluated.view"], first["evaluated.metric"]) == ("personal", "accuracy")
    assert (second["evaluated.view"], second["evaluated.metric"]) == (None, None)
    one, two = clients.to_pylist()
    plain = {key: value for key, value in client(who=0).items() if key not in ("metrics", "logged")}
    accuracy = {"metric.accuracy.sum": 3.0, "metric.accuracy.weight": 4.0}
    loss = {"metric.loss.sum": 1.5, "metric.loss.weight": 4.0}
    assert one == plain | accuracy | loss | {"metric.f1.sum": None, "metric.f1.weight": None, "logged.beta": 0.5}
    assert (two["client"], two["metric.loss.sum"], two["metric.loss.weight"]) == (2, None, 4.0)
    assert (two["metric.f1.sum"], two["metric.f1.weight"]) == ([0.5, 1.5], [2.0, None])
    assert str(clients.schema.field("client").type) == "int64"


def test_parquet_export_of_named_clients_and_of_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    rounds, clients = (pq.read_table(path) for path in folder.export_parquet())
    assert (rounds.num_rows, clients.num_rows) == (0, 0)
    assert str(clients.schema.field("total").type) == "int64"
    folder.append(ROUNDS, [a_round(cohort=["ann", 1])])
    folder.append(CLIENTS, [client(who="ann"), client(who=1)])
    rounds, clients = (pq.read_table(path) for path in folder.export_parquet())
    assert rounds.column("cohort").to_pylist() == [["ann", "1"]]
    assert clients.column("client").to_pylist() == ["ann", "1"]


def test_records_metrics_and_reports_import_no_heavy_library():
    code = "import sys, bespoke.records, bespoke.report.metrics, bespoke.report; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "bespoke.report.charts" in modules
    assert not {"torch", "pyarrow", "matplotlib", "rich", "scipy"} & set(modules)
