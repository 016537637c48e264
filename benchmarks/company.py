"""Whether a run gives the same numbers alone and beside others: one training, repeated, and compared round by round.

``python benchmarks/company.py`` trains pFedFDA on CIFAR-100 for 30 rounds: alone, alone once more, alone with cuBLAS
told to be deterministic, alone while another process holds all but ``--left`` GB of the memory, alone under NVIDIA's
multi-process service (MPS), and beside ``--others`` copies of itself under it. For each it says in which round, and in
which values of ``rounds.jsonl``, it first differs from the first one, and what the run noted: where memory runs out,
blocks are halved, and sums are rounded differently. ``company.json`` beside this script keeps what was found. Another
experiment and other settings: ``--run``, ``--algorithm``, ``--set``.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import report
import torch

from bespoke.records import RunFolder
from bespoke.report.runs import flatten
from bespoke.tables import mps

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

# Holds the memory that is free but for some bytes, says so, and waits until its input ends.
HOLD = """
import sys, torch
held = torch.empty(max(0, torch.cuda.mem_get_info()[0] - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def started(words: list[str], out: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a run in a process of its own."""
    command = [sys.executable, "-m", "bespoke", "run", *words, "--quiet", "--out", str(out)]
    return subprocess.Popen(command, env=os.environ | environment)


def finished(runs: list[subprocess.Popen[bytes]]) -> None:
    """Wait for runs; one that failed ends the benchmark."""
    if any([run.wait() for run in runs]):
        raise SystemExit("a run failed: see above")


@contextmanager
def scarce(left: float) -> Iterator[None]:
    """Leave so many bytes of the GPU's memory to others."""
    command = [sys.executable, "-c", HOLD, str(int(left))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise SystemExit("the memory could not be held: see above")
        yield


def difference(first: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, Any]:
    """Return in which round two runs first differ, in which values, and by how much; nothing if they never do."""
    for one, two in zip(first, other, strict=True):
        mine, theirs = flatten(one), flatten(two)
        unequal = [key for key in mine if mine[key] != theirs.get(key)]
        if unequal:
            found = {key: _gap(mine[key], theirs.get(key)) for key in unequal}
            return {"round": one["round"], "values": {key: gap for key, gap in found.items() if gap is not None}}
    return {}


def _gap(one: Any, two: Any) -> dict[str, Any] | None:
    """Return how many of two values, or of two lists of them, differ, and by how much; nothing of what is no number."""
    pairs = list(zip(one, two, strict=True)) if isinstance(one, list) else [(one, two)]
    gaps = [abs(a - b) for a, b in pairs if isinstance(a, float) and isinstance(b, float) and a != b]
    return {"unequal": len(gaps), "of": len(pairs), "largest": max(gaps)} if gaps else None


def main() -> None:
    """Train under each condition, compare, and store what was found."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--run", default="pfedfda/cifar100_dir0.1")
    parser.add_argument("--algorithm", default="pfedfda")
    parser.add_argument("--set", nargs="*", default=["data.replay=42", "training.rounds=30"])
    parser.add_argument("--others", type=int, default=7)
    parser.add_argument("--left", type=float, default=30.0)
    given = parser.parse_args()
    words = [given.run, "--algorithm", given.algorithm, *(word for each in given.set for word in ("--set", each))]
    with tempfile.TemporaryDirectory(prefix="bespoke-company-") as held, ExitStack() as kept:
        folder, cases = Path(held), []
        for name, environment in (("alone", {}), ("alone again", {}), ("cuBLAS deterministic", DETERMINISTIC)):
            finished([started(words, folder / name, environment)])
            cases.append(name)
        if torch.cuda.is_available():
            with scarce(given.left * 1e9):
                finished([started(words, folder / "memory scarce", {})])
            cases.append("memory scarce")
        shared = kept.enter_context(mps.service())
        finished([started(words, folder / "alone under MPS", shared.environment)])
        names = ["beside others", *(f"other {number}" for number in range(1, given.others + 1))]
        finished([started(words, folder / name, shared.environment) for name in names])
        cases += ["alone under MPS", *names]
        rounds = {name: list(RunFolder(folder / name).rounds()) for name in cases}
        notes = {name: RunFolder(folder / name).read_json("environment.json")["notes"] for name in cases}
        found = [
            {"case": name, "notes": notes[name], **difference(rounds["alone"], rounds[name])} for name in cases[1:]
        ]
        for case in found:
            print(json.dumps(case))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        asked = {"command": words, "others": given.others, "left": given.left}
        report.store(given.out, device, **asked, mps=shared.words, cases=found)


if __name__ == "__main__":
    main()
