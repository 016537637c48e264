"""The papers' bubble chart of a federation: how many rows of each class every client has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError
from bespoke.report.charts import DOTS, GREY, INK, check_path, new_axes, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AREA = 190.0  # points squared of the largest bubble at the widest spacing


def bubble_chart(counts: NDArray[np.int64], path: str | os.PathLike[str], title: str, subtitle: str) -> Path:
    """Draw one bubble per client and class, its area proportional to the rows; return `path`.

    `counts` is [clients, classes].
    """
    check_path(path)
    clients, classes = counts.shape
    if not counts.any():
        raise UserError("no client has any rows, so there is nothing to draw")
    width, height = float(np.clip(0.13 * clients, 7.6, 16)), float(np.clip(0.3 * classes, 3.2, 9))
    figure, axes = new_axes(width, height, title, f"{subtitle} The largest bubble stands for {counts.max():,} rows.")
    draw_bubbles(axes, counts, width, height)
    return save(figure, path)


def draw_bubbles(axes: Axes, counts: NDArray[np.int64], width: float, height: float) -> None:
    """Draw counts [clients, classes], not all 0, on axes of about `width` times `height` inches."""
    from matplotlib.ticker import MaxNLocator

    clients, classes = counts.shape
    client, label = np.nonzero(counts)
    spacing = min((width - 1.2) / clients, (height - 1.4) / classes) * 72  # points between two bubbles
    area = min(AREA, (1.7 * spacing) ** 2) * counts[client, label] / counts.max()
    axes.scatter(client, label, s=area, color=DOTS, alpha=0.75, linewidths=0, clip_on=False)
    axes.set_xlim(-0.8, clients - 0.2)
    axes.set_ylim(-0.8, classes - 0.2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.set_xlabel("client", color=INK)
    axes.set_ylabel("class", color=INK)
    axes.tick_params(labelcolor=GREY)
    axes.grid(color="#eeeeee", linewidth=0.6)
