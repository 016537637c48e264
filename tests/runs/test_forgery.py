"""Forged checkpoints with right checksums, and changed records: passed over with a note or refused, never believed."""

import hashlib
import json
import shutil

import pytest
import safetensors.torch
import torch
from small_runs import assert_same_result, command, experiment, records, sign, stored, write

import bespoke
from bespoke.records import COLUMNS
from bespoke.runs.checkpoint import load_newest

SPEC = {"algorithm": {"name": "ditto"}, "training": {"rounds": 4, "rate": 0.9}, "evaluation": {"every": 2}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with an experiment of six rounds, its whole run, and its run stopped after four."""
    root = tmp_path_factory.mktemp("made")
    short = write(root / "short.toml", **SPEC)
    long = write(root / "x.toml", **(SPEC | {"training": SPEC["training"] | {"rounds": 6}}))
    for path, name in ((short, "run"), (long, "whole")):
        assert command("run", path, "--out", root / name, "--checkpoint-every", 2).code == 0
    return root


@pytest.fixture
def run(made, tmp_path):
    """A copy of the stopped run."""
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def resumed(made, run):
    return command("run", made / "x.toml", "--out", run, "--checkpoint-every", 2, "--resume")


def forge_tensors(run, change):
    """Replace the server's tensors by ``change(tensors)``."""
    path = run / "checkpoints" / "000004.safetensors"
    content = safetensors.torch.save(change(safetensors.torch.load_file(path)))
    path.write_bytes(content)
    sign(path.with_suffix(".json"), tensors=hashlib.sha256(content).hexdigest())


def forge_states(run, change):
    """Let ``change(header, body)`` return the bytes of the newest file of states."""
    manifest = json.loads((run / "checkpoints" / "000004.json").read_text())
    path = run / "checkpoints" / manifest["states"][-1]["file"]
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    content = change(json.loads(content[8 : 8 + length]), content[8 + length :])
    path.write_bytes(content)
    manifest["states"][-1]["sha256"] = hashlib.sha256(content).hexdigest()
    sign(run / "checkpoints" / "000004.json", states=manifest["states"])


def file(header, body):
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + body


def with_ids(header, body, ids):
    start, end = header["ids"]["data_offsets"]
    new = torch.tensor(ids * 9)[: (end - start) // 8].numpy().tobytes()
    return file(header, body[:start] + new + body[end:])


def leaf(header, **changes):
    """The header with another entry for its largest leaf."""
    name = max((n for n in header if n.startswith("clients/")), key=lambda n: header[n]["data_offsets"][1])
    return header | {name: header[name] | changes}


def offsets(**changes):
    return lambda old: old | changes


MANIFESTS = {
    "round as text": {"round": "4"},
    "round as a number with a point": {"round": 4.0},
    "round true": {"round": True},
    "another round": {"round": 3},
    "negative round": {"round": -4},
    "huge round": {"round": 10**300},
    "no round": {"round": ...},
    "no experiment": {"experiment": ...},
    "another experiment": {"experiment": "0123456789abcdef"},
    "experiment as a list": {"experiment": []},
    "no tensors": {"tensors": ...},
    "tensors as a number": {"tensors": 7},
    "no states": {"states": ...},
    "states as text": {"states": "abc"},
    "states as a table": {"states": {"file": "states-000001.safetensors"}},
    "a state as text": {"states": ["states-000001.safetensors"]},
    "a state without a checksum": {"states": [{"file": "states-000001.safetensors"}]},
    "a state elsewhere": {"states": [{"file": "../config.toml", "sha256": ""}]},
    "a state with a slash": {"states": [{"file": "a/states-000001.safetensors", "sha256": ""}]},
    "a state with a null byte": {"states": [{"file": "states-000001.safetensors\0", "sha256": ""}]},
    "a state that is not there": {"states": [{"file": "states-000777.safetensors", "sha256": ""}]},
    "no offsets": {"offsets": ...},
    "offsets as a list": {"offsets": [1, 2, 3]},
    "offsets of another file": {"offsets": {"rounds.jsonl": 0, "clients.jsonl": 0, "../x": 0}},
    "offsets of too many files": offsets(**{"config.toml": 0}),
    "negative offsets": offsets(**{"rounds.jsonl": -1}),
    "huge offsets": offsets(**{"rounds.jsonl": 10**30}),
    "offsets as text": offsets(**{"rounds.jsonl": "1"}),
    "offsets with a point": offsets(**{"rounds.jsonl": 1.5}),
    "no names": {"names": ...},
    "names as a number": {"names": 3},
    "a name as a number": {"names": [3]},
    "other names": {"names": ["model/w"]},
    "one name twice": lambda old: old + old[:1],
    "sums as a list": {"sums": []},
    "sums as numbers": {"sums": {"rounds.jsonl": 1, "clients.jsonl": 2, "timing.jsonl": 3}},
    "sums of one file": {"sums": {"rounds.jsonl": ""}},
}
KEYS = {"one name twice": "names"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_forged_manifest_is_passed_over(name, made, run):
    change = MANIFESTS[name]
    path = run / "checkpoints" / "000004.json"
    if callable(change):
        key = KEYS.get(name, "offsets")
        change = {key: change(json.loads(path.read_text())[key])}
    sign(path, **change)
    passed_over(made, run, whole=name in ("another experiment", "a state elsewhere"))


def passed_over(made, run, whole=False):
    """The next older checkpoint is used instead; the ``whole`` run is the right one."""
    if not whole:
        folder = made / "run" / "checkpoints"
        sound = load_newest(folder)[0]
        state = next(iter(stored(folder, sound.states).values()))["state"]
        name = json.loads((run / "environment.json").read_text())["experiment"]
        expected = {"experiment_hash": name, "like": sound.server, "clients": 6, "state": state}
        assert load_newest(folder, **expected)[0].round == 4
        found, notes = load_newest(run / "checkpoints", **expected)
        assert found.round == 2 and len(notes) == 1 and "000004.json is damaged" in notes[0] and "\n" not in notes[0]
        return
    done = resumed(made, run)
    assert done.code == 0, done.err
    notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and "000004.json is damaged" in notes[0], done.err
    assert_same_result(run, made / "whole")


TENSORS = {
    "no tensors": lambda old: {},
    "one tensor less": lambda old: dict(list(old.items())[1:]),
    "one tensor more": lambda old: old | {"more": torch.ones(1)},
    "another shape": lambda old: {n: t[None] for n, t in old.items()},
    "a larger shape": lambda old: {n: torch.cat([t, t]) for n, t in old.items()},
    "another type": lambda old: {n: t.double() for n, t in old.items()},
    "other names": lambda old: {f"x{n}": t for n, t in old.items()},
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_forged_server_is_passed_over(name, made, run):
    forge_tensors(run, TENSORS[name])
    found = safetensors.torch.load_file(run / "checkpoints" / "000004.safetensors")
    sign(run / "checkpoints" / "000004.json", names=list(found))
    passed_over(made, run, whole=name == "another shape")


STATES = {
    "an endless header": lambda h, b: (2**63).to_bytes(8, "little") + b"{}",
    "a header beyond the end": lambda h, b: (10**6).to_bytes(8, "little") + b"{}",
    "no header": lambda h, b: b"",
    "half a length": lambda h, b: b"\1\0",
    "a header that is no table": lambda h, b: file([1], b),
    "a header that is no JSON": lambda h, b: (4).to_bytes(8, "little") + b"{{{{" + b,
    "a header too deep": lambda h, b: (200_000).to_bytes(8, "little") + b"[" * 200_000 + b,
    "an empty header": lambda h, b: file({}, b),
    "no ids": lambda h, b: file({n: e for n, e in h.items() if n != "ids"}, b),
    "ids of another type": lambda h, b: file(h | {"ids": h["ids"] | {"dtype": "F64"}}, b),
    "ids of another shape": lambda h, b: file(h | {"ids": h["ids"] | {"shape": [1, h["ids"]["shape"][0]]}}, b),
    "ids beyond the clients": lambda h, b: with_ids(h, b, [0, 1, 600]),
    "negative ids": lambda h, b: with_ids(h, b, [0, -1, 2]),
    "one id twice": lambda h, b: with_ids(h, b, [0, 0]),
    "an entry that is no table": lambda h, b: file(h | {"clients/state/x": 3}, b),
    "an unknown type": lambda h, b: file(leaf(h, dtype="F8_E5M2"), b),
    "a type that is no text": lambda h, b: file(leaf(h, dtype=[]), b),
    "no type": lambda h, b: file(leaf(h, dtype=None), b),
    "no shape": lambda h, b: file(leaf(h, shape=None), b),
    "a negative shape": lambda h, b: file(leaf(h, shape=[-1]), b),
    "a huge shape": lambda h, b: file(leaf(h, shape=[2**62, 2**62]), b),
    "a shape of text": lambda h, b: file(leaf(h, shape=["a"]), b),
    "other rows": lambda h, b: file(leaf(h, shape=[1, 1]), b),
    "offsets out of range": lambda h, b: file(leaf(h, data_offsets=[0, 10**9]), b),
    "offsets the wrong way": lambda h, b: file(leaf(h, data_offsets=[8, 0]), b),
    "negative offsets": lambda h, b: file(leaf(h, data_offsets=[-8, 8]), b),
    "three offsets": lambda h, b: file(leaf(h, data_offsets=[0, 1, 2]), b),
    "a shorter body": lambda h, b: file(h, b[:-4]),
    "another layout": lambda h, b: file({n.replace("clients/state/", "clients/state/x"): e for n, e in h.items()}, b),
    "metadata that is no table": lambda h, b: file(leaf(h | {"__metadata__": 3}, shape=[1]), b),
}


@pytest.mark.parametrize("name", STATES)
def test_forged_states_are_passed_over(name, made, run):
    forge_states(run, STATES[name])
    passed_over(made, run, whole=name in ("negative ids", "another layout"))


def test_states_that_cannot_be_mapped_are_passed_over(made, run):
    def shifted(header, body):
        text = json.dumps(header).encode()
        text += b" " * (1 + -(8 + len(text)) % 64)
        return len(text).to_bytes(8, "little") + text + body

    forge_states(run, shifted)
    passed_over(made, run)


def test_a_manifest_that_is_too_deep_is_passed_over(made, run):
    (run / "checkpoints" / "000004.json").write_text("[" * 100_000)
    passed_over(made, run)


def test_offsets_beyond_the_records_are_refused_at_the_start(made, run):
    old = json.loads((run / "checkpoints" / "000004.json").read_text())["offsets"]
    sign(run / "checkpoints" / "000004.json", offsets=old | {"rounds.jsonl": 10**15})
    assert "rounds.jsonl does not fit its checkpoint" in resumed(made, run).sentence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"states": []}, "has no state of client 0, who took part"),
        ({"offsets": {}, "sums": {}}, "rounds.jsonl does not hold the 4 rounds of its checkpoint"),
    ],
)
def test_a_checkpoint_that_forgets_what_happened_is_refused(changes, words, made, run):
    nothing = hashlib.sha256(b"").hexdigest()
    empty = {"states": [], "offsets": dict.fromkeys(COLUMNS, 0), "sums": dict.fromkeys(COLUMNS, nothing)}
    sign(run / "checkpoints" / "000004.json", **{key: empty[key] for key in changes})
    before = records(run)
    assert words in resumed(made, run).sentence
    assert records(run) == before


