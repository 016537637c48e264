"""Charts as plotly's dicts: lines, strips of points, bubbles and bars.

Colours are not in here: a trace's `meta` has the number of its colour and of its method, and the page's script takes
the colours of the theme. A text inside a chart may hold plotly's own tags, so that every name goes through `plain`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import listed, natural, short
from bespoke.report.charts import COLOURS, swarm
from bespoke.report.page.parts import Chart

MOST = 20_000  # points of a chart
BANDS = 5  # bands of a chart, which more would make a mud of colours
HUES = len(COLOURS)  # of the theme; a line beyond them has another dash
DASHES = {  # plotly's name of a line's, and the lengths of the same in the page's legend
    "solid": "none",
    "dash": "8 4",
    "dot": "3 3",
    "dashdot": "8 3 2 3",
    "longdash": "14 4",
    "longdashdot": "14 3 2 3",
}
BELOW = {"orientation": "h", "y": -0.16, "yanchor": "top"}  # a legend
Floats = NDArray[np.float64]


def plain(text: str, longest: int = 60) -> str:
    """Return a name as text inside a chart, of a long one the beginning."""
    return _escaped(short(text, longest))


def wrapped(text: str, width: int = 60) -> str:
    """Return a name that is visible already as text inside a chart, all of it, in several lines if it is long."""
    return "<br>".join(map(_escaped, textwrap.wrap(text, width)))


def _escaped(text: str) -> str:
    """Return text in which plotly reads no tags and $formulas$, and fills in no %{braces}."""
    escapes = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "%{": "%&#123;"}
    return re.sub(r"[&<>$]|%\{", lambda found: escapes[found[0]], text)


def numbers(values: Any) -> list[float | None]:
    """Return values [N] with six digits, None for what is not finite."""
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in np.asarray(values, dtype=np.float64)]


def thinned(count: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` of the places 0 ... count - 1, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, max(2, most))).round().astype(np.int64))


def axis(title: str, **settings: Any) -> dict[str, Any]:
    """Return an axis with a title."""
    return {"title": {"text": plain(title), "standoff": 8}, "zeroline": False, **settings}


def whole(title: str, span: float) -> dict[str, Any]:
    """Return an axis of whole numbers that reach over `span`: rounds, or places of clients."""
    return axis(title, tickformat=",d", **({"dtick": 1} if span <= 12 else {}))  # else plotly's own steps are whole


# --- lines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One line: its values [R] at x [R], a band from `low` to `high` [R] if there is one."""

    label: str
    method: int  # place of its method among the page's
    colour: int
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    rounds: tuple[int, ...] = ()  # for the hover's text, where x is no round


