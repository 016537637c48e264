"""Imports of mutated files: each is stored or refused in one sentence, and nothing else ever happens."""

import functools
import gzip
import io
import json
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import official_files as official
import pytest
from fuzz_profile import hostile
from hypothesis import given
from hypothesis import strategies as st

from bespoke.data.sources import acquire
from bespoke.data.sources.catalogue import CATALOGUE
from bespoke.errors import UserError

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8), np.arange(6, dtype=np.uint8)
GREY = np.ascontiguousarray(X[:, 0, :28, :28])
PICTURE = official.picture_bytes(X[0])
SOUND = official.wav_bytes(official.tone(440, 8000, 0.02), 8000)


class Kind(NamedTuple):
    data: str
    contents: dict[str, bytes]  # of the files inside
    archive: str = ""  # the archive's name; empty where the files lie side by side


def plain(files):
    return {path.name: path.read_bytes() for path in files}


def inside(archive):
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def gunzipped(contents):
    return {name.removesuffix(".gz"): gzip.decompress(content) for name, content in contents.items()}


def cifar(x, y):
    return np.concatenate([y[:, None], x.reshape(len(x), -1)], axis=1).astype(np.uint8).tobytes()


def arrays(**named):
    content = io.BytesIO()
    np.savez(content, **named)
    content.seek(0)
    return inside(content)


@functools.cache
def kinds():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = GREY[:4], Y[:4], GREY[4:], Y[4:]
        mnist = gunzipped(plain(official.mnist_files(folder, *parts)))
        writers = [official.qmnist_labels(folder, part, y, y) for part, y in (("train", Y[:4]), ("test", Y[4:]))]
        qmnist = mnist | gunzipped(plain(writers))
        svhn = plain(official.svhn_files(folder, X[:4], Y[:4], X[4:], Y[4:]))
        leaf = plain([official.leaf_json(folder / "a.json", {"a": (np.zeros((1, 784)), Y[:1])})])
        tweets = inside(official.sent140_zip(folder / "t.zip", [(4, "amy", "good day")] * 30)[0])
    batches = {f"data_batch_{i}.bin": cifar(X[i - 1 : i], Y[i - 1 : i]) for i in range(1, 6)}
    line = ("1 " + " ".join(f"{i}:0" for i in range(1, 257)) + "\n").encode()
    pictures = {f"mnist_m_{part}/0.png": PICTURE for part in ("train", "test")}
    pictures |= {f"mnist_m_{part}_labels.txt": b"0.png 1\n" for part in ("train", "test")}
    people = json.dumps({"1": {"recordingroom": "Kino"}}).encode()
    small = official.picture_bytes(np.zeros((64, 64), np.uint8))
    synsets = {
        "t/train/n1/images/a.png": small,
        "t/val/images/b.png": small,
        "t/val/val_annotations.txt": b"b.png\tn1\n",
    }
    return (
        Kind("mnist", mnist),
        Kind("mnist_writers", qmnist),
        Kind("emnist_balanced", {f"emnist-balanced-{name}": content for name, content in mnist.items()}, "e.zip"),
        Kind("cifar10", batches | {"test_batch.bin": cifar(X[5:], Y[5:])}, "c.tar.gz"),
        Kind("svhn", svhn),
        Kind("usps", {"usps": line, "usps.t": line}),
        Kind("mnist_m", pictures, "m.tar.gz"),
        Kind("tiny_imagenet", synsets, "t.zip"),
        Kind("syn_digits_12k", {"imgs_train/1/a.png": PICTURE, "imgs_valid/2/b.png": PICTURE}, "s.zip"),
        Kind("femnist", leaf),
        Kind("femnist", {"by_class/30/hsf_0/a.png": PICTURE, "by_write/hsf_0/w/d/a.png": PICTURE}, "by_class.zip"),
        Kind("sent140", tweets, "t.zip"),
        Kind("audiomnist", {"1/0_1_0.wav": SOUND, "audioMNIST_meta.txt": people}, "a.zip"),
        Kind("speech_commands", {"bed/a_nohash_0.wav": SOUND}, "s.tar.gz"),
        Kind("mnist", arrays(x_train=GREY[:4], y_train=Y[:4], x_test=GREY[4:], y_test=Y[4:]), "m.npz"),
        Kind("audiomnist", arrays(x=X[:, 0, 0, :1].repeat(1960, 1).reshape(6, 49, 40), y=Y, speaker=Y, room=Y % 4,
                                  room_names=["Kino", "Ruheraum", "VR-room", "library"]), "a.npz"),
    )  # fmt: skip


