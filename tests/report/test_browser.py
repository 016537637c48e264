"""A report in a real browser: Chromium without a screen, driven by playwright; skipped where either is missing."""

import shutil
import threading
import time
from pathlib import Path

import pytest
from page_runs import HOSTILE, begun, step, written

from bespoke.report.page import live, page_of, pdf, write
from bespoke.report.page.parts import Cell, Page, Section, Table
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


def until(page, condition):
    """Wait in Python: playwright's own way to ask again breaks the page's policy."""
    end = time.monotonic() + 20
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(20)


def test_every_chart_is_drawn_without_an_error_or_a_request(opened):
    page, trouble = opened
    charts = page.locator(".chart")
    assert charts.count() == page.locator(".chart .main-svg:first-child").count() >= 8
    assert page.locator("#partition .barlayer .point").count() >= 2  # a kind of chart that is set up when it is needed
    assert page.evaluate("'others' in Plotly") is False
    assert page.title() == "Report of 3 runs"  # no name was run as a script
    assert trouble == []


def test_no_button_of_a_chart_leads_elsewhere(opened):
    """Plotly's own set has one that uploads the chart."""
    page, trouble = opened
    windows: list[str] = []
    page.context.on("page", lambda opened: windows.append(opened.url))
    chart = page.locator("#fairness .chart")
    chart.hover()
    buttons = chart.locator(".modebar-btn")
    titles = [button.get_attribute("data-title") for button in buttons.all()]
    assert titles == ["Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"]
    for button in buttons.all()[1:]:  # the first writes a file
        button.click()
    assert "cloud" not in page.evaluate("document.querySelector('main').innerHTML")
    assert windows == [] and trouble == []


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
    up, down = sorted_means(opened[0])
    assert up == sorted(up) == down[::-1] and len(set(up)) > 1


def test_what_has_no_value_is_sorted_last_both_ways(chromium, tmp_path):
    rows = tuple((Cell(text or "none"), Cell(text)) for text in ("", "2", "-", "10"))
    section = Section("a", "A", tables=(Table(("b", "c"), rows),))
    page, _ = shown(chromium, write(Page("p", "", (), (), (section,)), tmp_path / "p.html"))
    found = []
    for _ in range(2):
        page.locator("thead button").nth(1).click()
        found.append(page.locator("tbody td").all_inner_texts()[:2])
    assert found == [["2", "10"], ["10", "2"]]
    page.close()


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


def test_charts_have_their_width_again_after_printing(opened):
    page, _ = opened
    widths = "[...document.querySelectorAll('.chart .main-svg:first-child')].map((svg) => svg.getAttribute('width'))"
    before = page.evaluate(widths)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert set(page.evaluate(widths)) == {"680"}
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    until(page, f"{widths}.join() === '{','.join(before)}'")


def test_what_is_folded_is_printed_unless_it_is_much(chromium, tmp_path):
    """Warnings always, and the settings of a few runs; on the screen they are folded as before."""
    unfolded = "[...document.querySelectorAll('details[open]')].map((each) => each.className).join(' ')"
    for count, printed in ((2, "warnings folded folded"), (7, "warnings")):
        for number in range(count):
            written(tmp_path / str(count) / str(number), f"method{number}", refused={str(i): "NaN" for i in range(4)})
        page, _ = shown(chromium, write(page_of(tmp_path / str(count)), tmp_path / f"{count}.html"))
        assert page.evaluate(unfolded) == ""
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate(unfolded) == printed
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate(unfolded) == ""
        page.close()


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


