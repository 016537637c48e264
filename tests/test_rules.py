"""Rules that every file of algorithms/ keeps: it is short, uses only what a method may see, and copies no other.

And one for the tests: what they share lies in no test module.
"""

import ast
import sys
from pathlib import Path

import pytest

import bespoke.algorithms
from bespoke.core.algorithm import Algorithm

FOLDER = Path(bespoke.algorithms.__file__).parent
FILES = {p.stem: p.read_text(encoding="utf-8") for p in sorted(FOLDER.glob("*.py")) if p.name != "__init__.py"}
LINES, COLUMNS = 95, 100

every_file = pytest.mark.parametrize("text", FILES.values(), ids=FILES)


def test_every_method_has_a_file():
    modules = {bespoke.algorithms.method_class(name).__module__ for name in bespoke.algorithms.ALGORITHMS}
    assert modules == {f"bespoke.algorithms.{stem}" for stem in FILES}


def test_methods_are_final_and_inherit_from_no_other_method():
    for name in bespoke.algorithms.ALGORITHMS:
        kind = bespoke.algorithms.method_class(name)
        assert kind.__bases__ == (Algorithm,), name
        assert getattr(kind, "__final__", False), name
        assert kind.__doc__ and "Bytes per client and round" in kind.__doc__, name


# --- size -------------------------------------------------------------------------------------------------------


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def code(text: str) -> list[str]:
    """The lines of a file without docstrings, comments and blanks."""
    texts = [node for node in ast.walk(ast.parse(text)) if is_text(node)]
    left_out = {number for node in texts for number in range(node.lineno, node.end_lineno + 1)}
    lines = [line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in left_out]
    return [line for line in lines if line and not line.startswith("#")]


@every_file
def test_a_method_is_short(text):
    assert len(code(text)) <= LINES


@every_file
def test_no_line_of_a_method_is_long(text):
    assert [number for number, line in enumerate(text.splitlines(), 1) if len(line) > COLUMNS] == []


def test_docstrings_comments_and_blanks_are_no_code():
    text = '"""A file.\n\nIn two parts.\n"""\n\nimport os\n\n# why\nclass M:\n    """M."""\n\n    x = "text"  # kept\n'
    assert code(text) == ["import os", "class M:", 'x = "text"  # kept']


# --- what a method may see --------------------------------------------------------------------------------------

BY_NAME = {"getattr", "setattr", "vars"}  # ways around the rule
NAMED_TUPLES = {"_replace", "_asdict", "_fields"}  # public in spite of their names, lest they clash with fields


def imported(text: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(text)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def strangers(text: str) -> list[str]:
    """Imports from anywhere but core, maths, torch and Python."""

    def known(name: str) -> bool:
        top, _, room = name.partition(".")
        allowed = room.partition(".")[0] in ("core", "maths") if top == "bespoke" else top == "torch"
        return allowed or top in sys.stdlib_module_names

    return sorted(name for name in imported(text) if not known(name))


def reached_into(text: str) -> list[str]:
    """Private attributes of anything but the method itself, and private names that are imported."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names if private(alias.name)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            found.append(ast.unparse(node))
    return found


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NAMED_TUPLES


@every_file
def test_a_method_imports_core_maths_and_torch_alone(text):
    assert strangers(text) == []


@every_file
def test_a_method_reaches_into_nothing_but_itself(text):
    assert reached_into(text) == []


def test_an_import_from_another_room_is_found():
    good = "import math\nimport torch.nn\nfrom torch.nn import functional\nfrom bespoke.core import rng\n"
    good += "from bespoke.maths.gaussian import shrink\n"
    assert strangers(good) == []
    for line, name in {
        "import numpy as np": "numpy",
        "import bespoke": "bespoke",
        "from bespoke.engine.scan import run": "bespoke.engine.scan",
        "from bespoke.coreless import x": "bespoke.coreless",
        "from bespoke.algorithms.fedavg import FedAvg": "bespoke.algorithms.fedavg",
    }.items():
        assert strangers(good + line) == [name]


@pytest.mark.parametrize(
    "line",
    [
        "local._data",
        "local._data.x",
        "local.task._module",
        "self.inner._rows",
        "self._kept._rows",
        "super()._train",
        "type(self)._train",
        "local._strategy = None",
        "getattr(local, '_' + 'data')",
        "vars(local)",
        "from bespoke.core.local import _Desk",
    ],
)
def test_a_private_attribute_of_another_is_found(line):
    assert reached_into(line)
    assert len(reached_into(f"class M:\n    def f(self, local):\n        {line}\n")) == 1


def test_a_methods_own_helpers_and_public_names_are_let_be():
    fine = ["self._train(local)", "_helper(local)", "own._replace(mean=0)", "type(self).__name__", "local.labels()"]
    assert reached_into("\n".join(fine)) == []


# --- no copies ----------------------------------------------------------------------------------------------------


def body(text: str) -> list[str]:
    """The lines of code that say something: no imports, decorators and signatures."""
    lines = dict(enumerate((line.strip() for line in text.splitlines()), 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text(node):
            first, last = node.lineno, node.end_lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            first, last = min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.body[0].lineno - 1
        else:
            continue
        for number in range(first, last + 1):
            lines.pop(number, None)
    return [line for line in lines.values() if line and not line.startswith("#")]


def runs(text: str, length: int = 6) -> set[tuple[str, ...]]:
    lines = body(text)
    return {tuple(lines[i : i + length]) for i in range(len(lines) - length + 1)}


def test_no_two_methods_share_six_lines():
    found = {stem: runs(text) for stem, text in FILES.items()}
    assert not [(a, b) for a in found for b in found if a < b and found[a] & found[b]]


def test_a_copy_is_found_and_signatures_are_none():
    lines = "".join(f"        x{i} = {i}\n" for i in range(6))
    one = f'import os\n\n\nclass A:\n    """A."""\n\n    def f(self,\n          a):\n        """Do."""\n{lines}'
    two = one.replace("class A", "class B")
    assert runs(one) & runs(two) and not runs(one) & runs(two.replace("x3 = 3", "x3 = 4"))
    hooks = "".join(f"    def hook{i}(self, state):\n        return state\n\n" for i in range(9))
    assert body(f"class A:\n{hooks}") == ["return state"] * 9


# --- the tests themselves -----------------------------------------------------------------------------------------


def test_no_test_module_is_imported():
    tests = Path(__file__).parent
    found = {path.relative_to(tests): imported(path.read_text(encoding="utf-8")) for path in tests.rglob("*.py")}
    assert not {str(path): names for path, names in found.items() if any(n.startswith("test_") for n in names)}
