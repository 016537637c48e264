"""What docs/tables.md says would be counted by other choices is what the results give."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from paper_tables import source

from bespoke.tables import results, site
from bespoke.tables.beside import Column, Number
from bespoke.tables.page import Page

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "tables.md")
    .read_text(encoding="utf-8")
    .split("## What is counted")[1]
    .split("\n## ")[0]
    .splitlines()
    if line.startswith("|")
][2:]
CHOSE = ("pfedfda/t2/cifar100_dir0.5", "pfedfda/t5/dir0.5_full")  # columns whose test rows chose pFedFDA's reading
CHOSE_BASELINES = (*CHOSE, "pfedfda/t2/cifar10_dir0.5")  # and those of the methods it is compared with
Own = list[tuple[Page, Number]]


def columns(pages: Iterable[Page], readings: bool = False) -> list[tuple[Page, Column]]:
    return [(p, column) for p in pages for column in p.beside.columns if readings or not column.cell.reading_of]


def held(pages: Iterable[Page], readings: bool = False) -> Own:
    return [(p, number) for p, column in columns(pages, readings) for number in column.counted]


def own(pages: Iterable[Page], readings: bool = False, variants: bool = False) -> Own:
    """The accuracies of the papers' own methods."""
    return [
        (page, number)
        for page, number in held(pages, readings)
        if number.percent and number.higher and number.entry.algorithm == page.beside.table.name.partition("/")[0]
        if variants or not number.entry.row.set
    ]


def printed(column: Column) -> list[Number]:
    return [number for number in column.numbers if number.published is not None]


def near(numbers: Own) -> str:
    return f"{sum(not number.marked for _, number in numbers)} of {len(numbers)}"


def by_training(numbers: Own, root: Path) -> str:
    """Of trainings, by that of seed 0: those none of whose numbers is marked."""
    found = defaultdict[str, list[bool]](list)
    for _, number in numbers:
        result = results.read(results.place(root, source(number.entry)) / "0.json")
        found[site._training(result)].append(number.marked)
    return f"{sum(not any(marks) for marks in found.values())} of {len(found)}"


def kept(all_columns: Iterable[Column]) -> str:
    decided = [column.winner_kept for column in all_columns if column.winner_kept is not None]
    return f"{sum(decided)} of {len(decided)}"


def tied(lost: Iterable[bool]) -> str:
    lost = [*lost]
    return f"{lost.count(False)}, and {lost.count(True)} are"


@pytest.fixture(scope="module")
def told() -> list[tuple[list[str], list[str]]]:
    """Of each row, what it must say as counted, and otherwise."""
    found = site.gather(ROOT / "results")
    pages, fda = found.pages, [page for page in found.pages if page.beside.table.name.startswith("pfedfda/")]
    others = [column for _, column in columns(pages) if column.winner_kept is False]
    few = (column.lost or column.ahead_on[1] < 3 for column in others)
    each = (column.lost or (column.ahead_on[1] >= 3 and len({*column.ahead_on}) == 1) for column in others)
    half = [column for _, column in columns(pages) if 2 * len(column.counted) >= len(printed(column))]
    shares = [number for _, number in held(pages) if number.percent]
    points = [number for number in shares if number.higher]
    every = [number for _, number in held(pages, readings=True) if number.percent]
    near_1 = [f"{sum(n.within(1.0) for n in own)} of {len(own)}" for own in (points, every)]
    open_for = [
        found.reasons[number.id].open for _, number in held(pages) if number.marked and number.id in found.reasons
    ]
    without = [pair for pair in own(fda) if pair[1].id.rpartition("/")[0] not in CHOSE]
    kept_fda = [column for _, column in columns(fda)]
    unchosen = [column for column in kept_fda if column.id not in CHOSE_BASELINES]
    return [
        (
            [near(own(fda))],
            [
                f"{near(own(fda, readings=True, variants=True))} with variants and all readings",
                f"{near(own(fda, readings=True))} with all readings",
                f"{by_training(own(fda), found.root)} by trainings",
            ],
        ),
        ([tied(column.lost for column in others)], [tied(few), tied(each)]),
        ([kept(column for _, column in columns(pages))], [kept(half)]),
        ([], []),  # of FedLDA's first reading, whose results are kept as earlier ones
        ([near(own(pages))], [f"{by_training(own(pages), found.root)} by trainings"]),
        ([near(own(fda)), kept(kept_fda)], [near(without), kept(unchosen)]),
        ([near_1[0]], [near_1[1]]),
        (
            [str(open_for.count(""))],
            [str(open_for.count("") + open_for.count("tried")), str(len(open_for))],
        ),
    ]


def test_other_choices_would_give_the_counts_that_are_told(told):
    assert len(told) == len(ROWS)
    for (_, counted, otherwise), wanted in zip(ROWS, told, strict=True):
        for text, parts in zip((counted, otherwise), wanted, strict=True):
            for part in parts:
                assert re.search(rf"(?<![\d.]){re.escape(part)}\b", text), f"{part!r} is not in {text!r}"
