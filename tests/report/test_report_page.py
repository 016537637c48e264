"""A page about runs: what it shows, as values and as one HTML file."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from page_runs import HOSTILE, written
from small_runs import command

from bespoke import UserError
from bespoke.errors import distinct, short
from bespoke.report import compare
from bespoke.report.page import html, page_of, render
from bespoke.report.page.figures import (
    DASHES,
    MOST,
    Line,
    Strip,
    axis,
    bubbles,
    lines,
    numbers,
    plain,
    sizes,
    strips,
    thinned,
)
from bespoke.report.page.parts import Chart, Page, Section
from bespoke.report.summary import often_refused


def section(page, name):
    return next(each for each in page.sections if each.name == name)


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two methods with two views, class counts, conditions, logged values and a refused client."""
    folder = tmp_path_factory.mktemp("two")
    told = {
        "class_counts": [{"0": 10 * (i + 1), "7": 3} for i in range(6)],
        "conditions": ["clean", "fog:3", "clean", "fog:5", "clean", "clean"],
    }
    logged = {"beta": [0.1, 0.9, 0.2, 0.8, None, 0.3], "bytes_up": [1.0] * 6}
    written(folder / "a", "fedavg", shift=-1, refused={"4": "it holds NaN"}, **told)
    written(folder / "b", "pfedfda", before=True, logged=logged, note="ran in the loop", **told)
    return page_of(folder), compare(folder)


def test_the_table_is_that_of_compare(two):
    page, comparison = two
    (table,) = section(page, "comparison").tables
    _, rows = comparison.cells()
    shown = {cells[0]: cells for cells in texts(table)}
    for method, mean, pooled, worst, sent, seconds, difference in rows:
        cells = shown[method]
        assert [*cells[:4], *cells[5:8]] == [method, mean, pooled, worst, sent, seconds, difference]
    values = {row.label: row for row in comparison.rows}
    cv = float(np.std(values["fedavg"].values) / np.mean(values["fedavg"].values))  # the clients are of one size
    assert float(shown["fedavg"][4]) == pytest.approx(cv, abs=1e-3)
    assert "[95 %] over clients" in table.caption


def test_lines_go_by_rounds_bytes_and_seconds(two):
    charts = section(two[0], "curves").charts
    own = [[trace for trace in chart.figure["data"] if trace["meta"]["method"] == 0][-1] for chart in charts]
    assert [trace["x"] for trace in own] == [[1, 2, 3, 4], [12e3, 24e3, 36e3, 48e3], [0.75, 1.5, 2.25, 3.0]]
    assert own[0]["y"] == own[1]["y"] == own[2]["y"]
    assert own[0]["y"][-1] == pytest.approx(100 * two[1].rows[0].mean.mean, abs=1e-3)
    assert "fedavg from" in charts[0].alternative


def test_clients_before_and_after(two):
    """Of pfedfda, client i loses two rows and gains i by personalisation; against fedavg each gains one."""
    personal, paired = section(two[0], "clients").charts
    (points, _) = personal.figure["data"]
    hover = {text.split("<br>")[0]: x for text, x in zip(points["customdata"], points["x"], strict=True)}
    assert hover["ann"] == -20 and hover["dan"] == 10 and hover["cyd"] == 0
    assert {x for x in paired.figure["data"][0]["x"]} == {10}
    tables = section(two[0], "clients").tables
    assert texts(tables[0]) == [["pfedfda", "3", "1", "2", "+5.0", "fay: +30.0", "ann: -20.0"]]
    assert texts(tables[1]) == [["pfedfda", "6", "0", "0", "+10.0", "ann: +10.0", "ann: +10.0"]]


