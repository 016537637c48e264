"""Rules that every file of algorithms/ keeps: short, both halves together, and nothing but core and torch."""

import ast
import sys
from pathlib import Path

import pytest

import bespoke.algorithms
from bespoke.core.algorithm import Algorithm

FOLDER = Path(bespoke.algorithms.__file__).parent
FILES = sorted(p for p in FOLDER.glob("*.py") if p.name != "__init__.py")


def imported(tree: ast.Module) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def test_there_are_methods():
    assert len(FILES) >= 7


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_method_file_is_short_and_imports_core_and_torch_alone(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    for name in imported(ast.parse(text)):
        root = name.split(".")[0]
        assert name.startswith("bespoke.core") or root == "torch" or root in sys.stdlib_module_names, name


def test_methods_are_final_and_inherit_from_no_other_method():
    for name in bespoke.algorithms.ALGORITHMS:
        kind = bespoke.algorithms.method_class(name)
        assert kind.__bases__ == (Algorithm,), name
        assert getattr(kind, "__final__", False), name
        assert kind.__doc__ and "Bytes per client and round" in kind.__doc__, name
