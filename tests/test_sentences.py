"""Sentences for people: whoever calls from Python is not sent to the command line alone."""

import ast
import re
from pathlib import Path

import bespoke

ROOT = Path(bespoke.__file__).parent
# What only the command line calls: itself, tables of papers, the search for settings, tracking tools, a network.
SHELL = {"cli", "tables", "tuning.py", "loggers.py", "flower"}
# The arguments of `load` that only the command line gives.
ARGUMENTS = {"--algorithm", "--seed"}
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] not in SHELL]


def texts(source: str) -> list[str]:
    """The strings of a module but for docstrings; an f-string is one, with {} for its values."""
    nodes = list(ast.walk(ast.parse(source)))
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    inside |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    found = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in inside]
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values))
    return found


def one_sided(source: str) -> list[str]:
    """The strings that name an option of the command line without the Python beside it, and are no whole command."""
    named = [text for text in texts(source) if re.search(r"(?<!\S)--[a-z]", text) and text not in ARGUMENTS]
    return [text for text in named if "in Python" not in text and "{} --" not in text]


def test_options_are_named_together_with_arguments():
    found = {path.relative_to(ROOT).as_posix(): one_sided(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_one_sided_sentences_are_found():
    source = '''
"""Use --resume."""
both, name, command = "use --out (out= in Python)", "--seed", f"run {again} --trust {x}"
one = f"{path} holds a run: add --resume"
raise UserError(f"{path}: use " "--out")
'''
    assert one_sided(source) == ["{} holds a run: add --resume", "{}: use --out"]
