"""Partitions: every row at most once, the rule of each scheme, and the refusals."""

import numpy as np
import pytest

from bespoke.datasets import PARTITIONS, DataSettings, partition
from bespoke.datasets.partition import dirichlet, dirichlet_counts, follow, iid, natural, pathological
from bespoke.errors import UserError


def rng(seed=0):
    return np.random.default_rng(seed)


def sizes(found):
    return np.array([len(rows) for rows in found.lists])


def assert_disjoint(found, total=None):
    rows = np.concatenate(found.lists)
    assert len(np.unique(rows)) == len(rows)
    if total is not None:
        assert sorted(rows) == list(range(total))
    for own in found.lists:
        assert (np.diff(own) > 0).all()


def labels(*counts):
    return rng(9).permutation(np.repeat(np.arange(len(counts)), counts))


def test_the_table_offers_what_the_settings_allow():
    choices = DataSettings.__dataclass_fields__["partition"].metadata["choices"]
    assert choices == ("auto", *PARTITIONS)
    settings = DataSettings(clients=4, alpha=5.0)
    y = labels(30, 30, 30)
    for spec in PARTITIONS.values():
        found = spec.run(y, np.arange(90) % 4, settings, rng())
        assert len(found.lists) == 4
        assert_disjoint(found)


def test_iid_gives_equal_parts_of_all_rows():
    found = iid(labels(40, 63), rng(), 10)
    assert_disjoint(found, 103)
    assert set(sizes(found)) == {10, 11}
    assert not np.array_equal(found.lists[0], iid(labels(40, 63), rng(1), 10).lists[0])


@pytest.mark.parametrize("balance", [True, False])
def test_dirichlet_deals_out_all_rows_and_repeats(balance):
    y = labels(200, 150, 1, 300)
    found = dirichlet(y, rng(), 12, 0.3, 5, balance)
    assert_disjoint(found, len(y))
    assert sizes(found).min() >= 5
    again = dirichlet(y, rng(), 12, 0.3, 5, balance)
    assert found.tries == again.tries
    assert all(np.array_equal(a, b) for a, b in zip(found.lists, again.lists, strict=True))


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 10.0])
def test_dirichlet_counts_follow_the_rule_written_out(balance, alpha):
    """One try, class by class and client by client, in plain Python from the same draws."""
    n_k, clients = np.array([60, 7, 100, 33]), 6
    counts = dirichlet_counts(rng(3), n_k, clients, alpha, balance, 1)[0]
    draws = rng(3)
    held = [0] * clients
    for k, n in enumerate(n_k):
        gamma = draws.standard_gamma(alpha + 1, (1, clients))[0]
        p = gamma * np.exp(-draws.standard_exponential((1, clients))[0] / alpha)
        p /= p.sum()
        for j in range(clients):
            if balance and held[j] >= n_k.sum() / clients:
                p[j] = 0.0
        p /= p.sum()
        cuts = [int(np.floor(p[: j + 1].sum() * n + 1e-9)) for j in range(clients - 1)]
        own = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        assert counts[k].tolist() == own
        held = [h + o for h, o in zip(held, own, strict=True)]


@pytest.mark.parametrize("alpha", [0.05, 0.5, 3.0])
def test_dirichlet_shares_have_the_moments_of_the_dirichlet(alpha):
    clients, n = 4, 10**9
    share = dirichlet_counts(rng(), np.array([n]), clients, alpha, False, 20_000)[:, 0] / n
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert np.allclose(share.mean(axis=0), 1 / clients, atol=0.01)
    assert np.allclose(share.var(axis=0), variance, rtol=0.05)


def test_a_balanced_client_receives_no_further_class():
    counts = dirichlet_counts(rng(), np.full(8, 50), 5, 0.2, True, 200)
    before = counts.cumsum(axis=1) - counts
    full = before >= 8 * 50 / 5
    assert full.any()
    assert (counts[full] == 0).all()
    free = dirichlet_counts(rng(), np.full(8, 50), 5, 0.2, False, 200)
    assert (free[(free.cumsum(axis=1) - free) >= 80] > 0).any()


@pytest.mark.parametrize("alpha", [1e-4, 1e6])
def test_extreme_alphas_still_deal_out_every_row(alpha):
    counts = dirichlet_counts(rng(), np.array([40, 50]), 7, alpha, True, 50)
    assert (counts >= 0).all()
    assert (counts.sum(axis=2) == [40, 50]).all()


def test_tries_are_counted():
    """One by one, not by the batch: the accepted try is the first that is large enough."""
    y = labels(60, 60, 60)
    found = dirichlet(y, rng(5), 6, 0.2, 28)
    draws, done, batch = rng(5), 0, 4
    while True:
        smallest = dirichlet_counts(draws, np.array([60, 60, 60]), 6, 0.2, True, batch).sum(axis=1).min(axis=1)
        if (smallest >= 28).any():
            break
        done, batch = done + batch, 2 * batch
    assert found.tries == done + int(np.argmax(smallest >= 28)) + 1
    assert found.tries > 4