def test_who_is_in_no_chart_of_gains_is_named_with_the_reason(two, tmp_path):
    personal, paired = section(two[0], "clients").charts
    why = "no value of a shared model was recorded beside the personal one's"
    assert personal.caption.endswith(f"The thick line is the mean. Not drawn: fedavg ({why}).")
    assert paired.caption.endswith("The thick line is the mean.")  # who is compared with itself is no news
    written(tmp_path / "a", before=True)
    written(tmp_path / "b", "ditto", seed=1, before=True)
    shown = section(page_of(tmp_path), "clients")
    assert [chart.title for chart in shown.charts] == ["Gain by personalisation"] and shown.legend
    assert shown.paragraphs == (
        ("Gain over fedavg is not drawn: not the same seeds, clients and test rows as fedavg.",),
    )
    shown = section(page_of(tmp_path / "a", view="global"), "clients")
    said = "Gain by personalisation is not drawn: what is compared is the shared model itself."
    assert shown.paragraphs == ((said,),) and not shown.legend


def test_the_worst_tenth_is_named(two):
    (table,) = section(two[0], "fairness").tables
    assert texts(table)[0] == ["fedavg", "50.0", "ann: 50.0"]


def test_partition_logged_values_and_warnings(two):
    page = two[0]
    classes, rows = section(page, "partition").charts
    assert "ann<br>class 0: 10 rows" in classes.figure["data"][0]["customdata"]
    assert len(classes.figure["data"][0]["x"]) == 12
    assert [trace["name"] for trace in rows.figure["data"]] == ["train", "test"]
    by_round, last = section(page, "logged").charts  # of beta alone: bytes are no logged value
    medians = {trace["name"]: trace["y"] for trace in by_round.figure["data"] if "name" in trace}
    assert medians == {"pfedfda, clean": [0.2] * 4, "pfedfda, fog": [0.85] * 4}
    assert sorted(last.figure["data"][2]["customdata"])[0].startswith("bob<br>round 4")
    assert "fedavg: eve was refused 4 times: it holds NaN" in page.warnings
    assert "pfedfda: ran in the loop" in page.warnings
    assert "device: cpu" in section(page, "setup").details[0].text


def test_values_that_overflow_are_left_out_without_a_warning(tmp_path):
    """Their spread and their sum are beyond any number; the values themselves are drawn. Warnings are errors here."""
    written(tmp_path / "a", logged={"beta": [1e308, -1e308, 1.7e308, 1e308, None, 0.0]})
    written(tmp_path / "b", "ditto", logged={"gamma": [1e308] * 6})
    charts = {chart.title: chart for chart in section(page_of(tmp_path), "logged").charts}
    points, mean = charts["beta of every client"].figure["data"]
    assert sorted(points["x"]) == [-1e308, 0.0, 1e308, 1e308, 1.7e308] and mean["x"] == [None, None]
    assert mean["hovertemplate"].startswith("mean inf")
    assert charts["gamma by round"].figure["data"][-1]["y"] == [1e308] * 4
    html(page_of(tmp_path))


@pytest.mark.parametrize("told", [[], {"notes": [{"a": 1}]}, {"notes": "a note"}, {"notes": None}])
def test_an_environment_that_is_none_is_refused(tmp_path, told):
    written(tmp_path / "a").write_json("environment.json", told)
    with pytest.raises(UserError, match=r"^[^\n]+environment.json is damaged; restore it or run the experiment again$"):
        page_of(tmp_path)


@pytest.mark.parametrize("told", [{}, {"conditions": ["clean", "fog:3"] * 3}])
def test_a_methods_colour_does_not_depend_on_the_order_of_the_runs(tmp_path, told):
    names = ["pfedfda", "fedavg", "apfl", "ditto"]
    for name in names:
        written(tmp_path / name, name, before=True, logged={"beta": [0.1] * 6}, **told)

    def colours(order):
        page = page_of([tmp_path / name for name in order])
        assert page.methods == tuple(sorted(names))  # the places whose colours the legend shows
        sections = [each for each in page.sections if each.legend or each.name == "logged"]
        traces = [(each.name, trace) for each in sections for chart in each.charts for trace in chart.figure["data"]]
        return {(name, trace["name"], trace["meta"]["colour"]) for name, trace in traces if "name" in trace}

    found = colours(names)
    assert found == colours(names[::-1])
    assert {name for name, *_ in found} == {"curves", "clients", "fairness", "logged"}
    of_methods = {(name, colour) for _, name, colour in found if name in names}
    assert of_methods == {(name, place) for place, name in enumerate(sorted(names))}


