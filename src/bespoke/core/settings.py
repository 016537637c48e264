"""Fields that check themselves, and the training settings that clients and server share."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bespoke.errors import UserError, shown

# Bounds of every number: those of a 32-bit counter, and of a float32, in which models are trained.
_MOST_WHOLE, _LARGEST, _SMALLEST = 2**31 - 1, 3.4e38, 1.2e-38
_Rules = Mapping[str, Any]


def knob(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[Any, ...] = (),
    of: str | None = None,
) -> Any:
    """Make a dataclass field with a sentence on its meaning and the values it takes.

    ``low`` and ``high`` are inclusive bounds, ``above`` an exclusive lower one. Without them a whole number must fit
    into 32 bits, and any other number into a float32. ``of`` names the setting whose value decides whether this
    one means anything.
    """
    rules = {"doc": doc, "low": low, "high": high, "above": above, "choices": choices, "of": of}
    return dataclasses.field(default=default, metadata={k: v for k, v in rules.items() if v not in (None, ())})


def allowed(field: "dataclasses.Field[Any]") -> str:
    """Return the allowed values of a knob in words, or an empty string."""
    return _in_words(field.metadata)


def _in_words(rules: _Rules) -> str:
    if "choices" in rules:
        return "one of " + ", ".join(repr(c) for c in rules["choices"])
    parts = [
        f"{word} {rules[name]:,}" if isinstance(rules[name], int) else f"{word} {rules[name]:g}"
        for name, word in (("above", "greater than"), ("low", "at least"), ("high", "at most"))
        if name in rules
    ]
    return " and ".join(parts)


def problem(field: "dataclasses.Field[Any]", value: Any) -> str:
    """Return what is wrong with a knob's value (of the right type), or an empty string."""
    rules = field.metadata
    if "choices" in rules and value not in rules["choices"]:
        return f"must be {allowed(field)}, not {shown(value)}"
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        most = _MOST_WHOLE if isinstance(number, int) and not isinstance(field.default, float) else _LARGEST
        general = {} if "above" in rules else {"low": -most}
        for bounds in (rules, {**general, "high": most, **rules}):
            if not _within(number, bounds):
                return f"must be {_in_words(bounds)}, not {shown(number)}"
        if 0 < abs(number) < _SMALLEST:
            return f"must be {'' if 'above' in rules else '0 or '}at least {_SMALLEST:g} in size, not {shown(number)}"
    return ""


def _within(number: float, rules: _Rules) -> bool:
    """Return whether a number keeps its bounds; NaN keeps none."""
    return (
        ("low" not in rules or number >= rules["low"])
        and ("high" not in rules or number <= rules["high"])
        and ("above" not in rules or number > rules["above"])
    )


def check(settings: Any, where: str) -> None:
    """Refuse the first knob of a dataclass that is out of range, in one sentence."""
    for field in dataclasses.fields(settings):
        wrong = problem(field, getattr(settings, field.name))
        if wrong:
            raise UserError(f"{where}: {field.name} {wrong}")


def refuse_given(settings: Any, table: str, keys: Collection[str], to: str, takes: Collection[str]) -> None:
    """Refuse the first of ``keys`` that does not have its default value, since it means nothing ``to`` a choice.

    ``takes`` are the settings that the choice has.
    """
    for field in dataclasses.fields(settings):
        given = getattr(settings, field.name)
        if field.name in keys and given != field.default:
            has = ", ".join(takes) or "no settings of its own"
            raise UserError(
                f"{table} {field.name} = {shown(given)} means nothing to {to}, which takes {has}: leave it out, or set "
                f"it to its default {field.default!r}"
            )


@dataclass(frozen=True)
class Training:
    """The ``[training]`` table: how long, how, and with which clients to train."""

    rounds: int = knob(50, "communication rounds", low=1)
    epochs: int = knob(1, "passes over a client's rows per round", low=1)
    steps: int = knob(0, "SGD steps per round instead of epochs; 0 = use epochs", low=0)
    batch: int = knob(32, "rows per minibatch; a client with fewer rows uses all of them", low=1)
    last_batch: str = knob("keep", "what to do with a last, partial minibatch", choices=("keep", "drop"))
    optimizer: str = knob("sgd", "update rule", choices=("sgd", "adam", "adamw"))
    lr: float = knob(0.05, "learning rate", above=0)
    momentum: float = knob(0.0, "momentum of SGD", low=0, high=1)
    beta1: float = knob(0.9, "Adam's first decay rate", low=0, high=0.999999)
    beta2: float = knob(0.999, "Adam's second decay rate", low=0, high=0.999999)
    weight_decay: float = knob(0.0, "weight decay, added to the gradient; AdamW takes it from the weights", low=0)
    clip: float = knob(0.0, "largest gradient norm; 0 = no clipping", low=0)
    schedule: str = knob("constant", "learning rate over rounds", choices=("constant", "cosine", "step"))
    lr_final: float = knob(0.0, "learning rate at the end of a cosine schedule", low=0)
    schedule_rounds: int = knob(0, "length of a cosine schedule, or of one stage of a step schedule; 0 = rounds", low=0)
    decay: float = knob(0.1, "factor at each stage of a step schedule", above=0, high=1)
    keep_optimizer: bool = knob(False, "keep the optimiser's moments on the client between rounds")
    sampling: str = knob("fixed", "how a round's clients are drawn", choices=("fixed", "bernoulli"))
    rate: float = knob(1.0, "share of the clients that take part in a round", above=0, high=1)
    full_last: bool = knob(False, "all clients take part in the last round")
    weighting: str = knob("samples", "a client's weight in the mean", choices=("samples", "uniform"))
    robust: str = knob("mean", "mean of the uploads", choices=("mean", "median", "trimmed", "clipped"))
    trim: float = knob(0.1, "share left out at either end of a trimmed mean", low=0, high=0.5)
    bound: float = knob(2000.0, "largest upload relative to the round's median; 0 = no bound", low=0)
    skip_empty: bool = knob(False, "leave out clients without training rows instead of refusing them")

    def plain(self) -> "Training":
        """Return the same without momentum, Adam, clipping and weight decay."""
        return dataclasses.replace(self, optimizer="sgd", momentum=0.0, weight_decay=0.0, clip=0.0)

    def idle(self) -> dict[str, str]:
        """Return the keys that mean nothing beside the others, and why."""
        adam, schedule = self.optimizer != "sgd", self.schedule
        why = {
            "momentum": f"optimizer is {self.optimizer}" if adam else "",
            "beta1": "" if adam else "optimizer is sgd",
            "beta2": "" if adam else "optimizer is sgd",
            "lr_final": "" if schedule == "cosine" else "schedule is not cosine",
            "decay": "" if schedule == "step" else "schedule is not step",
            "schedule_rounds": "schedule is constant" if schedule == "constant" else "",
            "epochs": "steps is set" if self.steps else "",
            "trim": "" if self.robust == "trimmed" else "robust is not trimmed",
        }
        return {key: reason for key, reason in why.items() if reason}

    def horizon(self) -> int:
        """Return the number of rounds over which the schedule runs."""
        return self.schedule_rounds or self.rounds

    def lr_factor(self, round: int, horizon: int | None = None) -> float:
        """Return the learning rate of a round (counted from 1) relative to ``lr``."""
        horizon = horizon or self.horizon()
        if self.schedule == "cosine":
            done = min(round - 1, horizon) / horizon
            floor = self.lr_final / self.lr
            return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
        if self.schedule == "step":
            return float(self.decay ** ((round - 1) // horizon))
        return 1.0
