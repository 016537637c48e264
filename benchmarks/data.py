"""How long the data takes: CIFAR10-S (ten corruptions, 30,000 images), its cached copy, and loading a stored set.

Run with ``python benchmarks/data.py``; it writes ``data.json`` beside itself and exits with 1 if a bar is missed.
Without CIFAR-10 in the data folder the images are random, and that is recorded. The corrupted images are stored
in a temporary folder. ``--sheet FILE.png`` draws the contact sheet of the documentation instead.
"""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import report

from bespoke.data import DataSettings, Examples, home, partitioned
from bespoke.data.images.cifar_s import assign, corrupted
from bespoke.data.images.corrupt import CORRUPTIONS, SEVERITIES, Pair, corrupt
from bespoke.data.sources import store

SECONDS, CACHED_SECONDS, LOAD_SECONDS, REDRAW_SECONDS, PEAK_GB = 60.0, 5.0, 1.0, 5.0, 2.0
SHOWN = (7, 4)  # rows of CIFAR-10 on the contact sheet: a horse and a car


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds and the result of a call."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def random_images() -> Examples:
    """Return 60,000 random colour images in ten classes."""
    draw = np.random.default_rng(0)
    return Examples(draw.integers(0, 256, (60_000, 3, 32, 32), dtype=np.uint8), np.arange(60_000) % 10, 10)


def sheet(path: Path) -> None:
    """Draw two images under every corruption at every severity."""
    from PIL import Image, ImageDraw, ImageFont

    x = store.load("cifar10").x[list(SHOWN)]
    cell, gap, left, top = 64, 6, 122, 20
    group = len(SHOWN) * cell + gap
    font = ImageFont.load_default(13)
    page = Image.new("RGB", (left + (1 + SEVERITIES) * group, top + len(CORRUPTIONS) * (cell + gap)), "white")
    pen = ImageDraw.Draw(page)
    for s in range(1 + SEVERITIES):
        pen.text((left + s * group, 3), f"severity {s}" if s else "clean", "black", font)
    for i, (name, corruption) in enumerate(CORRUPTIONS.items()):
        y = top + i * (cell + gap)
        pen.text((6, y + cell // 2 - 8), corruption.label, "black", font)
        for s in range(1 + SEVERITIES):
            found = corrupt(x, Pair(name, s), SHOWN) if s else x
            for j, image in enumerate(found):
                tile = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
                page.paste(tile.resize((cell, cell), Image.Resampling.NEAREST), (left + s * group + j * cell, y))
    page.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB, {page.width} x {page.height}")


def measure(out: str) -> int:
    """Measure, print and store."""
    real = store.holds("cifar10")
    load_seconds, examples = timed(lambda: store.load("cifar10") if real else random_images())
    settings = DataSettings(corrupt="cifar_s", corrupt_clients="all")
    lists = np.array_split(np.random.default_rng(1).permutation(60_000)[:30_000], 50)
    pairs = assign(settings, 50)
    before = str(home.root())
    with tempfile.TemporaryDirectory() as folder:
        os.environ[home.VARIABLE] = folder
        made_seconds, made = timed(lambda: corrupted(examples.x, lists, pairs))
        cached_seconds, again = timed(lambda: corrupted(examples.x, lists, pairs))
    os.environ[home.VARIABLE] = before
    assert np.array_equal(made, again)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    hard = DataSettings(name="gaussian", rows=60_000, dim=1, partition="dirichlet", clients=100, alpha=0.1, min_rows=63)
    draws = [timed(lambda seed=seed: partitioned(hard, seed)[1].tries) for seed in range(3)]
    slowest, tries = max(draws)
    rows = [
        ("CIFAR10-S, 30,000 images, made", made_seconds, SECONDS, "s"),
        ("CIFAR10-S, 30,000 images, from the cache", cached_seconds, CACHED_SECONDS, "s"),
        ("peak memory", peak, PEAK_GB, "GB"),
        (f"Dir(0.1), 100 clients, slowest of three seeds ({tries:,} tries)", slowest, REDRAW_SECONDS, "s"),
    ]
    if real:
        read_seconds, _ = timed(lambda: np.array(store.load("cifar10").x))
        rows.append(("stored CIFAR-10, loaded (memory-mapped)", load_seconds, LOAD_SECONDS, "s"))
        rows.append(("stored CIFAR-10, loaded and read whole", read_seconds, LOAD_SECONDS, "s"))
    cases = [{"case": name, "value": value, "bar": bar, "unit": unit} for name, value, bar, unit in rows]
    print(report.table(cases))
    about = {"numpy": np.__version__, "images": "CIFAR-10" if real else "random"}
    report.store(out, "cpu", **about, cases=cases)
    return int(any(value > bar for _, value, bar, _ in rows))


def main() -> int:
    """Run the benchmark, or draw the contact sheet."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--sheet", type=Path, help="draw the contact sheet to this .png instead")
    chosen = parser.parse_args()
    if chosen.sheet is None:
        return measure(chosen.out)
    sheet(chosen.sheet)
    return 0


if __name__ == "__main__":
    sys.exit(main())