def test_one_evaluated_round_is_no_curve(tmp_path):
    """Nor is a value that was logged in one round."""
    written(tmp_path / "a", rounds=1, logged={"beta": [0.5, 0.25]})
    written(tmp_path / "b", "ditto", every=4)
    page = page_of(tmp_path)
    curves, logged = section(page, "curves"), section(page, "logged")
    assert curves.charts == () and not curves.legend
    assert "No method has two evaluated rounds, so there is no curve to draw" in curves.paragraphs[0][0]
    assert "<code>[evaluation] every</code>" in html(page)
    assert [chart.title for chart in logged.charts] == ["beta of every client"]


def test_one_evaluated_round_beside_curves_is_a_point_that_is_seen(tmp_path):
    written(tmp_path / "a")
    written(tmp_path / "b", "ditto", every=4)
    for chart in section(page_of(tmp_path), "curves").charts:
        assert chart.caption.endswith("With one value each, and so a point: ditto.")
        sizes = {trace["name"]: trace["marker"]["size"] for trace in chart.figure["data"]}
        assert sizes["ditto"] > 2 * sizes["fedavg"]


def test_forty_lines_differ_and_the_legend_shows_how():
    x = np.arange(3.0)
    chart = lines("a", "b.", axis("x"), axis("y"), [Line(f"m{i}", i, i, x, x) for i in range(40)])
    looks = [(trace["meta"]["colour"], trace["line"]["dash"]) for trace in chart.figure["data"]]
    assert len(set(looks)) == 40
    text = html(
        Page("page", "", tuple(f"m{i}" for i in range(40)), (), (Section("a", "A", charts=(chart,), legend=True),))
    )
    keys = re.findall(r'stroke: var\(--c(\d)\)" stroke-width="3" stroke-dasharray="([^"]*)"', text)
    assert [(int(colour), dash) for colour, dash in keys] == [(colour, DASHES[dash]) for colour, dash in looks]


def test_each_refusal_is_named_once(tmp_path):
    """By client; the run's own notes at its end and the comparison's sum would say it again."""
    run = written(tmp_path / "run", refused={"4": "it holds NaN"})
    environment = run.read_json("environment.json")
    notes = [*often_refused(run.rounds(), run.federation()["names"]), "the disk is slow"]
    assert notes[0] == "4 of 4 uploads of eve were refused: it holds NaN"
    run.write_json("environment.json", environment | {"notes": notes})
    assert page_of(run.path).warnings == (
        "fedavg: eve was refused 4 times: it holds NaN",
        "fedavg: the disk is slow",
    )
    (run.path / "federation.json").unlink()  # then nobody knows whom the note means
    assert page_of(run.path).warnings[0] == "fedavg: client 4 was refused 4 times: it holds NaN"


def test_a_run_that_has_less_shows_what_it_has(tmp_path):
    run = written(tmp_path / "run")
    page = page_of(run.path)
    assert [each.name for each in page.sections] == [
        *("comparison", "curves", "clients", "fairness", "partition", "setup")
    ]
    assert section(page, "clients").charts == ()
    assert [chart.title for chart in section(page, "partition").charts] == ["Rows of every client"]
    for name in ("federation.json", "environment.json", "timing.jsonl"):
        (run.path / name).unlink()
    page = page_of(run.path)
    assert [each.name for each in page.sections] == ["comparison", "curves", "clients", "fairness", "setup"]
    assert len(section(page, "curves").charts) == 2
    assert texts(section(page, "fairness").tables[0])[0][2] == "client 0: 60.0"


def test_clients_of_several_seeds_are_told_apart(tmp_path):
    for seed in (0, 1):
        written(tmp_path / str(seed), seed=seed)
    page = page_of(tmp_path)
    (chart,) = section(page, "fairness").charts
    assert {text.split("<br>")[0] for text in chart.figure["data"][0]["customdata"]} >= {"ann (seed 0)", "ann (seed 1)"}
    assert section(page, "curves").charts[0].figure["data"][0]["meta"]["part"] == "band"


