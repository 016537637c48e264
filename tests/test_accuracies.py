"""No accuracy is in the documents that is not in results/.

A passage (a paragraph, an item of a list, a table) that speaks of accuracy and prints percentages names the file of
results/ that holds them in a comment: `<!-- accuracies: results/FILE -->`, in the passage or right above it. Each of
its numbers must be a number of that file, or the mean over seeds of records that are alike otherwise, rounded as
printed. A page that is written from results/ may stand in its place: one of docs/results, then each must be a number of
ours there, which follows an arrow; or results/fmnist_all.md, then each must be a mean there, which a deviation follows.
Numbers of a paper are declared so: `<!-- accuracies: published -->`.

The rule cannot catch everything. It sees no number without a decimal in a table, no fraction of fewer than three
digits in a sentence, no accuracy in a passage that avoids the word, and nothing in code blocks, which are run and
checked by themselves. It does not look up differences: numbers with a sign, or in points. That a number occurs in the
file does not prove that it is the right one. The pages of docs/results are written from results/ and compared with them
by another test; those in results/ are themselves results.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md")
    for path in sorted(ROOT.glob(pattern))
    if path.parent != ROOT / "docs" / "results"
]

DECLARED = re.compile(r"<!--\s*accuracies:\s*(?P<source>\S+?)\s*-->")
KEPT = re.compile(r"results/.+\.jsonl?$|docs/results/\w+\.md$|results/fmnist_all\.md$")
FENCED = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"\n(?=\s*(?:[-*]|\d+\.) )")
PERCENT = re.compile(r"(?<![\d.+-])(\d+(?:\.\d+)?)(?=(?:(?:, | and |, and )\d+(?:\.\d+)?)* %)")
FRACTION = re.compile(r"(?<![\d.+-])(0?\.\d{3,4})(?!\d|\.\d|e[+-]?\d)")
DECIMAL = re.compile(r"(?<![\d.+-])(\d+\.\d+)(?!\d|\.\d|e[+-]?\d)")


def passages(text: str) -> list[str]:
    """The paragraphs, items and tables of a Markdown text, without code; a comment belongs to what it stands above."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", FENCED.sub("", text)):
        parts = [block] if "|" in block.lstrip()[:1] else ITEM.split(block)
        for part in filter(str.strip, parts):
            if found and not DECLARED.sub("", found[-1]).strip():
                found[-1] += "\n" + part
            else:
                found.append(part)
    return found


def is_table(passage: str) -> bool:
    return DECLARED.sub("", passage).strip().startswith("|")


def printed(passage: str, above: str) -> list[str]:
    """The accuracies that a passage prints, as written; `above` is the passage before it, which may introduce it."""
    plain = re.sub(r"`[^`]*`", "", DECLARED.sub("", passage))
    if is_table(passage):
        head, *rows = plain.strip().splitlines()
        speaks = "accura" in f"{head} {above}".lower()
        return [number for row in rows for number in DECIMAL.findall(row)] if speaks else []
    plain = " ".join(plain.split())
    return PERCENT.findall(plain) + FRACTION.findall(plain) if re.search(r"accura", plain, re.IGNORECASE) else []


