"""Charts of comparisons and of curves over rounds, as PNG, SVG or PDF by the suffix of the file."""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError, short
from bespoke.files import check_out, write_atomic
from bespoke.report.groups import people
from bespoke.report.metrics import aggregate
from bespoke.report.runs import Paths, RecordedRun, group_runs, metric_of, view_of
from bespoke.report.table import Comparison
from bespoke.report.units import Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, DOTS = "#222222", "#767676", "#4c78a8"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")  # those of pages too
DASHES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v")  # with seven colours and four dashes: 140 lines that differ
LABEL, LONGEST = 40, 200  # characters per line of a method's label, and of all its lines
MANY_ROWS = 12  # of a chart of clients, above which they are smaller
BESIDE = 32  # lines of labels for which a legend has room beside a chart


def check_path(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a chart's path, after checking that it can be written as PNG, SVG or PDF."""
    return check_out(path, (".png", ".svg", ".pdf"))


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
    with matplotlib.rc_context({"svg.hashsalt": "bespoke"}), warnings.catch_warnings():  # the same bytes each time
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # of a name; a box stands for it
        figure.savefig(sink, format=suffix[1:], dpi=160, facecolor="white", metadata=metadata)
    write_atomic(path, sink.getvalue())
    return Path(path)


def inches(lines: Iterable[str]) -> float:
    """Return the width in inches of the longest line in the font of labels."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=10)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        return max((text_to_path.get_text_width_height_descent(line, font, False)[0] for line in lines), default=0) / 72


def wrapped(label: str, width: int = LABEL) -> str:
    """Return a label in lines of at most `width` characters; of a very long one the beginning."""
    return textwrap.fill(short(label, LONGEST), width, break_on_hyphens=False)


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
    """Draw for each method one dot per client at its value of the metric and a line at their mean; return `path`.

    The method with the best mean is at the top.
    """
    check_path(path)
    unit, sign = comparison.unit, -1.0 if comparison.higher else 1.0
    rows = sorted(comparison.rows, key=lambda row: np.inf if row.mean.mean is None else sign * row.mean.mean)
    finite = [unit.scale * np.sort(row.values[np.isfinite(row.values)]) for row in rows]
    drawn = np.concatenate(finite)
    if not drawn.size:
        raise UserError(f"no client has a finite {comparison.metric}, so there is nothing to draw")
    dot = "client" if max(len(row.seeds) for row in rows) == 1 else "client in one seed"
    subtitle = f"Each dot is a {dot}, the line their mean. {comparison.scope[0].upper()}{comparison.scope[1:]}."
    many = len(rows) > MANY_ROWS
    labels = [wrapped(row.label, 60 if many else LABEL) for row in rows]
    lines = [line for label in labels for line in label.splitlines()]
    font, least = (8.5, 0.36) if many else (10.0, 0.55)  # points; inches
    each = max(least, font / 50 * max(label.count("\n") + 1 for label in labels) + 0.1)  # inches of a row
    title = f"{comparison.metric[0].upper()}{comparison.metric[1:]} of every client on its own test rows"
    beside = max(1.2, inches(lines) * font / 10)
    figure, axes = new_axes(6.4 + beside, 0.7 + each * len(rows), title, subtitle)
    low, high = float(drawn.min()), float(drawn.max())
    if unit.sign:  # percent
        low, high = min(10 * np.floor(low / 10), 90.0), 100.0
    span = (high - low) or abs(high) or 1.0
    margin = axes.get_yaxis_transform()  # x as a share of the axes, y as data
    for y, (row, values) in enumerate(zip(rows, finite, strict=True)):
        if values.size:
            size = float(np.clip(1500 / len(values), 4, 26)) * min(1.0, each / 0.55) ** 2
            offsets = swarm(values, span / 90)
            axes.scatter(values, y + offsets, s=size, color=DOTS, alpha=0.7, linewidths=0, clip_on=False, zorder=3)
        if row.mean.mean is not None:
            mean = unit.scale * row.mean.mean
            axes.plot([mean, mean], [y - 0.36, y + 0.36], color=INK, linewidth=2.2, solid_capstyle="butt", zorder=2)
        axes.text(1.02, y, unit.text(row.mean.mean), transform=margin, va="center", color=INK, fontsize=font)
    axes.text(1.02, -0.62, "mean", transform=margin, va="bottom", color=GREY, fontsize=8.5)
    axes.set_yticks(range(len(rows)), labels, parse_math=False, fontsize=font)
    axes.set_ylim(len(rows) - 0.45, -0.62)
    axes.set_xlim(low - span / 60, high + span / 60)
    axes.set_xlabel(f"test {comparison.metric}{unit.name}", color=INK, parse_math=False)
    axes.grid(axis="x", color="#e4e4e4")
    return save(figure, path)


Curve = tuple[list[int], NDArray[np.float64]]  # rounds [R], values [seeds, R]


def curve_values(
    paths: Paths, view: str | None = None, metric: str | None = None, group: str = "all"
) -> tuple[str, bool, dict[str, Curve]]:
    """Return the metric's name, whether larger is better, and by label rounds and the clients' means on test rows.

    The settings are those of `compare`. Only rounds that all seeds of a method have evaluated count; NaN marks an
    unknown value.
    """
    groups, _ = group_runs(paths)
    metric, higher = metric_of(groups, metric)
    return metric, higher, {label: curve_of(runs.values(), view, metric, group) for label, runs in groups.items()}


def curve_of(runs: Iterable[RecordedRun], view: str | None, metric: str, group: str) -> Curve:
    """Return the rounds that all these runs have evaluated, and each run's mean over clients in them."""
    named = [(run.evaluations, view_of(run, view)) for run in runs]
    rounds = sorted(set.intersection(*(set(e.rounds(name)) for e, name in named)))
    means = [[aggregate(e.scores(name, metric, number, group)).mean for number in rounds] for e, name in named]
    return rounds, np.array(means, dtype=np.float64)  # None becomes NaN


def curves(
    paths: Paths,
    path: str | os.PathLike[str],
    view: str | None = None,
    metric: str | None = None,
    group: str = "all",
) -> Path:
    """Draw the clients' mean of a metric against the round, one line per method; return `path`.

    Lines are means over seeds, bands reach from the lowest to the highest seed; the legend has the best last value
    first. The settings are those of `compare`; at least one run must have evaluated several rounds.
    """
    from matplotlib.ticker import MaxNLocator

    check_path(path)
    metric, higher, found = curve_values(paths, view, metric, group)
    if max(len(rounds) for rounds, _ in found.values()) < 2:
        raise UserError("no run evaluated several rounds, so there is no curve; run with [evaluation] every = 1")
    lines = dict(sorted(found.items(), key=lambda item: _last(item[1], higher)))
    unit = Unit.of(metric, [float(np.abs(values).max()) for _, values in lines.values() if values.size])
    subtitle = f"Mean test {metric} over {people(group)}"
    if any(len(values) > 1 for _, values in lines.values()):
        subtitle += "; line: mean over seeds, band: lowest to highest seed"
    if len(lines) > 1:
        subtitle += "; the best in its last round is named first"
    labels = [wrapped(label) for label in lines]
    title = f"{metric[0].upper()}{metric[1:]} by round"
    written = [line for label in labels for line in label.splitlines()]
    beside, wide = len(written) <= BESIDE, inches(written)
    if beside:
        columns, size = 1, (6.2 + max(1.2, wide), max(3.8, 0.8 + 0.21 * len(written)))
    else:  # below, in columns and a smaller font
        columns = max(1, int(10 / (0.9 * wide + 0.6)))
        each = 0.15 * max(label.count("\n") + 1 for label in labels) + 0.07  # inches of a label
        size = max(10.0, wide), 5.2 + each * -(-len(labels) // columns)
    figure, axes = new_axes(*size, title, subtitle)
    for i, (label, (rounds, values)) in enumerate(zip(labels, lines.values(), strict=True)):
        colour, number, scaled = COLOURS[i % len(COLOURS)], i // len(COLOURS), unit.scale * values
        [line] = axes.plot(rounds, scaled.mean(0), DASHES[number % len(DASHES)], color=colour, linewidth=1.5)
        every = 1 if len(rounds) < 25 else len(rounds) // 8  # so that marks do not hide the line
        line.set(marker=MARKERS[number % len(MARKERS)], markersize=4, markevery=(i % every, every))
        line.set_label(label.replace("$", r"\$"))
        if len(values) > 1:
            axes.fill_between(rounds, scaled.min(0), scaled.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("round", color=INK)
    axes.set_ylabel(f"mean test {metric}{unit.name}", color=INK, parse_math=False)
    axes.grid(axis="y", color="#e4e4e4")
    if beside:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=INK)
    else:
        figure.legend(frameon=False, loc="outside lower left", ncols=columns, labelcolor=INK, fontsize=9)
    return save(figure, path)


def _last(curve: Curve, higher: bool) -> float:
    """Return what sorts curves by their last known mean over seeds, the best first and an unknown one last."""
    means = curve[1].mean(0)
    known = means[np.isfinite(means)]
    return (-known[-1] if higher else known[-1]) if known.size else np.inf