class _Text(HTMLParser):
    """What a browser would show, and the elements that it would make."""

    def __init__(self):
        super().__init__()
        self.shown, self.tags, self.scripts, self.inside = [], [], [], ""

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        (self.scripts if self.inside else self.shown).append(data)


def test_hostile_names_are_text(tmp_path):
    for i, name in enumerate(HOSTILE):
        method = name.replace("\u202e", "")  # which TOML refuses unescaped
        written(tmp_path / f"<img src=x> {i}", method, HOSTILE, note=name, class_counts=[{name: 3}] * len(HOSTILE))
    text = html(page_of(tmp_path))
    parsed = _Text()
    parsed.feed(text)
    shown = "".join(parsed.shown)
    for name in HOSTILE:
        assert short(name) in shown, name
    assert "\u202e" not in shown and "n" * 400 not in text.replace(render._plotly(), "")
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("script") == 3 and "img" not in tags and "b" not in tags
    assert all(own.get("href", "#").startswith(("#", "data:")) for _, own in parsed.tags)
    assert not any(key.startswith("on") for _, own in parsed.tags for key in own)
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])
    drawn = [line for figure in figures for line in _strings(figure)]
    allowed = r"</?b>|<br>|<extra></extra>"
    assert any("&lt;script&gt;" in line for line in drawn)
    assert not any("%{" in re.sub(r"%\{(x|y|customdata|meta\.label)\}(?=$|:|,|<)", "", line) for line in drawn)
    assert not any("<" in re.sub(allowed, "", line) for line in drawn)


def test_a_figure_cannot_end_the_element_that_holds_it():
    chart = Chart("title", "", "", {"data": ["</script><script>"], "layout": {"height": 1}})
    text = html(Page("page", "", (), (), (Section("a", "A", charts=(chart,)),)))
    assert "</script><script>" not in text and text.count("</script>") == 3


