"""Counter-based randomness: the block function, what is drawn from it, and how it is split by purpose."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from bespoke.core import rng

WORDS = st.integers(0, 2**32 - 1)


def word(value):
    return torch.tensor(value, dtype=torch.int64)


def threefry_in_integers(key, counter):
    """Threefry-2x32 with 20 rounds on Python integers, round by round."""
    rotations = [13, 15, 26, 6, 17, 29, 16, 24]
    schedule = [key[0], key[1], 0x1BD11BDA ^ key[0] ^ key[1]]
    a, b = (counter[0] + schedule[0]) % 2**32, (counter[1] + schedule[1]) % 2**32
    for i in range(20):
        r = rotations[i % 8]
        a = (a + b) % 2**32
        b = ((b * 2**r) % 2**32 + b // 2 ** (32 - r)) ^ a
        if i % 4 == 3:
            s = i // 4 + 1
            a = (a + schedule[s % 3]) % 2**32
            b = (b + schedule[(s + 1) % 3] + s) % 2**32
    return a, b


# --- the block function ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "counter", "out"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_the_published_vectors(key, counter, out):
    found = rng.threefry(*map(word, key), *map(word, counter))
    assert tuple(int(w) for w in found) == out
    assert threefry_in_integers(key, counter) == out


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(WORDS, WORDS, WORDS, WORDS), min_size=1, max_size=5))
def test_blocks_equal_integer_arithmetic(cases):
    k0, k1, x0, x1 = (word(list(column)) for column in zip(*cases, strict=True))
    a, b = rng.threefry(k0, k1, x0, x1)
    assert list(zip(a.tolist(), b.tolist(), strict=True)) == [threefry_in_integers(c[:2], c[2:]) for c in cases]


# --- keys -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(st.integers(-(2**63), 2**64 - 1), st.integers(-(2**63), 2**63 - 1))
def test_fold_in_is_a_block_whose_counter_is_the_data(seed, data):
    key = rng.key(seed)
    low = seed % 2**64
    assert key.tolist() == [low >> 32, low % 2**32]
    counter = (data % 2**64) >> 32, data % 2**32
    want = threefry_in_integers(key.tolist(), counter)
    assert tuple(rng.fold_in(key, data).tolist()) == want
    assert tuple(rng.fold_in(key, torch.tensor(data)).tolist()) == want


def test_fold_in_broadcasts():
    root = rng.key(7)
    one = rng.fold_in(root, torch.arange(4))
    assert one.shape == (4, 2)
    two = rng.fold_in(one, 3)
    assert two.shape == (4, 2)
    grid = rng.fold_in(one[:, None], torch.arange(5))
    assert grid.shape == (4, 5, 2)
    for i in range(4):
        assert torch.equal(one[i], rng.fold_in(root, i))
        assert torch.equal(two[i], rng.fold_in(rng.fold_in(root, i), 3))
        for j in range(5):
            assert torch.equal(grid[i, j], rng.fold_in(rng.fold_in(root, i), j))
    mapped = vmap(rng.fold_in, in_dims=(None, 0))(root, torch.arange(4))
    assert torch.equal(mapped, one)


def test_streams_differ():
    root = rng.key(0)
    purposes = [rng.DATA, rng.INIT, rng.COHORT, rng.TRAIN, rng.EVAL, rng.ADAPT, rng.SERVER]
    assert purposes == list(range(7))
    keys = {
        tuple(rng.stream(root, purpose, round, client).tolist())
        for purpose in purposes
        for round in range(5)
        for client in (*range(5), -1)
    }
    assert len(keys) == 7 * 5 * 6
    assert torch.equal(
        rng.stream(root, rng.TRAIN, 3, torch.tensor([4, 2])),
        torch.stack([rng.stream(root, rng.TRAIN, 3, c) for c in (4, 2)]),
    )
    assert not torch.equal(rng.stream(root, rng.TRAIN, 1, 2), rng.stream(root, rng.TRAIN, 2, 1))
    assert not torch.equal(rng.stream(root, rng.EVAL), rng.stream(rng.key(1), rng.EVAL))


# --- numbers --------------------------------------------------------------------------------------------------


def test_bits_are_the_first_word_of_each_block():
    key = rng.key(99)
    counters = torch.tensor([[0, 1, 2**32], [5, 2**40 + 3, 9]])
    found = rng.bits(key, counters)
    assert found.shape == counters.shape
    for value, counter in zip(found.flatten().tolist(), counters.flatten().tolist(), strict=True):
        assert value == threefry_in_integers(key.tolist(), (counter >> 32, counter % 2**32))[0]


def test_many_draws_at_once_are_those_of_a_few():
    """Large arrays take another way."""
    keys = rng.fold_in(rng.key(2**63 + 11), torch.arange(3))[:, None]
    counters = torch.arange(5000) * (2**33 + 12345) - 7
    few = [torch.stack(rng._draw(keys, part)) for part in counters.split(1000)]
    assert torch.equal(torch.stack(rng._draw(keys, counters)), torch.cat(few, dim=-1))


def test_uniform_numbers():
    u = rng.uniform(rng.key(3), (200, 500), torch.float64)
    assert u.shape == (200, 500)
    assert u.min() >= 0
    assert u.max() < 1
    assert torch.equal(u * 2**24, (u * 2**24).round())  # on the grid, and fine enough to reach its odd points:
    assert ((u * 2**24) % 2).mean() == pytest.approx(0.5, abs=0.01)
    assert u.mean().item() == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / 1e5))
    assert u.var().item() == pytest.approx(1 / 12, abs=0.001)
    halves = torch.histc(u, 20, 0, 1)
    assert ((halves - 5000) ** 2 / 5000).sum() < 50  # chi-squared with 19 degrees: beyond 50 once in 10,000
    assert abs(torch.corrcoef(torch.stack([u.flatten()[:-1], u.flatten()[1:]]))[0, 1]) < 0.02


def test_uniform_numbers_are_exact_in_every_precision():
    single, double = (rng.uniform(rng.key(5), (1000,), dtype) for dtype in (torch.float32, torch.float64))
    assert single.dtype == torch.float32
    assert torch.equal(single.double(), double)
    assert rng.uniform(rng.key(5)).shape == ()
    assert rng.uniform(rng.key(5)) == single[0]
    assert torch.equal(rng.uniform(rng.key(5), (10, 100)).flatten(), single)


def test_normal_numbers():
    z = rng.normal(rng.key(11), (100_000,), torch.float64)
    assert z.mean().item() == pytest.approx(0, abs=5 / math.sqrt(1e5))
    assert z.var().item() == pytest.approx(1, abs=0.03)
    assert (z**3).mean().item() == pytest.approx(0, abs=0.06)
    assert (z**4).mean().item() == pytest.approx(3, abs=0.2)
    for x in (-2.0, -1.0, 0.0, 0.5, 1.5):
        assert (z < x).double().mean().item() == pytest.approx(0.5 * (1 + math.erf(x / math.sqrt(2))), abs=0.008)
    assert torch.isfinite(z).all()


def test_a_normal_number_by_hand():
    key = rng.key(11)
    a, b = threefry_in_integers(key.tolist(), (0, 6))
    radius = math.sqrt(-2 * math.log(((a >> 8) + 1) / 2**24))
    want = radius * math.cos(2 * math.pi * (b >> 8) / 2**24)
    assert rng.normal(key, (2, 4), torch.float64)[1, 2].item() == pytest.approx(want, abs=1e-12)
    assert rng.normal(key, (2, 4)).dtype == torch.float32


def test_numbers_are_the_same_one_by_one_and_mapped():
    keys = rng.fold_in(rng.key(2), torch.arange(6))
    for draw in (rng.uniform, rng.normal):
        mapped = vmap(lambda key, draw=draw: draw(key, (3, 2), torch.float64))(keys)
        assert torch.equal(mapped, torch.stack([draw(key, (3, 2), torch.float64) for key in keys]))
        assert len(mapped.flatten().unique()) == mapped.numel()


# --- shuffles -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**64 - 1), st.integers(1, 40), st.integers(0, 20))
def test_a_shuffle_is_a_permutation_that_padding_does_not_change(seed, n, extra):
    key = rng.key(seed)
    alone = rng.shuffle(key, n, n)
    assert sorted(alone.tolist()) == list(range(n))
    padded = rng.shuffle(key, n + extra, n)
    assert torch.equal(padded[:n], alone)
    assert padded[n:].tolist() == list(range(n, n + extra))
    assert torch.equal(rng.shuffle(key, n + extra, torch.tensor(n)), padded)


def test_shuffles_differ_by_key_and_are_fair():
    keys = rng.fold_in(rng.key(1), torch.arange(6000))
    orders = rng.shuffle(keys, 4, 3)
    assert orders.shape == (6000, 4)
    assert (orders[:, 3] == 3).all()
    _, counts = orders[:, :3].unique(dim=0, return_counts=True)
    assert len(counts) == 6
    assert ((counts - 1000) ** 2 / 1000).sum() < 26  # chi-squared with 5 degrees: beyond 26 once in 10,000


def test_shuffles_are_the_same_one_by_one_and_mapped():
    keys = rng.fold_in(rng.key(4), torch.arange(5))
    sizes = torch.tensor([1, 7, 3, 9, 9])
    mapped = vmap(lambda key, n: rng.shuffle(key, 9, n))(keys, sizes)
    for key, n, order in zip(keys, sizes.tolist(), mapped, strict=True):
        assert torch.equal(order, rng.shuffle(key, 9, n))


def test_equal_sort_values_keep_their_order(monkeypatch):
    values = torch.tensor([5, 1, 5, 1, 5])
    monkeypatch.setattr(rng, "bits", lambda key, row: values.expand(*key.shape[:-2], 5))
    assert rng.shuffle(rng.key(0), 5, 5).tolist() == [1, 3, 0, 2, 4]
    assert rng.shuffle(rng.key(0), 5, 3).tolist() == [1, 0, 2, 3, 4]


# --- cohorts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "rate", "size"),
    [(100, 0.3, 30), (100, 0.29, 29), (100, 0.57, 57), (10, 0.001, 1), (7, 0.5, 3), (7, 1.0, 7), (1, 0.1, 1)],
)
def test_a_fixed_cohort_has_its_size(clients, rate, size):
    for round in range(1, 4):
        drawn = rng.cohort(rng.key(0), round, clients, rate, "fixed")
        assert len(drawn) == len(set(drawn)) == size
        assert drawn == sorted(drawn)
        assert set(drawn) <= set(range(clients))


@pytest.mark.parametrize("sampling", ["fixed", "bernoulli"])
def test_a_cohort_depends_on_seed_and_round_alone(sampling):
    def drawn(seed, round):
        return rng.cohort(rng.key(seed), round, 50, 0.2, sampling)

    first = [drawn(0, r) for r in range(1, 9)]
    assert first[::-1] == [drawn(0, r) for r in range(8, 0, -1)]  # whatever was asked before
    assert all(a != b for a, b in pairwise(first))
    assert first != [drawn(1, r) for r in range(1, 9)]


def test_every_client_is_drawn_as_often_as_the_rate_says():
    for sampling in ("fixed", "bernoulli"):
        counts = torch.zeros(10)
        sizes = set()
        for round in range(1, 301):
            drawn = rng.cohort(rng.key(3), round, 10, 0.3, sampling)
            counts[drawn] += 1
            sizes.add(len(drawn))
        # Bernoulli draws again when nobody came (0.7**10), so the rate is 0.3 / (1 - 0.028).
        rate = 0.3 if sampling == "fixed" else 0.3 / (1 - 0.7**10)
        assert (counts / 300 - rate).abs().max() < 5 * math.sqrt(0.3 * 0.7 / 300)
        assert (sizes == {3}) == (sampling == "fixed")


def test_an_empty_draw_is_repeated():
    root, repeated = rng.key(1), 0
    for round in range(1, 61):
        draw = rng.stream(root, rng.COHORT, round)
        first = (rng.uniform(draw, (3,), torch.float64) < 0.1).nonzero().flatten().tolist()
        found = rng.cohort(root, round, 3, 0.1, "bernoulli")
        assert found
        if first:
            assert found == first
        else:
            attempt = 1
            while not (again := (rng.uniform(rng.fold_in(draw, attempt), (3,), torch.float64) < 0.1)).any():
                attempt += 1
            assert found == again.nonzero().flatten().tolist()
            repeated += 1
    assert 30 < repeated < 57  # 0.9**3 = 0.73 of them


def test_a_rate_too_small_to_draw_anyone_says_so(monkeypatch):
    monkeypatch.setattr(rng, "fold_in", lambda key, data: key)
    monkeypatch.setattr(rng, "uniform", lambda key, shape, dtype: torch.ones(shape, dtype=dtype))
    with pytest.raises(ValueError, match=r"no client was drawn .* at rate 0\.01: raise training\.rate"):
        rng.cohort(rng.key(0), 1, 5, 0.01, "bernoulli")
