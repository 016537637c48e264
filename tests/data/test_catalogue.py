"""The catalogue: what is known of each set, what is refused, downloads, sets made of others."""

import functools
import hashlib
import http.server
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import official_files as official
import pytest

from bespoke.data import DATASETS, DataSettings, federate_data
from bespoke.data.examples import Examples
from bespoke.data.sources import acquire, catalogue, store, unions
from bespoke.data.sources.built_in import two_level_gaussian
from bespoke.data.sources.catalogue import CATALOGUE
from bespoke.data.sources.content import hashes
from bespoke.data.sources.entry import File
from bespoke.errors import UserError

RNG = np.random.default_rng(0)
VERIFIED = {"mnist", "mnist_writers", "fashion_mnist", "cifar10", "cifar100", "usps", "audiomnist"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def small(name="mnist", **changes):
    """An entry for six small rows, without a known hash."""
    fields = {"sizes": ((4, 2),), "counts": (1,) * 6 + (0,) * 4, "content_hash": None, "order_hash": None} | changes
    return replace(CATALOGUE[name], **fields)


def rows(n=6):
    return RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8), (np.arange(n) % 10).astype(np.uint8)


def npz(path, x, y, test=2):
    cut = len(y) - test
    np.savez(path, x_train=x[:cut], y_train=y[:cut], x_test=x[cut:], y_test=y[cut:])
    return [path]


# --- what is known --------------------------------------------------------------------------------------------------


def test_every_entry_is_complete():
    for name, entry in CATALOGUE.items():
        assert entry.name == name and entry.doc and "\n" not in entry.doc and entry.licence
        assert entry.classes >= 2 and entry.shapes
        assert (entry.read is None) == bool(entry.parts) == (entry.build is not None)
        assert entry.parts or entry.files or entry.hint
        assert not entry.counts or len(entry.counts) == entry.classes
        assert all(sum(entry.counts) in (0, train + test) for train, test in entry.sizes)
        for file in entry.files:
            assert file.addresses and all(address.startswith("http") for address in file.addresses)
            assert file.md5 is None or len(bytes.fromhex(file.md5)) == 16
        for value in (entry.content_hash, entry.order_hash):
            assert value is None or len(bytes.fromhex(value)) == 32
        assert entry.parts or (entry.page.startswith("http") and entry.source)
        assert all(part in CATALOGUE for part in entry.parts)
    assert {name for name, entry in CATALOGUE.items() if entry.verified} == VERIFIED


def test_every_set_can_be_named_in_an_experiment():
    assert set(CATALOGUE) < set(DATASETS) and {"digits", "gaussian", "files", "synthetic_hierarchy"} < set(DATASETS)
    assert all(load.doc for load in DATASETS.values())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "cifar10",
            "the data set cifar10 is not here: run bespoke data fetch cifar10 or bespoke data import cifar10 FILE",
        ),
        ("syn_digits_12k", "the data set syn_digits_12k is not here: run bespoke data import syn_digits_12k FILE"),
        ("digits4", "digits4 needs mnist, usps, svhn, syn_digits_12k, not here: run bespoke data import mnist FILE"),
        ("digit5", "digit5 needs mnist, svhn, usps, syn_digits, mnist_m, not here: run bespoke data fetch digit5 or "),
        ("audiomnist_wake", "audiomnist_wake needs audiomnist, not here: run bespoke data fetch audiomnist_wake or "),
    ],
)
def test_a_set_that_is_not_here(name, sentence):
    with pytest.raises(UserError) as caught:
        federate_data(DataSettings(name=name), 0)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UserError, match=r"no data set 'cifar1O' to fetch or import \(did you mean 'cifar10'\?"):
        catalogue.find("cifar1O")


# --- what is refused ------------------------------------------------------------------------------------------------


