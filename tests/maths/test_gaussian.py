"""Class-conditional Gaussians against scikit-learn, NumPy and dense formulas."""

import numpy as np
import pytest
import torch
from golden import gaussians, pfedvmp
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch.func import vmap

from bespoke.maths import gaussian
from bespoke.maths.gaussian import Gaussians


def tensor(value):
    return torch.from_numpy(np.asarray(value, dtype=float))


def sample(seed=0, n=60, d=6, classes=4, absent=()):
    """Features around class centres and labels; classes ``absent`` have no rows."""
    draw = np.random.default_rng(seed)
    y = draw.choice([c for c in range(classes) if c not in absent], size=n)
    mix = draw.normal(size=(d, d))
    return 3.0 * draw.normal(size=(classes, d))[y] + draw.normal(size=(n, d)) @ mix, y


def padded(z, y, extra):
    """The same rows with so many rows of nonsense behind them: z, y, mask."""
    draw = np.random.default_rng(99)
    z = np.concatenate([z, 1e3 * draw.normal(size=(extra, z.shape[1]))])
    mask = np.concatenate([np.ones(len(y)), np.zeros(extra)])
    return tensor(z), torch.from_numpy(np.concatenate([y, draw.integers(0, y.max() + 1, extra)])), tensor(mask)


def members(z, y, extra=0, classes=4):
    z, y, mask = padded(z, y, extra)
    return z, gaussian.one_hot(y, mask, classes)


# --- the head -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amount", [0.0, 1e-4, 0.3])
@pytest.mark.parametrize("solver", ["lsqr", "eigen"])
def test_head_and_posterior_equal_scikit_learns(solver, amount):
    z, y = sample()
    known = LinearDiscriminantAnalysis(solver=solver, shrinkage=amount or None, store_covariance=True).fit(z, y)
    x, member = members(z, y, extra=5)
    mean = gaussian.class_means(x, member, torch.zeros(4, 6))
    cov = gaussian.tied_covariance(x, member, mean, ridge=0.0) * (len(y) - 1) / len(y)  # scikit-learn's is biased
    prior = gaussian.prior(torch.from_numpy(y), torch.ones(len(y), dtype=torch.float64), 4, smooth=0.0)
    assert np.abs(mean.numpy() - known.means_).max() < 1e-12
    assert np.abs(prior.numpy() - known.priors_).max() < 1e-15
    assert np.abs(gaussian.shrink(cov, amount).numpy() - known.covariance_).max() < 1e-12
    head = gaussian.lda_head(Gaussians(mean, cov), prior.log(), amount)
    if solver == "lsqr":
        assert np.abs(head.weight.numpy() - known.coef_).max() < 1e-8
        assert np.abs(head.bias.numpy() - known.intercept_).max() < 1e-8
    new, _ = sample(seed=1)
    posterior = torch.softmax(head(tensor(new)), dim=1).numpy()
    assert np.abs(posterior - known.predict_proba(new)).max() < 1e-8
    assert np.abs(torch.log_softmax(head(tensor(new)), dim=1).numpy() - known.predict_log_proba(new)).max() < 1e-8
    assert (posterior.max(axis=1) < 0.999).any()  # not all beyond doubt
    other = gaussian.lda_head(Gaussians(mean, cov), torch.zeros(4), amount)
    assert np.abs(torch.softmax(other(tensor(new)), dim=1).numpy() - known.predict_proba(new)).max() > 1e-4


def test_the_posterior_is_bayes_rule_on_normal_densities():
    from scipy.stats import multivariate_normal

    z, y = sample(d=3)
    x, member = members(z, y)
    stats = gaussian.estimate(x, member, torch.zeros(4, 3), ridge=0.2)
    log_prior = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    found = torch.softmax(gaussian.lda_head(stats, log_prior, 0.0)(x), dim=1).numpy()
    cov = stats.cov.numpy()
    density = np.stack([multivariate_normal(m, cov).pdf(z) for m in stats.mean.numpy()], axis=1) * [0.1, 0.2, 0.3, 0.4]
    assert np.abs(found - density / density.sum(axis=1, keepdims=True)).max() < 1e-10


