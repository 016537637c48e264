"""Charts of comparisons and of curves over rounds, as PNG, SVG or PDF by the suffix of the file."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError
from bespoke.files import write_atomic
from bespoke.report.metrics import aggregate
from bespoke.report.runs import Paths, group_runs, metric_of, view_of
from bespoke.report.table import Comparison
from bespoke.report.units import Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, DOTS = "#222222", "#767676", "#4c78a8"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.")
LABEL = 40  # characters per line of a method's label


def check_path(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a chart's path, after checking that it can be written as PNG, SVG or PDF."""
    suffix, folder = Path(path).suffix.lower(), Path(path).parent
    if suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"cannot draw {path}: the name of a chart must end in .png, .svg or .pdf")
    if not folder.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {folder}; create it first")
    return suffix


def new_axes(width: float, height: float, title: str, subtitle: str) -> tuple[Figure, Axes]:
    """Return a figure and its axes, which fill `width` times `height` inches below the title.

    Title and subtitle are at the left edge of the figure and wrapped to its width.
    """
    figure, panels = new_panels(width, height, title, subtitle)
    return figure, panels[0, 0]


def new_panels(
    width: float, height: float, title: str, subtitle: str, caption: str = "", rows: int = 1, columns: int = 1
) -> tuple[Figure, NDArray[Any]]:
    """Return a figure and its axes [rows, columns], which fill `width` times `height` inches together.

    Title and subtitle are above them and the caption below, at the left edge of the figure and wrapped to its width.
    """
    from matplotlib.figure import Figure

    head, lines, foot = (
        textwrap.fill(text, int(width * n), break_on_hyphens=False)
        for text, n in ((title, 10), (subtitle, 14), (caption, 14))
    )
    below = 12 + 12 * (lines.count("\n") + 1)  # points from the top of the axes to the title
    top = (below + 15 * (head.count("\n") + 1) + 8) / 72
    bottom = (12 * (foot.count("\n") + 1) + 10) / 72 if foot else 0.0
    whole, edge = bottom + height + top, 0.06 / width
    figure = Figure(figsize=(width, whole))
    figure.set_layout_engine("constrained", rect=(edge, bottom / whole, 1 - edge, height / whole))
    place: dict[str, Any] = {"x": 0.1 / width, "va": "bottom", "parse_math": False}
    small: dict[str, Any] = {"fontsize": 8.5, "color": GREY, "linespacing": 1.3}
    figure.text(y=(bottom + height + below / 72) / whole, s=head, fontsize=12, color=INK, **place)
    figure.text(y=(bottom + height + 6 / 72) / whole, s=lines, **small, **place)
    if foot:
        figure.text(y=5 / 72 / whole, s=foot, **small, **place)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat:
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GREY)
        axes.tick_params(length=0, labelcolor=INK)
        axes.set_axisbelow(True)
    return figure, panels


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure in the format of its path's suffix, whole or not at all, and return the path."""
    import matplotlib

    suffix, sink = check_path(path), BytesIO()
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix, {})
    with matplotlib.rc_context({"svg.hashsalt": "bespoke"}):  # the same chart gives the same bytes
        figure.savefig(sink, format=suffix[1:], dpi=160, facecolor="white", metadata=metadata)
    write_atomic(path, sink.getvalue())
    return Path(path)


def inches(lines: Iterable[str]) -> float:
    """Return the width in inches of the longest line in the font of labels."""
    from matplotlib.textpath import TextPath

    widths = [TextPath((0, 0), line.replace("$", r"\$"), size=10).get_extents().width for line in lines if line.strip()]
    return max(widths, default=0.0) / 72


def swarm(values: NDArray[np.float64], width: float, half: float = 0.36) -> NDArray[np.float64]:
    """Return offsets [M] that spread the values [M] of each bin of `width` evenly around 0, within +-`half`."""
    bins = np.round(values / width).astype(int)
    offsets = np.zeros(len(values))
    order = np.random.default_rng(0)  # breaks up the diagonal that sorted values would draw
    largest = max(1, int(np.unique(bins, return_counts=True)[1].max()) - 1)
    step = min(0.11, 2 * half / largest)
    for number in np.unique(bins):
        members = np.flatnonzero(bins == number)
        offsets[order.permutation(members)] = step * (np.arange(len(members)) - (len(members) - 1) / 2)
    return offsets


