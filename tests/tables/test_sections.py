"""What is said of one table: the same sections as a page for a browser and as Markdown."""

import json
import shlex

import paper_tables
import pytest

from bespoke.cli import main as cli
from bespoke.errors import UserError
from bespoke.report.page import html, markdown
from bespoke.report.page.parts import Code, Link
from bespoke.runs.experiment import load
from bespoke.tables import plan, readings, sections
from bespoke.tables.beside import Reader
from bespoke.tables.page import Page

TRIES = [("maker/easy", False)] * 3 + [("maker/easy", True), ("maker/hard", False)]


@pytest.fixture
def table(tmp_path):
    text = paper_tables.TABLE.replace('label = "Ditto"', 'label = "<b>Ditto"')
    table = paper_tables.make(tmp_path, text)
    root = tmp_path / "results"
    for row, value in {"fedavg": 62.0, "ditto": 74.0, "ours": 90.0}.items():
        paper_tables.put(root, table, f"easy/{row}", 0, value)
    paper_tables.put(root, table, "hard/ours", 2, 56.0)
    (root / "readings").mkdir()
    told = {"method": "pfedfda", "chosen_by": "maker/easy", "chosen": "the second"}
    tries = [{"column": column, "ablation": other} for column, other in TRIES]
    (root / "readings" / "pfedfda.json").write_text(json.dumps(told | {"tries": tries}))
    return table


@pytest.fixture
def root(tmp_path, table):
    return tmp_path / "results"


def page_of(table, root):
    return sections.page_of(str(table.path), root)


def test_both_renderings_have_the_same_words_and_numbers(table, root):
    page = page_of(table, root)
    text = html(page)
    for section in page.sections:
        lines = markdown.section_lines(section, lambda path: path.name)
        for row in (row for shown in section.tables for row in (*shown.rows, *shown.feet)):
            joined = "| " + " | ".join(markdown._cell(cell) for cell in row) + " |"
            assert joined in lines
            assert all(f">{cell.below}<" in text for cell in row if cell.below)
    for words in (
        "Ours: 3 tried on maker/easy, and 1 more to see what decides; chosen by its number there, and so used "
        "everywhere: the second",
        "90.0",
    ):
        assert words in text and words in "\n".join(
            line for s in page.sections for line in markdown.section_lines(s, str)
        )
    assert "&lt;b&gt;Ditto" in text and "<b>Ditto" not in text


def test_a_number_leads_to_the_command_that_makes_it(table, root):
    page = page_of(table, root)
    (cells,) = [row for row in page.sections[0].tables[0].rows if row[0].text == "Ours"]
    assert [cell.anchor for cell in cells] == ["", "cell-easy", "cell-hard", "cell-other", ""]
    found = {each.anchor: each.text for each in page.sections[-1].details}
    lines = found["cell-hard"].splitlines()
    (line,) = [line for line in lines if "--algorithm pfedfda" in line]
    words = shlex.split(line)
    given = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    experiment, _ = load(words[2], words[words.index("--algorithm") + 1], given, int(words[words.index("--seed") + 1]))
    assert experiment.hash() == plan.experiment_of(table.entry("hard/ours"), 2)[0].hash()
    assert str(table.path) in [each.title for each in page.sections[-1].details]
    links = [part for part in page.sections[-1].paragraphs[0] if isinstance(part, Link)]
    for link in links:
        assert link.path.is_dir() or found[link.anchor] == link.path.read_text()
    assert all(f'id="{anchor}"' in html(page) for anchor in found)


def test_a_cell_that_is_evaluated_again_or_starts_from_another_says_so(tmp_path):
    text = paper_tables.TABLE.replace('id = "hard"\n', 'id = "hard"\nevaluate = ["data.corrupt=fog:3"]\n')
    text = text.replace('id = "other"\n', 'id = "other"\nstart = "easy/ours"\n')
    table = paper_tables.make(tmp_path, text)
    numbers = {number.entry.id: number for number in Reader(tmp_path / "results").beside(table).numbers}
    *_, again = sections.commands(numbers["hard/ditto"])
    assert again == "bespoke evaluate runs/maker-t1-hard-ditto-0 --set data.corrupt=fog:3"
    assert (
        sections.commands(numbers["other/ditto"])[1] == "bespoke sweep maker/t1 --cells other --methods ditto --seeds 0"
    )


def test_charts_have_a_point_for_each_number_that_is_held_against_the_papers(table, root):
    beside, differs = page_of(table, root).sections[0].charts
    points = [text for trace in beside.figure["data"] for text in trace["customdata"]]
    assert len(points) == 4 and "Ours<br>Easy<br>published 76.3, ours 90: <b>+13.70</b>" in points
    assert "4 points: ours is higher for 3 and lower for 1; 3 differ by at most 2." in beside.alternative
    drawn = [text for trace in differs.figure["data"] if "customdata" in trace for text in trace["customdata"]]
    assert sorted(drawn) == sorted(points) and "Points, one for each number." in differs.alternative
    assert any("&lt;b&gt;Ditto" in text for text in points)


def test_a_table_without_results_shows_the_papers_numbers_alone(tmp_path):
    table = paper_tables.make(tmp_path)
    page = page_of(table, tmp_path / "results")
    assert not page.sections[0].charts and "None of it has been run yet" in page.sections[0].tables[0].caption


