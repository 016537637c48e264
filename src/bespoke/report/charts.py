"""Charts of comparisons and of curves over rounds, as PNG or SVG by the suffix of the file."""

from __future__ import annotations

import os
import textwrap
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError
from bespoke.files import write_atomic
from bespoke.report.metrics import aggregate
from bespoke.report.runs import Paths, group_runs, view_of
from bespoke.report.table import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, DOTS = "#222222", "#767676", "#4c78a8"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise UserError(f"cannot draw {path}: the name of a chart must end in .png or .svg")
    return suffix


def _axes(width: float, height: float, title: str, subtitle: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(length=0, labelcolor=INK)
    axes.set_axisbelow(True)
    lines = textwrap.fill(subtitle, int(width * 14))
    pad = 9 + 12 * (lines.count("\n") + 1)  # points: the title stands above the subtitle
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=pad, parse_math=False)
    place: dict[str, Any] = {"xytext": (0, 5), "textcoords": "offset points", "va": "bottom"}
    axes.annotate(lines, (0, 1), xycoords="axes fraction", fontsize=8.5, color=GREY, parse_math=False, **place)
    return figure, axes


def _save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    import matplotlib

    suffix, sink = _suffix(path), BytesIO()
    metadata = {"Date": None} if suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "bespoke"}):  # the same chart gives the same bytes
        figure.savefig(sink, format=suffix[1:], dpi=160, facecolor="white", metadata=metadata)
    write_atomic(path, sink.getvalue())
    return Path(path)


def _swarm(values: NDArray[np.float64], width: float, half: float = 0.36) -> NDArray[np.float64]:
    """Offsets [M] that stack values [M] of one bin of `width` evenly around 0, within +-`half`."""
    bins = np.round(values / width).astype(int)
    offsets = np.zeros(len(values))
    order = np.random.default_rng(0)  # breaks up the diagonal that sorted values would draw
    largest = max(1, int(np.unique(bins, return_counts=True)[1].max()) - 1)
    step = min(0.11, 2 * half / largest)
    for number in np.unique(bins):
        members = np.flatnonzero(bins == number)
        offsets[order.permutation(members)] = step * (np.arange(len(members)) - (len(members) - 1) / 2)
    return offsets


def accuracy_chart(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Draws, per method, a dot for each client's accuracy and a line at their mean; returns `path`."""
    _suffix(path)
    rows = comparison.rows
    dot = "client" if max(len(row.seeds) for row in rows) == 1 else "client in one seed"
    caption = comparison.caption.rsplit(";", 1)[0]
    subtitle = f"A dot is a {dot}, the line their mean. {caption[0].upper()}{caption[1:]}."
    title = "Accuracy of every client on its own test rows"
    figure, axes = _axes(7.6, 1.5 + 0.55 * len(rows), title, subtitle)
    low = 10 * np.floor(10 * min(row.accuracies.min() for row in rows))
    low = float(min(low, 90.0))
    margin = axes.get_yaxis_transform()  # x as a share of the axes, y as data
    for y, row in enumerate(rows):
        values = 100 * np.sort(row.accuracies)
        size = float(np.clip(1500 / len(values), 4, 26))
        offsets = _swarm(values, (100 - low) / 90)
        axes.scatter(values, y + offsets, s=size, color=DOTS, alpha=0.7, linewidths=0, clip_on=False, zorder=3)
        mean = 100 * row.mean.mean
        axes.plot([mean, mean], [y - 0.36, y + 0.36], color=INK, linewidth=2.2, solid_capstyle="butt", zorder=2)
        axes.text(1.02, y, f"{mean:.1f}", transform=margin, va="center", color=INK)
    axes.text(1.02, -0.62, "mean", transform=margin, va="bottom", color=GREY, fontsize=8.5)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], parse_math=False)
    axes.set_ylim(len(rows) - 0.45, -0.62)
    axes.set_xlim(low - (100 - low) / 60, 100 + (100 - low) / 60)
    axes.set_xlabel("test accuracy in %", color=INK)
    axes.grid(axis="x", color="#e4e4e4")
    return _save(figure, path)


def curves(paths: Paths, path: str | os.PathLike[str], view: str | None = None) -> Path:
    """Draws the clients' mean test accuracy against the round, a line a method; returns `path`.

    Lines are means over seeds, bands reach from the lowest to the highest seed. `paths` and `view` are those
    of `compare`; at least one run must have evaluated several rounds.
    """
    from matplotlib.ticker import MaxNLocator

    _suffix(path)
    groups, _ = group_runs(paths)
    lines: dict[str, tuple[list[int], NDArray[np.float64]]] = {}
    for label, runs in groups.items():
        named = [(run.evaluations, view_of(run, view)) for run in runs.values()]
        rounds = sorted(set.intersection(*(set(e.rounds(name)) for e, name in named)))
        counts = [[e.counts(name, number) for number in rounds] for e, name in named]
        means = [[aggregate(c.correct, c.total).mean for c in seed] for seed in counts]
        lines[label] = rounds, 100 * np.array(means, dtype=np.float64)  # [seeds, rounds]
    if max(len(rounds) for rounds, _ in lines.values()) < 2:
        raise UserError("no run evaluated several rounds, so there is no curve; run with [evaluation] every = 1")
    subtitle = "Mean test accuracy over all clients of the training population"
    if any(len(values) > 1 for _, values in lines.values()):
        subtitle += "; line: mean over seeds, band: lowest to highest seed"
    figure, axes = _axes(7.6, 4.4, "Accuracy by round", subtitle)
    for i, (label, (rounds, values)) in enumerate(lines.items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        marker = "o" if len(rounds) < 25 else None
        text = label.replace("$", r"\$")
        axes.plot(rounds, values.mean(0), dash, color=colour, marker=marker, markersize=3.5, label=text)
        if len(values) > 1:
            axes.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round", color=INK)
    axes.set_ylabel("mean test accuracy in %", color=INK)
    axes.grid(axis="y", color="#e4e4e4")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=INK)
    return _save(figure, path)
