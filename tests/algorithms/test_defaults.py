"""Every default is the one that docs/methods/defaults.md pins, with its source."""

import ast
import dataclasses
from pathlib import Path

import pytest

from bespoke.algorithms import ALGORITHMS
from bespoke.core.settings import Training
from bespoke.runs.federation import Evaluation

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "defaults.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]
OWNERS = ("paper", "public code", "ours", "the FedPCE paper", "the pFedFDA paper")


def pinned(name):
    """The page's defaults of a method or table, by setting."""
    rows = [row[1:3] for row in ROWS if row[0] == f"`{name}`" and row[1]]
    found = {setting.strip("`"): ast.literal_eval(default.strip("`")) for setting, default in rows}
    assert len(found) == len(rows), f"{name} has a setting twice"
    return found


def actual(settings):
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_methods_defaults_are_those_of_the_page(name):
    assert actual(ALGORITHMS[name]()) == pinned(name.removesuffix("_ft")) | pinned(name)


@pytest.mark.parametrize(("name", "table"), [("[training]", Training()), ("[evaluation]", Evaluation())])
def test_a_tables_defaults_are_those_of_the_page(name, table):
    assert actual(table) == pinned(name)


def test_the_page_names_every_method_and_no_other():
    assert list(dict.fromkeys(row[0].strip("`") for row in ROWS)) == [*ALGORITHMS, "[training]", "[evaluation]"]


def test_every_default_of_a_method_has_a_source():
    sourced = [row for row in ROWS if row[1] and not row[0].startswith("`[")]
    assert all(row[3].startswith(OWNERS) for row in sourced), [row for row in sourced if not row[3].startswith(OWNERS)]