def test_another_sets_rows_are_refused(tmp_path):
    x, y = rows()
    entry = small()

    def refused(match, entry, x=x, y=y):
        with pytest.raises(UserError, match=match):
            acquire.import_files(entry, npz(tmp_path / "f.npz", x, y), "0" * 64)
        assert not store.holds(entry.name)

    refused(
        r"mnist has the labels 0\.\.9, f\.npz has 0\.\.17: it is another data set",
        entry,
        y=np.array([0, 1, 2, 3, 4, 17]),
    )
    refused(r"mnist has 4 \+ 2 rows for training and test, f\.npz has 3 \+ 2", entry, x[:5], y[:5])
    refused(r"mnist has 1 rows with the label 2, f\.npz has 2", entry, y=np.array([0, 1, 2, 2, 4, 5]))
    refused(r"has shape \(28, 28\), but \(3, 32, 32\) is expected", small("cifar10"))
    refused(r"has 836 clients of its own, f\.npz has none", small("mnist_writers", sizes=()))
    np.savez(tmp_path / "w.npz", x=x, y=y, writer=y)
    with pytest.raises(UserError, match=r"mnist has no clients of its own, w\.npz has 6: give the files of mnist"):
        acquire.import_files(entry, [tmp_path / "w.npz"])
    np.savez(tmp_path / "a.npz", x=x[:, :, 0], y=y, speaker=np.arange(6), room=np.arange(6))
    changed = small("audiomnist", shapes=((1, 28),), sizes=(), owners=6)
    with pytest.raises(UserError, match="audiomnist has the domains"):
        acquire.import_files(replace(changed, shapes=((28,),)), [tmp_path / "a.npz"])


def test_the_first_import_of_an_unknown_content_asks_for_trust(tmp_path, folder):
    x, y = rows()
    paths = npz(tmp_path / "f.npz", x, y)
    expected = hashes(Examples(x[:, None], y.astype(np.int64), 10)).content
    with pytest.raises(
        UserError, match=rf"if you trust the source, run bespoke data import mnist .*f\.npz --trust {expected}"
    ):
        acquire.import_files(small(), paths)
    assert not (folder / "mnist").exists()
    with pytest.raises(UserError, match=rf"has the hash {expected}, not the trusted abc: it is not used"):
        acquire.import_files(small(), paths, "abc")
    manifest = acquire.import_files(small(), paths, expected.upper())
    assert not manifest["verified"] and manifest["source"] == "f.npz"
    assert store.load("mnist").official_test.sum() == 2


def test_a_wrong_hash_shows_both_and_the_users_file_stays(tmp_path):
    x, y = rows()
    paths = npz(tmp_path / "f.npz", x, y)
    found = hashes(Examples(x[:, None], y.astype(np.int64), 10))
    before = paths[0].read_bytes()
    with pytest.raises(
        UserError, match=rf"has the hash {found.content}, but that of mnist is {'e' * 64}: it is not used"
    ):
        acquire.import_files(small(content_hash="e" * 64), paths)
    assert paths[0].read_bytes() == before and not store.holds("mnist")
    manifest = acquire.import_files(small(content_hash=found.content, order_hash=found.order), paths)
    assert manifest["verified"] and manifest["official_order"]


def test_rows_in_another_order_are_the_same_content_but_noted(tmp_path):
    x, y = rows()
    found = hashes(Examples(x[:, None], y.astype(np.int64), 10))
    order = [1, 0, 2, 3, 4, 5]
    entry = small(content_hash=found.content, order_hash=found.order)
    manifest = acquire.import_files(entry, npz(tmp_path / "f.npz", x[order], y[order]))
    assert manifest["verified"] and not manifest["official_order"]


def test_a_set_that_is_here_is_left_alone(tmp_path):
    x, y = rows()
    paths = npz(tmp_path / "f.npz", x, y)
    trust = hashes(Examples(x[:, None], y.astype(np.int64), 10)).content
    acquire.import_files(small(), paths, trust)
    said = []
    acquire.import_files(small(), npz(tmp_path / "g.npz", *rows()), tell=said.append)
    assert said == [f"mnist is already here; remove {store.folder('mnist')} to import it again"]
    assert np.array_equal(store.load("mnist").x[:, 0], x)


# --- downloads ------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    """Serves the folder ``served``; ``asked`` are the paths that were asked for."""
    (tmp_path / "served").mkdir()
    asked = []

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path)

    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        running.folder, running.asked = tmp_path / "served", asked
        running.address = f"http://127.0.0.1:{running.server_port}/"
        yield running
        running.shutdown()


def served(server, x, y, md5=True, **changes):
    """The entry of MNIST's four files on the server."""
    paths = official.mnist_files(server.folder, x[:4], y[:4], x[4:], y[4:])
    digest = [hashlib.md5(path.read_bytes()).hexdigest() for path in paths]
    files = [
        File(path.name, (server.address + path.name,), known if md5 else None)
        for path, known in zip(paths, digest, strict=True)
    ]
    return small(files=tuple(files), **changes)


class Bar:
    """What pooch needs of a progress bar; counts."""

    made = 0

    def __init__(self, name):
        Bar.made += 1
        self.total, self.seen, self.closed = 0, 0, False

    def update(self, count):
        assert not self.closed
        self.seen += count

    def reset(self):
        self.seen = 0

    def close(self):
        self.closed = True