def test_the_head_is_computed_in_double_precision():
    z, y = sample(seed=4, n=40, d=12)
    x, member = members(1e2 + z, y)
    exact = gaussian.estimate(x, member, torch.zeros(4, 12), ridge=1e-3)
    single = Gaussians(exact.mean.float(), exact.cov.float())
    doubled = Gaussians(single.mean.double(), single.cov.double())
    prior = torch.zeros(4, dtype=torch.float64)
    head, want = gaussian.lda_head(single, prior.float()), gaussian.lda_head(doubled, prior)
    assert head.weight.dtype == head.bias.dtype == torch.float32
    assert torch.equal(head.weight, want.weight.float()) and torch.equal(head.bias, want.bias.float())


# --- statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [0, 7])
@pytest.mark.parametrize("absent", [(), (1,), (0, 2, 3)])
@pytest.mark.parametrize("n", [1, 2, 25])
def test_means_covariance_and_prior_against_numpy(n, absent, extra):
    z, y = sample(seed=n, n=n, absent=absent)
    fallback = np.random.default_rng(7).normal(size=(4, 6))
    x, member = members(z, y, extra)
    _, label, mask = padded(z, y, extra)
    stats = gaussian.estimate(x, member, tensor(fallback), ridge=0.25)
    mean = gaussians.class_means(z, y, fallback)
    assert np.abs(stats.mean.numpy() - mean).max() < 1e-12
    assert np.abs(stats.cov.numpy() - gaussians.covariance(z, y, mean, 0.25)).max() < 1e-11
    other = np.random.default_rng(8).normal(size=(4, 6))
    around = gaussian.tied_covariance(x, member, tensor(other), ridge=0.0).numpy()
    assert np.abs(around - gaussians.covariance(z, y, other, 0.0)).max() < 1e-11
    for c in absent:
        assert np.array_equal(stats.mean[c].numpy(), fallback[c])
    for smooth in (1e-4, 0.3):
        found = gaussian.prior(label, mask, 4, smooth).log().numpy()
        assert np.abs(found - gaussians.log_prior(y, 4, smooth)).max() < 1e-12
    assert np.isfinite(found).all()


def test_the_covariance_is_numpys_for_one_class():
    z, _ = sample()
    x, member = members(z, np.zeros(len(z), dtype=int))
    found = gaussian.estimate(x, member, torch.zeros(4, 6), ridge=0.0).cov.numpy()
    assert np.abs(found - np.cov(z.T)).max() < 1e-12


def test_interpolation_is_linear_with_a_share_for_each():
    z, y = sample()
    x, member = members(z, y)
    own = gaussian.estimate(x, member, torch.zeros(4, 6), ridge=1.0)
    shared = Gaussians(torch.zeros(4, 6, dtype=torch.float64), torch.eye(6, dtype=torch.float64))
    a, b = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.8, dtype=torch.float64)
    mixed = gaussian.interpolate(own, shared, a, b)
    assert torch.allclose(mixed.mean, 0.3 * own.mean, atol=1e-14)
    assert torch.allclose(mixed.cov, 0.8 * own.cov + 0.2 * torch.eye(6), atol=1e-13)
    pure = gaussian.interpolate(own, shared, torch.ones(()), torch.ones(()))
    assert torch.equal(pure.mean, own.mean) and torch.equal(pure.cov, own.cov)


@pytest.mark.parametrize("d", [1, 2, 9])
def test_packing_is_exact(d):
    draw = np.random.default_rng(d)
    cov = tensor(draw.normal(size=(3, 2, d, d)))
    cov = cov + cov.mT
    packed = gaussian.pack(cov)
    assert packed.shape == (3, 2, d * (d + 1) // 2)
    assert torch.equal(gaussian.unpack(packed, d), cov)
    assert np.array_equal(packed[1, 1].numpy(), gaussians.pack(cov[1, 1].numpy()))


# --- repair ---------------------------------------------------------------------------------------------------


def indefinite(seed, d=7):
    draw = np.random.default_rng(seed)
    a = draw.normal(size=(d, d))
    cov = a @ a.T + np.eye(d)
    i, j = draw.choice(d, 2, replace=False)
    cov[i, j] = cov[j, i] = 1.5 * np.sqrt(cov[i, i] * cov[j, j])  # a correlation above 1
    return cov


@pytest.mark.parametrize("seed", range(5))
def test_repair_equals_the_clipping_rule(seed):
    cov = indefinite(seed)
    assert np.linalg.eigvalsh(cov).min() < -0.1
    found = gaussian.repair(tensor(cov)).numpy()
    assert np.abs(found - gaussians.repaired(cov)).max() < 1e-10
    assert np.abs(np.diag(found) - np.diag(cov)).max() < 1e-12  # the same variances
    assert np.linalg.eigvalsh(found).min() > -1e-12 * np.trace(cov)


def test_repair_of_many_at_once_and_of_few_rows():
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(3, 9))  # rank 2 of 9
    few = np.cov(rows.T)
    sound = np.cov(draw.normal(size=(40, 9)).T)
    both = gaussian.repair(tensor(np.stack([few, sound]))).numpy()
    assert np.abs(both[0] - gaussians.repaired(few)).max() < 1e-10
    assert np.linalg.eigvalsh(both[0]).min() > -1e-14
    assert np.array_equal(both[1], sound)  # already positive definite: untouched to the bit


