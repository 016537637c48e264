"""How a metric's values are written: shares in percent, everything else as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

SHARES = {"accuracy", "auc", "auroc", "f1", "precision", "recall"}  # last word of a metric's name


@dataclass(frozen=True)
class Unit:
    """How to write a value: times `scale`, in the format `code`, followed by `sign` if it stands alone."""

    scale: float
    code: str
    sign: str

    @classmethod
    def of(cls, metric: str, values: Iterable[float | None], places: int = 1) -> Unit:
        """Return the unit of a metric: percent with `places` decimals, or four digits of the largest of the values."""
        if metric.rsplit("_", 1)[-1] in SHARES:
            return cls(100.0, f".{places}f", " %")
        largest = max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0.0)
        exponent = math.floor(math.log10(largest)) if largest else 0
        return cls(1.0, f".{max(0, 3 - exponent)}f" if -4 <= exponent < 7 else ".3e", "")

    @property
    def name(self) -> str:
        """The suffix of the metric's name: `in %` or nothing."""
        return " in %" if self.sign else ""

    def text(self, value: float | None, plus: bool = False) -> str:
        """Return the number alone; `plus` also marks positive numbers, and `-` stands for an unknown value."""
        return "-" if value is None else f"{self.scale * value:{'+' if plus else ''}{self.code}}"


def written(metric: str, value: float) -> str:
    """Return a value for a sentence: `accuracy 94.12 %`, `mse 0.1234`."""
    unit = Unit.of(metric, [value], places=2)
    return f"{metric} {unit.text(value)}{unit.sign}"
