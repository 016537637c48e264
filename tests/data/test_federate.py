"""From settings, files or arrays to a federation: the splits, the checks, the refusals."""

import dataclasses
import math
import re
import zipfile

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from bespoke import data
from bespoke.data import (
    DATASETS,
    PARTITIONS,
    DataSettings,
    Examples,
    federate_data,
    from_arrays,
    partitioned,
    pool_of,
)
from bespoke.data.examples import train_count
from bespoke.data.images import corrupt
from bespoke.data.images.degrade import DEGRADATIONS
from bespoke.data.partition.replay import replay
from bespoke.data.partition.volumes import pfedme
from bespoke.data.pool import cut
from bespoke.errors import UserError


def rows(pool, part):
    return [getattr(pool, part).client(i).tolist() for i in range(pool.total_clients)]


def same(a, b):
    return torch.equal(a.x, b.x) and all(rows(a, part) == rows(b, part) for part in ("train", "test", "val"))


def client(n, seed=0, dim=3, classes=2):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, dim)).astype(np.float32), np.arange(n) % classes


def save(folder, name, **arrays):
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{name}.npz", **arrays)


# --- splits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "test", "train"),
    [
        (63, 0.2, 50),
        (5, 0.2, 4),
        (1, 0.2, 1),
        (2, 0.2, 1),
        (0, 0.2, 0),
        (10, 0.9, 1),
        (1000, 0.29, 710),
        (4, 0.0, 4),
    ],
)
def test_number_of_train_rows(n, test, train):
    assert train_count(n, test) == train


def test_floors_are_those_of_exact_arithmetic():
    for n in range(200):
        for percent in range(100):
            exact = (100 - percent) * n // 100
            assert train_count(n, percent / 100) == (max(1, exact) if n else 0)


def test_cut_is_a_split_of_each_clients_rows():
    lists = [np.arange(0, 63), np.arange(63, 64), np.arange(64, 100)]
    train, test, val = cut(lists, DataSettings(validation=0.25), seed=1)
    for i, own in enumerate(lists):
        assert sorted([*train[i], *test[i], *val[i]]) == own.tolist()
    assert [len(t) for t in test] == [13, 0, 8]
    assert [len(v) for v in val] == [12, 0, 7]  # floor(0.25 * 50), floor(0.25), floor(0.25 * 28)
    assert cut(lists, DataSettings(validation=0.25), seed=2)[1][0].tolist() != test[0].tolist()


def test_the_draws_of_one_purpose_are_not_those_of_another():
    lists = [np.arange(40)]
    by_test, by_keep = DataSettings(test=0.5), DataSettings(test=0.0, keep=0.5)
    by_validation = DataSettings(test=0.0, validation=0.5)
    halves = [cut(lists, by_test, 0)[0], cut(lists, by_keep, 0)[0], cut(lists, by_validation, 0)[2]]
    assert len({tuple(half[0]) for half in halves}) == 3


def test_keep_and_validation_leave_the_test_rows_alone():
    lists = [np.arange(50), np.arange(50, 52)]
    train, test, _ = cut(lists, DataSettings(), seed=0)
    less, same_test, val = cut(lists, DataSettings(validation=0.1, keep=0.29), seed=0)
    assert [t.tolist() for t in same_test] == [t.tolist() for t in test]
    kept = set(less[0]) | set(val[0])
    assert kept < set(train[0])
    assert len(kept) == math.floor(0.29 * 40)
    assert len(val[0]) == 1
    assert len(less[1]) == 1  # at least one


def test_folds_are_a_split_of_each_clients_rows():
    lists = [np.arange(0, 23), np.arange(23, 24), np.arange(24, 27)]
    parts = [cut(lists, DataSettings(folds=5, fold=f), seed=1) for f in range(5)]
    for i, own in enumerate(lists):
        for train, test, _ in parts:
            assert sorted([*train[i], *test[i]]) == own.tolist()
            assert len(train[i])
        if len(own) > 1:  # a client with one row trains on it
            assert sorted(row for _, test, _ in parts for row in test[i]) == own.tolist()
    assert [len(test[0]) for _, test, _ in parts] == [5, 5, 5, 4, 4]
    other = cut(lists, DataSettings(folds=5), seed=2)
    assert other[1][0].tolist() != parts[0][1][0].tolist()


def test_one_minibatch_of_train_rows():
    lists = [np.arange(200), np.arange(200, 240)]
    train, test, _ = cut(lists, DataSettings(keep_rows=50), seed=0)
    assert [len(rows) for rows in train] == [50, 32]
    assert [t.tolist() for t in test] == [t.tolist() for t in cut(lists, DataSettings(), seed=0)[1]]
    less, _, _ = cut(lists, DataSettings(keep_rows=50, keep=0.25), seed=0)
    assert [len(rows) for rows in less] == [40, 8]


def test_rows_are_kept_for_the_clients_that_are_named():
    lists = [np.arange(i, i + 50) for i in range(0, 300, 50)]
    everyone, test, _ = cut(lists, DataSettings(new_clients=2), seed=0)
    for whom, cut_down in (("all", range(6)), ("new", range(4, 6)), ("train", range(4))):
        settings = DataSettings(new_clients=2, keep=0.5, keep_rows=7, keep_clients=whom)
        train, same_test, _ = cut(lists, settings, seed=0)
        assert [len(rows) for rows in train] == [7 if i in cut_down else 40 for i in range(6)]
        assert all(set(few) <= set(own) for few, own in zip(train, everyone, strict=True))
        assert [t.tolist() for t in same_test] == [t.tolist() for t in test]


