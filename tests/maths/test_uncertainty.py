"""The two-level Gaussian model of Self-FL against its closed forms, through the library's own functions.

A client's result z_m scatters with variance s_m around its parameter, parameters with s0 around a common value;
w_m = 1 / (s0 + s_m) and W is their sum. G is the best common value, FL_m the best value for client m under its own
view, INIT_m the others' mean.
"""

import numpy as np
import pytest
import torch

from bespoke.maths import uncertainty


def tensor(value):
    return torch.tensor(value, dtype=torch.float64)


def world(seed, clients=6, s0=0.8):
    """z, s, s0, w, W without each client, G, INIT, FL, and a = W_others / (1 / s + W_others)."""
    draw = np.random.default_rng(seed)
    s, z = draw.uniform(0.2, 2.0, clients), draw.normal(size=clients)
    return closed_forms(z, s, s0)


def closed_forms(z, s, s0):
    w = 1.0 / (s0 + s)
    others = w.sum() - w
    total = (w * z).sum()
    init = (total - w * z) / others
    best = (z / s + total - w * z) / (1.0 / s + others)
    return z, s, s0, w, others, total / w.sum(), init, best, others / (1.0 / s + others)


def start_of(shared, own, w, others):
    """The library's start for a client: the mean of the others."""
    found = uncertainty.others_mean({"p": tensor(shared)}, {"p": tensor(own)}, tensor(w), tensor(others))
    return float(found["p"])


def steps_of(s, others, lr):
    """The library's number of steps for a client whose loss has curvature 1 / s."""
    return float(uncertainty.balanced_steps(tensor(s), tensor(others), tensor(lr), tensor(1.0 / s)))


# --- T1: steps from the others' mean lead to the best balance --------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 40])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_steps_end_at_the_optimum(seed, steps):
    z, s, _, w, others, g, _, best, a = world(seed)
    for m in range(len(z)):
        lr = s[m] * (1.0 - a[m] ** (1.0 / steps))  # the rate at which so many steps are right
        assert steps_of(s[m], others[m], lr) == pytest.approx(steps, rel=1e-9)
        theta = start_of(g, z[m], w[m], others[m])
        for _ in range(steps):
            theta -= lr * (theta - z[m]) / s[m]
        assert abs(theta - best[m]) < 1e-12
        assert abs(start_of(g, z[m], w[m], others[m]) - best[m]) > 1e-4  # it had to move


@pytest.mark.parametrize("lr", [0.01, 0.1])
def test_a_given_rate_needs_whole_steps_and_a_shorter_one(lr):
    z, s, _, w, others, g, _, best, a = world(7)
    for m in range(len(z)):
        wanted = steps_of(s[m], others[m], lr)
        assert (1.0 - lr / s[m]) ** wanted == pytest.approx(a[m], rel=1e-12)
        theta = start_of(g, z[m], w[m], others[m])
        for _ in range(int(wanted)):
            theta -= lr * (theta - z[m]) / s[m]
        rest = s[m] * (1.0 - a[m] / (1.0 - lr / s[m]) ** int(wanted))
        assert 0 <= rest <= lr
        assert abs(theta - rest * (theta - z[m]) / s[m] - best[m]) < 1e-12


def test_more_rows_want_more_steps_of_a_mean_loss():
    few, many = (
        float(uncertainty.balanced_steps(tensor(0.5), tensor(4.0), tensor(0.03), tensor(1.0 / (n * 0.5))))
        for n in (10, 100)
    )
    assert many > 9 * few > 9


def test_steps_at_the_ends():
    """Where one step overshoots none is wanted; without others there is nothing to balance; nothing is NaN."""
    assert steps_of(0.01, 3.0, 0.5) == 0.0
    assert steps_of(1e-14, 1e-3, 0.1) == 0.0
    assert steps_of(1.0, 0.0, 0.1) > 1e3
    assert steps_of(1.0, 0.0, 5.0) == 0.0
    assert np.isfinite(steps_of(1e-300, 1e300, 1e-310))
    assert steps_of(1.0, 1e12, 0.1) < 1e-10  # others that are certain