def written(kind, contents, folder):
    if kind.archive.endswith(".tar.gz"):
        return official.tar_gz(folder / kind.archive, contents)
    if kind.archive:
        return official.zipped(folder / kind.archive, contents)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


# --- mutations ------------------------------------------------------------------------------------------------------

NUMBERS = [struct.pack(form, value) for form in ("<i", ">i") for value in (-1, 0, 1, 3, 255, 2**31 - 1)]
PLACES = st.one_of(st.integers(0, 140), st.integers(0, 10**5))
WORDS = st.sampled_from([b"", b"-1", b"1e9", b"nan", b"\n", b"\0" * 9, b"[" * 3000, b'"', b"9" * 30, b"\xff", b"(1,)"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "1", "x", "y"]), inner, max_size=3)
    ),
    max_leaves=6,
)
MUTATIONS = st.one_of(
    st.tuples(st.just("flip"), PLACES, st.integers(1, 255)),
    st.tuples(st.just("cut"), PLACES, st.none()),
    st.tuples(st.just("number"), PLACES, st.sampled_from(NUMBERS)),
    st.tuples(st.just("insert"), PLACES, WORDS),
    st.tuples(st.just("drop"), PLACES, st.integers(1, 50)),
    st.tuples(st.just("json"), st.just(0), JSON),
    st.tuples(st.just("array"), st.just(0), st.tuples(
        st.sampled_from(["|u1", "<i8", "<f4", "|b1", "<U2", "|S1", "<c8", "<M8[s]", ">u2", "<U0"]),
        st.lists(st.sampled_from([0, 1, 4, 6, 28, 40, 49]), max_size=4),
    )),
)  # fmt: skip


def mutated(content, how, place, what):
    place %= len(content) + 1
    if how == "flip":
        return content[:place] + bytes([byte ^ what for byte in content[place : place + 1]]) + content[place + 1 :]
    if how == "cut":
        return content[:place]
    if how == "number":
        return content[:place] + what + content[place + 4 :]
    if how == "insert":
        return content[:place] + what + content[place:]
    if how == "drop":
        return content[:place] + content[place + what :]
    if how == "json":
        return json.dumps({"user_data": what} if isinstance(what, dict) else what).encode()
    made = io.BytesIO()
    np.save(made, np.zeros(what[1], what[0]))
    return made.getvalue()


@pytest.fixture(autouse=True)
def low(monkeypatch):
    monkeypatch.setenv("BESPOKE_MAX_BYTES", str(2**20))


@hostile()
@given(st.data())
def test_a_mutated_file_is_stored_or_refused_in_one_sentence(monkeypatch, data):
    kind = data.draw(st.sampled_from(kinds()), "kind")
    changes = data.draw(st.lists(st.tuples(st.integers(0, 9), MUTATIONS), max_size=3), "inside")
    outside = data.draw(st.lists(MUTATIONS, max_size=1 if changes else 2), "outside")
    contents, names = dict(kind.contents), list(kind.contents)
    for number, mutation in changes:
        name = names[number % len(names)]
        contents[name] = mutated(contents[name], *mutation)
    folder = Path(tempfile.mkdtemp())
    try:
        monkeypatch.setenv("BESPOKE_DATA", str(folder / "data"))
        paths = written(kind, contents, folder)
        for mutation in outside:
            paths[0].write_bytes(mutated(paths[0].read_bytes(), *mutation))
        try:
            acquire.import_files(CATALOGUE[kind.data], paths)
        except UserError as error:
            assert "\n" not in str(error)
            assert [path.name for path in (folder / "data").iterdir()] == [f".{kind.data}.lock"]
    finally:
        shutil.rmtree(folder)