def test_fewer_rows_are_some_of_more():
    """So that a curve over the number of rows adds rows and replaces none."""
    lists = [np.arange(i, i + 50) for i in range(0, 300, 50)]
    settings = [DataSettings(new_clients=2, keep_rows=n, keep_clients="new") for n in (2, 5, 20)]
    two, five, twenty = (cut(lists, each, seed=0)[0] for each in settings)
    assert all(set(two[i]) < set(five[i]) < set(twenty[i]) for i in (4, 5))


# --- the settings' way --------------------------------------------------------------------------------------


def test_digits_are_the_default():
    pool, found = partitioned(DataSettings(), seed=0)
    assert pool.x.shape == (1797, 1, 8, 8)
    assert pool.x.dtype == torch.uint8
    assert (pool.num_classes, pool.num_clients, pool.total_clients) == (10, 20, 20)
    assert sum(pool.train.sizes) + sum(pool.test.sizes) == 1797
    assert [a + b for a, b in zip(pool.train.sizes, pool.test.sizes, strict=True)] == [len(r) for r in found.lists]
    assert found.tries >= 1
    assert torch.bincount(pool.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    x = pool.transform(torch.zeros(2, dtype=torch.int64), pool.x, {}, True)
    assert x.dtype == torch.float32
    assert (x.min().item(), x.max().item()) == (-1.0, 1.0)
    assert torch.equal(x[0, 0, 0], pool.x[0, 0, 0] / 8 - 1)


def test_equal_seeds_give_equal_federations():
    settings = DataSettings(name="gaussian", rows=300, validation=0.1, keep=0.8)
    assert same(federate_data(settings, 7), federate_data(settings, 7))
    assert not same(federate_data(settings, 7), federate_data(settings, 8))
    assert same(federate_data(settings, -1), federate_data(settings, 2**64 - 1))


def test_purposes_do_not_disturb_each_other():
    plain = federate_data(DataSettings(clients=6), 3)
    aside = federate_data(DataSettings(clients=6, validation=0.2), 3)
    assert rows(plain, "test") == rows(aside, "test")
    for own, train, val in zip(rows(plain, "train"), rows(aside, "train"), rows(aside, "val"), strict=True):
        assert sorted(train + val) == own


def test_gaussian_blobs():
    pool = federate_data(DataSettings(name="gaussian", rows=120, dim=4, num_classes=3, spread=0.0, clients=2), 0)
    assert pool.x.shape == (120, 4)
    assert pool.x.dtype == torch.float32
    assert pool.num_classes == 3
    assert len(pool.x.unique(dim=0)) == 3  # without spread a class is a point
    wide = federate_data(DataSettings(name="gaussian", rows=5000, spread=2.0), 0)
    assert wide.x[wide.y == 0].std(dim=0).mean().item() == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "pathological"])
def test_new_clients_are_the_last_ones(partition):
    pool = federate_data(DataSettings(partition=partition, clients=8, new_clients=3), 0)
    everyone = federate_data(DataSettings(partition=partition, clients=8), 0)
    assert (pool.num_clients, pool.total_clients) == (5, 8)
    assert same(pool, everyone)
    assert pool.names == tuple("01234567")


def official():
    """Five train rows for every test row, two owners."""
    y = np.repeat(np.arange(3), 60)
    return Examples(np.arange(180.0)[:, None], y, 3, np.arange(180) % 6 == 0, np.arange(180) % 4 // 2, ("anna", "bert"))


def test_official_test_rows_follow_the_clients_classes(monkeypatch):
    monkeypatch.setitem(DATASETS, "official", DATASETS.read(official, "here"))
    settings = DataSettings(name="official", pool="split", partition="dirichlet", clients=5, alpha=0.5)
    pool = federate_data(settings, 0)
    assert sorted(pool.test.index.tolist()) == list(range(0, 180, 6))
    assert sorted(pool.train.index.tolist()) == [i for i in range(180) if i % 6]
    for i in range(5):
        own = torch.bincount(pool.y[pool.train.client(i)], minlength=3) / 5
        assert (torch.bincount(pool.y[pool.test.client(i)], minlength=3) - own).abs().max() < 1


def test_merged_rows_are_split_anew(monkeypatch):
    monkeypatch.setitem(DATASETS, "official", DATASETS.read(official, "here"))
    for pool in ("train+test", "auto"):
        settings = DataSettings(name="official", pool=pool, partition="iid", clients=5)
        merged = federate_data(settings, 0)
        assert sorted(torch.cat([merged.train.index, merged.test.index]).tolist()) == list(range(180))
        assert set(merged.train.sizes) == {28}  # floor(0.8 * 36)


def test_natural_clients_keep_their_official_test_rows(monkeypatch):
    monkeypatch.setitem(DATASETS, "official", DATASETS.read(official, "here"))
    pool = federate_data(DataSettings(name="official"), 0)
    assert pool.names == ("anna", "bert")
    assert rows(pool, "test") == [[i for i in range(0, 180, 6) if i % 4 // 2 == c] for c in (0, 1)]
    one = federate_data(DataSettings(name="official", clients=1), 0)
    assert rows(one, "train") == rows(pool, "train")[:1]
    merged = federate_data(DataSettings(name="official", pool="train+test"), 0)
    assert merged.train.sizes == (72, 72)
    with pytest.raises(UserError, match="clients is 3, but the data set has 2 clients of its own"):
        federate_data(DataSettings(name="official", clients=3), 0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"name": "digit"},
            r"\[data\] name: there is no data set 'digit' \(did you mean 'digits'\?\); there are digits, gaussian",
        ),
        ({"name": "zzz"}, "there is no data set 'zzz'; there are digits"),
        ({"alpha": 0.0}, "alpha must be greater than 0, not 0.0"),
        ({"alpha": -0.5}, "alpha must be greater than 0"),
        ({"clients": 1798, "partition": "iid"}, "1798 clients are more than the 1797 rows"),
        ({"clients": 1798}, "1798 clients are more than the 1797 rows"),
        ({"clients": 5, "new_clients": 5}, "5 of 5 clients cannot be new"),
        ({"new_clients": 20}, "20 of 20 clients cannot be new"),
        ({"pool": "split"}, "'digits' has no official test rows"),
        ({"partition": "natural"}, "no clients of its own"),
        ({"partition": "dirchlet"}, r"no partition 'dirchlet' \(did you mean 'dirichlet'\?\); there are auto, iid"),
        ({"test": 1.0}, "test must be at least 0 and at most 0.99"),
        ({"keep": 0.0}, "keep must be greater than 0"),
        ({"name": "files"}, "path is empty"),
    ],
)
def test_settings_that_make_no_sense(change, sentence):
    with pytest.raises(UserError, match=sentence):
        federate_data(DataSettings(**change), 0)


