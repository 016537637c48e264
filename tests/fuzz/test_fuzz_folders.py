"""Damaged and forged run folders: a run goes on rightly or with a word, or is refused; nothing else is touched."""

import json
import os
import shutil
from pathlib import Path

import pytest
from fuzz_profile import hostile
from hypothesis import given
from hypothesis import strategies as st
from small_runs import experiment, records, sign

import bespoke
from bespoke.errors import UserError

SPEC = {"evaluation": {"every": 1}, "rate": 0.9}
ROUNDS = 2
FOREIGN = ("notes.txt", "checkpoints/states-abc.safetensors", "checkpoints/best.json", "checkpoints/000077.safetensors")


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A finished run, and the records it must have after one more round."""
    root = tmp_path_factory.mktemp("made")
    bespoke.run(experiment("ditto", rounds=ROUNDS, **SPEC), root / "run", checkpoint_every=1)
    bespoke.run(experiment("ditto", rounds=ROUNDS + 1, **SPEC), root / "whole", checkpoint_every=1)
    for name in FOREIGN:
        (root / "run" / name).write_text("mine")
    return root


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
sources = st.integers(0, 10**6)  # which file, of all there are
damages = st.one_of(
    st.tuples(st.just("flip"), sources, st.integers(0, 10**6), st.integers(0, 7)),
    st.tuples(st.just("cut"), sources, st.floats(0, 1)),
    st.tuples(st.just("append"), sources, st.binary(min_size=1, max_size=30)),
    st.tuples(st.just("content"), sources, st.binary(max_size=30)),
    st.tuples(st.just("json"), sources, json_values),
    st.tuples(st.just("delete"), sources),
    st.tuples(st.just("swap"), sources, sources),
    st.tuples(st.just("copy"), sources, sources),
    st.tuples(st.just("folder"), sources),
    st.tuples(st.just("link"), sources, st.sampled_from(["victim", "nowhere", "itself"])),
    st.tuples(
        st.just("sign"),
        sources,
        st.sampled_from(["round", "experiment", "tensors", "states", "offsets", "sums", "names", "more"]),
        json_values,
    ),
    st.tuples(st.just("entry"), sources, st.sampled_from(["states", "offsets", "sums", "names"]), sources, json_values),
)


def harm(root, run, kind, number, *how):
    """Damage one of the run's own files."""
    files = sorted(
        p for p in run.rglob("*") if p.is_file() and not p.is_symlink() and str(p.relative_to(run)) not in FOREIGN
    )
    path = files[number % len(files)]
    content = path.read_bytes()
    if kind == "flip" and content:
        changed = bytearray(content)
        changed[how[0] % len(content)] ^= 1 << how[1]
        path.write_bytes(changed)
    elif kind == "cut":
        os.truncate(path, int(how[0] * len(content)))
    elif kind == "append":
        path.write_bytes(content + how[0])
    elif kind == "content":
        path.write_bytes(how[0])
    elif kind == "json":
        path.write_text(json.dumps(how[0]))
    elif kind in ("delete", "folder", "link"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to({"victim": root / "victim", "nowhere": root / "nowhere", "itself": path}[how[0]])
    elif kind in ("swap", "copy"):
        other = files[how[0] % len(files)]
        path.write_bytes(other.read_bytes())
        if kind == "swap":
            other.write_bytes(content)
    elif kind in ("sign", "entry"):
        manifests = [p for p in files if p.parent.name == "checkpoints" and p.suffix == ".json"]
        if not manifests:
            return
        path = manifests[number % len(manifests)]
        try:
            manifest = json.loads(path.read_text())
            if kind == "sign":
                manifest[how[0]] = how[1]
            else:
                inner = manifest[how[0]]
                keys = list(inner) if isinstance(inner, dict) else range(len(inner))
                inner[keys[how[1] % len(keys)]] = how[2]
            sign(path, **manifest)
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            pass  # it was damaged before


@hostile(10)
@given(st.lists(damages, min_size=1, max_size=3))
def test_a_damaged_folder_gives_the_right_result_or_one_sentence(made, tmp_path_factory, harms):
    root = tmp_path_factory.mktemp("folder")
    shutil.copytree(made / "run", root / "run")
    run = root / "run"
    (root / "victim").write_text("mine")
    for one in harms:
        harm(root, run, *one)
    for look in (bespoke.summarise, bespoke.compare):
        try:
            look(run)
        except UserError as error:
            assert "\n" not in str(error), error
    try:
        done = bespoke.run(
            experiment("ditto", rounds=ROUNDS + 1, **SPEC), run, resume=True, checkpoint_every=1, device="cpu"
        )
    except UserError as error:
        assert "\n" not in str(error), error
    else:
        assert records(run) == records(made / "whole") or done.notes, harms
    assert (root / "victim").read_text() == "mine" and not (root / "nowhere").exists()
    for name in FOREIGN:
        assert Path(run / name).read_text() == "mine", (name, harms)
    shutil.rmtree(root)
