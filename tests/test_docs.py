"""The code blocks of the documents run.

A document becomes one Python program with the same line numbers: lines of python blocks are kept, command
lines that start with `bespoke` in shell blocks become calls, every other line becomes empty. So the blocks of
a document share their names and a working folder, and a traceback names the document's own line. A block
right below the comment `<!-- not run: reason -->` is left out.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CANDIDATES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
DOCUMENTS = [path for path in CANDIDATES if path.exists()]

FENCE = re.compile(r"(?P<indent>\s*)(?P<ticks>`{3,})\s*(?P<language>\w*)")
MARKER = re.compile(r"\s*<!--\s*not run\b:?(?P<reason>.*?)-->\s*$")
SHELL = {"bash", "console", "sh", "shell"}


def program(text: str) -> str:
    """A Markdown text as a Python program, line for line."""
    lines = text.splitlines()
    out = [""] * len(lines)
    above = ""  # the last line with something on it
    number = 0
    while number < len(lines):
        fence, marker = FENCE.match(lines[number]), MARKER.match(lines[number])
        assert not marker or marker["reason"].strip(), f"line {number + 1}: `not run` needs a reason"
        if not fence:
            above = lines[number] if lines[number].strip() else above
            number += 1
            continue
        start = end = number + 1
        while end < len(lines) and lines[end].strip() != fence["ticks"]:
            end += 1
        assert end < len(lines), f"line {start}: this block is never closed"
        if not MARKER.match(above):
            body = [line.removeprefix(fence["indent"]) for line in lines[start:end]]
            if fence["language"] == "python":
                out[start:end] = body
            elif fence["language"] in SHELL:
                out[start:end] = calls(body)
        above, number = "", end + 1
    return "\n".join([*out, ""])


def calls(body: list[str]) -> list[str]:
    """The lines of a shell block: those that call `bespoke` as Python calls, the others empty."""
    out = [""] * len(body)
    number = 0
    while number < len(body):
        first = number
        while body[number].endswith("\\") and number + 1 < len(body):
            number += 1
        command = "\n".join(body[first : number + 1]).removeprefix("$ ")
        if command.startswith("bespoke "):
            shell = ["bash", "-e", "-o", "pipefail", "-c", command]
            out[first] = f"__import__('subprocess').run({shell!r}, check=True)"
        number += 1
    return out


def run(text: str, folder: Path, name: str = "document.md") -> subprocess.CompletedProcess[str]:
    """Run a document in a folder, with warnings as errors and the `bespoke` of this environment."""
    (folder / name).write_text(program(text), encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONWARNINGS": "error", "MPLBACKEND": "Agg"}
    command = [sys.executable, name]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def test_there_is_a_readme():
    assert (ROOT / "README.md").is_file()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document_runs(path, tmp_path):
    done = run(path.read_text(encoding="utf-8"), tmp_path, path.name)
    assert done.returncode == 0, f"{path.relative_to(ROOT)}\n{done.stdout}\n{done.stderr}"


def test_blocks_share_names_and_keep_their_lines(tmp_path):
    text = "A text.\n\n```python\nx = 1\n```\n\n- item\n\n  ```python\n  if x:\n      raise KeyError(x)\n  ```\n"
    done = run(text, tmp_path)
    assert '"document.md", line 11' in done.stderr.replace(f"{tmp_path}/", "")
    assert "KeyError: 1" in done.stderr


def test_a_block_is_left_out_only_for_a_reason():
    block = "```python\nraise SystemExit(1)\n```\n"
    assert "raise" not in program(f"<!-- not run: it needs a GPU -->\n\n{block}")
    assert "raise" in program(f"<!-- not run: it needs a GPU -->\n\nA sentence.\n\n{block}")
    with pytest.raises(AssertionError, match="needs a reason"):
        program(f"<!-- not run: -->\n{block}")


def test_an_open_block_is_an_error():
    with pytest.raises(AssertionError, match="never closed"):
        program("```python\nx = 1\n")


def test_commands_of_shell_blocks_are_found():
    block = "```console\n$ bespoke run a.toml \\\n    --quiet  # a comment\nmake test\nbespoke list models\n```\n"
    found = program(block).splitlines()
    assert [bool(line) for line in found] == [False, True, False, False, True, False]
    assert "bespoke run a.toml \\\\\\n    --quiet" in found[1]
    assert "bespoke" not in program(block.replace("console", "toml"))


def test_a_failing_command_fails_the_document(tmp_path):
    done = run("```bash\nbespoke no-such-command\n```\n", tmp_path)
    assert done.returncode != 0
    assert "CalledProcessError" in done.stderr