def _strings(value):
    """Every text in a figure."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _plotly():
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def test_only_when_plotlys_other_charts_are_set_up_is_changed():
    """The script is the shipped one but for one call, which waits until it is asked for."""
    whole, (before, after) = _plotly(), render._plotly().split(".others=()=>")
    name = re.search(r"\w+$", before)[0]
    assert whole == before + after.removeprefix(name)
    assert after.startswith(f"{name}.register([")


def test_the_file_is_whole_and_small(two):
    text = html(two[0])
    assert len(text.encode()) < 6_000_000
    assert "default-src 'none'" in text and text.count("sha256-") == 2
    assert not re.search(r"(?:src|href)=[\"']?https?:", text.replace(render._plotly(), ""))


def test_many_points_are_thinned_and_the_caption_says_so():
    values = np.linspace(0, 1, MOST + 5)
    chart = strips("a", "b.", axis("x"), [Strip("m", 0, 0, values, ["client"] * len(values))])
    assert len(chart.figure["data"][0]["x"]) == MOST and "Of 20,005 points 20,000 are drawn" in chart.caption
    assert {0.0, 1.0} <= set(chart.figure["data"][0]["x"])
    drawn = [Line(str(i), i, i, values, values) for i in range(3)]
    chart = lines("a", "b.", axis("x"), axis("y"), drawn)
    assert sum(len(trace["x"]) for trace in chart.figure["data"]) <= MOST and "points" in chart.caption
    many = [{str(c): 1 + c for c in range(10)}] * 2_001
    chart = bubbles("a", "b.", ["x"] * 2_001, many)
    assert len(chart.figure["data"][0]["x"]) == MOST and "20,000 largest" in chart.caption
    chart = sizes("a", "b.", ["x"] * 30_000, {"train": [1] * 30_000, "test": [1] * 30_000})
    assert len(chart.figure["data"][0]["x"]) == MOST // 2 and "Of 30,000 clients" in chart.caption
    assert thinned(5, 3).tolist() == [0, 2, 4] and thinned(1, 9).tolist() == [0]
    assert numbers([1.23456789, np.nan]) == [1.23457, None]


def test_the_command_writes_the_page_and_needs_no_torch(tmp_path):
    written(tmp_path / "run")
    code = "import sys; sys.argv[1:] = ['report', 'run', '-o', 'page.html']; from bespoke.cli.main import main\n"
    code += "try: main()\nexcept SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "report: page.html\n" and (tmp_path / "page.html").stat().st_size > 4_000_000


def test_mistakes_are_told_before_anything_is_read(tmp_path, monkeypatch):
    out = str(tmp_path / "page.txt")
    assert "must end in .html" in command("report", "nowhere", "-o", out).sentence
    assert "there is no folder" in command("report", "nowhere", "-o", str(tmp_path / "no" / "page.html")).sentence
    page = str(tmp_path / "page.html")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no browser was found" in command("report", "no", "-o", page, "--pdf", str(tmp_path / "a.pdf")).sentence
    run = written(tmp_path / "run")
    (run.path / "environment.json").write_text("[]")
    with pytest.raises(UserError, match=r"environment\.json is damaged"):
        page_of(run.path)


def test_many_bands_are_left_out_and_the_caption_says_so():
    x = np.arange(3.0)
    for count, there in ((5, True), (6, False)):
        drawn = [Line(f"m{i}", i, i, x, x, x, x) for i in range(count)]
        chart = lines("a", "b.", axis("x"), axis("y"), drawn)
        assert any(trace["meta"].get("part") == "band" for trace in chart.figure["data"]) is there
        assert ("left out" in chart.caption) is not there


def test_a_formula_is_text_in_a_chart():
    assert plain("$a$ <b>") == "&#36;a&#36; &lt;b&gt;"


def test_one_run_is_compared_with_nobody(tmp_path):
    written(tmp_path / "a")
    (table,) = section(page_of(tmp_path / "a"), "comparison").tables
    assert table.header[-2:] == ("seconds", "seeds") and not any(cell.best for cell in table.rows[0])
    assert "Bold" not in table.caption


def test_what_clients_log_in_an_evaluation_is_drawn_too(tmp_path):
    """A client that never took part logs only there; of the others the newer value counts."""
    run = written(tmp_path / "a", logged={"beta": [0.5, 0.5]})  # of the first two clients of the cohort
    path = run.path / "clients.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    for row in rows:
        row["logged"] = {"beta": 0.25} if row["round"] == 4 and row["client"] in (1, 5) else {}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_round, last = section(page_of(tmp_path / "a"), "logged").charts
    points = dict(zip(last.figure["data"][0]["customdata"], last.figure["data"][0]["x"], strict=True))
    assert {text.partition("<br>")[0]: x for text, x in points.items()} == {"ann": 0.5, "bob": 0.25, "fay": 0.25}
    assert by_round.figure["data"][-1]["y"] == [0.5] * 4


@pytest.mark.parametrize(
    ("values", "wide"), [([1.0, 5.0, 9.0], False), ([1e-3, 1.0, 1e4], True), ([-1.0, 1e4, 0.1], False)]
)
def test_values_of_very_different_size_have_a_logarithmic_axis(tmp_path, values, wide):
    written(tmp_path / "a", names=("ann", "bob", "cyd"), logged={"precision": values})
    by_round, last = section(page_of(tmp_path / "a"), "logged").charts
    assert (last.figure["layout"]["xaxis"].get("type") == "log") is wide
    assert (by_round.figure["layout"]["yaxis"].get("type") == "log") is wide


def test_the_longer_of_runs_and_settings_goes_down_the_page(tmp_path):
    written(tmp_path / "a", "fedavg")
    written(tmp_path / "b", "ditto", seed=1, rounds=5)
    (few,) = section(page_of(tmp_path), "setup").tables
    assert few.header == ("run", "a", "b")
    assert ["training.rounds", "4", "5"] in texts(few)
    for i in range(9):
        written(tmp_path / f"more{i}", "fedavg", seed=i + 2)
    (many,) = section(page_of(tmp_path), "setup").tables
    assert many.header[0] == "run"
    assert {"a", "b"} < {row[0] for row in texts(many)}


def test_long_names_leave_room_for_the_rest(tmp_path):
    """Of a method in a table's first column and its head, and of a logged value along a vertical axis."""
    written(tmp_path / "a", "n" * 60, logged={"v" * 60: [0.5] * 6})
    written(tmp_path / "b", "ditto")
    page = page_of(tmp_path, baseline="n")
    (table,) = section(page, "comparison").tables
    assert len(max(table.header, key=len)) <= 40
    by_round, _ = section(page, "logged").charts
    assert len(by_round.figure["layout"]["yaxis"]["title"]["text"]) <= 28
    text = html(page)
    assert f'<th scope="row" class="long"><bdi dir="ltr">{"n" * 60}</bdi>' in text
    assert '<th scope="row"><bdi dir="ltr">ditto</bdi>' in text


