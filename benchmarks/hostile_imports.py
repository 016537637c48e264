"""What hostile files do to ``bespoke data import``: exit code, sentence, and memory above the size at start.

Run with ``python benchmarks/hostile_imports.py [PART OF A NAME]``. Each file is built in a temporary folder, small on
disk, and imported in a child process with a data folder of its own. The script exits with 1 if an import ends in
anything but one sentence and exit code 2, leaves something behind, or takes more than 300 MB. The libraries of the
readers are loaded before a child starts. The tests use the same files, with less inside.
"""

import contextlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hostile_files import CASES, Case

MOST_MB, SECONDS = 300, 300
SIZE = 2**29  # bytes inside a bomb


def peak_mb() -> float:
    """Return the most memory that this process ever had."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def in_a_child(work: Callable[[], Any]) -> Any:
    """Return the result of some work in a child process, as JSON carries it; None where the child was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else None


def imported(data: str, paths: list[str], root: Path) -> tuple[int, str, float]:
    """Import files: exit code, what was printed, and MB above the size at start; code -1 for a traceback."""
    from bespoke.cli.main import main

    start = peak_mb()
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_DATA, (2**33, 2**33))  # a bomb that goes off harms nobody else
    os.environ["BESPOKE_DATA"] = str(root)
    sys.argv = ["bespoke", "data", "import", data, *paths]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        return -1, traceback.format_exception_only(error)[-1].strip(), peak_mb() - start
    return code, printed.getvalue().strip(), peak_mb() - start


def received(case: Case, folder: Path) -> tuple[bool, str]:
    """Import a hostile file, and return whether that went well, and a line of the table."""
    paths = in_a_child(lambda: [str(path) for path in case.build(folder, SIZE)])
    known = {path: (os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths}
    root = folder / "data"
    answer = in_a_child(lambda: imported(case.data, paths, root))
    code, said, memory = answer or (-1, "killed", float("inf"))
    left = [path.name for path in root.iterdir() if not path.name.endswith(".lock")]
    touched = any((os.stat(path).st_size, os.stat(path).st_mtime_ns) != known[path] for path in paths)
    good = code == 2 and "\n" not in said and memory <= MOST_MB and not left and not touched
    size = sum(os.stat(path).st_size for path in paths) / 1e6
    said = said.replace(f"{folder}/", "")
    return good, f"{case.name} | {size:.3f} | {code} | {memory:.0f} | {said[:300]}{'' if good else ' | BAD'}"


def main() -> int:
    """Import all cases, or those whose name contains the argument; return the exit code."""
    import scipy.io
    import scipy.signal
    from PIL import Image

    import bespoke.cli.main
    from bespoke.data.sources import acquire, catalogue

    assert scipy.io and scipy.signal and bespoke.cli.main and acquire and catalogue
    Image.init()
    chosen = [case for case in CASES if "".join(sys.argv[1:2]) in case.name]
    bad = 0
    print("file | MB on disk | exit code | MB above start | sentence")
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            good, line = received(case, Path(folder))
        bad += not good
        print(line, flush=True)
    print(f"{len(chosen)} hostile files, {bad} of them badly received")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