def client_chart(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Draw for each method one dot per client at its value of the metric and a line at their mean; return `path`."""
    check_path(path)
    rows, unit = comparison.rows, comparison.unit
    finite = [unit.scale * np.sort(row.values[np.isfinite(row.values)]) for row in rows]
    drawn = np.concatenate(finite)
    if not drawn.size:
        raise UserError(f"no client has a finite {comparison.metric}, so there is nothing to draw")
    dot = "client" if max(len(row.seeds) for row in rows) == 1 else "client in one seed"
    subtitle = f"Each dot is a {dot}, the line their mean. {comparison.scope[0].upper()}{comparison.scope[1:]}."
    labels = ["\n".join(textwrap.wrap(row.label, LABEL)) for row in rows]
    lines = [line for label in labels for line in label.splitlines()]
    each = max(0.55, 0.2 * max(label.count("\n") + 1 for label in labels) + 0.1)  # inches of a row
    title = f"{comparison.metric[0].upper()}{comparison.metric[1:]} of every client on its own test rows"
    figure, axes = new_axes(6.4 + max(1.2, inches(lines)), 0.7 + each * len(rows), title, subtitle)
    low, high = float(drawn.min()), float(drawn.max())
    if unit.sign:  # percent
        low, high = min(10 * np.floor(low / 10), 90.0), 100.0
    span = (high - low) or abs(high) or 1.0
    margin = axes.get_yaxis_transform()  # x as a share of the axes, y as data
    for y, (row, values) in enumerate(zip(rows, finite, strict=True)):
        if values.size:
            size = float(np.clip(1500 / len(values), 4, 26))
            offsets = swarm(values, span / 90)
            axes.scatter(values, y + offsets, s=size, color=DOTS, alpha=0.7, linewidths=0, clip_on=False, zorder=3)
        if row.mean.mean is not None:
            mean = unit.scale * row.mean.mean
            axes.plot([mean, mean], [y - 0.36, y + 0.36], color=INK, linewidth=2.2, solid_capstyle="butt", zorder=2)
        axes.text(1.02, y, unit.text(row.mean.mean), transform=margin, va="center", color=INK)
    axes.text(1.02, -0.62, "mean", transform=margin, va="bottom", color=GREY, fontsize=8.5)
    axes.set_yticks(range(len(rows)), labels, parse_math=False)
    axes.set_ylim(len(rows) - 0.45, -0.62)
    axes.set_xlim(low - span / 60, high + span / 60)
    axes.set_xlabel(f"test {comparison.metric}{unit.name}", color=INK, parse_math=False)
    axes.grid(axis="x", color="#e4e4e4")
    return save(figure, path)


Curve = tuple[list[int], NDArray[np.float64]]  # rounds [R], values [seeds, R]


def curve_values(paths: Paths, view: str | None = None, metric: str | None = None) -> tuple[str, dict[str, Curve]]:
    """Return the metric's name and, by label, the rounds and the mean over clients on their test rows.

    `paths`, `view` and `metric` are those of `compare`; the clients are those of the training population. Only rounds
    that all seeds of a method have evaluated count; NaN marks an unknown value.
    """
    groups, _ = group_runs(paths)
    metric, _ = metric_of(groups, metric)
    found: dict[str, Curve] = {}
    for label, runs in groups.items():
        named = [(run.evaluations, view_of(run, view)) for run in runs.values()]
        rounds = sorted(set.intersection(*(set(e.rounds(name)) for e, name in named)))
        means = [[aggregate(e.scores(name, metric, number)).mean for number in rounds] for e, name in named]
        found[label] = rounds, np.array(means, dtype=np.float64)  # None becomes NaN
    return metric, found


def curves(paths: Paths, path: str | os.PathLike[str], view: str | None = None, metric: str | None = None) -> Path:
    """Draw the clients' mean of a metric against the round, one line per method; return `path`.

    Lines are means over seeds, bands reach from the lowest to the highest seed. `paths`, `view` and `metric` are
    those of `compare`; at least one run must have evaluated several rounds.
    """
    from matplotlib.ticker import MaxNLocator

    check_path(path)
    metric, lines = curve_values(paths, view, metric)
    if max(len(rounds) for rounds, _ in lines.values()) < 2:
        raise UserError("no run evaluated several rounds, so there is no curve; run with [evaluation] every = 1")
    unit = Unit.of(metric, [float(np.abs(values).max()) for _, values in lines.values() if values.size])
    subtitle = f"Mean test {metric} over all clients of the training population"
    if any(len(values) > 1 for _, values in lines.values()):
        subtitle += "; line: mean over seeds, band: lowest to highest seed"
    labels = [textwrap.fill(label, LABEL).replace("$", r"\$") for label in lines]
    written = [line for label in labels for line in label.splitlines()]
    title = f"{metric[0].upper()}{metric[1:]} by round"
    figure, axes = new_axes(6.2 + max(1.2, inches(written)), max(3.8, 0.8 + 0.21 * len(written)), title, subtitle)
    for i, (label, (rounds, values)) in enumerate(zip(labels, lines.values(), strict=True)):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        marker, scaled = "o" if len(rounds) < 25 else None, unit.scale * values
        axes.plot(rounds, scaled.mean(0), dash, color=colour, marker=marker, markersize=3.5, label=label)
        if len(values) > 1:
            axes.fill_between(rounds, scaled.min(0), scaled.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round", color=INK)
    axes.set_ylabel(f"mean test {metric}{unit.name}", color=INK, parse_math=False)
    axes.grid(axis="y", color="#e4e4e4")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=INK)
    return save(figure, path)