def test_empty_clients_of_a_partition():
    settings = DataSettings(name="gaussian", rows=30, clients=12, alpha=0.01, min_rows=0, balance=False)
    with pytest.raises(UserError, match=r"client '[0-9]+' has no training rows"):
        federate_data(settings, 0)
    pool = federate_data(settings, 0, skip_empty=True)
    assert 1 <= pool.num_clients < 12
    assert min(pool.train.sizes) > 0


def test_a_share_of_all_rows_is_drawn_first():
    settings = DataSettings(name="gaussian", rows=400, subsample=0.25, partition="iid", clients=5)
    pool, found = partitioned(settings, 0)
    used = np.concatenate(found.lists)
    assert len(np.unique(used)) == len(used) == 100
    assert used.max() > 300  # from everywhere
    assert not np.array_equal(np.sort(used), np.sort(np.concatenate(partitioned(settings, 1)[1].lists)))
    assert pool.x.shape == (400, 20)


def test_a_share_of_official_rows_stays_apart(monkeypatch):
    monkeypatch.setitem(DATASETS, "official", DATASETS.read(official, "here"))
    settings = DataSettings(name="official", pool="split", partition="iid", clients=3, subsample=0.5)
    pool = federate_data(settings, 0)
    assert len(pool.train.index) + len(pool.test.index) <= 90
    assert all(row % 6 == 0 for row in pool.test.index.tolist())
    assert all(row % 6 for row in pool.train.index.tolist())


def test_replay_through_the_settings(monkeypatch):
    monkeypatch.setitem(DATASETS, "official", DATASETS.read(official, "here"))
    settings = DataSettings(
        name="official", pool="train+test", partition="dirichlet", clients=5, alpha=0.5, replay=42, min_rows=10
    )
    pool, found = partitioned(settings, 0)
    other, again = partitioned(settings, 99)  # the script's seed counts, not the run's
    assert found.hash() == again.hash() and same(pool, other)
    wanted = replay(np.repeat(np.arange(3), 60), 42, 5, 0.5, 10, 0.2)
    assert rows(pool, "train") == [own.tolist() for own in wanted.train]
    assert rows(pool, "test") == [own.tolist() for own in wanted.test]
    less, _ = partitioned(dataclasses.replace(settings, keep=0.5, keep_rows=9), 0)
    assert rows(less, "test") == rows(pool, "test")
    assert all(set(few) < set(own) for few, own in zip(rows(less, "train"), rows(pool, "train"), strict=True))
    assert max(less.train.sizes) == 9


def test_the_hash_knows_the_split():
    plain = partitioned(DataSettings(clients=4), 0)[1]
    assert plain.hash() == partitioned(DataSettings(clients=4), 0)[1].hash()
    changed = [{"test": 0.3}, {"keep": 0.5}, {"folds": 3}, {"folds": 3, "fold": 1}, {"alpha": 0.4}]
    hashes = {partitioned(DataSettings(clients=4, **change), 0)[1].hash() for change in changed}
    assert len(hashes | {plain.hash()}) == 6


def test_domains_name_their_clients(monkeypatch):
    y = np.arange(240) % 4
    domains = Examples(np.zeros((240, 2)), y, 4, domain=np.arange(240) % 2, domain_names=("ink", "chalk"))
    monkeypatch.setitem(DATASETS, "domains", DATASETS.read(lambda: domains, "here"))
    settings = DataSettings(name="domains", partition="domain", clients=6, new_clients=2, inside="iid")
    pool = federate_data(settings, 0)
    assert [name.split("-")[0] for name in pool.names] == ["ink", "ink", "chalk", "chalk", "ink", "chalk"]
    assert pool.num_clients == 4
    assert partitioned(settings, 0)[1].conditions == ("ink", "ink", "chalk", "chalk", "ink", "chalk")
    assert (
        partitioned(dataclasses.replace(settings, partition="iid", inside="dirichlet"), 0)[1].conditions == ()
    )  # domains mix


