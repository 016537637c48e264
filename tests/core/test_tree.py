"""Trees: leaf by leaf, by name, stacked and back."""

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from bespoke.core import rng, tree


def example(seed=0, dtype=torch.float64):
    key = rng.key(seed)
    return {
        "w": rng.normal(key, (2, 3), dtype),
        "deep": {"b": rng.normal(rng.fold_in(key, 1), (3,), dtype), "s": rng.normal(rng.fold_in(key, 2), (), dtype)},
    }


def turned(value):
    """The same tree with its names in the other order."""
    if not isinstance(value, dict):
        return value
    return {name: turned(value[name]) for name in reversed(value)}


def equal(a, b):
    if not isinstance(a, dict):
        return torch.equal(a, b)
    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


def flat(value):
    return np.concatenate([leaf.numpy().ravel() for leaf in tree.leaves(value)])


def test_arithmetic_is_leaf_by_leaf():
    a, b = example(0), example(1)
    x, y = flat(a), flat(b)
    assert np.array_equal(flat(tree.add(a, b)), x + y)
    assert np.array_equal(flat(tree.add(a, b, -0.5)), x - 0.5 * y)
    assert np.array_equal(flat(tree.add(a, b, torch.tensor(2.0))), x + 2 * y)
    assert np.array_equal(flat(tree.sub(a, b)), x - y)
    assert not flat(tree.zeros_like(a)).any()
    assert tree.sq_dist(a, b).item() == pytest.approx(((x - y) ** 2).sum(), rel=1e-12)
    assert tree.sq_norm(a).item() == pytest.approx((x**2).sum(), rel=1e-12)
    assert tree.dot(a, b).item() == pytest.approx((x * y).sum(), rel=1e-12)
    assert tree.sq_dist(a, b).shape == tree.sq_norm(a).shape == tree.dot(a, b).shape == ()


def test_names_count_and_not_their_order():
    a, b = example(0), example(1)
    assert equal(tree.add(a, turned(b)), tree.add(a, b))
    assert equal(tree.sub(turned(a), b), tree.sub(a, b))
    assert tree.sq_dist(a, turned(b)).item() == pytest.approx(tree.sq_dist(a, b).item(), rel=1e-12)
    assert tree.sq_dist(a, turned(a)) == 0
    assert list(tree.add(turned(a), b)) == list(turned(a))
    stacked = tree.stack([a, turned(b)])
    assert equal(tree.map(lambda x: x[1], stacked), b)
    same_shapes = {"a": torch.zeros(2), "b": torch.ones(2)}
    assert tree.sq_dist(same_shapes, turned(same_shapes)) == 0


