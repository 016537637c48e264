"""Partitions: every row at most once, the rule of each scheme, and the refusals."""

import random

import numpy as np
import pytest
from sklearn.model_selection import train_test_split

from bespoke.data import PARTITIONS, DataSettings, Partition
from bespoke.data.partition import basic, volumes
from bespoke.data.partition.basic import dirichlet, dirichlet_counts, follow, iid, natural, owner_groups, pathological
from bespoke.data.partition.groups import KINDS, degradations, domain
from bespoke.data.partition.replay import replay
from bespoke.data.partition.schemes import Known, split_rows
from bespoke.data.partition.volumes import equal_dirichlet, letters, pfedme, power_law
from bespoke.data.sources import store
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


def test_every_partition_is_given_what_it_asks_for():
    y = labels(60, 60, 60)
    known = Known(y, np.arange(180) % 6, np.arange(180) % 3, ("a", "b", "c"), np.arange(180) % 6 == 0)
    for name, rule in PARTITIONS.items():
        found = split_rows(known, DataSettings(partition=name, clients=6, alpha=5.0, volume=12), rng(), False)
        assert len(found.lists) == 6
        assert_disjoint(found)
        assert rule.doc


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

    monkeypatch.setattr(basic, "MAX_TRIES", 50)
    monkeypatch.setattr(basic, "dirichlet_counts", counted)
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
    with pytest.raises(UserError, match="at least 11 rows each need more than the 40 rows"):
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


def test_owners_are_joined_in_their_order():
    owner = np.array([4, 0, 0, 1, 2, 2, 3, 1])
    assert [rows.tolist() for rows in owner_groups(owner, 2).lists] == [[1, 2, 3, 4, 5, 7], [0, 6]]
    assert [len(rows) for rows in owner_groups(np.repeat(np.arange(60), 5), 5).lists] == [60] * 5
    with pytest.raises(UserError, match="no clients of its own to join"):
        owner_groups(None, 3)
    with pytest.raises(UserError, match="6 groups are more than the data set's 5 clients: lower"):
        owner_groups(owner, 6)


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


def class_counts(y, found):
    """Rows by client and class."""
    return np.stack([np.bincount(y[rows], minlength=y.max() + 1) for rows in found.lists])


def test_the_hash_tells_partitions_apart():
    lists = [np.array([0, 3]), np.array([1, 2])]
    same = Partition([np.array([0, 3], dtype=np.int32), np.array([1, 2])], tries=7)
    assert Partition(lists).hash() == same.hash()
    assert len(same.hash()) == 16
    others = [
        Partition(lists[::-1]),
        Partition([np.array([0, 3, 1]), np.array([2])]),
        Partition(lists, test=[lists[0][:1], lists[1][:1]]),
        Partition(lists, test=[lists[0][1:], lists[1][:1]]),
    ]
    assert len({p.hash() for p in [same, *others]}) == 5
    assert same.describe() == {"partition": same.hash(), "tries": 7}
    assert Partition(lists, conditions=("clean", "fog:3")).describe()["conditions"] == ["clean", "fog:3"]


# --- fixed volumes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("volume", "classes"), [(500, 4.9), (2000, 5.7)])
def test_equal_volumes_at_the_size_of_fedlda(volume, classes):
    """20 clients, Dir(0.1): all equal in size, about five classes, the largest with about two thirds."""
    y = np.repeat(np.arange(10), 6000)
    held, largest = [], []
    for seed in range(5):
        found = equal_dirichlet(y, rng(seed), 20, 0.1, volume)
        assert_disjoint(found)
        assert (sizes(found) == volume).all()
        counts = class_counts(y, found)
        held.append((counts > 0).sum(axis=1).mean())
        largest.append(counts.max(axis=1).mean() / volume)
    assert np.mean(held) == pytest.approx(classes, abs=0.5)
    assert np.mean(largest) == pytest.approx(0.64, abs=0.06)


@pytest.mark.parametrize(("alpha", "share"), [(0.1, 0.66), (0.2, 0.53), (0.3, 0.46)])
def test_the_share_of_a_clients_most_frequent_class(alpha, share):
    """The mean of the largest of ten shares drawn from Dir(alpha), over many draws."""
    y = np.repeat(np.arange(10), 6000)
    found = [class_counts(y, equal_dirichlet(y, rng(seed), 20, alpha, 500)).max(axis=1).mean() for seed in range(40)]
    assert np.mean(found) / 500 == pytest.approx(share, abs=0.02)