def test_fetch_downloads_checks_and_stores(server, folder):
    x, y = rows()
    found = hashes(Examples(x[:, None], y.astype(np.int64), 10))
    entry = served(server, x, y, content_hash=found.content, order_hash=found.order)
    Bar.made = 0
    manifest = acquire.fetch(entry, progress=Bar)
    assert manifest["verified"] and Bar.made == 4
    assert manifest["source"].startswith(f"{server.address}train-images-idx3-ubyte.gz, ")
    assert np.array_equal(store.load("mnist").x[:, 0], x)
    assert list((folder / "downloads").rglob("*.gz")) == []
    asked = len(server.asked)
    said = []
    acquire.fetch(entry, tell=said.append)
    assert said == ["mnist is already here"] and len(server.asked) == asked


def test_an_unverified_download_is_shown_and_kept_until_it_is_trusted(server, folder):
    x, y = rows()
    trust = hashes(Examples(x[:, None], y.astype(np.int64), 10)).content
    entry = served(server, x, y)
    with pytest.raises(UserError, match=rf"run bespoke data fetch mnist --trust {trust}$"):
        acquire.fetch(entry)
    asked = len(server.asked)
    assert not acquire.fetch(entry, trust)["verified"]
    assert len(server.asked) == asked  # nothing is downloaded twice


def test_a_file_with_a_wrong_md5_is_kept_aside_and_never_used(server, folder):
    x, y = rows()
    entry = served(server, x, y)
    path = server.folder / entry.files[0].name
    path.write_bytes(b"another file")
    wrong = hashlib.md5(b"another file").hexdigest()
    with pytest.raises(
        UserError, match=rf"has the MD5 {wrong}, but {entry.files[0].md5} is expected \(kept as .*rejected"
    ):
        acquire.fetch(entry)
    aside = folder / "downloads" / "mnist" / f"{path.name}.rejected"
    assert aside.read_bytes() == b"another file" and not store.holds("mnist")


def test_a_content_with_a_wrong_hash_is_kept_aside(server, folder):
    x, y = rows()
    entry = served(server, x, y, content_hash="e" * 64)
    with pytest.raises(UserError, match=rf"but that of mnist is {'e' * 64}.*\(kept as .*images-idx3-ubyte.gz.rejected"):
        acquire.fetch(entry)
    assert len(list(folder.rglob("*.rejected"))) == 4 and list(folder.rglob("*.gz")) == []
    cut = served(server, x, y, md5=False)
    path = server.folder / cut.files[0].name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz is truncated or damaged.*kept"):
        acquire.fetch(cut)
    assert list(folder.rglob("*.gz")) == []


def wordless(*_, **__):
    raise ValueError("\n")


def test_a_failed_download_says_what_where_and_how_else(server, folder, monkeypatch):
    x, y = rows()
    entry = served(server, x, y)
    (server.folder / entry.files[1].name).unlink()
    with pytest.raises(UserError) as caught:
        acquire.fetch(entry, progress=Bar)
    told = str(caught.value)
    assert told.startswith(f"cannot download train-labels-idx1-ubyte.gz from {entry.files[1].addresses[0]}: 404")
    assert told.endswith("get the file elsewhere and run bespoke data import mnist FILE") and "\n" not in told
    gone = replace(entry, files=(File("a.gz", ("http://127.0.0.1:9/a.gz",)),))
    with pytest.raises(UserError, match=r"cannot download a\.gz from http://127\.0\.0\.1:9/a\.gz: .*refused"):
        acquire.fetch(gone)
    monkeypatch.setattr("pooch.retrieve", wordless)
    with pytest.raises(UserError, match=r"from http://127\.0\.0\.1:9/a\.gz: ValueError; get"):
        acquire.fetch(gone)


def test_a_disk_that_fills_up_during_a_download(server, folder, monkeypatch):
    import pooch

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pooch, "retrieve", full)
    with pytest.raises(
        UserError,
        match=r"cannot write train-images-idx3-ubyte\.gz below .*No space left.*make room, or set",
    ):
        acquire.fetch(served(server, *rows()))


def test_the_next_address_is_tried(server):
    x, y = rows()
    entry = served(server, x, y)
    first = replace(
        entry, files=tuple(f._replace(addresses=("http://127.0.0.1:9/none", *f.addresses)) for f in entry.files)
    )
    trust = hashes(Examples(x[:, None], y.astype(np.int64), 10)).content
    assert acquire.fetch(first, trust)["rows"] == 6