def test_trees_with_other_names_are_refused():
    with pytest.raises(ValueError, match=r"different names cannot be combined: \['a'\] and \['a', 'b'\]"):
        tree.add({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(ValueError, match=r"\['x'\] and \['y'\]"):
        tree.sq_dist({"deep": {"x": torch.ones(1)}}, {"deep": {"y": torch.ones(1)}})


def test_where_takes_a_side_and_is_not_hurt_by_the_other():
    a = example()
    broken = tree.map(lambda x: x * torch.nan, a)
    assert equal(tree.where(torch.tensor(True), a, broken), a)
    assert equal(tree.where(torch.tensor(False), broken, a), a)
    mapped = vmap(tree.where, in_dims=(0, None, None))(torch.tensor([True, False]), a, example(1))
    assert equal(mapped, tree.stack([a, example(1)]))


def test_detach_cuts_the_graph():
    a = tree.map(lambda x: x.clone().requires_grad_(), example())
    assert all(leaf.requires_grad for leaf in tree.leaves(a))
    assert not any(leaf.requires_grad for leaf in tree.leaves(tree.detach(a)))


def test_gradient_of_a_distance():
    a, b = example(0), example(1)
    slope = grad(tree.sq_dist)(a, b)
    assert np.allclose(flat(slope), 2 * (flat(a) - flat(b)), atol=1e-14)


def test_flatten_and_back():
    nested = {"a": {"b": torch.ones(2), "none": {}, "c": {"d": torch.zeros(())}}, "e": torch.arange(3), "empty": {}}
    once = tree.flatten(nested)
    assert set(once) == {"a/b", "a/none/", "a/c/d", "e", "empty/"}
    back = tree.unflatten(once)
    assert equal(back, nested)
    assert list(back) == list(nested)
    assert back["a"]["none"] == back["empty"] == {}
    assert tree.flatten({}) == {}
    assert tree.unflatten({}) == {}
    with pytest.raises(ValueError, match="may not contain a slash: 'a/b'"):
        tree.flatten({"a/b": torch.ones(1)})


def test_stacking_and_taking_apart():
    several = [example(seed) for seed in range(4)]
    stacked = tree.stack(several)
    assert stacked["w"].shape == (4, 2, 3)
    assert stacked["deep"]["s"].shape == (4,)
    apart = tree.unstack(stacked, 4)
    assert all(equal(a, b) for a, b in zip(apart, several, strict=True))
    apart[0]["w"].zero_()
    assert stacked["w"][0].abs().sum() > 0  # its memory is its own
    picked = tree.take(stacked, torch.tensor([3, 1, 3]))
    assert equal(picked, tree.stack([several[3], several[1], several[3]]))
    assert equal(tree.concat([picked, stacked]), tree.stack([several[i] for i in (3, 1, 3, 0, 1, 2, 3)]))
    assert tree.stack([{}, {}]) == {}
    assert tree.unstack({}, 3) == [{}, {}, {}]


def test_to_converts_every_leaf():
    assert {leaf.dtype for leaf in tree.leaves(tree.to(example(), torch.float32))} == {torch.float32}


# --- the weighted mean ----------------------------------------------------------------------------------------


def test_the_mean_is_weighted_and_keeps_each_type():
    several = [example(seed, torch.float32) for seed in range(3)]
    weights = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)
    found = tree.mean(tree.stack(several), weights)
    want = sum(w * flat(t).astype(np.float64) for w, t in zip((1, 5, 2), several, strict=True)) / 8
    assert np.allclose(flat(found), want, atol=1e-7)
    assert {leaf.dtype for leaf in tree.leaves(found)} == {torch.float32}
    assert found["deep"]["s"].shape == ()
    alone = tree.mean(tree.stack(several[:1]), torch.tensor([7.0]))
    assert equal(alone, several[0])
    assert tree.mean({}, weights) == {}


def test_the_mean_sums_in_double_precision():
    """A million and many small numbers: single precision would lose them."""
    values = torch.full((1001,), 0.01, dtype=torch.float32)
    values[0] = 1e6
    found = tree.mean({"x": values}, torch.ones(1001))["x"]
    assert found.item() == pytest.approx((1e6 + 1000 * np.float64(np.float32(0.01))) / 1001, rel=1e-7)
    equal_parts = tree.mean({"x": torch.full((7,), 0.1, dtype=torch.float32)}, torch.ones(7))["x"]
    assert equal_parts == torch.tensor(0.1)


def test_integers_have_no_mean():
    with pytest.raises(TypeError, match="integer leaves has no mean: aggregate those names in the method's own"):
        tree.mean({"ok": torch.ones(2), "count": torch.ones(2, dtype=torch.int64)}, torch.ones(2))


# --- soundness and size ---------------------------------------------------------------------------------------


def test_a_tree_with_nan_or_inf_is_unsound():
    assert tree.sound(example(0))
    for name, value in (("w", torch.nan), ("w", -torch.inf)):
        spoilt = example(1)
        spoilt[name][0, 2] = value
        assert not tree.sound(spoilt)
    deep = example(2)
    deep["deep"]["s"] = torch.tensor(torch.inf)
    assert not tree.sound(deep)
    assert tree.sound({}) is None
    assert tree.sound({"n": torch.arange(3)}) is None


def test_bytes_on_the_wire():
    mixed = {
        "double": torch.zeros(2, 3, dtype=torch.float64),
        "half": torch.zeros(5, dtype=torch.float16),
        "long": torch.zeros(2, dtype=torch.int64),
        "deep": {"byte": torch.zeros(7, dtype=torch.uint8), "flag": torch.tensor(True)},
    }
    one = 4 * 6 + 4 * 5 + 8 * 2 + 7 + 1
    assert tree.nbytes(mixed) == one
    assert tree.nbytes(tree.stack([mixed] * 3), stacked=True) == one
    assert tree.nbytes(tree.stack([mixed] * 3)) == 3 * one
    assert tree.nbytes({}) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite_finds_one_bad_number_anywhere(bad):
    good = {
        "a": torch.ones(3),
        "b": {"c": torch.ones(2, 2, dtype=torch.float64), "n": torch.ones(2, dtype=torch.int64)},
    }
    assert tree.finite(good) and tree.finite({}) and tree.finite({"e": torch.empty(0), "n": torch.ones(1).long()})
    assert tree.finite({"a": torch.full((5,), torch.finfo(torch.float32).max)})
    for place in ((good["a"], 1), (good["b"]["c"], (1, 0))):
        old = place[0][place[1]].clone()
        place[0][place[1]] = bad
        assert not tree.finite(good)
        place[0][place[1]] = old


def test_norms_go_by_name_and_row():
    stacked = {"a": torch.tensor([[3.0, 4.0], [0.0, 0.0]]), "b": {"c": torch.tensor([12.0, 5.0]), "empty": {}}}
    assert tree.norms(stacked).tolist() == [13.0, 5.0]
    centre = {"b": {"empty": {}, "c": torch.tensor([12.0])}, "a": torch.tensor([[0.0, 4.0]])}  # in another order
    assert tree.norms(stacked, centre).tolist() == pytest.approx([3.0, (16 + 49) ** 0.5])
    assert tree.norms({"n": torch.tensor([[3, 4]])}).tolist() == [5.0]
