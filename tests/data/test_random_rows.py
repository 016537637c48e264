"""Random rows in the shape of another data set, none of which is here."""

import numpy as np
import pytest
import torch

from bespoke.data import DATASETS, DataSettings, federate_data, partitioned
from bespoke.data.sources.catalogue import CATALOGUE
from bespoke.data.sources.text import WORDS
from bespoke.errors import UserError

ALWAYS_HERE = ["digits", "gaussian", "synthetic_hierarchy", "synthetic_homogeneous"]
OWN = ["files", "csv", "parquet", "hf", "image_folder"]  # likened without being there


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path / "none"))


def made(like, rows=600, **changes):
    return federate_data(DataSettings(name="random", like=like, rows=rows, **changes), 0)


@pytest.mark.parametrize("like", CATALOGUE)
def test_rows_are_like_those_of_the_catalogue(like):
    entry = CATALOGUE[like]
    pool = made(like, clients=4)
    assert pool.x.shape == (600, *entry.shapes[0]) and len(pool.x.unique(dim=0)) == 600
    assert str(pool.x.dtype) == f"torch.{'int64' if entry.tokens else entry.dtype}"
    highest = WORDS if like == "sent140" else 256
    assert 0.9 * highest < int(pool.x.max()) < highest and 0 <= int(pool.x.min()) < 0.1 * highest
    assert pool.num_classes == entry.classes and torch.bincount(pool.y).min() >= 600 // entry.classes
    assert pool.total_clients == 4 and min(pool.train.sizes) > 0
    by_domain = DataSettings(name="random", like=like, rows=600, partition="domain", inside="iid")
    if entry.domains:
        found = partitioned(DataSettings(**(vars(by_domain) | {"clients": 2 * len(entry.domains)})), 0)[1]
        assert found.conditions == tuple(name for name in entry.domains for _ in range(2))
    else:
        with pytest.raises(UserError, match="no domains"):
            partitioned(by_domain, 0)


def test_every_data_set_that_ships_can_be_likened():
    assert set(DATASETS.shipped) == {*CATALOGUE, *ALWAYS_HERE, *OWN, "random", "contract"}


@pytest.mark.parametrize("like", OWN)
def test_rows_are_like_ones_own(like):
    pool = made(like, clients=4)
    assert (pool.x.ndim, pool.num_classes, pool.names) == (4 if like == "image_folder" else 2, 10, tuple("0123"))


@pytest.mark.parametrize("like", ALWAYS_HERE)
def test_rows_are_like_those_that_are_always_here(like):
    pool = made(like, clients=4)
    real = federate_data(DataSettings(name=like, clients=4), 0)
    assert (pool.x.shape[1:], pool.x.dtype, pool.y.dtype) == (real.x.shape[1:], real.x.dtype, real.y.dtype)
    assert (pool.num_classes, pool.total_clients) == (real.num_classes, real.total_clients)
    assert pool.transform is real.transform and len(pool.x) == 600
    if like == "digits":
        assert pool.x.max() == real.x.max() == 16


@pytest.mark.parametrize("like", [name for name, entry in CATALOGUE.items() if entry.owners is not None])
def test_own_clients_are_as_many_as_wanted(like):
    assert made(like).total_clients == 5
    assert made(like, clients=50).total_clients == 50
    most = CATALOGUE[like].owners
    if most:
        with pytest.raises(UserError, match=f"the data set has {most} clients of its own: lower it"):
            made(like, rows=2000, clients=most + 1)


def test_official_test_rows_are_kept_separate_where_the_set_has_some():
    for like in ("cifar10", "mnist_m", "digits2", "digit5"):
        pool = made(like, pool="split", partition="iid", clients=3)
        assert len(pool.test.index) == 100 and len(pool.train.index) == 500
        assert not set(pool.test.index.tolist()) & set(pool.train.index.tolist())
    with pytest.raises(UserError, match="'random' has no official test rows"):
        made("audiomnist", pool="split", partition="iid", clients=3)


def test_draws_follow_the_seed():
    settings = DataSettings(name="random", like="mnist", rows=50, clients=3)
    first, same, other = (federate_data(settings, seed) for seed in (0, 0, 1))
    assert torch.equal(first.x, same.x) and not torch.equal(first.x, other.x)
    assert abs(np.corrcoef(first.y, np.arange(50))[0, 1]) < 0.5  # in no order


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"like": ""}, r'name = "random" needs the data set whose shape it takes: set \[data\] like'),
        (
            {"like": "cifar"},
            r"like: there is no data set 'cifar' \(did you mean 'cifar10'\?\); there are digits, gaussian",
        ),
        ({"like": "random"}, "like: there is no data set 'random'"),
        (
            {"like": "cifar100", "rows": 99},
            "rows = 99 are fewer than the 100 classes of cifar100: give at least so many",
        ),
        ({"rows": 10, "clients": 11}, "11 clients are more than the 10 rows there are"),
        ({"partition": "equal_dirichlet", "clients": 2, "volume": 301}, "2 clients with 301 rows each need more than"),
        ({"rows": 2**31 - 1, "like": "tiny_imagenet"}, "rows = 2,147,483,647 like tiny_imagenet would take"),
    ],
)
def test_what_cannot_be_is_said(change, sentence):
    with pytest.raises(UserError, match=sentence):
        made(**({"like": "mnist"} | change))
