"""Every accuracy that a reason for a far number tells is one of its evidence or of its own row.

A number between 20 and 100 with one or two decimals is an accuracy, unless it has a sign or is in points. Of a result
that is evidence these are its column's published numbers, its own for every seed, their mean, its curve, and the mean
of the last ten values of that; of a setting of a benchmark, its number for every seed and their mean.
"""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest
from paper_tables import source

from bespoke.tables import reasons, results, spec

ROOT = Path(__file__).parents[2] / "results"
REASONS = reasons.read(ROOT)
ACCURACY = re.compile(r"(?<![\d.,+-])([2-9]\d\.\d{1,2})(?!\d| points?\b)")


def known(id: str, reason: reasons.Reason) -> set[float]:
    """The accuracies of the evidence, ours and published, and those of the reason's row in its table, or column."""
    found: set[float] = set()
    for text in reason.evidence:
        file, _, setting = text.partition("::")
        if file.endswith(".json"):
            told = json.loads((ROOT.parent / file).read_text(encoding="utf-8"))
            if setting:
                by_seed = told["mean_percent_by_seed"][setting].values()
                found |= {*by_seed, fmean(by_seed)}
            elif "curve" in told:
                found |= of_result(told)
            else:
                found |= {*told["published"].values(), *(attempt["pooled"] for attempt in told["tries"])}
    paper, table, cell, *row = id.split("/")
    for entry in spec.find(f"{paper}/{table}").entries:
        if entry.row.id == row[0] if row else entry.cell.id == cell:
            found |= {entry.published} - {None}
            if values := done(entry):
                found |= {*values, fmean(values)}
    return found


def done(entry: spec.Entry) -> list[float]:
    """Its accuracies by seed, in percent."""
    found = results.of(ROOT, entry).values() if entry.runs else ()
    return [100 * result.value(entry) for result in found if result.done]


def of_result(told: dict) -> set[float]:
    """The accuracies that a result supports, in percent."""
    entries = spec.find(told["table"]).entries
    (entry,) = (each for each in entries if each.id == told["cell"])
    published = {each.published for each in entries if each.cell == entry.cell} - {None}
    values = done(entry)
    curve = [100 * value for value in told["curve"][entry.statistic]]
    return {*published, *values, fmean(values), *curve, fmean(curve[-10:])}


def unsupported(text: str, values: set[float]) -> list[str]:
    """The accuracies of a text that are none of the values, rounded as written."""
    found = {number: 0.5 * 10 ** -len(number.partition(".")[2]) + 1e-9 for number in ACCURACY.findall(text)}
    return [number for number, half in found.items() if all(abs(float(number) - value) > half for value in values)]


@pytest.mark.parametrize("id", REASONS)
def test_the_accuracies_of_a_reason_are_measured_or_published(id):
    assert unsupported(REASONS[id].reason, known(id, REASONS[id])) == []


ALIKE = ("name", "partition", "alpha", "volume", "corrupt", "keep", "keep_rows", "new_clients")  # in data of one column


def apart(settings: dict) -> dict:
    """Settings but for what seeds change."""
    return settings | {"seed": None, "data": settings["data"] | {"replay": None}}


def was_tried(id: str, reason: reasons.Reason) -> bool:
    """Whether its evidence holds another run of that method on such data, or the table another reading of it.

    Another row of the same column is no try.
    """
    paper, table, cell, row = id.split("/")
    read = spec.find(f"{paper}/{table}")
    entry = read.entry(f"{cell}/{row}")
    run = source(entry)
    if not run.runs:
        return False
    shown = next(iter(results.of(ROOT, run).values())).content["settings"]
    files = [each for each in reason.evidence if each.endswith(".json")]
    files = [each for each in files if f"/{table}/{cell}/" not in each or f"/{cell}/{row}/" in each]
    told = [json.loads((ROOT.parent / file).read_text()) for file in files]
    runs = [each["settings"] for own in told for each in own.get("tries", [own])]
    runs = [run for run in runs if run["algorithm"]["name"] == shown["algorithm"]["name"]]
    same = {key: shown["data"][key] for key in ALIKE}
    others = [run for run in runs if {key: run["data"][key] for key in ALIKE} == same and apart(run) != apart(shown)]
    printed = entry.cell.reading_of or cell
    readings = [each for each in read.entries if each.row == entry.row and each.cell != entry.cell]
    readings = [each for each in readings if printed in (each.cell.reading_of, each.cell.id)]
    return bool(others or any(results.of(ROOT, each) for each in readings))


def test_a_cause_was_looked_for_where_its_reason_says_so():
    numbers = {id: reason for id, reason in REASONS.items() if id.count("/") == 3 and reason.open}
    assert {id for id, reason in numbers.items() if reason.open == reasons.TRIED and not was_tried(id, reason)} == set()
    assert {id for id, reason in numbers.items() if reason.open == reasons.ARGUED and was_tried(id, reason)} == set()


def test_another_seed_is_no_try():
    id = "fedlda/t1/wrn16_2_500/fedpac"
    earlier, further = (f"results/{id}/{name}.json" for name in ("0-e2c4cc27", "4"))
    assert was_tried(id, reasons.Reason("", (earlier,)))
    assert not was_tried(id, reasons.Reason("", (further,)))


def test_reasons_tell_accuracies():
    assert sum(len(ACCURACY.findall(reason.reason)) for reason in REASONS.values()) > 20


def test_a_number_that_nobody_measured_is_found():
    id = "pfedfda/t2/cifar10_dir0.5/fedbabu"
    text = REASONS[id].reason.replace("62.4", "62.5").replace("70.35", "70.3")
    assert unsupported(text, known(id, REASONS[id])) == ["62.5"]
    id = "pfedvmp/t1/cifar10_dir0.3/fedper"
    text = REASONS[id].reason.replace("52.1", "52.4").replace("47.6", "48.7")
    assert unsupported(text, known(id, REASONS[id])) == ["48.7", "52.4"]


def test_what_is_taken_for_an_accuracy():
    found = ACCURACY.findall("61.9, (88.1) and 87.25; not +20.6 %, -2.637, 19.9, 590,848, 24.5 points, 61.")
    assert found == ["61.9", "88.1", "87.25"]