# --- runs that are hard to tell apart, new clients, names of classes, wide ranges ------------------------------------


def test_runs_that_differ_late_in_a_long_label_are_told_apart(tmp_path):
    for i in range(4):
        run = written(tmp_path / str(i), "pfedfda", shift=i)
        settings = f'schedule = "{"cosine_with_restarts_" * 4}{i // 2}"\nlast = {i}\n'
        (run.path / "config.toml").write_text((run.path / "config.toml").read_text() + settings)
    page = page_of(tmp_path)
    (table,) = section(page, "comparison").tables
    names = [row[0] for row in texts(table)]
    assert len({*names}) == 4 and all(len(name) <= 80 for name in names)
    assert {*page.methods} == {*names} and all(f"last={i})" in names[i] for i in range(4))
    (differing,) = section(page, "setup").tables
    assert len({tuple(row[1:]) for row in texts(differing)}) == 4
    middle = "restarts_1"  # lies in the part that short labels leave out
    with pytest.raises(UserError, match="may mean"):
        page_of(tmp_path, baseline=middle)
    assert page_of(tmp_path, baseline="last=2").sections[0].tables[0].rows[2][-2].text == "baseline"


def test_labels_are_distinct_however_alike_they_are():
    alike = ["n" * 50 + str(i) + "m" * 200 for i in range(12)]
    found = distinct(["short", *alike])
    assert found["short"] == "short" and len({*found.values()}) == 13
    assert all(len(text) <= 80 for text in found.values())
    both = distinct(["n" * 90 + "1", "m" * 90 + "1", "n" * 90 + "2", "m" * 90 + "2", "n" * 200 + "1"])
    assert len({*both.values()}) == 5 and all(text[0] == name[0] for name, text in both.items())


def test_clients_with_long_names_are_told_apart(tmp_path):
    """In tables by both ends of their names, in charts by all of them."""
    names = (*(f"university hospital of the east, ward of cardiology {i}" for i in range(4)), "", "  ", "7")
    written(tmp_path / "a", "fedavg", names, logged={"beta": [0.1 * i for i in range(7)]})
    written(tmp_path / "b", "pfedfda", names, shift=1, before=True)
    page = page_of(tmp_path)
    (worst,) = section(page, "fairness").tables
    assert texts(worst)[0][2] == "university hospit…d of cardiology 0: 60.0"
    by_personalisation = section(page, "clients").tables[0]
    assert texts(by_personalisation)[0][-2:] == ["client 7: +40.0", "university hospit…d of cardiology 0: -20.0"]
    hover = section(page, "fairness").charts[0].figure["data"][0]["customdata"]
    assert f"{names[1]}<br><b>70.0 %</b> over 10 test rows" in hover
    assert {text.partition("<br>")[0] for text in hover} == {*names[:4], "client 4", "client 5", "client 7"}
    assert len(section(page, "logged").charts[-1].figure["data"][0]["x"]) == 7


