"""``bespoke data show EXPERIMENT``: the federation of an experiment in words and as a bubble chart."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.core.data import FederatedData
from bespoke.data import Partition, partitioned
from bespoke.errors import UserError, listed, visible
from bespoke.report.bubbles import bubble_chart
from bespoke.report.charts import check_path
from bespoke.runs.experiment import load

FEW = 2  # rows: a class with so few can hardly be in both the train rows and the test rows


@dataclass(frozen=True)
class Shown:
    """The facts about a federation; ``counts`` are rows by client and class (clients, classes)."""

    experiment: str
    data: str
    clients: int
    new_clients: int
    new: tuple[str, ...]  # which these are: their names, and conditions if there are any
    rows: int
    sizes: tuple[int, float, int]  # smallest, median, largest number of rows per client
    train_sizes: tuple[int, float, int]
    test_sizes: tuple[int, float, int]
    num_classes: int
    classes: tuple[int, float, int]  # fewest, mean, most classes per client
    single_class: int  # clients with one class only
    few: float  # mean number of a client's classes with one or two rows
    test_only: float  # mean number of a client's classes that occur only in its test rows
    skew: float  # mean distance between a client's class shares and those of all rows, 0 to 1
    tries: int
    partition: str
    conditions: tuple[str, ...]
    features: tuple[str, ...]  # names of a table's features; none where examples are no rows of a table
    class_names: tuple[str, ...]  # none where classes have numbers alone
    notes: tuple[str, ...]
    counts: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        """Return the same facts as plain values."""
        return asdict(self) | {"counts": self.counts.tolist()}

    def text(self) -> str:
        """Return a few lines for people to read."""
        low, middle, high = self.sizes
        new = f" ({self.new_clients} of them new)" if self.new_clients else ""
        lines = [
            f"{visible(self.experiment)}: {visible(self.data)}, {self.rows:,} rows of {self.num_classes} classes",
            f"clients            {self.clients}{new}",
            f"rows per client    {low} to {high}, median {middle:g}",
            f"  to train on      {self.train_sizes[0]} to {self.train_sizes[2]}, median {self.train_sizes[1]:g}",
            f"  to test on       {self.test_sizes[0]} to {self.test_sizes[2]}, median {self.test_sizes[1]:g}",
            f"classes            {self.classes[0]} to {self.classes[2]}, mean {self.classes[1]:.2f}; "
            f"clients with only one: {self.single_class}",
            f"  with 1-{FEW} rows    {self.few:.2f} of a client's classes; only in its test rows {self.test_only:.2f}",
            f"skew               {self.skew:.3f} (0: every client like the whole, 1: nothing in common)",
            f"tries              {self.tries}",
            f"partition          {self.partition}",
        ]
        if self.conditions:
            names, counts = np.unique(self.conditions, return_counts=True)
            told = ", ".join(f"{n} x {visible(name)}" for name, n in zip(names, counts, strict=True))
            lines.append(f"conditions         {told}")
        lines += [f"new clients        {_listed(self.new)}"] if self.new else []
        lines += [f"features           {_listed(self.features)}"] if self.features else []
        lines += [f"class names        {_listed(self.class_names)}"] if self.class_names else []
        lines += [f"note               {visible(note)}" for note in self.notes]
        return "\n".join(lines) + "\n"


def show(experiment: str, chart: Path | None = None, overrides: Sequence[str] = (), seed: int | None = None) -> Shown:
    """Describe the federation of an experiment file or a shipped experiment; ``chart`` also draws its bubble chart.

    ``overrides`` are ``table.key=value``, as for ``bespoke run``.
    """
    if chart is not None:
        check_path(chart)  # before anything is computed
    loaded, _ = load(experiment, None, overrides, seed, any_method=True)
    data = replace(loaded.located()[0], transform=())  # it changes no client, and its module need not be imported
    pool, found = partitioned(data, loaded.seed, loaded.training.skip_empty)
    shown = describe(Path(experiment).name.removesuffix(".toml"), loaded.data.name, pool, found)
    if chart is not None:
        title = f"{shown.data} over {shown.clients} clients"
        subtitle = f"Rows per class on each client; partition {shown.partition}, {shown.tries} tries."
        bubble_chart(shown.counts, chart, title, subtitle.replace(", 1 tries", ""))
    return shown


def _named(pool: FederatedData, found: Partition, client: int) -> str:
    condition = f" ({found.conditions[client]})" if found.conditions else ""
    return f"{pool.names[client]}{condition}"


def describe(experiment: str, data: str, pool: FederatedData, found: Partition) -> Shown:
    """Return the facts about a federation."""
    if not pool.num_classes:
        raise UserError(f"{data} has targets that are not classes, and data show counts classes: use a classification")
    y = pool.y.numpy()
    parts = {name: [getattr(pool, name).client(i).numpy() for i in range(pool.total_clients)] for name in _PARTS}
    by_part = {name: np.stack([_classes(y[rows], pool.num_classes) for rows in lists]) for name, lists in parts.items()}
    counts = sum(by_part.values(), np.zeros_like(by_part["train"]))
    held = (counts > 0).sum(axis=1)
    shares = counts / counts.sum(axis=1, keepdims=True)
    everyone = counts.sum(axis=0) / counts.sum()
    return Shown(
        experiment=experiment,
        data=data,
        clients=pool.total_clients,
        new_clients=pool.total_clients - pool.num_clients,
        new=tuple(_named(pool, found, i) for i in range(pool.num_clients, pool.total_clients)),
        rows=int(counts.sum()),
        sizes=_spread(counts.sum(axis=1)),
        train_sizes=_spread(by_part["train"].sum(axis=1)),
        test_sizes=_spread(by_part["test"].sum(axis=1)),
        num_classes=pool.num_classes,
        classes=(int(held.min()), float(held.mean()), int(held.max())),
        single_class=int((held == 1).sum()),
        few=float(((counts >= 1) & (counts <= FEW)).sum(axis=1).mean()),
        test_only=float(((by_part["test"] > 0) & (by_part["train"] == 0)).sum(axis=1).mean()),
        skew=float(np.abs(shares - everyone).sum(axis=1).mean() / 2),
        tries=found.tries,
        partition=found.hash(),
        conditions=found.conditions,
        features=pool.contract.features if pool.contract else (),
        class_names=pool.contract.classes if pool.contract else (),
        notes=pool.notes,
        counts=counts,
    )


_PARTS = ("train", "test", "val")
NAMED = 20  # features or classes in the text


def _listed(names: Sequence[str]) -> str:
    return visible(f"{len(names)}: {listed(names, NAMED)}")


def _classes(labels: np.ndarray, num_classes: int) -> np.ndarray:
    return np.bincount(labels, minlength=num_classes)


def _spread(sizes: np.ndarray) -> tuple[int, float, int]:
    return int(sizes.min()), float(np.median(sizes)), int(sizes.max())
