"""Hostile files: each ends in one sentence, takes little memory, and leaves everything as it was."""

import gzip
import io
import subprocess
import sys
import tarfile

import hostile_files as hostile
import numpy as np
import official_files as official
import pytest

from bespoke.data.sources import acquire, archives, built_in, npz, text
from bespoke.data.sources.archives import Allowance, Files
from bespoke.data.sources.catalogue import CATALOGUE
from bespoke.data.sources.entry import Entry
from bespoke.errors import UserError

SMALL = 2**19  # bytes inside a bomb, here


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.mark.parametrize("case", hostile.CASES, ids=lambda case: f"{case.data}, {case.name}")
def test_a_hostile_file_ends_in_one_sentence_and_changes_nothing(case, tmp_path, folder, monkeypatch):
    monkeypatch.setenv("BESPOKE_MAX_BYTES", str(SMALL // 2))
    paths = case.build(tmp_path, SMALL)
    before = [path.read_bytes() for path in paths]
    with pytest.raises(UserError) as caught:
        acquire.import_files(CATALOGUE[case.data], paths)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert [path.read_bytes() for path in paths] == before
    assert [path.name for path in folder.iterdir()] == [f".{case.data}.lock"]


BOMB = """
import sys
from pathlib import Path
from bespoke.core import memory
from bespoke.data.sources import acquire, catalogue
from bespoke.errors import UserError

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

start = peak()
for name, *paths in (argument.split(",") for argument in sys.argv[1:]):
    try:
        acquire.read(catalogue.find(name), [Path(path) for path in paths])
    except UserError as error:
        print(f"{peak() - start:.0f} {error}")
"""


def test_true_bombs_take_little_memory(tmp_path):
    asked = []
    for case in hostile.CASES:
        if case.name in ("gzip bomb: a true header", "npz with: x of a gigabyte", "pictures of size: 4096"):
            here = tmp_path / case.data
            here.mkdir()
            asked.append(",".join([case.data, *map(str, case.build(here, 2**27))]))
    done = subprocess.run([sys.executable, "-c", BOMB, *asked], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all(float(line.split()[0]) < 100 for line in lines), done.stdout


# --- the bounds -----------------------------------------------------------------------------------------------------


def test_what_is_allowed_follows_from_the_set_and_from_the_files(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"1")
    with large.open("wb") as file:
        file.truncate(10**9)
    mnist = CATALOGUE["mnist"]
    assert mnist.most_rows == 70_000 and mnist.most_bytes == 4 * 70_000 * (784 + 8) + 2**24
    assert acquire._allowed(mnist, [small]) == archives.ALWAYS
    assert acquire._allowed(mnist, [large]) == mnist.most_bytes
    middle = tmp_path / "middle"
    with middle.open("wb") as file:
        file.truncate(2 * 10**6)
    assert acquire._allowed(mnist, [middle]) == 10**8


# Unpacked bytes of the official files: headers and labels are counted, sizes of texts and recordings estimated above.
OFFICIAL = {
    "mnist": 70_000 * 785,
    "mnist_writers": 70_000 * 785 + 120_000 * 32,
    "fashion_mnist": 70_000 * 785,
    "emnist_balanced": 131_600 * 785,
    "emnist_byclass": 814_255 * 785,
    "emnist_letters": 145_600 * 785,
    "cifar10": 60_000 * 3073,
    "cifar100": 60_000 * 3074,
    "tiny_imagenet": 110_000 * (12_288 + 4_000),  # a JPEG file and its pixels
    "svhn": 99_289 * 3073 * 2,  # the file itself, and what is inside
    "usps": 9_298 * (256 * 12 + 3),
    "mnist_m": 70_000 * (3072 + 3_500),
    "syn_digits": 488_953 * 3073 * 2,
    "syn_digits_12k": 12_000 * 500_000,
    "femnist": 814_255 * 784 * 20,
    "sent140": 240_000_000,
    "speech_commands": 105_829 * 33_000,
    "audiomnist": 30_000 * 96_044,
}


def test_the_official_files_are_within_the_bounds():
    assert set(OFFICIAL) == {name for name, entry in CATALOGUE.items() if not entry.parts}
    for name, size in OFFICIAL.items():
        assert CATALOGUE[name].most_rows and size < CATALOGUE[name].most_bytes, name


def test_the_users_own_bound_goes_before(tmp_path, monkeypatch):
    x, y = np.zeros((6, 28, 28), np.uint8), np.arange(6, dtype=np.uint8)
    paths = official.mnist_files(tmp_path, x[:4], y[:4], x[4:], y[4:])
    monkeypatch.setenv("BESPOKE_MAX_BYTES", "3000")
    with pytest.raises(UserError, match=r"unpacks to more than the 3000 bytes .* set BESPOKE_MAX_BYTES to a larger"):
        acquire.read(CATALOGUE["mnist"], paths)
    monkeypatch.setenv("BESPOKE_MAX_BYTES", "10000")
    assert len(acquire.read(CATALOGUE["mnist"], paths).y) == 6
    for wrong in ("much", "-1", "0", "1e9", "9" * 30):
        monkeypatch.setenv("BESPOKE_MAX_BYTES", wrong)
        with pytest.raises(UserError, match="is no number of bytes"):
            acquire.read(CATALOGUE["mnist"], paths)


def test_archives_of_clients_must_fit_into_memory_or_on_disk(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", x=np.zeros((100, 5)), y=np.zeros(100, int))
    rng = np.random.default_rng(0)
    assert built_in.files(rng, str(tmp_path / "*.npz"), 0, 0.2).x.shape == (100, 5)
    monkeypatch.setattr(built_in, "room", lambda: 1000.0)
    with pytest.raises(UserError, match=r"^'x.npy' in a.npz unpacks to more than the 1000 bytes"):
        built_in.files(rng, str(tmp_path / "*.npz"), 0, 0.2)


# --- what is no damage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TypeError("our own"), KeyError("our own"), MemoryError("no room")])
def test_a_mistake_of_ours_is_not_called_damage(error, tmp_path, monkeypatch):
    def fail(*given):
        if given[-1] != "a client":  # that one bounds a client's rows while they are parsed
            raise error

    tweets = official.sent140_zip(tmp_path / "t.zip", [(4, "amy", "good day")] * 30)
    leaf = official.leaf_json(tmp_path / "a.json", {"a": (np.zeros((1, 784)), np.array([1]))})
    monkeypatch.setattr(text, "words_of", fail)
    with pytest.raises(type(error)):
        acquire.read(CATALOGUE["sent140"], tweets)
    usps = official.usps_files(tmp_path, np.zeros((1, 256)), [1], np.zeros((1, 256)), [1])
    monkeypatch.setattr(Entry, "admit", fail)
    for name, path in (("sent140", tweets), ("femnist", [leaf]), ("usps", usps)):
        with pytest.raises(type(error)):
            acquire.read(CATALOGUE[name], path)


# --- reading in pieces ----------------------------------------------------------------------------------------------


def test_arrays_in_pieces_are_the_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "PIECE", 100)
    rng = np.random.default_rng(0)
    kept = {
        "a": rng.integers(0, 256, (50, 3, 4), dtype=np.uint8),
        "b": np.asfortranarray(rng.standard_normal((20, 30))),
        "c": np.array(["ab", "c"]),
        "d": np.array(7),
        "e": np.zeros((0, 9)),
        "f": np.zeros((9, 0)),
    }
    np.savez_compressed(tmp_path / "a.npz", **kept)
    found = npz.Npz(tmp_path / "a.npz", Allowance(10**6))
    for name, array in kept.items():
        again = found.read(name)
        assert again.dtype == array.dtype and again.shape == array.shape and np.array_equal(again, array)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_tar_archives_of_every_kind(tmp_path, mode):
    contents = {"a/b.bin": b"12345" * 5000, "c" * 300: b"", "d.txt.gz": gzip.compress(b"hello")}
    with tarfile.open(tmp_path / "t", mode) as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    found = {member.name: member.read(10**5) for member in Files([tmp_path / "t"], Allowance(10**6)).members()}
    assert found == {"a/b.bin": b"12345" * 5000, "c" * 300: b"", "d.txt": b"hello"}
    only = [member.name for member in Files([tmp_path / "t"], Allowance(10**6)).members(lambda name: "d" in name)]
    assert only == ["d.txt"]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_json_in_pieces_is_json(piece, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PIECE", piece)
    row = [0.0, 1, 0.25] + [0.5] * 781
    monkeypatch.setattr(text.JsonText, "LONGEST", 8000)
    path = official.leaf_json(tmp_path / "ü.json", {"é": (np.array([row, row]), np.array([1, 61]))})
    path.write_text(path.read_text().replace(", ", " ,\n\t"))
    found = acquire.read(CATALOGUE["femnist"], [path])
    assert found.owner_names == ("é",) and found.y.tolist() == [1, 61]
    assert found.x.reshape(2, 784)[1, :4].tolist() == [0, 255, 64, 128]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("a pixel NaN", "client 'a' of .*json is truncated or damaged .a pixel is not in 0..1"),
        ("a pixel Infinity", "client 'a' .*a pixel is not in 0..1"),
        ("the label 1.7", "client 'a' .*the label 1.7 is no whole number"),
        ("the label NaN", "client 'a' .*NaN"),
        ("a client twice", "'a' is no key, or is there twice"),
    ],
)
def test_a_client_of_leaf_with_a_wrong_number_is_named(kind, sentence, tmp_path):
    (tmp_path / "a.json").write_text(hostile.LEAF[kind])
    with pytest.raises(UserError, match=sentence):
        acquire.read(CATALOGUE["femnist"], [tmp_path / "a.json"])


def test_names_from_outside_are_quoted(tmp_path):
    official.zipped(tmp_path / "a.zip", {"\x1b[31m/mnist_m_train/0.png": b"no picture"})
    with pytest.raises(UserError) as caught:
        acquire.read(CATALOGUE["mnist_m"], [tmp_path / "a.zip"])
    assert "\x1b" not in str(caught.value) and "\\x1b[31m" in str(caught.value)