def written(owners, domains, images=False):
    """A data set whose rows have these owners, and each owner the domain named at its place."""
    owner = np.array(owners)
    x = np.full((len(owner), 3, 8, 8), 100, np.uint8) if images else np.zeros((len(owner), 2))
    names = tuple(dict.fromkeys(domains))
    place = np.array([names.index(domain) for domain in domains])
    return Examples(
        x, np.arange(len(owner)) % 2, 2, owner=owner, owner_names=tuple("abcd"), domain=place[owner], domain_names=names
    )


@pytest.mark.parametrize("corrupt", ["", "fog:3"])
def test_conditions_stay_with_their_clients_when_empty_ones_are_left_out(monkeypatch, tmp_path, corrupt):
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path))
    found = written([0] * 10 + [2] * 10 + [3] * 10, ["hall", "hall", "field", "hall"], images=bool(corrupt))
    monkeypatch.setitem(DATASETS, "written", DATASETS.read(lambda: found, "here"))
    settings = DataSettings(name="written", partition="natural", corrupt=corrupt)
    pool, partition = partitioned(settings, 0, skip_empty=True)
    told = dict(zip(pool.names, partition.conditions, strict=True))
    if corrupt:  # of a, b, c and d the first half
        assert told == {"a": "fog:3", "c": "clean", "d": "clean"}
        changed = [bool((pool.x[pool.test.client(i)] != 100).any()) for i in range(3)]
        assert changed == [condition != "clean" for condition in partition.conditions]
    else:
        assert told == {"a": "hall", "c": "field", "d": "hall"}


def coloured(monkeypatch):
    """A data set of 240 small images of four classes in two domains."""
    x = np.random.default_rng(0).integers(0, 256, (240, 3, 8, 8), dtype=np.uint8)
    domains = Examples(x, np.arange(240) % 4, 4, domain=np.arange(240) % 2, domain_names=("ink", "chalk"))
    monkeypatch.setitem(DATASETS, "coloured", DATASETS.read(lambda: domains, "here"))


def test_a_partition_of_ones_own_names_conditions(monkeypatch):
    coloured(monkeypatch)

    def halves(labels, clients):
        parts = [np.arange(i, 240, 3) for i in range(3)]
        return data.Partition([parts[0][:0], *parts[1:]], conditions=("none", "early", "late")[: clients or 3])

    monkeypatch.setitem(PARTITIONS, "halves", PARTITIONS.read(halves, "here"))
    settings = DataSettings(name="coloured", partition="halves", clients=3)
    assert partitioned(settings, 0, skip_empty=True)[1].conditions == ("early", "late")  # of those that are left
    monkeypatch.setitem(PARTITIONS, "halves", PARTITIONS.read(lambda labels: halves(labels, 2), "here"))
    with pytest.raises(UserError, match="the partition halves names 2 conditions for 3 clients: name one for each"):
        partitioned(settings, 0)


def test_only_rows_of_some_classes(monkeypatch):
    monkeypatch.setitem(DATASETS, "official", DATASETS.read(official, "here"))
    pool, found = partitioned(DataSettings(name="official", classes=(2, 0), partition="iid", clients=4), 0)
    whole = official()
    rows_kept = [i for i in range(180) if whole.y[i] in (2, 0)]
    assert pool.num_classes == 2
    assert pool.x[:, 0].tolist() == rows_kept  # its examples are their numbers
    assert pool.y.tolist() == [{2: 0, 0: 1}[int(whole.y[i])] for i in rows_kept]
    assert sorted(np.concatenate(found.lists)) == list(range(120))
    own = federate_data(DataSettings(name="official", classes=(1,)), 0)  # owners and official marks go along
    assert own.names == ("anna", "bert")
    for i, part in ((0, "test"), (1, "train")):
        wanted = [r for r in range(60, 120) if r % 4 // 2 == i and (r % 6 == 0) == (part == "test")]
        assert own.x[getattr(own, part).client(i), 0].tolist() == wanted
    numbers = Examples(np.zeros((9, 2)), np.linspace(0, 1, 9), 0)
    monkeypatch.setitem(DATASETS, "numbers", DATASETS.read(lambda: numbers, "here"))
    with pytest.raises(UserError, match="classes keeps rows by class, but the targets are not classes: leave it out"):
        federate_data(DataSettings(name="numbers", classes=(0,)), 0)


def test_pfedmes_split_makes_no_test_rows_of_its_own(monkeypatch):
    """So that folds, validation and official test rows go with its replay."""
    y = np.tile(np.arange(10), 700)
    many = Examples(np.zeros((7000, 1)), y, 10, official_test=np.arange(7000) >= 6000)
    monkeypatch.setitem(DATASETS, "many", DATASETS.read(lambda: many, "here"))
    settings = DataSettings(name="many", partition="pfedme", clients=10, classes_per_client=3, replay=1, test=0.25)
    pool, found = partitioned(settings, 0)
    assert found.lists[0].tolist() == pfedme(y, None, 10, 3, 1).lists[0].tolist()
    assert pool.train.sizes[0] == int(0.75 * len(found.lists[0]))
    folded = partitioned(dataclasses.replace(settings, test=0.2, folds=4, validation=0.1), 3)[1]
    assert [rows.tolist() for rows in folded.lists] == [rows.tolist() for rows in found.lists]
    apart = federate_data(dataclasses.replace(settings, test=0.2, pool="split"), 0)
    assert apart.train.index.max() < 6000 <= apart.test.index.min()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"folds": 1}, "folds = 1, fold = 0: give at least 2 folds"),
        ({"folds": 5, "fold": 5}, "folds = 5, fold = 5: give at least 2 folds, and a fold in 0"),
        ({"replay": 42, "partition": "iid"}, "replay = 42 means nothing to partition iid, which takes no settings"),
        ({"replay": 42, "balance": False, "partition": "dirichlet"}, "replay repeats pFedFDA's script: leave balance"),
        ({"replay": 42, "subsample": 0.5, "partition": "dirichlet"}, "subsample, folds and validation off"),
        ({"replay": 42, "classes": (0, 1), "partition": "dirichlet"}, "classes, subsample, folds and validation off"),
        (
            {"replay": 42, "keep": 0.5, "keep_clients": "train", "partition": "dirichlet"},
            "replay keeps rows as pFedFDA's script does, of all clients: leave keep_clients out",
        ),
        ({"keep": 0.5, "keep_clients": "new"}, "keep_clients = 'new' selects no client: set .*new_clients"),
        ({"partition": "degradations", "new_draw": "code"}, "new_draw = 'code' draws no client: set .*new_clients"),
        (
            {"classes": (0, 3)},
            "classes names class 3, of which 'official' has no rows: name each of its classes, 0 to 2",
        ),
        ({"classes": (2, 1, 2)}, "classes names a class twice: name each of its classes, 0 to 2, at most once"),
        ({"classes": (-1,)}, "classes must be at least 0, not -1"),
        ({"pool": "split", "folds": 5}, "folds makes its own test rows"),
        ({"pool": "split", "replay": 42, "partition": "dirichlet"}, "replay makes its own test rows"),
        ({"partition": "domain", "clients": 6}, "no domains"),
        ({"partition": "equal_dirichlet", "clients": 6}, "6 clients with 500 rows each need more than the 180 rows"),
    ],
)
def test_keys_that_contradict_each_other(monkeypatch, change, sentence):
    monkeypatch.setitem(DATASETS, "official", DATASETS.read(official, "here"))
    with pytest.raises(UserError, match=sentence):
        federate_data(DataSettings(**({"name": "official", "partition": "iid", "clients": 5} | change)), 0)


