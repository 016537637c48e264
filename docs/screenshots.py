"""Take the pictures of a report that README shows: `python docs/screenshots.py [FOLDER]`, with playwright and Chromium.

FOLDER holds the runs of `bespoke demo --out FOLDER`; without one the demonstration is run first.
"""

import os
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from bespoke.cli.demo import METHODS
from bespoke.files import write_atomic
from bespoke.report.page import page_of, write
from bespoke.report.page.render import browser

IMAGES = Path(__file__).parent / "images"
WIDTH = 1000  # pixels
LARGEST = 200_000  # bytes of a picture


def main() -> None:
    """Write the two pictures."""
    program = browser()
    if program is None:
        raise SystemExit("there is no Chromium to take pictures with: install it first")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else made)
        if folder == Path(made):
            subprocess.run([sys.executable, "-m", "bespoke", "demo", "--no-open", "--out", made], check=True)
        report = write(page_of([folder / name for name in METHODS]), Path(made) / "report.html")
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        with sync_playwright() as started:
            chromium = started.chromium.launch(executable_path=program, args=["--disable-gpu", *sandbox])
            take(chromium, report, "light", ("header", "#curves figure >> nth=0"), IMAGES / "report_light.png")
            take(chromium, report, "dark", ("#clients h2", "#clients figure >> nth=1"), IMAGES / "report_dark.png")
            chromium.close()


def take(chromium: Browser, report: Path, theme: str, ends: tuple[str, str], path: Path) -> None:
    """Write a picture of the page from the first element of `ends` down to the second."""
    page = chromium.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme=theme)
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn=all]")
    first, last = (page.locator(name).first.bounding_box() for name in ends)
    top, bottom = max(0, first["y"] - 12), last["y"] + last["height"] + 12
    area = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top}
    taken = Image.open(BytesIO(page.screenshot(full_page=True, clip=area)))
    page.close()
    sink = BytesIO()
    taken.convert("RGB").save(sink, "PNG", optimize=True)  # without the channel that says how opaque it is
    if len(sink.getvalue()) > LARGEST:
        raise SystemExit(f"{path.name} has {len(sink.getvalue()):,} bytes, more than {LARGEST:,}: show less")
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, sink.getvalue())
    print(f"{path}: {len(sink.getvalue()):,} bytes")


if __name__ == "__main__":
    main()