def test_equal_volumes_follow_the_clients_own_shares():
    """Far from running out, a client's classes are a multinomial draw from its own Dirichlet shares."""
    y = np.repeat(np.arange(4), 100_000)
    found = equal_dirichlet(y, rng(4), 6, 0.5, 5000)
    shares = rng(4).dirichlet(np.full(4, 0.5), 6)
    assert np.abs(class_counts(y, found) / 5000 - shares).max() < 0.03


def test_equal_volumes_can_use_up_every_row():
    y = labels(30, 50, 40)
    found = equal_dirichlet(y, rng(), 6, 5.0, 20)
    assert_disjoint(found, 120)


def test_shares_are_redrawn_when_classes_run_out(monkeypatch):
    y = labels(60, 60, 60)
    tries = [equal_dirichlet(y, rng(seed), 4, 0.05, 40).tries for seed in range(12)]
    assert min(tries) == 1
    assert max(tries) > 1
    monkeypatch.setattr(volumes, "MAX_REDRAWS", 2)
    with pytest.raises(UserError, match=r"2 draws of Dir\(0.0001\) never left 4 clients 45 rows .*: lower .*volume"):
        equal_dirichlet(y, rng(), 4, 0.0001, 45)
    with pytest.raises(UserError, match="4 clients with 46 rows each need more than the 180 rows"):
        equal_dirichlet(y, rng(), 4, 0.5, 46)


def test_the_power_law_at_the_size_of_mnist():
    """FedProx: 1,000 clients of two digits, 69,035 rows in all, mean 69, standard deviation 106."""
    counts = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    y = labels(*counts)
    found = power_law(y, rng(), 1000)
    assert_disjoint(found)
    held = class_counts(y, found)
    for user in range(1000):
        assert np.flatnonzero(held[user]).tolist() == sorted({user % 10, (user + 1) % 10})
    assert held[held > 0].min() >= 5
    assert sum(counts) - 2000 < sizes(found).sum() <= sum(counts)  # each of 2,000 shares is rounded down
    assert sizes(found).mean() == pytest.approx(69, abs=1)
    assert 70 < sizes(found).std() < 160


def test_the_power_law_shares_what_is_left_by_lognormal_draws():
    y = labels(100, 90, 80)
    found = power_law(y, rng(2), 7, 2, 4)
    held = class_counts(y, found)
    draws = rng(2)
    for k, size in enumerate([100, 90, 80]):
        owners = [u for u in range(7) if k in (u % 3, (u + 1) % 3)]
        z = draws.lognormal(0, 2, len(owners))
        spare = size - 4 * len(owners)
        assert held[owners, k].tolist() == [4 + int(spare * one / z.sum()) for one in z]
    with pytest.raises(UserError, match="class 2 has 8 rows, but its 4 clients need 4 each"):
        power_law(labels(100, 90, 8), rng(), 7, 2, 4)
    with pytest.raises(UserError, match="classes_per_client is 4, but the data has 3"):
        power_law(y, rng(), 7, 4)


def written_out_letters(y, draws, clients, each):
    """The wanted rows of each class on each client, client by client, as FedProx's script for letters counts them."""
    classes = y.max() + 1
    wanted = np.zeros((clients, classes), int)
    for u, n in enumerate(draws.lognormal(4, 1, clients) + 5):
        for j in range(each):
            wanted[u, (u + j) % classes] = max(2, int(n / each))
    return wanted


def test_letters_have_lognormal_volumes():
    """200 clients, five of ten letters: FedProx counts 92 rows a client, give or take 159; exp(4.5) + 5 = 95."""
    y = labels(*[4000] * 10)
    found = letters(y, rng(), 200, 5)
    assert_disjoint(found)
    held = class_counts(y, found)
    assert np.array_equal(held, written_out_letters(y, rng(), 200, 5))
    assert sizes(found).min() >= 10 and set((held > 0).sum(axis=1)) == {5}
    means = [sizes(letters(y, rng(seed), 200, 5)).mean() for seed in range(10)]
    assert np.mean(means) == pytest.approx(np.exp(4.5) + 5 - 2.5, abs=5)  # 2.5: what rounding down leaves out


