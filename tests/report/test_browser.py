"""A report in a real browser: Chromium without a screen, driven by playwright; skipped where either is missing."""

import shutil
from pathlib import Path

import pytest
from page_runs import HOSTILE, written

from bespoke.report.page import page_of, pdf, write
from bespoke.report.page.render import browser

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.skipif(browser() is None, reason="there is no Chromium"),
    pytest.mark.xdist_group("browser"),  # one browser for all of them
]
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """Three methods, one of them with two views; clients and methods have hostile names."""
    folder = tmp_path_factory.mktemp("browser")
    names = ("ann", "bob", *HOSTILE)
    written(folder / "a", "fedavg", names, shift=-1, class_counts=[{"0": 5, "1": 9}] * len(names))
    written(folder / "b", HOSTILE[1], names, before=True, shift=1)
    written(folder / "c", HOSTILE[0], names, logged={"beta": [0.5] * len(names)})
    return write(page_of(folder), folder / "report.html")


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=browser(), args=list(ARGUMENTS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def opened(chromium, report):
    """The report on a wide screen, with everything that the browser complained about or asked of a network."""
    page, trouble = shown(chromium, report)
    yield page, trouble
    page.close()


def shown(chromium, report, width=1200, theme="light"):
    """A report that is drawn, and a list of what the browser complains about or asks of a network."""
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request", lambda asked: trouble.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None
    )
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn=all]")
    return page, trouble


def sorted_means(page):
    """The means in the table of the comparison, sorted by clicking on their column twice."""
    head = page.locator("#comparison thead th").nth(1)
    cells = page.locator("#comparison tbody tr td:nth-child(2)")
    means = []
    for way in ("ascending", "descending"):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == way
        means.append([float(text.split()[0]) for text in cells.all_inner_texts()])
    return means


def hovered(page, count):
    """What the chart of the clients says when the mouse is over each of its first points."""
    chart = page.locator("#fairness .chart")
    found = set()
    for i in range(count):
        point = chart.locator(".point").nth(i)
        point.scroll_into_view_if_needed()
        box = point.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
        page.wait_for_timeout(120)  # plotly answers a movement at most every 50 ms
        found.add(chart.locator(".hoverlayer").text_content())
    return found


def colours(page):
    """The colours of the page and of a label in its first chart."""
    text = "getComputedStyle(document.querySelector('#curves .xtick text')).fill"
    return page.evaluate(f"[getComputedStyle(document.documentElement).backgroundColor, {text}]")


def widest(page):
    """The pixels that the page and its widest chart take."""
    charts = "Math.max(...[...document.querySelectorAll('.chart svg')].map(s => s.clientWidth))"
    return page.evaluate(f"Math.max(document.documentElement.scrollWidth, {charts})")


def test_every_chart_is_drawn_without_an_error_or_a_request(opened):
    page, trouble = opened
    charts = page.locator(".chart")
    assert charts.count() == page.locator(".chart .main-svg:first-child").count() >= 8
    assert page.title() == "Report of 3 runs"  # no name was run as a script
    assert trouble == []


def test_a_column_is_sorted_both_ways(opened):
    up, down = sorted_means(opened[0])
    assert up == sorted(up) == down[::-1] and len(set(up)) > 1


def test_hovering_over_a_point_names_the_client(opened):
    page, _ = opened
    found = hovered(page, len(HOSTILE) + 2)
    assert any(text.startswith("ann") for text in found)
    assert any(text.startswith("<script>document.title") for text in found), found
    chart = page.locator("#fairness .chart")
    labels = chart.locator(".annotation").all_text_contents()
    assert any("%{customdata}" in text for text in labels), labels
    assert chart.locator("a").count() == 0  # a link's tags are text too


def test_dark_changes_the_page_and_its_charts(opened):
    page, _ = opened
    light = colours(page)
    page.locator("#theme").click()
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    dark = colours(page)
    assert light[0] != dark[0] and light[1] != dark[1]
    page.locator("#theme").click()
    assert colours(page) == light


def test_a_method_is_hidden_everywhere(opened):
    page, _ = opened
    lines = page.locator("#curves .chart").first.locator(".scatterlayer .trace")
    before = lines.count()
    page.locator("#fairness .legend button").first.click()
    assert lines.count() == before - 1
    assert page.locator("#curves .legend button").first.get_attribute("aria-pressed") == "false"
    page.locator("#fairness .legend button").first.click()
    assert lines.count() == before


def test_a_phone_needs_no_sideways_scrolling(chromium, report):
    page, _ = shown(chromium, report, width=360, theme="dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert widest(page) <= 360
    page.close()


def test_it_prints(report, tmp_path):
    printed = pdf(report, tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF") and printed.count(b"/Type /Page\n") >= 2


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A report of 40 runs with 100 clients and 200 rounds each, of which ten are evaluated."""
    return write(
        page_of(forty_runs(tmp_path_factory.mktemp("large"), every=20)), tmp_path_factory.mktemp("a") / "b.html"
    )


def forty_runs(folder: Path, every: int) -> Path:
    """Runs of 40 methods; five are written, the others are copies under another name."""
    names = tuple(f"clinic {i}" for i in range(100))
    counts = [{str(i % 10): 30, str(i % 7): 9} for i in range(100)]
    for i in range(40):
        path = folder / f"{i:02}"
        if i < 5:
            written(
                path, f"method {i}", names, rounds=200, every=every, shift=i - 5, before=i == 4, class_counts=counts
            )
        else:
            shutil.copytree(folder / f"{i % 5:02}", path)
            told = (path / "config.toml").read_text()
            (path / "config.toml").write_text(told.replace(f'"method {i % 5}"', f'"method {i}"'))
    return folder


def goes_well(chromium, report, runs, client):
    """A report of so many runs is read on a phone, sorted, hovered over, darkened and printed."""
    page, trouble = shown(chromium, report, width=360)
    assert page.title() == f"Report of {runs} runs"
    assert page.locator(".chart").count() == page.locator(".chart .main-svg:first-child").count() >= 8
    assert widest(page) <= 360
    up, down = sorted_means(page)
    assert len(up) == runs and up == sorted(up) == down[::-1] and len(set(up)) > 1
    assert all(text.startswith(client) for text in hovered(page, 2))
    light = colours(page)
    page.locator("#theme").click()
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    assert all(a != b for a, b in zip(light, colours(page), strict=True))
    printed = page.pdf()
    assert printed.startswith(b"%PDF") and printed.count(b"/Type /Page\n") >= 2
    assert trouble == []
    page.close()


def test_the_demonstrations_report(chromium, demonstrated):
    goes_well(chromium, demonstrated[1] / "report.html", 8, "client ")


def test_a_report_of_forty_runs(chromium, large):
    goes_well(chromium, large, 40, "clinic ")


@pytest.mark.slow
def test_a_report_of_forty_runs_that_evaluate_every_round(chromium, tmp_path):
    report = write(page_of(forty_runs(tmp_path / "runs", every=1)), tmp_path / "report.html")
    assert report.stat().st_size < 12e6
    goes_well(chromium, report, 40, "clinic ")
