"""The page's colours can be told apart, and seen on their paper, also by people who see fewer colours."""

import itertools
import re
from importlib import resources

import numpy as np
import pytest

from bespoke.report.charts import COLOURS

SIGHTS = {  # linear RGB as seen without one kind of cones (Machado, Oliveira and Fernandes, 2009, severity 1)
    "all": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def themes():
    """The colours of each theme, by name; the dark one changes some of the light one's."""
    text = (resources.files("bespoke.report.page") / "page.css").read_text()
    light, dark = (
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root[^}]*}", text)[:2]
    )
    return {"light": light, "dark": light | dark}


def linear(colour):
    shares = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """Coordinates in which distances are about as large as they look: CIE L*a*b*."""
    x, y, z = np.cbrt(np.maximum(TO_XYZ @ rgb / np.array([0.9505, 1.0, 1.089]), 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_differ_for_every_sight_and_from_the_paper(theme):
    own = themes()[theme]
    hues = [own[f"c{i}"] for i in range(len(COLOURS))]
    for name, sight in SIGHTS.items():
        seen = [lab(np.clip(np.array(sight) @ linear(hue), 0, 1)) for hue in hues]
        for (i, a), (j, b) in itertools.combinations(enumerate(seen), 2):
            assert np.linalg.norm(a - b) > 15, (name, hues[i], hues[j])
    paper, *lights = (0.05 + float(TO_XYZ[1] @ linear(colour)) for colour in (own["paper"], *hues))
    assert all(max(paper, each) / min(paper, each) > 2 for each in lights)