def test_letters_that_are_rare_are_shared_in_proportion():
    y = labels(4000, 60, 4000)
    found = letters(y, rng(3), 12, 2)
    assert_disjoint(found)
    held, wanted = class_counts(y, found), written_out_letters(y, rng(3), 12, 2)
    assert np.array_equal(held[:, [0, 2]], wanted[:, [0, 2]])
    beyond, takers = np.maximum(0, wanted[:, 1] - 2), wanted[:, 1] > 0
    assert takers.sum() == 8 and wanted[:, 1].sum() > 60
    assert held[takers, 1].tolist() == [2 + int(44 * b) // int(beyond.sum()) for b in beyond[takers]]
    with pytest.raises(
        UserError, match=r"class 1 has 15 rows, but its 8 clients need 2 each: lower .* or classes_per_"
    ):
        letters(labels(4000, 15, 4000), rng(), 12, 2)
    with pytest.raises(UserError, match="classes_per_client is 4, but the data has 3"):
        letters(y, rng(), 12, 4)


def written_out_pfedme(y, seed, clients, each):
    """pFedMe's script in plain steps: global generators, lists of rows in their order."""
    np.random.seed(seed)
    random.seed(seed)
    classes = y.max() + 1
    rows = [np.where(y == k)[0].tolist() for k in range(classes)]
    place, hands = [0] * classes, [[] for _ in range(clients)]
    for u in range(clients):
        for j in range(each):
            k = (u + j) % classes
            hands[u] += rows[k][place[k] : place[k] + 10]
            place[k] += 10
    draws = np.random.lognormal(0, 2.0, (classes, clients, each))
    totals = np.sum(draws, (1, 2))
    for u in range(clients):
        for j in range(each):
            k = (u + j) % classes
            share = (len(rows[k]) - clients) * draws[k, u // (clients // classes), j] / totals[k]
            more = int(share) + random.randint(300, 600)
            if clients <= 20:
                more = 2 * more
            if place[k] + more < len(rows[k]):
                hands[u] += rows[k][place[k] : place[k] + more]
                place[k] += more
    return hands


@pytest.mark.parametrize(("clients", "each", "seed"), [(20, 3, 1), (20, 3, 7), (30, 2, 1), (10, 4, 3)])
def test_pfedmes_split_is_the_script_to_the_row(clients, each, seed):
    y = labels(*range(5990, 6040, 5))
    found = pfedme(y, rng(), clients, each, replay=seed)
    assert [own.tolist() for own in found.lists] == [
        sorted(hand) for hand in written_out_pfedme(y, seed, clients, each)
    ]
    assert found.hash() == pfedme(y, rng(5), clients, each, replay=seed).hash()  # the script's seed alone counts


def test_pfedmes_own_federation():
    """20 clients of three classes of CIFAR-10, seed 1: 1,150 to 4,536 rows, 54,572 in all."""
    y = np.tile(np.arange(10), 6000)
    found = pfedme(y, rng(), 20, 3, replay=1)
    assert_disjoint(found)
    n = sizes(found)
    assert (n.min(), n.max(), n.sum()) == (1150, 4536, 54_572)
    held = class_counts(y, found)
    assert all(np.flatnonzero(held[u]).tolist() == sorted((u + j) % 10 for j in range(3)) for u in range(20))


def test_other_draws_of_pfedmes_split():
    y = np.tile(np.arange(10), 6000)
    many = [pfedme(y, rng(seed), 20, 3) for seed in range(8)]
    assert len({found.hash() for found in many}) == 8
    for found in many:
        assert_disjoint(found)
        held = class_counts(y, found)
        more = held[held > 0] - 10
        assert ((more == 0) | (more >= 600)).all() and (more % 2 == 0).all()
        assert sizes(found).min() >= 30 and sizes(found).max() < 9000
        assert all(rows.max() > 50_000 for rows in found.lists)  # from everywhere, not the first ones
    with pytest.raises(
        UserError, match=r"class 0 has 35 rows, but its 4 clients need 10 each: lower .* or classes_per_"
    ):
        pfedme(labels(35, 90), rng(), 4, 2)
    assert sizes(pfedme(labels(*[50] * 5), rng(), 5, 2)).tolist() == [20] * 5  # too few rows for any more
    assert sizes(pfedme(labels(*[30] * 40), rng(), 100, 1)).tolist() == [10] * 100  # fewer rows than clients


def test_pathological_at_the_size_of_pfedvmp():
    """50 clients with 3 classes of exactly 100 rows, the classes of each drawn on its own."""
    y = np.repeat(np.arange(10), 6000)
    found = pathological(y, rng(), 50, 3, 100, class_draw="independent")
    assert_disjoint(found)
    held = class_counts(y, found)
    assert ((held > 0).sum(axis=1) == 3).all()
    assert set(held.flatten().tolist()) == {0, 100}
    takers = (held > 0).sum(axis=0)
    assert takers.max() - takers.min() > 1  # not dealt out evenly
    even = class_counts(y, pathological(y, rng(), 50, 3, 100))
    assert set((even > 0).sum(axis=0).tolist()) == {15}


# --- groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["dirichlet", "iid"])
def test_domains_have_clients_of_their_own(inside):
    y = labels(*[200] * 5)
    domains = np.arange(1000) % 3 % 2  # two thirds of the rows are of domain 0
    found = domain(y, domains, ("paper", "phone"), rng(), 8, 0, 0.5, 20, True, inside)
    assert_disjoint(found, 1000)
    assert found.names() == tuple(f"{name}-{i}" for name in ("paper", "phone") for i in range(4))
    for rows, kind in zip(found.lists, found.kinds, strict=True):
        assert set(domains[rows]) == {("paper", "phone").index(kind)}
    assert sizes(found).min() >= 20
    spread = np.ptp(sizes(found)[:4])
    assert spread <= 1 if inside == "iid" else spread > 1


def test_new_clients_come_from_every_domain_and_last():
    y, domains = labels(*[100] * 4), np.arange(400) % 4
    names = ("a", "b", "c", "d")
    plain = domain(y, domains, names, rng(3), 20, 0, inside="iid")
    found = domain(y, domains, names, rng(3), 20, 8, inside="iid")
    assert found.kinds[-8:] == ("a", "a", "b", "b", "c", "c", "d", "d")
    assert found.kinds[:12] == ("a",) * 3 + ("b",) * 3 + ("c",) * 3 + ("d",) * 3
    assert sorted(found.names()) == sorted(plain.names())
    rows = dict(zip(plain.names(), plain.lists, strict=True))
    assert all(np.array_equal(rows[name], own) for name, own in zip(found.names(), found.lists, strict=True))
    assert len({domain(y, domains, names, rng(s), 20, 8, inside="iid").ranks[-8:] for s in range(5)}) > 1


def test_new_clients_by_the_rule_of_later_code_are_the_same_for_every_seed():
    """FedPCE's later code permutes the numbers of each kind's clients, kind by kind, and takes the first two."""
    draws = np.random.default_rng(0)
    theirs = np.concatenate([draws.permutation(np.arange(10 * kind, 10 * kind + 10))[:2] for kind in range(3)])
    for seed in range(3):
        found = degradations(np.tile(np.arange(10), 600), rng(seed), 30, 6, new_draw="code")
        new = [10 * KINDS.index(kind) + rank for kind, rank in zip(found.kinds[-6:], found.ranks[-6:], strict=True)]
        assert {*new} == {*theirs.tolist()}
    y, domains = labels(*[100] * 4), np.arange(400) % 4
    found = domain(y, domains, ("a", "b", "c", "d"), rng(5), 40, 8, inside="iid", new_draw="code")
    assert found.ranks[-8:] == (4, 6, 2, 9, 4, 5, 4, 5)


def test_groups_refuse_what_cannot_be():
    y = labels(60, 60)
    with pytest.raises(UserError, match="no domains"):
        domain(y, None, (), rng(), 4)
    with pytest.raises(UserError, match=r"\[data\] clients = 5 is not a multiple of the 2 domains: change it"):
        domain(y, np.arange(120) % 2, ("a", "b"), rng(), 5)
    with pytest.raises(UserError, match=r"\[data\] new_clients = 1 is not a multiple of the 2 domains: change it"):
        domain(y, np.arange(120) % 2, ("a", "b"), rng(), 4, 1)
    with pytest.raises(UserError, match="8 is not a multiple of the three degradations"):
        degradations(y, rng(), 8)
    with pytest.raises(UserError, match=r"9 clients cannot be split into thirds of pairs: make .* a multiple of 6"):
        degradations(y, rng(), 9)


def test_the_thirds_of_fedpce_at_the_size_of_cifar10():
    """30 clients of about 2,000 rows; noise and jitter like all, imbalance in pairs from strong to weak."""
    y = np.tile(np.arange(10), 6000)
    official = np.arange(60_000) >= 50_000
    found = degradations(y, rng(1), 30, 6, 10, True, official)
    assert_disjoint(found, 60_000)
    assert (
        found.kinds
        == ("noise",) * 8 + ("jitter",) * 8 + ("imbalance",) * 8 + ("noise",) * 2 + ("jitter",) * 2 + ("imbalance",) * 2
    )
    held = class_counts(y, found)
    even = np.array([kind != "imbalance" for kind in found.kinds])
    assert np.abs(held[even] - 200).max() <= 2  # one row in the official train rows, one in the test rows
    assert np.abs(held[even].sum(axis=1) - 2000).max() <= 20
    rank = np.array(found.ranks)[~even]
    pairs = held[~even][np.argsort(rank)].reshape(5, 2, 10)
    assert np.abs(pairs.sum(axis=1) - 400).max() <= 4
    distance = np.abs(pairs[:, 0] - pairs[:, 1]).sum(axis=1)
    assert distance[0] > 3 * distance[-1]  # alpha from 0.1 to 10
    # Train and test rows of an imbalanced client have the same proportions.
    for rows in [own for own, kind in zip(found.lists, found.kinds, strict=True) if kind == "imbalance"]:
        train, test = (np.bincount(y[rows[official[rows] == part]], minlength=10) for part in (False, True))
        assert np.abs(test - train / 5).max() <= 1.3
        assert min(train.sum(), test.sum()) >= 10


def test_rounding_favours_no_client():
    """166.67 train and 33.33 test rows of a class: each client gets its even share on average."""
    y = np.tile(np.arange(10), 6000)
    official = np.arange(60_000) >= 50_000
    mean = np.mean([sizes(degradations(y, rng(seed), 30, official=official))[:20] for seed in range(20)], axis=0)
    assert np.abs(mean - 2000).max() < 2.5


def test_the_balance_rule_holds_in_pairs():
    """With it a client of a pair stays near its even share, as FedPCE's sizes do; without, sizes run apart."""
    y = np.tile(np.arange(10), 6000)
    apart = {}
    for balance in (True, False):
        found = [degradations(y, rng(seed), 30, 0, 10, balance) for seed in range(6)]
        apart[balance] = max(np.abs(sizes(one)[20:] - 2000).max() for one in found)
    assert apart[True] <= 2000 * 0.25
    assert apart[False] > apart[True]


# --- pFedFDA's own federation -------------------------------------------------------------------------------


def written_out(y, seed, clients, alpha, smallest, test):
    """The released script in plain steps: global legacy generator, lists of rows, scikit-learn's split."""
    np.random.seed(seed)
    tries = 0
    while True:
        tries += 1
        hands = [[] for _ in range(clients)]
        for k in range(y.max() + 1):
            rows = np.where(y == k)[0]
            np.random.shuffle(rows)
            p = np.random.dirichlet(np.repeat(alpha, clients))
            p = np.array([0.0 if len(hand) >= len(y) / clients else one for one, hand in zip(p, hands, strict=True)])
            p = p / p.sum()
            start, total = 0, 0.0
            for j in range(clients):
                total += p[j]
                end = len(rows) if j == clients - 1 else int(total * len(rows))
                hands[j] += rows[start:end].tolist()
                start = end
        if min(map(len, hands)) >= smallest:
            break
    splits = [train_test_split(hand, train_size=1 - test, random_state=42) for hand in hands]
    return tries, hands, splits


@pytest.mark.parametrize(("alpha", "smallest"), [(0.5, 8), (0.1, 20)])
def test_replay_is_the_script_to_the_row(alpha, smallest):
    y = labels(150, 130, 170, 150)
    tries, hands, splits = written_out(y, 7, 8, alpha, smallest, 0.2)
    found = replay(y, 7, 8, alpha, smallest, 0.2)
    assert found.tries == tries
    assert (tries > 1) == (alpha == 0.1)
    for i, hand in enumerate(hands):
        assert found.lists[i].tolist() == sorted(hand)
        assert found.train[i].tolist() == sorted(splits[i][0])
        assert found.test[i].tolist() == sorted(splits[i][1])


def test_replay_keeps_the_train_rows_that_the_script_keeps():
    y = labels(150, 130, 170, 150)
    _, _, splits = written_out(y, 7, 8, 0.5, 8, 0.2)
    found = replay(y, 7, 8, 0.5, 8, 0.2, keep=0.25)
    np.random.seed(0)
    for i, (train, test) in enumerate(splits):
        places = list(range(len(train)))
        kept = np.random.choice(places, size=int(0.25 * len(train)), replace=False)
        rest = list(set(places) - set(kept.tolist()))
        np.random.choice(rest, size=int(0.75 * len(rest)), replace=False)
        assert found.train[i].tolist() == sorted(train[place] for place in kept)
        assert found.test[i].tolist() == sorted(test)


def test_replay_ends_with_a_sentence(monkeypatch):
    from bespoke.data.partition import replay as module

    monkeypatch.setattr(module, "MAX_TRIES", 3)
    with pytest.raises(UserError, match=r"3 draws of Dir\(0.01\) over 10 clients .* 9 rows"):
        replay(labels(50, 50), 1, 10, 0.01, 9, 0.2)


# Classes and rows of each; alpha; tries; smallest, median and largest client; clients 0 to 4; classes a client;
# those with one or two rows.
SEED_42 = [
    (10, 6000, 0.5, 1, (213, 609, 1036), [638, 706, 248, 602, 814], 8.34, 0.86),
    (10, 6000, 0.1, 5266, (74, 604, 1746), [297, 263, 1380, 269, 584], 4.17, 0.82),
    (100, 600, 0.5, 1, (480, 605, 759), [600, 614, 603, 617, 545], 74.4, 24.7),
    (100, 600, 0.1, 1, (295, 613, 768), [443, 611, 520, 653, 628], 34.6, 12.1),
    (200, 550, 0.5, 1, (911, 1105, 1200), None, 149, 52),
    (200, 550, 0.1, 1, (605, 1116.5, 1307), None, 67, 24),
]


@pytest.mark.parametrize(("classes", "rows", "alpha", "tries", "spread", "first", "held", "few"), SEED_42)
def test_seed_42_gives_the_papers_clients(classes, rows, alpha, tries, spread, first, held, few):
    """CIFAR-10, CIFAR-100 and Tiny-ImageNet over 100 clients: sizes depend on the class counts alone."""
    y = np.repeat(np.arange(classes), rows)
    found = replay(y, 42, 100, alpha, 63, 0.2)
    assert found.tries == tries
    n = sizes(found)
    assert (n.min(), np.median(n), n.max()) == spread
    assert first is None or n[:5].tolist() == first
    counts = class_counts(y, found)
    digits = 2 if classes == 10 else 1 if classes == 100 else 0
    assert round((counts > 0).sum(axis=1).mean(), digits) == held
    assert round(((counts == 1) | (counts == 2)).sum(axis=1).mean(), digits) == few
    if (classes, alpha) == (10, 0.5):
        assert counts[0].tolist() == [36, 10, 56, 2, 5, 218, 10, 83, 107, 111]
    if (classes, alpha) == (10, 0.1):
        assert ((counts > 0).sum(axis=1) == 1).sum() == 7


@pytest.mark.skipif(not store.holds("cifar10"), reason="CIFAR-10 is not in the folder of data sets")
def test_seed_42_on_the_real_cifar10():
    y = np.asarray(store.load("cifar10").y)
    found = replay(y, 42, 100, 0.5, 63, 0.2)
    assert_disjoint(found, 60_000)
    assert sizes(found)[:5].tolist() == [638, 706, 248, 602, 814]
    assert class_counts(y, found)[0].tolist() == [36, 10, 56, 2, 5, 218, 10, 83, 107, 111]
    assert [len(rows) for rows in found.train[:3]] == [510, 564, 198]


@pytest.mark.skipif(not store.holds("cifar10"), reason="CIFAR-10 is not in the folder of data sets")
def test_other_seeds_on_the_real_cifar10_are_like_the_papers():
    """Dir(0.5) over 100 clients: the ranges over 200 seeds of the rule."""
    y = np.asarray(store.load("cifar10").y)
    for seed in range(5):
        found = dirichlet(y, rng(seed), 100, 0.5, 63)
        assert found.tries == 1
        n = sizes(found)
        assert 64 <= n.min() <= 262
        assert 600 <= np.median(n) <= 637
        assert 926 <= n.max() <= 1793
        counts = class_counts(y, found)
        assert 7.8 <= (counts > 0).sum(axis=1).mean() <= 8.5
        assert 0.6 <= ((counts == 1) | (counts == 2)).sum(axis=1).mean() <= 1.0