# --- T2: the others' mean, and limits --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_start_is_the_mean_of_the_others(seed):
    z, _, _, w, others, g, init, _, _ = world(seed)
    for m in range(len(z)):
        assert abs(start_of(g, z[m], w[m], others[m]) - init[m]) < 1e-12
        assert abs(init[m] - g) > 1e-3


def test_the_start_is_never_thrown_further_than_the_other_side():
    """One client that outweighs all others: the factor w / W_others is at most 1. Alone it starts at the mean."""
    assert start_of(1.0, 3.0, w=50.0, others=0.1) == pytest.approx(-1.0)
    assert start_of(1.0, 3.0, w=50.0, others=0.0) == 1.0
    mixed = uncertainty.others_mean(
        {"a": torch.ones(2), "b": {"c": torch.zeros(3)}},
        {"a": torch.zeros(2), "b": {"c": torch.ones(3)}},
        tensor(1.0),
        tensor(4.0),
    )
    assert mixed["a"].dtype == torch.float32
    assert torch.equal(mixed["a"], torch.full((2,), 1.25)) and torch.equal(mixed["b"]["c"], torch.full((3,), -0.25))


def test_limits_of_the_closed_forms():
    z, s = np.array([1.0, -2.0, 0.5, 4.0]), np.array([0.5, 1.0, 2.0, 0.7])
    z, s, _, w, others, g, _, best, a = closed_forms(z, s, 1e12)  # clients have nothing in common
    assert np.abs(best - z).max() < 1e-9 and abs(g - z.mean()) < 1e-9 and np.abs(a).max() < 1e-9
    z, s, _, w, others, g, _, best, a = closed_forms(z, s, 0.0)  # clients are all the same
    assert np.abs(best - g).max() < 1e-12
    for m in range(4):  # the library's start and steps then lead to G: the optimum of all
        theta = start_of(g, z[m], w[m], others[m])
        lr = s[m] * (1.0 - a[m] ** 0.25)
        for _ in range(round(steps_of(s[m], others[m], lr))):
            theta -= lr * (theta - z[m]) / s[m]
        assert abs(theta - g) < 1e-12
    s = np.array([1e-13, 1.0, 1.0, 1.0])
    z, s, _, _, others, _, _, best, _ = closed_forms(z, s, 1.0)  # the first knows its own value
    gain = 1.0 + s * others
    assert abs(best[0] - z[0]) < 1e-9 and gain[0] == pytest.approx(1.0)
    assert gain[1] >= 1.0 + s[1] / (1.0 + s[0])
    assert gain[1] < s[1] / s[0]  # so it is not bounded below by the ratio of variances


# --- T3: the rounds contract to one fixed point -----------------------------------------------------------------


def fixed_point(z, a, w, others):
    b = np.tile(w, (len(w), 1)) / others[:, None]
    np.fill_diagonal(b, 0.0)
    return np.linalg.solve(np.eye(len(z)) - np.diag(a) @ b, (1.0 - a) * z)


def one_round(theta, z, w, others, a):
    """All clients: start at the others' mean, go to the balance. The server's mean comes from their weights."""
    g = (w * theta).sum() / w.sum()
    starts = np.array([start_of(g, theta[m], w[m], others[m]) for m in range(len(z))])
    return (1.0 - a) * z + a * starts