MEANINGLESS = [
    (
        {"partition": "iid", "alpha": 0.1},
        "alpha = 0.1 means nothing to partition iid, which takes no settings of its own",
    ),
    ({"partition": "iid", "min_rows": 3}, "min_rows = 3 means nothing to partition iid"),
    ({"partition": "iid", "balance": False}, "balance = False means nothing to partition iid"),
    (
        {"partition": "dirichlet", "volume": 9},
        "partition dirichlet, which takes alpha, min_rows, balance, replay: leave",
    ),
    ({"partition": "equal_dirichlet", "min_rows": 3}, "partition equal_dirichlet, which takes alpha, volume: leave"),
    ({"partition": "pathological", "alpha": 0.1}, "which takes classes_per_client, rows_per_class, class_draw: leave"),
    ({"partition": "power_law", "class_draw": "independent"}, "which takes classes_per_client, rows_per_class: leave"),
    ({"partition": "domain", "replay": 42}, "partition domain, which takes alpha, min_rows, balance, inside: leave"),
    ({"partition": "domain", "inside": "iid", "alpha": 0.1}, "partition domain, which takes inside: leave"),
    ({"partition": "degradations", "alpha": 0.1}, "degradations, which takes new_draw, min_rows, balance: leave"),
    ({"partition": "natural", "alpha": 0.1}, "partition natural, which takes no settings of its own"),
    ({"partition": "auto", "volume": 3}, "volume = 3 means nothing to partition dirichlet"),
    ({"name": "synthetic_hierarchy", "alpha": 0.1}, "alpha = 0.1 means nothing to partition natural"),
    ({"path": "*.npz"}, r"path = '\*.npz' means nothing to data set digits, which takes no settings of its own"),
    ({"num_classes": 3}, "num_classes = 3 means nothing to data set digits"),
    ({"name": "gaussian", "path": "x"}, "data set gaussian, which takes num_classes, rows, dim, spread: leave it out"),
    ({"like": "mnist"}, "like = 'mnist' means nothing to data set digits"),
    ({"name": "random", "like": "mnist", "dim": 3}, "data set random, which takes like, rows: leave it out"),
    ({"keep_clients": "train"}, "keep_clients = 'train' means nothing to keep = 1 beside keep_rows = 0"),
    ({"partition": "letters", "replay": 1}, "partition letters, which takes classes_per_client: leave"),
    ({"partition": "pfedme", "alpha": 0.1}, "partition pfedme, which takes replay, classes_per_client: leave"),
    ({"name": "files", "rows": 3}, "data set files, which takes path, num_classes: leave it out"),
    ({"name": "mnist", "dim": 3}, "dim = 3 means nothing to data set mnist"),
    ({"fold": 1}, "fold = 1 means nothing to folds = 0, which takes test: leave it out"),
    ({"folds": 5, "test": 0.3}, "test = 0.3 means nothing to folds = 5, which takes fold: leave it out"),
    ({"name": "mnist", "pool": "split", "test": 0.3}, 'test = 0.3 means nothing to pool = "split"'),
    ({"pairs": "paper"}, "pairs = 'paper' means nothing to corrupt = '', which takes no settings of its own"),
    (
        {"corrupt": "fog:3", "pairs": "paper"},
        "pairs = 'paper' means nothing to corrupt = 'fog:3', which takes corrupt_cli",
    ),
    ({"corrupt_clients": "all"}, "corrupt_clients = 'all' means nothing to corrupt = ''"),
    (
        {"noise_at": "before"},
        "noise_at = 'before' means nothing to degrade = 'none', which takes no settings of its own",
    ),
    ({"jitter_order": "call"}, "jitter_order = 'call' means nothing to degrade = 'none'"),
]


