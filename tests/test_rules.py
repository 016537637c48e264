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


# --- no copies ----------------------------------------------------------------------------------------------------


def told(text: str) -> list[str]:
    """The lines of a file that say something: no imports, decorators, signatures, docstrings, comments or blanks."""
    lines = dict(enumerate((line.strip() for line in text.splitlines()), 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            first, last = node.lineno, node.end_lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            first, last = min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.body[0].lineno - 1
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            first, last = node.lineno, node.end_lineno
        else:
            continue
        for number in range(first, last + 1):
            lines.pop(number, None)
    return [line for line in lines.values() if line and not line.startswith("#")]


def runs(text: str, length: int = 6) -> set[tuple[str, ...]]:
    lines = told(text)
    return {tuple(lines[i : i + length]) for i in range(len(lines) - length + 1)}


def test_no_two_methods_share_six_lines():
    found = {path.stem: runs(path.read_text(encoding="utf-8")) for path in FILES}
    assert not [(a, b) for a in found for b in found if a < b and found[a] & found[b]]


def test_a_copy_is_found_and_signatures_are_none():
    body = "".join(f"        x{i} = {i}\n" for i in range(6))
    one = f'import os\n\n\nclass A:\n    """A."""\n\n    def f(self,\n          a):\n        """Do."""\n{body}'
    two = one.replace("class A", "class B")
    assert runs(one) & runs(two) and not runs(one) & runs(two.replace("x3 = 3", "x3 = 4"))
    hooks = "".join(f"    def hook{i}(self, state):\n        return state\n\n" for i in range(9))
    assert told(f"class A:\n{hooks}") == ["return state"] * 9
