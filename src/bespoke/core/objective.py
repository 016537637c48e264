"""What a model is trained for: the loss of a row, the meaning of its outputs, and the metrics that score them.

An output is a row of numbers (O,). A target is a class number, a number, or a row of numbers (T,). Everything here is a
pure function of fixed shapes: it means the same for one client and under ``torch.func.vmap``, and padding, where the
mask is 0, never counts, whatever its values.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke.core.data import Batch
from bespoke.core.settings import knob
from bespoke.errors import UserError, reason, shown
from bespoke.registry import Registry, closest

# --- losses ---------------------------------------------------------------------------------------------------------


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``values`` (B,) over the real rows; 0 if there are none."""
    return (values * mask).sum() / mask.sum().clamp(min=1.0)


def cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy of each row: logits (B, C), labels (B,) -> (B,).

    Under vmap this takes fewer operations than torch's own; the gradient of an index instead of ``squeeze`` is a copy.
    """
    return -F.log_softmax(logits, dim=-1).gather(-1, y[:, None]).squeeze(-1)


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross entropy of logits (B, C) over the real rows of a batch, 0-d."""
    return masked_mean(cross_entropies(logits, batch.y), batch.mask)


def squared_errors(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the squared error of each row, a mean over its targets: outputs (B, T), y (B,) or (B, T) -> (B,)."""
    return (outputs - y.reshape(outputs.shape)).square().mean(dim=-1)


def squared_distances(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the squared distance of each row, a sum over its targets: outputs (B, T), y (B,) or (B, T) -> (B,)."""
    return (outputs - y.reshape(outputs.shape)).square().sum(dim=-1)


def gaussian_energies(outputs: Tensor, y: Tensor) -> Tensor:
    """Return minus the log density of each row's y (B,) or (B, T) under N(output, I), less its constant: (B,)."""
    return 0.5 * squared_distances(outputs, y)


def binary_cross_entropies(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean over labels of their binary cross entropy: logits (B, T), y (B, T) of 0 and 1 -> (B,)."""
    each = F.binary_cross_entropy_with_logits(outputs, y.reshape(outputs.shape), reduction="none")
    return each.mean(dim=-1)


# --- metrics --------------------------------------------------------------------------------------------------------

RowLosses = Callable[[Tensor, Tensor], Tensor]
Counts = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Metric:
    """A score of outputs against the targets of one client's rows, as a sum and a weight.

    ``fn(output (n, O), y (n, ...), mask (n,)) -> sum, weight`` returns two 0-d tensors, or two 1-d ones of one fixed
    length. The value is sum / weight, for vectors the mean of these ratios where the weight is positive. Clients are
    pooled by adding their sums and their weights.
    """

    fn: Callable[[Tensor, Tensor, Tensor], Counts]
    higher: bool = True  # larger is better
    additive: bool = False  # sums and weights of parts of the rows add up to those of all rows


def loss_metric(row_losses: RowLosses) -> Metric:
    """Return the mean loss as a metric."""

    def fn(output: Tensor, y: Tensor, mask: Tensor) -> Counts:
        # A product with the mask would turn a non-finite loss of padding into NaN.
        loss = row_losses(output, y)
        return torch.where(mask > 0, loss, torch.zeros_like(loss)).sum(), mask.sum()

    return Metric(fn, higher=False, additive=True)


def _finite(output: Tensor) -> Tensor:
    return torch.isfinite(output).all(dim=-1)


def _accuracy(output: Tensor, y: Tensor, mask: Tensor) -> Counts:
    right = (output.argmax(dim=-1) == y) & _finite(output)
    return (right.to(mask.dtype) * mask).sum(), mask.sum()


def _said_and_true(output: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predicted and the true classes or labels: float64 (n, C) of 0 and 1; padding is all 0.

    Non-finite outputs predict nothing.
    """
    classes = torch.arange(output.shape[-1], device=output.device)
    if y.is_floating_point():
        said, true = output > 0, y.reshape(output.shape) > 0.5
    else:
        said, true = output.argmax(dim=-1)[:, None] == classes, y[:, None] == classes
    real = mask[:, None] > 0
    return (said & real & _finite(output)[:, None]).double(), (true & real).double()


def _balanced_accuracy(output: Tensor, y: Tensor, mask: Tensor) -> Counts:
    said, true = _said_and_true(output, y, mask)
    return (said * true).sum(dim=0), true.sum(dim=0)


def _macro_f1(output: Tensor, y: Tensor, mask: Tensor) -> Counts:
    said, true = _said_and_true(output, y, mask)
    return 2.0 * (said * true).sum(dim=0), said.sum(dim=0) + true.sum(dim=0)


def _confusion(output: Tensor, y: Tensor, mask: Tensor) -> Counts:
    said, true = _said_and_true(output, y, mask)
    return (true.T @ said).flatten(), true.sum(dim=0).repeat_interleave(output.shape[-1])


def _auroc(output: Tensor, y: Tensor, mask: Tensor) -> Counts:
    _, true = _said_and_true(output, y, mask)
    if y.is_floating_point():
        return _concordant(output.T, true.T > 0, mask)
    if output.shape[-1] > 2:
        return _concordant(_log_odds(output).T, true.T > 0, mask)
    return _concordant(output[:, -1] - output[:, 0], true[:, -1] > 0, mask)


def _log_odds(logits: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of each class's probability (n, C), which unlike p separates near-certain rows."""
    logits = logits.double()
    largest = logits.argmax(dim=-1)[:, None] == torch.arange(logits.shape[-1], device=logits.device)
    below = torch.where(largest, -torch.inf, logits).logsumexp(dim=-1)[:, None]  # of all classes but the largest
    log_p = logits.log_softmax(dim=-1)
    return log_p - torch.where(largest, below - logits.logsumexp(dim=-1)[:, None], torch.log1p(-log_p.exp()))


def _concordant(score: Tensor, positive: Tensor, mask: Tensor) -> Counts:
    """Count the pairs of a positive and a negative row whose scores (..., n) are in order, and all pairs: (...).

    A tie counts half; a NaN score is on the wrong side of all others.
    """
    negative = ~positive & (mask > 0)
    score = torch.where(score.isnan(), torch.where(positive, -torch.inf, torch.inf), score).contiguous()
    below = torch.where(negative, score, torch.inf).sort(dim=-1).values.contiguous()
    count = negative.sum(dim=-1, keepdim=True)
    low, high = (torch.minimum(torch.searchsorted(below, score, right=side), count) for side in (False, True))
    rank = 0.5 * (low + high).double()
    return torch.where(positive, rank, 0.0).sum(dim=-1), (positive.sum(dim=-1) * count[..., 0]).double()


def _r2(output: Tensor, y: Tensor, mask: Tensor) -> Counts:
    real = mask[:, None] > 0
    target = torch.where(real, y.reshape(output.shape).double(), 0.0)
    error = torch.where(real, output.double() - target, 0.0)
    mean = target.sum(dim=0) / real.sum().clamp(min=1)
    total = torch.where(real, target - mean, 0.0).square().sum(dim=0)
    explained = total - error.square().sum(dim=0)
    return (explained[0], total[0]) if output.shape[-1] == 1 else (explained, total)


def _absolute_errors(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y.reshape(outputs.shape)).abs().mean(dim=-1)


def _subset_accuracy(output: Tensor, y: Tensor, mask: Tensor) -> Counts:
    said, true = _said_and_true(output, y, mask)
    right = (said == true).all(dim=-1) & _finite(output)
    return (right.to(mask.dtype) * mask).sum(), mask.sum()


def _hamming(output: Tensor, y: Tensor, mask: Tensor) -> Counts:
    said, true = _said_and_true(output, y, mask)
    wrong = torch.where(_finite(output), (said != true).double().mean(dim=-1), 1.0)
    return torch.where(mask > 0, wrong, 0.0).sum(), mask.sum()


_LARGEST, _THRESHOLDS = 30.0, 241  # of a detector: log-odds from -30 to 30 in steps of a quarter


def detection(label: int) -> Metric:
    """Return the errors of a detector of one class or label, by the threshold on its log-odds, as a metric.

    A row is accepted if the log-odds of ``label`` against the rest exceed the threshold. Of the 2 x 241 entries the
    first half are the false accepts (sum) of the negatives (weight) at each threshold, the second half the false
    rejects of the positives. A row with non-finite outputs is wrong at every threshold.
    """

    def fn(output: Tensor, y: Tensor, mask: Tensor) -> Counts:
        if y.is_floating_point():
            score, is_there = output[:, label].double(), y.reshape(output.shape)[:, label] > 0.5
        else:
            score, is_there = _log_odds(output)[:, label], y == label
        positive, negative = is_there & (mask > 0), ~is_there & (mask > 0)
        score = torch.where(_finite(output), score, torch.where(is_there, -torch.inf, torch.inf))
        thresholds = torch.linspace(-_LARGEST, _LARGEST, _THRESHOLDS, dtype=score.dtype, device=score.device)
        accepted = score[:, None] > thresholds
        wrong = [(accepted & negative[:, None]).sum(dim=0), (~accepted & positive[:, None]).sum(dim=0)]
        rows = [part.sum()[None].expand(_THRESHOLDS) for part in (negative, positive)]
        return torch.cat(wrong).double(), torch.cat(rows).double()

    return Metric(fn, higher=False, additive=True)


METRICS: dict[str, Metric] = {
    # classes
    "accuracy": Metric(_accuracy, additive=True),
    "confusion": Metric(_confusion, additive=True),  # (C * C,): of each class's rows, the share called each class
    # classes or labels
    "balanced_accuracy": Metric(_balanced_accuracy, additive=True),
    "macro_f1": Metric(_macro_f1, additive=True),
    "auroc": Metric(_auroc),  # one class or label against the rest
    # labels
    "subset_accuracy": Metric(_subset_accuracy, additive=True),
    "hamming": Metric(_hamming, higher=False, additive=True),
    # numbers
    "r2": Metric(_r2),  # within a client
    "mse": loss_metric(squared_errors),
    "mae": loss_metric(_absolute_errors),
}

# --- objectives -----------------------------------------------------------------------------------------------------


def _no_complaint(y: Tensor) -> str:
    return ""


@dataclass(frozen=True)
class Objective:
    """What a model is trained for and scored by.

    ``metrics`` are recorded; the first is the headline. ``loss``, the mean of ``row_losses``, is always among them.
    """

    name: str
    row_losses: RowLosses  # outputs (B, O), targets (B,) or (B, T) -> (B,)
    predictions: Callable[[Tensor], Tensor]  # outputs (B, O) -> what a user gets: (B,) or (B, T)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    classes: bool = False  # targets are class numbers (int64); otherwise floating
    outputs: int = 0  # O; 0 = one per class, or per target
    complaint: Callable[[Tensor], str] = _no_complaint  # all targets (N, ...) -> what is wrong with them, or ""

    def __post_init__(self) -> None:
        """Make ``loss`` the mean of this objective's own row losses."""
        metrics = {**self.metrics, "loss": loss_metric(self.row_losses)}
        object.__setattr__(self, "metrics", metrics)

    def mean_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of outputs (B, O) over the real rows of a batch, 0-d."""
        return masked_mean(self.row_losses(outputs, batch.y), batch.mask)

    def num_outputs(self, y: Tensor, num_classes: int) -> int:
        """Return O for a federation's targets y (N,) or (N, T)."""
        return self.outputs or (num_classes if self.classes else y[0].numel())

    def measured_by(self, metrics: Sequence[str] | Mapping[str, Metric]) -> "Objective":
        """Return the same objective with these metrics: names of :data:`METRICS`, or metrics by name.

        The name ``detection_3`` means :func:`detection` of class 3. Without any it keeps its own.
        """
        if not metrics:
            return self
        if isinstance(metrics, str):
            raise UserError(f"metrics = {metrics!r} is one text: write a list of names, [{metrics!r}]")
        if isinstance(metrics, Mapping):
            for name, metric in metrics.items():
                if not isinstance(metric, Metric):
                    raise UserError(f"the metric {name!r} is made with Metric(fn), not {metric!r}")
            return replace(self, metrics=metrics)
        detectors = {name: detection(int(name[10:])) for name in metrics if re.fullmatch(r"detection_[0-9]{1,9}", name)}
        known = detectors | METRICS | dict(self.metrics)
        for name in metrics:
            if name not in known:
                names = ", ".join((*known, "detection_CLASS"))
                raise UserError(f"there is no metric {shown(name)}{closest(name, known)}; known are {names}")
        return replace(self, metrics={name: known[name] for name in metrics})

    def check(self, outputs: Tensor, y: Tensor) -> None:
        """Refuse losses and metrics that do not fit outputs (B, O) and targets (B, ...)."""
        mask = torch.ones_like(outputs[:, 0])
        found = tuple(_called(self.row_losses, f"the row losses of the objective {self.name!r}", outputs, y).shape)
        if found != (len(y),):
            raise UserError(
                f"the row losses of the objective {self.name!r} have shape {found} for {len(y)} rows: "
                f"return one number per row, shape ({len(y)},)"
            )
        for name, metric in self.metrics.items():
            pair = _called(metric.fn, f"the metric {name!r}", outputs, y, mask)
            fits = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)
            if not fits or pair[0].shape != pair[1].shape or pair[0].dim() > 1:
                raise UserError(f"the metric {name!r} must return a sum and a weight, both 0-d or both of one length")


def _called(fn: Callable[..., Any], what: str, outputs: Tensor, y: Tensor, *more: Tensor) -> Any:
    try:
        return fn(outputs, y, *more)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise UserError(
            f"{what} cannot be computed from outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(y.shape)} and type {str(y.dtype).removeprefix('torch.')}: {reason(error)}"
        ) from error


def _labels_complaint(y: Tensor) -> str:
    found = y[(y != 0) & (y != 1)]
    return f"labels are 0 or 1, not {found[0].item():g}" if len(found) else ""


def _numbers(outputs: Tensor) -> Tensor:
    return outputs[:, 0] if outputs.shape[-1] == 1 else outputs


def _measured(*names: str) -> dict[str, Metric]:
    return {name: METRICS[name] for name in names}


CLASSIFICATION = Objective(
    "classification",
    cross_entropies,
    lambda outputs: outputs.argmax(dim=-1),
    _measured("accuracy"),
    classes=True,
)
REGRESSION = Objective("regression", squared_errors, _numbers, _measured("r2", "mae"))
MEAN_ESTIMATION = Objective(  # of rows from N(mean, I): outputs are the estimate, a test row's target is the true mean
    "mean_estimation", gaussian_energies, _numbers, {"squared_error": loss_metric(squared_distances)}
)
MULTILABEL = Objective(
    "multilabel",
    binary_cross_entropies,
    lambda outputs: (outputs > 0).long(),
    _measured("macro_f1", "subset_accuracy"),
    complaint=_labels_complaint,
)


def _objective(thing: Any, where: str) -> Objective:
    if not isinstance(thing, Objective):
        raise UserError(f"{where}: an objective is made with Objective(...), not {thing!r}")
    return thing


OBJECTIVES: Registry[Objective] = Registry(
    "objective",
    {o.name: o for o in (CLASSIFICATION, REGRESSION, MULTILABEL, MEAN_ESTIMATION)},
    _objective,
    "bespoke.objectives",
)


def register_objective(name: str, objective: Objective) -> None:
    """Add your own objective under a name for ``[objective]``; registering a name of yours again replaces it."""
    OBJECTIVES.register(name, objective, "register_objective")
    OBJECTIVES[name] = replace(OBJECTIVES[name], name=name)


@dataclass(frozen=True)
class ObjectiveSettings:
    """The ``[objective]`` table: what the model is trained for, and the metrics to record."""

    name: str = knob(
        CLASSIFICATION.name, "what the model is trained for: classification, regression, multilabel or mean_estimation"
    )
    metrics: tuple[str, ...] = knob((), "metrics to record besides the loss, headline first; empty = the objective's")
