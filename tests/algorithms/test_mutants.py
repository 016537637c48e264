"""The table of mutants fits the sources: each passage is there once. Running them is `python tests/mutants.py`."""

from collections import Counter

from mutants import METHODS, MUTANTS, ROOT

PAPERS = {"pfedfda", "self_fl", "fedlda", "fedpce", "pfedvmp"}


def test_every_mutant_can_be_made():
    assert [trouble for m in MUTANTS if (trouble := m.trouble())] == []


def test_every_method_has_mutants_of_different_names():
    counts = Counter(m.method for m in MUTANTS)
    files = {path.stem for path in (ROOT / METHODS).glob("*.py")} - {"__init__"}
    assert counts.keys() == files and min(counts.values()) >= 2 and min(counts[name] for name in PAPERS) >= 15
    assert len({(m.method, m.means) for m in MUTANTS}) == len(MUTANTS)