def test_an_environment_of_another_experiment_is_refused(made, run):
    path = run / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"experiment": "0123456789abcdef"}))
    sentence = resumed(made, run).sentence
    assert "no checkpoint of experiment 0123456789abcdef" in sentence and "restore the right files" in sentence
    path.write_text("damaged")  # which is written anew
    assert resumed(made, run).code == 0


# --- records ------------------------------------------------------------------------------------------------------

CHANGES = {
    "a digit": (lambda text: text.replace(b'"round":2', b'"round":3', 1), "something in its first"),
    "a broken line": (lambda text: text.replace(b'{"round":4', b'{"round"#4', 1), "line 7 is damaged"),
    "a line less": (
        lambda text: text[text.index(b"\n") + 1 :] + text[: text.index(b"\n") + 1],
        "something in its first",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_records_are_reported_before_anything_is_computed(name, made, run):
    change, words = CHANGES[name]
    path = run / "clients.jsonl"
    path.write_bytes(change(path.read_bytes()))
    before = records(run)
    sentence = resumed(made, run).sentence
    assert str(path) in sentence and "is not as the run wrote it" in sentence
    assert words in sentence
    assert records(run) == before


@pytest.mark.parametrize("name", ["rounds.jsonl", "timing.jsonl"])
def test_every_record_file_is_verified(name, made, run):
    path = run / name
    path.write_bytes(path.read_bytes().replace(b'"round":2', b'"round":9', 1))
    assert f"{path} is not as the run wrote it" in resumed(made, run).sentence


@pytest.mark.parametrize("what", ["link", "folder"])
def test_a_record_that_is_no_plain_file_is_refused_and_what_it_names_stays(what, made, run, tmp_path):
    target = tmp_path / "target"
    (run / "clients.jsonl").rename(target)
    before = target.read_bytes()
    (run / "clients.jsonl").symlink_to(target) if what == "link" else (run / "clients.jsonl").mkdir()
    assert "clients.jsonl is no plain file" in resumed(made, run).sentence
    assert target.read_bytes() == before


def test_lines_after_the_checkpoint_are_cut_off_whatever_they_are(made, run):
    with (run / "rounds.jsonl").open("ab") as file:
        file.write(b"{garbage\n")
    assert resumed(made, run).code == 0
    assert_same_result(run, made / "whole")


def test_checkpoints_without_checksums_of_records_go_on_with_a_note(made, run):
    for path in (run / "checkpoints").glob("*.json"):
        sign(path, sums=...)
    done = resumed(made, run)
    assert done.code == 0 and "has no checksums of its records: only their lengths were compared" in done.err
    assert_same_result(run, made / "whole")


def test_records_that_were_changed_after_the_run_give_a_warning(tmp_path):
    bespoke.run(experiment(rounds=2), tmp_path / "run")
    assert not bespoke.compare([tmp_path / "run"]).warnings
    path = tmp_path / "run" / "clients.jsonl"
    path.write_text(path.read_text().replace('"group":"train"', '"group":"unsen"', 1))
    (warning,) = bespoke.compare([tmp_path / "run"]).warnings
    assert "clients.jsonl is not as the run wrote it" in warning
