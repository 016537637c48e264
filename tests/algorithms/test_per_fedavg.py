"""Per-FedAvg: its meta gradients on a quadratic, where a central difference has no error."""

import numpy as np
import pytest
import toy
from golden_runs import SWITCHED, one_round
from toy import BACKENDS, CLASSES, POPULATION, gap, same_bits

from bespoke.algorithms.fedavg import FedAvg
from bespoke.algorithms.per_fedavg import PerFedAvg
from bespoke.contract import CHECKS, Subject
from bespoke.core import tree
from bespoke.core.settings import Training

pytestmark = pytest.mark.xdist_group("per_fedavg")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", ["relative", "absolute"])
def test_per_fedavgs_hessian_free_step_is_exact_on_a_quadratic(backend, scale):
    """There a central difference has no error, and the meta gradient a closed form."""
    h, alpha, beta, eye = toy.Quadratic.curvature.numpy(), 0.4, 0.3, np.eye(CLASSES)
    received, steps = {n: v + 0.5 for n, v in toy.start().items()}, {}
    w, first = received["head.bias"].numpy(), toy.start()["head.bias"].numpy()
    for variant in ("first-order", "hessian-free", "exact"):
        made = PerFedAvg(variant=variant, alpha=alpha, delta_scale=scale)
        training = Training(epochs=2 if variant == "first-order" else 3, batch=64, lr=beta)  # one step's batches
        trained, _, fed = one_round(made, training, backend, {"model": received}, task=toy.task(toy.Quadratic))
        up = steps[variant] = trained.uploads.tree["model"]["head.bias"].numpy()
        for k in range(POPULATION):
            v = h @ ((eye - alpha * h) @ w + alpha * h @ toy.centre(k) - toy.centre(k))
            meta = v if variant == "first-order" else (eye - alpha * h) @ v
            assert np.abs(up[k] - (w - beta * meta)).max() < 1e-12
        personal = fed.clients.personal(1, range(POPULATION), {"model": toy.start()}, {})
        for k in range(POPULATION):  # before prediction: one step of rate alpha on all rows
            step = first - alpha * h @ (first - toy.centre(k))
            assert np.abs(personal[k]["personal"]["head.bias"].numpy() - step).max() < 1e-12
            assert same_bits(personal[k]["global"], toy.start())
    assert np.abs(steps["exact"] - steps["first-order"]).max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_per_fedavg_without_an_inner_step_is_fedavg_on_its_second_batches(backend):
    settings = Training(steps=3, batch=64, lr=0.3, weight_decay=0.05)  # all rows: all batches alike
    plain, _, _ = one_round(FedAvg(), settings, backend)
    for variant in ("first-order", "hessian-free", "exact"):
        meta, _, _ = one_round(PerFedAvg(variant=variant, alpha=0.0), settings, backend)
        assert gap(meta.uploads.tree, plain.uploads.tree) < 1e-14


class Flat(toy.Quadratic):
    """A loss without slope."""

    def loss(self, params, batch):
        return 0.0 * super().loss(params, batch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_hessian_free_product_is_sound_where_the_gradient_vanishes(backend):
    """At the minimum of every client's loss v is 0, and so is the step."""
    for scale in ("relative", "absolute"):
        made = PerFedAvg(variant="hessian-free", delta_scale=scale)
        trained, _, _ = one_round(made, Training(lr=0.1), backend, task=toy.task(Flat))
        for k in range(POPULATION):
            assert same_bits(tree.map(lambda leaf, k=k: leaf[k], trained.uploads.tree["model"]), toy.start())


@pytest.mark.parametrize(
    "made", [PerFedAvg(variant="hessian-free", finetune_epochs=2), PerFedAvg(variant="exact")], ids=lambda m: m.variant
)
@pytest.mark.parametrize("check", SWITCHED)
def test_the_contract_holds_for_the_variants_too(made, check):
    CHECKS[check](Subject(made))