@pytest.mark.parametrize("s0", [0.1, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_rounds_contract_to_the_fixed_point(seed, s0):
    z, _, _, w, others, _, _, best, a = world(seed, clients=8, s0=s0)
    limit, rate = fixed_point(z, a, w, others), a.max()
    theta = np.random.default_rng(seed + 50).normal(scale=5.0, size=8)
    first = np.abs(theta - limit).max()
    for t in range(1, 16):
        theta = one_round(theta, z, w, others, a)
        assert np.abs(theta - limit).max() <= rate**t * first * (1 + 1e-12) + 1e-13
    assert rate < 1
    c = 1.0 + a * w / others  # the same fixed point without a matrix
    p, u = (1.0 - a) * z / c, a / (others * c)
    assert np.abs(p + u * (w * p).sum() / (1.0 - (w * u).sum()) - limit).max() < 1e-12
    assert np.abs(limit - best).max() > 1e-3  # near, and not the optimum itself


# --- T4: how far the fixed point is from the optimum ------------------------------------------------------------


def test_the_distance_to_the_optimum_falls_as_the_root_of_the_number_of_clients():
    draw, sizes, mean_gap = np.random.default_rng(0), (10, 40, 160, 640, 2560), []
    for count in sizes:
        gaps = []
        for _ in range(200):
            s = draw.uniform(0.5, 1.5, count) / count
            z, s, _, w, others, g, _, _, a = closed_forms(draw.normal(size=count) * np.sqrt(1.0 + s), s, 1.0)
            c = 1.0 + a * w / others
            p, u = (1.0 - a) * z / c, a / (others * c)
            limit = p + u * (w * p).sum() / (1.0 - (w * u).sum())
            gaps.append(abs((w * limit).sum() / w.sum() - g))
        mean_gap.append(np.mean(gaps))
    slope = np.polyfit(np.log(sizes), np.log(mean_gap), 1)[0]
    assert -0.56 < slope < -0.42
    scaled = np.sqrt(sizes) * np.array(mean_gap)
    assert scaled.min() > 0.08 and scaled.max() < 0.16


# --- T5: from a warm start one round is exact -------------------------------------------------------------------


def test_one_round_from_a_warm_start_is_the_optimum():
    z, _, _, w, others, _, _, best, a = world(11)
    once = one_round(z, z, w, others, a)
    assert np.abs(once - best).max() < 1e-12
    later = once
    for _ in range(200):
        later = one_round(later, z, w, others, a)
    assert np.abs(later - fixed_point(z, a, w, others)).max() < 1e-10
    assert np.abs(later - best).max() > 1e-3  # further rounds drift away


# --- T6: variances on the way ------------------------------------------------------------------------------------


def history(values):
    known = uncertainty.no_history(values[0])
    for value in values:
        known = uncertainty.note(known, value)
    return known


def parameters(count, offset=0.0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(3)
    return [
        {
            "a": (offset + torch.randn(4, 3, generator=draw, dtype=torch.float64)).to(dtype),
            "b": {"c": (offset + torch.randn(5, generator=draw, dtype=torch.float64)).to(dtype)},
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize(("offset", "dtype"), [(0.0, torch.float64), (1e4, torch.float64), (1e4, torch.float32)])
def test_running_variances_equal_two_passes(offset, dtype):
    values = parameters(9, offset, dtype)
    rows = np.stack([torch.cat([v["a"].flatten(), v["b"]["c"]]).double().numpy() for v in values])
    for count in range(1, 10):
        known = history(values[:count])
        assert float(known["count"]) == count
        want = rows[:count].var(axis=0, ddof=0).sum() * count
        assert float(known["m2"]) == pytest.approx(want, rel=1e-10, abs=1e-12)
        mean = torch.cat([known["mean"]["a"].flatten(), known["mean"]["b"]["c"]]).numpy()
        assert np.abs(mean - rows[:count].mean(axis=0)).max() < 1e-10 * max(1.0, offset)
    assert all(leaf.dtype == torch.float64 for leaf in (known["m2"], known["count"], known["mean"]["a"]))
    assert known["m2"].shape == known["count"].shape == ()


def test_equal_results_leave_a_floor():
    value = parameters(1, 100.0)[0]
    known = history([value] * 5)
    assert float(known["m2"]) < 1e-18
    rows = torch.cat([value["a"].flatten(), value["b"]["c"]])
    want = 1e-12 * (1.0 + float(rows.square().mean()))
    assert float(uncertainty.floor(value)) == pytest.approx(want, rel=1e-12)
    assert uncertainty.floor(value).dtype == torch.float64
    # A weight from the floor is finite, and so is all that follows.
    w = 1.0 / uncertainty.floor(value)
    assert torch.isfinite(w) and np.isfinite(steps_of(float(1 / w), 2.0, 0.1))