def test_a_demanding_redraw_at_the_size_of_cifar10():
    """60,000 rows, 100 clients, Dir(0.1), at least 63 rows each: one draw in thousands will do."""
    y = np.repeat(np.arange(10), 6000)
    found = dirichlet(y, rng(2), 100, 0.1, 63)
    assert_disjoint(found, 60_000)
    assert found.tries > 100
    assert 63 <= sizes(found).min() <= 89
    assert 441 <= np.median(sizes(found)) <= 600
    assert 1641 <= sizes(found).max() <= 3700
    assert 4.0 <= np.mean([len(np.unique(y[rows])) for rows in found.lists]) <= 4.6


def test_a_redraw_without_hope_ends_with_a_sentence(monkeypatch):
    drawn = []

    def counted(*args):
        drawn.append(args[-1])
        return dirichlet_counts(*args)

    monkeypatch.setattr(partition, "MAX_TRIES", 50)
    monkeypatch.setattr(partition, "dirichlet_counts", counted)
    with pytest.raises(UserError, match=r"50 draws of Dir\(0.01\) over 10 clients .* 9 rows: raise .*alpha.*min_rows"):
        dirichlet(labels(50, 50), rng(), 10, 0.01, 9)
    assert sum(drawn) == 50


def test_dirichlet_refuses_what_cannot_be():
    y = labels(20, 20)
    for alpha in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="alpha must be greater than 0"):
            dirichlet(y, rng(), 4, alpha)
    with pytest.raises(UserError, match="41 clients are more than the 40 rows"):
        dirichlet(y, rng(), 41, 0.5, 0)
    with pytest.raises(UserError, match="at least 11 rows need more than the 40 rows"):
        dirichlet(y, rng(), 4, 0.5, 11)


@pytest.mark.parametrize("scheme", [iid, lambda y, r, m: pathological(y, r, m, 1)])
def test_other_schemes_refuse_impossible_numbers_of_clients(scheme):
    with pytest.raises(UserError, match="11 clients are more than the 10 rows"):
        scheme(labels(5, 5), rng(), 11)
    with pytest.raises(UserError, match="at least one"):
        scheme(labels(5, 5), rng(), 0)


@pytest.mark.parametrize(("clients", "k"), [(20, 2), (7, 3), (10, 10), (3, 4), (13, 7), (2, 1)])
def test_pathological_spreads_distinct_classes_evenly(clients, k):
    y = labels(*range(40, 50))
    found = pathological(y, rng(clients), clients, k)
    assert_disjoint(found)
    own = [np.unique(y[rows]) for rows in found.lists]
    assert [len(classes) for classes in own] == [k] * clients
    takers = np.bincount(np.concatenate(own), minlength=10)
    assert takers.max() - takers.min() <= 1
    # Every row of a class that somebody has is dealt out, in parts that differ by one at most.
    for c in np.flatnonzero(takers):
        parts = [n for n in (np.count_nonzero(y[rows] == c) for rows in found.lists) if n]
        assert sum(parts) == 40 + c
        assert max(parts) - min(parts) <= 1


def test_pathological_with_a_number_of_rows_gives_exactly_so_many():
    y = labels(*[600] * 10)
    found = pathological(y, rng(), 50, 3, 30)
    assert_disjoint(found)
    for rows in found.lists:
        classes, counts = np.unique(y[rows], return_counts=True)
        assert len(classes) == 3
        assert (counts == 30).all()
    other = pathological(y, rng(1), 50, 3, 30)
    assert any(set(y[a]) != set(y[b]) for a, b in zip(found.lists, other.lists, strict=True))


def test_pathological_refuses_what_cannot_be():
    with pytest.raises(UserError, match="classes_per_client is 3, but the data has 2 classes"):
        pathological(labels(20, 20), rng(), 4, 3)
    with pytest.raises(UserError, match="class 1 has 8 rows, but its 4 clients need 12"):
        pathological(labels(20, 8), rng(), 4, 2, 3)
    with pytest.raises(UserError, match="class 1 has 3 rows, but its 4 clients need 4"):
        pathological(labels(20, 3), rng(), 4, 2)


def test_natural_takes_the_rows_of_each_owner():
    owner = np.array([2, 0, 0, 1, 2, 2])
    assert [rows.tolist() for rows in natural(owner, 3).lists] == [[1, 2], [3], [0, 4, 5]]
    assert [rows.tolist() for rows in natural(owner, 2).lists] == [[1, 2], [3]]
    with pytest.raises(UserError, match="no clients of its own"):
        natural(None, 3)


def test_other_rows_follow_a_partition_class_by_class():
    y, others = labels(300, 200, 40), labels(30, 20, 4, 9)
    found = dirichlet(y, rng(), 6, 0.3)
    parts = follow(y, found.lists, others, rng(1))
    dealt = np.concatenate(parts)
    assert len(np.unique(dealt)) == len(dealt) == 54  # nobody holds the last class
    for rows, part in zip(found.lists, parts, strict=True):
        for c, (n, m) in enumerate([(300, 30), (200, 20), (40, 4)]):
            share = np.count_nonzero(y[rows] == c) / n
            assert abs(np.count_nonzero(others[part] == c) - share * m) < 1
