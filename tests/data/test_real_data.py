"""The real data sets that are here: whatever $BESPOKE_DATA holds is checked, and what it does not hold is no test."""

import hashlib

import numpy as np
import official_files as official
import pytest
import torch

from bespoke.data import DataSettings, federate_data, home
from bespoke.data.sources import acquire, catalogue, store
from bespoke.data.sources.catalogue import CATALOGUE
from bespoke.data.sources.content import hashes

HERE = [name for name in CATALOGUE if store.holds(name)]
USABLE = [name for name in CATALOGUE if not catalogue.missing(name)]

# SHA-256 of the official arrays: of the train rows, channels last, and of the test rows where their order is kept.
OFFICIAL = {
    "mnist": (
        "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
    ),
    "fashion_mnist": (
        "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
    ),
    "cifar10": (
        "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    ),
    "cifar100": ("4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430", None),
    "usps": (
        "b3aea71639e9f07b0000e170f269551297d36369654afbe43330a543ceeb8e5e",
        "418e84c15696e0dc49487494268870b9c65670c1539d487d775caeea7877b253",
    ),
    "audiomnist": ("d5cfa85d3033ff1656174839983ad71f1642537217765328a25e304a94f51974", None),
}
# Label of the first rows, and the sum of the first row's values.
FIRST = {
    "mnist": ([5, 0, 4, 1, 9], 27525),
    "mnist_writers": ([5, 0, 4, 1, 9], 27525),
    "fashion_mnist": ([9, 0, 0, 3, 0], 76247),
    "cifar10": ([6, 9, 9, 4, 1], 317790),
    "cifar100": ([19, 29, 0, 11, 1], 424846),
    "usps": ([6, 5, 4, 7, 3], 22261),
    "audiomnist": ([0, 0, 0, 0, 0], 100426),
}


def test_everything_in_the_folder_is_looked_at(capsys):
    root = home.root()
    found = {path.name for path in root.iterdir() if path.is_dir()} if root.is_dir() else set()
    sets = {name for name in found - {"downloads", "derived"} if not name.startswith(".")}
    assert sets == set(HERE)  # a folder without a manifest, or of an unknown set, must not go unseen
    with capsys.disabled():
        print(f"\nreal data sets in use: {', '.join(HERE) or 'none'}")


@pytest.mark.parametrize("name", HERE)
def test_rows_are_those_of_the_catalogue(name):
    entry, examples, manifest = CATALOGUE[name], store.load(name), store.manifest(name)
    acquire.check(entry, examples, str(store.folder(name)))
    assert examples.y.dtype == np.int64 and examples.num_classes == entry.classes == manifest["classes"]
    found = hashes(examples)
    assert (found.content, found.order) == (manifest["content_hash"], manifest["order_hash"])
    if entry.verified:
        assert manifest["verified"] == (found.content == entry.content_hash)
        assert manifest["official_order"] == (found.order == entry.order_hash)


@pytest.mark.parametrize("name", [name for name in HERE if name in OFFICIAL and store.manifest(name)["verified"]])
def test_arrays_are_the_official_ones(name):
    examples = store.load(name)
    if not store.manifest(name)["official_order"]:
        pytest.fail(f"{name} is here in another order than the official one: import the official files")
    held = np.zeros(len(examples.y), bool) if examples.official_test is None else np.asarray(examples.official_test)
    assert not held[: len(held) - held.sum()].any()  # train rows, then test rows
    for rows, wanted in zip((examples.x[~held], examples.x[held]), OFFICIAL[name], strict=True):
        last = np.ascontiguousarray(np.moveaxis(rows, 1, -1))
        assert wanted is None or hashlib.sha256(last.tobytes()).hexdigest() == wanted


@pytest.mark.parametrize("name", [name for name in HERE if name in FIRST and store.manifest(name)["official_order"]])
def test_first_rows(name):
    examples = store.load(name)
    assert (examples.y[:5].tolist(), int(examples.x[0].sum())) == FIRST[name]


def write_officially(folder, name, x, y):
    """The set's rows as the official files have them, not compressed; official test rows are the last 10,000."""
    paths = []
    for part, rows, numbers in (("train", x[:-10000], y[:-10000]), ("test", x[-10000:], y[-10000:])):
        if name in ("mnist", "fashion_mnist"):
            contents = {f"{part}-images-idx3-ubyte": rows[:, 0], f"{part}-labels-idx1-ubyte": numbers}
            contents = {file: official.idx_bytes(np.asarray(array)) for file, array in contents.items()}
        else:
            labels = [numbers] if name == "cifar10" else [numbers // 5, numbers]
            table = np.concatenate([np.stack(labels, axis=1), rows.reshape(len(rows), -1)], axis=1)
            files = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}[part]
            files = files if name == "cifar10" else [f"{part}.bin"]
            contents = {file: cut.tobytes() for file, cut in zip(files, np.array_split(table, len(files)), strict=True)}
        for file, content in contents.items():
            paths.append(folder / file)
            paths[-1].write_bytes(content)
    return paths


@pytest.mark.parametrize("name", [name for name in HERE if name in ("mnist", "fashion_mnist", "cifar10", "cifar100")])
def test_official_files_of_the_same_rows_are_verified(name, tmp_path):
    examples = store.load(name)
    order = np.arange(len(examples.y))
    if name == "cifar100":  # whose files have the test rows in an order of their own
        order[-10000:] = np.random.default_rng(0).permutation(order[-10000:])
    paths = write_officially(tmp_path, name, examples.x[order], examples.y[order].astype(np.uint8))
    found = acquire.examine(CATALOGUE[name], paths, "")
    assert (found.verified, found.official_order) == (True, store.manifest(name)["official_order"])
    assert np.array_equal(found.examples.x, examples.x) and np.array_equal(found.examples.y, examples.y)


@pytest.mark.parametrize("name", [name for name in HERE if name == "cifar100"])
def test_cifar100_test_rows_are_in_canonical_order(name):
    examples = store.load(name)
    held = np.flatnonzero(examples.official_test)
    keys = [(int(examples.y[i]), hashlib.sha256(examples.x[i].tobytes()).digest()) for i in held]
    assert keys == sorted(keys)


@pytest.mark.parametrize("name", USABLE)
def test_a_set_becomes_a_federation_without_a_copy(name):
    examples = catalogue.load(name)
    assert isinstance(examples.x, np.memmap)
    pool = federate_data(DataSettings(name=name), 0)
    assert len(pool.x) == len(examples.y) and pool.num_classes == CATALOGUE[name].classes
    own = CATALOGUE[name].owners
    assert pool.total_clients == (20 if own is None else len(examples.owner_names))
    if examples.x.dtype == np.uint8:
        assert pool.x.dtype == torch.uint8 and torch.equal(pool.x[0], torch.tensor(examples.x[0]))