def test_an_archive_of_several_sets_is_kept(server, folder):
    x, y = rows()
    [path] = official.emnist_zip(server.folder / "gzip.zip", "balanced", x[:4], y[:4], x[4:], y[4:])
    entry = small(
        "emnist_balanced", counts=(), files=(File("gzip.zip", (server.address + "gzip.zip",), None, "emnist"),)
    )
    trust = hashes(Examples(x[:, None], y.astype(np.int64), 47)).content
    acquire.fetch(entry, trust)
    assert (folder / "downloads" / "emnist" / "gzip.zip").read_bytes() == path.read_bytes()


def test_a_set_without_an_address_says_how_to_come_by_it():
    sentence = r"cannot be downloaded: it needs an account.*, then run bespoke data import syn_digits_12k FILE"
    with pytest.raises(UserError, match=sentence):
        acquire.fetch(CATALOGUE["syn_digits_12k"])


# --- sets made of others --------------------------------------------------------------------------------------------


def part(n, shape, seed, test=None):
    rng = np.random.default_rng(seed)
    marks = None if test is None else np.arange(n) >= n - test
    return Examples(rng.integers(0, 256, (n, *shape), dtype=np.uint8), np.arange(n) % 10, 10, official_test=marks)


def put(name, examples):
    with store.locked(name):
        store.write(name, examples, hashes(examples), "a test", name == "mnist", True)


