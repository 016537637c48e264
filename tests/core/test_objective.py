"""Objectives: losses, predictions, and metrics that add up, held against scikit-learn."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch.func import vmap
from torch.nn import functional as F

from bespoke.core import objective as objectives
from bespoke.core import rng
from bespoke.core.data import Batch
from bespoke.core.objective import (
    CLASSIFICATION,
    MEAN_ESTIMATION,
    METRICS,
    MULTILABEL,
    OBJECTIVES,
    REGRESSION,
    Metric,
    Objective,
    cross_entropies,
)
from bespoke.errors import UserError

SIZES = (41, 23, 8, 2, 1)  # rows of the clients that are mapped together


def value(pair):
    """The value of a sum and a weight."""
    total, weight = (np.atleast_1d(part.numpy()) for part in pair)
    return (total[weight > 0] / weight[weight > 0]).mean()


def case(kind, outputs, seed=0, dtype=torch.float32):
    """Outputs and targets of several clients, (K, n, ...), and their masks; padding is NaN, or a class."""
    n = max(SIZES)
    output = rng.normal(rng.key(seed), (len(SIZES), n, outputs), dtype)
    draw = rng.uniform(rng.key(seed + 1), (len(SIZES), n, outputs), dtype)
    if kind == "classes":
        y = (draw[..., 0] * outputs).long()
        output = output + 1.5 * F.one_hot(y, outputs)
    elif kind == "labels":
        y = (draw < 0.4).to(dtype)
        output = output + y
    else:
        y = 3.0 + 2.0 * output + draw
        y, output = (y[..., 0] if outputs == 1 else y), 2.0 * output + 3.5
    mask = (torch.arange(n) < torch.tensor(SIZES)[:, None]).to(dtype)
    output[mask == 0] = torch.nan
    if y.is_floating_point():
        y[mask == 0] = torch.nan
    return output, y, mask


def wanted(name, output, y):
    """What scikit-learn says of one client's real rows."""
    output, y = output.double().numpy(), y.numpy()
    labels = y.ndim == 2
    said = (output > 0).astype(int) if labels else output.argmax(axis=1)
    classes = range(output.shape[1])
    if name == "auroc":
        if not labels and output.shape[1] == 2:
            return sk.roc_auc_score(y, output[:, 1] - output[:, 0])
        score = output if labels else F.softmax(torch.from_numpy(output), dim=1).numpy()
        truth = y if labels else np.eye(output.shape[1])[y]
        mixed = [c for c in classes if 0 < truth[:, c].sum() < len(y)]
        return np.mean([sk.roc_auc_score(truth[:, c], score[:, c]) for c in mixed])
    if name == "balanced_accuracy":
        return sk.balanced_accuracy_score(y, said)
    if name == "macro_f1":
        present = [c for c in classes if y[:, c].any() or said[:, c].any()] if labels else None
        return sk.f1_score(y, said, average="macro", labels=present)
    if name == "accuracy":
        return sk.accuracy_score(y, said)
    if name == "subset_accuracy":
        return sk.accuracy_score(y, said)
    if name == "hamming":
        return sk.hamming_loss(y, said)
    if name == "r2":
        return sk.r2_score(y, output)
    if name == "mse":
        return sk.mean_squared_error(y, output)
    return sk.mean_absolute_error(y, output)


AGAINST_SKLEARN = [
    *((name, "classes", c) for name in ("accuracy", "balanced_accuracy", "macro_f1", "auroc") for c in (2, 3, 6)),
    *((name, "labels", 4) for name in ("macro_f1", "auroc", "subset_accuracy", "hamming")),
    *((name, "numbers", t) for name in ("r2", "mse", "mae") for t in (1, 3)),
]


