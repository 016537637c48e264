"""Means that a few bad uploads cannot move far, against NumPy and SciPy."""

import numpy as np
import pytest
import torch
from scipy import stats

from bespoke.core import robust, tree
from bespoke.core.algorithm import Uploads

draw = np.random.default_rng(1)
STACKED = {"w": torch.from_numpy(draw.normal(size=(7, 3, 2))), "b": torch.from_numpy(draw.normal(size=(7, 2)))}
WEIGHTS = torch.tensor([3.0, 1.0, 2.0, 5.0, 1.0, 4.0, 2.0], dtype=torch.float64)
CENTRE = {"w": torch.full((3, 2), 0.3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}


def by(rule, weights=WEIGHTS, stacked=STACKED, trim=0.0):
    return {k: v.numpy() for k, v in robust.mean(rule, stacked, weights, CENTRE, trim).items()}


def test_the_plain_mean_is_the_trees_own():
    assert all(np.array_equal(v, tree.mean(STACKED, WEIGHTS)[k]) for k, v in by("mean").items())


@pytest.mark.parametrize("clients", [7, 6])
def test_the_median_is_taken_by_coordinate_and_without_weights(clients):
    some = {k: v[:clients] for k, v in STACKED.items()}
    for name, found in by("median", WEIGHTS[:clients], some).items():
        np.testing.assert_array_equal(found, np.median(some[name].numpy(), axis=0))


@pytest.mark.parametrize("trim", [0.0, 0.15, 0.3, 0.5])
def test_the_trimmed_mean_leaves_out_both_ends_of_each_coordinate(trim):
    equal = torch.ones(7, dtype=torch.float64)
    cut = min(round(trim * 7), 3)
    for name, found in by("trimmed", equal, trim=trim).items():
        np.testing.assert_allclose(found, stats.trim_mean(STACKED[name].numpy(), cut / 7 + 1e-9, axis=0))


@pytest.mark.parametrize("rule", ["median", "trimmed", "clipped"])
def test_clients_of_weight_zero_do_not_count(rule):
    heard = torch.tensor([0, 4])
    some = {k: v[heard] for k, v in STACKED.items()}
    silent = torch.zeros(7, dtype=torch.float64).index_fill(0, heard, 2.0)
    expected = by(rule, torch.full((2,), 2.0, dtype=torch.float64), some, trim=0.2)
    assert all(np.array_equal(found, expected[name]) for name, found in by(rule, silent, trim=0.2).items())
    nobody = by(rule, torch.zeros(7, dtype=torch.float64))
    assert all(np.isnan(found).all() for found in nobody.values())  # as the plain mean


def test_the_trimmed_mean_weighs_what_is_left():
    for name, found in by("trimmed", trim=0.15).items():
        x, order = STACKED[name].numpy(), STACKED[name].numpy().argsort(axis=0)[1:-1]
        share = WEIGHTS.numpy()[order]
        np.testing.assert_allclose(found, (np.take_along_axis(x, order, 0) * share).sum(0) / share.sum(0))


def test_the_clipped_mean_shortens_the_distance_to_the_centre():
    away = {k: STACKED[k].numpy() - CENTRE[k].numpy() for k in STACKED}
    far = np.sqrt(sum((a.reshape(7, -1) ** 2).sum(1) for a in away.values()))
    share = np.minimum(1.0, np.median(far) / far)
    for name, found in by("clipped").items():
        moved = np.average(away[name] * share.reshape(7, *[1] * (away[name].ndim - 1)), axis=0, weights=WEIGHTS)
        np.testing.assert_allclose(found, CENTRE[name].numpy() + moved)


@pytest.mark.parametrize("rule", ["median", "trimmed", "clipped"])
def test_one_huge_upload_of_seven_moves_no_robust_mean_beyond_the_others(rule):
    bad = {k: v.clone().index_fill_(0, torch.tensor(2), 1e38) for k, v in STACKED.items()}
    assert all(abs(v).max() > 1e36 for v in by("mean", stacked=bad).values())
    assert all(abs(v).max() < 3.0 for v in by(rule, stacked=bad, trim=0.15).values())


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed", "clipped"])
def test_types_are_kept_and_integers_refused(rule):
    half = tree.map(lambda x: x.float(), STACKED)
    found = robust.mean(rule, half, WEIGHTS, tree.map(lambda x: x.float(), CENTRE), 0.1)
    assert {leaf.dtype for leaf in tree.leaves(found)} == {torch.float32}
    if rule != "clipped":
        with pytest.raises(TypeError, match="integer leaves has no mean"):
            robust.mean(rule, {"n": torch.ones(3, 2, dtype=torch.int64)}, torch.ones(3), {}, 0.1)


def test_uploads_clip_around_what_was_sent_or_else_around_zero():
    up = {"model": STACKED, "delta": STACKED["b"]}
    uploads = Uploads(up, WEIGHTS, torch.arange(7), {"model": CENTRE}, "clipped")
    expected = robust.mean("clipped", STACKED, WEIGHTS, CENTRE, 0.0)
    assert all(torch.equal(found, expected[name]) for name, found in uploads.mean("model").items())
    zero = robust.mean("clipped", {"b": STACKED["b"]}, WEIGHTS, {"b": torch.zeros(2, dtype=torch.float64)}, 0.0)["b"]
    assert torch.equal(uploads.mean("delta"), zero)
    equal = uploads._replace(robust="mean").mean("delta", torch.ones(7))
    torch.testing.assert_close(equal, STACKED["b"].mean(dim=0))
