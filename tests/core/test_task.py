"""A model as functions: losses, initial weights, and the split by module."""

import copy
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch import nn
from torch.func import grad, vmap

from bespoke.core import rng
from bespoke.core.data import Batch
from bespoke.core.objective import CLASSIFICATION, REGRESSION, cross_entropy, masked_mean
from bespoke.core.task import Task
from bespoke.errors import UserError
from bespoke.models.layers import Dropout

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


class Two(nn.Module):
    """Two inputs."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x, mask, scale=1.0):
        return self.fc(x * mask) * scale


class Gives(nn.Module):
    """Something around the outputs."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap, self.fc = wrap, nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.wrap(self.fc(x))


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: Gives(lambda y: (y, y)),
            r"the model returns a tuple: make its forward return one tensor .*\(examples, 3\)",
        ),
        (lambda: Gives(lambda y: {"logits": y}), "the model returns a dict: make its forward return one tensor"),
        (Two, r"forward\(x, mask, scale=1.0\) needs more than one batch of examples: wrap it in a module"),
        (lambda: nn.Sequential(OrderedDict(a=nn.LazyLinear(4), fc=nn.Linear(4, CLASSES))), "a.weight is lazy"),
    ],
)
def test_models_of_another_form_are_refused_in_one_sentence(build, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        Task(build, "fc", CLASSES, dtype=torch.float64).check(batch().x)
    assert "\n" not in str(caught.value)


def test_a_lazy_layer_that_was_called_is_a_plain_one():
    model = nn.Sequential(OrderedDict(a=nn.LazyLinear(4), fc=nn.Linear(4, CLASSES))).double()
    model(batch().x)
    Task(lambda: copy.deepcopy(model), "fc", CLASSES, dtype=torch.float64).check(batch().x)


def test_whole_numbers_where_floats_are_wanted_are_named():
    with pytest.raises(UserError, match="they are int64: use float32 unless the model embeds tokens"):
        deep().check(batch().x.long())


# --- layers that draw -----------------------------------------------------------------------------------------


class Wet(nn.Module):
    """Dropout in the body, between, and inside the head; one layer is used twice."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(6, 5), Dropout(0.4), nn.Linear(5, CLASSES))
        self.body, self.first, self.twice = nn.Linear(4, 6), Dropout(0.5), Dropout(0.5)

    def forward(self, x):
        return self.head(self.twice(self.twice(self.first(torch.tanh(self.body(x))))))


def test_features_and_head_draw_as_the_whole_model_does():
    task = Task(Wet, "head", CLASSES, dtype=torch.float64)
    params, b = task.init(rng.key(0)), batch()
    whole = task.logits(params, b.x, b.key)
    z = task.features(params, b.x, b.key)
    assert torch.equal(task.classify(params, z, b.key), whole)
    assert torch.equal(task.loss(params, b), cross_entropy(whole, b))
    assert not torch.equal(task.classify(params, z), whole)  # the head draws too
    assert not torch.equal(task.logits(params, b.x, rng.key(1)), whole)
    # Without a key nothing is drawn, also after a call with one.
    dry = task.logits(params, b.x)
    assert torch.equal(dry, task.logits(params, b.x))
    assert not torch.equal(dry, whole)
    assert torch.equal(task.classify(params, task.features(params, b.x)), dry)


def test_layers_that_draw_do_so_by_the_key_and_their_number():
    task = Task(Wet, "head", CLASSES, dtype=torch.float64)
    params, b = task.init(rng.key(0)), batch()
    z = torch.tanh(b.x @ params["body.weight"].T + params["body.bias"])
    keys = [rng.fold_in(b.key, number) for number in (1, 2)]  # number 0 is the head's
    for key in (keys[0], keys[1], rng.fold_in(keys[1], 1)):  # the second call of one layer draws anew
        z = z * (rng.uniform(key, z.shape, z.dtype) >= 0.5) / 0.5
    assert torch.equal(task.features(params, b.x, b.key), z)


def test_keys_can_be_mapped_over():
    task = Task(Wet, "head", CLASSES, dtype=torch.float64)
    params, b = task.init(rng.key(0)), batch()
    keys = torch.stack([rng.key(seed) for seed in range(3)])
    mapped = vmap(lambda key: task.logits(params, b.x, key))(keys)
    for i, key in enumerate(keys):
        assert (mapped[i] - task.logits(params, b.x, key)).abs().max() < 1e-12
    assert not torch.equal(mapped[0], mapped[1])


def test_an_error_inside_the_model_leaves_no_key_behind():
    task = Task(Wet, "head", CLASSES, dtype=torch.float64)
    params, b = task.init(rng.key(0)), batch()
    before = task.logits(params, b.x)
    with pytest.raises(RuntimeError):
        task.logits(params, b.x[:, :2], b.key)
    assert torch.equal(task.logits(params, b.x), before)


# --- constants ------------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """A frozen layer and a buffer, both drawn at random, before what trains."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(4))
        self.register_buffer("steps", torch.tensor(3))
        self.fixed = nn.Linear(4, 6).requires_grad_(False)
        self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, CLASSES)
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        return self.fc(self.norm(self.fixed(x * self.scale)))


