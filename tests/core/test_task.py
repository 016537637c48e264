"""A model as functions: losses, initial weights, and the split by module."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch import nn
from torch.func import grad, vmap

from bespoke.core import rng
from bespoke.core.data import Batch
from bespoke.core.task import Task, cross_entropy, masked_mean
from bespoke.errors import UserError

CLASSES = 3


class Deep(nn.Module):
    """A head two levels down, beside a layer that is not of it, and names that mislead."""

    def __init__(self):
        super().__init__()
        self.head_norm = nn.LayerNorm(4)
        self.features = nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Tanh())
        self.classifier = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, CLASSES))
        self.norm = nn.Linear(4, 4)  # called so, but none

    def forward(self, x):
        return self.classifier(self.features(self.norm(self.head_norm(x))))


def deep(**options):
    return Task(Deep, "classifier.1", CLASSES, dtype=torch.float64, **options)


def batch(n=6, real=6, seed=0):
    x = rng.normal(rng.key(seed), (n, 4), torch.float64)
    y = (rng.uniform(rng.key(seed + 1), (n,)) * CLASSES).long()
    mask = (torch.arange(n) < real).double()
    return Batch(x, y, mask, torch.arange(n), torch.tensor(0), rng.key(0))


# --- losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("real", [0, 1, 4, 6])
def test_losses_are_means_over_the_real_rows(real):
    b = batch(real=real)
    logits = rng.normal(rng.key(7), (6, CLASSES), torch.float64) * 5
    each = -log_softmax(logits.numpy(), axis=1)[np.arange(6), b.y.numpy()]
    want = each[:real].mean() if real else 0.0
    assert cross_entropy(logits, b).item() == pytest.approx(want, abs=1e-12)
    assert masked_mean(torch.from_numpy(each), b.mask).item() == pytest.approx(want, abs=1e-12)
    assert cross_entropy(logits, b).shape == ()
    task = deep()
    params = task.init(rng.key(0))
    each = -log_softmax(task.logits(params, b.x).numpy(), axis=1)[np.arange(6), b.y.numpy()]
    assert task.loss(params, b).item() == pytest.approx(each[:real].mean() if real else 0.0, abs=1e-12)


def test_padding_gives_no_gradient():
    task = deep()
    params = task.init(rng.key(0))
    padded = batch(n=9, real=5)
    short = Batch(*(t[:5] for t in padded[:4]), *padded[4:])
    other = padded._replace(x=torch.cat([padded.x[:5], 100 * padded.x[5:]]), y=(padded.y + (padded.mask == 0)) % 3)
    want = grad(task.loss)(params, short)
    for b in (padded, other):
        found = grad(task.loss)(params, b)
        assert all((found[n] - want[n]).abs().max() < 1e-14 for n in want)
    assert max(g.abs().max() for g in want.values()) > 1e-2


# --- initial weights ------------------------------------------------------------------------------------------


def test_initial_weights_depend_on_the_key_alone():
    task = deep()
    torch.manual_seed(0)
    one = task.init(rng.key(3))
    torch.manual_seed(99)
    torch.rand(5)
    two = task.init(rng.key(3))
    three = deep().init(rng.key(3))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) and torch.equal(one[n], three[n]) for n in one)
    assert not torch.equal(one["norm.weight"], task.init(rng.key(4))["norm.weight"])
    assert not torch.equal(one["norm.weight"], task.init(rng.fold_in(rng.key(3), 0))["norm.weight"])


def test_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    task = deep()
    task.init(rng.key(3))
    task.check(batch().x)
    assert torch.equal(torch.get_rng_state(), before)


def test_initial_weights_are_torchs_own():
    found = deep().init(rng.key(3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.bits(rng.key(3), torch.tensor(0))))
        want = dict(Deep().named_parameters())
    assert all(torch.equal(found[n], want[n].detach().double()) for n in want)
    assert {p.dtype for p in found.values()} == {torch.float64}
    assert not any(p.requires_grad for p in found.values())


def test_a_trees_weights_are_its_own():
    task = deep()
    one = task.init(rng.key(3))
    one["norm.weight"].zero_()
    assert task.init(rng.key(3))["norm.weight"].abs().sum() > 0


# --- the split ------------------------------------------------------------------------------------------------


def test_the_split_is_by_module():
    task = deep()
    assert set(task.head_names) == {"classifier.1.weight", "classifier.1.bias"}
    assert set(task.norm_names) == {"head_norm.weight", "head_norm.bias", "features.1.weight", "features.1.bias"}
    params = task.init(rng.key(0))
    assert set(task.body(params)) | set(task.head(params)) == set(params)
    assert not set(task.body(params)) & set(task.head(params))
    assert "classifier.0.weight" in task.body(params)
    assert task.norm(params).keys() == set(task.norm_names)
    assert all(task.head(params)[n] is params[n] for n in task.head_names)


def test_a_head_of_several_layers():
    task = Task(Deep, "classifier", CLASSES, dtype=torch.float64)
    task.check(batch().x)
    assert set(task.head_names) == {f"classifier.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
    params = task.init(rng.key(0))
    assert task.features(params, batch().x).shape == (6, 6)


def test_a_name_that_only_begins_like_the_head_is_body():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc2, self.fc = nn.Linear(4, 4), nn.Linear(4, CLASSES)

        def forward(self, x):
            return self.fc(self.fc2(x))

    task = Task(Two, "fc", CLASSES)
    assert set(task.head_names) == {"fc.weight", "fc.bias"}
    assert set(task.body_names) == {"fc2.weight", "fc2.bias"}


def test_logits_are_the_head_on_the_features():
    for task in (deep(), Task(Deep, "classifier", CLASSES, dtype=torch.float64)):
        params, x = task.init(rng.key(1)), batch().x
        features = task.features(params, x)
        assert torch.equal(task.classify(params, features), task.logits(params, x))
        # Each reads its own part only.
        assert torch.equal(task.features(task.body(params), x), features)
        assert torch.equal(task.classify(task.head(params), features), task.logits(params, x))
        other = task.init(rng.key(2))
        mixed = task.body(params) | task.head(other)
        assert torch.equal(task.logits(mixed, x), task.classify(other, features))
        assert not torch.equal(task.logits(mixed, x), task.logits(params, x))


def test_functions_can_be_mapped_over_parameters():
    task, x = deep(), batch().x
    many = [task.init(rng.key(seed)) for seed in range(3)]
    stacked = {n: torch.stack([p[n] for p in many]) for n in many[0]}
    mapped = vmap(task.features, in_dims=(0, None))(stacked, x)
    for i, params in enumerate(many):
        assert (mapped[i] - task.features(params, x)).abs().max() < 1e-12


# --- what is refused ------------------------------------------------------------------------------------------


class Skips(nn.Module):
    """The named layer is followed by another, or passed by."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        if self.kind == "scaled":
            return 2 * self.b(self.a(x))
        if self.kind == "residual":
            return self.b(self.a(x)) + x[:, :CLASSES]
        return self.b(self.a(x))


@pytest.mark.parametrize(("kind", "head"), [("scaled", "b"), ("residual", "b"), ("plain", "a")])
def test_a_layer_that_is_not_last_is_refused(kind, head):
    task = Task(lambda: Skips(kind), head, CLASSES, dtype=torch.float64)
    with pytest.raises(UserError, match=f"not its head '{head}' applied to features"):
        task.check(batch().x)
    Task(lambda: Skips("plain"), "b", CLASSES, dtype=torch.float64).check(batch().x)


def test_outputs_of_another_shape_are_refused():
    with pytest.raises(UserError, match=r"shape \(6, 3\) for 6 examples, but the data has 7 classes"):
        Task(Deep, "classifier.1", 7, dtype=torch.float64).check(batch().x)


def test_tied_weights_are_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.fc = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)
            self.b.weight = self.a.weight

    with pytest.raises(UserError, match="ties parameters between layers"):
        Task(Tied, "fc", CLASSES)