def test_a_table_may_have_a_seed_of_its_own(tmp_path):
    """It is that of its trainings and printed commands where nobody gives or has another."""
    table = paper_tables.make(tmp_path, paper_tables.TABLE.replace('over = "one run"', 'over = "one run"\nseed = 10'))
    assert {job.experiment.seed for job in plan.jobs(plan.chosen([table]))} == {10}
    assert {job.experiment.seed for job in plan.jobs(plan.chosen([table]), [0, 1])} == {0, 1}
    number = Reader(tmp_path / "results").beside(table).columns[1].numbers[0]
    assert "--set data.replay=52 --seed 10" in sections.commands(number)[1]
    settings = page_of(table, tmp_path / "results").sections[-1]
    assert "Its seed is 10 where none is given." in settings.paragraphs[0][-1]


def test_what_cannot_be_shown_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = ["-o", "page.html"]
    for words, sentence in (
        (["--table", "nosuch"], "there is no table or figure 'nosuch'"),
        (["--table", "pfedfda/t2"], "there is no folder results: name that of the results, or make it with bespoke sw"),
        (["--table", "pfedfda/t2", "--results", "no"], "there is no folder no: name that of the results"),
        (["--table", "pfedvmp/f2", "--results", "."], "pfedvmp/f2 has no numbers that could be shown: bespoke figure"),
        (
            ["--table", "questions/self_fl_steps", "--results", "."],
            "questions/self_fl_steps has no numbers that could be shown: bespoke sweep questions/self_fl_steps makes",
        ),
        (["--table", "pfedfda/t2", "runs"], "give folders of runs, or the name of a table with --table"),
        (["runs", "--results", "results"], "--results is the folder of a table's results: name the table with --table"),
        (["runs", "--watch", "--results", "results"], "--results is the folder of a table's results"),
        ([], "give folders of runs, or the name of a table with --table"),
        (["--table", "pfedfda/t2", "--metric", "loss"], "--table shows what a paper's table says: leave --baseline"),
        (["--table", "pfedfda/t2", "--group", "new"], "--table shows what a paper's table says: leave --baseline"),
    ):
        monkeypatch.setattr("sys.argv", ["bespoke", "report", *words, *out])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.count("\n") == 1 and sentence in said, said
    assert not list(tmp_path.iterdir())


def test_readings_that_are_none_are_refused(root):
    (root / "readings" / "pfedfda.json").write_text('{"method": "x"}')
    with pytest.raises(UserError, match="holds no readings of a method"):
        readings.read(root)


def test_code_and_links_are_written_in_both(table, root):
    (first, *_) = [s for s in page_of(table, root).sections if s.name == "settings"]
    assert Code("data.alpha=0.1") in first.items[0]
    assert "`data.alpha=0.1`" in "\n".join(markdown.section_lines(first, str))
    assert "<code>data.alpha=0.1</code>" in html(page_of(table, root))


def test_the_pages_of_all_papers_use_these_sections(table, root):
    """What `bespoke table --write` writes is what the page for a browser shows."""
    from bespoke.tables import site

    text = site.gather(root, [table]).files(root.parent)["maker.md"]
    page = Page(Reader(root).beside(table))
    first, *others = sections.sections_of(page, root)
    assert "\n".join(markdown.section_lines(first, str)) in text
    assert all(f"### {other.title}\n" in text for other in others)


def test_readings_that_a_question_tries_are_counted(tmp_path, monkeypatch):
    """Numbers that are there, of those that are not in brackets; a failed run is none."""
    table, root = paper_tables.make(tmp_path), tmp_path / "results"
    paper_tables.put(root, table, "easy/ditto", 0, 74.0)
    text = paper_tables.TABLE.replace("[[row]]", 'readings_for = "maker"\n[[row]]', 1)
    text = text.replace('title = "Accuracy', 'title = "Another').replace('label = "Other"', 'label = "(Other)"')
    with pytest.raises(UserError, match="readings_for: there is no paper 'makre' in this folder"):
        paper_tables.make(tmp_path, text.replace('"maker"', '"makre"'), "questions/q")
    question = paper_tables.make(tmp_path, text, "questions/q")
    paper_tables.put(root, question, "easy/ditto", 0, 70.0)
    paper_tables.put(root, question, "other/ditto", 0, 70.0)
    paper_tables.fail(root, question, "easy/fedavg", 0, "It broke.")
    monkeypatch.setattr(sections.spec, "listed", lambda: {"questions/q": question.path})
    told = "Another by data set: 1 of 9 numbers of its readings are there ("
    assert told in html(page_of(table, root))
    with pytest.raises(UserError, match="chosen: 'esay' is none of"):
        paper_tables.make(tmp_path, text.replace("[[row]]", 'chosen = "esay"\n[[row]]', 1), "questions/q")
    paper_tables.make(tmp_path, text.replace("[[row]]", 'chosen = "hard"\n[[row]]', 1), "questions/q")
    told = "Another by data set: 1 of 9 numbers of its readings are there; of 3 columns one was chosen: Hard ("
    assert told in html(page_of(table, root))
    cleared = paper_tables.TABLE.replace('algorithm = "pfedfda"', 'algorithm = "fedrep"').replace(
        'id = "ditto"', 'id = "apfl"'
    )
    cleared = cleared.replace("ditto =", "apfl =").replace('algorithm = "fedavg_ft"', 'algorithm = "moon"')
    cleared = cleared.replace('set = ["algorithm.folds=3"]\n', "").replace('view = "global"\n', "")
    others = paper_tables.make(tmp_path, cleared, "maker/t2")  # none of whose methods the question has
    paper_tables.put(root, others, "easy/apfl", 0, 74.0)
    assert "Readings tried" not in html(page_of(others, root))