@pytest.mark.parametrize(("keys", "sentence"), MEANINGLESS)
def test_keys_that_mean_nothing_are_refused(keys, sentence):
    with pytest.raises(UserError, match=r"^\[data\] .*leave it out, or set it to its default") as caught:
        federate_data(DataSettings(**keys), 0)
    assert re.search(sentence, str(caught.value))


def test_every_key_that_belongs_to_another_is_taken_by_some_choice():
    of = {f.name: f.metadata["of"] for f in dataclasses.fields(DataSettings) if "of" in f.metadata}
    assert {key for key, other in of.items() if other == "partition"} == {
        key for rule in PARTITIONS.values() for key in rule.asks if of.get(key) == "partition"
    }
    assert {key for key, other in of.items() if other == "name"} == {
        key for load in DATASETS.values() for key in load.asks if of.get(key) == "name"
    }
    assert {key for key, other in of.items() if other == "degrade"} == {
        k for keys in DEGRADATIONS.values() for k in keys
    }
    assert {key for key, other in of.items() if other == "corrupt"} == set(corrupt.takes("cifar_s"))
    assert {key for key, other in of.items() if other == "keep"} == {"keep_clients"}


def test_defaults_that_are_written_out_are_no_mistake():
    written = DataSettings(partition="iid", alpha=0.3, volume=500, pairs="code", fold=0, path="", rows=2000)
    assert same(federate_data(written, 0), federate_data(DataSettings(partition="iid"), 0))


# --- files --------------------------------------------------------------------------------------------------


def test_files_are_clients_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate(["b", "a", "c"]):
        x, y = client(10 + i, i)
        save(tmp_path / "clients", name, x=x, y=y.astype(np.uint8))
    pool = federate_data(DataSettings(name="files", path="clients/*.npz", new_clients=1), 0)
    assert pool.names == ("a", "b", "c")
    assert (pool.num_clients, pool.total_clients, pool.num_classes) == (2, 3, 2)
    assert pool.train.sizes == (8, 8, 9)
    assert pool.test.sizes == (3, 2, 3)
    assert torch.equal(pool.x[:11], torch.tensor(client(11, 1)[0]))
    assert pool.y.dtype == torch.int64


def test_files_with_test_rows_of_their_own(tmp_path):
    x, y = client(10)
    save(tmp_path, "own", x=x, y=y, x_test=x[:3], y_test=y[:3])
    save(tmp_path, "none", x=x, y=y)
    save(tmp_path, "empty", x=x, y=y, x_test=x[:0], y_test=y[:0])
    pool = federate_data(DataSettings(name="files", path=str(tmp_path / "*.npz"), test=0.3), 0)
    assert pool.names == ("empty", "none", "own")
    assert pool.train.sizes == (10, 7, 10)
    assert pool.test.sizes == (0, 3, 3)
    assert torch.equal(pool.x[pool.test.client(2)], torch.tensor(x[:3]))


def test_files_can_be_merged_and_spread_anew(tmp_path):
    for i in range(3):
        x, y = client(20, i)
        save(tmp_path, str(i), x=x, y=y)
    pool = federate_data(DataSettings(name="files", path=str(tmp_path / "*.npz"), partition="iid", clients=5), 0)
    assert pool.train.sizes == (9,) * 5
    assert pool.names == tuple("01234")


def test_no_file_matches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no file matches .*'clients/\*.npz' beside the experiment's file or below"):
        federate_data(DataSettings(name="files", path="clients/*.npz"), 0)


def test_two_files_of_one_name(tmp_path):
    x, y = client(10)
    save(tmp_path / "one", "a", x=x, y=y)
    save(tmp_path / "two", "a", x=x, y=y)
    with pytest.raises(UserError, match="several files are named 'a'"):
        federate_data(DataSettings(name="files", path=str(tmp_path / "*" / "*.npz")), 0)


GOOD_X, GOOD_Y = client(10)
BAD_ARRAYS = [
    ({"x": GOOD_X}, "b.npz has no array 'y'"),
    ({"y": GOOD_Y}, "b.npz has no array 'x'"),
    ({"x": GOOD_X, "y": GOOD_Y, "x_test": GOOD_X}, "b.npz has only one of x_test and y_test"),
    ({"x": GOOD_X, "y": GOOD_Y, "x_test": GOOD_X, "y_test": GOOD_Y[:9]}, "10 rows in x_test and 9 in y_test"),
    ({"x": GOOD_X, "y": GOOD_Y[:9]}, "b.npz has 10 rows in x and 9 in y"),
    ({"x": GOOD_X[:, :2], "y": GOOD_Y}, r"b.npz are float32 of shape \(2,\), those of .*a.npz are .*\(3,\)"),
    ({"x": GOOD_X.astype(np.float64), "y": GOOD_Y}, "b.npz are float64 .* float32"),
    ({"x": GOOD_X, "y": GOOD_Y.astype(float)}, "y of .*b.npz holds float64 values"),
    ({"x": GOOD_X, "y": GOOD_Y[:, None]}, r"y of .*b.npz has shape \(10, 1\)"),
    ({"x": GOOD_X[:, 0], "y": GOOD_Y}, r"x of .*b.npz has shape \(10,\)"),
    ({"x": GOOD_X.astype(str), "y": GOOD_Y}, "x of .*b.npz holds <U"),
    (
        {"x": np.array([{}] * 10), "y": GOOD_Y},
        "b.npz holds a pickled object in 'x', and nothing is ever unpickled: save it again",
    ),
]


