"""The examples run as they stand: the programs in a process each, the notebook's cells in order in one."""

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(folder, *words):
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here():
    tested = {"own_method.py", "own_images.py", "own_csv.py", "quickstart.ipynb"}
    assert {path.name for path in EXAMPLES.iterdir() if not path.name.startswith("__")} == tested


def test_own_method(tmp_path):
    out = run(tmp_path, EXAMPLES / "own_method.py")
    assert out.startswith("checked: is_frozen, ") and out.rstrip().count("accuracy") == 2
    fedavg, blend = (float(line.split("accuracy ")[1][:5]) for line in out.splitlines()[1:])
    assert blend > fedavg + 0.1


def test_own_images(tmp_path):
    out = run(tmp_path, EXAMPLES / "own_images.py", "pictures")
    assert sorted(path.stem for path in (tmp_path / "pictures").glob("*.safetensors")) == [
        "east",
        "north",
        "south",
        "west",
    ]
    right = int(out.splitlines()[-1].split(" of its ")[0].split()[-1])
    assert right > 30  # of 45


def test_own_csv(tmp_path):
    out = run(tmp_path, EXAMPLES / "own_csv.py", "tables")
    assert (tmp_path / "tables" / "sixth.safetensors").is_file()
    assert float(out.split()[-1]) > 0.85


CELLS = """
import json, sys
namespace = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
"""


def test_quickstart_notebook(tmp_path):
    path = EXAMPLES / "quickstart.ipynb"
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for cell in book["cells"]:
        assert cell["cell_type"] in ("code", "markdown") and isinstance(cell["source"], list)
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    out = run(tmp_path, "-c", CELLS, path)
    assert "fedavg: accuracy" in out and "fedrep: accuracy" in out
    assert float(out.split()[-1]) > 0.9 and (tmp_path / "clinic 0.safetensors").is_file()