def test_digit5_is_cut_as_fedbn_does(monkeypatch):
    from sklearn.model_selection import StratifiedShuffleSplit

    monkeypatch.setattr(unions, "TRAIN_ROWS", 30)
    shapes = {
        "mnist": (1, 28, 28),
        "svhn": (3, 32, 32),
        "usps": (1, 16, 16),
        "syn_digits": (3, 32, 32),
        "mnist_m": (3, 28, 28),
    }
    sizes = {"mnist": 201, "svhn": 99, "usps": 51, "syn_digits": 300, "mnist_m": 68}
    parts = {name: part(sizes[name], shapes[name], i, 20) for i, name in enumerate(unions.DIGIT5)}
    for name, examples in parts.items():
        put(name, examples)
    found = catalogue.load("digit5")
    assert found.domain_names == unions.DIGIT5 and found.x.shape[1:] == (3, 32, 32)
    for i, name in enumerate(unions.DIGIT5):
        own = found.domain == i
        test = -(-sizes[name] // 5)  # rounded up
        assert (own.sum(), found.official_test[own].sum()) == (30 + test, test)
        y = parts[name].y
        train, held = next(StratifiedShuffleSplit(1, test_size=0.2, random_state=0).split(y, y))
        assert found.y[own].tolist() == y[np.r_[train[:30], held]].tolist()
        if shapes[name] == (3, 32, 32):
            assert np.array_equal(found.x[own], parts[name].x[np.r_[train[:30], held]])
    assert store.holds("digit5") and not store.manifest("digit5")["verified"]
    assert np.array_equal(catalogue.load("digit5").x, found.x)


def test_digit5_sizes_are_those_of_the_papers():
    sizes = {"mnist": 70000, "svhn": 99289, "usps": 9298, "syn_digits": 488953, "mnist_m": 70000}
    marks = {name: unions.fedbn_rows(np.arange(n) % 10)[1] for name, n in sizes.items()}
    assert [int((~held).sum()) for held in marks.values()] == [7438] * 5
    assert [int(held.sum()) for held in marks.values()] == [14000, 19858, 1860, 97791, 14000]


def test_digits4_and_digits2_keep_every_row_and_the_official_marks():
    parts = [
        part(12, (1, 28, 28), 0, 3),
        part(11, (1, 16, 16), 1, 2),
        part(13, (3, 32, 32), 2, 4),
        part(9, (3, 32, 32), 3),
    ]
    for name, examples in zip(unions.DIGITS4, parts, strict=True):
        put(name, examples)
    found = catalogue.load("digits4")
    assert np.bincount(found.domain).tolist() == [12, 11, 13, 9]
    assert [int(found.official_test[found.domain == i].sum()) for i in range(4)] == [3, 2, 4, 0]
    assert np.array_equal(found.x[found.domain == 3], parts[3].x)
    assert found.y.tolist() == [label for p in parts for label in p.y]
    two = catalogue.load("digits2")
    assert two.domain_names == ("mnist", "usps")
    assert np.array_equal(two.x, found.x[found.domain < 2]) and two.official_test.sum() == 5


def test_resizing_is_bilinear():
    ramp = np.broadcast_to(np.arange(16, dtype=np.uint8) * 10, (1, 1, 16, 16))
    wide = unions.resized(ramp)[0]
    centres = (np.arange(32) + 0.5) / 2 - 0.5  # of the new points on the old grid
    wanted = np.interp(centres, np.arange(16), np.arange(16) * 10)
    assert wide.shape == (3, 32, 32) and np.abs(wide - wanted).max() <= 1
    colour = RNG.integers(0, 256, (2, 3, 28, 28), dtype=np.uint8)
    grey = [unions.resized(colour[:, [c]])[:, 0] for c in range(3)]
    assert np.array_equal(unions.resized(colour), np.stack(grey, axis=1))


def test_a_wake_word_is_one_label_against_the_others():
    n = 40
    rng = np.random.default_rng(0)
    spoken = Examples(
        rng.integers(0, 256, (n, 1, 49, 40), dtype=np.uint8),
        np.arange(n) % 10,
        10,
        owner=np.arange(n) % 4,
        owner_names=tuple("abcd"),
        domain=np.arange(n) % 2,
        domain_names=("Kino", "library"),
    )
    put("audiomnist", spoken)
    found = catalogue.load("audiomnist_wake")
    assert found.num_classes == 2 and found.y.tolist() == [int(i % 10 == 7) for i in range(n)]
    assert found.owner_names == tuple("abcd") and found.domain_names == ("Kino", "library")
    assert isinstance(found.x, np.memmap) and not store.holds("audiomnist_wake")
    assert federate_data(DataSettings(name="audiomnist_wake", partition="natural"), 0).total_clients == 4


# --- the two-level Gaussian -----------------------------------------------------------------------------------------


def test_the_two_level_gaussian_has_both_variances():
    for between in (1.0, 0.001):
        found = two_level_gaussian(np.random.default_rng(0), 2000, between)
        owner, seen = found.owner[~found.official_test], found.y[~found.official_test]
        sizes = np.bincount(owner)
        assert sizes.min() == 20 and sizes.max() == 200 and abs(sizes.mean() - 110) < 3
        means = np.bincount(owner, seen) / sizes
        within = seen - means[owner]
        assert abs((within**2).sum() / (sizes - 1).sum() - 1) < 0.02
        expected = between + (1 / sizes).mean()  # theta_m, and the mean of N_m observations around it
        assert abs(means.var() / expected - 1) < 0.1
        assert abs(means.mean()) < 4 * np.sqrt(expected / 2000)
        assert (found.owner[found.official_test] == np.arange(2000)).all()
        truth = found.y[found.official_test]
        assert abs(truth.var() / between - 1) < 0.1 and abs(((means - truth) ** 2 * sizes).mean() - 1) < 0.1


def test_the_synthetic_federation_has_twenty_clients_unless_told_otherwise():
    pool = federate_data(DataSettings(name="synthetic_hierarchy"), 3)
    assert pool.total_clients == 20 and pool.num_classes == 0 and not pool.x.any()
    assert federate_data(DataSettings(name="synthetic_homogeneous", clients=5), 3).total_clients == 5
    again = federate_data(DataSettings(name="synthetic_hierarchy"), 3)
    assert (pool.y == again.y).all() and pool.train.sizes == again.train.sizes


def test_the_true_means_are_the_test_rows_and_nobody_trains_on_them():
    pool = federate_data(DataSettings(name="synthetic_hierarchy", between=1e6, validation=0.2, new_clients=2), 3)
    assert pool.test.sizes == (1,) * 20 and pool.test.index.tolist() == list(range(len(pool.y) - 20, len(pool.y)))
    assert max(pool.train.index.max(), pool.val.index.max()) < len(pool.y) - 20
    for client in range(20):
        truth, own = (pool.y[rows.client(client)] for rows in (pool.test, pool.train))
        assert abs(own.mean() - truth) < 1.5  # of means that are a thousand apart
    for wrong in ({"partition": "iid"}, {"pool": "train+test"}):
        with pytest.raises(UserError, match="true means, on which nobody may train"):
            federate_data(DataSettings(name="synthetic_hierarchy", **wrong), 3)


def test_the_page_on_data_knows_every_set_and_its_state():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    table = {line.split("|")[1].strip(" `"): line for line in page.splitlines() if line.startswith("| `")}
    assert set(table) == set(CATALOGUE)
    for name, line in table.items():
        entry, state = CATALOGUE[name], line.split("|")[-2].strip()
        expected = "of its part" if entry.parts else "verified" if entry.verified else "not verified"
        assert state.rstrip("s") == expected
        assert line.split("|")[4].strip() == str(entry.classes)
        for train, test in entry.sizes:
            assert (f"{train:,} + {test:,}" if test else f"{train:,} ") in line
