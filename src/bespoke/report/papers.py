"""Charts as papers draw them: panels of lines, points, boxes, histograms and bubbles.

Each function returns a matplotlib figure, which :func:`bespoke.report.charts.save` writes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bespoke.report.bubbles import draw_bubbles
from bespoke.report.charts import COLOURS, DASHES, DOTS, GREY, INK, inches, new_panels, swarm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
GRID = "#e4e4e4"
LABEL = 26  # characters per line of a legend
WIDTH, HEIGHT = 4.2, 3.4  # inches of a panel
POINTS = 0.8  # share of them that a panel of points has
MANY = (*COLOURS, "#882255", "#999933", "#999999")  # of points, which have no dashes
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # with the colours, so that a label is known without them


@dataclass(frozen=True)
class Words:
    """What is written around a chart."""

    title: str
    subtitle: str  # how to read it
    caption: str = ""  # what the numbers are


@dataclass(frozen=True)
class Line:
    """One line: values [S, X] of S seeds at X places; NaN marks an unknown one."""

    x: Sequence[float]
    values: Floats


@dataclass(frozen=True)
class Lines:
    """A panel of lines by label."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Line]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Points:
    """A panel of points (N, 2), each with a label; areas in points squared, one for all or one each."""

    title: str
    points: Floats
    labels: Sequence[str]
    areas: float | Floats = 24.0


@dataclass(frozen=True)
class Groups:
    """A panel of values by label."""

    title: str
    x: str
    values: Mapping[str, Floats] = field(default_factory=dict)


def line_chart(panels: Sequence[Lines], words: Words, columns: int = 3) -> Figure:
    """Draw panels of lines; a label has the same colour in all of them.

    A line is the mean over seeds; where there are several, a band reaches from the lowest to the highest.
    """
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    figure, grid = _grid(len(panels), columns, labels, words)
    for axes, panel in zip(grid, panels, strict=True):
        for label, line in panel.lines.items():
            _draw_line(axes, line, labels.index(label), label)
        _arrange_axes(axes, panel)
    handles = {str(line.get_label()): line for axes in grid for line in axes.get_lines()}
    _add_legend(figure, [handles[label] for label in labels], labels)
    return figure


def _draw_line(axes: Axes, line: Line, number: int, label: str) -> None:
    known = np.isfinite(line.values).any(axis=0)
    x, values = np.asarray(line.x, dtype=np.float64)[known], line.values[:, known]
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
    marker = MARKERS[number % len(MARKERS)] if len(x) < 25 else ""
    axes.plot(x, np.nanmean(values, axis=0), dash, color=colour, marker=marker, markersize=4, label=label)
    if len(values) > 1:
        axes.fill_between(x, np.nanmin(values, 0), np.nanmax(values, 0), color=colour, alpha=0.15, linewidth=0)