def test_names_from_right_to_left_leave_numbers_in_order(tmp_path):
    names = ("בית חולים א", "بيمارستان", "ann", "می\u200cخواهم", "an\u200dn", "José\u200d")
    written(tmp_path / "a", "fedavg", names, refused={"1": "it holds NaN"})
    written(tmp_path / "b", "pfedfda", names, before=True)
    page = page_of(tmp_path)
    (worst,) = section(page, "fairness").tables
    assert texts(worst)[0][2] == "\u2068בית חולים א\u2069: 60.0"  # isolated, in the direction of its first letter
    assert "fedavg: \u2068بيمارستان\u2069 was refused 4 times: it holds NaN" in page.warnings
    hover = "".join(section(page, "fairness").charts[0].figure["data"][0]["customdata"])
    assert names[3] in hover  # a joiner belongs to the word
    assert r"an\u200dn" in hover and r"José\u200d" in hover  # and would only hide here


def test_a_run_that_is_not_finished_says_so(tmp_path):
    for name, wanted, more in (("done", 4, ""), ("killed", 9, ""), ("patient", 9, "[evaluation]\npatience = 1\n")):
        run = written(tmp_path / name, name)
        text = (run.path / "config.toml").read_text() + more
        (run.path / "config.toml").write_text(text.replace("rounds = 4", f"rounds = {wanted}"))
    said = "killed: only 4 of 9 rounds are there; finish it with --resume (resume=True in Python)"
    assert page_of(tmp_path).warnings == (said,)
    assert page_of(tmp_path, ended=False).warnings == ()  # it may still be going on


def test_runs_in_the_loop_beside_others_are_named(tmp_path):
    for name, backend in (("local", "loop"), ("fedavg", "batched"), ("ditto", "loop")):
        written(tmp_path / name, name).write_json("environment.json", {"backend": backend})
    said = "ran one client after another, so that seconds cannot be compared with the others': ditto, local"
    assert said in page_of(tmp_path).warnings
    assert page_of([tmp_path / "local", tmp_path / "ditto"]).warnings == ()


def test_charts_over_rounds_bytes_and_seconds_read_differently(two):
    told = [chart.alternative for chart in section(two[0], "curves").charts]
    assert "fedavg from 36.67 at round 1 to 66.67 at round 4" in told[0]
    assert "fedavg from 36.67 at 12.0 kB to 66.67 at 48.0 kB" in told[1]
    assert "fedavg from 36.67 at 0.75 s to 66.67 at 3 s" in told[2]


def test_new_clients_have_a_table_of_their_own(tmp_path):
    written(tmp_path / "a", "fedavg", new=2)
    written(tmp_path / "b", "pfedfda", new=2, shift=1)
    written(tmp_path / "c", "local")
    page = page_of(tmp_path)
    new = section(page, "new")
    assert texts(new.tables[0]) == texts(
        section(page_of([tmp_path / "a", tmp_path / "b"], group="new"), "comparison").tables[0]
    )
    assert "Without any: local." in new.paragraphs[0][0] and "new clients, held out" in new.tables[0].caption
    assert not [each for each in page_of(tmp_path / "c").sections if each.name == "new"]


def test_classes_have_the_names_that_the_data_give_them(tmp_path):
    counts = [{"0": 5, "1": 3, "7": 1, "9" * 5000: 0}] * 6  # a number that Python does not read
    written(tmp_path / "a", class_counts=counts, class_names=["<b>cat</b>", "dog"])
    chart = section(page_of(tmp_path), "partition").charts[0]
    assert chart.figure["layout"]["yaxis"]["ticktext"] == ["7", "&lt;b&gt;cat&lt;/b&gt;", "dog"]


def test_a_logarithmic_axis_has_few_ticks_whatever_its_range(tmp_path):
    for most, ticks in ((1e3, 1), (1e30, 4)):
        folder = tmp_path / f"{most:g}"
        written(folder, logged={"sigma": [1.0, 10.0, 100.0, 200.0, 300.0, most]})
        chart = section(page_of(folder), "logged").charts[-1]
        assert chart.figure["layout"]["xaxis"]["type"] == "log" and chart.figure["layout"]["xaxis"]["dtick"] == ticks