@pytest.mark.parametrize(("name", "kind", "outputs"), AGAINST_SKLEARN)
def test_a_metric_is_scikit_learns(name, kind, outputs):
    output, y, mask = case(kind, outputs)
    mapped = vmap(METRICS[name].fn)(output, y, mask)
    for client, n in enumerate(SIZES[:3]):
        alone = METRICS[name].fn(output[client, :n], y[client, :n], mask[client, :n])
        want = wanted(name, output[client, :n], y[client, :n])
        assert value(alone) == pytest.approx(want, rel=2e-6)
        assert value([part[client] for part in mapped]) == pytest.approx(want, rel=2e-6)


@pytest.mark.parametrize(("name", "kind", "outputs"), [*AGAINST_SKLEARN, ("confusion", "classes", 3)])
def test_padding_never_counts_whatever_stands_in_it(name, kind, outputs):
    output, y, mask = case(kind, outputs)
    mapped = vmap(METRICS[name].fn)(output, y, mask)
    for client, n in enumerate(SIZES):
        short = METRICS[name].fn(output[client, :n], y[client, :n], mask[client, :n])
        padded = METRICS[name].fn(output[client], y[client], mask[client])
        for part in range(2):
            assert padded[part].shape == short[part].shape == mapped[part][client].shape
            assert padded[part].dim() <= 1 and torch.isfinite(padded[part]).all()
            assert torch.allclose(padded[part], short[part], rtol=1e-6)
            assert torch.allclose(padded[part], mapped[part][client], rtol=1e-6)


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.additive])
def test_an_additive_metric_is_the_sum_of_its_parts(name):
    kind = next((k for n, k, _ in AGAINST_SKLEARN if n == name), "classes")
    output, y, mask = (t[0] for t in case(kind, 3, dtype=torch.float64))
    whole = METRICS[name].fn(output, y, mask)
    parts = [METRICS[name].fn(output[a : a + 7], y[a : a + 7], mask[a : a + 7]) for a in range(0, len(y), 7)]
    for i in range(2):
        assert torch.allclose(torch.stack([part[i] for part in parts]).sum(dim=0), whole[i], rtol=1e-12)


def test_the_confusion_matrix_has_a_row_for_each_class():
    output, y, mask = (t[0] for t in case("classes", 4))
    total, weight = METRICS["confusion"].fn(output, y, mask)
    n = SIZES[0]
    counts = sk.confusion_matrix(y[:n], output[:n].argmax(dim=1), labels=range(4))
    assert np.array_equal(total.reshape(4, 4).numpy(), counts)
    assert np.array_equal(weight.reshape(4, 4).numpy(), np.repeat(counts.sum(axis=1)[:, None], 4, axis=1))


def test_clients_are_pooled_by_adding_sums_and_weights():
    output, y, mask = case("numbers", 1)
    explained, total = (part.sum() for part in vmap(METRICS["r2"].fn)(output, y, mask))
    residual, spread = 0.0, 0.0
    for client, n in enumerate(SIZES):
        truth = y[client, :n].double().numpy()
        residual += ((output[client, :n, 0].double().numpy() - truth) ** 2).sum()
        spread += ((truth - truth.mean()) ** 2).sum()  # around the client's own mean
    assert explained.item() == pytest.approx(spread - residual, rel=1e-9)
    assert total.item() == pytest.approx(spread, rel=1e-9)


def test_ties_count_half_in_auroc_and_a_client_with_one_class_has_no_pairs():
    score = torch.tensor([1.0, 1.0, 2.0, 0.0, 1.0])
    output, y = torch.stack([torch.zeros(5), score], dim=1), torch.tensor([1, 0, 0, 0, 1])
    total, weight = METRICS["auroc"].fn(output, y, torch.ones(5))
    assert (total.item(), weight.item()) == (3.0, 6.0)
    assert total / weight == sk.roc_auc_score(y, score)
    assert [t.item() for t in METRICS["auroc"].fn(output, torch.ones_like(y), torch.ones(5))] == [0.0, 0.0]