def _arrange_axes(axes: Axes, panel: Lines) -> None:
    """Write a panel's title, axes and ticks; a logarithmic x has its few places as ticks."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    places = sorted({float(x) for line in panel.lines.values() for x in line.x})
    if panel.log_x:
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
    elif len(places) < 8:
        axes.set_xticks(places, [f"{place:g}" for place in places])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))
    if panel.log_y:
        axes.set_yscale("log")
        axes.tick_params(axis="y", which="minor", length=0)
    _put_title(axes, panel.title, WIDTH)
    axes.set_xlabel(panel.x, color=INK, parse_math=False)
    axes.set_ylabel(panel.y, color=INK, parse_math=False)
    axes.grid(axis="y", color=GRID)


def point_chart(panels: Sequence[Points], words: Words, columns: int = 3) -> Figure:
    """Draw panels of points coloured by label, without ticks: only what is near what has a meaning."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.labels))
    figure, grid = _grid(len(panels), columns, labels, words, POINTS)
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=True):
        named, areas = np.array(panel.labels), np.broadcast_to(panel.areas, len(panel.labels))
        for number, label in enumerate(labels):
            own = named == label
            x, y = panel.points[own].T
            dots = axes.scatter(
                x,
                y,
                s=areas[own],
                color=MANY[number % len(MANY)],
                marker=MARKERS[number // len(MANY) % len(MARKERS)],
                alpha=0.8,
                linewidths=0,
            )
            handles.setdefault(label, dots)
        _put_title(axes, panel.title, POINTS * WIDTH)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(True)
        axes.spines[:].set_color(GRID)
        axes.margins(0.08)
    _add_legend(figure, [handles[label] for label in labels], labels, dots=True)
    return figure


def box_chart(panels: Sequence[Groups], words: Words) -> Figure:
    """Draw one dot per value beside the box of each label: its quartiles and median, with the mean as a number."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.values))
    width, room = WIDTH * 1.2 * len(panels), inches(labels)
    figure, grid = new_panels(
        width + room, 0.9 + 0.36 * len(labels), words.title, words.subtitle, words.caption, 1, len(panels)
    )
    for axes, panel in zip(grid.flat, panels, strict=True):
        for y, label in enumerate(labels):
            values = panel.values.get(label, np.array([]))
            if len(values):
                axes.boxplot(
                    [values],
                    positions=[y],
                    orientation="horizontal",
                    widths=0.55,
                    showfliers=False,
                    boxprops={"color": GREY},
                    whiskerprops={"color": GREY},
                    capprops={"color": GREY},
                    medianprops={"color": INK, "linewidth": 1.8},
                )
                offsets = swarm(values, 1 / 60, 0.25)
                axes.scatter(values, y + offsets, s=14, color=DOTS, alpha=0.75, linewidths=0, zorder=3)
                margin = axes.get_yaxis_transform()
                axes.text(1.02, y, f"{values.mean():.2f}", transform=margin, va="center", color=INK, fontsize=8.5)
        axes.text(1.02, -0.75, "mean", transform=axes.get_yaxis_transform(), va="bottom", color=GREY, fontsize=8.5)
        axes.set_yticks(range(len(labels)), labels if axes is grid.flat[0] else [""] * len(labels), parse_math=False)
        axes.set_ylim(len(labels) - 0.4, -0.75)
        axes.set_xlim(-0.02, 1.02)
        _put_title(axes, panel.title, WIDTH)
        axes.set_xlabel(panel.x, color=INK, parse_math=False)
        axes.grid(axis="x", color=GRID)
    return figure


def histogram_chart(panels: Sequence[Groups], words: Words, bins: int = 20) -> Figure:
    """Draw how many of the values in [0, 1] of each panel's one label lie in each bin, on one scale for all.

    Values [S, N] of S seeds give the mean count over seeds.
    """
    figure, grid = _grid(len(panels), 3, [], words)
    edges = np.linspace(0.0, 1.0, bins + 1)
    tallest = 0.0
    for number, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        (values,) = panel.values.values()
        known = values[np.isfinite(values)]
        counts = np.histogram(known, edges)[0] / len(np.atleast_2d(values))
        colour = COLOURS[number % len(COLOURS)]
        axes.bar(100 * edges[:-1], counts, 100 / bins, align="edge", color=colour, edgecolor="white", linewidth=0.6)
        axes.axvline(100 * known.mean(), color=INK, linewidth=1.4, linestyle="--")
        _put_title(axes, f"{panel.title}: mean {100 * known.mean():.1f} %", WIDTH)
        axes.set_xlim(0, 100)
        axes.set_xlabel(panel.x, color=INK, parse_math=False)
        axes.grid(axis="y", color=GRID)
        tallest = max(tallest, float(counts.max()))
    for axes in grid:
        axes.set_ylim(0, 1.06 * tallest)
    grid[0].set_ylabel("clients", color=INK)
    return figure


def bubble_panels(panels: Mapping[str, NDArray[np.int64]], words: Words) -> Figure:
    """Draw the rows by client and class [clients, classes] of several federations, one below the other."""
    clients = max(counts.shape[0] for counts in panels.values())
    width = float(np.clip(0.11 * clients, 7.6, 13))
    height = sum(_bubble_height(counts) for counts in panels.values())
    figure, grid = new_panels(width, height, words.title, words.subtitle, words.caption, len(panels), 1)
    grid[0, 0].get_gridspec().set_height_ratios([_bubble_height(counts) for counts in panels.values()])
    for axes, (title, counts) in zip(grid[:, 0], panels.items(), strict=True):
        draw_bubbles(axes, counts, width, _bubble_height(counts))
        _put_title(axes, f"{title} (largest bubble: {counts.max():,} rows)", width)
    return figure


def _bubble_height(counts: NDArray[np.int64]) -> float:
    return float(np.clip(0.26 * counts.shape[1], 2.6, 6))


# --- layout ---------------------------------------------------------------------------------------------------------


def _grid(
    panels: int, columns: int, labels: Sequence[str], words: Words, share: float = 1.0
) -> tuple[Figure, list[Axes]]:
    """Return a figure with room for panels and a legend at the right, and the panels' axes.

    A panel has a ``share`` of the usual width and height; a single one is wider.
    """
    columns = min(columns, panels)
    rows, written = -(-panels // columns), _wrapped(labels).splitlines()
    wide = share * WIDTH * (1.3 if columns == 1 else 1.0)
    width = columns * wide + (0.6 + inches(written) if labels else 0.0)
    height = max(rows * share * HEIGHT, 0.4 + 0.21 * len(written))
    figure, grid = new_panels(width, height, words.title, words.subtitle, words.caption, rows, columns)
    for axes in list(grid.flat)[panels:]:
        axes.remove()
    return figure, list(grid.flat)[:panels]


def _put_title(axes: Axes, title: str, width: float) -> None:
    """Write a title above a panel, in lines of at most `width` inches."""
    lines = [
        part for line in title.splitlines() for part in textwrap.wrap(line, int(12.5 * width), break_on_hyphens=False)
    ]
    axes.set_title("\n".join(lines), fontsize=10, color=INK, loc="left", parse_math=False)


def _wrapped(labels: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(label, LABEL) for label in labels)


def _add_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], dots: bool = False) -> None:
    """Write what the colours mean, once, at the right of all panels."""
    if len(labels) < 2 and not dots:
        return
    written = [textwrap.fill(label, LABEL).replace("$", r"\$") for label in labels]
    found = figure.legend(handles, written, loc="outside right center", frameon=False, labelcolor=INK, fontsize=9)
    shown: list[Any] = found.legend_handles
    for handle in shown if dots else ():
        handle.set_sizes([30.0])