def test_repair_leaves_a_dead_feature_alone():
    cov = np.cov(np.random.default_rng(1).normal(size=(30, 5)).T)
    cov[2] = cov[:, 2] = 0.0
    found = gaussian.repair(tensor(cov)).numpy()
    assert np.isfinite(found).all()
    assert np.abs(found - cov).max() < 1e-12
    assert np.abs(found - gaussians.repaired(cov)).max() < 1e-12


# --- precisions of classes ------------------------------------------------------------------------------------


def centred(rows):
    return rows - rows.mean(axis=0)


def test_precisions_are_pseudo_inverses():
    """Classes of 1, 2, 24 and 300 rows, fewer and more than the 128 features."""
    draw = np.random.default_rng(3)
    y, d = np.repeat([0, 1, 2, 3], [1, 2, 24, 300]), 128
    z = draw.normal(size=(4, d))[y] + draw.normal(size=(len(y), d))
    x, member = members(z, y, extra=3)
    found = gaussian.class_precisions(x, member, alpha=0.7, cut=1e-10).numpy()
    for c, rows in enumerate((1, 2, 24, 300)):
        cov = np.cov(z[y == c].T, bias=True) if rows > 1 else np.zeros((d, d))
        want = np.linalg.pinv(cov, rcond=1e-9, hermitian=True) if rows > 1 else cov
        assert np.abs(found[c] - want - 0.7 * np.eye(d)).max() < 1e-8 * max(np.abs(want).max(), 1.0), rows
    assert np.array_equal(found[0], 0.7 * np.eye(d))


@pytest.mark.parametrize("cut", [1e-4, 1e-2])
@pytest.mark.parametrize("d", [4, 30])
def test_small_variances_are_cut_smoothly(d, cut):
    draw = np.random.default_rng(d)
    y = np.array([0] * 9 + [1] * 25 + [3] * 2)
    z = 2.0 + draw.normal(size=(len(y), d)) * np.logspace(0, -4, d)
    x, member = members(z, y, extra=4)
    found = gaussian.class_precisions(x, member, 1.0, cut).numpy()
    want = pfedvmp.precisions(z, y, 4, 1.0, cut)
    assert np.abs(found - want).max() < 1e-9 * np.abs(want).max()
    assert np.array_equal(found[2], np.zeros((d, d)))  # without rows nothing is known
    loose = pfedvmp.precisions(z, y, 4, 1.0, 1e-12)
    assert np.abs(found - loose).max() > 1e-3 * np.abs(loose).max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", [2, 3, 5, 24])
def test_equal_rows_are_no_certainty(rows, dtype):
    z = (3.0 * torch.randn(1, 128, generator=torch.Generator().manual_seed(rows))).to(dtype).repeat(rows, 1)
    member = gaussian.one_hot(torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=dtype), 2)
    found = gaussian.class_precisions(z, member, 1.0, 1e-4)
    assert found.dtype == dtype
    assert (found[0] - torch.eye(128)).abs().max() < 1e-6
    # Nor are rows that differ by their rounding.
    nudged = torch.nextafter(z, z + torch.tensor([1.0, -1.0] * 64)) if rows > 1 else z
    z = torch.where((torch.arange(rows) % 2 == 0)[:, None], z, nudged)
    assert (gaussian.class_precisions(z, member, 1.0, 1e-4)[0] - torch.eye(128)).abs().max() < 10.0