@pytest.mark.parametrize(("arrays", "sentence"), BAD_ARRAYS)
def test_files_with_unfit_arrays(tmp_path, arrays, sentence):
    save(tmp_path, "a", x=GOOD_X, y=GOOD_Y)
    save(tmp_path, "b", **arrays)
    with pytest.raises(UserError, match=sentence) as caught:
        federate_data(DataSettings(name="files", path=str(tmp_path / "*.npz")), 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["text", "empty", "short", "flipped", "npy", "folder"])
def test_damaged_files(tmp_path, damage):
    save(tmp_path, "a", x=GOOD_X, y=GOOD_Y)
    path = tmp_path / "b.npz"
    whole = (tmp_path / "a.npz").read_bytes()
    if damage == "text":
        path.write_text("x,y\n1,2\n")
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "short":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        with zipfile.ZipFile(tmp_path / "a.npz") as archive:
            start = archive.getinfo("x.npy").header_offset
        path.write_bytes(whole[: start + 180] + bytes([whole[start + 180] ^ 255]) + whole[start + 181 :])
    elif damage == "npy":
        np.save(tmp_path / "b.npy", GOOD_X)
        (tmp_path / "b.npy").rename(path)
    else:
        path.mkdir()
    with pytest.raises(UserError, match=r"b\.npz(: Is a directory| is truncated or damaged)") as caught:
        federate_data(DataSettings(name="files", path=str(tmp_path / "*.npz")), 0)
    assert "\n" not in str(caught.value)


def test_labels_of_files_are_held_against_the_number_of_classes(tmp_path):
    save(tmp_path, "a", x=GOOD_X, y=GOOD_Y)
    save(tmp_path, "b", x=GOOD_X, y=GOOD_Y + 3)
    settings = DataSettings(name="files", path=str(tmp_path / "*.npz"))
    assert federate_data(settings, 0).num_classes == 5
    with pytest.raises(UserError, match=r"client 'b' has the label 4, outside 0\.\.3"):
        federate_data(DataSettings(name="files", path=str(tmp_path / "*.npz"), num_classes=4), 0)


# --- arrays of one's own ------------------------------------------------------------------------------------