def lines(
    title: str,
    caption: str,
    x: dict[str, Any],
    y: dict[str, Any],
    drawn: Sequence[Line],
    place: Callable[[float], str] = "{:.4g}".format,
    legend: bool = False,
    wide: bool = True,
) -> Chart:
    """Draw lines; `x` and `y` are axes, `legend` shows one inside the chart, for lines that are no methods.

    `place` tells a value of x in words.
    """
    points, bands = sum(len(line.x) for line in drawn), sum(line.low is not None for line in drawn)
    each = MOST // max(1, len(drawn)) if points > MOST else MOST
    data: list[dict[str, Any]] = []
    kept = 0
    for line in drawn:
        keep = thinned(len(line.x), each)
        kept += len(keep)
        xs, ys, name = numbers(line.x[keep]), numbers(line.y[keep]), plain(line.label)
        meta = {"colour": line.colour % HUES, "method": line.method}
        if line.low is not None and line.high is not None and bands <= BANDS:
            low, high = numbers(line.low[keep]), numbers(line.high[keep])
            around = {"x": [*xs, *xs[::-1]], "y": [*high, *low[::-1]], "fill": "toself", "mode": "none"}
            data.append({**around, "meta": {**meta, "part": "band"}, "hoverinfo": "skip", "showlegend": False})
        rounds = np.array(line.rounds)[keep].tolist() if line.rounds else None
        when = "round %{customdata}, " if rounds else ""
        data.append(
            {
                "x": xs,
                "y": ys,
                "mode": "lines+markers" if len(xs) < 25 else "lines",
                "line": {"dash": [*DASHES][line.colour // HUES % len(DASHES)], "width": 2},
                "marker": {"size": 5 if len(xs) > 1 else 11},
                "name": name,
                "showlegend": legend,
                "meta": {**meta, "label": name},
                "hovertemplate": f"%{{meta.label}}<br>{when}%{{x}}: <b>%{{y}}</b><extra></extra>",
            }
            | ({"customdata": rounds} if rounds else {})
        )
    layout = {"xaxis": x, "yaxis": y, "height": 340, "showlegend": legend}
    if legend:
        layout |= {"legend": BELOW | {"y": -0.25}, "height": 400}
    if alone := [short(line.label, 120) for line in drawn if len(line.x) == 1]:
        caption += f" With one value each, and so a point: {', '.join(alone)}."
    if bands > BANDS:
        caption += f" The bands of {bands} lines would cover each other and are left out."
    if kept < points:
        caption += f" Of {points:,} points {kept:,} are drawn."
    alternative = _told_lines(drawn, place, y["title"]["text"])
    return Chart(title, caption, alternative, _figure(data, layout), wide)


def _told_lines(drawn: Sequence[Line], place: Callable[[float], str], what: str) -> str:
    """Return where each line begins and ends, in words."""
    ends = []
    for line in drawn:
        known = np.flatnonzero(np.isfinite(line.x) & np.isfinite(line.y))
        if len(known):
            begin, end = (f"{line.y[i]:.4g} at {place(line.x[i])}" for i in known[[0, -1]])
            ends.append(f"{short(line.label, 120)} from {begin} to {end}")
    return f"Lines of {what}: {'; '.join(ends) or 'no known value'}."


# --- strips --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strip:
    """One row of points, a client each: values [M] and what hovering over them says [M]."""

    label: str
    method: int
    colour: int
    values: Floats
    hover: Sequence[str]
    note: str = ""  # beside the label


ROW, LETTERS = 58, 42  # pixels of a row whose label has one line; letters of a line, which a phone has room for


def strips(
    title: str, caption: str, x: dict[str, Any], rows: Sequence[Strip], zero: bool = False, each: str = "client"
) -> Chart:
    """Draw each row's values as points beside each other, with their mean; `zero` marks where nothing changes."""
    finite = [np.isfinite(row.values) for row in rows]
    placed = np.log10 if x.get("type") == "log" else np.asarray  # how far apart points are drawn
    everything = placed(np.concatenate([row.values[own] for row, own in zip(rows, finite, strict=True)]))
    most = MOST // max(1, len(rows)) if everything.size > MOST else MOST
    span = float(np.ptp(everything)) if everything.size else 1.0
    data: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    labels = [wrapped(short(row.label, 120) + row.note, LETTERS) for row in rows]
    most_lines = 1 + max(label.count("<br>") for label in labels)
    told, points = [], 0
    for place, (row, own) in enumerate(zip(rows, finite, strict=True)):
        order = np.flatnonzero(own)[np.argsort(row.values[own], kind="stable")]  # so that thinning keeps the ends
        keep = order[thinned(len(order), most)] if len(order) else order
        values, points = row.values[keep], points + len(keep)
        meta = {"colour": row.colour % HUES, "method": row.method}
        if len(values):
            offsets = 0.75 * swarm(placed(values), (span or 1.0) / 90)
            data.append(
                {
                    "x": numbers(values),
                    "y": numbers(place + 0.14 + offsets),
                    "customdata": [row.hover[i] for i in keep],
                    "hovertemplate": "%{customdata}<extra></extra>",
                    "mode": "markers",
                    "marker": {"size": float(np.clip(40 / len(values) ** 0.4, 4, 9)), "opacity": 0.75},
                    "meta": meta,
                    "name": plain(row.label),
                }
            )
            mean = float(row.values[own].mean())
            data.append(
                {
                    **{"x": numbers([mean, mean]), "y": [place - 0.16, place + 0.44], "mode": "lines"},
                    **{"line": {"width": 3}, "hovertemplate": f"mean {mean:.4g}<extra></extra>"},
                    "meta": {"ink": True, "method": row.method},
                }
            )
            told.append(f"{short(row.label, 120)}: mean {mean:.4g}, {values.min():.4g} to {values.max():.4g}")
        annotations.append(
            {
                **{"xref": "paper", "x": 0, "xanchor": "left", "y": place - 0.32, "yanchor": "middle"},
                **{"text": labels[place], "showarrow": False, "align": "left", "xshift": 2},
            }
        )
    shapes = [{"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}] if zero else []
    rail = {"range": [len(rows) - 0.45, -0.6], "visible": False, "fixedrange": True}
    layout = {
        "xaxis": x,
        "yaxis": rail,
        "height": 80 + (ROW + 22 * (most_lines - 1)) * len(rows),
    }
    if points < everything.size:
        caption += f" Of {everything.size:,} points {points:,} are drawn, evenly spread from lowest to highest."
    layout |= {"annotations": annotations, "shapes": shapes, "margin": {"l": 8, "r": 20, "t": 12, "b": 44}}
    figure = _figure(data, layout)
    return Chart(title, caption, f"Points, one for each {each}. {'; '.join(told) or 'No known value'}.", figure)


# --- points -------------------------------------------------------------------------------------------------------


SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")  # so that a colour need not be seen


def against(
    title: str,
    caption: str,
    x: dict[str, Any],
    y: dict[str, Any],
    groups: dict[str, NDArray[np.bool_]],
    theirs: Floats,
    ours: Floats,
    hover: Sequence[str],
    near: float,
) -> Chart:
    """Draw two values [N] of the same things against each other, coloured by group, with the lines of up to `near`."""
    data = _grouped(groups, theirs, ours, hover)
    ends = [float(f"{end:.6g}") for end in (min(theirs.min(), ours.min()), max(theirs.max(), ours.max()))]
    room = 0.04 * (ends[1] - ends[0] or 1.0)
    low, high = ends[0] - room, ends[1] + room
    shapes = [
        {
            "type": "line",
            "x0": low,
            "x1": high,
            "y0": low + shift,
            "y1": high + shift,
            "layer": "below",
            "line": {"dash": dash},
        }
        for shift, dash in ((0.0, "solid"), (near, "dot"), (-near, "dot"))
    ]
    layout = {
        "xaxis": x | {"range": [low, high]},
        "yaxis": y | {"range": [low, high]},
        **{"height": 520, "showlegend": True, "shapes": shapes, "legend": BELOW},
    }
    gap = ours - theirs
    told = (
        f"{len(ours)} points: ours is higher for {int((gap > 0).sum())} and lower for {int((gap < 0).sum())}; "
        f"{int((np.abs(gap) <= near).sum())} differ by at most {near:g}. Differences are from {gap.min():+.4g} to "
        f"{gap.max():+.4g}, their median {float(np.median(gap)):+.4g}."
    )
    return Chart(title, caption, told, _figure(data, layout))


def scatter(
    title: str, caption: str, marks: Sequence[str], flat: Floats, hover: Sequence[str], size: float = 6
) -> Chart:
    """Draw points (N, 2) in a plane whose axes have no meaning of their own, coloured by what they are marked with."""
    labels = sorted(set(marks), key=natural)
    named = np.array(marks)
    data = _grouped({label: named == label for label in labels}, flat[:, 0], flat[:, 1], hover, size)
    bare = {"showticklabels": False, "zeroline": False}
    few = 1 < len(labels) <= 2 * HUES
    layout = {
        "xaxis": axis("first component", **bare),
        "yaxis": axis("second component", **bare, scaleanchor="x"),
        **{"height": 440, "showlegend": few, "legend": BELOW | {"y": -0.1}},
    }
    middles = np.stack([flat[named == label].mean(0) for label in labels])
    spread = float(np.sqrt(np.square(flat - middles[[labels.index(m) for m in marks]]).sum(1).mean()))
    apart = float(np.sqrt(np.square(middles - flat.mean(0)).sum(1).mean()))
    told = f"{len(flat):,} points in {len(labels)} groups: {listed([short(label) for label in labels], 20)}"
    told += f". The groups' middles are {apart:.3g} from the middle of all; points are {spread:.3g} from their own."
    return Chart(title, caption, told, _figure(data, layout), wide=False)


def _grouped(
    groups: dict[str, NDArray[np.bool_]], x: Floats, y: Floats, hover: Sequence[str], size: float = 8
) -> list[dict[str, Any]]:
    """Return points [N], a trace for each group with a colour and a symbol of its own."""
    return [
        {
            **{"x": numbers(x[own]), "y": numbers(y[own]), "mode": "markers", "name": plain(name)},
            "customdata": [text for text, there in zip(hover, own, strict=True) if there],
            "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {"size": size, "opacity": 0.8, "symbol": SYMBOLS[(place + place // HUES) % len(SYMBOLS)]},
            "meta": {"colour": place % HUES},
        }
        for place, (name, own) in enumerate(groups.items())
    ]


# --- a partition ---------------------------------------------------------------------------------------------------


def bubbles(title: str, caption: str, names: Sequence[str], counts: Sequence[dict[str, int]]) -> Chart:
    """Draw one bubble for each client and class, its area proportional to the rows; `counts` has them by client."""
    found = [(i, label, n) for i, own in enumerate(counts) for label, n in own.items() if n]
    classes = sorted({label for _, label, _ in found}, key=natural)
    if (total := len(found)) > MOST:
        found = sorted(found, key=lambda each: -each[2])[:MOST]
        caption += f" Of {total:,} bubbles the {MOST:,} largest are drawn."
    largest = max((n for *_, n in found), default=1)
    place = {label: i for i, label in enumerate(classes)}
    height = int(np.clip(26 * len(classes), 220, 620))
    size = float(np.clip(min(900 / max(1, len(counts)), height / max(1, len(classes))), 5, 34))
    data = {
        "x": [i for i, *_ in found],
        "y": [place[label] for _, label, _ in found],
        "customdata": [f"{wrapped(names[i])}<br>class {plain(label)}: {n:,} rows" for i, label, n in found],
        "hovertemplate": "%{customdata}<extra></extra>",
        "mode": "markers",
        "marker": {
            **{"size": [n for *_, n in found], "sizemode": "area", "sizeref": 2 * largest / size**2},
            **{"opacity": 0.75, "line": {"width": 0}},
        },
        "meta": {"colour": 0},
    }
    ticks = thinned(len(classes), 20).tolist() if classes else []
    layout = {
        "xaxis": whole("client", len(counts)) | {"range": [-0.9, len(counts) - 0.1]},
        "yaxis": axis("class", tickvals=ticks, ticktext=[plain(classes[i], 16) for i in ticks])
        | {"range": [-0.9, len(classes) - 0.1]},
        "height": height + 70,
    }
    each = [sum(1 for n in own.values() if n) for own in counts]
    told = (
        f"Bubbles for {len(counts)} clients and {len(classes)} classes. A client has {min(each, default=0)} to "
        f"{max(each, default=0)} classes; the largest bubble stands for {largest:,} rows."
    )
    return Chart(title, f"{caption} The largest bubble stands for {largest:,} rows.", told, _figure([data], layout))


def sizes(title: str, caption: str, names: Sequence[str], rows: dict[str, Sequence[int]]) -> Chart:
    """Draw the rows of every client, stacked by split, the largest client first; `rows` is [M] by split."""
    totals = np.sum([list(own) for own in rows.values()], axis=0)
    order = np.argsort(-totals, kind="stable")
    if len(order) * len(rows) > MOST:
        keep = thinned(len(order), MOST // len(rows))
        caption += f" Of {len(order):,} clients {len(keep):,} are drawn, evenly spread by size."
        order = order[keep]
    data = [
        {
            **{"type": "bar", "x": list(range(len(order))), "y": [int(own[i]) for i in order], "name": split},
            "customdata": [f"{wrapped(names[i])}<br>{own[i]:,} {split} rows of {int(totals[i]):,}" for i in order],
            "hovertemplate": "%{customdata}<extra></extra>",
            "meta": {"colour": place},
            "marker": {"line": {"width": 0}},
        }
        for place, (split, own) in enumerate(rows.items())
    ]
    layout = {
        "xaxis": axis("clients, the largest first", showticklabels=False, showgrid=False),
        "yaxis": axis("rows"),
        **{"barmode": "stack", "bargap": 0.1, "height": 320, "showlegend": True},
        "legend": {"orientation": "h", "y": 1.12, "traceorder": "normal"},
    }
    told = f"Bars of the rows of {len(names)} clients: {int(totals.min())} to {int(totals.max())}, "
    return Chart(title, caption, f"{told}median {float(np.median(totals)):g}.", _figure(data, layout))


def _figure(data: list[dict[str, Any]], layout: dict[str, Any]) -> dict[str, Any]:
    """Return what plotly draws; it has a legend only if the layout says so."""
    return {"data": data, "layout": {"hovermode": "closest", "showlegend": False} | layout}
