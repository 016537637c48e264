"""The pool, a client's rows of it, and how clients are packed into blocks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from bespoke.core import rng
from bespoke.core.data import FederatedData, Rows
from bespoke.engine.lanes import blocks
from bespoke.engine.rows import ClientRows

KEY = rng.key(0)


def data(x, rows, n=None, **options):
    rows = torch.tensor(rows)
    return ClientRows(x, torch.arange(len(x)) * 10, rows, torch.tensor(len(rows) if n is None else n), **options)


# --- rows -----------------------------------------------------------------------------------------------------


def test_rows_of_each_client():
    rows = Rows.of([[4, 2], [], torch.tensor([7]), (1, 1, 9)])
    assert rows.sizes == (2, 0, 1, 3)
    assert rows.index.tolist() == [4, 2, 7, 1, 1, 9]
    assert rows.index.dtype == torch.int64
    assert [rows.client(c).tolist() for c in range(4)] == [[4, 2], [], [7], [1, 1, 9]]
    assert Rows.of([]).sizes == ()
    assert Rows.of([[], []]).sizes == (0, 0)


def test_a_block_is_padded_with_a_row_of_the_clients_own():
    rows = Rows.of([[4, 2], [], [7, 8, 9]])
    padded, n = rows.block([2, 0, 1], 4)
    assert padded.tolist() == [[7, 8, 9, 7], [4, 2, 4, 4], [0, 0, 0, 0]]
    assert n.tolist() == [3, 2, 0]
    with pytest.raises(ValueError, match="too small"):
        rows.block([2], 2)  # too narrow for its rows


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=6), st.integers(0, 4), st.randoms())
def test_blocks_hold_exactly_the_clients_rows(lists, extra, random):
    rows = Rows.of(lists)
    order = random.sample(range(len(lists)), len(lists))
    padded, n = rows.block(order, max(map(len, lists)) + extra)
    for line, size, client in zip(padded.tolist(), n.tolist(), order, strict=True):
        assert line[:size] == lists[client]
        assert set(line[size:]) <= {lists[client][0] if lists[client] else 0}


# --- packing --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 10), st.sampled_from([0.1, 0.5, 0.9]))
def test_every_position_is_in_one_block(sizes, chunk, similar):
    packed = blocks(sizes, chunk, similar)
    assert sorted(i for block in packed for i in block) == list(range(len(sizes)))
    for block in packed:
        assert 1 <= len(block) <= chunk
        own = [sizes[i] for i in block]
        assert own == sorted(own, reverse=True)
        assert own[-1] >= similar * own[0] or own[0] <= 16
    starts = [sizes[block[0]] for block in packed]
    assert starts == sorted(starts, reverse=True)


def test_blocks_by_hand():
    assert blocks([10, 100, 60, 49, 100], 64) == [[1, 4, 2], [3], [0]]
    assert blocks([10, 100, 60, 50, 100], 64) == [[1, 4, 2, 3], [0]]
    assert blocks([10, 100, 60, 50, 100], 2) == [[1, 4], [2, 3], [0]]
    assert blocks([100, 60, 10], 64, 0.0) == [[0, 1, 2]]
    assert blocks([1, 16, 3], 64) == [[1, 2, 0]]  # small ones stay together
    assert blocks([1, 17, 3], 64) == [[1], [2, 0]]
    assert blocks([], 4) == []


# --- what a client gathers ------------------------------------------------------------------------------------


def test_gather_follows_the_clients_list():
    x = torch.arange(12.0).reshape(6, 2)
    own = data(x, [5, 3, 0])
    assert own.width == 3
    got, y = own.gather(torch.tensor([2, 0]), KEY, train=True)
    assert torch.equal(got, x[[0, 5]])
    assert y.tolist() == [0, 50]


def test_the_mask_marks_real_rows():
    own = data(torch.zeros(6, 2), [5, 3, 0, 0, 0], n=3, dtype=torch.float64)
    assert own.mask().tolist() == [1, 1, 1, 0, 0]
    assert own.mask().dtype == torch.float64


def test_bytes_become_numbers_between_minus_one_and_one():
    own = data(torch.tensor([[0], [255], [51]], dtype=torch.uint8), [0, 1, 2])
    x, _ = own.gather(torch.arange(3), KEY, train=False)
    assert x.dtype == torch.float32
    assert x.flatten().tolist() == pytest.approx([-1.0, 1.0, -0.6])


def test_types():
    tokens = torch.tensor([[3, 4], [5, 6]])
    assert data(tokens, [1]).gather(torch.tensor([0]), KEY, train=True)[0].dtype == torch.int64
    floats = data(torch.ones(2, 1, dtype=torch.float32), [1], dtype=torch.float64)
    assert floats.gather(torch.tensor([0]), KEY, train=True)[0].dtype == torch.float64


def test_a_transform_sees_key_constants_and_purpose():
    def transform(key, x, extra, train):
        noise = rng.uniform(key, x.shape, torch.float64)
        return x.double() * extra["scale"] + (noise if train else 0.0)

    x = torch.arange(4, dtype=torch.uint8)[:, None]
    own = data(x, [3, 1], extra={"scale": torch.tensor(2.0)}, transform=transform, dtype=torch.float64)
    index = torch.tensor([1, 0])
    plain, _ = own.gather(index, KEY, train=False)
    assert plain.tolist() == [[2.0], [6.0]]  # the transform's own, without the usual scaling of bytes
    noisy, _ = own.gather(index, KEY, train=True)
    assert torch.equal(noisy - plain, rng.uniform(KEY, (2, 1), torch.float64))


def test_gather_is_the_same_mapped():
    x = rng.normal(KEY, (9, 2), torch.float64)
    rows, n = Rows.of([[8, 1, 2], [4], [6, 5]]).block([0, 1, 2], 4)

    def look(rows, n):
        own = ClientRows(x, torch.arange(9), rows, n, dtype=torch.float64)
        got, y = own.gather(torch.tensor([1, 0, 3]), KEY, train=True)
        return got, y, own.mask()

    mapped = vmap(look)(rows, n)
    for i in range(3):
        for together, alone in zip(mapped, look(rows[i], n[i]), strict=True):
            assert torch.equal(together[i], alone)


def test_a_pool_moves_as_a_whole():
    rows = Rows.of([[0], [1]])
    extra = {"scale": torch.ones(2, 3)}
    pool = FederatedData(torch.ones(2, 3), torch.tensor([0, 1]), rows, rows, rows, 2, 1, ("a", "b"), extra)
    assert pool.total_clients == 2
    moved = pool.to("cpu", torch.float64)
    assert moved.x is pool.x  # it may be a file's, and a minibatch is converted when it is gathered
    assert pool.to("meta", torch.float64).x.dtype == torch.float64
    with pytest.raises(NotImplementedError, match="meta"):  # nothing can be copied from there, but it is tried
        replace(pool, x=pool.x.to("meta")).to("cpu", torch.float64)
    assert moved.y.dtype == torch.int64
    assert (moved.num_clients, moved.names, moved.train.sizes) == (1, ("a", "b"), (1, 1))
    bytes_pool = FederatedData(torch.ones(2, 3, dtype=torch.uint8), pool.y, rows, rows, rows, 2, 2, ("a", "b"))
    assert bytes_pool.to("cpu", torch.float64).x.dtype == torch.uint8  # kept small until it is gathered