def values(path: Path) -> set[float]:
    """All numbers of a JSON or JSON lines file, and the means over seeds of records that are alike; a page's own."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return {float(number) for number in re.findall(r"→ (\d+\.\d+)", text) + re.findall(r"\| (\d+\.\d+) ±", text)}
    content = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    found: set[float] = set()
    alike: dict[str, list[dict[str, float]]] = defaultdict(list)

    def collect(value: object) -> None:
        if isinstance(value, dict):
            if "seed" in value:
                same = {k: v for k, v in value.items() if not isinstance(v, float) and k not in ("seed", "notes")}
                floats = {k: v for k, v in value.items() if isinstance(v, float)}
                alike[json.dumps(same, sort_keys=True)].append(floats)
            collect(list(value.values()))
        elif isinstance(value, list):
            for each in value:
                collect(each)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.add(float(value))

    collect(content)
    for records in alike.values():
        for key in set.intersection(*(set(record) for record in records)):
            found.add(sum(record[key] for record in records) / len(records))
    return found


def holds(known: set[float], number: str) -> bool:
    """Whether a printed number is one of the values, or a hundredth of it, rounded."""
    half = 0.5 * 10 ** -len(number.partition(".")[2]) + 1e-9
    return any(abs(float(number) - value) <= half or abs(float(number) - 100 * value) <= half for value in known)


def mistakes(text: str, root: Path = ROOT) -> list[str]:
    """What is wrong with the accuracies of a document, in words."""
    told, above = [], ""
    for passage in passages(text):
        numbers = printed(passage, above)
        sources = DECLARED.findall(passage)
        start = " ".join(DECLARED.sub("", passage).split())[:60]
        if numbers and not sources:
            told.append(f"{start!r} prints {', '.join(numbers)} and names no file of results/")
        if sources and not numbers:
            told.append(f"{start!r} names {sources[0]} and prints no accuracy")
        files = [source for source in sources if source != "published"]
        if lacking := [f for f in files if not (KEPT.match(f) and (root / f).is_file())]:
            told.append(f"{start!r} names {lacking[0]}, which is no file of results/")
        elif files:
            known = set().union(*(values(root / file) for file in files))
            told += [
                f"{start!r}: {number} is not in {', '.join(files)}" for number in numbers if not holds(known, number)
            ]
        above = passage
    return told


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_accuracy_is_in_results(path):
    assert mistakes(path.read_text(encoding="utf-8")) == []


# --- the rule itself ------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    (tmp_path / "results").mkdir()
    records = [{"method": "a", "seed": seed, "mean": value} for seed, value in enumerate((0.912, 0.934))]
    (tmp_path / "results" / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "c.md").write_text("| a | 61.0 → 58.7±0.2 (3)<br>-2.3, 5→5 | → 44.1 |")
    (tmp_path / "results" / "fmnist_all.md").write_text("| a | 29 | 94.42 ± 0.24 | +21.19 (3 of 3) | 95.17 ± 0.31 |")
    (tmp_path / "results" / "b.json").write_text('{"runs": [{"alone": 76.25, "loss": 0.4}]}')
    return tmp_path


SOUND = [
    "The accuracy is 91.2 % and 93 %. <!-- accuracies: results/a.jsonl -->",
    "<!-- accuracies: results/a.jsonl -->\n\nA mean accuracy of 92.3 %.",  # over both seeds
    "| accuracy | x |\n|---|---|\n| a | 91.2, 93.4 | +0.7 |\n<!-- accuracies: results/a.jsonl -->",
    "The accuracy:\n\n<!-- accuracies: results/b.json -->\n| x |\n|---|\n| 76.3 |\n",
    "- accuracy: nothing\n- padding: 6.5 %",
    "The accuracy gains 3.5 points, and +2 %.",
    "```python\nassert accuracy > 0.9  # 93 %\n```",
    "An accuracy of 71 %, says the paper. <!-- accuracies: published -->",
    "Ours have an accuracy of 58.7 and 44.1 %. <!-- accuracies: docs/results/c.md -->",
    "Accuracies of 94.4 and 95.2 %. <!-- accuracies: results/fmnist_all.md -->",
]
UNSOUND = {
    "The accuracy is 91.2 %.": "prints 91.2 and names no file",
    "Accuracies of 91.2, 93.4 and 90 %.": "prints 91.2, 93.4, 90 and names no file",
    "It had an accuracy of .763.": "prints .763 and names no file",
    "The accuracy is 91.3 %. <!-- accuracies: results/a.jsonl -->": "91.3 is not in results/a.jsonl",
    "| accuracy | x |\n|---|---|\n| a | 91.2 |": "prints 91.2 and names no file",
    "Mean accuracy of the clients:\n\n| x |\n|---|\n| 91.2 |": "prints 91.2 and names no file",
    "The accuracy is 91.2 %. <!-- accuracies: results/c.json -->": "names results/c.json, which is no file",
    "The accuracy is 91.2 %. <!-- accuracies: docs/a.json -->": "names docs/a.json, which is no file of results/",
    "Nothing. <!-- accuracies: results/a.jsonl -->": "prints no accuracy",
    "An accuracy of 21.2 %. <!-- accuracies: results/fmnist_all.md -->": "21.2 is not in results/fmnist_all.md",
    "The paper's accuracy is 61.0 %. <!-- accuracies: docs/results/c.md -->": "61.0 is not in docs/results/c.md",
}


@pytest.mark.parametrize("text", SOUND)
def test_what_the_rule_lets_pass(text, root):
    assert mistakes(text, root) == []


@pytest.mark.parametrize("text", UNSOUND)
def test_what_the_rule_finds(text, root):
    (found,) = mistakes(text, root)
    assert UNSOUND[text] in found
