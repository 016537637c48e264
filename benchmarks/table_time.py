"""How long a table takes: the 24 CIFAR-10 cells of pFedFDA's Table 2 on one GPU, by one command.

``python benchmarks/table_time.py`` needs CUDA and the real CIFAR-10. It runs ``bespoke sweep`` in a folder of its own
with a copy of ``results/`` that lacks the seed asked for, so that the sweep knows which trainings are long. It prints
the seconds, and writes ``table_time.json`` beside itself; ``--keep FOLDER`` keeps the results.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report

TABLE, CELLS, TRAININGS = "pfedfda/t2", ("cifar10_dir0.1", "cifar10_dir0.5"), 24
BAR = 300.0  # seconds


def main() -> int:
    """Run the sweep, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", default="auto")
    parser.add_argument("--keep", default="", help="a folder for the results")
    chosen = parser.parse_args()
    report.needs_cuda()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        here = Path(__file__).parent.parent / "results"
        if here.exists():
            shutil.copytree(here, results)
        for cell in CELLS:
            for old in (results / TABLE / cell).glob(f"*/{chosen.seed}.json"):
                old.unlink()
        command = [sys.executable, "-m", "bespoke", "sweep", TABLE, "--cells", *CELLS, "--seeds", str(chosen.seed)]
        command += ["--results", str(results), "--work", str(Path(folder) / "runs"), "--jobs", chosen.jobs]
        begin = time.perf_counter()
        code = subprocess.run(command).returncode
        taken = time.perf_counter() - begin
        made = sorted((results / TABLE).glob(f"cifar10_*/*/{chosen.seed}.json"))
        names = [f"{path.parent.parent.name}/{path.parent.name}" for path in made]
        own = {name: json.loads(path.read_text())["seconds"] for name, path in zip(names, made, strict=True)}
        if chosen.keep:
            for path in made:
                kept = Path(chosen.keep) / path.relative_to(results)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, kept)
    print(f"{len(own)} of {TRAININGS} cells in {taken:.0f} s (at most {BAR:.0f})")
    report.store(chosen.out, "cuda", table=TABLE, seed=chosen.seed, seconds=taken, cells=own, jobs=chosen.jobs)
    return int(code or taken > BAR or len(own) < TRAININGS)


if __name__ == "__main__":
    sys.exit(main())
