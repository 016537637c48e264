"""A report in the browser: the size of its file, the seconds to write it, and those until its first chart is drawn.

Two reports, that of ``bespoke demo`` and one of 40 runs with 100 clients and 200 rounds, evaluated in every tenth, are
opened in Chromium without a screen, in turns with a page that holds plotly's script as it is shipped and a tiny chart.
Seconds count from the navigation to the first line or point in the page; the figure is the median, and ``ratio`` is
that to the tiny page's, which a busy machine changes less. Run with ``python benchmarks/report_page.py``; it writes
``report_page.json`` beside itself and exits with 1 if the demo's first chart is above its bar. ``--demo FOLDER`` takes
runs that are there instead of making them.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import report

from bespoke.records import CLIENTS, ROUNDS, TIMING, RunFolder
from bespoke.report.page import page_of, write
from bespoke.report.page.render import browser

REPEATS = 5
BAR = 2.0  # seconds to the demo's first chart
RUNS, PEOPLE, ROUNDS_EACH, EVERY = 40, 100, 200, 10
WATCH = """
new MutationObserver(() => {
  if (!window.first && document.querySelector(".scatterlayer .trace path, .scatterlayer .trace .point"))
    window.first = performance.now();
}).observe(document, { subtree: true, childList: true });
"""
TINY = '<!doctype html><div id="c"></div><script>{}</script><script>Plotly.newPlot("c", [{{ y: [1, 2, 3] }}])</script>'


def made(folder: Path, number: int) -> None:
    """Write a run by hand: every client's accuracy rises from round to round, and it logs a value."""
    folder.mkdir(parents=True)
    settings = f'seed = 0\n[algorithm]\nname = "method{number}"\n[data]\nname = "made"\n'
    (folder / "config.toml").write_text(f"{settings}[training]\nrounds = {ROUNDS_EACH}\n")
    run, everyone, drawn = RunFolder(folder), list(range(PEOPLE)), np.random.default_rng(number)
    told = {"clients": PEOPLE, "names": [f"client {i}" for i in everyone], "val": [0] * PEOPLE, "test": [50] * PEOPLE}
    counts = [{str(k): int(n) for k, n in enumerate(own)} for own in drawn.integers(0, 60, (PEOPLE, 10))]
    told |= {"train": [sum(own.values()) for own in counts], "class_counts": counts}
    run.write_json("federation.json", told)
    run.write_json("environment.json", {"device": "cpu"})
    rounds, lines = [], []
    for at in range(1, ROUNDS_EACH + 1):
        row: dict[str, Any] = {
            "round": at,
            "cohort": everyone,
            "refused": {},
            "train_loss": 1 / at,
            "padding_waste": 0.0,
        }
        row |= {
            "bytes_down": 10**6,
            "bytes_up": 10**6,
            "host_breaks": 0,
            "logged": {"beta": drawn.random(PEOPLE).tolist()},
        }
        if at % EVERY == 0:
            row["evaluated"] = {"view": "personal", "metric": "accuracy", "higher": {"accuracy": True}}
            right = np.clip(drawn.normal(25 + at / 10, 5, PEOPLE), 0, 50).round()
            line: dict[str, Any] = {"round": at, "group": "train", "split": "test", "view": "personal", "total": 50}
            for client in everyone:
                scored = {"client": client, "metrics": {"accuracy": [float(right[client]), 50.0]}, "logged": {}}
                lines.append(line | scored)
        rounds.append(row)
    run.append(ROUNDS, rounds)
    run.append(CLIENTS, lines)
    phases = {"train": 0.5, "aggregate": 0.1, "evaluate": 0.1, "checkpoint": 0.0}
    run.append(TIMING, [{"round": at, **phases} for at in range(1, ROUNDS_EACH + 1)])


def first_charts(pages: dict[str, Path]) -> dict[str, list[float]]:
    """Return the seconds to each page's first chart, a list of repeats, with the pages in turns."""
    from playwright.sync_api import sync_playwright

    seconds: dict[str, list[float]] = {name: [] for name in pages}
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser(), args=["--no-sandbox", "--disable-gpu"])
        for _ in range(REPEATS):
            for name, path in pages.items():
                page = chromium.new_page(viewport={"width": 1200, "height": 900})
                page.add_init_script(WATCH)
                page.goto(path.resolve().as_uri())
                page.wait_for_function("window.first")
                seconds[name].append(page.evaluate("window.first") / 1000)
                page.close()
        chromium.close()
    return seconds


def main() -> None:
    """Measure the pages, and store the figures."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--demo", type=Path, help="a folder with the runs of bespoke demo")
    given = parser.parse_args()
    if browser() is None:
        raise SystemExit("this benchmark needs Chromium, and there is none here")
    with tempfile.TemporaryDirectory(prefix="bespoke-page-") as held:
        folder = Path(held)
        demo = given.demo or folder / "demo"
        if given.demo is None:
            words = ["demo", "--quiet", "--no-open", "--out", str(demo)]
            subprocess.run([sys.executable, "-m", "bespoke", *words], check=True)
        for number in range(RUNS):
            made(folder / "many" / f"run{number}", number)
        shipped = (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
        pages = {"tiny": folder / "tiny.html"}
        pages["tiny"].write_text(TINY.format(shipped), encoding="utf-8")
        written = {}
        for name, runs in (("demo", demo), ("many", folder / "many")):
            begin = time.perf_counter()
            pages[name] = write(page_of(runs), folder / f"{name}.html")
            written[name] = time.perf_counter() - begin
        busy, seconds = os.getloadavg()[0], first_charts(pages)
        middle = {name: statistics.median(own) for name, own in seconds.items()}
        cases = [
            {
                "case": {"tiny": "plotly alone, one tiny chart", "demo": "bespoke demo", "many": f"{RUNS} runs"}[name],
                "MB": path.stat().st_size / 1e6,
                "written_s": written.get(name),
                "first_chart_s": middle[name],
                "ratio": middle[name] / middle["tiny"],
                "bar_s": BAR if name == "demo" else None,
                "repeats": seconds[name],
            }
            for name, path in pages.items()
        ]
        print(report.table(cases))
        report.store(given.out, "cpu", load_before=busy, plotly_MB=len(shipped.encode()) / 1e6, cases=cases)
        if middle["demo"] > BAR:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