def test_near_equal_rows_do_no_harm_beside_others():
    draw = np.random.default_rng(5)
    y = np.array([0, 0, *[1] * 20])
    z = draw.normal(size=(22, 16))
    z[1] = z[0] + 1e-5 * draw.normal(size=16)
    x, member = members(z, y, classes=2)
    found = gaussian.class_precisions(x, member, 1.0, 1e-4).numpy()
    assert np.linalg.norm(found[0] - np.eye(16), 2) < 0.1  # the plain pseudo-inverse says 1e9
    assert np.linalg.pinv(np.cov(z[:2].T, bias=True), hermitian=True).max() > 1e7
    # With a healthy client beside it, the class's centroid is what the rows say, not what their likeness does.
    other = np.stack([np.cov(draw.normal(size=(50, 16)).T), np.eye(16)])
    means, fallback = tensor(draw.normal(size=(2, 2, 16))), torch.zeros(2, 16)
    both = gaussian.precision_mean(means, torch.stack([tensor(found), tensor(other)]), torch.ones(2, 2), fallback)
    ideal = np.linalg.solve(np.eye(16) + other[0], means[0, 0].numpy() + other[0] @ means[1, 0].numpy())
    assert np.abs(both[0].numpy() - ideal).max() < 0.1


def test_padding_does_not_enter_the_cut_off():
    """Rows so alike that the cut-off follows the features' size: padding repeats a row, as the library pads."""
    draw = np.random.default_rng(2)
    z = np.concatenate([[[50.0, 0, 0, 0]], draw.normal(size=4) + 3e-6 * draw.normal(size=(4, 4))])
    y, mask = np.array([2, 0, 0, 1, 1]), np.ones(5)
    plain = gaussian.class_precisions(tensor(z), gaussian.one_hot(torch.from_numpy(y), tensor(mask), 3), 1.0, 1e-4)
    z, y, mask = (np.concatenate([v, np.repeat(v[:1], 6, axis=0)]) for v in (z, y, mask))
    mask[5:] = 0.0
    longer = gaussian.class_precisions(tensor(z), gaussian.one_hot(torch.from_numpy(y), tensor(mask), 3), 1.0, 1e-4)
    assert float((plain - longer).abs().max() / plain.abs().max()) < 1e-9
    assert plain.max() > 1e6  # a case where the cut-off matters


# --- means weighted by precisions -----------------------------------------------------------------------------


def clients(seed=0, count=5, classes=3, d=6):
    """Means, precisions and counts of several clients; class 2 is on no client, class 1 not on the first."""
    draw = np.random.default_rng(seed)
    a = draw.normal(size=(count, classes, d, 2 * d))
    precision = a @ a.swapaxes(-1, -2) * np.exp(draw.normal(size=(count, classes, 1, 1)))
    present = np.ones((count, classes))
    present[:, 2] = present[0, 1] = 0.0
    mean = draw.normal(size=(count, classes, d)) * present[..., None]
    return tensor(mean), tensor(precision * present[..., None, None]), tensor(4 * present)


FALLBACK = torch.full((3, 6), 9.0, dtype=torch.float64)


def test_precision_mean_is_the_dense_formula():
    mean, precision, count = clients()
    found = gaussian.precision_mean(mean, precision, count, FALLBACK).numpy()
    for c, who in enumerate((range(5), range(1, 5))):
        total = sum(precision[k, c].numpy() for k in who)
        right = sum(precision[k, c].numpy() @ mean[k, c].numpy() for k in who)
        assert np.abs(found[c] - np.linalg.inv(total) @ right).max() < 1e-10
    assert np.array_equal(found[2], FALLBACK[2].numpy())  # nobody has the class
    assert np.abs(found[0] - mean[:, 0].numpy().mean(axis=0)).max() > 0.1


