"""Where a round of pFedFDA's CIFAR-10 run goes: on the device by kind of kernel, and what the host does meanwhile.

Rounds on made-up images of CIFAR-10's form are timed, then four of them are looked at with torch's profiler, with marks
around the host's parts of a round; a pause of the device is divided by the innermost parts that the host is in
meanwhile. ``python benchmarks/round_profile.py`` needs CUDA; it prints a table and writes ``round_profile.json`` beside
itself.
"""

import contextlib
import functools
import json
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import report
import torch
from paper_run import EXPERIMENT, METHODS
from torch.profiler import ProfilerActivity, profile, record_function

from bespoke.clients import BatchedClients
from bespoke.clients.simulated import Simulated
from bespoke.engine.graphs import Recorded
from bespoke.records import RunFolder
from bespoke.runs import api
from bespoke.runs.bounds import Bound
from bespoke.runs.experiment import load
from bespoke.runs.federation import Federation

DATA = ["data.name=random", "data.like=cifar10", "data.rows=60000"]
PLAIN, LOOKED_AT = range(21, 41), range(46, 50)  # rounds: timed alone, and with the profiler
SHORT = 30.0  # microseconds: pauses up to here lie between the kernels of a graph
TICK = 10.0  # microseconds: longer ones are divided so finely
# The host's parts of a round, the outer ones first.
PARTS: dict[str, tuple[Any, str]] = {
    "train: prepare and launch": (Simulated, "train"),
    "train: a block's inputs": (BatchedClients, "_block"),
    "train: recorded calls": (Recorded, "call"),
    "train: steps": (Recorded, "run"),
    "cohort": (Federation, "cohort"),
    "broadcast": (Federation, "down"),
    "bound on uploads": (Bound, "judge"),
    "aggregation and its check": (Federation, "_aggregated"),
    "states": (Simulated, "accept"),
    "records": (RunFolder, "append"),
}
# What the profiler's names are called in the table; the first that occurs in a name counts.
KERNELS = {
    "_weight_gradient": "gradients of weights",
    "_sum_parts": "gradients of weights",
    "_input_gradient": "gradients of maps",
    "_forward": "convolutions",
    "_pack": "packing",
    "_sgd": "SGD",
    "_threefry": "keys",
    "gemm": "products",
    "cutlass": "products",
    "nvjet": "products",
    "potrf": "Cholesky factors and triangular solves",
    "trsm": "Cholesky factors and triangular solves",
    "trsv": "Cholesky factors and triangular solves",
    "Memcpy": "copies to and from the host",
    "Memset": "copies to and from the host",
}


def marked(stack: contextlib.ExitStack) -> None:
    """Put a mark of the profiler around each of the host's parts, until the stack closes."""
    for name, (owner, attribute) in PARTS.items():
        fn = getattr(owner, attribute)

        @functools.wraps(fn)
        def within(*args: Any, _fn: Any = fn, _name: str = name, **options: Any) -> Any:
            with record_function(_name):
                return _fn(*args, **options)

        setattr(owner, attribute, within)
        stack.callback(setattr, owner, attribute, fn)


def events(looked: profile) -> list[dict[str, Any]]:
    """Return what the profiler saw, by time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        looked.export_chrome_trace(str(path))
        found = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in found if "dur" in event), key=lambda event: event["ts"])


def analysed(found: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Return milliseconds of a round: the device's by kind of kernel, and its pauses by part of the host's round."""
    work = [event for event in found if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    marks = [event for event in found if event.get("cat") == "user_annotation" and event["name"] in PARTS]
    kinds, counts, names, pauses, within = Counter[str](), Counter[str](), Counter[str](), Counter[str](), 0.0
    busy, end, starts = 0.0, work[0]["ts"], [mark["ts"] for mark in marks]
    for event in work:
        kind = next((word for passage, word in KERNELS.items() if passage in event["name"]), "small operations")
        kinds[kind] += event["dur"]
        counts[kind] += 1
        names[event["name"][:100]] += event["dur"]
        pause = event["ts"] - end
        if pause > SHORT:
            parts = max(1, int(pause / TICK))
            for tick in range(parts):
                pauses[_part(marks, starts, end + (tick + 0.5) * pause / parts)] += pause / parts
        elif pause > 0:
            within += pause
        busy += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    scale = 1e-3 / rounds
    host = Counter[str]()
    for mark in marks:
        host[mark["name"]] += mark["dur"]
    return {
        "span": (end - work[0]["ts"]) * scale,
        "device": busy * scale,
        "kernels": {kind: [time * scale, counts[kind] / rounds] for kind, time in kinds.most_common()},
        "pauses in graphs": within * scale,
        "pauses": {name: time * scale for name, time in pauses.most_common()},
        "host": {name: host[name] * scale for name in PARTS},
        "largest": {name: time * scale for name, time in names.most_common(40)},
    }


def _part(marks: list[dict[str, Any]], starts: list[float], moment: float) -> str:
    """Return the innermost part of the host's round that contains a moment, or what it comes after."""
    before = marks[: bisect_right(starts, moment)]
    inside = [mark for mark in before[-200:] if moment < mark["ts"] + mark["dur"]]
    if inside:
        return str(inside[-1]["name"])
    return f"after {before[-1]['name']}" if before else "before the first mark"


def measure(method: str) -> dict[str, Any]:
    """Return a method's round, timed and looked at."""
    rounds = [f"training.rounds={LOOKED_AT.stop}"]
    experiment, _ = load(EXPERIMENT, method, [*METHODS.get(method, []), *DATA, *rounds], 0)
    ends: dict[int, float] = {}
    stack, looked = contextlib.ExitStack(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def note(event: Any) -> None:
        ends[event.round] = perf_counter()
        if event.round == LOOKED_AT.start - 1:
            marked(stack)
            stack.enter_context(looked)
        if event.round == LOOKED_AT.stop - 1:
            torch.cuda.synchronize()
            stack.close()

    api.run(experiment, device="cuda", precision="bf16", callbacks=[note], progress=False)
    plain = median(ends[number] - ends[number - 1] for number in PLAIN)
    return {"method": method, "ms": 1e3 * plain} | analysed(events(looked), len(LOOKED_AT))


def main() -> int:
    """Measure, print and store."""
    parser = report.parser(__doc__, __file__)
    parser.add_argument("--methods", default=",".join(METHODS))
    chosen = parser.parse_args()
    report.needs_cuda()
    runs = [measure(method) for method in chosen.methods.split(",")]
    for run in runs:
        with_profiler = f"{run['span']:.1f} with the profiler, {run['device']:.1f} on the device"
        print(f"{run['method']}: {run['ms']:.1f} ms a round; {with_profiler}")
        for kind, (time, count) in run["kernels"].items():
            print(f"    {time:7.3f} ms {count:7.0f} x  {kind}")
        print(
            f"    {run['pauses in graphs']:7.3f} ms in pauses up to {SHORT:g} us; longer ones, by what the host does:"
        )
        for name, time in run["pauses"].items():
            print(f"    {time:7.3f} ms  {name}")
        print(
            "    the host's parts, each with those inside it: "
            + ", ".join(f"{n} {t:.2f}" for n, t in run["host"].items())
        )
    report.store(chosen.out, "cuda", runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