class Pairs(Dataset):
    """Never raises IndexError: its length is the truth."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i % len(self.x)], int(self.y[i % len(self.x)])


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3), 0


def test_every_form_of_a_client_gives_the_same_pool():
    x, y = client(10)
    xt, yt = torch.tensor(x), torch.tensor(y)
    forms = [(x, y), [xt, yt], (xt.requires_grad_(), yt), TensorDataset(xt.detach(), yt), Pairs(x, y)]
    first = from_arrays([(x, y)], seed=3)
    for form in forms:
        pool = from_arrays([form], seed=3)
        assert same(pool, first)
        assert torch.equal(pool.y, first.y)
    with_test = [(x, y, x[:4], y[:4]), (Pairs(x, y), TensorDataset(xt.detach()[:4], yt[:4]))]
    for form in with_test:
        pool = from_arrays([form])
        assert rows(pool, "train") == [list(range(10))]
        assert rows(pool, "test") == [list(range(10, 14))]


def test_names_and_options():
    x, y = client(20)
    pool = from_arrays({"ann": (x, y), "bob": (x, y), 3: (x, y)}, new_clients=1, validation=0.25, num_classes=7)
    assert pool.names == ("ann", "bob", "3")
    assert (pool.num_clients, pool.num_classes) == (2, 7)
    assert (pool.train.sizes, pool.val.sizes, pool.test.sizes) == ((12,) * 3, (4,) * 3, (4,) * 3)
    assert from_arrays([(x, y)], test=0.0).test.sizes == (0,)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (np.uint8, torch.uint8),
        (np.int16, torch.int64),
        (np.bool_, torch.float32),
        (np.float16, torch.float32),
        (np.float64, torch.float64),
        (">f4", torch.float32),
    ],
)
def test_types_of_examples(given, kept):
    x = np.arange(12).reshape(6, 2)[::-1].astype(given)
    pool = from_arrays([(x, np.arange(6))])
    assert pool.x.dtype == kept
    assert np.array_equal(pool.x.numpy(), x.astype(np.float64))


def test_arrays_that_may_not_be_written_stay_as_they_are():
    x, y = client(6)
    x.flags.writeable = False
    pool = pool_of(x, y, [np.arange(6)], [[]], [[]], num_classes=2)
    pool.x[0] = 5.0
    assert not (x[0] == 5.0).any()


def test_clients_with_one_row_one_class_or_no_test_rows_are_welcome():
    x, y = client(10)
    pool = from_arrays([(x[:1], y[:1]), (x, np.zeros(10, int)), (x, y, x[:0], y[:0])], num_classes=2)
    assert pool.train.sizes == (1, 8, 10)
    assert pool.test.sizes == (0, 2, 0)


@pytest.mark.parametrize(
    "empty",
    [
        (np.empty((0, 3), np.float32), np.empty(0, int)),
        ([], []),
        Pairs([], []),
        (GOOD_X[:0], GOOD_Y[:0], GOOD_X, GOOD_Y),
    ],
)
def test_clients_without_rows_are_refused_by_name_or_left_out(empty):
    clients = {"ann": (GOOD_X, GOOD_Y), "bob": empty, "cleo": (GOOD_X, GOOD_Y), "new": (GOOD_X, GOOD_Y)}
    with pytest.raises(UserError, match="client 'bob' has no training rows"):
        from_arrays(clients)
    pool = from_arrays(clients, skip_empty=True, new_clients=1)
    assert pool.names == ("ann", "cleo", "new")
    assert (pool.num_clients, pool.total_clients) == (2, 3)
    assert len(pool.test.sizes) == len(pool.val.sizes) == 3


def test_a_training_population_of_empty_clients_is_refused():
    with pytest.raises(UserError, match="no client of the training population"):
        from_arrays([([], []), (GOOD_X, GOOD_Y)], new_clients=1, skip_empty=True)
    with pytest.raises(UserError, match="none of the 2 clients has any rows"):
        from_arrays([([], []), ([], [])], skip_empty=True)


def spoiled(value):
    x = GOOD_X.astype(np.float64)
    x[4, 1] = value
    return x


GOOD = (GOOD_X, GOOD_Y)


class Wordless:
    """What cannot be an array, and does not say why."""

    def __array__(self, *_, **__):
        raise ValueError


BAD_CLIENTS = [
    ([], {}, "there are no clients"),
    ({}, {}, "there are no clients"),
    ([GOOD, GOOD_X], {}, "client '1' is a ndarray: give"),
    ([(GOOD_X, GOOD_Y, GOOD_X)], {}, "client '0' is a tuple: give"),
    ([GOOD], {"new_clients": 1}, "1 of 1 clients cannot be new"),
    ([GOOD], {"test": -0.1}, "test must be at least 0"),
    ([GOOD], {"validation": 1.5}, "validation must be at least 0 and at most 0.99"),
    ({"eve": (spoiled(np.nan), GOOD_Y)}, {}, "client 'eve' has NaN, infinity"),
    ({"eve": (spoiled(-np.inf), GOOD_Y)}, {}, "client 'eve' has NaN, infinity"),
    ({"eve": (spoiled(1e300), GOOD_Y)}, {}, "client 'eve' has .* beyond float32"),
    ({"ok": GOOD, "eve": (GOOD_X, GOOD_Y - 1)}, {}, r"client 'eve' has the label -1, outside 0\.\.1"),
    (
        {"ok": GOOD, "eve": (GOOD_X, GOOD_Y + 1)},
        {"num_classes": 2},
        r"client 'eve' has the label 2, outside 0\.\.1",
    ),
    ([(GOOD_X, -1 - GOOD_Y)], {}, "client '0' has the label -1"),
    ([(GOOD_X, GOOD_Y * 10**9)], {}, "the largest label is 1000000000 with 10 rows"),
    ([(GOOD_X, GOOD_Y * 0.5)], {}, "y of client '0' holds float64"),
    ([(GOOD_X, GOOD_Y[:7])], {}, "client '0' has 10 rows in x and 7 in y"),
    ([(GOOD_X, [])], {}, "client '0' has 10 rows in x and 0 in y"),
    (
        [GOOD, (GOOD_X.reshape(10, 3, 1), GOOD_Y)],
        {},
        r"client '1' are float32 of shape \(3, 1\), those of client '0'",
    ),
    ([(GOOD_X[:, :0], GOOD_Y)], {}, r"shape \(10, 0\)"),
    ([([[1.0], [1.0, 2.0]], [0, 1])], {}, "x of client '0' is not an array"),
    ([Stream()], {}, "Dataset of client '0' has no length"),
    ([TensorDataset(torch.zeros(4, 3))], {}, "Dataset of client '0' does not give"),
    ([Pairs([np.zeros(2), np.zeros(3)], [0, 1])], {}, "Dataset of client '0' does not give"),
    ([(Wordless(), [0])], {}, "x of client '0' is not an array: ValueError"),
    ([Pairs([Wordless()], [0])], {}, "does not give .* of one shape: ValueError"),
]


@pytest.mark.parametrize(("clients", "options", "sentence"), BAD_CLIENTS)
def test_unfit_clients(clients, options, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        from_arrays(clients, **options)
    assert "\n" not in str(caught.value)


def test_a_bad_row_that_nobody_holds_is_refused_too():
    x = GOOD_X.copy()
    x[0] = np.nan
    with pytest.raises(UserError, match="row 0 of the data has NaN"):
        pool_of(x, GOOD_Y, [np.arange(1, 10)], [[]], [[]], num_classes=2)


def test_public_names_exist():
    assert all(hasattr(data, name) for name in data.__all__)
    assert all(load.doc for load in DATASETS.values())


def test_two_clients_of_one_name_are_refused():
    x, y = np.zeros((3, 2), dtype=np.float32), np.array([0, 1, 0])
    with pytest.raises(UserError, match="two clients are named '1'"):
        from_arrays({1: (x, y), "1": (x, y)})