def test_auroc_tells_apart_what_is_nearly_certain():
    output = torch.tensor([[0.0, 80.0, 0.0], [0.0, 60.0, 0.0], [0.0, 40.0, 0.0]])
    assert F.softmax(output, dim=1)[:, 1].unique().numel() == 1  # all 1 in float32
    total, weight = METRICS["auroc"].fn(output, torch.tensor([1, 0, 0]), torch.ones(3))
    assert (total[1].item(), weight[1].item()) == (2.0, 2.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_whose_outputs_are_not_finite_is_wrong(bad):
    output, y = torch.tensor([[3.0, bad], [0.0, 2.0], [4.0, 0.0]]), torch.tensor([0, 1, 0])
    mask = torch.ones(3)
    assert METRICS["accuracy"].fn(output, y, mask)[0] == 2.0
    assert METRICS["balanced_accuracy"].fn(output, y, mask)[0].tolist() == [1.0, 1.0]
    assert METRICS["confusion"].fn(output, y, mask)[0].tolist() == [1.0, 0.0, 0.0, 1.0]
    labels = F.one_hot(y, 2).float()
    assert METRICS["subset_accuracy"].fn(output - 1.0, labels, mask)[0] == 2.0
    assert METRICS["hamming"].fn(output - 1.0, labels, mask)[0] == 1.0
    worst, pairs = METRICS["auroc"].fn(torch.tensor([[0.0, 9.0], [0.0, torch.nan]]), torch.tensor([0, 1]), mask[:2])
    assert (worst.item(), pairs.item()) == (0.0, 1.0)


def detected(score, is_there):
    """False accepts and false rejects of raw scores at each threshold, row by row."""
    thresholds = [-30 + i / 4 for i in range(241)]
    accepts = [sum(s > t and not y for s, y in zip(score, is_there, strict=True)) for t in thresholds]
    rejects = [sum(s <= t and y for s, y in zip(score, is_there, strict=True)) for t in thresholds]
    return accepts + rejects, [sum(not y for y in is_there)] * 241 + [sum(is_there)] * 241


@pytest.mark.parametrize(("kind", "outputs", "label"), [("classes", 2, 1), ("classes", 5, 3), ("labels", 4, 2)])
def test_a_detector_is_counted_at_every_threshold(kind, outputs, label):
    output, y, mask = case(kind, outputs, dtype=torch.float64)
    metric = objectives.detection(label)
    assert metric.additive and not metric.higher
    mapped = vmap(metric.fn)(output, y, mask)
    for client, n in enumerate(SIZES):
        own, truth = output[client, :n], y[client, :n]
        if kind == "labels":
            score, is_there = own[:, label], truth[:, label] > 0.5
        else:
            p = own.softmax(dim=1)[:, label]
            score, is_there = torch.log(p / (1 - p)), truth == label
        want = detected(score.tolist(), is_there.tolist())
        alone, padded = metric.fn(own, truth, mask[client, :n]), metric.fn(output[client], y[client], mask[client])
        for part in range(2):
            assert alone[part].tolist() == padded[part].tolist() == mapped[part][client].tolist() == want[part]
    halves = [metric.fn(output[0, a], y[0, a], mask[0, a]) for a in (slice(0, 20), slice(20, None))]
    assert torch.equal(halves[0][0] + halves[1][0], mapped[0][0])


def test_a_detector_is_wrong_about_rows_that_are_not_finite_and_splits_at_even_odds():
    output = torch.tensor([[0.0, torch.nan], [torch.inf, 0.0], [0.0, 80.0], [80.0, 0.0], [1.0, 1.0]])
    y = torch.tensor([0, 1, 1, 0, 1])
    total, weight = objectives.detection(1).fn(output, y, torch.ones(5))
    accepts, rejects = total.reshape(2, 241).tolist()
    assert accepts == [1.0] * 241  # the first row, at every threshold
    assert rejects == [1.0] * 120 + [2.0] * 121  # the second row, and the last one from even odds on
    assert weight.tolist() == [2.0] * 241 + [3.0] * 241


def test_a_detector_is_named_by_its_class():
    found = CLASSIFICATION.measured_by(("accuracy", "detection_2"))
    assert list(found.metrics) == ["accuracy", "detection_2", "loss"]
    output, y = torch.eye(3) * 5.0, torch.tensor([0, 1, 2])
    found.check(output, y)
    assert found.metrics["detection_2"].fn(output, y, torch.ones(3))[0][120] == 0.0
    with pytest.raises(UserError, match=r"the metric 'detection_3' cannot be computed .* index 3 is out of bounds"):
        CLASSIFICATION.measured_by(("detection_3",)).check(output, y)
    for wrong in ("detection", "detection_", "detection_x", "detection_-1"):
        with pytest.raises(UserError, match=f"there is no metric '{wrong}'.*, detection_CLASS$"):
            CLASSIFICATION.measured_by((wrong,))
    mine = Metric(lambda output, y, mask: (mask.sum(), mask.sum()))
    assert (
        replace(CLASSIFICATION, metrics={"detection_1": mine}).measured_by(("detection_1",)).metrics["detection_1"]
        is mine
    )


def test_accuracy_and_loss_are_the_sums_they_always_were():
    output, y, mask = (t[1] for t in case("classes", 5))
    right = (output.argmax(dim=-1) == y) & torch.isfinite(output).all(dim=-1)
    loss = -F.log_softmax(output, dim=-1).gather(-1, y[:, None])[:, 0]
    assert torch.equal(METRICS["accuracy"].fn(output, y, mask)[0], (right.to(mask.dtype) * mask).sum())
    summed = torch.where(mask > 0, loss, torch.zeros_like(loss)).sum()
    assert torch.equal(CLASSIFICATION.metrics["loss"].fn(output, y, mask)[0], summed)
    assert METRICS["accuracy"].fn(output, y, mask)[1] == SIZES[1]


# --- objectives -----------------------------------------------------------------------------------------------------


def batch(y, mask=None):
    rows = torch.arange(len(y))
    mask = torch.ones(len(y), dtype=torch.float64) if mask is None else mask
    return Batch(rows, y, mask, rows, torch.tensor(0), rng.key(0))


def test_the_shipped_objectives():
    assert list(OBJECTIVES) == ["classification", "regression", "multilabel", "mean_estimation"]
    assert [o.classes for o in OBJECTIVES.values()] == [True, False, False, False]
    for found in OBJECTIVES.values():
        assert "loss" in found.metrics and not found.metrics["loss"].higher and found.metrics["loss"].additive
    assert list(CLASSIFICATION.metrics) == ["accuracy", "loss"]
    assert [next(iter(o.metrics)) for o in OBJECTIVES.values()] == [
        "accuracy",
        "r2",
        "macro_f1",
        "squared_error",
    ]
    assert [METRICS[name].higher for name in ("accuracy", "auroc", "mse", "mae", "hamming")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_losses_are_torchs_own():
    output = rng.normal(rng.key(0), (6, 3), torch.float64)
    labels = (rng.uniform(rng.key(1), (6, 3), torch.float64) < 0.5).double()
    mask = (torch.arange(6) < 4).double()
    want = F.binary_cross_entropy_with_logits(output[:4], labels[:4])
    assert MULTILABEL.mean_loss(output, batch(labels, mask)).item() == pytest.approx(want.item(), abs=1e-12)
    for found, target in ((output, labels), (output[:, :1], labels[:, 0])):
        want = F.mse_loss(found[:4], target.reshape(found.shape)[:4])
        assert REGRESSION.mean_loss(found, batch(target, mask)).item() == pytest.approx(want.item(), abs=1e-12)
    normal = torch.distributions.MultivariateNormal(output[:4], torch.eye(3, dtype=torch.float64))
    want = -normal.log_prob(labels[:4]).mean() - 1.5 * math.log(2.0 * math.pi)
    assert MEAN_ESTIMATION.mean_loss(output, batch(labels, mask)).item() == pytest.approx(want.item(), abs=1e-12)
    want = F.cross_entropy(output[:4], torch.tensor([0, 1, 2, 0]))
    y = torch.tensor([0, 1, 2, 0, 2, 2])
    assert CLASSIFICATION.mean_loss(output, batch(y, mask)).item() == pytest.approx(want.item(), abs=1e-12)


def test_predictions_are_classes_numbers_or_labels():
    output = torch.tensor([[0.5, -1.0], [-2.0, 3.0]])
    assert CLASSIFICATION.predictions(output).tolist() == [0, 1]
    assert torch.equal(REGRESSION.predictions(output), output)
    assert REGRESSION.predictions(output[:, :1]).tolist() == [0.5, -2.0]
    assert MULTILABEL.predictions(output).tolist() == [[1, 0], [0, 1]]


def test_the_loss_metric_follows_the_objectives_own_losses():
    def doubled(output, y):
        return 2.0 * cross_entropies(output, y)

    output, y, mask = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    changed = replace(CLASSIFICATION, row_losses=doubled)
    assert list(changed.metrics) == ["accuracy", "loss"]
    assert changed.metrics["loss"].fn(output, y, mask)[0] == 2.0 * CLASSIFICATION.metrics["loss"].fn(output, y, mask)[0]


def test_metrics_are_chosen_by_name_or_given():
    assert CLASSIFICATION.measured_by(()) is CLASSIFICATION
    assert list(CLASSIFICATION.measured_by(("auroc", "accuracy")).metrics) == ["auroc", "accuracy", "loss"]
    assert list(CLASSIFICATION.measured_by(("loss", "auroc")).metrics) == ["loss", "auroc"]
    mine = Metric(lambda output, y, mask: (mask.sum(), mask.sum()))
    assert CLASSIFICATION.measured_by({"mine": mine}).metrics["mine"] is mine
    own = Objective("huber", lambda o, y: F.huber_loss(o[:, 0], y, reduction="none"), lambda o: o[:, 0])
    assert list(own.metrics) == ["loss"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: CLASSIFICATION.measured_by(("acuracy",)), r"no metric 'acuracy' \(did you mean 'accuracy'\?\)"),
        (lambda: OBJECTIVES.find("regresion", "here"), r"no objective 'regresion' \(did you mean 'regression'\?\)"),
        (
            lambda: CLASSIFICATION.measured_by(("r2",)).check(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)),
            r"the metric 'r2' cannot be computed from outputs of shape \(4, 3\) and targets of shape \(4,\)",
        ),
        (
            lambda: replace(REGRESSION, row_losses=lambda o, y: (o - y).square()).check(
                torch.ones(4, 2), torch.ones(4, 2)
            ),
            r"row losses of the objective 'regression' have shape \(4, 2\) for 4 rows",
        ),
        (
            lambda: REGRESSION.measured_by({"mine": Metric(lambda o, y, mask: (o, mask))}).check(
                torch.ones(4, 1), torch.ones(4)
            ),
            "the metric 'mine' must return a sum and a weight",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_labels_are_0_or_1():
    assert MULTILABEL.complaint(torch.tensor([[0.0, 1.0]])) == ""
    assert MULTILABEL.complaint(torch.tensor([[0.0, 0.5]])) == "labels are 0 or 1, not 0.5"


def test_the_number_of_outputs_follows_the_targets():
    y = torch.zeros(5, 3)
    assert (REGRESSION.num_outputs(y, 0), REGRESSION.num_outputs(y[:, 0], 0)) == (3, 1)
    assert CLASSIFICATION.num_outputs(y[:, 0].long(), 7) == 7
    assert replace(REGRESSION, outputs=2).num_outputs(y[:, 0], 0) == 2


def test_metrics_that_are_none_are_refused_in_one_sentence():
    objective = OBJECTIVES["regression"]
    with pytest.raises(UserError, match=r"the metric 'x' is made with Metric\(fn\)"):
        objective.measured_by({"x": lambda outputs, y, mask: (y.sum(), mask.sum())})
    with pytest.raises(UserError, match=r"metrics = 'r2' is one text: write a list of names"):
        objective.measured_by("r2")