def test_precision_mean_in_simple_cases():
    mean, precision, count = clients()
    same = precision[:1, :1].expand(5, 3, 6, 6)
    plain = gaussian.precision_mean(mean, same, torch.ones(5, 3), FALLBACK)
    assert (plain - mean.mean(dim=0)).abs().max() < 1e-12
    alone = gaussian.precision_mean(mean[1:2], precision[1:2], count[1:2], FALLBACK)
    assert (alone[:2] - mean[1, :2]).abs().max() < 1e-12
    scaled = gaussian.precision_mean(mean, 37.0 * precision, count, FALLBACK)
    assert (scaled - gaussian.precision_mean(mean, precision, count, FALLBACK)).abs().max() < 1e-12
    variance = torch.rand(5, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    diagonal = gaussian.precision_mean(mean, torch.diag_embed(1.0 / variance), torch.ones(5, 3), FALLBACK)
    want = (mean / variance).sum(dim=0) / (1.0 / variance).sum(dim=0)
    assert (diagonal - want).abs().max() < 1e-12


def test_the_order_of_clients_does_not_matter():
    mean, precision, count = clients()
    order = torch.tensor([3, 0, 4, 2, 1])
    again = gaussian.precision_mean(mean[order], precision[order], count[order], FALLBACK)
    assert (again - gaussian.precision_mean(mean, precision, count, FALLBACK)).abs().max() < 1e-10


# --- the message ----------------------------------------------------------------------------------------------


def written(mean, precision, counts, alpha, dtype):
    """A message as bytes: for each present class its mean, and the smaller of a factor and a triangle."""
    d, parts = mean.shape[1], []
    for c, rows in enumerate(counts):
        if not rows:
            continue
        parts.append(mean[c])
        if (rows - 1) * (d + 1) < d * (d + 1) / 2:
            values, vectors = np.linalg.eigh(precision[c] - alpha * np.eye(d))
            parts += [np.append(vectors[:, d - 1 - i], values[d - 1 - i]) for i in range(int(rows) - 1)]
        else:
            parts.append(gaussians.pack(precision[c]))
    return np.concatenate(parts).astype(dtype).tobytes()


def read(message, counts, d, alpha, dtype):
    numbers = list(np.frombuffer(message, dtype).astype(float))

    def take(count):
        part = np.array(numbers[:count])
        del numbers[:count]
        return part

    mean, precision = np.zeros((len(counts), d)), np.zeros((len(counts), d, d))
    for c, rows in enumerate(counts):
        if not rows:
            continue
        mean[c] = take(d)
        if (rows - 1) * (d + 1) < d * (d + 1) / 2:
            precision[c] = alpha * np.eye(d)
            for _ in range(int(rows) - 1):
                column, value = np.split(take(d + 1), [d])
                precision[c] += value * np.outer(column, column)
        else:
            precision[c] = gaussians.unpack(take(d * (d + 1) // 2), d)
    assert not numbers
    return mean, precision


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-6)])
def test_the_size_of_a_message_is_that_of_a_packed_one(dtype, tolerance):
    draw = np.random.default_rng(6)
    counts, d = np.array([1, 2, 5, 0, 7, 8, 40]), 13  # a factor pays up to 7 rows
    y = np.repeat(np.arange(7), counts)
    z = draw.normal(size=(len(y), d))
    x, member = members(z, y, extra=2, classes=7)
    precision = gaussian.class_precisions(x, member, 1.0, 1e-4).numpy()
    mean = gaussian.class_means(x, member, torch.zeros(7, d)).numpy()
    message = written(mean, precision, counts, 1.0, dtype)
    floats = gaussian.message_floats(member.sum(dim=0), d)
    assert floats.shape == () and len(message) == int(floats) * np.dtype(dtype).itemsize
    again_mean, again = read(message, counts, d, 1.0, dtype)
    assert np.abs(again - precision).max() <= tolerance * np.abs(precision).max()
    assert np.abs(again_mean - mean).max() <= tolerance
    full = len(counts[counts > 0]) * (d + d * (d + 1) // 2)
    assert 0.4 * full < int(floats) < 0.8 * full  # smaller than all triangles


def test_the_papers_message_sizes():
    """24 rows a class and 512 features: 11,799 numbers a class instead of 131,328."""
    each = torch.full((10,), 24.0, dtype=torch.float64)
    assert int(gaussian.message_floats(each, 512)) == 10 * (512 + 11_799)
    assert int(gaussian.message_floats(each * 100, 512)) == 1_318_400
    assert int(gaussian.message_floats(torch.zeros(10), 512)) == 0


# --- mapped over clients --------------------------------------------------------------------------------------


def test_everything_maps_over_clients():
    draws = [sample(seed=s, n=20) for s in range(3)]
    z = torch.stack([tensor(z) for z, _ in draws])
    y = torch.stack([torch.from_numpy(y) for _, y in draws])
    mask = (torch.arange(20) < torch.tensor([20, 11, 1])[:, None]).double()

    def one(z, y, mask):
        member = gaussian.one_hot(y, mask, 4)
        stats = gaussian.estimate(z, member, torch.zeros(4, 6, dtype=z.dtype), 0.5)
        head = gaussian.lda_head(stats, gaussian.prior(y, mask, 4, 1e-4).log())
        precision = gaussian.class_precisions(z, member, 1.0, 1e-4)
        return *stats, *head, precision, gaussian.pack(stats.cov), gaussian.message_floats(member.sum(0), 6)

    mapped, alone = vmap(one)(z, y, mask), [one(*args) for args in zip(z, y, mask, strict=True)]
    for i, together in enumerate(mapped):
        for k in range(3):
            assert (together[k] - alone[k][i]).abs().max() < 1e-10
            assert torch.isfinite(together[k]).all()