def test_a_live_page_changes_and_keeps_what_the_reader_did(chromium, tmp_path, monkeypatch):
    taken = threading.Event()
    monkeypatch.setattr(live, "REST", 0.0)
    monkeypatch.setattr(live, "SILENT", 30.0)
    sources = [written(tmp_path / "sources" / m, m, shift=s) for m, s in (("local", 0), ("fedavg", 2), ("ditto", -1))]
    runs = [begun(source, tmp_path / "runs" / source.path.name) for source in sources[:2]]
    page = chromium.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))

    def heights():
        texts = page.locator("#comparison tbody td:nth-child(2)").all_inner_texts()
        return [float(text.split()[0]) for text in texts]

    def follow_until(condition):
        until(page, f"{condition} && document.documentElement.dataset.drawn === 'all'")

    with live.Server(live.listen(0), live.Followed([tmp_path / "runs"])) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        page.goto(server.url)
        assert page.title() == "Waiting for an evaluated round"
        for source, run in zip(sources, runs, strict=False):
            step(source, run, 1)
        follow_until("document.querySelector('#curves')?.textContent.includes('no curve to draw')")
        assert page.title() == "Report of 2 runs"
        page.locator("#comparison thead button").nth(1).click()
        page.locator("#theme").click()
        page.locator("#setup summary").first.click()
        page.locator("#fairness .legend button", has_text="local").click()
        page.locator("nav a", has_text="Partition").click()
        chart = page.locator("#partition .chart")
        bar = chart.locator(".point").first.bounding_box()
        page.mouse.move(bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2, steps=3)
        until(
            page, "document.querySelector('#partition .hoverlayer').textContent.startsWith('fay')"
        )  # who has the most rows
        first, place = heights(), chart.bounding_box()
        line = page.locator("#live").bounding_box()
        assert line["y"] + line["height"] <= page.locator("#partition h2").bounding_box()["y"] < 200
        new = begun(sources[2], tmp_path / "runs" / "ditto")  # a new method comes first, in the order of the folders
        step(sources[2], new, 1)
        for source, run in zip(sources, [*runs, new], strict=True):
            step(source, run, 2)
        follow_until("document.querySelector('#curves .chart')?.data?.every((trace) => trace.x.length === 2)")
        assert len(heights()) == 3 and heights() == sorted(heights()) != first
        assert chart.bounding_box() == pytest.approx(place, abs=1)  # although there is more above it
        assert page.locator("#comparison th[aria-sort=ascending]").inner_text().startswith("mean")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert page.locator("#theme").inner_text() == "Light" and page.locator("#setup details[open]").count() == 1
        assert page.locator("#curves .legend [aria-pressed=false]").all_inner_texts() == ["local"]
        assert page.locator("#curves .chart").first.locator(".scatterlayer .trace").count() == 2
        assert chart.locator(".hoverlayer").text_content() == "fay65 train rows of 75"
        assert page.locator("#live").inner_text().startswith("live 0 of 3 runs have ended. Going on: ditto (2 of 4")
        monkeypatch.setattr(live.time, "sleep", taken.wait)  # until the page has the last state
        threading.Thread(target=server.end, daemon=True).start()
        page.wait_for_selector("#live.over")
        taken.set()
    assert page.locator("#live").inner_text().startswith("ended 3 of 3 runs have ended.")
    assert trouble == []
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


HIGHER = """
async () => {
  const given = figures.find((figure) => figure.layout.xaxis.title?.text.startsWith("bytes"));
  for (let highest = 105; highest < 107; highest += 0.02) {
    const box = document.body.appendChild(document.createElement("div"));
    const line = { ...dressed(given.data[0], 700), x: [0, 2e7], y: [0.35 * highest, highest] };
    await Plotly.newPlot(box, [line], layout(given, 700), config);
    Plotly.purge(box);
    box.remove();
  }
}
"""


def test_the_place_for_labels_does_not_change_which_there_are(chromium, demonstrated):
    """Plotly draws such a chart again and again: with room above the highest label, that label is gone."""
    page, trouble = shown(chromium, demonstrated[1] / "report.html")
    page.evaluate(HIGHER)
    assert trouble == []
    page.close()


def test_a_report_of_forty_runs(chromium, large):
    goes_well(chromium, large, 40, "clinic ")


@pytest.mark.slow
def test_a_report_of_forty_runs_that_evaluate_every_round(chromium, tmp_path):
    report = write(page_of(forty_runs(tmp_path / "runs", every=1)), tmp_path / "report.html")
    assert report.stat().st_size < 12e6
    goes_well(chromium, report, 40, "clinic ")
