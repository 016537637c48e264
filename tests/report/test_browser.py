"""A report in a real browser: Chromium without a screen, driven by playwright; skipped where either is missing."""

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
    page = chromium.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request", lambda asked: trouble.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None
    )
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn=all]")
    yield page, trouble
    page.close()


def test_every_chart_is_drawn_without_an_error_or_a_request(opened):
    page, trouble = opened
    charts = page.locator(".chart")
    assert charts.count() == page.locator(".chart .main-svg:first-child").count() >= 8
    assert page.locator("#partition .barlayer .point").count() >= 2  # a kind of chart that is set up when it is needed
    assert page.evaluate("'others' in Plotly") is False
    assert page.title() == "Report of 3 runs"  # no name was run as a script
    assert trouble == []


def test_other_kinds_of_charts_wait_until_the_first_one_is_there(chromium, report):
    """Setting them up takes longer than anything else: the first chart does not wait for it."""
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    page.add_init_script(
        "new MutationObserver(() => { if (document.querySelector('.chart .scatterlayer .trace') && !window.early)"
        " window.early = ['others' in Plotly, document.querySelectorAll('.chart .main-svg:first-child').length]; })"
        ".observe(document, {subtree: true, childList: true})"
    )
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn=all]")
    assert page.evaluate("window.early") == [True, 1]
    page.close()


def test_a_column_is_sorted_both_ways(opened):
    page, _ = opened
    head = page.locator("#comparison thead th").nth(1)
    cells = page.locator("#comparison tbody tr td:nth-child(2)")
    means = []
    for way in ("ascending", "descending"):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == way
        means.append([float(text.split()[0]) for text in cells.all_inner_texts()])
    assert means[0] == sorted(means[0]) == means[1][::-1] and len(set(means[0])) > 1


def test_hovering_over_a_point_names_the_client(opened):
    page, _ = opened
    chart = page.locator("#fairness .chart")
    chart.scroll_into_view_if_needed()
    found = set()
    for i in range(len(HOSTILE) + 2):
        box = chart.locator(".point").nth(i).bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
        page.wait_for_timeout(120)  # plotly answers a movement at most every 50 ms
        found.add(chart.locator(".hoverlayer").text_content())
    assert any(text.startswith("ann") for text in found)
    assert any(text.startswith("<script>document.title") for text in found), found
    labels = chart.locator(".annotation").all_text_contents()
    assert any("%{customdata}" in text for text in labels), labels
    assert chart.locator("a").count() == 0  # a link's tags are text too


def test_dark_changes_the_page_and_its_charts(opened):
    page, _ = opened

    def colours():
        text = "getComputedStyle(document.querySelector('#curves .xtick text')).fill"
        return page.evaluate(f"[getComputedStyle(document.documentElement).backgroundColor, {text}]")

    light = colours()
    page.locator("#theme").click()
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    dark = colours()
    assert light[0] != dark[0] and light[1] != dark[1]
    page.locator("#theme").click()
    assert colours() == light


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
    page = chromium.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn=all]")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    widest = page.evaluate("Math.max(...[...document.querySelectorAll('.chart svg')].map(s => s.clientWidth))")
    assert widest <= 360
    page.close()


def test_it_prints(report, tmp_path):
    printed = pdf(report, tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF") and printed.count(b"/Type /Page\n") >= 2