def test_frozen_parameters_and_buffers_are_in_no_tree():
    task = Task(Frozen, "fc", CLASSES, dtype=torch.float64, key=rng.key(3))
    task.check(batch().x)
    params = task.init(rng.key(3))
    assert list(params) == ["norm.weight", "fc.weight", "fc.bias"]
    assert list(task.body(params)) == list(task.norm(params)) == ["norm.weight"]
    assert task.constants().keys() == {"fixed.weight", "fixed.bias", "norm.bias", "scale", "steps"}
    assert task.constants()["steps"].dtype == torch.int64
    with pytest.raises(KeyError, match="3 tensors, not 4"):
        task.logits(params | {"fixed.bias": torch.zeros(6)}, batch().x)


def test_constants_are_those_of_the_seeded_module():
    task = Task(Frozen, "fc", CLASSES, dtype=torch.float64, key=rng.key(3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.bits(rng.key(3), torch.tensor(0))))
        want = Frozen().double()
    assert all(torch.equal(value, want.state_dict()[name]) for name, value in task.constants().items())
    params, x = task.init(rng.key(3)), batch().x
    assert torch.equal(task.logits(params, x), want(x))
    assert torch.equal(task.classify(params, task.features(params, x)), want(x))
    torch.manual_seed(9)  # another process
    other = Task(Frozen, "fc", CLASSES, dtype=torch.float64, key=rng.key(3))
    assert all(torch.equal(value, other.constants()[name]) for name, value in task.constants().items())


def test_constants_that_another_key_would_draw_are_noticed():
    task = Task(Frozen, "fc", CLASSES, key=rng.key(3))
    with pytest.raises(ValueError, match="is a constant of the model, drawn at random: give Task"):
        task.init(rng.key(4))
    model = Frozen()
    given = Task(lambda: copy.deepcopy(model), "fc", CLASSES)  # whose constants are not drawn
    assert torch.equal(given.init(rng.key(4))["fc.weight"], given.init(rng.key(5))["fc.weight"])


def test_frozen_parameters_get_no_gradient_and_pass_one_on():
    task = Task(Frozen, "fc", CLASSES, dtype=torch.float64, key=rng.key(3))
    params, before = task.init(rng.key(3)), {n: t.clone() for n, t in task.constants().items()}
    slope = grad(task.loss)(params, batch())
    assert slope.keys() == params.keys() and slope["norm.weight"].abs().max() > 0
    assert all(torch.equal(value, before[name]) for name, value in task.constants().items())


class Counts(nn.Module):
    """A buffer that changes in forward, in place or by assignment."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place, self.fc = in_place, nn.Linear(4, CLASSES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return self.fc(x)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_changes_in_forward_is_refused(in_place):
    task = Task(lambda: Counts(in_place), "fc", CLASSES, dtype=torch.float64)
    with pytest.raises(UserError, match="the buffer 'calls' changes when the model is called"):
        task.check(batch().x)


def test_a_frozen_body_leaves_the_head_and_a_frozen_head_is_refused():
    def build(part):
        model = Skips("plain")
        getattr(model, part).requires_grad_(False)
        return model

    task = Task(lambda: build("a"), "b", CLASSES, dtype=torch.float64, key=rng.key(0))
    params = task.init(rng.key(0))
    assert task.body(params) == {} and set(params) == set(task.head_names) == {"b.weight", "b.bias"}
    with pytest.raises(UserError, match="the head 'b' has frozen parameters"):
        Task(lambda: build("b"), "b", CLASSES)


# --- objectives -----------------------------------------------------------------------------------------------


def test_the_loss_is_the_objectives():
    task = Task(Deep, "classifier.1", CLASSES, dtype=torch.float64, objective=REGRESSION)
    params, b = task.init(rng.key(0)), batch(real=4)
    y = rng.normal(rng.key(5), (6, CLASSES), torch.float64)
    want = (task.logits(params, b.x)[:4] - y[:4]).square().mean().item()
    assert task.loss(params, b._replace(y=y)).item() == pytest.approx(want, abs=1e-12)
    assert task.num_outputs == CLASSES
    with pytest.raises(UserError, match="the objective 'regression' has no classes"):
        _ = task.num_classes
    assert deep().num_classes == CLASSES


def test_outputs_that_do_not_fit_the_objective_are_refused():
    task = Task(Deep, "classifier.1", 1, dtype=torch.float64, objective=REGRESSION)
    with pytest.raises(UserError, match=r"but the objective 'regression' needs 1 per example: make it return \(6, 1\)"):
        task.check(batch().x)
    task = Task(Deep, "classifier.1", CLASSES, dtype=torch.float64, objective=CLASSIFICATION.measured_by(["mse"]))
    with pytest.raises(UserError, match="the metric 'mse' cannot be computed"):
        task.check(batch().x, batch().y)


def test_one_seed_covers_every_generator_of_a_factory():
    def build():
        layer = nn.Linear(2, 2)
        layer.weight.data.fill_(np.random.rand() + random.random())
        return nn.Sequential(nn.Linear(2, 2), layer)

    before = np.random.get_state()[1].tolist(), random.getstate()
    made = [Task(build, "1", 2, key=rng.key(seed)).init(rng.key(seed))["1.weight"] for seed in (1, 1, 2)]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
