"""Two processes in one run's folder: races that exactly one of them must win, and that must not harm the run.

Every race starts ``bespoke run`` twice in one folder, at once or a moment apart: in a new folder without and with
``--resume``, and in that of an interrupted run. One process must finish, the other be refused with exit code 2 and one
sentence that names the first, and the records and the last checkpoint must be those of an undisturbed run, to the bit.
Run with ``python benchmarks/races.py COUNT ROUNDS``, by default 24 races of runs of 20 rounds; it prints one line of
JSON for each race and exits with 1 if one failed.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

import bespoke
from bespoke.cli.main import main as command_line

KINDS = ("new", "new, resumed", "interrupted, resumed", "new, a moment apart")
RECORDS = ("rounds.jsonl", "clients.jsonl")
EXPERIMENT = """
[data]
name = "gaussian"
rows = 160
dim = 4
num_classes = 3
clients = 6
[model]
name = "linear"
[algorithm]
name = "ditto"
[training]
rounds = {rounds}
batch = 8
rate = 0.5
[evaluation]
every = 5
"""


def child(root: Path, arguments: Sequence[str], gate: int, wait: float) -> int:
    """Fork a process that runs ``bespoke ARGUMENTS`` once the gate opens; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        with (root / f"{os.getpid()}.err").open("w") as said, redirect_stderr(said), redirect_stdout(said):
            sys.argv = ["bespoke", *arguments]
            os.read(gate, 1)
            time.sleep(wait)
            command_line()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        os._exit(code)


def together(root: Path, arguments: Sequence[str], waits: Sequence[float]) -> list[tuple[int, int, str]]:
    """Run ``bespoke ARGUMENTS`` in one process for each wait, all at once; return pids, exit codes and messages."""
    reader, gate = os.pipe()
    pids = [child(root, arguments, reader, wait) for wait in waits]
    os.write(gate, b"!" * len(pids))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.close(reader)
    os.close(gate)
    return [(pid, code, (root / f"{pid}.err").read_text()) for pid, code in zip(pids, codes, strict=True)]


def result(folder: Path) -> dict[str, bytes]:
    """Return the bytes of a run that do not depend on time: records, and the newest checkpoint's tensors."""
    newest = max(folder.glob("checkpoints/??????.safetensors"))
    return {path.name: path.read_bytes() for path in (*(folder / name for name in RECORDS), newest)}


def race(root: Path, kind: str, whole: dict[str, bytes]) -> str:
    """Let two processes run in one folder; return what went wrong, or nothing."""
    folder = Path(tempfile.mkdtemp(dir=root)) / "run"
    path, short = root / "x.toml", root / "short.toml"
    if kind.startswith("interrupted"):
        together(root, ["run", str(short), "--out", str(folder)], [0.0])
    arguments = ["run", str(path), "--out", str(folder), *(["--resume"] if "resumed" in kind else [])]
    apart = random.uniform(0.0, 0.2) if "apart" in kind else 0.0
    ended = sorted(together(root, arguments, [0.0, apart]), key=lambda one: one[1])
    (winner, first, _), (_, second, said) = ended
    if (first, second) != (0, 2):
        return f"exit codes {first} and {second}: {ended}"
    lines = [line for line in said.splitlines() if not line.startswith("note: ")]
    named = f"pid {winner})" in said or "already holds a run" in said
    if len(lines) != 1 or not lines[0].startswith(f"bespoke: {folder} ") or not named:
        return f"the loser said {said!r}"
    return "" if result(folder) == whole else "another result than that of an undisturbed run"


def main(count: int = 24, rounds: int = 20) -> int:
    """Run so many races of runs of so many rounds, and print each; return how many failed."""
    torch.set_num_threads(1)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for file, number in (("x.toml", rounds), ("short.toml", rounds // 2)):
            (root / file).write_text(EXPERIMENT.format(rounds=number))
        bespoke.run(root / "x.toml", root / "whole")  # here, so that what torch loads when first used is loaded once
        whole = result(root / "whole")
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            problem = race(root, kind, whole)
            failed += bool(problem)
            print(json.dumps({"race": number + 1, "kind": kind, "problem": problem}), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
