"""The code blocks of the documents run.

A document becomes one Python program with the same line numbers: lines of python blocks are kept, command
lines that start with `bespoke` in shell blocks become calls, every other line becomes empty. So the blocks of
a document share their names and a working folder, and a traceback names the document's own line. A block
right below the comment `<!-- not run: reason -->` is left out. A document has a process of its own; the many pages of
methods share one, each with names and a folder of its own. Importing torch takes longer than most documents run: a
process that has imported what the library needs, but not the library, forks for each document; and in a document, one
that has also imported the program forks for each command.
"""

import atexit
import functools
import importlib
import inspect
import json
import operator
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CANDIDATES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
DOCUMENTS = [path for path in CANDIDATES if path.exists() and path.parent.name != "methods"]
PAGES = sorted(ROOT.glob("docs/methods/*.md"))

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
            out[first] = f"typed({command!r})"
        number += 1
    return out


def run(text: str, folder: Path, name: str = "document.md") -> subprocess.CompletedProcess[str]:
    """Run a document in a folder, with warnings as errors."""
    (folder / name).write_text(program(text), encoding="utf-8")
    return python(folder, ALONE, name)


def python(folder: Path, driver: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a driver in a folder, in a process forked from one that has imported torch."""
    out, err = folder / "stdout", folder / "stderr"
    forking = warm()
    forking.stdin.write(json.dumps([str(folder), TYPING + driver, words]) + "\n")
    forking.stdin.flush()
    code = int(forking.stdout.readline())
    return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


@functools.cache
def warm() -> subprocess.Popen[str]:
    """The process that forks, with the `bespoke` of this environment on its path; it ends with this one."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONWARNINGS": "error", "MPLBACKEND": "Agg"}
    # with -c, so that a process which a document starts does not begin with the document again
    forking = subprocess.Popen(
        [sys.executable, "-c", FORKING], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(forking.communicate)
    return forking


FORKING = r"""
import gc, json, os, signal, sys
import matplotlib.pyplot, sklearn.datasets, torch

gc.freeze()
for line in sys.stdin:
    folder, driver, words = json.loads(line)
    if not (child := os.fork()):
        os.chdir(folder)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.alarm(600)
        sys.argv = ["-c", *words]
        exec(compile(driver, "driver", "exec"), {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

TYPING = r"""
import json, os, pathlib, re, shlex, socket, subprocess, sys

served, asking = socket.socketpair()


def serve():
    import bespoke.cli.main, bespoke.runs.api
    with served, served.makefile("r") as lines:
        for line in lines:
            folder, words = json.loads(line)
            if not (child := os.fork()):
                os.chdir(folder)
                sys.argv = words
                sys.exit(bespoke.cli.main.main())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            served.sendall(bytes([code % 256]))


def typed(command):
    if re.search(r"[|&;<>$*?(){}~]", command):  # for a shell
        subprocess.run(["bash", "-e", "-o", "pipefail", "-c", command], check=True)
        return
    sys.stdout.flush()
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    asking.sendall(json.dumps([os.getcwd(), words]).encode() + b"\n")
    if code := asking.recv(1)[0]:
        raise subprocess.CalledProcessError(code, words)


if any("typed(" in pathlib.Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]) and not os.fork():
    asking.close()
    serve()
    os._exit(0)
served.close()
"""

ALONE = """
text = open(sys.argv[1], encoding="utf-8")
with asking, text:
    exec(compile(text.read(), sys.argv[1], "exec"), {"__name__": "__main__", "typed": typed})
"""

TOGETHER = """
import contextlib, traceback

for name in sys.argv[1:]:
    path = pathlib.Path(name)
    os.chdir(path.parent)
    with open("output", "w") as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = compile(path.read_text(encoding="utf-8"), path.name, "exec")
            exec(code, {"__name__": "__main__", "typed": typed})
            pathlib.Path("done").touch()
        except BaseException:
            traceback.print_exc()
asking.close()
"""


def run_together(texts: dict[str, str], folder: Path) -> dict[str, str | None]:
    """Run documents one after another in one process; by name what a failed one printed, None for a sound one."""
    for name, text in texts.items():
        (folder / name).mkdir()
        (folder / name / name).write_text(program(text), encoding="utf-8")
    ended = python(folder, TOGETHER, *(str(folder / name / name) for name in texts))
    outputs = {name: folder / name / "output" for name in texts}
    told = {name: path.read_text() if path.exists() else ended.stderr for name, path in outputs.items()}
    return {name: None if (folder / name / "done").exists() else told[name] for name in texts}


def test_there_is_a_readme():
    assert (ROOT / "README.md").is_file()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document_runs(path, tmp_path):
    done = run(path.read_text(encoding="utf-8"), tmp_path, path.name)
    assert done.returncode == 0, f"{path.relative_to(ROOT)}\n{done.stdout}\n{done.stderr}"


@functools.cache
def pages(names: tuple[str, ...], folder: Path) -> dict[str, str | None]:
    return run_together({path.name: path.read_text(encoding="utf-8") for path in PAGES if path.name in names}, folder)


@pytest.mark.xdist_group("pages")
@pytest.mark.parametrize("page", [path.name for path in PAGES])
def test_page_of_a_method_runs(page, request, tmp_path_factory):
    asked = {
        item.callspec.params["page"] for item in request.session.items if item.originalname == request.function.__name__
    }
    folder = tmp_path_factory.getbasetemp() / "pages"
    folder.mkdir(exist_ok=True)
    failed = pages(tuple(sorted(asked)), folder)[page]
    assert failed is None, failed


def test_pages_run_apart_in_one_process(tmp_path):
    good, other = "```python\nx = 1\nopen('file', 'w').close()\n```\n", "text\n\n```python\nassert x == 1\n```\n"
    found = run_together({"a.md": good, "b.md": other, "c.md": good, "d.md": "```python\nexit(3)\n```\n"}, tmp_path)
    assert found["a.md"] is found["c.md"] is None
    assert 'File "b.md", line 4' in found["b.md"] and "NameError" in found["b.md"]
    assert "SystemExit: 3" in found["d.md"]
    assert (tmp_path / "a.md" / "file").exists() and (tmp_path / "c.md" / "file").exists()


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


def test_the_way_from_a_file_to_a_recorded_number_is_short():
    """Every hop that the page on architecture names is there, and all together have at most 800 lines."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    lines = 0
    hops = re.findall(r"`(bespoke[\w.]*):([\w.]+)`", text)
    for module, name in hops:
        found = operator.attrgetter(name)(importlib.import_module(module))
        lines += len(inspect.getsource(found).splitlines())
    assert len(hops) > 30 and lines <= 800, lines


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
